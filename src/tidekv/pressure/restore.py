"""The ways back and out: widen narrowed slots, park slots on the host whole, bring parked ones back.

Each function books its decision in the ledger and returns the device's part as a `Work`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tidekv.memory.ledger import NO_SLOTS, AllocationSplit, IntArray, Ledger
from tidekv.pressure.repack import CellCopies, Work, leaving_cells


@dataclass(frozen=True)
class RestorePlan:
    """Narrowed slots that become full width again: slot -> a fresh page of the same priority."""

    code: int
    src: IntArray
    from_level: npt.NDArray[np.int8]
    dst: IntArray
    host_pages: IntArray

    def lookup(self, num_combined: int) -> IntArray:
        """The lookup table over combined ids: identity but for the widened slots."""
        table = np.arange(num_combined, dtype=np.int64)
        table[self.src] = self.dst
        return table


def oldest_narrow(ledger: Ledger, code: int, max_slots: int, leave_out: IntArray = NO_SLOTS) -> IntArray:
    """Up to `max_slots` narrowed slots of this priority to widen, oldest first, but those left out: [n] combined
    ids."""
    pages = np.flatnonzero((ledger.page_code == code) & (ledger.page_level > 0))
    slots = [ledger.occupied_slots(pages[ledger.page_level[pages] == v], v) for v in range(1, len(ledger.ladder))]
    narrow = np.concatenate([NO_SLOTS, *slots])
    narrow = narrow[~np.isin(narrow, leave_out)]
    oldest = np.argsort(ledger.stamp[narrow], kind="stable")[: max(0, max_slots)]
    return narrow[oldest]


def book_restore(ledger: Ledger, code: int, slots: IntArray) -> RestorePlan:
    """Book the widening of these slots into fresh full-width pages (the caller has checked that they are free)."""
    stamps, from_level, hosts = ledger.stamp[slots], ledger.levels_of(slots), ledger.host_pages_of(slots)
    level, ledger.level[code] = ledger.level[code], 0
    pages = ledger.allocate(code, len(slots), AllocationSplit(0, len(slots), 0))
    ledger.level[code] = level
    ledger.stamp[pages] = stamps
    kept = ledger.backed[slots]  # a written-through copy stays with its slot
    ledger.host_plus_1[pages[kept]] = hosts[kept] + 1
    ledger.backed[pages[kept]] = True
    ledger.host_plus_1[slots[kept]] = 0
    ledger.backed[slots] = False
    ledger.release(slots)
    return RestorePlan(code, slots, from_level, pages, hosts)


def arriving_cells(ledger: Ledger, dst: IntArray, host_pages: IntArray, layers: IntArray, level: int) -> CellCopies:
    """Cells to fill from the host: host flat page -> device flat page, for slots `dst` at `level`, layer-major."""
    position = ledger.resident_pos[level].astype(np.int64)[layers][:, None]
    return CellCopies(
        (layers[:, None] * ledger.num_host_pages + host_pages[None, :]).ravel(),
        (dst[None, :] + position * ledger.page_stride).ravel(),
    )


def work_of_restore(plan: RestorePlan, ledger: Ledger) -> Work:
    """What the device has to do to widen the slots of a booked restore: resident cells move, the others come back."""
    src, dst, host_src, host_dst = [NO_SLOTS], [NO_SLOTS], [NO_SLOTS], [NO_SLOTS]
    for level in range(1, len(ledger.ladder)):
        mine = plan.from_level == level
        if not mine.any():
            continue
        position = ledger.resident_pos[level].astype(np.int64)
        kept, gone = np.flatnonzero(position >= 0), np.flatnonzero(position < 0)
        src.append((plan.src[mine][None, :] + position[kept][:, None] * ledger.page_stride).ravel())
        dst.append((plan.dst[mine][None, :] + kept[:, None] * ledger.page_stride).ravel())
        arriving = arriving_cells(ledger, plan.dst[mine], plan.host_pages[mine], gone, 0)
        host_src.append(arriving.src)
        host_dst.append(arriving.dst)
    return Work(
        name="restore",
        code=plan.code,
        on_device=CellCopies(np.concatenate(src), np.concatenate(dst)),
        from_host=CellCopies(np.concatenate(host_src), np.concatenate(host_dst)),
        lookup=plan.lookup(ledger.geometry.num_combined),
    )


def park(ledger: Ledger, slots: IntArray) -> tuple[IntArray, Work]:
    """Book that the slots leave the device whole (width 0): (host pages in the same order, the copies that do it).

    The caller has checked that slots without a host page find one.
    """
    ledger.give_host_pages(slots)
    code = int(ledger.page_code[slots[0] % ledger.page_stride]) if len(slots) else 0
    away = slots[~ledger.backed[slots]]
    cells = leaving_cells(ledger, away, ledger.levels_of(away).astype(np.int64), None, ledger.host_pages_of(away))
    return ledger.park(slots), Work("park", code, to_host=cells)


def unpark(ledger: Ledger, code: int, split: AllocationSplit, host_pages: IntArray) -> tuple[IntArray, Work]:
    """Book that parked pages come back by `split`: (slots in the same order, the copies of their resident layers)."""
    slots = ledger.allocate(code, len(host_pages), split, host_pages)
    levels = ledger.levels_of(slots)
    src, dst = [NO_SLOTS], [NO_SLOTS]
    for level in range(len(ledger.ladder)):
        mine = levels == level
        if mine.any():
            layers = np.flatnonzero(ledger.resident_pos[level] >= 0)
            cells = arriving_cells(ledger, slots[mine], host_pages[mine], layers, level)
            src.append(cells.src)
            dst.append(cells.dst)
    return slots, Work("unpark", code, from_host=CellCopies(np.concatenate(src), np.concatenate(dst)))
