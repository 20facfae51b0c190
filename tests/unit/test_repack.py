"""Halving, merging and remapping with exact rows, and the rungs of the pressure ladder. L = 8, page_stride 11."""

import random

import numpy as np
import pytest
import torch

from cache_cases import HIGH, LOW, assert_reads, decode, extend, new_request, page_cells, row_locs, write
from oracle import assert_same, k_bits, least_pages, make_allocator, snapshot
from tidekv.pressure.ladder import Rung
from tidekv.pressure.plan import Refusal, plan_repack


def cell(serials, layer):
    """K bits of one cell: these tokens in this layer."""
    return k_bits(serials, 8)[:, layer].tolist()


def test_a_page_loses_layers():
    """[L0..L7] -> [L0 L2 L4 L6 | free x4] -> [L0 L4 | free x2 | free x4], every layer still there bit for bit."""
    a = make_allocator(dynamic_max_pages=1)
    row, serials = new_request(a, 4, False, 1)
    assert page_cells(a, 1) == [cell(serials, layer) for layer in range(8)]

    assert a._halve_and_repack(LOW, 10)
    assert page_cells(a, 1)[:4] == [cell(serials, layer) for layer in (0, 2, 4, 6)]
    assert row_locs(a, row, 4).tolist() == [4, 5, 6, 7]  # halving moves no slot
    assert a.ledger.partial_slots(LOW, 1).tolist() == [1 + 4 * 11]
    (host,) = a.ledger.host_pages_of(np.array([1]))
    on_host = a.host_pool.k_flat.view(torch.int32).reshape(8, -1, 4)[:, host]
    assert on_host[1::2].tolist() == [cell(serials, layer) for layer in (1, 3, 5, 7)]
    assert_reads(a, row_locs(a, row, 4), serials)
    moved = a.repacker.counters
    assert moved.to_host_bytes == 4 * a.geometry.cell_bytes
    assert moved.device_bytes == 3 * a.geometry.cell_bytes
    a.check()

    assert a._halve_and_repack(LOW, 10)
    assert page_cells(a, 1)[:2] == [cell(serials, layer) for layer in (0, 4)]
    assert sorted(a.ledger.partial_slots(LOW, 2)) == [1 + 2 * 11, 1 + 4 * 11, 1 + 6 * 11]
    assert on_host[[2, 6]].tolist() == [cell(serials, layer) for layer in (2, 6)]
    assert_reads(a, row_locs(a, row, 4), serials)
    assert a.low_current_slot_width == 2
    a.check()

    before = snapshot(a)
    assert not a._halve_and_repack(LOW, 10)  # at its minimum width
    assert_same(before, snapshot(a))
    assert "minimum width 2" in a.refusals[-1]


def test_donor_and_receiver():
    """Two pages become one: the donor is free (code 0, width 0), its slot lies in the receiver's second half."""
    a = make_allocator(dynamic_max_pages=1)
    row, serials = new_request(a, 8, False, 1)  # pages 1 and 2
    holder = torch.tensor([6, 9, 0])
    a.register_loc_holder(holder)
    plan = plan_repack(a.ledger, LOW, 1)
    assert str(plan) == "halve to level 1 low: 2 slots shrink, 1 move, 1 pages freed, 1 to staging"
    assert (plan.shrink.tolist(), plan.moves.src.tolist(), plan.moves.dst.tolist()) == ([1, 2], [1], [2 + 4 * 11])
    lookup = plan.lookup(88)
    assert lookup[1] == 46
    assert (np.delete(lookup, 1) == np.delete(np.arange(88), 1)).all()

    assert a._halve_and_repack(LOW, 1)
    assert page_cells(a, 2) == [cell(serials[4:], x) for x in (0, 2, 4, 6)] + [
        cell(serials[:4], x) for x in (0, 2, 4, 6)
    ]
    assert row_locs(a, row, 8).tolist() == [184, 185, 186, 187, 8, 9, 10, 11]
    assert holder.tolist() == [186, 9, 0]
    assert (a.ledger.page_code[1], a.ledger.page_level[1], a.ledger.page_occupied[1]) == (0, -1, 0)
    assert (a.low_used, a.dynamic_used, a.num_free_pages) == (1, 1, 8)
    assert 1 in a.free_pages.tolist()
    assert_reads(a, row_locs(a, row, 8), serials)
    a.check()


def test_only_the_excess_is_merged():
    a = make_allocator(8, 10, high_reserved_pages=5, dynamic_max_pages=1)
    row, serials = new_request(a, 4 * 6, True, 1)
    assert a._halve_and_repack(HIGH, a.budgets.high_reserved_pages)
    assert a.high_used == 5  # one page over budget: one is freed; the others keep a free half each
    assert len(a.ledger.partial_slots(HIGH, 1)) == 4
    assert_reads(a, row_locs(a, row, 24), serials)


def test_a_fixed_number_of_launches():
    """Catches a loop over pages: 2 pages or 60, the same launches."""
    launches = []
    for pages in (2, 60):
        a = make_allocator(8, 64, 1, max_context_len=64, dynamic_max_pages=1)
        new_request(a, pages, False, 1)
        a._halve_and_repack(LOW, 0)
        launches.append(a.repacker.counters.launches)
    assert launches == [3, 3]  # back up, halve in page, merge


def test_last_loc_is_carried_through_the_lookup_table():
    """The call itself repacks: the next token goes beside its predecessor's new place."""
    a = make_allocator(8, 4, 4, low_max_pages=0, dynamic_max_pages=1)
    row, serials = new_request(a, 6, False, 1)
    new_request(a, 8, False, 101)
    last = row_locs(a, row, 6)[5].clone()
    with_new_page = [(6, 7), (0, 1)]
    out, dynamic = extend(a, with_new_page, [int(last), -1], False)
    now = row_locs(a, row, 6)
    assert int(now[5]) != int(last)
    assert int(out[0]) == int(now[5]) + 1
    assert (dynamic > 0).all()
    assert_reads(a, now, serials)
    assert a.num_halvings == {HIGH: 0, LOW: 1}


def test_low_and_high_differ_only_by_their_budgets():
    """The same load on either class, the same locations and moves."""
    traces = []
    for code in (HIGH, LOW):
        a = make_allocator(8, 10, low_max_pages=3, high_reserved_pages=3, dynamic_max_pages=1, write_through=False)
        row, serials = new_request(a, 24, code == HIGH, 1)
        trace = [a._halve_and_repack(code, 3), row_locs(a, row, 24).tolist()]
        out, dynamic = a.alloc(10, code == HIGH)
        trace += [out.tolist(), dynamic.tolist(), a._halve_and_repack(code, 0), row_locs(a, row, 24).tolist()]
        trace += [a.restore_widths(2), row_locs(a, row, 24).tolist(), a.ledger.used[code], a.dynamic_used]
        traces.append(trace)
        assert_reads(a, row_locs(a, row, 24), serials)
    assert traces[0] == traces[1]


@pytest.mark.parametrize("layer_num", [8, 9])
def test_merging_finds_all_that_can_be_merged(layer_num):
    """Against an exhaustive search over sets of donors, on pools with leftovers of earlier halvings and restores.

    Catches a merge that only pairs pages with exactly one free slot, that does not split a donor over several
    receivers, or that forgets pages which were narrow before this halving.
    """
    rng = random.Random(layer_num)
    compared = merged_several_levels = 0
    for _ in range(120):
        a = make_allocator(layer_num, 9, 1, rows=1, min_slot_width=1, dynamic_max_pages=1)
        held: list[torch.Tensor] = []
        a.register_loc_holder(lambda held=held: held)
        for _ in range(rng.randint(5, 20)):
            move = rng.random()
            if move < 0.4:
                got = a.alloc(rng.randint(1, 4), rng.random() < 0.5)
                held += [] if got is None else [loc.clone().view(1) for loc in got[0]]
            elif move < 0.6 and held:
                a.free(held.pop(rng.randrange(len(held))))
            elif move < 0.85:
                a._halve_and_repack(rng.choice((HIGH, LOW)), rng.randint(5, 9))
            else:
                a.restore_widths(rng.randint(0, 1), start_free=0.0, stop_free=0.0)
        code, keep = rng.choice((HIGH, LOW)), rng.randint(0, 4)
        ledger = a.ledger
        target = int(ledger.level[code]) + 1
        pages = np.flatnonzero(ledger.page_code == code)
        levels = np.maximum(ledger.page_level[pages], target)
        used = len(pages)
        groups = [ledger.page_occupied[pages[levels == v]].tolist() for v in range(len(ledger.ladder))]
        least = sum(least_pages(counts, 2**v) for v, counts in enumerate(groups))
        need_staging = max(0, 1 - int(ledger.used[3]) - ledger.num_free_pages) if ledger.any_narrow or used else 0
        serials = write(a, torch.cat([*held, torch.empty(0, dtype=torch.int64)]), 10)
        if not a._halve_and_repack(code, keep):
            continue
        assert a.ledger.used[code] == max(min(keep, used - need_staging), least), (groups, keep)
        a.check()
        assert_reads(a, torch.cat([*held, torch.empty(0, dtype=torch.int64)]), serials)
        compared += 1
        merged_several_levels += sum(map(bool, groups)) > 1 and least < used
    assert compared > 60
    assert merged_several_levels > 3


# ---- rungs ------------------------------------------------------------------------------------------------------


class Cache:
    """A prefix cache reduced to one thing: pages that nobody references."""

    def __init__(self, locs):
        self.locs = list(locs)

    @property
    def evictable_pages(self):
        return len(self.locs)

    def peek_evictable(self, n):
        return np.array(self.locs[:n], dtype=np.int64)

    def evict(self, n):
        dropped, self.locs = self.peek_evictable(n), self.locs[n:]
        return dropped


def test_rung_0_evicts_before_anything_narrows():
    a = make_allocator(8, 4)
    row, serials = new_request(a, 8, False, 1)
    cached, _ = a.alloc(8)
    a.evictor = Cache(cached[::4].tolist())
    out, dynamic = a.alloc(4)
    assert dynamic is None
    assert out.tolist() == [12, 13, 14, 15]  # the first cached page
    assert a.evictor.locs == [16]
    assert a.num_halvings == {HIGH: 0, LOW: 0}
    assert_reads(a, row_locs(a, row, 8), serials)
    a.check()


def test_rung_0_a_refused_allocation_evicts_nothing():
    a = make_allocator(2, 3)  # two layers: nothing can narrow
    new_request(a, 8, False, 1)
    cached, _ = a.alloc(4)
    a.evictor = Cache([int(cached[0])])
    before = snapshot(a)
    assert a.alloc(8) is None
    assert_same(before, snapshot(a))
    assert a.evictor.locs == [12]
    assert a.alloc(4)[0].tolist() == [12, 13, 14, 15]


def half_empty_low_pages(tokens):
    """P = 4: two low pages at the minimum width, half empty each, one page of staging, one high page."""
    a = make_allocator(4, 4, 4, low_max_pages=4, dynamic_max_pages=1)
    row, serials = new_request(a, tokens, False, 1)
    assert a._halve_and_repack(LOW, 4)
    new_request(a, 4, True, 101)
    assert (a.low_used, a.high_used, a.dynamic_used, a.num_free_pages) == (2, 1, 1, 0)
    return a, row, serials


def test_rung_0_merges_half_empty_pages_without_halving():
    a, row, serials = half_empty_low_pages(8)
    out, dynamic = a.alloc(4, True)
    assert dynamic is None
    assert (a.low_used, a.high_used, a.num_merges) == (1, 2, 1)
    assert a.num_halvings == {HIGH: 0, LOW: 1}
    assert len(out) == 4
    assert_reads(a, row_locs(a, row, 8), serials)
    a.check()


def test_rung_0_merges_the_slots_that_a_mixed_batch_does_not_need():
    """The batch's low requests need no page: their class's half-empty pages can go to the high ones all the same."""
    a, row, serials = half_empty_low_pages(7)
    out, dynamic = extend(a, [(7, 8), (0, 1)], [int(row_locs(a, row, 7)[6]), -1], [False, True])
    assert a.num_halvings == {HIGH: 0, LOW: 1}
    assert a.num_merges == 1
    assert int(out[0]) == int(row_locs(a, row, 7)[6]) + 1
    assert int(dynamic[0]) > 0
    assert int(dynamic[1]) == 0
    assert_reads(a, row_locs(a, row, 7), serials)
    a.check()


def test_rungs_1_to_4_in_their_order():
    a = make_allocator(8, 8, 1, low_max_pages=2, high_reserved_pages=3, dynamic_max_pages=1)
    low, low_serials = new_request(a, 4, False, 1)
    high, high_serials = new_request(a, 4, True, 101)
    rungs = []
    choose = a._pressure_state

    def spy(decision):
        from tidekv.pressure import ladder

        state = choose(decision)
        action = ladder.choose(state)
        rungs.append(None if action is None else action.rung)
        return state

    a._pressure_state = spy
    while a.alloc(1, False) is not None:
        a.check()
    order = [r for i, r in enumerate(rungs) if r not in rungs[:i]]
    assert [r for r in order if r not in (Rung.MERGE,)] == [
        Rung.LOW_OVER_BUDGET,
        Rung.HIGH_OVER_BUDGET,
        *(r for r in (Rung.LOW_FORCED, Rung.HIGH_FORCED) if r in order),
        None,
    ]
    assert_reads(a, row_locs(a, low, 4), low_serials)
    assert_reads(a, row_locs(a, high, 4), high_serials)
    assert (a.low_current_slot_width, a.high_current_slot_width) == (2, 2)


def test_rung_5_nothing_left():
    """None, and nothing changed: 2 pages of 2 slots at the minimum width, all in use, and one page of staging."""
    a = make_allocator(4, 3, 4, dynamic_max_pages=1)
    row, serials = new_request(a, 4, False, 1)
    served = 1
    while a.alloc(4, False) is not None:
        served += 1
    assert served == 4  # 2 pages of 2 slots
    before = snapshot(a)
    assert a.alloc(1, False) is None
    assert not a.ensure_capacity(1, LOW)
    assert decode(a, [5], [int(row_locs(a, row, 4)[3])], False) is None
    assert_same(before, snapshot(a))
    assert_reads(a, row_locs(a, row, 4), serials)


def test_a_full_host_pool_refuses_the_plan_whole_and_the_next_rung_is_taken():
    a = make_allocator(8, 8, 1, host_pages=4, low_max_pages=0, high_reserved_pages=8, dynamic_max_pages=1)
    low, low_serials = new_request(a, 5, False, 1)
    high, high_serials = new_request(a, 3, True, 101)
    assert isinstance(plan_repack(a.ledger, LOW, 0), Refusal)
    before = snapshot(a)
    assert not a._halve_and_repack(LOW, 0)
    assert_same(before, snapshot(a))
    _out, dynamic = a.alloc(1, True)
    assert a.num_halvings == {HIGH: 1, LOW: 0}
    assert a.low_current_slot_width == 8
    assert "5 host pages needed, 4 of 4 free" in a.refusals[-1]
    assert int(dynamic[0]) > 0
    assert_reads(a, row_locs(a, low, 5), low_serials)
    assert_reads(a, row_locs(a, high, 3), high_serials)
    a.check()


def test_without_a_host_pool_nothing_ever_narrows():
    a = make_allocator(8, 2, host_pages=0)
    new_request(a, 8, False, 1)
    before = snapshot(a)
    assert a.alloc(1) is None
    assert_same(before, snapshot(a))
    assert (a.low_current_slot_width, a.high_current_slot_width) == (8, 8)


def test_frees_collected_before_a_repack_free_the_right_slots():
    """Catches a free group that keeps the ids from before the move."""
    a = make_allocator(dynamic_max_pages=1)
    gone, _ = new_request(a, 4, False, 1)
    row, serials = new_request(a, 4, False, 101)
    a.free_group_begin()
    a.free(row_locs(a, gone, 4))
    a.req_to_token_pool.free(gone)
    assert a._halve_and_repack(LOW, 1)
    a.free_group_end()
    a.check()
    assert_reads(a, row_locs(a, row, 4), serials)
    assert a.ledger.occupied.sum() == 1
