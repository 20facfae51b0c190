"""Who owns which page, slot, staging cell and host page. Holds no KV and no device memory.

Everything is numpy on the host: the allocator decides here, without asking the device, and then moves data by index
lists. Arrays indexed by *combined* id (page + (slot_start - 1) * (P + 1)) describe slots; arrays indexed by page
describe pages.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

from tidekv.errors import InvariantError
from tidekv.geometry import KVGeometry, narrow_slot_table

IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]

FREE: Final = 0
HIGH: Final = 1
LOW: Final = 2
DYNAMIC: Final = 3
CODE_NAMES: Final = ("free", "high", "low", "dynamic")

NO_SLOTS: Final[IntArray] = np.empty(0, dtype=np.int64)


@dataclass
class FreeList:
    """Free page ids in the order in which they will be handed out, and those freed since it was last sorted in.

    `pages[head:]` is free and ascending; `waiting` is freed but not yet behind it. `version` rises when `pages` is
    replaced, so a device mirror of `pages` is uploaded once per merge and allocation is the same slice on both sides.
    Sorting is done at merges only (one page a page handed out, amortised), and buys runs: neighbouring pages are booked
    by slices and copied in long pieces.
    """

    pages: IntArray
    head: int = 0
    waiting: list[IntArray] = field(default_factory=list)
    num_waiting: int = 0
    version: int = 0

    def __len__(self) -> int:
        return len(self.pages) - self.head + self.num_waiting

    def put(self, pages: IntArray) -> None:
        if len(pages):
            self.waiting.append(pages)
            self.num_waiting += len(pages)

    def reserve(self, n: int) -> None:
        """See to it that the next `n` pages are one run of `pages`. The caller has checked that n are there."""
        if n > len(self.pages) - self.head:
            self.pages, self.head = np.sort(np.concatenate([self.pages[self.head :], *self.waiting])), 0
            self.waiting, self.num_waiting = [], 0
            self.version += 1

    def take(self, n: int) -> IntArray:
        """The next `n` pages; sorts the waiting ones in only when it must."""
        self.reserve(n)
        taken = self.pages[self.head : self.head + n]
        self.head += n
        return taken

    def all_pages(self) -> IntArray:
        return np.concatenate([self.pages[self.head :], *self.waiting])

    def clone(self) -> FreeList:
        return FreeList(self.pages, self.head, list(self.waiting), self.num_waiting, self.version)


def as_run(pages: IntArray) -> IntArray | slice:
    """Ascending distinct ids as a slice if they are neighbours: a slice is booked 6 times faster than a list of
    2,048."""
    if len(pages) > 16 and pages[-1] - pages[0] == len(pages) - 1:
        return slice(int(pages[0]), int(pages[-1]) + 1)
    return pages


@dataclass(frozen=True)
class AllocationSplit:
    """How a demand for slots of one priority is met: partial slots of the current width, fresh pages, other widths."""

    current_slots: int
    fresh_pages: int
    other_slots: int


class Ledger:
    """The books. Methods either decide nothing (`occupy`, `release`, `move` ...) or only count; `check` recounts
    all."""

    def __init__(
        self,
        geometry: KVGeometry,
        ladder: tuple[int, ...],
        num_host_pages: int,
        dynamic_max_pages: int,
    ) -> None:
        self.geometry = geometry
        self.ladder = ladder
        self.num_host_pages = num_host_pages
        self.dynamic_max_pages = dynamic_max_pages
        self.page_stride = geometry.page_stride
        self.resident_pos = narrow_slot_table(geometry, ladder)
        # slot_offsets[level]: what to add to a page id to get the combined ids of its slots at that level, in order.
        self.slot_offsets: list[IntArray] = [
            (np.array(geometry.slot_starts(w), dtype=np.int64) - 1) * self.page_stride for w in ladder
        ]
        # Staging pages are cut into pairs of cells, at slot_start 1, 3, 5, ...: L // 2 dynamic slots a page.
        self.pair_offsets: IntArray = np.arange(geometry.layer_num // 2, dtype=np.int64) * 2 * self.page_stride
        self.clear()

    def clear(self) -> None:
        """Everything free, both widths L."""
        pages, slots = self.geometry.num_pages + 1, self.geometry.num_combined
        self.free_list = FreeList(np.arange(1, pages, dtype=np.int64))
        self.page_code = np.zeros(pages, dtype=np.int8)
        self.page_level = np.full(pages, -1, dtype=np.int8)
        self.page_occupied = np.zeros(pages, dtype=np.int32)
        # Four numbers each, by code; lists, because reading a numpy scalar costs as much as the rest of an allocation.
        self.used = [0, 0, 0, 0]
        self.level = [0, 0, 0, 0]  # ladder index at which new slots are opened
        self.num_narrow = [0, 0, 0, 0]  # occupied slots below full width
        # By combined id. np.zeros is lazy: ids that are never slots cost no memory.
        self.occupied = np.zeros(slots, dtype=np.bool_)
        self.host_plus_1 = np.zeros(slots, dtype=np.int32)  # host page + 1, 0 = none
        self.backed = np.zeros(slots, dtype=np.bool_)  # the host copy holds all L layers (write-through)
        self.stamp = np.zeros(slots, dtype=np.int64)  # when the slot was opened, for "oldest first"
        self.dynamic_of = np.zeros(slots, dtype=np.int64)  # staging slot of a narrowed slot in this step, 0 = none
        self.partial: dict[tuple[int, int], IntArray] = {}  # (code, level) -> free slots of owned pages
        self.staging_free: IntArray = NO_SLOTS
        self.staging_assigned: IntArray = NO_SLOTS  # slots with a dynamic_of
        self.any_backed = False  # some slot has been written through since `clear`
        self.host_free: IntArray = np.arange(self.num_host_pages - 1, -1, -1, dtype=np.int64)  # a stack, lowest on top
        self.host_parked = np.zeros(self.num_host_pages, dtype=np.bool_)
        self.host_stamp = np.zeros(self.num_host_pages, dtype=np.int64)  # of a parked page: that of its slot
        self.next_stamp = 1

    def clone(self) -> Ledger:
        """An independent copy; the arrays are a few MB. Used to try a sequence of rungs and to take it back."""
        other = copy.copy(self)
        other.free_list = self.free_list.clone()
        other.partial = dict(self.partial)  # arrays in it are replaced, never written in place
        other.used, other.level, other.num_narrow = self.used[:], self.level[:], self.num_narrow[:]
        for name in (
            "page_code", "page_level", "page_occupied", "occupied", "host_plus_1", "backed", "stamp", "dynamic_of",
            "host_parked", "host_stamp",
        ):  # fmt: skip
            setattr(other, name, getattr(self, name).copy())
        return other

    # ---- reading -----------------------------------------------------------------------------------------------

    @property
    def num_free_pages(self) -> int:
        return len(self.free_list)

    @property
    def any_narrow(self) -> bool:
        """Some occupied slot is below full width. False is the zero-overhead case."""
        return self.num_narrow[HIGH] + self.num_narrow[LOW] > 0

    @property
    def at_full_width(self) -> bool:
        """Nothing is narrow, new slots are opened at full width and no page has free slots: pages are all there is."""
        level, narrow = self.level, self.num_narrow
        return not (level[HIGH] or level[LOW] or narrow[HIGH] or narrow[LOW] or self.partial)

    def slots_per_page(self, code: int) -> int:
        """Slots in a fresh page of this priority at its current width."""
        return 1 << self.level[code]

    def partial_slots(self, code: int, level: int) -> IntArray:
        return self.partial.get((code, level), NO_SLOTS)

    def num_partial(self, code: int) -> int:
        """Free slots in owned pages of this priority, all widths."""
        return sum(len(slots) for (c, _), slots in self.partial.items() if c == code)

    def pages_of(self, combined: IntArray) -> IntArray:
        return combined % self.page_stride

    def levels_of(self, combined: IntArray) -> npt.NDArray[np.int8]:
        """Ladder index of each slot (the level of its page)."""
        return self.page_level[combined % self.page_stride]

    def is_slot(self, combined: IntArray) -> BoolArray:
        """Which of these ids, of any value, are occupied slots. Staging slots and free slots are not."""
        inside = (combined > 0) & (combined < self.geometry.num_combined)
        return inside & self.occupied[np.where(inside, combined, 0)]

    def staging_target(self, num_narrow: int) -> int:
        """Staging pages wanted for this many narrowed slots: enough for all of them, within the budget, never 0."""
        if num_narrow == 0:
            return 0
        return max(1, min(self.dynamic_max_pages, -(-num_narrow // len(self.pair_offsets))))

    def staging_pages_for(self, num_slots: int) -> int:
        """Pages that must be added so that `num_slots` more dynamic slots can be handed out."""
        return -(-max(0, num_slots - len(self.staging_free)) // len(self.pair_offsets))

    def mergeable_pages(self, code: int, level: int, keep_slots: int = 0) -> int:
        """Pages of this group that a merge can free while `keep_slots` partial slots stay. Slots of a group are
        alike, so the optimum is a quotient."""
        return max(0, len(self.partial_slots(code, level)) - keep_slots) >> level

    def split(self, code: int, num_slots: int, free_pages: int) -> AllocationSplit | None:
        """Meet `num_slots` from partial slots of the current width, then `free_pages`, then other partial slots."""
        level = self.level[code]
        current = min(num_slots, len(self.partial_slots(code, level)))
        rest = num_slots - current
        fresh = min(-(-rest // (1 << level)), free_pages)
        other = max(0, rest - (fresh << level))
        if other > self.num_partial(code) - len(self.partial_slots(code, level)):
            return None
        return AllocationSplit(current, fresh, other)

    def pages_by_state(self) -> dict[tuple[str, int], int]:
        """(priority name, slot width) -> pages, and ("free", 0), ("dynamic", 2): the picture of the pool."""
        out = {("free", 0): self.num_free_pages, ("dynamic", 2): self.used[DYNAMIC]}
        for code in (HIGH, LOW):
            levels = self.page_level[self.page_code == code]
            for level, count in enumerate(np.bincount(levels, minlength=len(self.ladder))):
                out[CODE_NAMES[code], self.ladder[level]] = int(count)
        return out

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

    def open_pages(self, codes: int | list[int] | IntArray, num_pages: int) -> IntArray:
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
            self.staging_free = np.concatenate([self.staging_free, (pages[:, None] + self.pair_offsets).ravel()])

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
            self.staging_free = np.concatenate([self.staging_free, self.dynamic_of[had]])
            self.dynamic_of[had] = 0
            self.staging_assigned = self.staging_assigned[self.dynamic_of[self.staging_assigned] > 0]

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

    def host_pages_of(self, combined: IntArray) -> IntArray:
        """Host page of each slot, -1 where it has none."""
        return self.host_plus_1[combined].astype(np.int64) - 1

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

    # ---- the checker -------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Recount everything from the page and slot arrays; `InvariantError` names the first thing that is wrong."""
        stride, pages = self.page_stride, np.arange(1, self.page_stride)
        listed = self.free_list.all_pages()
        _require(len(np.unique(listed)) == len(listed), "a page is twice in the free list")
        _require(bool((listed > 0).all()), "page 0, the sink, is in the free list")
        free = np.zeros(stride, dtype=bool)
        free[listed] = True
        _require(bool((free[1:] == (self.page_code[1:] == FREE)).all()), "free list and page codes differ")
        _require(self.page_code[0] == FREE and not free[0], "page 0 is owned or listed")
        counted = np.bincount(self.page_code[1:], minlength=4)
        _require(counted[1:].tolist() == self.used[1:], lambda: f"used {self.used[1:]} but counted {counted[1:]}")
        _require(sum(self.used[1:]) + self.num_free_pages == self.geometry.num_pages, "pages do not add up to P")

        is_partial = np.zeros(self.geometry.num_combined, dtype=np.int32)
        for (code, level), slots in self.partial.items():
            np.add.at(is_partial, slots, 1)
            right = (self.page_code[slots % stride] == code) & (self.page_level[slots % stride] == level)
            _require(bool(right.all()), f"a partial slot of {CODE_NAMES[code]} level {level} lies in another page")
        seen, narrow = 0, np.zeros(4, dtype=np.int64)
        for code in (HIGH, LOW):
            for level in range(len(self.ladder)):
                here = pages[(self.page_code[1:] == code) & (self.page_level[1:] == level)]
                if not len(here):
                    continue
                every = here[:, None] + self.slot_offsets[level]
                taken = self.occupied[every]
                _require(
                    bool((taken.astype(np.int32) + is_partial[every] == 1).all()),
                    "a slot is both occupied and partial, or neither, or twice partial",
                )
                _require(bool((taken.sum(1) == self.page_occupied[here]).all()), "page_occupied is off")
                _require(bool((self.page_occupied[here] > 0).all()), "an empty page is still owned")
                seen += int(taken.sum())
                narrow[code] += int(taken.sum()) if level else 0
        occupied = np.flatnonzero(self.occupied)
        _require(seen == len(occupied), "an occupied id is no slot of its page")
        _require(int(is_partial.sum()) == sum(map(len, self.partial.values())), "partial pool lists strange ids")
        _require(narrow.tolist() == self.num_narrow, lambda: f"num_narrow {self.num_narrow} but counted {narrow}")
        self._check_host(occupied)
        self._check_staging(pages)

    def _check_host(self, occupied: IntArray) -> None:
        hosts = self.host_pages_of(occupied)
        _require(bool((hosts[self.levels_of(occupied) > 0] >= 0).all()), "a narrowed slot has no host page")
        _require(int((self.host_plus_1 > 0).sum()) == int((hosts >= 0).sum()), "a free slot owns a host page")
        owned = np.zeros(self.num_host_pages, dtype=np.int32)
        np.add.at(owned, hosts[hosts >= 0], 1)
        np.add.at(owned, self.host_free, 1)
        owned += self.host_parked
        _require(bool((owned == 1).all()), "a host page is owned twice or by nobody")

    def _check_staging(self, pages: IntArray) -> None:
        mine = pages[self.page_code[1:] == DYNAMIC]
        held = np.concatenate([self.staging_free, self.dynamic_of[self.staging_assigned]])
        every = (mine[:, None] + self.pair_offsets).ravel()
        _require(bool(np.array_equal(np.sort(held), np.sort(every))), "staging slots are lost or handed out twice")
        _require(int((self.dynamic_of > 0).sum()) == len(self.staging_assigned), "staging_assigned is off")
        _require(bool(self.occupied[self.staging_assigned].all()), "a free slot owns a dynamic slot")
        _require(not self.any_narrow or self.used[DYNAMIC] > 0, "something is narrow and there is no staging page")


def _require(holds: bool, message: str | Callable[[], str]) -> None:
    """A callable is asked for its message on failure alone: printing arrays is a third of the checker's time."""
    if not holds:
        raise InvariantError(message if isinstance(message, str) else message())
