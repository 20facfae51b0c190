"""What makes a replay fast must not change what it shows: repeated decode steps, and one location a page.

Catches: a repeated step that a plan would have made otherwise (a page missing, an arrival, an end, somebody who comes
back), time or counts booked otherwise, another page handed out.
"""

from __future__ import annotations

import random

import numpy as np
import pytest

from tidekv.engine import engine as engine_module
from tidekv.engine.memory import RequestMemory
from tidekv.memory.req_to_token import ReqToTokenPool
from tidekv.replay.executor import ModelExecutor
from tidekv.replay.run import POLICIES, PolicyRun, ReplayConfig, run_policy
from tidekv.replay.trace import TraceRequest


class TokenBooks(RequestMemory):
    """A location for every token, as on a real device."""

    @staticmethod
    def page_rows(max_running: int, max_context_len: int, page_size: int) -> ReqToTokenPool:
        return ReqToTokenPool(max_running, max_context_len, "cpu")


def load(seed: int, num: int = 40) -> list[TraceRequest]:
    """Long and short, in bursts and in pauses; some share prefixes of 512 tokens."""
    rng = random.Random(seed)
    at, trace = 0.0, []
    for index in range(num):
        at += rng.choice((0.0, 0.05, 0.3, 2.0))
        prompt = rng.choice((40, 500, 1500, 4000))
        hashes = tuple(rng.randrange(3) if b == 0 else 100 * index + b for b in range(-(-prompt // 512)))
        trace.append(
            TraceRequest(index, at, prompt, rng.choice((1, 2, 30, 200, 700)), rng.random() < 0.4,
                         hashes if rng.random() < 0.5 else ())
        )  # fmt: skip
    return trace


def outcome(run: PolicyRun) -> list[object]:
    """All that a report is made of, but the wall clock."""
    return [
        [r.token_times_s for r in run.requests], [r.last_step for r in run.requests], run.stats, run.step_s.tolist(),
        run.samples, run.peak_tokens, run.span_s, run.device_busy, run.link_busy,
    ]  # fmt: skip


@pytest.mark.parametrize("policy", [*POLICIES, "window"])
@pytest.mark.parametrize(("seed", "machine"), [(1, "H200"), (2, "H200"), (1, "H200-host")])
def test_repeated_steps_are_those_that_would_have_been_planned(
    policy: str, seed: int, machine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads = "window" if policy == "window" else "exact"
    config = ReplayConfig(6400, machine=machine, low_reads=reads, window_tokens=512)  # type: ignore[arg-type]
    repeated: list[int] = []
    repeat = ModelExecutor.repeat

    def counted(self: ModelExecutor, before_s: float, until_s: float) -> list[float]:
        seconds = repeat(self, before_s, until_s)
        repeated.append(len(seconds))
        return seconds

    monkeypatch.setattr(ModelExecutor, "repeat", counted)
    name, pages = ("narrow" if policy == "window" else policy), 100 if policy != "unlimited" else 2000
    runs = [run_policy(name, pages, load(seed), config, repeat_steps=repeats) for repeats in (True, False)]
    assert outcome(runs[0]) == outcome(runs[1])
    assert sum(repeated) > 0.3 * len(runs[0].step_s)  # else nothing was gained, and nothing was tested


def test_who_arrives_while_a_step_runs_is_not_in_one_that_is_planned_already() -> None:
    """Launched ahead: the plan of step n + 1 is made when step n begins, so an arrival in step n is in step n + 2."""
    trace = [TraceRequest(0, 0.0, 64, 40, True), TraceRequest(1, 0.1, 64, 2, True)]
    for machine, steps_later in (("H200", 1), ("H200-host", 2)):
        first, second = run_policy("unlimited", 64, trace, ReplayConfig(6400, machine=machine)).requests
        ends = [0.0, *first.token_times_s]
        running = next(i for i in range(1, len(ends)) if ends[i] > 0.1)  # the step that runs when it arrives
        assert second.token_times_s[0] == pytest.approx(ends[running + steps_later])


@pytest.mark.parametrize("policy", ["narrow", "retract", "swap"])
def test_one_location_a_page_decides_as_one_a_token_does(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    trace, config = load(3, 24), ReplayConfig(6400)
    pages = run_policy(policy, 100, trace, config)
    monkeypatch.setattr(engine_module, "PageBooks", TokenBooks)
    tokens = run_policy(policy, 100, trace, config, repeat_steps=False)
    assert outcome(pages) == outcome(tokens)
    assert np.sum([r.output_tokens for r in trace]) == pages.stats["generated_tokens"]
