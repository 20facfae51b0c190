"""Whatever is refused leaves every bit as it was: books, K and V on both sides, req_to_token, holders."""

from functools import partial

import numpy as np
import pytest
import torch

from cache_cases import HIGH, LOW, assert_reads, new_request, row_locs
from oracle import assert_same, make_allocator, snapshot
from tidekv import ConfigError, DeviceKVPool, DoubleFreeError, DynamicPagedTokenToKVPoolAllocator, KVGeometry
from tidekv.errors import InvariantError


def busy(width):
    """P = 6: a low request of 10 tokens and a high one of 5, at full width or after a halving of low; a holder."""
    a = make_allocator(8, 6, 4, dynamic_max_pages=1, low_max_pages=0)
    low, _low_serials = new_request(a, 10, False, 1)
    high, _high_serials = new_request(a, 5, True, 101)
    if width == "narrow":
        assert a._halve_and_repack(LOW, 0)
    a.register_loc_holder(row_locs(a, low, 10)[:4].clone())
    return a, row_locs(a, low, 10), row_locs(a, high, 5)


@pytest.fixture(params=["full", "narrow"])
def cache(request):
    return busy(request.param)


def refused(a, error, match, call):
    before = snapshot(a)
    with pytest.raises(error, match=match):
        call()
    assert_same(before, snapshot(a))
    a.check()


def none(a, call):
    before = snapshot(a)
    result = call()
    assert result is None or result is False
    assert_same(before, snapshot(a))
    a.check()


def test_pool_full():
    a = make_allocator(2, 3, 4)  # two layers: a full pool stays full
    row, serials = new_request(a, 12, False, 1)
    none(a, lambda: a.alloc(1))
    none(a, lambda: a.alloc(1, False))
    none(a, lambda: a.ensure_capacity(1, HIGH))
    seq = torch.tensor([13])
    none(a, lambda: a.alloc_decode(seq, seq, row_locs(a, row, 12)[-1:].clone(), False))
    assert_reads(a, row_locs(a, row, 12), serials)


def test_one_page_short():
    a = make_allocator(2, 5, 4)
    new_request(a, 8, True, 1)
    none(a, lambda: a.alloc(13))
    zero, seq = torch.tensor([0, 0]), torch.tensor([8, 5])
    last = torch.tensor([-1, -1])
    none(a, lambda: a.alloc_extend(zero, zero, seq, seq, last, 13, [True, False]))
    assert len(a.alloc(12)[0]) == 12


def test_one_page_short_at_the_end_of_all_pressure(cache):
    """Everything was tried in the books, nothing of it happened."""
    a, _low, _high = cache
    everything = 5 * 4 * 4  # 5 pages of 4 slots and one of staging
    none(a, lambda: a.alloc(everything, False))


def test_longer_than_the_pool_can_ever_hold(cache):
    a, _low, _high = cache
    none(a, lambda: a.alloc(10_000))
    none(a, lambda: a.ensure_capacity(2500, LOW))
    zero, seq = torch.tensor([0]), torch.tensor([10_000])
    none(a, lambda: a.alloc_extend(zero, zero, seq, seq, torch.tensor([-1]), 10_000, False))


def test_host_pool_full():
    a = make_allocator(8, 4, 4, host_pages=3)
    row, serials = new_request(a, 16, False, 1)
    none(a, lambda: a.alloc(1, False))
    none(a, lambda: a._halve_and_repack(LOW, 0))
    none(a, lambda: a.park(row_locs(a, row, 16)))
    assert_reads(a, row_locs(a, row, 16), serials)


def test_a_wrong_last_loc(cache):
    a, low, _high = cache
    seq, priority = torch.tensor([11]), False
    for wrong in (int(low[9]) + 1, int(low[9]) - 1, int(low[9]) + 4 * 4, -1, 10**9 * 4 + 1, int(low[9]) - 4000):
        last = torch.tensor([wrong])
        refused(a, ConfigError, "last_loc", lambda last=last: a.alloc_decode(seq, seq, last, priority))
        prefix, to = torch.tensor([10]), torch.tensor([13])
        extend = partial(a.alloc_extend, prefix, prefix, to, to, last, 3, priority)
        refused(a, ConfigError, "last_loc", extend)
    prefix, to = torch.tensor([8]), torch.tensor([9])  # a new page, but the last token does not end one
    last = low[6:7].clone()
    refused(a, ConfigError, "last_loc", lambda: a.alloc_extend(prefix, prefix, to, to, last, 1, priority))


def test_last_slots_that_are_not_those_of_last_loc(cache):
    """A caller whose own copy of the rows missed a move would stage and write another request's page."""
    a, low, _high = cache
    seq, last, slot = torch.tensor([11]), low[9:10].clone(), int(low[9]) // 4
    wrong = np.array([slot + 1])
    refused(a, ConfigError, "last_slots", lambda: a.alloc_decode(seq, seq, last, False, last_slots=wrong))
    prefix, to = torch.tensor([10]), torch.tensor([13])
    extend = partial(a.alloc_extend, prefix, prefix, to, to, last, 3, False)
    refused(a, ConfigError, "last_slots", lambda: extend(last_slots=wrong))
    assert extend(last_slots=np.array([slot])) is not None


def test_wrong_dtype_shape_or_place(cache):
    a, low, _high = cache
    seq, last = torch.tensor([11]), low[9:10].clone()
    calls = {
        "last_loc must be int64": lambda: a.alloc_decode(seq, seq, last.int(), False),
        r"last_loc must have shape \(1,\)": lambda: a.alloc_decode(seq, seq, last.view(1, 1), False),
        "seq_lens must be int64": lambda: a.alloc_decode(seq.float(), seq, last, False),
        "seq_lens must have shape": lambda: a.alloc_decode(torch.tensor([11, 11]), seq, last, False),
        "seq_lens_cpu must be int64": lambda: a.alloc_decode(seq, seq.float(), last, False),
        "seq_lens_cpu must be a 1-d": lambda: a.alloc_decode(seq, [11], last, False),
        "seq_lens must be on cpu": lambda: a.alloc_decode(seq.to("meta"), seq, last, False),
        "last_loc must be a tensor": lambda: a.alloc_decode(seq, seq, [42], False),
        "is_high_priority must be a bool tensor": lambda: a.alloc_decode(seq, seq, last, torch.tensor([1])),
        "one entry for each": lambda: a.alloc_decode(seq, seq, last, [True, False]),
        "free_index must be": lambda: a.free(last.float()),
        "free_index must be an": lambda: a.free([4]),
        "need_size": lambda: a.alloc(-1),
        "priority_code": lambda: a.ensure_capacity(1, 3),
        "pages_needed": lambda: a.ensure_capacity(-1, LOW),
    }
    for match, call in calls.items():
        refused(a, ConfigError, match, call)


def test_lengths_that_do_not_fit(cache):
    a, low, _high = cache
    last = low[9:10].clone()

    def extend(prefix, seq, tokens):
        p, s = torch.tensor(prefix), torch.tensor(seq)
        return a.alloc_extend(p, p, s, s, last, tokens, False)

    refused(a, ConfigError, "extend_num_tokens must be 3", lambda: extend([10], [13], 4))
    refused(a, ConfigError, "0 <= prefix_len <= seq_len", lambda: extend([10], [9], -1))
    refused(a, ConfigError, "0 <= prefix_len <= seq_len", lambda: extend([-2], [9], 11))
    refused(a, ConfigError, "prefix_lens has 1", lambda: extend([10], [12, 13], 5))


BAD_FREES = {
    "page 0": ([2], "page 0 is the sink"),
    "the sink of another cell": ([7 * 4 * 4 + 1], "page 0 is the sink"),
    "negative": ([-3], "out of range"),
    "out of range": ([8 * 7 * 4], "out of range"),
    "far out of range": ([2**40], "out of range"),
    "never handed out": ([6 * 4 + 1], "never allocated"),
    "another cell of a page": ([(1 + 7) * 4], "never allocated"),
    "twice in one call": ([4, 5, 4], "twice in one call"),
}


@pytest.mark.parametrize("name", BAD_FREES)
def test_bad_frees(name):
    """Alone, and with a good location in the same call, inside a free group and outside."""
    locs, match = BAD_FREES[name]
    a, _low, high = busy("full")
    good = [int(high[0])]
    for group in (False, True):
        if group:
            a.free_group_begin()
        refused(a, DoubleFreeError, match, lambda: a.free(torch.tensor(locs)))
        refused(a, DoubleFreeError, match, lambda: a.free(torch.tensor(good + locs)))
    a.free_group_end()
    assert (a.low_used, a.high_used) == (3, 2)


def test_a_staging_slot_cannot_be_freed():
    a, _low, _high = busy("narrow")
    page = int((a.ledger.page_code == 3).argmax())
    refused(a, DoubleFreeError, "not handed out", lambda: a.free(torch.tensor([page * 4])))


def test_double_frees(cache):
    a, low, _high = cache
    page = low[:4].clone()
    a.free_group_begin()
    a.free(page[:1])
    refused(a, DoubleFreeError, "twice in one free group", lambda: a.free(page[1:2]))
    a.free_group_begin()  # a second begin loses nothing
    refused(a, DoubleFreeError, "twice in one free group", lambda: a.free(page))
    a.req_to_token_pool.write((0, slice(0, 10)), 0)
    a.loc_holders._others.clear()
    used = a.low_used
    a.free_group_end()
    assert a.ledger.occupied.sum() == 4
    assert a.low_used <= used
    refused(a, DoubleFreeError, "freed before", lambda: a.free(page))  # across the group
    a.free_group_end()  # nothing open: nothing happens
    a.check()


def test_the_last_slot_returns_the_page():
    a, low, _high = busy("narrow")
    a.loc_holders._others.clear()
    locs = low.clone()
    a.req_to_token_pool.write((0, slice(0, 10)), 0)
    free = a.num_free_pages
    slots = sorted(set((locs // 4).tolist()))
    pages = [s % 7 for s in slots]
    a.check()
    shared = next(p for p in pages if pages.count(p) == 2)
    first, second = (s for s in slots if s % 7 == shared)
    a.free(torch.tensor([first * 4]))
    assert a.num_free_pages == free
    a.free(torch.tensor([second * 4 + 3]))
    assert a.num_free_pages == free + 1
    a.check()


def test_construction_refuses_what_does_not_fit_the_pool():
    geometry = KVGeometry(8, 6, 4, 1, 1, torch.float32)
    pool = DeviceKVPool(geometry, "cpu")
    for arguments, match in (
        ((20, 4, torch.float32), "size must be 24"),
        ((24, 2, torch.float32), "page_size must be 4"),
        ((24, 4, torch.float16), "dtype must be"),
    ):
        with pytest.raises(ConfigError, match=match):
            DynamicPagedTokenToKVPoolAllocator(*arguments, "cpu", pool)
    with pytest.raises(ConfigError, match="min_slot_width"):
        DynamicPagedTokenToKVPoolAllocator(24, 4, torch.float32, "cpu", pool, min_slot_width=9)


def test_read_and_write_refuse_what_is_not_there(cache):
    a, low, _high = cache
    k = torch.zeros(1, 1, 1)
    refused(a, ConfigError, "not handed out", lambda: a.read_kv(0, torch.tensor([0])))
    refused(a, ConfigError, "layer must", lambda: a.read_kv(8, low))
    refused(a, ConfigError, "k must be", lambda: a.write_kv(0, low, k, k))
    refused(a, ConfigError, "v must be", lambda: a.write_kv(0, low[:1], k, k.double()))


def test_the_checker_finds_what_is_planted(cache):
    """Catches a checker that trusts what it should recount."""
    a, low, high = cache
    a.check()
    state = a.backup_state()
    plants = {
        "used": lambda ledger: ledger.used.__setitem__(LOW, 5),
        "page_code": lambda ledger: ledger.page_code.__setitem__(int(low[0]) // 4 % 7, HIGH),
        "occupied": lambda ledger: ledger.occupied.__setitem__(int(high[0]) // 4, False),
        "page 0": lambda ledger: ledger.free_list.put(torch.zeros(1, dtype=torch.int64).numpy()),
        "host": lambda ledger: setattr(ledger, "host_free", ledger.host_free[1:]),
        "free list": lambda ledger: ledger.free_list.put(ledger.free_list.all_pages()[:1]),
    }
    for name, plant in plants.items():
        if name == "free list" and not a.num_free_pages:
            continue
        plant(a.ledger)
        with pytest.raises(InvariantError):
            a.check()
        a.restore_state(state)
        a.check()
    a.req_to_token_pool.write((1, slice(0, 4)), low[:4])  # a slot of two requests; a holder names it, so it may be
    a.check()
    a.loc_holders._others.clear()
    with pytest.raises(InvariantError, match="two requests"):
        a.check()
