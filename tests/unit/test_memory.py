"""The pools by themselves: views, rows, sizes."""

import numpy as np
import pytest
import torch

from oracle import make_allocator
from tidekv import ConfigError, DeviceKVPool, DoubleFreeError, HostKVPool, KVGeometry, ReqToTokenPool
from tidekv.memory.loc_holders import LocHolders

GEOMETRY = KVGeometry(3, 5, 2, 2, 4, torch.float32)


def test_layer_buffers_are_views_of_the_flat_tensor():
    pool = DeviceKVPool(GEOMETRY, "cpu")
    assert pool.k_flat.shape == pool.v_flat.shape == (3 * 6 * 2, 2, 4)
    assert pool.get_layer_num() == 3
    pool.get_key_buffer(1)[3] = 7.0
    pool.get_value_buffer(2)[0] = 8.0
    assert (pool.k_flat[1 * 12 + 3] == 7.0).all()
    assert (pool.v_flat[24] == 8.0).all()
    assert pool.k_flat.count_nonzero() == pool.v_flat.count_nonzero() == 8
    for bad in (-1, 3):
        with pytest.raises(ConfigError, match="layer"):
            pool.get_key_buffer(bad)


def test_host_pool_holds_all_layers_of_a_page():
    host = HostKVPool(GEOMETRY, 4 * GEOMETRY.page_bytes + 5)
    assert host.num_pages == 4
    assert host.k_flat.shape == host.v_flat.shape == (3 * 4 * 2, 2, 4)
    assert host.flat_pages(2, torch.tensor([0, 3])).tolist() == [8, 11]
    assert host.pinned == torch.cuda.is_available()
    assert HostKVPool(GEOMETRY, 0).num_pages == 0
    with pytest.raises(ConfigError, match="capacity_bytes"):
        HostKVPool(GEOMETRY, -1)


def test_a_meta_pool_has_books_and_no_storage():
    pool = DeviceKVPool(GEOMETRY, "meta")
    assert not pool.has_storage
    assert pool.k_flat.shape == (36, 2, 4)


def test_req_to_token_rows():
    pool = ReqToTokenPool(3, 6, "cpu")
    rows = pool.alloc(2)
    assert len(set(rows)) == 2
    assert pool.available_size() == 1
    assert pool.alloc(2) is None
    assert pool.available_size() == 1
    pool.write((rows[0], slice(0, 4)), torch.tensor([4, 5, 6, 7]))
    pool.write((torch.tensor(rows), torch.tensor([4, 0])), torch.tensor([8, 9]))
    assert pool.req_to_token[rows[0]].tolist() == [4, 5, 6, 7, 8, 0]
    assert pool.live_rows().tolist() == sorted(rows)
    pool.free(rows[0])
    assert not pool.req_to_token[rows[0]].any()
    assert pool.req_to_token[rows[1], 0] == 9
    assert pool.available_size() == 2


def test_req_to_token_refuses_what_is_not_live():
    pool = ReqToTokenPool(3, 6, "cpu")
    (row,) = pool.alloc(1)
    other = (row + 1) % 3
    for rows in (other, [row, row], [row, other], 3, -1):
        with pytest.raises(DoubleFreeError):
            pool.free(rows)
    with pytest.raises(ConfigError, match="not live"):
        pool.write((other, slice(0, 1)), 4)
    with pytest.raises(ConfigError, match="max_context_len"):
        pool.write((row, slice(0, 7)), 4)
    assert pool.live_rows().tolist() == [row]
    assert not pool.req_to_token.any()
    for size, length in ((0, 1), (1, 0)):
        with pytest.raises(ConfigError):
            ReqToTokenPool(size, length, "cpu")
    with pytest.raises(ConfigError, match="index_dtype"):
        ReqToTokenPool(1, 1, "cpu", torch.int16)
    with pytest.raises(ConfigError, match="n must"):
        pool.alloc(-1)


def test_lookup_table_rewrites_live_rows_and_holders_once():
    """Catches: a dead row rewritten, a holder forgotten, the sink or a "none" moved, an offset lost."""
    pool = ReqToTokenPool(2, 4, "cpu", torch.int32)
    live, dead = pool.alloc(2)
    pool.write((live, slice(0, 3)), torch.tensor([190, 191, 14]))
    pool.write((dead, slice(0, 1)), torch.tensor([190]))
    pool._live[dead] = False  # a stale entry that nobody owns
    holders = LocHolders(pool, 4)
    fixed, coming = torch.tensor([[188], [0]]), [torch.tensor([-1, 189], dtype=torch.int32)]
    leave = holders.register(fixed)
    holders.register(lambda: coming)
    table = np.arange(88)
    table[47] = 14
    holders.remap(table)
    assert pool.req_to_token[live].tolist() == [58, 59, 14, 0]
    assert pool.req_to_token[dead, 0] == 190
    assert fixed.tolist() == [[56], [0]]
    assert coming[0].tolist() == [-1, 57]
    leave()
    table[14] = 3
    holders.remap(table)
    assert fixed.tolist() == [[56], [0]]
    assert coming[0].tolist() == [-1, 13]
    with pytest.raises(ConfigError, match="holder"):
        holders.register([1, 2])


def test_a_holder_may_say_none():
    a = make_allocator()
    out, _ = a.alloc(4)
    a.register_loc_holder(torch.cat([out, torch.tensor([0, -1])]))
    a.check()


def test_int32_rows_are_refused_where_a_location_would_not_fit():
    from tidekv import DynamicPagedTokenToKVPoolAllocator

    geometry = KVGeometry(32, 2**20, 64, 8, 128, torch.bfloat16)
    pool = DeviceKVPool(geometry, "meta")
    options = {"host_pool": HostKVPool(geometry, 0)}
    arguments = (2**26, 64, torch.bfloat16, "cpu", pool)
    with pytest.raises(ConfigError, match="int32"):
        DynamicPagedTokenToKVPoolAllocator(
            *arguments, req_to_token_pool=ReqToTokenPool(1, 1, "cpu", torch.int32), **options
        )
    DynamicPagedTokenToKVPoolAllocator(*arguments, req_to_token_pool=ReqToTokenPool(1, 1, "cpu"), **options)
