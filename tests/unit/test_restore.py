"""The ways back and out: restore with hysteresis, park, promote, write-through, backup. L = 8 unless said."""

import numpy as np
import pytest
import torch

from cache_cases import HIGH, LOW, assert_reads, extend, new_request, page_cells, row_locs
from oracle import assert_same, k_bits, make_allocator, snapshot
from tidekv import ConfigError, DoubleFreeError


def narrow_pool(pages=6, num_pages=16, **options):
    """`pages` low requests of one page each, halved and merged to as few pages as there can be."""
    options = {"dynamic_max_pages": 1, "low_max_pages": 0, **options}
    a = make_allocator(8, num_pages, 4, rows=32, **options)
    rows = [new_request(a, 4, False, 1 + 10 * i) for i in range(pages)]
    assert a._halve_and_repack(LOW, 0)
    return a, rows


def test_widening_brings_every_layer_back_to_its_cell():
    a, [(row, serials), *_] = narrow_pool(2)
    assert a.restore_widths() == 2
    locs = row_locs(a, row, 4)
    page = int(locs[0]) // 4
    assert page <= 16  # slot_start 1: an ordinary page again
    assert page_cells(a, page) == [k_bits(serials, 8)[:, layer].tolist() for layer in range(8)]
    assert_reads(a, locs, serials)
    assert (a.low_current_slot_width, a.dynamic_used, a.low_used) == (8, 0, 2)
    assert len(a.ledger.host_free) == a.host_pool.num_pages
    assert a.repacker.counters.from_host_bytes == 2 * 4 * a.geometry.cell_bytes
    a.check()


def test_thresholds():
    """Nothing below 25 % free; widening stops at 12.5 %. P = 16: 4 pages and 2 pages."""
    a, rows = narrow_pool(12)  # 12 slots in 6 pages, 1 page of staging: 9 free
    assert (a.low_used, a.dynamic_used, a.num_free_pages) == (6, 1, 9)
    filler, _ = a.alloc(6 * 4, True)
    assert a.num_free_pages == 3
    before = snapshot(a)
    assert a.restore_widths() == 0
    assert_same(before, snapshot(a))
    a.free(filler[:4])
    assert a.num_free_pages == 4
    assert a.restore_widths() == 2
    assert a.num_free_pages >= 2
    assert a.low_current_slot_width == 8
    for row, serials in rows:
        assert_reads(a, row_locs(a, row, 4), serials)
    a.check()


def test_oldest_first_and_at_most_as_many_as_told():
    a, rows = narrow_pool(6)
    assert a.restore_widths(max_slots=2) == 2
    wide = [int(row_locs(a, row, 4)[0]) // 4 for row, _ in rows]
    assert a.ledger.page_level[np.array(wide) % 17].tolist() == [0, 0, 1, 1, 1, 1]
    assert a.restore_widths(max_slots=0) == 0
    assert a.restore_widths() == 4
    assert not a.ledger.any_narrow
    a.check()


def test_high_widens_before_low():
    a, _ = narrow_pool(3)
    high, serials = new_request(a, 8, True, 101)
    assert a._halve_and_repack(HIGH, 0)
    assert a.restore_widths(max_slots=2) == 2
    assert a.ledger.num_narrow == [0, 0, 3, 0]
    assert_reads(a, row_locs(a, high, 8), serials)


def test_thresholds_that_cannot_be():
    a, _ = narrow_pool(2)
    for start, stop in ((0.1, 0.2), (1.1, 0.1), (0.1, -0.1)):
        with pytest.raises(ConfigError, match="start_free"):
            a.restore_widths(start_free=start, stop_free=stop)


def test_no_ping_pong():
    """A steady load over capacity narrows once and stays; a swing of the load narrows a class once a level at most."""
    a = make_allocator(8, 16, 4, rows=40, low_max_pages=4, dynamic_max_pages=2)
    pool, rows, serial = a.req_to_token_pool, [], 1

    def add():
        nonlocal serial
        rows.append(new_request(a, 4, False, serial))
        serial += 10
        a.restore_widths()

    def drop():
        row, serials = rows.pop(0)
        assert_reads(a, row_locs(a, row, 4), serials)
        a.free(row_locs(a, row, 4))
        pool.free(row)
        a.restore_widths()

    for _ in range(20):
        add()
    first = dict(a.num_halvings)
    assert first == {HIGH: 0, LOW: 1}
    restored = a.num_restores
    for _ in range(100):
        drop()
        add()
    assert a.num_halvings == first
    assert a.num_restores == restored
    swings = 5
    for _ in range(swings):
        while len(rows) > 4:
            drop()
        assert not a.ledger.any_narrow
        while len(rows) < 20:
            add()
        a.check()
    # 3 widths: a swing up can halve twice. What is halved on the way up is widened on the way down, not in between.
    assert a.num_halvings[LOW] <= 1 + 2 * swings
    assert a.num_halvings[HIGH] == 0
    for row, serials in rows:
        assert_reads(a, row_locs(a, row, 4), serials)


# ---- park and unpark -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("halvings", [0, 1, 2])
@pytest.mark.parametrize("halve_before_unpark", [False, True])
def test_park_and_unpark(halvings, halve_before_unpark):
    """Width 0 and back, from every width to every width, bit for bit, also in a last page that is not full."""
    a = make_allocator(8, 10, 4, dynamic_max_pages=1)
    row, serials = new_request(a, 10, False, 1)
    other, other_serials = new_request(a, 4, False, 101)
    for _ in range(halvings):
        assert a._halve_and_repack(LOW, 10)
    hosts = a.park(row_locs(a, row, 10))
    a.req_to_token_pool.free(row)
    assert len(set(hosts.tolist())) == 3
    assert a.ledger.occupied.sum() == 1
    a.check()
    new_request(a, 8, True, 201)  # others use the room
    if halve_before_unpark and halvings < 2:
        assert a._halve_and_repack(LOW, 0)
    locs = a.unpark(hosts, False)
    assert locs.shape == (12,)
    assert locs.dtype == torch.int64
    (row,) = a.req_to_token_pool.alloc(1)
    a.req_to_token_pool.write((row, slice(0, 10)), locs[:10])
    assert_reads(a, locs[:10], serials)
    assert_reads(a, row_locs(a, other, 4), other_serials)
    a.check()
    out, _ = extend(a, [(10, 12)], [int(locs[9])], False)
    assert out.tolist() == locs[10:].tolist()


def test_park_and_drop():
    a, rows = narrow_pool(2)
    everything = a.host_pool.num_pages
    hosts = a.park(row_locs(a, rows[0][0], 4))
    a.req_to_token_pool.free(rows[0][0])
    for bad in (np.array([int(hosts[0]) + 1]), np.array([-1]), np.array([everything]), np.repeat(hosts, 2)):
        before = snapshot(a)
        for use in (a.drop_parked, lambda pages: a.unpark(pages, False)):
            with pytest.raises(DoubleFreeError, match="parked"):
                use(bad)
        assert_same(before, snapshot(a))
    a.drop_parked(hosts)
    assert len(a.ledger.host_free) == everything - 1
    with pytest.raises(DoubleFreeError, match="parked"):
        a.drop_parked(hosts)
    a.check()


def test_park_is_refused_when_the_host_is_too_full():
    a = make_allocator(8, 10, 4, host_pages=2)
    row, _serials = new_request(a, 12, False, 1)
    before = snapshot(a)
    assert a.park(row_locs(a, row, 12)) is None
    assert_same(before, snapshot(a))
    a.free_group_begin()
    a.free(row_locs(a, row, 4))
    with pytest.raises(DoubleFreeError, match="free group"):
        a.park(row_locs(a, row, 8))
    a.free_group_end()
    assert a.high_used + a.low_used == 2


def test_unpark_presses_and_is_refused_without_a_trace():
    a = make_allocator(8, 3, 4, dynamic_max_pages=1)
    row, serials = new_request(a, 12, False, 1)
    hosts = a.park(row_locs(a, row, 12))
    a.req_to_token_pool.free(row)
    filler, filler_serials = new_request(a, 12, True, 101)
    locs = a.unpark(hosts, False)  # halves what is there
    assert a.num_halvings[HIGH] >= 1
    assert_reads(a, locs, serials)
    assert_reads(a, row_locs(a, filler, 12), filler_serials)
    a = make_allocator(2, 3, 4)
    row, _ = new_request(a, 12, False, 1)
    hosts = a.park(row_locs(a, row, 12))
    a.req_to_token_pool.free(row)
    new_request(a, 8, True, 101)
    before = snapshot(a)
    assert a.unpark(hosts, False) is None
    assert_same(before, snapshot(a))


# ---- promote, write-through --------------------------------------------------------------------------------------


def test_a_page_shared_with_a_high_request_becomes_a_high_page():
    a, rows = narrow_pool(4, 10)
    assert (a.low_used, a.high_used) == (2, 0)
    row, serials = rows[0]
    a.promote(row_locs(a, row, 4))
    assert (a.low_used, a.high_used) == (1, 1)
    assert a.ledger.num_narrow == [0, 2, 2, 0]  # the page's other slot comes along
    a.promote(row_locs(a, row, 4))
    assert (a.low_used, a.high_used) == (1, 1)
    for row, serials in rows:
        assert_reads(a, row_locs(a, row, 4), serials)
    a.check()


def test_written_through_pages_halve_without_a_copy_to_the_host():
    a = make_allocator(8, 10, 4, write_through=True, dynamic_max_pages=1)
    low, low_serials = new_request(a, 10, False, 1)
    high, high_serials = new_request(a, 4, True, 101)
    for halving in range(2):
        assert a._halve_and_repack(LOW, 0)
        assert a.repacker.counters.to_host_bytes == 0, halving
        assert_reads(a, row_locs(a, low, 10), low_serials)
    hosts = a.park(row_locs(a, low, 10))
    a.req_to_token_pool.free(low)
    assert a.repacker.counters.to_host_bytes == 0
    locs = a.unpark(hosts, False)
    assert_reads(a, locs[:10], low_serials)
    assert a._halve_and_repack(HIGH, 0)  # high is not written through
    assert a.repacker.counters.to_host_bytes == 4 * a.geometry.cell_bytes
    assert_reads(a, row_locs(a, high, 4), high_serials)
    a.check()


def test_write_through_leaves_the_host_room_to_halve_every_page():
    a = make_allocator(8, 10, 4, write_through=True, host_pages=6)
    row, serials = new_request(a, 16, False, 1)
    assert a.ledger.backed.sum() == 2
    assert len(a.ledger.host_free) == 4  # one for each of the 4 pages in use
    assert_reads(a, row_locs(a, row, 16), serials)
    a.check()


# ---- backup and restore_state --------------------------------------------------------------------------------------


def test_restore_state_takes_back_an_allocation_bit_for_bit():
    a = make_allocator(8, 10, 4)
    row, _serials = new_request(a, 6, False, 1)
    before, state = snapshot(a), a.backup_state()
    extend(a, [(6, 12)], [int(row_locs(a, row, 6)[5])], False)
    a.alloc(8, True)
    a.restore_state(state)
    assert_same(before, snapshot(a))
    first, _ = a.alloc(8, True)
    a.restore_state(state)
    assert torch.equal(first, a.alloc(8, True)[0])  # the device's mirror of the free list follows
    a.check()


def test_restore_state_after_a_repack_frees_what_was_allocated_since():
    a = make_allocator(8, 4, 4, dynamic_max_pages=1)
    row, serials = new_request(a, 8, False, 1)
    kept, _kept_serials = new_request(a, 4, False, 101)
    state = a.backup_state()
    a.free(row_locs(a, kept, 4))
    a.req_to_token_pool.free(kept)
    assert a.alloc(16, False) is not None
    assert a.num_halvings[LOW] == 1
    a.restore_state(state)
    a.check()
    assert a.ledger.occupied.sum() == 2  # the free stays done
    assert_reads(a, row_locs(a, row, 8), serials)


def test_restore_state_after_an_eviction_does_not_bring_back_what_the_cache_forgot():
    """Catches pages that nobody owns and nobody can free."""

    class Cache:
        evictable_pages = 1

        def peek_evictable(self, n):
            return cached[:1].numpy()

        def evict(self, n):
            self.evictable_pages = 0

    a = make_allocator(8, 3, 4)
    new_request(a, 8, True, 1)
    cached, _ = a.alloc(4)
    a.evictor = Cache()
    state = a.backup_state()
    a.alloc(4)
    a.restore_state(state)
    assert a.num_free_pages == 1
    assert a.ledger.occupied.sum() == 2


@pytest.mark.parametrize("repack_in_between", [False, True])
def test_restore_state_keeps_what_was_parked_before_and_has_come_back(repack_in_between):
    """Coming back is no allocation: its only copy would be freed. What was allocated since goes, parked in between or
    not."""
    a = make_allocator(8, 10, 4, dynamic_max_pages=1)
    row, serials = new_request(a, 10, False, 1)
    other, other_serials = new_request(a, 4, False, 101)
    hosts = a.park(row_locs(a, row, 10))
    a.req_to_token_pool.free(row)
    state = a.backup_state()
    speculative, _ = a.alloc(8, False)
    if repack_in_between:
        assert a._halve_and_repack(LOW, 0)
        assert a.restore_widths(max_slots=1) == 1
    locs = a.unpark(hosts, False)
    (row,) = a.req_to_token_pool.alloc(1)
    a.req_to_token_pool.write((row, slice(0, 10)), locs[:10])
    away, _ = a.alloc(4, False)
    away = a.unpark(a.park(away), False)
    a.restore_state(state)
    a.check()
    assert a.ledger.occupied.sum() == 3 + 1
    assert not a.ledger.is_slot(away.numpy() // 4).any()
    if not repack_in_between:
        assert not a.ledger.is_slot(speculative.numpy() // 4).any()
    assert_reads(a, row_locs(a, row, 10), serials)
    assert_reads(a, row_locs(a, other, 4), other_serials)
