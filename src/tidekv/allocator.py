"""`DynamicPagedTokenToKVPoolAllocator`: the whole story of a layer-elastic KV cache, on one page.

    alloc_extend / alloc_decode / alloc
      -> _plain_slots                 the steady state: full width and enough free pages, any page does for anyone; else
      -> ensure_capacity              once per priority in the batch; while the demand does not fit:
           -> _try_backpressure       the first rung of the ladder that applies
                -> _halve_and_repack  A _halve_slot_width  B _merge_across_pages  C _remap_loc_holders
      -> _allocate_pages              partial slots first, then fresh pages, no static cap
      -> alloc_extend_kernel / alloc_decode_kernel, one launch, in the caller's order
      -> (out_indices, dynamic_indices)

Deciding happens in the ledger, on the host, in a transaction; the device's part is queued and runs when the decision is
final. So a refusal (`None`, `False`) leaves every bit as it was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch

from tidekv.errors import ConfigError, InvariantError
from tidekv.kernels import assign
from tidekv.memory import contract
from tidekv.memory.contract import Priorities
from tidekv.memory.ledger import DYNAMIC, HIGH, LOW, NO_SLOTS, AllocationSplit, BoolArray, IntArray
from tidekv.pressure import chosen, ladder, repack, restore
from tidekv.pressure.decision import Decision
from tidekv.pressure.ladder import PressureState, Rung
from tidekv.pressure.plan import Refusal, RepackPlan, plan_merge, plan_repack
from tidekv.pressure.pool_state import PagedPoolState
from tidekv.pressure.repack import Work

Indices = tuple[torch.Tensor, torch.Tensor | None]


def _num_pages(lens: IntArray, page_size: int) -> IntArray:
    """[bs] pages that hold so many tokens each. numpy divides 64 lengths in the time of 20 shifts."""
    if page_size & (page_size - 1):
        return -(-lens // page_size)
    return (lens + (page_size - 1)) >> (page_size.bit_length() - 1)


def _opens_page(seq_lens: IntArray, page_size: int) -> BoolArray:
    """[bs] whether token seq - 1 is the first of a page."""
    power_of_2 = page_size & (page_size - 1) == 0
    offset = seq_lens & (page_size - 1) if power_of_2 else seq_lens % page_size
    opens: BoolArray = offset == 1 % page_size
    return opens


@dataclass(frozen=True)
class _Batch:
    """What `_allocate_batch` found for the kernels."""

    slots: IntArray  # new slots, request after request in the caller's order
    is_run: bool  # they are the run of the free list that was handed out last
    last_loc: torch.Tensor
    touched: Callable[[], IntArray]  # the slots that go on being filled, by the ids they have now


class DynamicPagedTokenToKVPoolAllocator(PagedPoolState):
    """SGLang's paged allocator contract, over pages that can give up layers.

    size, page_size, dtype, device, kvcache   as SGLang's `PagedTokenToKVPoolAllocator`; `size` in tokens
    need_sort             accepted for the contract; the free list is sorted at every merge anyway
    req_to_token_pool     rewritten when locations change; other holders: `register_loc_holder`
    host_pool             where layers go; None makes one. With a pool of 0 bytes nothing ever narrows
    low_max_pages, high_reserved_pages, dynamic_max_pages   thresholds in pages (int) or as a fraction of P (float)
    write_through         low-priority KV is copied to the host as it is produced, so that halving it copies nothing

    Locations are int64 on the device. With everything at full width they are those of an ordinary paged pool.
    """

    # ==== allocation ============================================================================================

    def alloc(self, need_size: int, is_high_priority: bool | None = None) -> Indices | None:
        """`need_size` tokens in slots of their own -> (locs [need_size], dynamic or None), or None: nothing changed."""
        if need_size < 0:
            raise ConfigError(f"need_size must be >= 0, got {need_size}")
        code = LOW if is_high_priority is not None and not is_high_priority else HIGH
        pages = -(-need_size // self.page_size)
        with self._deciding() as decision:
            if not self.ensure_capacity(pages, code):
                return None
        slots, is_run = self._allocate_slots(pages, code, decision.splits[code])
        self.new_slots = slots
        out = self._locs_of(slots, is_run)[:need_size]
        return out, self._dynamic_indices(out, slots)

    def alloc_extend(
        self,
        prefix_lens: torch.Tensor,
        prefix_lens_cpu: torch.Tensor,
        seq_lens: torch.Tensor,
        seq_lens_cpu: torch.Tensor,
        last_loc: torch.Tensor,
        extend_num_tokens: int,
        is_high_priority: Priorities = None,
    ) -> Indices | None:
        """Tokens [prefix, seq) of each request -> (out_indices [extend_num_tokens] int64, dynamic_indices), or None.

        prefix_lens, seq_lens, last_loc: [bs] int64 on the device; *_cpu: the same on the host. `last_loc` is the
        location of token prefix - 1 (-1 if there is none), read before the call. On None nothing has changed.
        """
        prefix = contract.host_lens("prefix_lens_cpu", prefix_lens_cpu)
        seq = contract.host_lens("seq_lens_cpu", seq_lens_cpu)
        contract.check_extend(prefix, seq, extend_num_tokens)
        page_size = self.page_size
        new_pages = _num_pages(seq, page_size) - _num_pages(prefix, page_size)
        for name, tensor in (("prefix_lens", prefix_lens), ("seq_lens", seq_lens), ("last_loc", last_loc)):
            contract.check_device_vector(name, tensor, len(seq), self.device)
        if self.device.type == "cpu":
            contract.check_last_loc(self.ledger, last_loc, prefix, seq > prefix)

        def goes_on() -> BoolArray:
            going_on: BoolArray = (prefix % page_size != 0) & (seq > prefix)
            return going_on

        num_pages = int(np.add.reduce(new_pages))
        plain = self._plain_slots(new_pages, num_pages, is_high_priority, goes_on, last_loc)
        if plain is not None:
            pages, run = plain
            out = assign.alloc_extend(
                prefix_lens, seq_lens, last_loc, pages, extend_num_tokens, page_size, run=run, checked=True
            )
            return out, None
        batch = self._allocate_batch(new_pages, goes_on, last_loc, is_high_priority)
        if batch is None:
            return None
        new_slots, run = self._slots_on_device(batch.slots, batch.is_run)
        out = assign.alloc_extend(
            prefix_lens, seq_lens, batch.last_loc, new_slots, extend_num_tokens, page_size, run=run, checked=True
        )
        return out, self._dynamic_indices(out, batch.slots, batch.touched)

    def alloc_decode(
        self,
        seq_lens: torch.Tensor,
        seq_lens_cpu: torch.Tensor,
        last_loc: torch.Tensor,
        is_high_priority: Priorities = None,
    ) -> Indices | None:
        """One more token for each request -> (out_indices [bs] int64, dynamic_indices), or None with nothing changed.

        seq_lens: [bs] int64 with the new token counted in; last_loc: [bs] int64, the location of the token before it.
        """
        seq = contract.host_lens("seq_lens_cpu", seq_lens_cpu)
        opens = _opens_page(seq, self.page_size)
        for name, tensor in (("seq_lens", seq_lens), ("last_loc", last_loc)):
            contract.check_device_vector(name, tensor, len(seq), self.device)
        if self.device.type == "cpu":
            contract.check_last_loc(self.ledger, last_loc, seq - 1, np.ones(len(seq), dtype=np.bool_))
        num_pages = int(np.count_nonzero(opens))
        plain = self._plain_slots(opens, num_pages, is_high_priority, lambda: ~opens, last_loc)
        if plain is not None:
            pages, run = plain
            return assign.alloc_decode(seq_lens, last_loc, pages, self.page_size, run=run, checked=True), None
        batch = self._allocate_batch(opens, lambda: ~opens, last_loc, is_high_priority)
        if batch is None:
            return None
        new_slots, run = self._slots_on_device(batch.slots, batch.is_run)
        out = assign.alloc_decode(seq_lens, batch.last_loc, new_slots, self.page_size, run=run, checked=True)
        return out, self._dynamic_indices(out, batch.slots, batch.touched)

    def _allocate_batch(
        self,
        new_pages: IntArray | BoolArray,
        goes_on: Callable[[], BoolArray],
        last_loc: torch.Tensor,
        is_high_priority: Priorities,
    ) -> _Batch | None:
        """Capacity for each group, then slots for each group, high before low; None with nothing changed.

        new_pages: [bs] pages that each request opens; goes_on(): [bs] those that go on filling the page of last_loc.
        """
        is_high: BoolArray | None = None
        code = contract.uniform_code(is_high_priority)
        if code is not None:
            groups = [(code, int(np.add.reduce(new_pages, dtype=np.int64)))]
        else:
            is_high = np.repeat(contract.priority_mask(is_high_priority, len(new_pages)), new_pages)  # of each new page
            num_high = int(np.count_nonzero(is_high))
            groups = [(HIGH, num_high), (LOW, len(is_high) - num_high)]

        def touched() -> IntArray:
            # Reads last_loc: waits for the device. Only asked for when something is narrow or has to be narrowed.
            going_on = goes_on()
            return last_loc.cpu().numpy()[going_on] // self.page_size if going_on.any() else NO_SLOTS

        with self._deciding(touched) as decision:
            for code, pages_needed in groups:
                if not self.ensure_capacity(pages_needed, code):
                    return None
        splits, works = decision.splits, decision.works
        carried = last_loc
        for work in works:
            if work.lookup is not None:  # the caller read last_loc before this call: carry it along
                carried = self.loc_holders.remapped(carried, work.lookup)
        slots, is_run = self._allocate_slots(groups[0][1], groups[0][0], splits[groups[0][0]])
        if is_high is not None:
            high_slots, low_slots = slots, self._allocate_slots(groups[1][1], LOW, splits[LOW])[0]
            slots, is_run = np.empty(len(is_high), dtype=np.int64), False
            slots[is_high], slots[~is_high] = high_slots, low_slots

        def touched_now() -> IntArray:
            found = touched()
            for work in works:
                found = found if work.lookup is None else work.lookup[found]
            return found

        self.new_slots = slots
        if self._in_step:
            self._written.append((lambda: np.concatenate([slots, touched_now()]), len(self._lookups)))
        return _Batch(slots, is_run, carried, touched_now)

    def _plain_slots(
        self,
        new_pages: IntArray | BoolArray,
        num_pages: int,
        is_high_priority: Priorities,
        goes_on: Callable[[], BoolArray],
        last_loc: torch.Tensor,
    ) -> tuple[torch.Tensor, tuple[int, int]] | None:
        """The steady state, in a few microseconds: full width everywhere and enough free pages. Else None: decide.

        Returns (the device's mirror of the free list, the run of it that these requests take). At full width one free
        page is as good as another, so a mixed batch takes them in the caller's order too: only the books tell high from
        low, and nothing is uploaded.
        """
        ledger = self.ledger
        if self._decision is not None or not ledger.at_full_width or num_pages > ledger.num_free_pages:
            return None
        codes = contract.codes_of_new_pages(is_high_priority, new_pages, num_pages)
        slots = NO_SLOTS
        if num_pages:
            slots = ledger.open_pages(codes, num_pages)
            low = slots[np.full(num_pages, codes) == LOW] if self.write_through else NO_SLOTS
            if len(low):
                ledger.write_through(low)
        self.new_slots = slots
        if self._in_step:
            page_size = self.page_size
            self._written.append((
                lambda: np.concatenate([slots, last_loc.cpu().numpy()[goes_on()] // page_size]), len(self._lookups)
            ))  # fmt: skip
        return self._free_list_run(num_pages)

    def _allocate_pages(self, num_pages: int, priority_code: int) -> tuple[torch.Tensor, torch.Tensor]:
        """`num_pages` slots, partial ones first -> (page_ids [n], slot_starts [n]) int64. Capacity must have been
        ensured."""
        split = self.ledger.split(priority_code, num_pages, self.ledger.num_free_pages)
        if split is None:
            raise InvariantError(f"no capacity for {num_pages} pages: call ensure_capacity first")
        slots = torch.from_numpy(self._allocate_slots(num_pages, priority_code, split)[0]).to(self.device)
        return slots % self.geometry.page_stride, slots // self.geometry.page_stride + 1

    def _allocate_slots(self, num_slots: int, code: int, split: AllocationSplit) -> tuple[IntArray, bool]:
        """`_allocate_pages` in combined ids, on the host; and whether they are the run of the free list that was handed
        out last."""
        ledger = self.ledger
        slots = ledger.allocate(code, num_slots, split)
        if ledger.any_narrow and not ledger.used[DYNAMIC]:
            ledger.grow_staging(1)
        if self.write_through and code == LOW:
            ledger.write_through(slots)
        return slots, split.fresh_pages == num_slots and not ledger.level[code]

    def _slots_on_device(self, slots: IntArray, is_run: bool) -> tuple[torch.Tensor, tuple[int, int]]:
        """A tensor on the device and the run of it that is `slots`."""
        if is_run:
            return self._free_list_run(len(slots))
        return torch.from_numpy(slots).to(self.device, non_blocking=True), (0, len(slots))

    def _locs_of(self, slots: IntArray, is_run: bool) -> torch.Tensor:
        """[len(slots) * page_size] all locations of these slots, in their order."""
        there, (first, count) = self._slots_on_device(slots, is_run)
        offsets = torch.arange(self.page_size, device=self.device)
        return (there[first : first + count, None] * self.page_size + offsets).reshape(-1)

    def _free_list_run(self, n: int) -> tuple[torch.Tensor, tuple[int, int]]:
        """The `n` page ids that the ledger has just handed out, as a run of the device's mirror of the free list: no
        copy, and no slice, which would cost as much as the rest of the call."""
        pages = self.ledger.free_list
        if self._device_free_list[0] != pages.version:
            self._device_free_list = (pages.version, torch.from_numpy(pages.pages).to(self.device, non_blocking=True))
        return self._device_free_list[1], (pages.head - n, n)

    def _dynamic_indices(
        self, out: torch.Tensor, new_slots: IntArray, touched: Callable[[], IntArray] = lambda: NO_SLOTS
    ) -> torch.Tensor | None:
        """None when every token is in a full-width slot; else [T] int64: its staging location, or 0 (the sink)."""
        ledger = self.ledger
        if not ledger.any_narrow:
            return None
        if not self._in_step:
            ledger.drop_dynamic(ledger.staging_assigned)
        mine = self._narrow_of(np.concatenate([new_slots, touched()]))
        # Slots that an earlier call of this step gave tokens to may have been narrowed by this one.
        both = np.concatenate([mine, np.setdiff1d(self._narrow_of(self._written_slots()), mine)])
        if not ledger.assign_dynamic(both):
            raise InvariantError(f"staging for {len(both)} slots was promised and is not there")
        if not len(mine):
            return None
        keys = torch.from_numpy(mine).to(self.device)
        staged = torch.from_numpy(ledger.dynamic_of[mine]).to(self.device)
        combined = out // self.page_size
        at = torch.searchsorted(keys, combined).clamp_(max=len(mine) - 1)
        return torch.where(keys[at] == combined, staged[at] * self.page_size + out % self.page_size, 0)

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

    # ==== pressure ==============================================================================================

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
        assert self._decision is not None
        decision = self._decision
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
        decision = self._decision
        assert decision is not None
        assert self.evictor is not None
        locs = self.evictor.peek_evictable(decision.num_evicted + num_pages)[decision.num_evicted :]
        self.ledger.release(locs // self.page_size)
        decision.num_evicted += len(locs)
        return len(locs) > 0

    def _merge_half_empty_pages(self, num_pages: int) -> bool:
        """Rung 0: merge pages that are half empty already; frees up to `num_pages` pages and halves nothing."""
        assert self._decision is not None
        freed = 0
        for (code, level), mergeable in self._mergeable_pages(self._decision).items():
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
        assert self._decision is not None
        if self._decision.saved is None:
            self._decision.saved = self.ledger.clone()
        self._decision.works.append(repack.work_of_repack(plan, self.ledger))

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
        if decision.num_evicted:
            assert self.evictor is not None
            self.evictor.evict(decision.num_evicted)
            self.num_evicted_pages += decision.num_evicted
        for work in decision.works:
            self._apply(work)

    def _roll_back(self, decision: Decision) -> None:
        """The books are as they were before the decision; nothing of it has reached the device."""
        if decision.saved is not None:
            self.ledger = decision.saved
        decision.saved, decision.works, decision.num_evicted = None, [], 0

    # ==== restore, park: the ways back and out ====================================================================

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
        return self._locs_of(slots, False)

    @contextmanager
    def step(self) -> Iterator[None]:
        """One forward step: dynamic slots given by several calls inside stay valid until it ends.

        Outside a step each allocating call begins a new one, and the dynamic slots of the call before are reused.
        """
        self.ledger.end_step()
        self._in_step = True
        try:
            yield
        finally:
            self._in_step = False
            self._written, self._lookups = [], []
            self.ledger.end_step()

    # ==== counts ===============================================================================================

    def available_size(self, is_high_priority: bool | None = None) -> int:
        """Tokens that `alloc` would give this class now, without any pressure (whole pages)."""
        self._collect_freed()
        code, ledger = (LOW if is_high_priority is not None and not is_high_priority else HIGH), self.ledger
        most = (ledger.num_free_pages << ledger.level[code]) + ledger.num_partial(code)
        if not ledger.any_narrow and not ledger.level[code]:
            return most * self.page_size
        trial = Decision(lambda: NO_SLOTS, stages_new_slots=True, has_host_pages=False)
        low, high = 0, most + 1  # fits(low), not fits(high)
        while high - low > 1:
            trial.demand = {code: (low + high) // 2}
            low, high = (trial.demand[code], high) if self._fits(trial) else (low, trial.demand[code])
        return low * self.page_size
