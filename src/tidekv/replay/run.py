"""One trace, several policies, the same pool: drives engines step by step and keeps what the report needs.

`--executor model` runs on a virtual clock, so a replay is a pure function of its arguments. `--executor real` runs a
real model on the wall clock and waits for arrivals.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import torch

from tidekv.engine.engine import Engine, EngineConfig
from tidekv.engine.model import LoadedModel, load_model
from tidekv.engine.read_modes import ReadModes, Reads
from tidekv.engine.request import Request
from tidekv.engine.sampling import SamplingParams
from tidekv.engine.scheduler import Pressure
from tidekv.errors import CapacityError, ConfigError, InvariantError
from tidekv.replay.cost import CostModel, cost_model
from tidekv.replay.executor import ModelExecutor, ModelledTotals, VirtualClock, stand_in_model
from tidekv.replay.trace import TraceRequest

UNLIMITED = "unlimited"
POLICIES = ("narrow", "reserve", "retract", "swap", UNLIMITED)
PROGRESS_STEPS = 128  # a bar moves a few times a second
Progress = Callable[[str, float, float], None]  # (policy, done of all requests in 0..1, seconds of the trace)


@dataclass(frozen=True)
class ReplayConfig:
    """How a trace is replayed. The pool is given by `capacity`, everything else has a default.

    capacity        tokens (int), or a share (float in (0, 1]) of what the trace holds at its peak in unlimited memory
    executor        "model" (virtual clock) or "real" (a forward for every step)
    machine, model  presets of the cost model; `real_model` is what the real executor loads
    high_reads, low_reads   "exact", or "window": lossy. Under `narrow` alone; the other policies narrow nothing
    sample_s        seconds between two samples of the pool's state
    """

    capacity: int | float = 0.5
    executor: Literal["model", "real"] = "model"
    machine: str = "H200"
    model: str = "llama-3.1-8b"
    real_model: str = "smollm2"
    high_reads: Reads = "exact"
    low_reads: Reads = "exact"
    window_tokens: int = 1024
    page_size: int = 64
    prefill_chunk: int = 2048
    max_running: int = 256
    host_memory: int | None = None
    prefix_cache: bool = True
    sample_s: float = 0.5

    def __post_init__(self) -> None:
        if isinstance(self.capacity, float) and not 0.0 < self.capacity <= 1.0:
            raise ConfigError(f"capacity as a share must lie in (0, 1], got {self.capacity}")
        if isinstance(self.capacity, int) and self.capacity < 2 * self.page_size:
            raise ConfigError(f"capacity must be at least {2 * self.page_size} tokens, got {self.capacity}")
        if self.executor not in ("model", "real"):
            raise ConfigError(f"executor must be model or real, got {self.executor!r}")
        _ = self.read_modes  # refuses names that there are not

    @property
    def read_modes(self) -> ReadModes:
        """How each class is read under `narrow`."""
        return ReadModes.named(self.high_reads, self.low_reads, self.window_tokens, self.page_size)


@dataclass
class Sample:
    """The pool and the queues at one moment."""

    time_s: float
    pages: dict[str, int]
    cached_pages: int
    waiting: int
    running: int
    parked: int


@dataclass
class PolicyRun:
    """What one policy did with the trace. `requests` in the order of the trace, refused ones left out."""

    policy: str
    num_pages: int
    page_size: int
    requests: list[Request]
    refused: list[TraceRequest]
    span_s: float
    stats: dict[str, Any]
    step_s: np.ndarray  # [steps] seconds
    peak_tokens: int
    wall_s: float
    samples: list[Sample] = field(default_factory=list)
    device_busy: float | None = None  # shares of the span; None for the real executor
    link_busy: float | None = None
    modelled: ModelledTotals | None = None  # what the virtual machine did; None for the real executor
    interrupted: bool = False


@dataclass
class Replay:
    """The runs that were made, in the order asked for, and what they were made with."""

    config: ReplayConfig
    trace: str
    unlimited_peak_tokens: int | None
    capacity_tokens: int
    num_trace_requests: int
    runs: list[PolicyRun] = field(default_factory=list)


def replay(
    trace: Sequence[TraceRequest],
    policies: Sequence[str],
    config: ReplayConfig,
    trace_name: str,
    progress: Progress | None = None,
) -> Replay:
    """Replay `trace` once for each policy. A share as capacity needs an unlimited run, which comes first.

    KeyboardInterrupt ends the run in progress; what was done so far is in the result, marked `interrupted`.
    """
    unknown = [policy for policy in policies if policy not in POLICIES]
    if unknown or not policies:
        raise ConfigError(f"pressure must be some of {', '.join(POLICIES)}, got {', '.join(unknown) or 'nothing'}")
    loaded = load_model(config.real_model, *_real_device()) if config.executor == "real" else None
    unlimited: PolicyRun | None = None
    result = Replay(config, trace_name, None, 0, len(trace))
    if UNLIMITED in policies or isinstance(config.capacity, float):
        unlimited = run_policy(UNLIMITED, whole_trace_pages(trace, config), trace, config, loaded, progress)
        result.unlimited_peak_tokens = unlimited.peak_tokens
        if unlimited.interrupted:
            result.runs = [unlimited]
            return result
    if isinstance(config.capacity, float):
        assert unlimited is not None
        result.capacity_tokens = int(config.capacity * unlimited.peak_tokens)
    else:
        result.capacity_tokens = config.capacity
    num_pages = max(2, result.capacity_tokens // config.page_size)
    for policy in policies:
        if policy == UNLIMITED:
            assert unlimited is not None
            result.runs.append(unlimited)
        else:
            result.runs.append(run_policy(policy, num_pages, trace, config, loaded, progress))
        if result.runs[-1].interrupted:
            break
    return result


def build_engine(
    policy: str, num_pages: int, max_context_len: int, config: ReplayConfig, loaded: LoadedModel | None
) -> tuple[Engine, CostModel | None]:
    """An engine for one policy; with a cost model and a virtual clock unless a real model is given."""
    pressure: Pressure = "retract" if policy == UNLIMITED else policy  # type: ignore[assignment]
    cost = cost_model(config.machine, config.model)  # the real executor plans with its rates too
    engine_config = EngineConfig(
        num_pages=num_pages,
        page_size=config.page_size,
        pressure=pressure,
        prefill_chunk=config.prefill_chunk,
        max_running=config.max_running,
        max_context_len=max_context_len,
        prefix_cache=config.prefix_cache,
        host_memory=config.host_memory,
        write_through=policy == "narrow",
        rates=cost.step_rates() if policy == "narrow" else None,
        high_reads=config.high_reads if policy == "narrow" else "exact",
        low_reads=config.low_reads if policy == "narrow" else "exact",
        window_tokens=config.window_tokens,
    )
    if loaded is not None:
        return Engine(engine_config, loaded), None
    clock = VirtualClock()
    if config.host_memory is None:
        engine_config = replace(engine_config, host_memory=cost.machine.host_bytes)
    engine = Engine(
        replace(engine_config, device="cpu", dtype=torch.bfloat16),
        stand_in_model(cost.shape, max_context_len),
        executor=lambda engine: ModelExecutor(engine, cost, clock),
        clock=clock,
    )
    return engine, cost


def run_policy(
    policy: str,
    num_pages: int,
    trace: Sequence[TraceRequest],
    config: ReplayConfig,
    loaded: LoadedModel | None = None,
    progress: Progress | None = None,
    *,
    repeat_steps: bool = True,
) -> PolicyRun:
    """Serve the whole trace with one policy. The books are recounted at the end.

    repeat_steps: False plans every step of the virtual clock by itself; the outcome is the same, and later.
    """
    max_context_len = max(r.prompt_tokens + r.output_tokens for r in trace) + config.page_size
    engine, cost = build_engine(policy, num_pages, max_context_len, config, loaded)
    driver = Driver(engine, trace, config.sample_s, repeat_steps)
    started_s = time.perf_counter()
    interrupted = False
    try:
        shown = 0
        for done in driver.steps():
            if progress is not None and done >= shown + PROGRESS_STEPS:
                shown = done
                progress(policy, driver.num_done / len(trace), driver.now_s)
    except KeyboardInterrupt:
        interrupted = True
    else:
        engine.check()
    span_s = max(driver.now_s, 1e-9)
    run = PolicyRun(
        policy=policy,
        num_pages=num_pages,
        page_size=config.page_size,
        requests=driver.requests,
        refused=driver.refused,
        span_s=span_s,
        stats=engine.stats(),
        step_s=np.array(driver.step_s),
        peak_tokens=driver.peak_pages * config.page_size,
        wall_s=time.perf_counter() - started_s,
        samples=driver.samples,
        interrupted=interrupted,
    )
    if isinstance(engine.runner, ModelExecutor) and cost is not None:
        totals = run.modelled = engine.runner.totals
        run.device_busy = totals.busy_s / span_s
        run.link_busy = totals.link_bytes / cost.link_rate / span_s
    if progress is not None:
        progress(policy, 1.0, driver.now_s)
    return run


class Driver:
    """Feeds arrivals to an engine and steps it until all of them are done. One driver a trace."""

    def __init__(
        self, engine: Engine, trace: Sequence[TraceRequest], sample_s: float, repeat_steps: bool = True
    ) -> None:
        self.engine, self.trace, self.sample_s, self.repeat_steps = engine, trace, sample_s, repeat_steps
        self.virtual = engine.clock if isinstance(engine.clock, VirtualClock) else None
        self.start_s = engine.clock()
        self.requests: list[Request] = []
        self.refused: list[TraceRequest] = []
        self.samples: list[Sample] = []
        self.step_s: list[float] = []
        self.num_done = 0
        self.peak_pages = 0

    @property
    def now_s(self) -> float:
        return self.engine.clock() - self.start_s

    def steps(self) -> Iterator[int]:
        """Yields the number of steps after each of them, or after several that are alike."""
        arrived, idle, next_sample_s = 0, 0, 0.0
        engine, scheduler = self.engine, self.engine.scheduler
        while arrived < len(self.trace) or scheduler.has_work:
            while arrived < len(self.trace) and self.trace[arrived].arrival_s <= self._seen_s():
                self._add(self.trace[arrived])
                arrived += 1
            if not scheduler.has_work:
                if arrived < len(self.trace):
                    self._wait_until(self.trace[arrived].arrival_s)
                continue
            before = self.now_s
            self.num_done += len(engine.step())
            took = self.now_s - before
            if took > 0:
                self.step_s.append(took)
                idle = 0
            elif isinstance(
                engine.runner, ModelExecutor
            ):  # nothing could run: an arrival, or the next plan, changes it
                engine.runner.seen_s = engine.runner.clock.now_s
                idle += 1
                if idle > 1000:
                    raise InvariantError(f"{scheduler.pressure}: nothing runs though requests wait: {self._queues()}")
            if isinstance(engine.runner, ModelExecutor) and self.repeat_steps:
                next_arrival_s = self.trace[arrived].arrival_s if arrived < len(self.trace) else float("inf")
                self.step_s += engine.runner.repeat(self.start_s + next_arrival_s, self.start_s + next_sample_s)
            self.peak_pages = max(self.peak_pages, self._held_pages())
            if self.now_s >= next_sample_s:
                self._sample()
                next_sample_s = self.now_s + self.sample_s
            yield scheduler.num_steps

    def _add(self, line: TraceRequest) -> None:
        engine = self.engine
        params = SamplingParams(max_new_tokens=line.output_tokens, ignore_eos=True)
        ids = line.prompt_ids(int(engine.model.config.vocab_size))
        try:
            name = engine.add_request(ids, params, line.is_high_priority)
        except CapacityError:
            self.refused.append(line)
            self.num_done += 1
            return
        request = engine.requests[name]
        request.arrival_s = self.start_s + line.arrival_s  # it may have arrived in the middle of a step
        self.requests.append(request)

    def _wait_until(self, time_s: float) -> None:
        if self.virtual is not None:
            self.virtual.now_s = self.start_s + time_s
        else:
            time.sleep(max(0.0, time_s - self.now_s))

    def _seen_s(self) -> float:
        """Arrivals up to here are known to the next plan. A real engine is told of them between two calls of `step`."""
        runner = self.engine.runner
        if isinstance(runner, ModelExecutor) and self.engine.scheduler.has_work:
            return runner.seen_s - self.start_s
        return self.now_s

    def _held_pages(self) -> int:
        """Pages that some request needs: cached prefixes that nobody references are left out."""
        engine = self.engine
        cached = engine.prefix_cache.evictable_pages if engine.prefix_cache else 0
        return engine.geometry.num_pages - engine.allocator.num_free_pages - cached

    def _sample(self) -> None:
        engine, queues = self.engine, self._queues()
        pages = {f"{name}/{width}": n for (name, width), n in engine.allocator.ledger.pages_by_state().items()}
        cached = engine.prefix_cache.evictable_pages if engine.prefix_cache else 0
        self.samples.append(Sample(self.now_s, pages, cached, *queues))

    def _queues(self) -> tuple[int, int, int]:
        scheduler = self.engine.scheduler
        return len(scheduler.waiting), len(scheduler.running), len(scheduler.parked)


def whole_trace_pages(trace: Sequence[TraceRequest], config: ReplayConfig) -> int:
    """Enough for every request of the trace at once: no policy is ever asked. Books only, so it costs no memory."""
    needed = sum(-(-(r.prompt_tokens + r.output_tokens) // config.page_size) + 1 for r in trace)
    return needed + config.max_running + 16


def _real_device() -> tuple[str, torch.dtype]:
    return ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)
