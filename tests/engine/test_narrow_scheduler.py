"""The scheduler under `narrow` with configured rates, on tiny real models.

Catches: an answer that depends on who was paused, narrowed, parked or widened; a request that is never stepped again;
more streamed bytes than the step's budget; KV or rows that are not given back.
"""

from __future__ import annotations

import random

import pytest

from engine_cases import (
    Ask,
    ample_answers,
    answers,
    assert_clean,
    make_engine,
    pages_together,
    random_load,
    tokens,
)
from tidekv.engine.engine import Engine
from tidekv.engine.narrow_scheduler import NarrowScheduler
from tidekv.engine.request import RequestState
from tidekv.engine.scheduler import StepPlan
from tidekv.engine.streaming_policy import StepRates

# Seconds hardly matter: what counts is how many pages the link brings in a step. Slow: less than one; fast: a few.
SLOW = StepRates(link_rate=2e5, base_s=5e-3, request_s=0.0, context_s=0.0, prompt_s=1e-5)
FAST = StepRates(link_rate=2e7, base_s=5e-3, request_s=0.0, context_s=0.0, prompt_s=1e-5)


def watch_plans(engine: Engine) -> list[tuple[int, int, bool]]:
    """(streamed bytes, budget, forced) of each step; forced: narrow high priority, a prompt, or nobody else ran."""
    scheduler = engine.scheduler
    assert isinstance(scheduler, NarrowScheduler)
    seen: list[tuple[int, int, bool]] = []
    plan = scheduler.plan

    def watched() -> StepPlan:
        step = plan()
        decodes = [r for r, _ in step.work if r.state is RequestState.DECODE]
        forced = any(r.is_high_priority and r.away_cells for r, _ in step.work) or len(decodes) == len(step.work) == 1
        forced = forced or any(r.state is not RequestState.DECODE and r.away_cells for r, _ in step.work)
        seen.append((scheduler.streamed_bytes, scheduler.stream_budget, forced))
        return step

    scheduler.plan = watched  # type: ignore[method-assign]
    return seen


@pytest.mark.parametrize("layer_num", [4, 5, 8])
@pytest.mark.parametrize("write_through", [False, True])
@pytest.mark.parametrize("rates", [SLOW, FAST], ids=["slow", "fast"])
def test_answers_do_not_depend_on_scheduling(layer_num: int, write_through: bool, rates: StepRates) -> None:
    narrowed = 0
    for seed, page_size, share in ((1, 4, 0.3), (2, 1, 0.4), (3, 4, 0.5)):
        load = random_load(random.Random(1000 * layer_num + seed), 7, 36 if page_size == 4 else 12, 16)
        pool = max(int(share * pages_together(load, page_size)), *(ask.pages(page_size) for ask in load))
        engine = make_engine(
            layer_num, pool, page_size, host_pages=2000, rates=rates, write_through=write_through, max_running=8
        )
        plans = watch_plans(engine)
        assert answers(engine, load) == ample_answers(layer_num, load, page_size), (seed, share)
        stats = engine.stats()
        assert stats["retractions"] == stats["recomputed_tokens"] == 0
        narrowed += stats["halvings_low"] + stats["halvings_high"]
        over = [(s, b) for s, b, forced in plans if s > b and not forced]
        assert not over, f"streamed bytes over the budget: {over[:3]}"
        assert_clean(engine)
    assert narrowed > 0


def test_high_priority_is_stepped_at_every_step() -> None:
    rng = random.Random(5)
    engine = make_engine(4, 24, 4, host_pages=2000, rates=SLOW, write_through=True, prefix_cache=False)
    load = [Ask(tokens(rng, 24), 24) for _ in range(5)] + [Ask(tokens(rng, 16), 20, True)]
    missed = 0
    plan = engine.scheduler.plan

    def watched() -> StepPlan:
        nonlocal missed
        step = plan()
        stepped = {r for r, _ in step.work}
        missed += sum(
            r.is_high_priority and r.state is RequestState.DECODE and r not in stepped for r in engine.scheduler.running
        )
        return step

    engine.scheduler.plan = watched  # type: ignore[method-assign]
    assert answers(engine, load) == ample_answers(4, load, 4)
    assert missed == 0


def test_a_host_without_room_still_serves_everybody() -> None:
    rng = random.Random(6)
    load = [Ask(tokens(rng, 20), 12, i == 0) for i in range(5)]
    for host_pages in (0, 3, 12):
        engine = make_engine(4, 10, 4, host_pages=host_pages, rates=FAST, write_through=True)
        assert answers(engine, load) == ample_answers(4, load, 4), host_pages
        assert_clean(engine)


def test_a_window_leaves_old_pages_out_and_streams_nothing() -> None:
    rng = random.Random(7)
    load = [Ask(tokens(rng, 40), 24) for _ in range(4)] + [Ask(tokens(rng, 12), 12, True)]
    engine = make_engine(8, 40, 4, host_pages=2000, rates=FAST, low_reads="window", window_tokens=8, min_slot_width=2)
    given, right = answers(engine, load), ample_answers(8, load, 4)
    stats = engine.stats()
    assert stats["low_reads"] == "window (LOSSY)"
    assert stats["halvings_low"] > 0
    assert stats["streamed_bytes"] == 0, stats
    assert given[4] == right[4]  # high priority reads everything
    assert given[:4] != right[:4]  # the loss is real: if it were not, this test would not look at a window
    assert_clean(engine)


@pytest.mark.parametrize("seed", range(6))
def test_a_window_that_holds_the_context_is_exact(seed: int) -> None:
    load = random_load(random.Random(seed), 6, 36, 16)
    pool = max(int(0.4 * pages_together(load, 4)), *(ask.pages(4) for ask in load))
    engine = make_engine(8, pool, 4, host_pages=2000, rates=FAST, low_reads="window", window_tokens=64)
    assert answers(engine, load) == ample_answers(8, load, 4)  # paused at times, but never stepped while pages are due
    assert not any(request.is_lossy for request in engine.requests.values())
    assert_clean(engine)
