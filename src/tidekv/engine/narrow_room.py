"""Room under `narrow`: what a step opens, who gives up pages for it, and which prompt may begin."""

from __future__ import annotations

from tidekv.engine import streaming_policy as policy
from tidekv.engine.narrow_requests import NarrowRequests
from tidekv.engine.request import Request, RequestState
from tidekv.engine.scheduler import first_of
from tidekv.memory.ledger import LOW


class NarrowRoom(NarrowRequests):
    """Low priority gives way first, the last in rank first; high only as far as a step hides what it then reads."""

    def _demand(self, *, only_high: bool = False) -> int:
        """Pages for this step's decodes and for prompts that open wide; a few for those that open narrow."""
        some = [r for r in self.running if r.is_high_priority or not only_high]
        decodes = [r for r in some if r.state is RequestState.DECODE and r not in self.arriving]
        pages = self.widths.new_pages([r for r in decodes if not self._is_paused(r)])
        prompts = [r for r in some if r.state is RequestState.PREFILL]
        waiting = [r for r in self.waiting if r.is_high_priority or not only_high]
        if waiting and self._may_admit(first_of(waiting)):
            prompts += waiting
        wide = sum(r.num_tokens - r.num_computed for r in prompts if self._opens_wide(r))
        pages += self.memory.pages(min(wide, self.prefill_chunk)) + (wide > 0)
        low = sum(r.num_tokens - r.num_computed for r in prompts) - wide
        slots_a_page = 1 << (len(self.memory.allocator.ledger.ladder) - 1)
        staged = -(-self.memory.pages(min(low, self.prefill_chunk)) // slots_a_page)
        return pages + 2 * (staged + (low > 0))

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

    # ---- admission -----------------------------------------------------------------------------------------------

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
        room += self._held_by_lows()
        growing = sum(r.is_high_priority for r in self.running)
        # Until its first token each of them opens a page in `page_size` steps, and after it they may narrow for others.
        steps = 1 + -(-sum(r.num_tokens - r.num_computed for r in [*prompts, request]) // self.prefill_chunk)
        soon = -(-steps * growing // self.memory.page_size)
        return need + soon <= room or need + growing <= room + self._hidden_high_pages()

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
