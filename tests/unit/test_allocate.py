"""What an allocation returns: locations, order, staging. Numbers for L = 8, P = 10, page_size = 4: page_stride 11."""

import numpy as np
import pytest
import torch

from cache_cases import DYNAMIC, HIGH, LOW, decode, extend, new_request
from oracle import make_allocator
from tidekv.memory import contract


def test_full_width_is_an_ordinary_paged_pool():
    a = make_allocator()
    out, dynamic = extend(a, [(0, 6), (0, 3)], [-1, -1])
    assert out.tolist() == [4, 5, 6, 7, 8, 9, 12, 13, 14]
    assert out.dtype == torch.int64
    assert dynamic is None
    out, dynamic = extend(a, [(6, 9), (3, 3)], [9, 14])
    assert out.tolist() == [10, 11, 16]
    assert dynamic is None
    out, dynamic = decode(a, [10, 4], [16, 14])
    assert out.tolist() == [17, 15]
    assert dynamic is None
    out, dynamic = decode(a, [11, 5], [17, 15])
    assert out.tolist() == [18, 20]
    assert (a.high_used, a.low_used, a.dynamic_used, a.num_free_pages) == (5, 0, 0, 5)
    out, dynamic = a.alloc(5)
    assert out.tolist() == [24, 25, 26, 27, 28]
    assert dynamic is None
    a.check()


@pytest.mark.parametrize("form", [list, tuple, iter, torch.tensor])
def test_each_new_page_gets_the_code_of_its_request(form):
    """Catches: a request that opens two pages or none shifting the codes of those behind it."""
    is_high = [False, True, True, False] * 8
    several, opens = np.array([2, 0, 1, 3] * 8), np.array([True, False, True, False] * 8)
    assert contract.codes_of_new_pages(form(is_high), several, 48).tolist() == [LOW, LOW, HIGH, LOW, LOW, LOW] * 8
    assert contract.codes_of_new_pages(form(is_high), opens, 16).tolist() == [LOW, HIGH] * 8
    few = np.arange(32) == 5  # so few that only their entries of a list are read
    assert contract.codes_of_new_pages(form(is_high), few, 1) in ([HIGH], np.array([HIGH]))
    assert [contract.codes_of_new_pages(one, several, 48) for one in (None, True, False)] == [HIGH, HIGH, LOW]


def codes_of(allocator, locs):
    """Priority code of the page of each location."""
    return allocator.ledger.page_code[(locs // 4 % 11).numpy()].tolist()


@pytest.mark.parametrize("form", [list, torch.tensor])
@pytest.mark.parametrize("write_through", [False, True])
def test_a_mixed_batch_equals_two_calls_high_before_low(form, write_through):
    """Catches: results in the group's order, pages of one group given to the other, wrong page counts."""
    lens, is_high = [(0, 5), (0, 4), (0, 9), (0, 1)], [False, True, False, True]
    mixed, parts = (make_allocator(write_through=write_through) for _ in range(2))
    assert not mixed.mixed_in_one_run  # on a CPU
    out, dynamic = extend(mixed, lens, [-1] * 4, form(is_high))
    assert dynamic is None
    high, _ = extend(parts, [lens[1], lens[3]], [-1] * 2, True)
    low, _ = extend(parts, [lens[0], lens[2]], [-1] * 2, False)
    assert torch.equal(out, torch.cat([low[:5], high[:4], low[5:], high[4:]]))
    assert (mixed.high_used, mixed.low_used) == (parts.high_used, parts.low_used) == (2, 5)
    assert mixed.ledger.page_code.tolist() == parts.ledger.page_code.tolist()
    assert mixed.ledger.backed.tolist() == parts.ledger.backed.tolist()
    assert mixed.new_slots.tolist() == [3, 4, 1, 5, 6, 7, 2]
    # Decode: requests 0, 2 and 3 go on in their pages, request 1 opens page 8.
    last = [int(out[i]) for i in (4, 8, 17, 18)]
    step, _ = decode(mixed, [6, 5, 10, 2], last, form(is_high))
    high, _ = decode(parts, [5, 2], [last[1], last[3]], True)
    low, _ = decode(parts, [6, 10], [last[0], last[2]], False)
    assert torch.equal(step, torch.stack([low[0], high[0], low[1], high[1]]))
    mixed.check()


@pytest.mark.parametrize("form", [list, torch.tensor])
@pytest.mark.parametrize("write_through", [False, True])
def test_a_mixed_batch_is_one_pass_over_the_free_list_in_the_callers_order(form, write_through):
    """Catches: results in the group's order, a page booked for the other class, wrong page counts."""
    lens, is_high = [(0, 5), (0, 4), (0, 9), (0, 1)], [False, True, False, True]
    a = make_allocator(write_through=write_through)
    a.mixed_in_one_run = True  # as on CUDA
    out, dynamic = extend(a, lens, [-1] * 4, form(is_high))
    assert dynamic is None
    assert out.tolist() == [*range(4, 9), *range(12, 16), *range(16, 25), 28]  # pages 1, 2 | 3 | 4, 5, 6 | 7
    assert codes_of(a, out) == [LOW] * 5 + [HIGH] * 4 + [LOW] * 9 + [HIGH]
    assert (a.high_used, a.low_used) == (2, 5)
    assert a.new_slots.tolist() == [1, 2, 3, 4, 5, 6, 7]
    # Decode: requests 0, 2 and 3 go on in their pages, request 1 opens page 8.
    step, _ = decode(a, [6, 5, 10, 2], [int(out[i]) for i in (4, 8, 17, 18)], form(is_high))
    assert step.tolist() == [9, 32, 25, 29]
    assert codes_of(a, step) == [LOW, HIGH, LOW, HIGH]
    assert np.flatnonzero(a.ledger.backed).tolist() == ([1, 2, 4, 5, 6] if write_through else [])
    a.check()


def test_a_mixed_batch_beside_narrow_slots_is_in_the_callers_order_too():
    """Low takes its partial slot, high a fresh page: each request must find its own."""
    a = narrow_low()  # page 1 cut to slots at 1 (occupied) and 5 (partial); page 2 is staging
    out, _ = extend(a, [(0, 4), (0, 6), (0, 2)], [-1] * 3, [True, False, True])
    assert a.new_slots.tolist() == [3, 1 + 4 * 11, 5, 4]  # high page 3 | low slot 5 of page 1, new page 5 | high page 4
    assert [a.geometry.decode(int(loc))[:2] for loc in out[[0, 4, 8, 10]]] == [(3, 1), (1, 5), (5, 1), (4, 1)]
    a.check()


def narrow_low(low_pages: int = 1, **options):
    """L = 8, P = 10: `low_pages` low pages at width 4, staging in the next page."""
    a = make_allocator(dynamic_max_pages=1, **options)
    new_request(a, 4 * low_pages, False, 1)
    assert a._halve_and_repack(LOW, 10)
    assert (a.low_current_slot_width, a.high_current_slot_width) == (4, 8)
    assert a.dynamic_used == 1
    return a


def test_partial_slots_first_then_fresh_pages():
    a = narrow_low()  # page 1 cut to slots at 1 (occupied) and 5 (partial); page 2 is staging
    pages, starts = a._allocate_pages(4, LOW)
    assert pages.tolist() == [1, 3, 3, 4]
    assert starts.tolist() == [5, 1, 5, 1]
    assert pages.dtype == starts.dtype == torch.int64
    assert a.ledger.partial_slots(LOW, 1).tolist() == [4 + 4 * 11]
    pages, starts = a._allocate_pages(2, HIGH)  # high is full width still
    assert (pages.tolist(), starts.tolist()) == ([5, 6], [1, 1])
    a.check()


def test_locations_of_narrow_slots_are_encoded():
    a = narrow_low()
    out, _ = extend(a, [(0, 6)], [-1], False)
    # slot (page 1, start 5) = combined 1 + 4 * 11 = 45, then (page 3, start 1)
    assert out.tolist() == [180, 181, 182, 183, 12, 13]


def test_no_staging_at_full_width_even_beside_narrow_slots():
    a = narrow_low()
    out, dynamic = extend(a, [(0, 6)], [-1], True)
    assert out.tolist() == [12, 13, 14, 15, 16, 17]
    assert dynamic is None


def test_staging_locations_of_narrow_tokens():
    """Catches: a sink where staging is needed, a pair shared by two slots, an offset that differs from the token's."""
    a = narrow_low()
    out, dynamic = extend(a, [(0, 3), (0, 6)], [-1, -1], [True, False])
    assert out.tolist() == [12, 13, 14, 180, 181, 182, 183, 16, 17]
    # Page 2 is staging: pairs of cells at starts 1, 3, 5, 7 -> combined 2, 24, 46, 68. Slots in ascending order: 4, 45.
    assert dynamic.tolist() == [0, 0, 0, 96, 97, 98, 99, 8, 9]
    assert dynamic.dtype == torch.int64
    assert a.ledger.page_code[dynamic[3:].numpy() // 4 % 11].tolist() == [DYNAMIC] * 6
    assert torch.equal(dynamic[3:] % 4, out[3:] % 4)
    # The next call is a new step: the pairs are used again, for the two pages that go on and need no new slot.
    out, dynamic = decode(a, [4, 7], [14, 17], [True, False])
    assert out.tolist() == [15, 18]
    assert dynamic[0] == 0
    assert int(dynamic[1]) // 4 % 11 == 2
    assert int(dynamic[1]) % 4 == 2
    a.check()


def test_a_step_keeps_its_dynamic_slots_and_gives_them_back():
    a = narrow_low()
    with a.step():
        _, first = extend(a, [(0, 4)], [-1], False)
        _, second = extend(a, [(0, 4)], [-1], False)
        assert len(set((first // 4).tolist()) | set((second // 4).tolist())) == 2
        assert a.ledger.dynamic_of[45] == int(first[0]) // 4
    assert not a.ledger.dynamic_of.any()
    a.check()


def test_staging_grows_when_a_step_narrows_more_slots_than_its_pages_hold():
    a = narrow_low()  # one staging page: 4 pairs
    _, dynamic = extend(a, [(0, 4 * 6)], [-1], False)
    assert len(set((dynamic // 4).tolist())) == 6
    assert a.dynamic_used == 2
    with a.step():
        assert a.dynamic_used == 1  # over its budget, and idle: given back
    a.check()


@pytest.mark.parametrize("seed", range(30))
def test_available_size_is_exact(seed, monkeypatch):
    """Catches a count that forgets staging, host pages or partial slots, in either direction."""
    generator = torch.Generator().manual_seed(seed)

    def draw(n):
        return int(torch.randint(0, n, (1,), generator=generator))

    a = make_allocator(8, 6, 4, host_pages=(40, 5)[draw(2)], low_max_pages=draw(4), dynamic_max_pages=1 + draw(2))
    held = []
    for _ in range(12):
        got = a.alloc(1 + draw(16), bool(draw(2)))
        if got is not None:
            held.append(got[0])
        if len(held) > 2 and draw(2):
            at = draw(len(held))
            if len(a.refusals) + a.num_repacks == 0:  # nothing moved: what we hold is what is there
                a.free(held.pop(at))
        if draw(4) == 0:
            a._halve_and_repack((HIGH, LOW)[draw(2)], draw(6))
    monkeypatch.setattr(a, "_try_backpressure", lambda: False)
    for high in (True, False):
        n = a.available_size(high)
        assert n % 4 == 0
        state = a.backup_state()
        assert a.alloc(n + 1, high) is None
        out, _ = a.alloc(n, high)
        assert len(out.unique()) == n
        a.check()
        a.restore_state(state)
    assert a.available_size() == a.available_size(True)


def test_an_empty_batch_and_no_tokens():
    a = make_allocator()
    out, dynamic = extend(a, [(0, 0)], [-1])
    assert (out.tolist(), dynamic) == ([], None)
    out, _ = a.alloc(0)
    assert out.tolist() == []
    empty = torch.empty(0, dtype=torch.int64)
    out, _ = a.alloc_decode(empty, empty, empty, [])
    assert out.tolist() == []
    a.free(empty)
    assert a.num_free_pages == 10


def test_freed_pages_come_back_lowest_first():
    for need_sort in (True, False):
        a = make_allocator(2, 3, 1, need_sort=need_sort)
        a.alloc(3)
        a.free(torch.tensor([3]))
        a.free(torch.tensor([1, 2]))
        assert a.alloc(3)[0].tolist() == [1, 2, 3]


def test_clear():
    a = narrow_low(2)
    a.clear()
    assert (a.num_free_pages, a.low_current_slot_width, a.dynamic_used) == (10, 8, 0)
    assert a.alloc(40)[0].tolist() == list(range(4, 44))
