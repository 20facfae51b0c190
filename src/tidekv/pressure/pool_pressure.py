"""Room is made: the ladder's rungs are decided in the ledger, as one transaction, and applied when the demand fits.

ensure_capacity          while the demand does not fit:
  -> _try_backpressure   the first rung of the ladder that applies
       -> _evict, _merge_half_empty_pages
       -> _halve_and_repack   A _halve_slot_width  B _merge_across_pages  C _remap_loc_holders
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np

from tidekv.errors import ConfigError, InvariantError
from tidekv.memory.ledger import DYNAMIC, HIGH, LOW, NO_SLOTS, IntArray
from tidekv.pressure import ladder, repack
from tidekv.pressure.decision import Decision
from tidekv.pressure.ladder import PressureState, Rung
from tidekv.pressure.plan import Refusal, RepackPlan, plan_merge, plan_repack
from tidekv.pressure.pool_state import PagedPoolState
from tidekv.pressure.repack import Work


class PoolUnderPressure(PagedPoolState):
    """A pool that makes room for a demand, or says that it cannot and has changed nothing."""

    def ensure_capacity(self, pages_needed: int, priority_code: int) -> bool:
        """Make room for `pages_needed` logical pages of this priority, by pressure if need be. False: nothing changed.

        Inside one allocation the demands of both groups add up, so that the second cannot take what the first was
        promised.
        """
        if priority_code not in (HIGH, LOW):
            raise ConfigError(f"priority_code must be {HIGH} (high) or {LOW} (low), got {priority_code}")
        if pages_needed < 0:
            raise ConfigError(f"pages_needed must be >= 0, got {pages_needed}")
        with self._deciding() as decision:
            decision.demand[priority_code] = decision.demand.get(priority_code, 0) + pages_needed
            while not self._fits(decision):
                if not self._try_backpressure():
                    self._roll_back(decision)
                    return False
        return True

    def make_room(self, demand: dict[int, int], touched: Callable[[], IntArray]) -> bool:
        """`ensure_capacity` for several priorities at once: {code: pages}, as one decision. False: nothing changed.

        touched(): the slots ([n] combined ids) that the coming step goes on filling; those that are narrow need
        staging. An allocation of just this demand then succeeds without further pressure.
        """
        with self._deciding(touched):
            return all(self.ensure_capacity(pages, code) for code, pages in demand.items())

    def _fits(self, decision: Decision) -> bool:
        """The demand of all groups can be met from the books as they are now, staging and host pages included."""
        ledger = self.ledger
        if self._frees_in_flight and (ledger.any_narrow or sum(decision.demand.values()) > ledger.num_free_pages):
            self._collect_freed()
        num_staged = 0
        if ledger.any_narrow:
            staged = decision.follow(np.concatenate([decision.touched(), self._written_slots()]))
            narrow = self._narrow_of(staged)
            num_staged = int((ledger.dynamic_of[narrow] == 0).sum()) if self._in_step else len(narrow)
        free, opened_narrow = ledger.num_free_pages, 0
        for code, slots in decision.demand.items():
            opening = slots if ledger.level[code] else 0
            keep = self._staging_pages(decision, num_staged, opened_narrow + opening)
            split = ledger.split(code, slots, free - keep) if free >= keep else None
            if split is None:
                return False
            free -= split.fresh_pages
            opened_narrow += opening or split.other_slots
            if self._staging_pages(decision, num_staged, opened_narrow) > free:
                return False
            decision.splits[code] = split
        return decision.has_host_pages or opened_narrow <= len(ledger.host_free)

    def _staging_pages(self, decision: Decision, num_staged: int, opened_narrow: int) -> int:
        """Free pages to keep back, so that the tokens of this step can be staged and at least one staging page
        exists."""
        ledger = self.ledger
        if not num_staged and not opened_narrow:
            return 0
        slots = num_staged + (opened_narrow if decision.stages_new_slots else 0)
        in_use = 0 if self._in_step else len(ledger.staging_assigned)  # a new step gives those back first
        return max(ledger.staging_pages_for(slots - in_use), 0 if ledger.used[DYNAMIC] else 1)

    def _try_backpressure(self) -> bool:
        """Take the first rung that applies. False when none does; True when the books have changed, so look again."""
        decision = self._current_decision
        action = ladder.choose(self._pressure_state(decision))
        if action is None:
            return False
        if decision.saved is None:
            decision.saved = self.ledger.clone()
        shortage = max(1, sum(decision.demand.values()) - self.ledger.num_free_pages)
        if action.rung == Rung.EVICT:
            return self._evict(shortage)
        if action.rung == Rung.MERGE:
            return self._merge_half_empty_pages(shortage)
        if self._halve_and_repack(action.code, action.max_keep_pages):
            decision.refused.clear()
        else:
            decision.refused.add(action.code)
        return True

    def _pressure_state(self, decision: Decision) -> PressureState:
        ledger, lowest = self.ledger, len(self.ledger.ladder) - 1

        def can_halve(code: int) -> bool:
            gains = ledger.used[code] > 0 or decision.demand.get(code, 0) > 0
            wanted = self.may_halve and code not in decision.refused
            return bool(ledger.level[code] < lowest and gains and wanted)

        return PressureState(
            evictable_pages=self.evictor.evictable_pages - decision.num_evicted if self.evictor else 0,
            mergeable_pages=sum(self._mergeable_pages(decision).values()),
            low_used=ledger.used[LOW],
            high_used=ledger.used[HIGH],
            low_can_halve=can_halve(LOW),
            high_can_halve=can_halve(HIGH),
            budgets=self.budgets,
        )

    def _mergeable_pages(self, decision: Decision) -> dict[tuple[int, int], int]:
        """(code, level) -> pages that a merge frees, without the partial slots that the demand itself is going to
        use."""
        ledger = self.ledger
        return {
            (code, level): ledger.mergeable_pages(
                code, level, decision.demand.get(code, 0) if level == ledger.level[code] else 0
            )
            for code, level in ledger.partial
        }

    def _evict(self, num_pages: int) -> bool:
        """Rung 0: book the release of cached pages that nobody references; the cache drops them at commit."""
        decision = self._current_decision
        if self.evictor is None:
            return False
        locs = self.evictor.peek_evictable(decision.num_evicted + num_pages)[decision.num_evicted :]
        self.ledger.release(locs // self.page_size)
        decision.num_evicted += len(locs)
        return len(locs) > 0

    def _merge_half_empty_pages(self, num_pages: int) -> bool:
        """Rung 0: merge pages that are half empty already; frees up to `num_pages` pages and halves nothing."""
        freed = 0
        for (code, level), mergeable in self._mergeable_pages(self._current_decision).items():
            moves = plan_merge(self.ledger, code, min(mergeable, num_pages - freed), only_level=level)
            if len(moves.freed_pages):
                self._book(RepackPlan.merge_only(code, moves))
                freed += len(moves.freed_pages)
        return freed > 0

    def _halve_and_repack(self, priority_code: int, max_keep_pages: int) -> bool:
        """Halve every wider page of this priority, merge what exceeds `max_keep_pages`, remap, free the donors.

        False, with nothing changed, if the plan is refused (host pool full, minimum width, no page for staging).
        """
        self._collect_freed()
        plan = plan_repack(self.ledger, priority_code, max_keep_pages)
        if isinstance(plan, Refusal):
            self.refusals = [*self.refusals[-31:], plan.reason]
            return False
        with self._deciding():
            self._book(plan)
        return True

    def _book(self, plan: RepackPlan) -> None:
        decision = self._current_decision
        if decision.saved is None:
            decision.saved = self.ledger.clone()
        decision.works.append(repack.work_of_repack(plan, self.ledger))

    def _apply(self, work: Work) -> None:
        """The device's part of one decision: a fixed number of launches, whatever the number of pages."""
        self.repacker.back_up(work)
        self._halve_slot_width(work)
        self._merge_across_pages(work)
        self.repacker.bring_back(work)
        if work.lookup is not None:
            self._remap_loc_holders(work.lookup)
            if self._in_step:
                self._lookups.append(work.lookup)
        self.num_repacks += 1
        self.num_pages_freed += work.freed_pages
        if work.name == "halve":
            self.num_halvings[work.code] += 1
        elif work.name == "merge":
            self.num_merges += 1

    def _halve_slot_width(self, work: Work) -> None:
        """A: in each page, layers 0, 2, 4, ... are compacted to 0, 1, 2, ...; the second half has become a partial
        slot."""
        self.repacker.halve_in_page(work)

    def _merge_across_pages(self, work: Work) -> None:
        """B: donors' slots move into free slots of receivers; the donors are already booked: code 0, width 0, free."""
        self.repacker.merge_across_pages(work)

    def _remap_loc_holders(self, lookup: IntArray) -> None:
        """C: every copy of a location is rewritten by one lookup table over combined ids."""
        self.loc_holders.remap(lookup)
        if self._free_group is not None:  # collected frees are locations in flight too
            self._free_group = lookup[self._free_group]

    @contextmanager
    def _deciding(
        self,
        touched: Callable[[], IntArray] = lambda: NO_SLOTS,
        *,
        stages_new_slots: bool = True,
        has_host_pages: bool = False,
    ) -> Iterator[Decision]:
        """A transaction; an inner one joins the outer. The device's part runs when the outermost ends without a
        refusal."""
        if self._decision is not None:
            yield self._decision
            return
        decision = self._decision = Decision(touched, stages_new_slots, has_host_pages)
        try:
            yield decision
        except BaseException:
            self._roll_back(decision)
            raise
        finally:
            self._decision = None
        if self.evictor is not None and decision.num_evicted:
            self.evictor.evict(decision.num_evicted)
            self.num_evicted_pages += decision.num_evicted
        for work in decision.works:
            self._apply(work)

    @property
    def _current_decision(self) -> Decision:
        if self._decision is None:
            raise InvariantError("books are changed for a demand only inside a decision")
        return self._decision

    def _roll_back(self, decision: Decision) -> None:
        """The books are as they were before the decision; nothing of it has reached the device."""
        if decision.saved is not None:
            self.ledger = decision.saved
        decision.saved, decision.works, decision.num_evicted = None, [], 0

    def _narrow_of(self, slots: IntArray) -> IntArray:
        """Those that are occupied and narrow, each once."""
        narrow: IntArray = np.unique(slots[self.ledger.occupied[slots] & (self.ledger.levels_of(slots) > 0)])
        return narrow

    def _written_slots(self) -> IntArray:
        """Slots that calls of this step have given tokens to, by the ids they have now."""
        found = [NO_SLOTS]
        for slots_of, seen in self._written:
            slots = slots_of()
            for lookup in self._lookups[seen:]:
                slots = lookup[slots]
            found.append(slots)
        written = np.concatenate(found)
        self._written, self._lookups = [(lambda: written, 0)] if len(written) else [], []
        return written
