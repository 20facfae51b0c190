"""The books themselves: their arrays, what can be read from them, and the checker that recounts them. `Ledger` writes.

Everything is numpy on the host: the allocator decides here, without asking the device, and then moves data by index
lists. Arrays indexed by *combined* id (page + (slot_start - 1) * (P + 1)) describe slots; arrays indexed by page
describe pages.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, Self

import numpy as np
import numpy.typing as npt

from tidekv.errors import InvariantError
from tidekv.geometry import KVGeometry, narrow_slot_table

IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]
CodeArray = npt.NDArray[np.int8]

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


class LedgerState:
    """The arrays and what they say. Nothing here changes them but `clear`."""

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

    def clone(self) -> Self:
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

    def host_pages_of(self, combined: IntArray) -> IntArray:
        """Host page of each slot, -1 where it has none."""
        return self.host_plus_1[combined].astype(np.int64) - 1

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
