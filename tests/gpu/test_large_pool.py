"""A pool whose flat rows pass 2**31. Catches: an offset held in 32 bits anywhere between the ledger and a kernel."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tidekv import ConfigError, DeviceKVPool, HostKVPool, KVGeometry, ReqToTokenPool
from tidekv.allocator import DynamicPagedTokenToKVPoolAllocator
from tidekv.kernels.attention import paged_attention, paged_attention_ref
from tidekv.memory.ledger import LOW

PAGE_SIZE, TOKENS, REQUESTS = 64, 300, 4


def make(on_gpu: bool, device: str) -> DynamicPagedTokenToKVPoolAllocator:
    """One head of one bf16 number; the last pages are handed out first, so that every cell lies far up."""
    layers, pages = (16, 2_200_000) if on_gpu else (16, 40)
    geometry = KVGeometry(layers, pages, PAGE_SIZE, 1, 1, torch.bfloat16)
    if on_gpu:
        assert geometry.flat_rows > 2**31
    allocator = DynamicPagedTokenToKVPoolAllocator(
        pages * PAGE_SIZE,
        PAGE_SIZE,
        torch.bfloat16,
        device,
        DeviceKVPool(geometry, device),
        host_pool=HostKVPool(geometry, 64 * geometry.page_bytes),
        req_to_token_pool=ReqToTokenPool(REQUESTS, 1024, device),
        low_max_pages=0,
        dynamic_max_pages=2,
    )
    free = allocator.ledger.free_list
    free.pages, free.version = free.pages[::-1].copy(), free.version + 1
    return allocator


def test_int32_tables_are_refused(on_gpu: bool, device: str) -> None:
    if not on_gpu:
        pytest.skip("the small pool fits int32")
    geometry = KVGeometry(16, 2_200_000, PAGE_SIZE, 1, 1, torch.bfloat16)
    with pytest.raises(ConfigError, match="int32"):
        DynamicPagedTokenToKVPoolAllocator(
            geometry.num_pages * PAGE_SIZE,
            PAGE_SIZE,
            torch.bfloat16,
            device,
            DeviceKVPool(geometry, "meta"),
            host_pool=HostKVPool(geometry, 0),
            req_to_token_pool=ReqToTokenPool(1, 8, device, torch.int32),
        )


def test_a_life_beyond_2_to_the_31(on_gpu: bool, device: str) -> None:
    """Extend, write, decode, halve and merge, remap, restore, attend, free: at rows beyond 2**31, bit for bit."""
    allocator = make(on_gpu, device)
    pool, geometry = allocator.req_to_token_pool, allocator.geometry
    assert pool is not None
    rows = pool.alloc(REQUESTS)
    assert rows is not None
    lens = torch.full((REQUESTS,), TOKENS - 1)
    prefix, last = torch.zeros_like(lens), torch.full((REQUESTS,), -1, device=device)
    found = allocator.alloc_extend(prefix.to(device), prefix, lens.to(device), lens, last, int(lens.sum()), False)
    assert found is not None
    locs = found[0].view(REQUESTS, -1)
    ends = allocator.alloc_decode((lens + 1).to(device), lens + 1, locs[:, -1].contiguous(), [False] * REQUESTS)
    assert ends is not None
    locs = torch.cat([locs, ends[0][:, None]], 1)
    for row, mine in zip(rows, locs, strict=True):
        pool.write((row, slice(0, TOKENS)), mine)
    written = {}
    for layer in range(geometry.layer_num):
        pair = [torch.randn(REQUESTS * TOKENS, 1, 1, device=device).to(torch.bfloat16) for _ in range(2)]
        written[layer] = pair
        allocator.write_kv(layer, locs.reshape(-1), *pair)
    if on_gpu:
        assert int(locs.max()) + (geometry.layer_num - 1) * geometry.pool_stride > 2**31

    def check() -> torch.Tensor:
        now = pool.req_to_token[torch.tensor(rows, device=device), :TOKENS].reshape(-1)
        for layer, pair in written.items():
            for mine, want in zip(allocator.read_kv(layer, now), pair, strict=True):
                assert torch.equal(mine.view(torch.int16), want.view(torch.int16)), f"layer {layer}"
        return now

    check()
    assert allocator._halve_and_repack(LOW, 0), allocator.refusals
    narrow = check()
    assert (narrow // PAGE_SIZE >= geometry.page_stride).any(), "no slot lies in the second half of a page"
    if on_gpu:
        assert int(narrow.max()) > 2**30
    assert allocator._halve_and_repack(LOW, 0), allocator.refusals
    twice = check()
    if on_gpu:
        assert int(twice.max()) > 2**30
    assert allocator.restore_widths(64, start_free=0.0, stop_free=0.0) > 0
    wide = check()

    # Attention over the last layer of the flat tensors, by a table of flat pages; a cell's rows pass 2**31 there.
    layer = geometry.layer_num - 1
    table = (wide.view(REQUESTS, TOKENS)[:, ::PAGE_SIZE] // PAGE_SIZE + layer * geometry.page_stride).contiguous()
    query = torch.randn(REQUESTS, 1, 1, device=device).to(torch.bfloat16)
    cu_q, kv_lens = torch.arange(REQUESTS + 1, device=device), torch.full((REQUESTS,), TOKENS, device=device)
    flats = (allocator.kvcache.k_flat, allocator.kvcache.v_flat)
    mine = paged_attention(query, *flats, table, cu_q, kv_lens, PAGE_SIZE, 1.0, max_q=1)[0]
    twin = paged_attention_ref(query, *flats, table, cu_q, kv_lens, PAGE_SIZE, 1.0)[0]
    torch.testing.assert_close(mine, twin, rtol=3e-2, atol=3e-2)
    if on_gpu:
        assert int(table.max()) * PAGE_SIZE > 2**31
    allocator.free(wide)
    assert allocator.num_free_pages == geometry.num_pages
    assert np.all(allocator.ledger.page_code == 0)
