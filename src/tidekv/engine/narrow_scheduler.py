"""The scheduler under `narrow`: who is stepped, who is paused at minimum width, and who gets width back.

    1. widen     parked and paused requests in order of rank, a batch of pages at a time: under this step, which then
                 does without them, as far as it hides the bytes; between steps as the move budget goes
    2. room      for this step's decodes and for high prompts: the last of low priority in rank gives up the pages that
                 are missing, and pauses if a step does not hide what it would then read; then who is paused is parked,
                 and for high priority low prompts that are being computed; then the last of high priority narrows, as
                 far as a step hides its streaming; then it waits, parked
    3. decode    high priority; low priority at full width
    4. prefill   high, then low; a low prompt that finds no room is opened at minimum width, its KV goes to the host as
                 it is computed, and its context streams back under the next chunks, if they hide it
    5. stream    paused requests in order of rank, as far as the step hides their bytes

So `narrow` has every choice that `swap` has (order of arrival, whole requests on the host, newcomers that wait) and
takes another one where the rates say that it costs the others less. Low priority that reads with loss (`read_modes`)
gives up its old pages first and goes on, since nothing streams; then it pauses like the others. The ladder of the
allocator, and after it the base class's way of making room, are what is left when nobody else runs.

    narrow_requests    ranks, read modes, what is away, budgets         streaming_policy    the formulas
    narrow_room        2, and which prompt may begin
    narrow_returns     1
"""

from __future__ import annotations

from tidekv.engine import streaming_policy as policy
from tidekv.engine.narrow_returns import NarrowReturns
from tidekv.engine.request import Request, RequestState
from tidekv.engine.scheduler import StepPlan, by_rank


class NarrowScheduler(NarrowReturns):
    """One step after another; see `NarrowRequests` for the arguments."""

    def plan(self) -> StepPlan:
        """Choose the step's requests and give them memory. Empty only when nothing can run."""
        if not self.widths.can_narrow:
            return super().plan()
        self.num_steps += 1
        plan = StepPlan()
        self.arriving, self.arriving_bytes = set(), 0
        self._resume()
        self.widths.open_wide()
        self._count()
        self._widen()
        self._make_room_for_step()
        self._plan_decodes(plan)
        self._plan_prefills(plan)
        self._stream_paused(plan)
        if not plan.work:  # prompts wait for room that only the paused ones can make, by going on to their ends
            self._plan_first(plan)
        for request, _ in plan.work:
            self.longest_pause_steps = max(self.longest_pause_steps, self._paused_steps(request))
            request.last_step = self.num_steps
            request.is_lossy |= self._mode(request).is_lossy and request.away_cells > 0
        self._earn(self._seconds(plan), any(r.is_high_priority for r, _ in plan.work))
        return plan

    def repeats(self) -> bool:
        """As in the base class; with nobody narrow, parked or waiting there is nothing for this class to decide."""
        if not self.widths.can_narrow:
            return super().repeats()
        return super().repeats() and not self.parked and not self.waiting

    def repeat(self, requests: list[Request]) -> None:
        """Book one such step."""
        super().repeat(requests)
        if self.widths.can_narrow:
            seconds = policy.step_s(self.rates, len(requests), sum(r.num_computed for r in requests), 0)
            self.streamed_bytes, self.stream_budget = 0, policy.stream_budget_bytes(self.rates, seconds)
            self._earn(seconds, any(r.is_high_priority for r in requests))

    # ---- 3: decode -----------------------------------------------------------------------------------------------

    def _plan_decodes(self, plan: StepPlan) -> None:
        chosen = self._steppable(by_rank(r for r in self.running if r.state is RequestState.DECODE))
        while chosen and not (self._has_wide_room(chosen) and self.memory.decode(chosen)):
            victim = self._give_up_pages(chosen)
            if victim is None:
                if self._decode_by_ladder(chosen):
                    break
                victim = self._make_room()
            chosen = [r for r in chosen if r in self.running and (r is not victim or not self._is_paused(r))]
        plan.work += [(request, 1) for request in chosen]

    def _plan_first(self, plan: StepPlan) -> None:
        """The first in rank of those that decode is stepped, whatever it costs: the ladder, then parking."""
        while requests := [r for r in self.running if r.state is RequestState.DECODE]:
            first = self._bring_in(min(requests, key=self._rank))
            if self.memory.decode([first]) or self._decode_by_ladder([first]):
                plan.work.append((first, 1))
                return
            self._make_room()

    def _has_wide_room(self, chosen: list[Request]) -> bool:
        """New pages of those that open wide are fresh ones, not narrow slots that happen to be free in a page."""
        if not any(self._opens_wide(r) for r in chosen) or not self.memory.allocator.ledger.any_narrow:
            return True
        pages = self.widths.new_pages(chosen)
        return self.memory.allocator.gather_pages(pages) >= pages

    def _steppable(self, requests: list[Request]) -> list[Request]:
        """All of high priority; of low priority those that are not paused. If that is nobody, the first in rank."""
        chosen = [r for r in requests if not self._is_paused(r) and r not in self.arriving]
        prompts = self.waiting or any(r.state is RequestState.PREFILL for r in self.running)
        if not chosen and requests and not prompts:
            return [self._bring_in(min(requests, key=self._rank))]
        return chosen

    def _decode_by_ladder(self, chosen: list[Request]) -> bool:
        """Last resort but one: the ladder halves whole classes. Not with a window: it would take recent tokens too."""
        if self.read_modes.any_lossy:
            return False
        self.memory.allocator.may_halve = True
        try:
            return self.memory.decode(chosen)
        finally:
            self.memory.allocator.may_halve = False
            self._count(everybody=True)

    # ---- 4: prefill ----------------------------------------------------------------------------------------------

    def _prefill(self, plan: StepPlan, request: Request, budget: int) -> int:
        allocator = self.memory.allocator
        self.widths.count_away([request])  # it may begin with cached pages that are narrow
        if self._mode(request).streams_nothing and request.due_pages:
            self.move_bytes -= self.widths.widen(request, request.due_pages) * self._slot_bytes()
            if request.due_pages and plan.work:
                return 0
            if request.due_pages:  # else what comes in under this step may stay under it
                self._bring_in(request)
        # A window's prompt is opened wide: its recent pages must be, and its old ones narrow when others need room.
        if self._opens_wide(request) or self._fits_wide(request):
            done = self._extend(plan, request, budget)
        else:
            with self.widths.opening_low_at(self.widths.lowest_width):
                done = self._extend(plan, request, min(budget, self._hidden_context(request, budget)))
        if done or plan.work:
            return done
        # Nobody else runs: now the ladder may halve, and after it somebody may be parked.
        allocator.may_halve = not self.read_modes.any_lossy
        try:
            return super()._prefill(plan, request, budget)
        finally:
            allocator.may_halve = False
            self._count(everybody=True)

    def _extend(self, plan: StepPlan, request: Request, budget: int) -> int:
        """Plan up to `budget` tokens of its prompt, fewer where memory is short; narrows and parks nobody."""
        page_size = self.memory.page_size
        least = page_size - request.num_computed % page_size
        chunk = min(request.num_tokens - request.num_computed, budget)
        while chunk > 0:
            pages = self.memory.pages(request.num_computed + chunk) - self.memory.pages(request.num_computed)
            has_room = not self._opens_wide(request) or self.memory.allocator.gather_pages(pages) >= pages
            if has_room and self.memory.extend(request, chunk):
                plan.work.append((request, chunk))
                return chunk
            chunk = max(least, chunk // 2 // page_size * page_size) if chunk > least else 0
        return 0

    # ---- 5: stream -----------------------------------------------------------------------------------------------

    def _stream_paused(self, plan: StepPlan) -> None:
        """Paused requests go on under the step's compute, the first in rank first."""
        self.stream_budget = policy.stream_budget_bytes(self.rates, self._seconds(plan))
        reading = [r for r, _ in plan.work if not self._mode(r).streams_nothing]
        self.streamed_bytes = sum(r.away_cells for r in reading) * self.cell_bytes
        planned = set(reading)
        paused = [r for r in self.running if self._is_paused(r) and not self._mode(r).streams_nothing]
        paused = [r for r in paused if r not in planned and r not in self.arriving]
        # A step that streams takes longer by the host's part: whoever else is in it is paid for by the move budget.
        rates, has_chunk = self.rates, any(r.state is not RequestState.DECODE for r, _ in plan.work)
        streams_s = rates.narrow_chunk_s if has_chunk else rates.narrow_step_s
        lengthens = policy.owed_bytes(rates, streams_s if plan.work and not self.streamed_bytes else 0.0)
        # What bringing somebody in would cost is left for that: it comes first.
        budget = self.move_bytes - policy.owed_bytes(rates, rates.behind_step_s)
        if lengthens > max(0, budget) or (lengthens and not self._hides(plan)):
            return
        unhidden = rates.unhidden_link if has_chunk else 0.0
        chosen = []
        for request in sorted(paused, key=self._rank):
            away = request.away_cells * self.cell_bytes
            unhidden_bytes = int(unhidden * away)
            is_cheaper_wide = policy.restore_pays(away, unhidden_bytes, self._steps_left(request))
            if unhidden and (is_cheaper_wide or lengthens + unhidden_bytes > budget):
                continue
            if self.streamed_bytes + self.arriving_bytes + away <= self.stream_budget:
                chosen.append(request)
                self.streamed_bytes += away
                lengthens += unhidden_bytes
        if chosen and self.memory.decode(chosen):
            self.move_bytes -= lengthens
            plan.work += [(request, 1) for request in by_rank(chosen)]
        elif chosen:  # no room for their new tokens
            self.streamed_bytes -= sum(r.away_cells for r in chosen) * self.cell_bytes

    def _hides(self, plan: StepPlan) -> bool:
        """Its prompts' chunk, if it has one, hides what is streamed under it."""
        prompt = sum(n for r, n in plan.work if r.state is not RequestState.DECODE)
        return not prompt or policy.chunk_hides(self.rates, prompt, self.high_share)
