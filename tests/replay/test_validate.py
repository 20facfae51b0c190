"""The validation harness on the CPU with a tiny model: the same command that a GPU runs.

Catches: a workload without pressure, steps counted twice or not at all, an error of the wrong sign.
"""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest

from tidekv.replay.cost import StepLoad, cost_model

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def replay_validate(monkeypatch: pytest.MonkeyPatch) -> Any:
    """`benchmarks` lies beside `src` and is no part of the package."""
    monkeypatch.syspath_prepend(ROOT)
    return importlib.import_module("benchmarks.replay_validate")


@pytest.fixture
def measured_steps(monkeypatch: pytest.MonkeyPatch) -> Any:
    """As above."""
    monkeypatch.syspath_prepend(ROOT)
    return importlib.import_module("benchmarks.measured_steps")


def test_the_smoke_run_measures_every_policy(tmp_path: Path, replay_validate: Any, measured_steps: Any) -> None:
    assert replay_validate.main(["--smoke", "--out", str(tmp_path)]) == 0
    found = json.loads((tmp_path / "replay_validate.json").read_text())
    assert not found["errors"]
    rows = [row for row in found["rows"] if row["table"] == "requests"]
    assert {row["policy"] for row in rows} == {"unlimited", "narrow", "swap"}
    assert all(row["real_ms"] > 0 and row["model_ms"] > 0 for row in rows)
    steps = measured_steps.saved_rows(tmp_path)
    tokens = sum(step["decode_batch"] for step in steps if step["policy"] == "narrow")
    trace = replay_validate.workload(replay_validate.SMOKE)
    assert tokens == sum(r.output_tokens - 1 for r in trace)  # the first token comes with the prompt
    assert sum(step["prefill_tokens"] for step in steps if step["policy"] == "narrow") == sum(
        r.prompt_tokens for r in trace
    )
    moved = ("any_narrow", "to_host_bytes", "from_host_bytes", "behind_bytes")  # which of them, the wall clock decides
    assert any(step[name] for step in steps if step["policy"] == "narrow" for name in moved)


def test_errors_are_of_the_model_against_the_measured(tmp_path: Path, replay_validate: Any) -> None:
    cost = cost_model("H200", "llama-3.1-8b")
    loads = [StepLoad(8, 8 * (1000 + i)) for i in range(7)]
    steps = [replay_validate.MeasuredStep("narrow", load, True, 2 * cost.step_s(load)) for load in loads]
    report = replay_validate.Report("made", tmp_path, 1.0, True)
    replay_validate.step_rows(report, "chats", steps, cost)
    (row,) = report.data["rows"]
    assert row["error"] == pytest.approx(-0.5, abs=1e-3)
    assert not row["within_goal"]


def test_a_measurement_is_compared_again_without_the_machine(
    tmp_path: Path, replay_validate: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replay_validate, "GPU", {"chats": replay_validate.SMOKE})  # a workload of a few seconds
    cost, host = (cost_model(name, "llama-3.1-8b") for name in ("H200", "H200-host"))
    loads = [StepLoad(8, 8000 + i, streamed_bytes=1_000_000, any_narrow=True) for i in range(6)]
    steps = [replay_validate.MeasuredStep("narrow", load, True, host.step_s(load)) for load in loads]
    replay_validate.save_steps(tmp_path / "replay_steps.json", steps)
    rows = [
        {"table": "requests", "policy": "narrow", "cls": "high", "quantity": name, "real_ms": 1e6}
        for name in ("ttft_s", "tpot_s")
    ]
    (tmp_path / "replay_validate.json").write_text(json.dumps({"about": {"smoke": False}, "rows": rows}))
    assert replay_validate.main(["--again", "--out", str(tmp_path)]) == 0
    lines = (tmp_path / "again.md").read_text().splitlines()
    assert lines[2] == "| chats, narrow, high | 1000000.0, 1000000.0 | -100%, -100% | -100%, -100% |"
    off = cost.step_s(loads[2]) / host.step_s(loads[2]) - 1
    # The first of them is left out: what it waited for is not known.
    assert lines[-1] == f"| decode, streaming | 5 | {host.step_s(loads[2]) * 1e3:.1f} | {off:+.0%} | +0% |"
    beyond = (host.step_s(loads[2]) - cost_model("H200", "llama-3.1-8b").step_s(loads[2])) * 1e3  # 0.5 ms a step
    assert (tmp_path / "host.md").read_text().splitlines()[-1] == f"| chats | decode, streaming | 5 | {beyond:.2f} |"
    (tmp_path / "replay_validate.json").write_text(json.dumps({"about": {"smoke": True}, "rows": rows}))
    with pytest.raises(ValueError, match="smoke"):
        replay_validate.main(["--again", "--out", str(tmp_path)])


def test_steps_that_are_not_waited_for_are_compared_together(measured_steps: Any) -> None:
    """Each call ends when the step before it does: one by one they are wrong, from wait to wait they are right."""
    cost = cost_model("H200", "llama-3.1-8b")
    decode, chunk = StepLoad(4, 4000), StepLoad(4, 4000, 2048, 2048 * 1024)
    d, c, gap = cost.step_s(decode), cost.step_s(chunk), 1e-3

    def call(load: StepLoad, seconds: float, unread: bool | None) -> Any:
        return measured_steps.MeasuredStep("narrow", load, not load.prefill_tokens, seconds, unread=unread)

    round_ = [
        (decode, gap, True), (decode, d - gap, True), (decode, d, True),
        (chunk, d, True), (chunk, c, True), (chunk, 2 * c, False),
    ]  # fmt: skip
    for noted in (True, False):
        steps = [call(load, s, unread if noted else None) for load, s, unread in round_ * 3]
        found = [s for s in measured_steps.stretches(steps, cost) if s.kind == "stretch with prompts' chunks"]
        # The first has no known beginning; where nothing was noted, the last has no known end.
        assert [len(stretch.steps) for stretch in found] == ([6, 6] if noted else [6])
        for stretch in found:
            assert stretch.seconds == pytest.approx(stretch.said_s(cost))
        singles = [s for s in measured_steps.stretches(steps, cost) if s.kind == "decode"]
        assert len(singles) == 6
