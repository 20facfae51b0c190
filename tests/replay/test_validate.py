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


def test_the_smoke_run_measures_every_policy(tmp_path: Path, replay_validate: Any) -> None:
    assert replay_validate.main(["--smoke", "--out", str(tmp_path)]) == 0
    found = json.loads((tmp_path / "replay_validate.json").read_text())
    assert not found["errors"]
    rows = [row for row in found["rows"] if row["table"] == "requests"]
    assert {row["policy"] for row in rows} == {"unlimited", "narrow", "swap"}
    assert all(row["real_ms"] > 0 and row["model_ms"] > 0 for row in rows)
    steps = json.loads((tmp_path / "replay_steps.json").read_text())
    tokens = sum(step["decode_batch"] for step in steps if step["policy"] == "narrow")
    trace = replay_validate.workload(replay_validate.SMOKE)
    assert tokens == sum(r.output_tokens - 1 for r in trace)  # the first token comes with the prompt
    assert sum(step["prefill_tokens"] for step in steps if step["policy"] == "narrow") == sum(
        r.prompt_tokens for r in trace
    )
    assert sum(step["to_host_bytes"] for step in steps if step["policy"] == "narrow") > 0


def test_errors_are_of_the_model_against_the_measured(tmp_path: Path, replay_validate: Any) -> None:
    cost = cost_model("H200", "llama-3.1-8b")
    loads = [StepLoad(8, 8 * (1000 + i)) for i in range(6)]
    steps = [replay_validate.MeasuredStep("narrow", load, True, 2 * cost.step_s(load)) for load in loads]
    report = replay_validate.Report("made", tmp_path, 1.0, True)
    replay_validate.step_rows(report, steps, cost)
    (row,) = report.data["rows"]
    assert row["error"] == pytest.approx(-0.5, abs=1e-3)
    assert not row["within_goal"]


def test_a_measurement_is_compared_again_without_the_machine(
    tmp_path: Path, replay_validate: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replay_validate, "GPU", replay_validate.SMOKE)  # a workload of a few seconds
    cost, host = (cost_model(name, "llama-3.1-8b") for name in ("H200", "H200-serial"))
    loads = [StepLoad(8, 8000 + i, streamed_bytes=1_000_000, any_narrow=True) for i in range(5)]
    steps = [replay_validate.MeasuredStep("narrow", load, True, host.step_s(load)) for load in loads]
    replay_validate.save_steps(tmp_path / "replay_steps.json", steps)
    rows = [
        {"table": "requests", "policy": "narrow", "cls": "high", "quantity": name, "real_ms": 1e6}
        for name in ("ttft_s", "tpot_s")
    ]
    (tmp_path / "replay_validate.json").write_text(json.dumps({"about": {"smoke": False}, "rows": rows}))
    assert replay_validate.main(["--again", "--out", str(tmp_path)]) == 0
    lines = (tmp_path / "again.md").read_text().splitlines()
    assert lines[2] == "| narrow, high | 1000000.0, 1000000.0 | -100%, -100% | -100%, -100% |"
    off = cost.step_s(loads[2]) / host.step_s(loads[2]) - 1
    assert lines[-1] == f"| decode, streaming | 5 | {host.step_s(loads[2]) * 1e3:.1f} | {off:+.0%} | +0% |"
    (tmp_path / "replay_validate.json").write_text(json.dumps({"about": {"smoke": True}, "rows": rows}))
    with pytest.raises(ValueError, match="smoke"):
        replay_validate.main(["--again", "--out", str(tmp_path)])
