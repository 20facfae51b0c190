"""The ways back and out: widths are restored, chosen slots narrow and widen, requests are parked and return.

`restore` and `chosen` book each of them in the ledger; here is when they may run, and that the device does its part.
"""

from __future__ import annotations

import numpy as np
import torch

from tidekv.errors import ConfigError
from tidekv.memory import contract
from tidekv.memory.ledger import DYNAMIC, HIGH, LOW, NO_SLOTS, IntArray
from tidekv.pressure import chosen, restore
from tidekv.pressure.plan import Refusal
from tidekv.pressure.pool_pressure import PoolUnderPressure


class PoolWithWaysBack(PoolUnderPressure):
    """A pool whose slots can also be widened, narrowed by name, parked on the host and brought back."""

    def restore_widths(self, max_slots: int = 64, *, start_free: float = 0.25, stop_free: float = 0.125) -> int:
        """Undo narrowing while memory is plentiful: new slots are full width again, narrowed slots widen, oldest first.

        Hysteresis: nothing happens below `start_free` of P free pages, and widening stops at `stop_free`, so the next
        demand finds at least that much before anything narrows again. High widens before low. At most `max_slots`
        slots a call. Returns the slots widened.
        """
        if not 0.0 <= stop_free <= start_free <= 1.0:
            raise ConfigError(f"need 0 <= stop_free <= start_free <= 1, got {stop_free} and {start_free}")
        if not self.ledger.any_narrow and not any(self.ledger.level):
            return 0
        self._collect_freed()
        pages = self.geometry.num_pages
        cached = self._evictable_slots()
        # A cached page that nobody references is as good as free, in proportion to its width.
        free = self.ledger.num_free_pages + float((0.5 ** self.ledger.levels_of(cached)).sum())
        if free < start_free * pages:
            return 0
        self.ledger.level = [0, 0, 0, 0]
        keep, widened = int(stop_free * pages), 0
        for code in (HIGH, LOW):
            slots = restore.oldest_narrow(self.ledger, code, max_slots - widened, leave_out=cached)
            slots = slots[: max(0, int(free) - keep - widened)]
            if len(slots) > self.ledger.num_free_pages - keep:
                self._gather_pages(len(slots) + keep)
                slots = restore.oldest_narrow(self.ledger, code, len(slots), leave_out=self._evictable_slots())
                slots = slots[: max(0, self.ledger.num_free_pages - keep)]
            if len(slots):
                self._apply(restore.work_of_restore(restore.book_restore(self.ledger, code, slots), self.ledger))
                widened += len(slots)
        self.ledger.trim_staging()
        self.num_restores += widened > 0
        return widened

    def narrow_slots(self, slots: IntArray, width: int) -> int:
        """Cut these full-width slots ([n] combined ids) to `width`, and merge. Returns how many; 0: nothing changed.

        For a scheduler that knows which requests are paused; the ladder halves a whole class.
        """
        self._collect_freed()
        slots = slots[self.ledger.levels_of(slots) == 0]
        works = chosen.book_narrowing(self.ledger, slots, self.ledger.ladder.index(width))
        if isinstance(works, Refusal):
            self.refusals = [*self.refusals[-31:], works.reason]
            return 0
        for work in works:
            self._apply(work)
        return len(slots)

    def widen_slots(self, slots: IntArray) -> int:
        """Widen as many of these slots ([n] combined ids), the first ones first, as pages can be had without pressure.

        Cached prefixes that nobody references are evicted for it. Returns how many.
        """
        self._collect_freed()
        narrow = self.ledger.levels_of(slots) > 0
        if not narrow.any():
            return 0
        slots = slots[narrow]
        if len(slots) > self.ledger.num_free_pages:
            with self._deciding() as decision:
                self._gather_pages(len(slots))
                slots = decision.follow(slots)
        slots = slots[: self.ledger.num_free_pages]
        for work in chosen.book_widening(self.ledger, slots):
            self._apply(work)
        self.ledger.trim_staging()
        return len(slots)

    def _evictable_slots(self) -> IntArray:
        """Slots of cached pages that nobody references."""
        if self.evictor is None or not self.evictor.evictable_pages:
            return NO_SLOTS
        return self.evictor.peek_evictable(self.evictor.evictable_pages) // self.page_size

    def gather_pages(self, num_free: int) -> int:
        """Evict and merge until `num_free` pages are free or nothing is left to gain; nothing narrows. Returns the free
        pages there are now."""
        self._collect_freed()
        if self.ledger.num_free_pages < num_free:
            self._gather_pages(num_free)
        return self.ledger.num_free_pages

    def _gather_pages(self, num_free: int) -> None:
        """Rung 0 until `num_free` pages are free or it has nothing left to give: evict, then merge half-empty pages."""
        with self._deciding() as decision:
            while self.ledger.num_free_pages < num_free:
                short = num_free - self.ledger.num_free_pages
                left = self.evictor.evictable_pages - decision.num_evicted if self.evictor else 0
                if not (left and self._evict(short)) and not self._merge_half_empty_pages(short):
                    break

    def park(self, locs: torch.Tensor) -> IntArray | None:
        """The slots of these locations leave the device whole (width 0). Returns their host pages, in the order of
        `locs`.

        The caller forgets the locations and keeps the host pages for `unpark` or `drop_parked`. None, with nothing
        changed, if the host pool is too full.
        """
        self._collect_freed()
        found = locs.cpu().numpy().astype(np.int64) // self.page_size
        _, first = np.unique(found, return_index=True)
        slots = found[np.sort(first)]
        contract.slots_to_free(self.ledger, slots * self.page_size, self._collected_frees())
        if int((self.ledger.host_plus_1[slots] == 0).sum()) > len(self.ledger.host_free):
            return None
        hosts, work = restore.park(self.ledger, slots)
        self._apply(work)
        return hosts

    def unpark(self, host_pages: IntArray, is_high_priority: bool) -> torch.Tensor | None:
        """Parked pages come back at the current width of their class: locs [n * page_size], or None: nothing
        changed."""
        contract.check_parked(self.ledger, host_pages)
        code, n = (HIGH if is_high_priority else LOW), len(host_pages)
        with self._deciding(stages_new_slots=False, has_host_pages=True) as decision:
            if not self.ensure_capacity(n, code):
                return None
        slots, work = restore.unpark(self.ledger, code, decision.splits[code], host_pages)
        if self.write_through and code == LOW:  # parking has left a copy of every layer: narrow slots keep it
            self.ledger.write_through(slots[self.ledger.levels_of(slots) > 0])
        if self.ledger.any_narrow and not self.ledger.used[DYNAMIC]:
            self.ledger.grow_staging(1)
        self._apply(work)
        self.new_slots = slots
        return self._locs_of(slots, False)

    def drop_parked(self, host_pages: IntArray) -> None:
        """A parked request is gone (aborted, or dropped to be recomputed)."""
        contract.check_parked(self.ledger, host_pages)
        self.ledger.drop_parked(host_pages)
