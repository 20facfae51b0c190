"""Hand-made traces on the virtual clock: what the policies do with a burst, a long document, equals, and an arrival.

Catches: starvation, ping-pong, high priority that waits for low, widths that do not come back, a replay that is not a
pure function of its arguments.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tidekv.engine.narrow_scheduler import NarrowScheduler
from tidekv.engine.streaming_policy import MIN_QUANTUM
from tidekv.errors import ConfigError
from tidekv.replay import report
from tidekv.replay.run import Driver, PolicyRun, ReplayConfig, build_engine, replay, run_policy
from tidekv.replay.trace import TraceRequest

CONFIG = ReplayConfig(capacity=8192, prefill_chunk=1024, max_running=64)
PAGES = 128  # 8,192 tokens


def low(index: int, arrival_s: float, prompt: int, out: int) -> TraceRequest:
    return TraceRequest(index, arrival_s, prompt, out, False)


def high(index: int, arrival_s: float, prompt: int, out: int) -> TraceRequest:
    return TraceRequest(index, arrival_s, prompt, out, True)


def ttft(run: PolicyRun, index: int) -> float:
    request = run.requests[index]
    assert request.first_token_s is not None
    return request.first_token_s - request.arrival_s


def assert_all_served(run: PolicyRun, trace: list[TraceRequest]) -> None:
    assert [len(r.output_ids) for r in run.requests] == [line.output_tokens for line in trace]
    assert run.stats["retractions"] == run.stats["recomputed_tokens"] == 0


def test_one_burst_of_low_prompts_gets_first_tokens_at_once() -> None:
    trace = [low(i, 0.0, 2000, 100) for i in range(8)]  # 16,800 tokens into 8,192
    narrow = run_policy("narrow", PAGES, trace, CONFIG)
    assert_all_served(narrow, trace)
    ample = run_policy("unlimited", 4 * PAGES, trace, CONFIG)
    swap = run_policy("swap", PAGES, trace, CONFIG)
    assert ttft(narrow, 7) < 1.5 * ttft(ample, 7)  # the last first token does not wait for memory
    assert ttft(swap, 7) > 1.5 * ttft(narrow, 7)


def test_one_long_document_among_chats() -> None:
    trace = [low(0, 0.0, 7000, 300)] + [high(i, 0.1 * i, 400, 50) for i in range(1, 12)]
    run = run_policy("narrow", PAGES, trace, CONFIG)
    assert_all_served(run, trace)
    ample = run_policy("unlimited", 4 * PAGES, trace, CONFIG)
    for index in range(1, 12):
        assert ttft(run, index) < 1.3 * ttft(ample, index) + 0.01


def test_two_equals_do_not_ping_pong() -> None:
    trace = [low(0, 0.0, 5000, 200), low(1, 0.0, 5000, 200)]  # one fits, two do not
    engine, _ = build_engine("narrow", PAGES, 8192, CONFIG, None)
    driver = Driver(engine, trace, 0.5)
    for _ in driver.steps():
        pass
    scheduler = engine.scheduler
    assert isinstance(scheduler, NarrowScheduler)
    # Each is narrowed at most once for each quantum that it runs: 200 tokens are less than one.
    assert MIN_QUANTUM > 200
    assert scheduler.num_narrowings <= 2
    assert all(len(r.output_ids) == 200 for r in driver.requests)
    # The second is brought in once, a batch of pages after the other, and not again and again.
    moved = engine.allocator.repacker.counters.from_host_bytes
    assert moved < 2.5 * 5200 * engine.geometry.page_bytes / engine.geometry.page_size


def test_a_high_arrival_into_a_full_batch_of_lows() -> None:
    trace = [low(i, 0.0, 1200, 400) for i in range(6)] + [high(6, 1.0, 1000, 100)]
    run = run_policy("narrow", PAGES, trace, CONFIG)
    assert_all_served(run, trace)
    ample = run_policy("unlimited", 4 * PAGES, trace, CONFIG)
    assert ttft(run, 6) <= 1.05 * ttft(ample, 6) + 0.02  # it may arrive in the middle of a step of another length
    gaps = [float(np.diff(r.requests[6].token_times_s).max()) for r in (run, ample)]
    assert gaps[0] <= 1.05 * gaps[1] + 0.003


def test_the_first_that_is_paused_gets_pages_as_they_become_free() -> None:
    # Six of high priority take most of its 97 pages and end one after the other. With 28 left to bring in, a step hides
    # what it reads: it goes on when five have ended, not when all have.
    trace = [low(0, 0.0, 6200, 600)] + [high(1 + i, 0.5, 600, 200 * (i + 1)) for i in range(6)]
    run = run_policy("narrow", 105, trace, CONFIG)
    assert_all_served(run, trace)
    ends = [r.token_times_s[-1] for r in run.requests[1:]]
    emitted = np.array(run.requests[0].token_times_s)
    assert ((emitted > ends[0]) & (emitted < ends[5])).sum() > 100


def test_a_last_token_that_no_step_hides_is_not_put_off() -> None:
    # It is opened narrow, and 94 pages are 740 MB where a step hides 240: it has to be brought in, while others go on.
    # Less than a quarter of the pool becomes free, so nothing is restored by itself.
    trace = [high(0, 0.0, 24_000, 1500), high(1, 0.0, 5800, 200), low(2, 1.5, 6000, 2)]
    run = run_policy("narrow", 4 * PAGES, trace, CONFIG)
    assert_all_served(run, trace)
    assert ttft(run, 2) < 0.5  # before there is room for it
    assert run.requests[2].token_times_s[-1] < run.requests[1].token_times_s[-1] + 0.1


def test_high_takes_all_that_low_holds() -> None:
    # Twenty lows fill the pool, most of them paused; then a prompt of high priority as large as the whole of it.
    trace = [low(i, 0.0, 1000, 300) for i in range(20)] + [high(20, 1.0, 8000, 20)]
    run = run_policy("narrow", PAGES, trace, CONFIG)
    assert_all_served(run, trace)
    assert run.stats["parkings"] > 0
    ample = run_policy("unlimited", 4 * PAGES, trace, CONFIG)
    assert ttft(run, 20) <= 1.05 * ttft(ample, 20) + 0.02


def test_high_does_not_wait_for_pages_that_others_may_need_later() -> None:
    # 40 hold 2 pages each, and none of them opens another one; 43 of the 48 that are left are wanted.
    trace = [high(i, 0.0, 66, 62) for i in range(40)] + [high(40, 0.15, 2700, 20)]
    run = run_policy("narrow", PAGES, trace, CONFIG)
    ample = run_policy("unlimited", 4 * PAGES, trace, CONFIG)
    assert ttft(run, 40) <= ttft(ample, 40) + 1e-9
    assert_all_served(run, trace)


def test_high_takes_the_pages_of_a_low_prompt_that_is_being_computed() -> None:
    trace = [low(0, 0.0, 7200, 20), high(1, 0.05, 7200, 20)]
    run = run_policy("narrow", PAGES, trace, CONFIG)
    assert_all_served(run, trace)
    alone = run_policy("narrow", PAGES, trace[1:], CONFIG)
    assert ttft(run, 1) <= ttft(alone, 0) + 0.06  # it may arrive in the middle of a chunk


@pytest.mark.parametrize("policy", ["narrow", "swap", "retract", "reserve"])
def test_a_prompt_of_high_priority_comes_before_low_ones_that_have_begun(policy: str) -> None:
    trace = [low(0, 0.0, 20_000, 10), high(1, 0.1, 1000, 10)]
    run = run_policy(policy, 8 * PAGES, trace, CONFIG)
    assert ttft(run, 1) < 0.08  # what is left of one chunk, and its own
    assert ttft(run, 0) > 0.4


def test_pressure_ends_and_widths_come_back() -> None:
    trace = [low(i, 0.0, 2000, 60) for i in range(8)] + [low(8, 30.0, 1000, 600)]
    engine, _ = build_engine("narrow", PAGES, 8192, CONFIG, None)
    driver = Driver(engine, trace, 0.5)
    for _ in driver.steps():
        pass
    last = driver.requests[8]
    baseline = run_policy("unlimited", 4 * PAGES, [trace[8]], CONFIG).requests[0]
    paces = [(r.token_times_s[-1] - r.token_times_s[0]) / 599 for r in (last, baseline)]
    assert paces[0] == pytest.approx(paces[1], rel=0.02)
    assert engine.allocator.low_current_slot_width == engine.geometry.layer_num
    engine.check()


def test_window_streams_nothing_and_a_window_that_holds_everything_is_exact() -> None:
    trace = [low(i, 0.1 * i, 3000, 200) for i in range(4)] + [high(4, 0.5, 500, 50)]
    window = run_policy("narrow", PAGES, trace, ReplayConfig(8192, low_reads="window", window_tokens=512))
    assert_all_served(window, trace)
    assert window.stats["halvings_low"] > 0
    assert window.stats["streamed_bytes"] == 0
    whole = run_policy("narrow", PAGES, trace, ReplayConfig(8192, low_reads="window", window_tokens=4096))
    assert whole.stats["streamed_bytes"] == 0
    assert not any(request.is_lossy for request in whole.requests)


def test_low_with_a_window_pauses_for_high_and_comes_back_under_steps() -> None:
    # 6 x 1,900 tokens: all recent pages do not fit, nor do they beside high priority's prompts.
    trace = [low(i, 0.0, 1500, 400) for i in range(6)] + [high(6 + i, 1.0, 1500, 100) for i in range(3)]
    config = ReplayConfig(8192, low_reads="window", window_tokens=512, prefill_chunk=1024, max_running=64)
    run = run_policy("narrow", PAGES, trace, config)
    assert_all_served(run, trace)
    ample = run_policy("unlimited", 4 * PAGES, trace, config)
    assert run.modelled is not None
    assert run.modelled.behind_bytes > 0
    assert run.modelled.moves_s < 0.05 * run.span_s
    for index in (6, 7, 8):
        assert ttft(run, index) <= 1.05 * ttft(ample, index) + 0.02
        assert np.diff(run.requests[index].token_times_s).max() <= 1.05 * ample.step_s.max()


def test_newcomers_with_a_window_do_not_take_what_parked_ones_wait_for() -> None:
    # One burst of high priority parks the first ones; after it small ones keep coming, more than there is room for.
    trace = [low(i, 0.0, 1500, 300) for i in range(4)] + [high(4, 0.5, 7800, 100)]
    trace += [low(5 + i, 1.0 + 0.05 * i, 1400, 150) for i in range(60)]
    config = ReplayConfig(8192, low_reads="window", window_tokens=512, prefill_chunk=1024, max_running=64)
    run = run_policy("narrow", PAGES, trace, config)
    assert_all_served(run, trace)
    assert run.stats["parkings"] > 0
    for request in run.requests[:4]:
        assert np.diff(request.token_times_s).max() < 0.4 * run.span_s


def test_a_replay_is_a_pure_function_and_reports_everything(tmp_path: Path) -> None:
    trace = [low(i, 0.2 * i, 1500, 80) if i % 3 else high(i, 0.2 * i, 600, 40) for i in range(20)]
    policies = ("narrow", "reserve", "retract", "swap", "unlimited")
    first, second = (replay(trace, policies, ReplayConfig(0.5, max_running=64), "made") for _ in range(2))
    reports = [report.report(r) for r in (first, second)]
    for figures in reports:
        for run in figures["runs"]:
            del run["wall_s"]
    assert reports[0] == reports[1]
    assert [run["policy"] for run in reports[0]["runs"]] == list(policies)
    for run in reports[0]["runs"]:
        assert run["classes"]["low"]["finished"] == 13
        assert run["timeline"]
    paths = report.write_report(first, tmp_path)
    assert json.loads(paths[0].read_text())["capacity_tokens"] == first.capacity_tokens
    assert all(path.stat().st_size > 1000 for path in paths)


def test_ctrl_c_keeps_what_is_done() -> None:
    trace = [low(i, 0.0, 500, 300) for i in range(4)]

    pressed: list[str] = []

    def stop(policy: str, done: float, now_s: float) -> None:
        if policy == "swap" and not pressed:
            pressed.append(policy)
            raise KeyboardInterrupt

    result = replay(trace, ("retract", "swap", "narrow"), CONFIG, "made", stop)
    assert [(run.policy, run.interrupted) for run in result.runs] == [("retract", False), ("swap", True)]


def test_refusals() -> None:
    with pytest.raises(ConfigError, match="narrow, reserve, retract, swap, unlimited"):
        replay([low(0, 0.0, 10, 10)], ["evict"], CONFIG, "made")
    with pytest.raises(ConfigError, match="capacity"):
        ReplayConfig(capacity=1.5)
    run = run_policy("reserve", 4, [low(0, 0.0, 1000, 10), low(1, 0.0, 100, 10)], CONFIG)
    assert [line.index for line in run.refused] == [0]
    assert len(run.requests[0].output_ids) == 10
