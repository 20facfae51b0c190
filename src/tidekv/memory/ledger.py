"""Who owns which page, slot, staging cell and host page. Holds no KV and no device memory.

`LedgerState` has the arrays, what is read from them and the checker; here is what changes them.
"""

from __future__ import annotations

import numpy as np

from tidekv.errors import InvariantError
from tidekv.memory.ledger_state import (
    CODE_NAMES,
    DYNAMIC,
    FREE,
    HIGH,
    LOW,
    NO_SLOTS,
    AllocationSplit,
    BoolArray,
    CodeArray,
    IntArray,
    LedgerState,
    as_run,
)

__all__ = [
    "CODE_NAMES",
    "DYNAMIC",
    "FREE",
    "HIGH",
    "LOW",
    "NO_SLOTS",
    "AllocationSplit",
    "BoolArray",
    "CodeArray",
    "IntArray",
    "Ledger",
]


class Ledger(LedgerState):
    """The books. Methods decide nothing: they book what the caller has decided (`occupy`, `release`, `move` ...)."""

    # ---- slots -------------------------------------------------------------------------------------------------

    def occupy(self, code: int, split: AllocationSplit) -> IntArray:
        """Hand out the slots of a split, in its order; narrow ones get a host page. The caller has checked the
        counts."""
        level = self.level[code]
        parts = [self._take_partial(code, level, split.current_slots)]
        if split.fresh_pages:
            pages = self._own(code, level, split.fresh_pages)
            if level == 0:
                parts.append(pages)
            else:  # the slots that are not needed now become partial
                slots = (pages[:, None] + self.slot_offsets[level]).ravel()
                parts.append(slots)
        if split.other_slots:
            wanted = split.other_slots
            for other in range(len(self.ladder)):  # the widest first
                n = 0 if other == level else min(wanted, len(self.partial_slots(code, other)))
                parts.append(self._take_partial(code, other, n))
                wanted -= n
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def allocate(
        self, code: int, num_slots: int, split: AllocationSplit, host_pages: IntArray | None = None
    ) -> IntArray:
        """Occupy `num_slots` slots by `split`; `host_pages` brings host copies along (a parked request coming back)."""
        if host_pages is None and split.fresh_pages == num_slots and not self.level[code]:
            return self.open_pages(code, num_slots)
        slots = self.occupy(code, split)
        if len(slots) > num_slots:  # only the last fresh page can be left over
            extra = slots[num_slots:]
            if split.other_slots:
                raise InvariantError("a split opens fresh pages in full before it takes slots of other widths")
            self._put_partial(code, self.level[code], extra)
            slots = slots[:num_slots]
        self._stamp(slots)
        self._book_shared_or_narrow(code, slots, host_pages)
        return slots

    def open_pages(self, codes: int | list[int] | CodeArray, num_pages: int) -> IntArray:
        """`num_pages` fresh full-width pages, each one slot. The caller has checked that they are free.

        codes: HIGH or LOW for all of them, or [num_pages] for each in its turn.
        """
        pages = self.free_list.take(num_pages)
        run = as_run(pages)
        self.page_code[run] = codes
        if isinstance(codes, int):
            self.used[codes] += num_pages
        else:
            num_high = codes.count(HIGH) if isinstance(codes, list) else int(np.count_nonzero(codes == HIGH))
            self.used[HIGH] += num_high
            self.used[LOW] += num_pages - num_high
        self.page_level[run] = 0
        self.page_occupied[run] = 1
        self.occupied[run] = True
        self.stamp[run] = self.next_stamp
        self.next_stamp += 1
        return pages

    def _stamp(self, slots: IntArray) -> None:
        self.occupied[slots] = True
        self.stamp[slots] = self.next_stamp
        self.next_stamp += 1

    def _book_shared_or_narrow(self, code: int, slots: IntArray, host_pages: IntArray | None) -> None:
        np.add.at(self.page_occupied, slots % self.page_stride, 1)
        narrow = self.levels_of(slots) > 0
        self.num_narrow[code] += int(narrow.sum())
        if host_pages is not None:
            self.host_plus_1[slots] = host_pages + 1
            self.host_parked[host_pages] = False
            self.stamp[slots] = self.host_stamp[host_pages]  # coming back is not being opened
            self._release_host(slots[~narrow])
        else:
            self.host_plus_1[slots[narrow]] = self._take_host(int(narrow.sum())) + 1

    def host_pages_needed(self, code: int, split: AllocationSplit, num_slots: int) -> int:
        """Host pages that `allocate` would take for this split."""
        return num_slots if self.level[code] else split.other_slots

    def release(self, combined: IntArray) -> None:
        """Free occupied slots (each once). A page whose last slot goes returns to the free list, width and code 0."""
        if not len(combined):
            return
        if self.at_full_width:  # slots are pages
            self._release_host(combined)
            self.occupied[combined] = False
            self.page_occupied[combined] = 0
            self._free_pages(combined)
            return
        pages = combined % self.page_stride
        self._release_host(combined)
        if self.staging_assigned.size:
            self.drop_dynamic(combined)
        codes, levels = self.page_code[pages], self.page_level[pages]
        if self.any_narrow:
            for code, count in enumerate(np.bincount(codes[levels > 0], minlength=4).tolist()):
                self.num_narrow[code] -= count
        self.occupied[combined] = False
        np.subtract.at(self.page_occupied, pages, 1)
        stays = self.page_occupied[pages] > 0
        if stays.any():
            for code in (HIGH, LOW):
                for level in range(1, len(self.ladder)):
                    mine = stays & (codes == code) & (levels == level)
                    if mine.any():
                        self._put_partial(code, level, combined[mine])
        self._free_pages(np.unique(pages[~stays]) if stays.size > 1 else pages[~stays])
        if self.used[DYNAMIC] and not self.any_narrow:
            self.trim_staging()

    def move(self, src: IntArray, dst: IntArray) -> None:
        """Slots move to free slots of the same priority and width. Every page they leave must be left empty: it is
        freed."""
        if not len(src):
            return
        keys = np.unique(np.stack([self.page_code[dst % self.page_stride], self.levels_of(dst)]), axis=1)
        for array in (self.host_plus_1, self.backed, self.stamp, self.dynamic_of):
            array[dst] = array[src]
            array[src] = 0
        if self.staging_assigned.size:
            kept = self.staging_assigned[self.dynamic_of[self.staging_assigned] > 0]
            self.staging_assigned = np.concatenate([kept, dst[self.dynamic_of[dst] > 0]])
        self.occupied[src], self.occupied[dst] = False, True
        np.subtract.at(self.page_occupied, src % self.page_stride, 1)
        np.add.at(self.page_occupied, dst % self.page_stride, 1)
        for code, level in keys.T.tolist():  # a few groups, not pages
            slots = self.partial_slots(code, level)
            self._set_partial(code, level, slots[~self.occupied[slots]])
        left = np.unique(src % self.page_stride)
        if self.page_occupied[left].any():
            raise InvariantError("a move left its donor page half empty: donors are emptied whole or not at all")
        self._free_pages(left)

    def narrow_pages(self, code: int, target: int) -> None:
        """Every page of this priority wider than ladder[target] is cut to it; its new slots become partial slots."""
        pages = self.wider_pages(code, target)
        slots = self.occupied_slots(pages, target)
        self.num_narrow[code] += int((self.page_level[slots % self.page_stride] == 0).sum())
        for level in range(target):
            self.partial.pop((code, level), None)
        self.page_level[pages] = target
        every = (pages[:, None] + self.slot_offsets[target]).ravel()
        self._put_partial(code, target, every[~self.occupied[every]])
        self.level[code] = max(self.level[code], target)

    def narrow_chosen(self, code: int, pages: IntArray, target: int) -> None:
        """These full-width pages are cut to ladder[target]; the width of new slots stays as it is."""
        self.num_narrow[code] += len(pages)
        self.page_level[pages] = target
        self._put_partial(code, target, (pages[:, None] + self.slot_offsets[target][1:]).ravel())

    def wider_pages(self, code: int, target: int) -> IntArray:
        """Pages of this priority whose slots are wider than ladder[target], ascending."""
        return np.flatnonzero((self.page_code == code) & (self.page_level < target))

    def occupied_slots(self, pages: IntArray, level: int) -> IntArray:
        """Occupied slots of these pages, cut at `level` (or coarser: halving leaves slots where they are)."""
        every: IntArray = (pages[:, None] + self.slot_offsets[level]).ravel()
        return every[self.occupied[every]]

    def promote(self, combined: IntArray) -> None:
        """The pages of these slots become high priority, whole: a page has one code and its other slots come along."""
        pages = np.unique(combined % self.page_stride)
        pages = pages[self.page_code[pages] == LOW]
        if not len(pages):
            return
        self.page_code[pages] = HIGH
        self.used[LOW] -= len(pages)
        self.used[HIGH] += len(pages)
        for level in range(len(self.ladder)):
            here = pages[self.page_level[pages] == level]
            if level and len(here):
                count = int(self.page_occupied[here].sum())
                self.num_narrow[LOW] -= count
                self.num_narrow[HIGH] += count
            slots = self.partial_slots(LOW, level)
            mine = self.page_code[slots % self.page_stride] == HIGH
            if mine.any():
                self._set_partial(LOW, level, slots[~mine])
                self._put_partial(HIGH, level, slots[mine])

    # ---- staging: dynamic slots, a pair of cells each ------------------------------------------------------------

    def grow_staging(self, num_pages: int) -> None:
        """`num_pages` free pages become staging pages."""
        if num_pages > self.num_free_pages:
            raise InvariantError(
                f"{num_pages} staging pages wanted, {self.num_free_pages} free: the caller has not checked"
            )
        if num_pages:
            pages = self._own(DYNAMIC, -1, num_pages)
            self._put_staging((pages[:, None] + self.pair_offsets).ravel())

    def assign_dynamic(self, combined: IntArray) -> bool:
        """Each of these narrowed slots owns a dynamic slot until `end_step`; staging grows from free pages if it
        must."""
        new = combined[self.dynamic_of[combined] == 0]
        grow = self.staging_pages_for(len(new))
        if grow > self.num_free_pages:
            return False
        self.grow_staging(grow)
        if len(new):
            self.dynamic_of[new] = self.staging_free[: len(new)]
            self.staging_free = self.staging_free[len(new) :]
            self.staging_assigned = np.concatenate([self.staging_assigned, new])
        return True

    def drop_dynamic(self, combined: IntArray) -> None:
        """These slots give up their dynamic slots, where they have one."""
        had = combined[self.dynamic_of[combined] > 0]
        if len(had):
            self._put_staging(self.dynamic_of[had])
            self.dynamic_of[had] = 0
            self.staging_assigned = self.staging_assigned[self.dynamic_of[self.staging_assigned] > 0]

    def _put_staging(self, dynamic: IntArray) -> None:
        """In ascending order, so that slots that are staged together lie in runs of neighbouring pages."""
        self.staging_free = np.sort(np.concatenate([self.staging_free, dynamic]))

    def end_step(self) -> None:
        """No slot owns a dynamic slot any more; staging pages over the target return."""
        self.drop_dynamic(self.staging_assigned)
        self.trim_staging()

    def trim_staging(self) -> None:
        """Staging pages over the target whose pairs are all unused go back to the free list."""
        surplus = self.used[DYNAMIC] - self.staging_target(sum(self.num_narrow))
        if surplus <= 0:
            return
        pages, counts = np.unique(self.staging_free % self.page_stride, return_counts=True)
        idle = pages[counts == len(self.pair_offsets)][-surplus:]
        keep = ~np.isin(self.staging_free % self.page_stride, idle)
        self.staging_free = self.staging_free[keep]
        self._free_pages(idle)

    # ---- the host ----------------------------------------------------------------------------------------------

    def give_host_pages(self, combined: IntArray) -> None:
        """Slots without a host page get one. The caller has checked that enough are free."""
        bare = combined[self.host_plus_1[combined] == 0]
        self.host_plus_1[bare] = self._take_host(len(bare)) + 1

    def write_through(self, combined: IntArray) -> None:
        """These new slots have a host copy of every layer from now on, as many as leave room for halving the others.

        A full-width page holds one slot, so at most used[HIGH] + used[LOW] slots still need a host page to be narrowed.
        """
        bare = combined[self.host_plus_1[combined] == 0]
        self.give_host_pages(bare[: max(0, len(self.host_free) - self.used[HIGH] - self.used[LOW])])
        self.any_backed = True
        self.backed[combined[self.host_plus_1[combined] > 0]] = True

    def park(self, combined: IntArray) -> IntArray:
        """The slots leave the device; their host pages stay, parked, and are returned in the same order."""
        self.give_host_pages(combined)
        hosts = self.host_pages_of(combined)
        self.host_parked[hosts] = True
        self.host_stamp[hosts] = self.stamp[combined]
        self.host_plus_1[combined] = 0
        self.backed[combined] = False
        self.release(combined)
        return hosts

    def drop_parked(self, hosts: IntArray) -> None:
        """A parked request is gone: its host pages are free again."""
        self.host_parked[hosts] = False
        self.host_free = np.concatenate([self.host_free, hosts[::-1]])

    def _take_host(self, n: int) -> IntArray:
        if n > len(self.host_free):
            raise InvariantError(f"{n} host pages wanted, {len(self.host_free)} free: the caller has not checked")
        taken = np.sort(self.host_free[len(self.host_free) - n :])  # neighbours: one layer of them is one run
        self.host_free = self.host_free[: len(self.host_free) - n]
        return taken

    def _release_host(self, combined: IntArray) -> None:
        if len(self.host_free) == self.num_host_pages:
            return
        has = combined[self.host_plus_1[combined] > 0]
        if len(has):
            self.host_free = np.concatenate([self.host_free, self.host_pages_of(has)[::-1]])
            self.host_plus_1[has] = 0
            self.backed[has] = False

    # ---- pages -------------------------------------------------------------------------------------------------

    def _own(self, code: int, level: int, n: int) -> IntArray:
        pages = self.free_list.take(n)
        run = as_run(pages)
        self.page_code[run] = code
        self.page_level[run] = level
        self.used[code] += n
        return pages

    def _free_pages(self, pages: IntArray) -> None:
        if not len(pages):
            return
        for code, count in enumerate(np.bincount(self.page_code[pages], minlength=4).tolist()):
            self.used[code] -= count
        self.page_code[pages] = FREE
        self.page_level[pages] = -1
        for (code, level), slots in list(self.partial.items()):
            self._set_partial(code, level, slots[self.page_code[slots % self.page_stride] == code])
        self.free_list.put(pages)

    def _take_partial(self, code: int, level: int, n: int) -> IntArray:
        slots = self.partial_slots(code, level)
        if n:
            self._set_partial(code, level, slots[: len(slots) - n])
        return slots[len(slots) - n :]

    def _set_partial(self, code: int, level: int, slots: IntArray) -> None:
        if len(slots):
            self.partial[code, level] = slots
        else:  # an empty pool has no entry: `at_full_width` asks only whether there are any
            self.partial.pop((code, level), None)

    def _put_partial(self, code: int, level: int, slots: IntArray) -> None:
        if len(slots):
            self.partial[code, level] = np.concatenate([self.partial_slots(code, level), slots])
