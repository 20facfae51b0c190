"""Random workloads on the virtual clock under `narrow`: everybody is served, whatever the sizes.

Catches: a livelock or a deadlock (the driver gives up after 1,000 plans without work; a run has a bound on its span), a
request that starves, a retraction, books that do not add up at the end, more streamed in a step than its budget, or
than the scheduler knows of, and
more pages held by paused requests than they may hold.

    python -m tests.replay.test_fuzz SECONDS [SEED]      goes on with new seeds, and prints each
"""

from __future__ import annotations

import random
import sys
import time

import pytest

from tidekv.engine.narrow_scheduler import NarrowScheduler
from tidekv.engine.request import RequestState
from tidekv.engine.scheduler import StepPlan
from tidekv.replay.executor import ModelExecutor
from tidekv.replay.run import Driver, ReplayConfig, build_engine
from tidekv.replay.trace import TraceRequest


def workload(rng: random.Random, max_tokens: int) -> list[TraceRequest]:
    """Bursts and pauses; most are small, some nearly fill the pool; some share prefixes."""
    at, trace = 0.0, []
    share_high = rng.choice((0.0, 0.2, 0.6, 1.0))
    for index in range(rng.randint(4, 40)):
        at += rng.choice((0.0, 0.0, 0.0, 0.02, 0.1, 1.0))
        prompt = rng.choice(
            (1, 64, 500, *(rng.randint(1, max_tokens // 3) for _ in range(3)), rng.randint(1, max_tokens))
        )
        out = rng.choice((1, 2, 20, 130, 400))
        if prompt + out > max_tokens:
            continue
        shared = tuple(rng.randrange(2) for _ in range(-(-prompt // 512))) if rng.random() < 0.3 else ()
        trace.append(TraceRequest(index, at, prompt, out, rng.random() < share_high, shared))
    return trace or [TraceRequest(0, 0.0, 10, 10, False)]


def run_one(seed: int) -> tuple[int, int]:
    """One workload; returns (steps, halvings)."""
    rng = random.Random(seed)
    page_size = rng.choice((16, 64))
    pages = rng.choice((12, 40, 128))
    config = ReplayConfig(
        page_size * pages,
        page_size=page_size,
        prefill_chunk=page_size * rng.choice((1, 8, 32)),
        max_running=rng.choice((2, 5, 40)),
        host_memory=rng.choice((None, None, page_size * 131072 * pages // 2)),
        prefix_cache=rng.random() < 0.7,
        high_reads=rng.choice(("exact", "exact", "window")),
        low_reads=rng.choice(("exact", "exact", "window")),
        window_tokens=rng.choice((64, 512)),
    )
    trace = workload(rng, page_size * pages * 3 // 4)
    longest = max(r.prompt_tokens + r.output_tokens for r in trace)
    engine, _ = build_engine("narrow", pages, longest + page_size, config, None)
    scheduler, executor = engine.scheduler, engine.runner
    assert isinstance(scheduler, NarrowScheduler)
    assert isinstance(executor, ModelExecutor)
    plan = scheduler.plan

    def watched() -> StepPlan:
        step = plan()
        forced = len(step.work) == 1  # nobody else could run
        forced = forced or any(r.is_high_priority and r.away_cells for r, _ in step.work)
        forced = forced or any(r.state is not RequestState.DECODE and r.away_cells for r, _ in step.work)
        assert forced or scheduler.streamed_bytes <= scheduler.stream_budget, f"seed {seed}"
        return step

    count = scheduler._count

    def counted(**options: bool) -> None:
        count(**options)
        for request in scheduler.running:  # what the scheduler knows is what the books say of the pages
            if not config.read_modes.of(request.is_high_priority).is_lossy:
                known = request.away_cells * engine.geometry.cell_bytes
                assert known == executor.counter.streamed_bytes([request]), f"seed {seed}: {request.id}"

    scheduler.plan = watched  # type: ignore[method-assign]
    scheduler._count = counted  # type: ignore[method-assign]
    driver = Driver(engine, trace, 1.0)
    alone_s = sum(executor.cost.prefill_s(r.prompt_tokens, r.prompt_tokens**2) + 0.01 * r.output_tokens for r in trace)
    most_s = trace[-1].arrival_s + 20 * alone_s + 10.0
    for _ in driver.steps():
        assert driver.now_s < most_s, f"seed {seed}: not done after {most_s:.0f} s; {driver._queues()}"
    engine.check()
    assert [len(r.output_ids) for r in driver.requests] == [
        line.output_tokens for line in trace if line not in driver.refused
    ], f"seed {seed}"
    host_is_ample = config.host_memory is None
    assert not host_is_ample or engine.stats()["retractions"] == 0, f"seed {seed}"
    return scheduler.num_steps, engine.stats()["halvings_low"] + engine.stats()["halvings_high"]


@pytest.mark.parametrize("first", range(0, 40, 10))
def test_random_workloads_are_served(first: int) -> None:
    halvings = sum(run_one(seed)[1] for seed in range(first, first + 10))
    assert halvings > 0


if __name__ == "__main__":
    end_s, number = time.monotonic() + float(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0
    while time.monotonic() < end_s:
        print(number, *run_one(number), flush=True)
        number += 1
