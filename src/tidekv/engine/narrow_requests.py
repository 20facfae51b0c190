"""What the scheduler under `narrow` knows of its requests: who comes first, how each is read, what of it is away; and
the budgets that its choices are paid from."""

from __future__ import annotations

from tidekv.engine import streaming_policy as policy
from tidekv.engine.memory import RequestMemory
from tidekv.engine.read_modes import ReadMode, ReadModes
from tidekv.engine.request import Request, RequestState
from tidekv.engine.scheduler import Scheduler, StepPlan
from tidekv.engine.streaming_policy import StepRates
from tidekv.engine.widths import RequestWidths


class NarrowRequests(Scheduler):
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

    def _count(self, *, everybody: bool = False) -> None:
        """Widths of those that may have changed; of everybody where the ladder ran, and every 64 steps.

        Those are who has narrow pages, who has just come or come back, and who opened pages in the last step: the ones
        of its prompt, or another one, which may be a narrow slot that was free.
        """
        if not everybody and self.num_steps % 64:
            size = self.memory.page_size
            opened = {r for r in self.running if len(r.output_ids) <= 1 or (r.num_computed - 1) % size == 0}
            self.widths.count_away([r for r in self.running if r.away_cells or r.last_step < 0 or r in opened])
        else:
            self.widths.count_away(self.running)

    def _earn(self, seconds: float, high: bool) -> None:
        """What a step of this length, with high priority in it or not, may spend on widening."""
        self.step_s = seconds
        earned = policy.move_budget_bytes(self.rates, seconds, self.high_share, high)
        most = max(earned, policy.WIDEN_BATCH * self._slot_bytes(), policy.saved_bytes(self.rates, self.high_share))
        self.move_bytes = min(self.move_bytes + earned, most)

    def _seconds(self, plan: StepPlan) -> float:
        decodes = [r for r, _ in plan.work if r.state is RequestState.DECODE]
        prompt = sum(n for r, n in plan.work if r.state is not RequestState.DECODE)
        return policy.step_s(self.rates, len(decodes), sum(r.num_computed for r in decodes), prompt)

    def _slot_bytes(self) -> int:
        """What widening one page from minimum width brings over the link."""
        ledger = self.memory.allocator.ledger
        return (ledger.geometry.layer_num - ledger.ladder[-1]) * self.cell_bytes

    def _token_bytes(self) -> int:
        return self.memory.allocator.geometry.layer_num * self.cell_bytes // self.memory.page_size

    # ---- ranks ---------------------------------------------------------------------------------------------------

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

    # ---- how they are read ---------------------------------------------------------------------------------------

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

    def _highs(self) -> list[Request]:
        return [r for r in self.running if r.is_high_priority and r.state is RequestState.DECODE]

    def _wide_lows(self) -> list[Request]:
        """Low requests with pages that can be narrowed."""
        lows = (r for r in self.running if not r.is_high_priority and r.state is RequestState.DECODE)
        return [r for r in lows if self._wide_pages(r) > 0]

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

    def _hidden_context(self, request: Request, budget: int) -> int:
        """Tokens that may be opened narrow now, so that later chunks hide their streaming; the last one nobody reads
        before it is paused or widened."""
        away = self._slot_bytes() // self.memory.page_size
        most = policy.narrow_prefill_tokens(self.rates, away, budget, self.high_share)
        return most - self._pages_away(request) * self.memory.page_size + self.prefill_chunk

    # ---- leaving -------------------------------------------------------------------------------------------------

    def _narrow(self, victim: Request, max_slots: int | None = None, *, whole: bool = False) -> int:
        """Narrow its pages, the last `max_slots` of those that its read mode lets narrow; `whole`: also those that it
        then waits for. Returns the pages; 0: none could be."""
        mode = self._mode(victim)
        first, last = (0, 0) if whole else mode.kept()
        width = mode.width(self.memory.allocator.ledger.ladder)
        narrowed = self.widths.narrow(victim, width, first, last, max_slots)
        self.num_narrowings += narrowed > 0
        return narrowed

    def _park(self, request: Request) -> bool:
        """It leaves the device whole. False, nothing changed: the host is full."""
        if not self.memory.park(request):
            return False
        request.away_cells = request.due_pages = 0
        self.running.remove(request)
        self.parked.append(request)
        self.num_parkings += 1
        return True

    def _settle(self) -> None:
        """Whoever is arriving may be stepped after all: what he waits for comes before the step."""
        self.memory.settle()
        self.arriving, self.arriving_bytes = set(), 0
