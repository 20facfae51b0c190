"""Who runs in the next step, and who makes room when memory is short. One policy an engine:

    narrow    pages give up layers (the allocator's ladder); if even that does not do, the lowest, newest request is
              parked on the host whole. Retracts only if the host is full too, or the last one running finds no room.
    swap      no narrowing: the lowest, newest request moves to the host whole and comes back later
    retract   no narrowing: the lowest, newest request loses its cache and is computed again
    reserve   no narrowing: a request is admitted only when all that it can grow to is free, so nobody makes room

High priority goes first everywhere; within a class the order of arrival. No decision depends on a clock.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal, get_args

from tidekv.engine.memory import RequestMemory
from tidekv.engine.request import Request, RequestState
from tidekv.errors import CapacityError, InvariantError
from tidekv.memory.ledger import DYNAMIC

Pressure = Literal["narrow", "retract", "swap", "reserve"]
PRESSURES: tuple[str, ...] = get_args(Pressure)


@dataclass
class StepPlan:
    """What one step computes: each request with its number of new tokens. Their locations are in `req_to_token`."""

    work: list[tuple[Request, int]] = field(default_factory=list)


def _rank(request: Request) -> tuple[bool, int]:
    return not request.is_high_priority, request.arrival_order


def by_rank(requests: Iterable[Request]) -> list[Request]:
    """High before low, then in order of arrival."""
    return sorted(requests, key=_rank)


def first_of(requests: Iterable[Request]) -> Request:
    """The first by rank, without sorting: a queue of hundreds is asked for it several times a step."""
    return min(requests, key=_rank)


class Scheduler:
    """Queues: `waiting` (no memory), `running` (prefill and decode), `parked` (on the host), `ending` (no memory and no
    more steps: only their last tokens are still to be read)."""

    def __init__(self, memory: RequestMemory, pressure: Pressure, prefill_chunk: int, max_running: int) -> None:
        self.memory = memory
        self.pressure = pressure
        self.prefill_chunk = prefill_chunk
        self.max_running = max_running
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.parked: list[Request] = []
        self.ending: list[Request] = []
        self.num_steps = 0
        self.num_retractions = self.num_parkings = self.recomputed_tokens = 0

    # ---- arrival -----------------------------------------------------------------------------------------------

    def largest_request(self) -> int:
        """Tokens (prompt and output) that a request can reach when it has the pool to itself."""
        return min(self.largest_pool(), self.memory.max_context_len)

    def add(self, request: Request) -> None:
        """Queue a request. `CapacityError` if it can never fit, with the number of tokens that would."""
        need, most = self.full_length(request), self.largest_request()
        if need > most:
            raise CapacityError(
                f"request {request.id} needs room for {need} tokens ({len(request.prompt_ids)} prompt + "
                f"{request.sampling.max_new_tokens} new) but at most {most} fit, even alone; "
                "shorten it, or raise num_pages or host_memory"
            )
        self.waiting.append(request)

    @staticmethod
    def full_length(request: Request) -> int:
        """Tokens whose KV the request needs at its end: the last token is never fed back."""
        return len(request.prompt_ids) + request.sampling.max_new_tokens - 1

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running or self.parked or self.ending)

    def end_soon(self, request: Request) -> None:
        """The step that is on its way is the request's last, whatever its token is: its memory goes back now, since
        what is queued from here on runs behind that step."""
        self.remove(request)
        request.state = RequestState.ENDING
        self.ending.append(request)

    def remove(self, request: Request) -> None:
        """Forget a request that is finished or aborted, in whatever state; its memory goes back."""
        for queue in (self.waiting, self.running, self.parked, self.ending):
            if request in queue:
                queue.remove(request)
        self.memory.release(request)

    # ---- one step ----------------------------------------------------------------------------------------------

    def plan(self) -> StepPlan:
        """Choose the step's requests and give them memory. Empty only when nothing can run."""
        self.num_steps += 1
        plan = StepPlan()
        self._resume()
        self._plan_decodes(plan)
        self._plan_prefills(plan)
        for request, _ in plan.work:
            request.last_step = self.num_steps
        return plan

    def repeats(self) -> bool:
        """The next plans are all decodes of everybody who runs, until a request arrives or ends or a page is missing:
        no queue moves before, because what is free only becomes less."""
        if any(r.state is not RequestState.DECODE for r in self.running) or not self.running:
            return False
        if self.memory.allocator.ledger.any_narrow or (self.parked and self._fits_back(first_of(self.parked))):
            return False
        return not self.waiting or len(self.running) >= self.max_running or not self._may_admit(first_of(self.waiting))

    def repeat(self, requests: list[Request]) -> None:
        """Book one such step of `requests`, everybody who runs, as if it had been planned."""
        self.num_steps += 1
        for request in requests:
            request.last_step = self.num_steps

    def _plan_decodes(self, plan: StepPlan) -> None:
        chosen = self._steppable(by_rank(r for r in self.running if r.state is RequestState.DECODE))
        while chosen and not self.memory.decode(chosen):
            victim = self._make_room()
            chosen = [r for r in chosen if r is not victim]
        plan.work += [(request, 1) for request in chosen]

    def _steppable(self, requests: list[Request]) -> list[Request]:
        """All of them, unless the narrowed ones have more slots than staging holds: then low priority takes turns."""
        ledger = self.memory.allocator.ledger
        if not ledger.any_narrow or not requests:
            return requests
        pages = max(ledger.used[DYNAMIC], ledger.staging_target(sum(ledger.num_narrow)))
        room = pages * len(ledger.pair_offsets)
        narrow = dict(zip(requests, self.memory.narrow_slots(requests).tolist(), strict=True))
        longest_untouched = sorted(requests, key=lambda r: (not r.is_high_priority, r.last_step, r.arrival_order))
        chosen: set[Request] = set()
        for request in longest_untouched:
            need = narrow[request]
            overdue = self.num_steps - request.last_step > len(requests)  # wants more than there is left, every time
            if request.is_high_priority or need <= max(room, 0) or not chosen or overdue:
                chosen.add(request)
                room -= need
        return [r for r in requests if r in chosen]

    def _plan_prefills(self, plan: StepPlan) -> None:
        """High before low, also before those of low that have begun. While one of high waits no low one begins."""
        budget = self.prefill_chunk
        for is_high in (True, False):
            for request in by_rank(r for r in self.running if r.state is RequestState.PREFILL):
                if request.is_high_priority == is_high and request.state is RequestState.PREFILL:
                    budget -= self._prefill(plan, request, budget)  # unless it made room for one before it
            if is_high or not any(r.is_high_priority for r in self.waiting):
                budget = self._admit_prompts(plan, [r for r in self.waiting if r.is_high_priority == is_high], budget)

    def _admit_prompts(self, plan: StepPlan, requests: list[Request], budget: int) -> int:
        """Begin these prompts in their order, until one finds no room. Returns the tokens of `budget` that are left."""
        for request in by_rank(requests):
            if budget <= 0 or len(self.running) >= self.max_running or not self._may_admit(request):
                break
            if not self.memory.admit(request):
                break
            self.waiting.remove(request)
            self.running.append(request)
            recomputed = max(0, request.lost_tokens - request.num_computed)
            request.recomputed_tokens += recomputed
            self.recomputed_tokens += recomputed
            request.lost_tokens = 0
            computed = self._prefill(plan, request, budget)
            if not computed:
                if request.state is RequestState.PREFILL:  # no room even for a page: back, and nobody overtakes it
                    self.memory.release(request)
                    self.running.remove(request)
                    self.waiting.append(request)
                    request.state = RequestState.WAITING
                break
            budget -= computed
        return budget

    def _prefill(self, plan: StepPlan, request: Request, budget: int) -> int:
        """Plan up to `budget` tokens of the request's prompt; fewer where memory is short. Returns the number."""
        left = request.num_tokens - request.num_computed
        page_size = self.memory.page_size
        least = page_size - request.num_computed % page_size  # a chunk of it lies in one slot, as a decoded token does
        chunk = min(left, budget)
        while chunk > 0 and not self.memory.extend(request, chunk):
            # A smaller chunk needs less staging. Only when not even one page fits, somebody has to make room.
            if chunk > least:
                chunk = max(least, chunk // 2 // page_size * page_size)
            elif plan.work:
                return 0  # others run meanwhile and free memory at their end
            elif self._make_room() is request:
                return 0
        if chunk > 0:
            plan.work.append((request, chunk))
        return max(chunk, 0)

    # ---- admission ---------------------------------------------------------------------------------------------

    def _may_admit(self, request: Request) -> bool:
        """Admission by policy. Whoever was running already (parked, retracted) comes before a newcomer of its class."""
        memory = self.memory
        if any(r.is_high_priority >= request.is_high_priority for r in self.parked):
            return False
        if not self.running:
            return True
        if self.pressure == "reserve":
            promised = sum(self._pages_to_come(r) for r in self.running)
            return promised + memory.pages(self.full_length(request)) <= memory.free_pages()
        if self.pressure == "narrow":
            # All that is admitted fits at minimum width when it has grown to its end, so growth never needs a parking.
            admitted = [*self.running, *self.parked, request]
            slots = sum(memory.pages(self.full_length(r)) for r in admitted)
            return slots * memory.page_size <= self.largest_pool()
        # retract, swap: optimistic, as the usual engines are. Its next chunk fits; growth is somebody's later problem.
        return memory.pages(min(request.num_tokens, self.prefill_chunk)) <= memory.free_pages()

    def largest_pool(self) -> int:
        """Tokens that the pool holds when everything is at minimum width (full width where the host has no room)."""
        ledger = self.memory.allocator.ledger
        pages, slots_a_page = ledger.geometry.num_pages, 1 << (len(ledger.ladder) - 1)
        slots = (pages - max(1, ledger.dynamic_max_pages)) * slots_a_page
        if self.memory.prefix_cache is not None:
            # A page has one priority. If both hold pages (a shared prefix does that to a single request too), the last
            # page of each may be partly empty: ceil(h / s) + ceil(l / s) pages hold at least h + l = s * pages - (s -
            # 1).
            slots -= slots_a_page - 1
        return max(pages, min(slots, ledger.num_host_pages)) * self.memory.page_size

    def _pages_to_come(self, request: Request) -> int:
        return self.memory.pages(self.full_length(request)) - self.memory.pages(request.num_computed)

    def end_step(self) -> None:
        """After each step: widths come back while memory is plentiful."""
        self.memory.allocator.restore_widths()

    # ---- making room -------------------------------------------------------------------------------------------

    def _make_room(self) -> Request:
        """The lowest, newest running request gives up its memory, in the way of the policy. Returns it.

        If only one is running there is nobody to take from but those on the host; and if there are none, it begins
        anew on a clean pool, where all that was admitted fits.
        """
        victim = max(self.running, key=_rank)
        if len(self.running) == 1 and self.parked:
            victim = max(self.parked, key=_rank)
            self._retract(victim)
        elif len(self.running) == 1:
            if victim.num_computed <= victim.stuck_at:
                raise InvariantError(
                    f"request {victim.id} has the pool to itself and no room for token {victim.num_computed} of "
                    f"{self.full_length(victim)}, though {self.largest_request()} should fit"
                )
            victim.stuck_at = victim.num_computed
            self._retract(victim)
            self.memory.drop_cache()
        elif self.pressure in ("narrow", "swap") and self.memory.park(victim):
            self.running.remove(victim)
            self.parked.append(victim)
            self.num_parkings += 1
        else:
            self._retract(victim)
        return victim

    def _retract(self, victim: Request) -> None:
        lost = victim.num_computed
        self.memory.release(victim)
        victim.lost_tokens = lost
        victim.state = RequestState.WAITING
        victim.times_retracted += 1
        self.num_retractions += 1
        (self.running if victim in self.running else self.parked).remove(victim)
        self.waiting.append(victim)

    def _resume(self) -> None:
        """Parked requests come back, highest and oldest first, when there is room without new pressure, or nothing
        runs."""
        for request in by_rank(self.parked):
            if (self.running and not self._fits_back(request)) or not self.memory.unpark(request):
                break
            self.parked.remove(request)
            self.running.append(request)

    def _fits_back(self, request: Request) -> bool:
        """A parked request has room without new pressure, and everybody who runs has a page to grow."""
        pages = int(request.owned_pages.sum()) + 1 + len(self.running)
        room = self.memory.allocator.available_size(request.is_high_priority) // self.memory.page_size
        return pages <= max(room, self.memory.free_pages())  # a cached prefix that nobody references is room too
