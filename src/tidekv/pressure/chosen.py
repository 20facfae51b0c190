"""Narrow or widen slots that the caller has chosen, whatever the ladder would take. Books in the ledger, moves nothing.

The ladder answers a demand and halves a whole class. A scheduler knows more: who is paused, which pages a lossy read
mode does not look at. Both end in the same `Work`, so applying it is the same fixed number of launches.
"""

from __future__ import annotations

import numpy as np

from tidekv.memory.ledger import DYNAMIC, HIGH, LOW, IntArray, Ledger
from tidekv.pressure import restore
from tidekv.pressure.plan import Refusal, RepackPlan, plan_merge
from tidekv.pressure.repack import Work, leaving_cells, work_of_repack


def book_narrowing(ledger: Ledger, slots: IntArray, level: int) -> list[Work] | Refusal:
    """Cut full-width slots ([n] combined ids, each once) to ladder[level], then merge what that left half empty.

    Slots that are narrow already are left alone. Refused as a whole if the host has no room for what leaves, or if no
    page would be free for staging. Slots of both priorities may be given. The works are to be applied in order.
    """
    slots = slots[ledger.levels_of(slots) == 0]
    if not 0 < level < len(ledger.ladder) or not len(slots):
        return Refusal("no slot is wider than that")
    bare = slots[ledger.host_plus_1[slots] == 0]
    if len(bare) > len(ledger.host_free):
        return Refusal(f"{len(bare)} host pages needed, {len(ledger.host_free)} of {ledger.num_host_pages} free")
    codes = ledger.page_code[slots]  # a full-width slot has the id of its page
    groups = [(code, slots[codes == code]) for code in (HIGH, LOW) if (codes == code).any()]
    freed = sum(_pages_to_free(ledger, code, level, len(mine)) for code, mine in groups)
    if not ledger.used[DYNAMIC] and not ledger.num_free_pages and not freed:
        return Refusal("narrowing frees no page, so nothing is left to stage layers through")
    works = []
    for code, mine in groups:
        works.append(_book_group(ledger, code, mine, level))
        moves = plan_merge(ledger, code, ledger.geometry.num_pages, only_level=level)
        if len(moves.freed_pages):
            works.append(work_of_repack(RepackPlan.merge_only(code, moves), ledger))
    if not ledger.used[DYNAMIC]:
        ledger.grow_staging(1)
    return works


def book_widening(ledger: Ledger, slots: IntArray) -> list[Work]:
    """Widen these narrow slots ([n] combined ids) into full-width pages. The caller has checked that n are free."""
    slots = slots[ledger.levels_of(slots) > 0]
    codes = ledger.page_code[slots % ledger.page_stride]
    works = []
    for code in (HIGH, LOW):
        mine = slots[codes == code]
        if len(mine):
            works.append(restore.work_of_restore(restore.book_restore(ledger, code, mine), ledger))
    return works


def _pages_to_free(ledger: Ledger, code: int, level: int, num_slots: int) -> int:
    """Pages that a merge frees once so many full-width pages of this group are cut to `level`: a quotient."""
    pages = int(((ledger.page_code == code) & (ledger.page_level == level)).sum()) + num_slots
    held = (pages << level) - len(ledger.partial_slots(code, level)) - (num_slots << level) + num_slots
    return pages - -(-held // (1 << level))


def _book_group(ledger: Ledger, code: int, slots: IntArray, level: int) -> Work:
    ledger.give_host_pages(slots)
    bare = slots[~ledger.backed[slots]]
    to_host = leaving_cells(ledger, bare, np.zeros(len(bare), dtype=np.int64), level, ledger.host_pages_of(bare))
    ledger.narrow_chosen(code, slots, level)
    return Work(
        name="halve",
        code=code,
        to_host=to_host,
        compact_slots=slots,
        compact_factor=np.full(len(slots), 1 << level, dtype=np.int64),
        new_width=ledger.ladder[level],
    )
