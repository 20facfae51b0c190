"""The replay matrix on a short made-up trace: every run, resumed, and goals that say what they compare.

Catches: a run made twice or not at all, a peak taken from another trace, a goal that is met by comparing with itself.
"""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest

from tidekv.errors import ConfigError
from tidekv.replay.command import parse_capacities

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def matrix(monkeypatch: pytest.MonkeyPatch) -> Any:
    """`benchmarks` lies beside `src` and is no part of the package."""
    monkeypatch.syspath_prepend(ROOT)
    return importlib.import_module("benchmarks.replay_matrix")


def test_the_matrix_runs_everything_once_and_goes_on_where_it_was(matrix: Any, tmp_path: Path) -> None:
    mix = tmp_path / "made.jsonl"
    rows = [{"t": 0.05 * i, "in": 900, "out": 40, "prio": "high" if i % 3 else "low"} for i in range(18)]
    mix.write_text("\n".join(map(json.dumps, rows)))
    command = [str(mix), "--out", str(tmp_path / "out"), "--capacity", "1/2", "--duration", "10"]
    command += ["--commit", "made", "--jobs", "2"]  # the peak's run comes before those that need it
    assert matrix.main(command) == 0
    file = tmp_path / "out" / "runs.jsonl"
    lines = file.read_text().splitlines()
    assert len(lines) == 6  # unlimited, and five at half of its peak
    found = {run["name"]: run for run in map(json.loads, lines)}
    peak = found["made_llama-3.1-8b_1.000_unlimited"]["peak_tokens"]
    half = found["made_llama-3.1-8b_0.500_narrow"]
    assert half["capacity_tokens"] == peak // 2 // 64 * 64
    assert half["classes"]["low"]["finished"] == 6
    parts = half["modelled"]
    assert parts["busy_s"] == pytest.approx(parts["compute_s"] + parts["moves_s"] + parts["waits_s"])
    assert parts["busy_s"] <= half["span_s"]
    lossy = found["made_llama-3.1-8b_0.500_narrow-exact-window"]
    assert lossy["low_reads"] == "window (LOSSY)"
    assert "narrow LOSSY: low window" in (tmp_path / "out" / "tables.md").read_text()
    assert {run["commit"] for run in found.values()} == {"made"}
    file.write_text("".join(f"{line}\n" for line in lines[:-1]))
    assert matrix.main([*command, "--limit-s", "0"]) == 130  # too late to begin anything
    assert file.read_text().splitlines() == lines[:-1]
    assert matrix.main(command) == 0
    again = file.read_text().splitlines()
    assert again[:-1] == lines[:-1]
    assert json.loads(again[-1])["name"] == json.loads(lines[-1])["name"]


def test_everything_is_each_run_once_and_a_peak_before_those_that_need_it(matrix: Any) -> None:
    todo = matrix.everything([Path("a.jsonl"), Path("b.jsonl")])
    assert len({cell.name for cell in todo}) == len(todo) == 2 * (16 + 16 + 6 + 1) + 10
    assert all(cell.policy == "unlimited" or cell.ample in todo[: todo.index(cell)] for cell in todo)
    assert {cell.share for cell in todo[:12]} == {0.5, 1.0}


def test_goals_compare_with_the_best_of_the_others(matrix: Any) -> None:
    tables = importlib.import_module("benchmarks.replay_tables")
    figures = {"p50": 1.0, "p90": 1.0, "p99": 1.0, "p100": 1.0}
    one = {
        "ttft_s": figures, "tpot_s": figures, "longest_gap_s": figures, "e2e_s": figures, "slo_attainment": 1.0,
        "longest_wait_s": 1.0,
    }  # fmt: skip
    base = {
        "mix": "made.jsonl", "model": "m", "machine": "H200", "share": 0.5, "duration_s": 1.0, "requests": 1,
        "high_reads": "exact", "low_reads": "exact", "retractions": 0, "recomputed_tokens": 0, "parkings": 0,
        "capacity_tokens": 1, "throughput_tokens_per_s": 100.0, "swapped_in_bytes": 0, "streamed_bytes": 0,
        "link_busy": 0.0, "classes": {"high": one, "low": one},
    }  # fmt: skip
    runs = [{**json.loads(json.dumps(base)), "policy": policy} for policy in ("narrow", "reserve", "retract", "swap")]
    runs[3]["classes"]["low"]["ttft_s"]["p50"] = 2.5  # not the best
    runs[0]["classes"]["low"]["ttft_s"]["p50"] = 0.4
    runs[0]["classes"]["low"]["e2e_s"]["p99"] = 1.2
    unlimited = {**json.loads(json.dumps(base)), "policy": "unlimited", "share": 1.0}
    row = tables.goals_markdown([*runs, unlimited]).strip().split("\n")[-1]
    assert [cell.strip() for cell in row.split("|")[2:-1]] == [
        "exact", "1.00", "1.00", "0.40", "1.00", "**1.20**", "1.00, 1.20", "0", "1.00",
    ]  # fmt: skip


def test_a_documents_tables_are_made_from_the_runs(matrix: Any, tmp_path: Path) -> None:
    tables = importlib.import_module("benchmarks.replay_tables")
    mix = tmp_path / "made.jsonl"
    rows = [{"t": 0.05 * i, "in": 900, "out": 9, "prio": "low" if i % 2 else "high"} for i in range(6)]
    mix.write_text("\n".join(map(json.dumps, rows)))
    assert matrix.main([str(mix), "--out", str(tmp_path), "--capacity", "1/2", "--duration", "9"]) == 0
    page = tmp_path / "page.md"
    page.write_text(
        "one\n<!-- table: goals -->\nold\n<!-- end -->\ntwo\n"
        "<!-- table: times made llama-3.1-8b H200 0.50 -->\n<!-- end -->\n"
        "<!-- table: costs made llama-3.1-8b H200 -->\n<!-- end -->\nthree\n"
    )
    for _ in range(2):  # the second time finds its own tables
        assert tables.main([str(tmp_path), "--into", str(page)]) == 0
    text = page.read_text()
    assert "old" not in text
    assert all(text.count(word) == 1 for word in ("one\n", "\ntwo\n", "\nthree\n"))
    assert text.count("| H200, llama-3.1-8b, made, 0.50, 9 s |") == 2  # exact and with a window
    assert text.count("narrow, exact") == 3  # of high, of low, of the costs
    with pytest.raises(ValueError, match="no run for the table 'times other"):
        tables.fill("<!-- table: times other llama-3.1-8b H200 0.50 -->\n<!-- end -->", [tmp_path])


def test_a_later_folder_has_the_last_word_on_a_mix(matrix: Any, tmp_path: Path) -> None:
    tables = importlib.import_module("benchmarks.replay_tables")
    head = "| machine, model, mix, pool | reads |\n|---|---|\n"
    for name, rows in (
        ("old", ["| H200, m, a, 0.33 | exact |", "| H200, m, a, 0.50 | exact |", "| H200, m, b, 0.50 | exact |"]),
        ("new", ["| H200, m, a, 0.50 | exact, again |"]),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "goals.md").write_text(head + "\n".join(rows) + "\n")
    assert tables.goals_of([tmp_path / "old", tmp_path / "new"])[2:] == [
        "| H200, m, a, 0.50 | exact, again |", "| H200, m, b, 0.50 | exact |",
    ]  # fmt: skip


def test_capacities() -> None:
    assert parse_capacities("1/2, 0.25,120000") == [0.5, 0.25, 120000]
    with pytest.raises(ConfigError, match="'1/0'"):
        parse_capacities("1/0")
