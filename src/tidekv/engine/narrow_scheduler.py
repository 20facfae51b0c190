"""The scheduler under `narrow`: who is stepped, who is paused at minimum width, and who gets width back.

    1. widen     parked and paused requests in order of rank, a batch of pages at a time: under this step, which then
                 does without them, as far as it hides the bytes; between steps as the move budget goes
    2. room      for this step's decodes and for high prompts: the last of low priority in rank gives up the pages that
                 are missing, and pauses if a step does not hide what it would then read; then who is paused is parked;
                 then the last of high priority narrows, as far as a step hides its streaming; then it waits, parked
    3. decode    high priority; low priority at full width
    4. prefill   high, then low; a low prompt that finds no room is opened at minimum width, its KV goes to the host as
                 it is computed, and its context streams back under the next chunks
    5. stream    paused requests in order of rank, as far as the step hides their bytes

So `narrow` has every choice that `swap` has (order of arrival, whole requests on the host, newcomers that wait) and
takes another one where the rates say that it costs the others less. A class that reads with loss (`read_modes`) is
never paused: its old pages narrow and nothing streams. The ladder of the allocator, and after it the base class's way
of making room, are what is left when nobody else runs. The formulas are in `streaming_policy`.
"""

from __future__ import annotations

from tidekv.engine import streaming_policy as policy
from tidekv.engine.memory import RequestMemory
from tidekv.engine.read_modes import ReadMode, ReadModes
from tidekv.engine.request import Request, RequestState
from tidekv.engine.scheduler import Scheduler, StepPlan, by_rank
from tidekv.engine.streaming_policy import StepRates
from tidekv.engine.widths import RequestWidths
from tidekv.memory.ledger import LOW


class NarrowScheduler(Scheduler):
    """rates         configured, the same on every rank
    read_modes       how each class is read
    high_share       how much longer than without it a step of high priority may take for widening others
    max_pause_steps  a paused request that was not stepped for so long comes before everybody else of its class
    """

    def __init__(
        self,
        memory: RequestMemory,
        prefill_chunk: int,
        max_running: int,
        rates: StepRates,
        read_modes: ReadModes,
        high_share: float = 0.05,
        max_pause_steps: int = 4096,
    ) -> None:
        super().__init__(memory, "narrow", prefill_chunk, max_running)
        self.widths = RequestWidths(memory, read_modes)
        self.rates = rates
        self.read_modes = read_modes
        self.high_share = high_share
        self.max_pause_steps = max_pause_steps
        self.cell_bytes = memory.allocator.geometry.cell_bytes
        self.step_s = rates.base_s  # of the last planned step, by the rates
        self.move_bytes = 0  # what widening may spend now; falls below 0 by at most one page
        self.streamed_bytes = self.stream_budget = 0  # of the last planned step
        self.arriving_bytes = 0  # of widening that runs under it
        self.arriving: set[Request] = set()  # whose pages those are: they are not in the step
        self.num_narrowings = self.num_widenings = self.longest_pause_steps = 0
        memory.allocator.may_halve = not self.widths.can_narrow

    # ---- one step ----------------------------------------------------------------------------------------------

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

    def _earn(self, seconds: float, high: bool) -> None:
        """What a step of this length, with high priority in it or not, may spend on widening."""
        self.step_s = seconds
        earned = policy.move_budget_bytes(self.rates, seconds, self.high_share, high)
        most = max(earned, policy.WIDEN_BATCH * self._slot_bytes(), policy.saved_bytes(self.rates, self.high_share))
        self.move_bytes = min(self.move_bytes + earned, most)

    def _count(self, *, everybody: bool = False) -> None:
        """Widths of those that may have changed; of everybody where the ladder ran, and every 64 steps."""
        if not everybody and self.num_steps % 64:
            some = [r for r in self.running if r.away_cells or r.state is RequestState.PREFILL or r.last_step < 0]
            self.widths.count_away(some)
        else:
            self.widths.count_away(self.running)

    def _seconds(self, plan: StepPlan) -> float:
        decodes = [r for r, _ in plan.work if r.state is RequestState.DECODE]
        prompt = sum(n for r, n in plan.work if r.state is not RequestState.DECODE)
        return policy.step_s(self.rates, len(decodes), sum(r.num_computed for r in decodes), prompt)

    def _slot_bytes(self) -> int:
        """What widening one page from minimum width brings over the link."""
        ledger = self.memory.allocator.ledger
        return (ledger.geometry.layer_num - ledger.ladder[-1]) * self.cell_bytes

    def end_step(self) -> None:
        """Widths that nobody in particular waits for: old pages of a window, pages that the ladder took."""
        if not self.widths.can_narrow or self.move_bytes <= 0:
            return
        most = min(self.move_bytes, policy.WIDEN_BATCH * self._slot_bytes())
        widened = self.memory.allocator.restore_widths(max(1, most // self._slot_bytes()))
        self.move_bytes -= widened * self._slot_bytes()

    # ---- ranks -------------------------------------------------------------------------------------------------

    def _paused_steps(self, request: Request) -> int:
        """Steps since it was last stepped, or since it first held memory."""
        return 0 if request.last_step < 0 else self.num_steps - request.last_step - 1

    @staticmethod
    def _steps_left(request: Request) -> int:
        """Decode steps until it ends, at the latest."""
        return request.sampling.max_new_tokens - (request.num_tokens - len(request.prompt_ids))

    def _rank(self, request: Request) -> tuple[bool, bool, int]:
        return policy.rank_key(request.is_high_priority, self._is_overdue(request), request.arrival_order)

    def _is_overdue(self, request: Request) -> bool:
        is_out = request.away_cells > 0 or request.parked is not None
        return is_out and self._paused_steps(request) > self.max_pause_steps

    def _had_turn(self, request: Request) -> bool:
        """It has run the quantum that it was given when it came in overdue, so another one may take its place."""
        return len(request.output_ids) >= request.turn_end

    def _quantum(self, request: Request) -> int:
        return policy.quantum_tokens(self.rates, request.num_computed * self._token_bytes(), self.step_s)

    def _token_bytes(self) -> int:
        return self.memory.allocator.geometry.layer_num * self.cell_bytes // self.memory.page_size

    def _mode(self, request: Request) -> ReadMode:
        return self.read_modes.of(request.is_high_priority)

    def _opens_wide(self, request: Request) -> bool:
        """Its new pages must be full width: it is stepped at every step, and what it reads is not streamed."""
        return request.is_high_priority or self._mode(request).streams_nothing

    def _is_paused(self, request: Request) -> bool:
        """Low priority that decodes, but some of what it must read is not on the device."""
        return request.state is RequestState.DECODE and request.due_pages > 0 and not request.is_high_priority

    def _may_pause(self, request: Request) -> bool:
        """Low priority that decodes with a window: it gives up its old pages and goes on, then the recent ones."""
        is_window = not request.is_high_priority and self._mode(request).streams_nothing
        return is_window and request.state is RequestState.DECODE and not request.due_pages

    @staticmethod
    def _is_low_prompt(request: Request) -> bool:
        """Low priority whose prompt is being computed."""
        return not request.is_high_priority and request.state is RequestState.PREFILL

    def _wide_pages(self, request: Request) -> int:
        """Its pages that could narrow, as last counted."""
        mode, ledger = self._mode(request), self.memory.allocator.ledger
        away = ledger.geometry.layer_num - mode.width(ledger.ladder)
        return max(0, self.memory.pages(request.num_computed) - sum(mode.kept()) - -(-request.away_cells // away))

    def _pages_away(self, request: Request) -> int:
        """Pages that it takes until nothing is due to it any more."""
        if request.parked is None:
            return request.due_pages
        pages, mode = len(request.parked), self._mode(request)
        if not mode.streams_nothing or self._return_width(request) > mode.width(self.memory.allocator.ledger.ladder):
            return pages
        layers = self.memory.allocator.ledger.geometry.layer_num
        return min(pages, sum(mode.kept()) + -(-pages * self._return_width(request) // layers))

    def _return_width(self, request: Request) -> int:
        """At which it comes back from being parked. What it reads in full is widened after that; of high priority, and
        of a prompt with a window, everything comes back at once."""
        ledger = self.memory.allocator.ledger
        in_prompt = self._opens_wide(request) and not request.output_ids
        if request.is_high_priority or in_prompt:
            return ledger.geometry.layer_num
        return self._mode(request).width(ledger.ladder)

    # ---- 1: width comes back -----------------------------------------------------------------------------------

    def _widen(self) -> None:
        """The first in rank get their pages back, a batch a step."""
        wanting = [r for r in self.running if self._wants_width(r)] + self.parked
        if not wanting:
            return
        left, hidden = self._move_limit(), self._hidden_bytes()
        arrival = policy.owed_bytes(self.rates, self.rates.behind_step_s)  # once a step that pages come in under
        # A page for everybody's growth, and what this very step opens: else it would take back what just came in.
        spare = max(sum(not self._is_paused(r) for r in self.running) + 1, self._demand())
        for request in sorted(wanting, key=self._rank):
            need = self._pages_away(request)
            behind = self._comes_behind(request)
            batch = min(policy.WIDEN_BATCH, need) * self._slot_bytes()
            if behind and hidden < self._slot_bytes():
                behind = False  # a slow link: not even one page fits under a step
            if behind and hidden - self.arriving_bytes < min(batch, hidden):
                return
            if behind and not self.arriving_bytes and arrival > max(0, self.move_bytes):
                return
            if not behind and min(self.move_bytes, left) < batch:
                return  # save up: every batch rewrites the tables of locations once
            streams = not self._mode(request).streams_nothing
            may_stream = streams and request.parked is None and need * self._slot_bytes() <= hidden
            if may_stream and not policy.restore_pays(batch, batch, self._steps_left(request)):
                continue  # its last token: streaming it once costs the same and needs no page
            if need + spare > self.widths.available_pages():
                self._give_way(request, need + spare)
            room = self.widths.available_pages() - spare
            if need > room:
                if request.is_high_priority and request.parked is None:
                    continue  # it is stepped all the same
                # What is free is kept for it: a smaller one behind it would take it for ever. Where it is streamed,
                # every page that it has makes that cheaper, and it goes on once a step hides what is left.
                if not (behind and streams and room >= policy.WIDEN_BATCH):
                    return
                need = room
            if request.parked is not None and not self._unpark(request):
                continue
            if self._is_overdue(request):
                request.turn_end = len(request.output_ids) + self._quantum(request)
            if behind and request.state is not RequestState.DECODE:
                continue  # it was parked in its prompt
            need = min(need, self._pages_away(request))
            widened = 0
            if behind and need:
                most = (hidden - self.arriving_bytes) // self._slot_bytes()
                widened = self.widths.widen_behind(request, min(need, most))
                if widened and not self.arriving_bytes:
                    self.move_bytes -= arrival
                self.arriving_bytes += widened * self._slot_bytes()
                if widened:
                    self.arriving.add(request)
            if need and not widened:  # nor where none of its pages may come in behind a step
                most = min(self.move_bytes, left) // self._slot_bytes()
                widened = self.widths.widen(request, max(1, min(need, most)))
                self.move_bytes -= widened * self._slot_bytes()
                left -= widened * self._slot_bytes()
            self.num_widenings += widened > 0
            spare += self._pages_away(request)  # the rest of it is promised

    def _comes_behind(self, request: Request) -> bool:
        """Its pages may come in under a step that it is not in: low priority, written through, decodes."""
        if request.is_high_priority or not self.memory.allocator.write_through:
            return False
        return request.state is RequestState.DECODE or (request.parked is not None and bool(request.output_ids))

    def _hidden_bytes(self) -> int:
        """What this step hides, as far as it is known before it is planned: those who run at full width, and the
        prompts that are being computed."""
        decodes = [r for r in self.running if r.state is RequestState.DECODE and not self._is_paused(r)]
        prompt = sum(r.num_tokens - r.num_computed for r in self.running if r.state is RequestState.PREFILL)
        seconds = policy.step_s(
            self.rates, len(decodes), sum(r.num_computed for r in decodes), min(prompt, self.prefill_chunk)
        )
        read = sum(r.away_cells for r in decodes if not self._mode(r).streams_nothing) * self.cell_bytes
        return policy.stream_budget_bytes(self.rates, seconds) - read

    def _wants_width(self, request: Request) -> bool:
        """It decodes narrow, or is a prompt whose narrow context the next chunk would not hide."""
        if not request.due_pages:
            return False
        is_read = request.state is RequestState.DECODE or self._mode(request).streams_nothing
        return is_read or self._hidden_context(request, self.prefill_chunk) <= 0

    def _move_limit(self) -> int:
        """Bytes that widening may take out of this step at once, of what was saved up for it."""
        prompts = bool(self.waiting) or any(r.state is RequestState.PREFILL for r in self.running)
        batch = policy.WIDEN_BATCH * self._slot_bytes()
        return max(batch, policy.burst_bytes(self.rates, self.step_s, 0 if prompts else self.prefill_chunk))

    def _unpark(self, request: Request) -> bool:
        """Back on the device; widening comes after."""
        pages, width = len(request.owned_pages), self._return_width(request)
        with self.widths.opening_low_at(width):
            if not self.memory.unpark(request):
                return False
        self.move_bytes -= pages * width * self.cell_bytes
        self.widths.count_away([request])
        self.parked.remove(request)
        self.running.append(request)
        return True

    def _give_way(self, request: Request, pages: int) -> None:
        """The last in rank narrow for `request`, if that makes enough room.

        Low priority for a parked request of high; one that is paused, to whom its pages are of no use, for those before
        it; one that had its turn for one that waited too long. So two equals never push each other out.
        """
        if request.is_high_priority and request.parked is None:
            return
        rank, overdue = self._rank(request), self._is_overdue(request)
        after = [
            r
            for r in self._wide_lows()
            if request.is_high_priority
            or (self._is_paused(r) and self._rank(r) > rank)
            or (overdue and self._had_turn(r) and not self._is_overdue(r))
        ]
        after.sort(key=self._rank)
        if self.widths.available_pages() + sum(self._wide_pages(r) for r in after) < pages:
            return
        while after and self.widths.available_pages() < pages:
            self._narrow(after.pop())

    def _wide_lows(self) -> list[Request]:
        """Low requests with pages that can be narrowed."""
        lows = (r for r in self.running if not r.is_high_priority and r.state is RequestState.DECODE)
        return [r for r in lows if self._wide_pages(r) > 0]

    # ---- 2: room for the step ----------------------------------------------------------------------------------

    def _make_room_for_step(self) -> None:
        """Until what this step opens is there: the last of low priority gives up the pages that are missing, then who
        is paused is parked, then the last of high priority narrows, which goes on being stepped."""
        demand = self._demand()
        if demand <= self.widths.available_pages():
            return
        victims = sorted(self._wide_lows(), key=self._rank)
        while victims and (missing := demand - self.widths.available_pages()) > 0:
            self._narrow(victims.pop(), policy.pages_to_narrow(missing))
            demand = self._demand()
        windows = sorted((r for r in self.running if self._may_pause(r)), key=self._rank)
        while windows and demand > self.widths.available_pages():
            self._narrow(windows.pop(), whole=True)
            demand = self._demand()
        paused = sorted((r for r in self.running if self._is_paused(r)), key=self._rank)
        # The last one stays: a prompt that then finds no row (parked requests keep theirs) would leave nobody to step.
        while paused and len(self.running) > 1 and demand > self.widths.available_pages() and self._park(paused[-1]):
            paused.pop()
            demand = self._demand()
        begun = sorted((r for r in self.running if self._is_low_prompt(r)), key=self._rank)
        while begun and len(self.running) > 1 and self._demand(only_high=True) > self.widths.available_pages():
            if not self._park(begun.pop()):
                break
        demand = self._demand()
        self._narrow_highs(demand)

    def _narrow_highs(self, demand: int) -> int:
        """No more pages than are missing, no more bytes than this step may wait for, and where they will be streamed no
        more than a decode step hides. Returns the pages narrowed."""
        hidden = self._hidden_high_pages()
        seconds = policy.step_s(self.rates, 1, 0, self.prefill_chunk)
        leaving = policy.move_budget_bytes(self.rates, seconds, self.high_share, True) // self._slot_bytes()
        total = 0
        for victim in sorted(self._highs(), key=self._rank, reverse=True):
            missing = demand - self.widths.available_pages()
            if missing <= 0:
                break
            most = leaving if self._mode(victim).streams_nothing else min(leaving, hidden)
            if most > 0 and self._wide_pages(victim) > 0:
                narrowed = self._narrow(victim, min(most, missing + missing // 8 + 2))
                leaving, hidden, total = leaving - narrowed, hidden - narrowed, total + narrowed
        return total

    def _hidden_high_pages(self) -> int:
        """Pages of high priority that may still narrow: the shortest decode step hides their streaming."""
        highs = self._highs()
        away = sum(r.away_cells for r in highs if not self._mode(r).streams_nothing) * self.cell_bytes
        hidden = max(0, policy.stream_budget_bytes(self.rates, self.rates.base_s) - away) // self._slot_bytes()
        return min(hidden, sum(self._wide_pages(r) for r in highs))

    def _highs(self) -> list[Request]:
        return [r for r in self.running if r.is_high_priority and r.state is RequestState.DECODE]

    def _park(self, request: Request) -> bool:
        """It leaves the device whole. False, nothing changed: the host is full."""
        if not self.memory.park(request):
            return False
        request.away_cells = request.due_pages = 0
        self.running.remove(request)
        self.parked.append(request)
        self.num_parkings += 1
        return True

    def _resume(self) -> None:
        """`_widen` brings parked requests back by rank; here only when nothing else runs."""
        if not self.running and self.parked:
            self._unpark(min(self.parked, key=self._rank))

    def _demand(self, *, only_high: bool = False) -> int:
        """Pages for this step's decodes and for prompts that open wide; a few for those that open narrow."""
        some = [r for r in self.running if r.is_high_priority or not only_high]
        decodes = [r for r in some if r.state is RequestState.DECODE and r not in self.arriving]
        pages = self.widths.new_pages([r for r in decodes if not self._is_paused(r)])
        prompts = [r for r in some if r.state is RequestState.PREFILL]
        waiting = [r for r in by_rank(self.waiting) if r.is_high_priority or not only_high]
        if waiting and self._may_admit(waiting[0]):
            prompts += waiting
        wide = sum(r.num_tokens - r.num_computed for r in prompts if self._opens_wide(r))
        pages += self.memory.pages(min(wide, self.prefill_chunk)) + (wide > 0)
        low = sum(r.num_tokens - r.num_computed for r in prompts) - wide
        slots_a_page = 1 << (len(self.memory.allocator.ledger.ladder) - 1)
        staged = -(-self.memory.pages(min(low, self.prefill_chunk)) // slots_a_page)
        return pages + 2 * (staged + (low > 0))

    def _narrow(self, victim: Request, max_slots: int | None = None, *, whole: bool = False) -> int:
        """Narrow its pages, the last `max_slots` of those that its read mode lets narrow; `whole`: also those that it
        then waits for. Returns the pages; 0: none could be."""
        mode = self._mode(victim)
        first, last = (0, 0) if whole else mode.kept()
        width = mode.width(self.memory.allocator.ledger.ladder)
        narrowed = self.widths.narrow(victim, width, first, last, max_slots)
        self.num_narrowings += narrowed > 0
        return narrowed

    # ---- admission ---------------------------------------------------------------------------------------------

    def _may_admit(self, request: Request) -> bool:
        """A newcomer is weighed by what it costs the others.

        All that is admitted fits at minimum width when it has grown to its end, so growth never ends in a retraction.
        High priority is stepped at every step, so what it narrows is read at every step: it comes in when its prompt
        fits wide, once low priority has given way. A low prompt that would open narrow has to be brought in later, and
        its first token would be bought with the others' next ones: it waits while the link owes enough already, while
        those who are paused hold enough pages, or while somebody is parked. Some rows are left for high priority.
        Nobody overtakes in his class, so a wait ends with those that run.
        """
        if not self.running:
            return True
        if any(r.is_high_priority for r in self.parked):
            return False
        admitted = [*self.running, *self.parked, request]
        slots = sum(self.memory.pages(self.full_length(r)) for r in admitted)
        if slots * self.memory.page_size > self.largest_pool():
            return False
        if request.is_high_priority or (self._opens_wide(request) and not self.parked):
            return self._fits_with_room_made(request)
        if self._opens_wide(request):
            return self._fits_wide(request)
        if len(self.running) >= self.max_running - self.max_running // 4:
            return False
        paused = [r for r in self.running if r.away_cells and not self._opens_wide(r)]
        held = sum(self.memory.pages(r.num_tokens) for r in [*paused, request])
        slots_a_page = 1 << (len(self.memory.allocator.ledger.ladder) - 1)
        if self.parked or request.num_tokens > self._hidden_context(request, self.prefill_chunk):
            return self._fits_wide(request)
        if held > policy.PAUSED_SHARE * self.memory.allocator.geometry.num_pages * slots_a_page and paused:
            return self._fits_wide(request)
        backlog = sum(r.away_cells for r in paused) * self.cell_bytes
        own = request.num_tokens * self._token_bytes()
        return policy.may_owe(self.rates, self.high_share, backlog, own) or self._fits_wide(request)

    def _fits_with_room_made(self, request: Request) -> bool:
        """Its whole prompt fits at full width after the others in their prompts, and those of its class (for low: all
        that run) have a page to grow, once all has left or narrowed that may."""
        prompts = [r for r in self.running if r.state is RequestState.PREFILL and self._opens_wide(r)]
        need = sum(self.memory.pages(r.num_tokens) - self.memory.pages(r.num_computed) for r in [*prompts, request])
        room = self.widths.available_pages()
        if not request.is_high_priority:
            return need + len(self.running) <= room + self._narrowable_pages()
        growing = sum(r.is_high_priority for r in self.running)
        return need + growing <= room + self._held_by_lows() + self._hidden_high_pages()

    def _narrowable_pages(self) -> int:
        """Pages that become free when low priority narrows as far as it is read without streaming."""
        ledger = self.memory.allocator.ledger
        width, layers = self.read_modes.low.width(ledger.ladder), ledger.geometry.layer_num
        return sum(self._wide_pages(r) for r in self._wide_lows()) * (layers - width) // layers

    def _held_by_lows(self) -> int:
        """Pages that low priority holds: all of them can be had for high, since whoever holds them can be parked."""
        ledger = self.memory.allocator.ledger
        layers = ledger.geometry.layer_num
        lows = [r for r in self.running if not r.is_high_priority]
        cells = sum(self.memory.pages(r.num_computed) * layers - r.away_cells for r in lows)
        return min(cells // layers, ledger.used[LOW])

    def _fits_wide(self, request: Request) -> bool:
        """The rest of its prompt has room at full width, beside what those before it need to get theirs back."""
        need = self.memory.pages(request.num_tokens) - self.memory.pages(request.num_computed) + len(self.running)
        mine = self._rank(request)
        owed = sum(self._pages_away(r) for r in [*self.running, *self.parked] if self._rank(r) < mine)
        return need + owed <= self.widths.available_pages()

    # ---- 3: decode ---------------------------------------------------------------------------------------------

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

    def _give_up_pages(self, chosen: list[Request]) -> Request | None:
        """Who of these that are to be stepped makes room for the others: the last of low priority narrows, then the
        last of high as far as a step hides it, then the last of them is parked. None: only one runs."""
        for victim in sorted((r for r in chosen if not r.is_high_priority), key=self._rank, reverse=True):
            if self._wide_pages(victim) > 0 and self._narrow(victim):
                return victim
        for victim in sorted((r for r in chosen if self._may_pause(r)), key=self._rank, reverse=True):
            if self._narrow(victim, whole=True):
                return victim
        if self._narrow_highs(self.widths.available_pages() + self.widths.new_pages(chosen)):
            return chosen[-1]
        last = max(chosen, key=self._rank)
        return last if len(self.running) > 1 and self._park(last) else None

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

    def _bring_in(self, request: Request) -> Request:
        """It is stepped now: what its window reads in full comes before the step, and the last of low priority make
        room."""
        self._settle()
        while self._mode(request).streams_nothing and request.due_pages:
            self.widths.widen(request, request.due_pages)
            others = [r for r in self.running if r is not request and not r.is_high_priority]
            if not others or not request.due_pages or not self._park(max(others, key=self._rank)):
                break
        return request

    def _settle(self) -> None:
        """Whoever is arriving may be stepped after all: what he waits for comes before the step."""
        self.memory.settle()
        self.arriving, self.arriving_bytes = set(), 0

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

    # ---- 4: prefill --------------------------------------------------------------------------------------------

    def _prefill(self, plan: StepPlan, request: Request, budget: int) -> int:
        allocator = self.memory.allocator
        self.widths.count_away([request])  # it may begin with cached pages that are narrow
        if self._mode(request).streams_nothing and request.due_pages:
            self.move_bytes -= self.widths.widen(request, request.due_pages) * self._slot_bytes()
            if request.due_pages and plan.work:
                return 0
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

    def _hidden_context(self, request: Request, budget: int) -> int:
        """Tokens that may be opened narrow now, so that later chunks hide their streaming; the last one nobody reads
        before it is paused or widened."""
        away = self._slot_bytes() // self.memory.page_size
        most = policy.narrow_prefill_tokens(self.rates, away, budget)
        return most - self._pages_away(request) * self.memory.page_size + self.prefill_chunk

    # ---- 5: stream ---------------------------------------------------------------------------------------------

    def _stream_paused(self, plan: StepPlan) -> None:
        """Paused requests go on under the step's compute, the first in rank first."""
        self.stream_budget = policy.stream_budget_bytes(self.rates, self._seconds(plan))
        reading = [r for r, _ in plan.work if not self._mode(r).streams_nothing]
        self.streamed_bytes = sum(r.away_cells for r in reading) * self.cell_bytes
        planned = set(reading)
        paused = [r for r in self.running if self._is_paused(r) and not self._mode(r).streams_nothing]
        paused = [r for r in paused if r not in planned and r not in self.arriving]
        # A step that streams takes longer by the host's part: whoever else is in it is paid for by the move budget.
        rates = self.rates
        lengthens = policy.owed_bytes(rates, rates.narrow_step_s if plan.work and not self.streamed_bytes else 0.0)
        # What bringing somebody in would cost is left for that: it comes first.
        budget = self.move_bytes - policy.owed_bytes(rates, rates.behind_step_s)
        if lengthens > max(0, budget):
            return
        unhidden = rates.unhidden_link if any(r.state is not RequestState.DECODE for r, _ in plan.work) else 0.0
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
