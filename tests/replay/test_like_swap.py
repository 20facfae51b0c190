"""`narrow` has every choice that `swap` has, so it must not be worse where swapping or waiting is the right thing.

Catches: high priority that is admitted, narrowed and then read over the link at every step; low prompts opened early
that hold the pages which others could run in; a small request that takes what is kept for one before it.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tidekv.engine.narrow_scheduler import NarrowScheduler
from tidekv.engine.request import RequestState
from tidekv.engine.streaming_policy import PAUSED_SHARE
from tidekv.replay.cost import MACHINES
from tidekv.replay.run import Driver, PolicyRun, ReplayConfig, build_engine, run_policy
from tidekv.replay.trace import TraceRequest

CONFIG = ReplayConfig(capacity=8192, prefill_chunk=1024, max_running=64)
PAGES = 128  # 8,192 tokens


def request(index: int, arrival_s: float, prompt: int, out: int, is_high: bool = False) -> TraceRequest:
    return TraceRequest(index, arrival_s, prompt, out, is_high)


def ends(run: PolicyRun, is_high: bool) -> np.ndarray:
    return np.array([r.token_times_s[-1] - r.arrival_s for r in run.requests if r.is_high_priority == is_high])


def both(trace: list[TraceRequest], pages: int = PAGES) -> tuple[PolicyRun, PolicyRun]:
    narrow, swap = (run_policy(policy, pages, trace, CONFIG) for policy in ("narrow", "swap"))
    assert narrow.stats["retractions"] == narrow.stats["recomputed_tokens"] == 0
    return narrow, swap


def test_more_high_priority_than_fits_waits_and_is_not_streamed() -> None:
    trace = [request(i, 0.05 * i, 1500, 200, True) for i in range(40)]  # 5 of 40 fit at a time
    narrow, swap = both(trace)
    assert narrow.span_s < 1.05 * swap.span_s
    assert np.percentile(ends(narrow, True), 99) < 1.05 * np.percentile(ends(swap, True), 99)
    # At most what the shortest decode step hides, at every step.
    assert narrow.stats["streamed_bytes"] < 0.8 * 55e9 * narrow.span_s * 0.5


def test_more_low_priority_than_fits_ends_as_early_as_with_swap() -> None:
    trace = [request(i, 0.02 * i, 1200 + 40 * (i % 7), 150 + 60 * (i % 3)) for i in range(48)]
    narrow, swap = both(trace)
    assert narrow.span_s < 1.1 * swap.span_s
    assert np.percentile(ends(narrow, False), 50) < 1.15 * np.percentile(ends(swap, False), 50)
    assert np.percentile(ends(narrow, False), 99) < 1.1 * np.percentile(ends(swap, False), 99)


def test_high_priority_over_a_crowd_of_lows_is_served_as_with_ample_memory() -> None:
    trace = [request(i, 0.0, 1000, 300) for i in range(12)]
    trace += [request(12 + i, 0.3 * i, 500, 60, True) for i in range(10)]
    narrow, swap = both(trace)
    ample = run_policy("unlimited", 8 * PAGES, trace, CONFIG)
    assert ends(narrow, True).max() < 1.05 * ends(ample, True).max()
    assert np.percentile(ends(narrow, True), 50) < np.percentile(ends(swap, True), 50)


def test_a_long_prompt_that_was_opened_narrow_goes_on() -> None:
    # 24,000 tokens: more than a chunk hides. The pool has room for it only once those before it have ended.
    trace = [request(i, 0.0, 1500, 400) for i in range(4)] + [request(4, 0.1, 24_000, 20)]
    narrow, swap = both(trace, pages=420)
    long = [r for r in narrow.requests if len(r.prompt_ids) == 24_000]
    other = [r for r in swap.requests if len(r.prompt_ids) == 24_000]
    assert long[0].token_times_s[-1] < 1.1 * other[0].token_times_s[-1]


def test_paused_requests_hold_a_bounded_part_of_the_pool() -> None:
    trace = [request(i, 0.01 * i, 1800, 100) for i in range(30)]
    engine, _ = build_engine("narrow", PAGES, 4096, CONFIG, None)
    scheduler = engine.scheduler
    assert isinstance(scheduler, NarrowScheduler)
    slots_a_page = 1 << (len(engine.allocator.ledger.ladder) - 1)
    most = 0
    for _ in Driver(engine, trace, 1.0).steps():
        paused = [r for r in scheduler.running if r.away_cells and r.state is RequestState.DECODE]
        # Fully narrow ones: a request that just gave up some pages still holds the others, and gives them next.
        most = max(most, sum(len(r.owned_pages) for r in paused if scheduler._wide_pages(r) == 0))
    assert 0 < most <= (PAUSED_SHARE * PAGES + 2) * slots_a_page


def test_what_is_kept_for_the_first_is_not_taken_by_a_smaller_one() -> None:
    # The large one is narrowed by a burst of high priority; small ones keep coming. It must not wait for all of them.
    trace = [request(0, 0.0, 5000, 400)]
    trace += [request(1 + i, 0.5, 1400, 40 + 100 * i, True) for i in range(4)]
    trace += [request(5 + i, 0.55 + 0.1 * i, 700, 120) for i in range(80)]
    narrow, _ = both(trace)
    first = narrow.requests[0]
    assert first.token_times_s[-1] < 0.5 * narrow.span_s
    assert np.diff(first.token_times_s).max() < 3.0


@pytest.mark.parametrize("reads", [("window", "exact"), ("exact", "window"), ("window", "window")])
def test_windows_of_either_class_are_served_without_streaming_theirs(reads: tuple[str, str]) -> None:
    trace = [request(i, 0.05 * i, 2500, 150, i % 2 == 0) for i in range(12)]
    config = ReplayConfig(8192, high_reads=reads[0], low_reads=reads[1], window_tokens=256)  # type: ignore[arg-type]
    run = run_policy("narrow", PAGES, trace, config)
    assert [len(r.output_ids) for r in run.requests] == [150] * 12
    assert run.stats["halvings_high"] + run.stats["halvings_low"] > 0
    if reads == ("window", "window"):
        assert run.stats["streamed_bytes"] == 0


def test_where_every_step_pays_for_something_narrow_requests_move_whole() -> None:
    # An engine that launches nothing ahead while anything is narrow: every step takes half as long again for it.
    trace = [request(0, 0.0, 1500, 600, True)] + [request(1 + i, 0.2, 1500, 200) for i in range(6)]
    config = ReplayConfig(8192, max_running=64, machine="H200-serial")
    narrow, swap = (run_policy(policy, PAGES, trace, config) for policy in ("narrow", "swap"))
    assert (narrow.stats["narrows"], narrow.stats["streamed_bytes"], narrow.stats["retractions"]) == (False, 0, 0)
    assert narrow.stats["parkings"] == swap.stats["parkings"] > 0
    for mine, theirs in zip(narrow.requests, swap.requests, strict=True):
        assert mine.token_times_s[-1] <= theirs.token_times_s[-1] + 1e-9  # parking is cheaper: written through
    assert run_policy("narrow", PAGES, trace, CONFIG).stats["narrows"]


def test_streaming_that_lengthens_a_step_is_paid_from_the_move_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    # The same load, with and without a host that takes 6 ms longer for a step that streams, and for no other.
    costly = replace(MACHINES["H200"], name="costly", narrow_step_s=6e-3)
    monkeypatch.setitem(MACHINES, "costly", costly)
    trace = [request(0, 0.0, 1500, 600, True)] + [request(1 + i, 0.2, 1500, 200) for i in range(6)]
    runs = [
        run_policy("narrow", PAGES, trace, ReplayConfig(8192, max_running=64, machine=name))
        for name in ("H200", "costly")
    ]
    assert runs[1].stats["streamed_bytes"] < 0.5 * runs[0].stats["streamed_bytes"]
    assert [len(r.output_ids) for r in runs[1].requests] == [600] + [200] * 6
    paces = [(r.requests[0].token_times_s[-1] - r.requests[0].token_times_s[0]) / 599 for r in runs]
    assert paces[1] < 1.1 * paces[0]  # high priority pays no more than the stated share


def test_streaming_that_chunks_do_not_hide_is_kept_out_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    # Where streaming lengthens a prompt's chunk, no prompt is opened narrower than its last chunk, and paused requests
    # are brought in rather than read under chunks.
    machine = replace(MACHINES["H200"], name="unhidden", unhidden_link=0.65)
    monkeypatch.setitem(MACHINES, "unhidden", machine)
    trace = [request(i, 0.02 * i, 2500 + 40 * (i % 7), 40) for i in range(40)]
    runs = [
        run_policy("narrow", PAGES, trace, ReplayConfig(8192, prefill_chunk=1024, max_running=64, machine=name))
        for name in ("H200", "unhidden")
    ]
    swap = run_policy("swap", PAGES, trace, CONFIG)
    assert runs[1].stats["streamed_bytes"] < 0.5 * runs[0].stats["streamed_bytes"]
    assert runs[1].modelled is not None
    assert runs[1].modelled.waits_s < 0.05 * runs[1].span_s
    assert runs[1].span_s < 1.05 * swap.span_s


def test_low_priority_with_a_window_gives_way_to_high() -> None:
    # Its recent pages stay wide as long as it is stepped, so it has to pause: else high would wait for a low one's end.
    trace = [request(i, 0.0, 1500, 800) for i in range(4)] + [request(4 + i, 1.0, 1400, 50, True) for i in range(4)]
    config = ReplayConfig(8192, low_reads="window", window_tokens=1024, max_running=64)
    window = run_policy("narrow", PAGES, trace, config)
    ample = run_policy("unlimited", 8 * PAGES, trace, config)
    first = [max(r.token_times_s[0] - r.arrival_s for r in run.requests[4:]) for run in (window, ample)]
    assert window.stats["halvings_low"] > 0
    assert first[0] < 1.2 * first[1]
    assert all(np.diff(r.token_times_s).max() > 0.2 for r in window.requests[2:4])
