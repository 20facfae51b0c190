"""`--executor model`: steps that compute nothing and take the time that the cost model says. The books run for real."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np

from tidekv.engine.engine import Engine
from tidekv.engine.model import LoadedModel
from tidekv.engine.request import Request, RequestState
from tidekv.engine.scheduler import by_rank
from tidekv.replay.cost import CostModel, ModelShape, StepLoad

VOCAB_SIZE = 2**40  # no token is ever looked up: a wide range keeps made-up prompts from sharing pages by accident


class VirtualClock:
    """Seconds that pass when told to. Called like `time.perf_counter`."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@dataclass
class ModelledTotals:
    """What the modelled machine has done so far: seconds and K and V bytes.

    busy_s = compute_s + moves_s + waits_s: what steps compute, what is moved between them, and what they wait for the
    link (or, with the host's part, for the host) beyond their computation.
    """

    busy_s: float = 0.0
    compute_s: float = 0.0
    moves_s: float = 0.0
    waits_s: float = 0.0
    link_bytes: int = 0
    streamed_bytes: int = 0
    behind_bytes: int = 0  # pages of paused requests that came in under steps
    steps: int = 0


def stand_in_model(shape: ModelShape, max_context_len: int) -> LoadedModel:
    """The numbers of a model without its weights."""
    config = SimpleNamespace(vocab_size=VOCAB_SIZE, max_position_embeddings=max_context_len)
    return LoadedModel(None, None, config, shape.layer_num, shape.num_kv_heads, shape.head_dim, frozenset())


class LoadCounter:
    """What the steps of an engine have to do, from its books: for the cost model, or beside a real runner."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._seen = self.moves()

    @property
    def moved(self) -> bool:
        """Something was moved since the last step."""
        return self.moves() != self._seen

    def moves(self) -> tuple[int, int, int, int]:
        """Bytes since the start: on the device, to the host, from it before steps, from it under steps."""
        repacker = self.engine.allocator.repacker
        moves, behind = repacker.counters, repacker.behind_bytes
        return moves.device_bytes, moves.to_host_bytes, moves.from_host_bytes - behind, behind

    def load_of(self, work: list[tuple[Request, int]]) -> StepLoad:
        """The step's counts; the moves are those since the last step."""
        batch = context = prompt = context_sum = 0
        for request, tokens in work:
            start = request.num_computed
            if tokens == 1 and request.state is RequestState.DECODE:
                batch += 1
                context += start + 1
            else:
                prompt += tokens
                context_sum += tokens * start + tokens * (tokens + 1) // 2
        now = self.moves()
        device, to_host, from_host, behind = (a - b for a, b in zip(now, self._seen, strict=True))
        self._seen = now
        streamed = self.streamed_bytes([request for request, _ in work])
        any_narrow = self.engine.allocator.ledger.any_narrow
        return StepLoad(batch, context, prompt, context_sum, streamed, device, to_host, from_host, behind, any_narrow)

    def streamed_bytes(self, requests: list[Request]) -> int:
        """Bytes of the layers that are not resident, of all pages that these requests stream by their read modes."""
        ledger, modes = self.engine.allocator.ledger, self.engine.config.read_modes
        requests = [r for r in requests if not modes.of(r.is_high_priority).streams_nothing]
        if not ledger.any_narrow or not requests:
            return 0
        slots = self.engine.memory.slots_of(requests)
        levels = np.where(slots > 0, ledger.levels_of(slots), 0)
        for row, request in enumerate(requests):
            narrow = levels[row] > 0
            if narrow.any():
                levels[row][~modes.of(request.is_high_priority).streamed(slots[row], narrow)] = 0
        away = ledger.geometry.layer_num - np.array(ledger.ladder, dtype=np.int64)
        counts = np.bincount(levels.ravel(), minlength=len(ledger.ladder))
        return int((counts * away).sum()) * ledger.geometry.cell_bytes


class ModelExecutor:
    """In place of the engine's `Runner`: counts what a step would read and compute, advances the clock by its cost.

    seen_s: the next plan knows of arrivals up to here. The end of the last step; its begin where steps are launched
    ahead (`Machine.launches_ahead`) and no prompt's first token was waited for (`Engine._may_stay_unread`).
    """

    def __init__(self, engine: Engine, cost: CostModel, clock: VirtualClock) -> None:
        self.engine, self.cost, self.clock = engine, cost, clock
        self.seen_s = clock.now_s
        self.totals = ModelledTotals()
        self.last_load = StepLoad()
        self.counter = LoadCounter(engine)

    def run(self, work: list[tuple[Request, int]]) -> list[tuple[Request, int]]:
        """Book the step; returns (request, token 0) for those whose known tokens are all computed."""
        load = self.counter.load_of(work)
        sampled, is_waited_for, goes_on = [], False, False
        for request, tokens in work:
            request.num_computed += tokens
            if request.num_computed == request.num_tokens:
                sampled.append((request, 0))
                is_waited_for |= request.state is not RequestState.DECODE
                goes_on |= len(request.output_ids) + 1 < request.sampling.max_new_tokens
        self._pass(load, stays_unread=not is_waited_for and (goes_on or not sampled))
        return sampled

    def _pass(self, load: StepLoad, *, stays_unread: bool) -> None:
        """The step takes its time."""
        ahead = stays_unread and self.cost.machine.launches_ahead
        self.seen_s = self.clock.now_s
        self.last_load = load
        compute_s, moves_s, step_s = self.cost.compute_s(load), self.cost.moves_s(load), self.cost.step_s(load)
        totals = self.totals
        totals.compute_s += compute_s
        totals.moves_s += moves_s
        totals.waits_s += step_s - compute_s - moves_s
        totals.behind_bytes += load.behind_bytes
        totals.busy_s += step_s
        totals.streamed_bytes += load.streamed_bytes
        totals.link_bytes += load.streamed_bytes + load.behind_bytes + load.to_host_bytes + load.from_host_bytes
        totals.steps += 1
        self.engine.streamer.bytes_in += load.streamed_bytes
        self.clock.now_s += step_s
        if not ahead:
            self.seen_s = self.clock.now_s

    def repeat(self, before_s: float, until_s: float) -> list[float]:
        """Repeat the decode step that everybody who runs is in, as often as the scheduler would plan just that.

        Stops before a request ends, before a page is missing, at the first step that ends at or after `until_s`, and
        before a step whose plan would know of what arrives at `before_s`. Returns the steps'
        seconds; everything is booked as if each step had been planned (a test compares the two).
        """
        engine, scheduler, ledger = self.engine, self.engine.scheduler, self.engine.allocator.ledger
        if self.counter.moved or not scheduler.repeats():
            return []
        requests = by_rank(scheduler.running)
        page_size, batch = engine.memory.page_size, len(requests)
        most = min(r.sampling.max_new_tokens - len(r.output_ids) for r in requests) - 1
        context = sum(r.num_computed for r in requests)
        seconds: list[float] = []
        times: list[float] = []
        while len(seconds) < most and self.seen_s < before_s and self.clock.now_s < until_s:
            opening = [r for r in requests if r.num_computed % page_size == 0]
            if len(opening) > ledger.num_free_pages or (opening and not engine.memory.decode(opening)):
                break
            scheduler.repeat(requests)
            context += batch
            began_s = self.clock.now_s
            self._pass(StepLoad(batch, context), stays_unread=True)
            for request in requests:
                request.num_computed += 1
            seconds.append(self.clock.now_s - began_s)
            times.append(self.clock.now_s)
        engine.book_decodes(requests, times)
        return seconds
