"""The demo's workload, its verdict and its command line; the demo itself is `make demo`."""

from __future__ import annotations

import copy
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

import tidekv
from engine_cases import Ask, ample_answers, make_engine, tiny_model
from tidekv import demo
from tidekv.cli import app
from tidekv.demo import DemoRequest, Run, failures, first_differences, pages_needed, plain_logits, pool_bar, workload
from tidekv.engine.model import LoadedModel
from tidekv.engine.request import RequestOutput
from tidekv.errors import ConfigError, InvariantError

CLEAN = {"retractions": 0, "recomputed_tokens": 0, "halvings_low": 2, "halvings_high": 1}


def model_with_text() -> LoadedModel:
    """A tiny model whose tokenizer makes one token of four characters, about as many as a real one does."""

    class Tokenizer:
        def __call__(self, text: str) -> dict[str, list[int]]:
            return {"input_ids": [sum(map(ord, text[i : i + 4])) % 128 for i in range(0, len(text), 4)]}

        def decode(self, ids: list[int]) -> str:
            return " ".join(map(str, ids))

    return replace(tiny_model(5), tokenizer=Tokenizer())


def run_with(outputs: list[list[int]], **stats: int) -> Run:
    ended = [RequestOutput(str(i), ids, None, "length", 0.1, 0.01, 1.0, 0, 0) for i, ids in enumerate(outputs)]
    return Run("narrow", ended, {**CLEAN, **stats}, 1.0)


def test_workload_shape() -> None:
    requests = workload(model_with_text(), 24, 0)
    lengths = sorted(len(request.prompt) for request in requests)
    assert len(requests) == 24
    assert sum(request.is_high_priority for request in requests) == 8
    assert (lengths[0], lengths[-1]) == (200, 1500)
    assert lengths[12] < 500  # many short, some long
    assert all(48 <= request.max_new_tokens <= 96 for request in requests)
    assert len({tuple(request.prompt) for request in requests}) == 24
    assert workload(model_with_text(), 3, 0) == workload(model_with_text(), 3, 0) != workload(model_with_text(), 3, 1)
    assert pages_needed([DemoRequest([1] * 16, 1, False), DemoRequest([1] * 16, 2, True)]) == 1 + 2


@pytest.mark.parametrize(
    ("stats", "differences", "message"),
    [
        ({}, [{"request": 3, "position": 1}], "1 answers changed under narrow.*'request': 3"),
        ({"retractions": 2}, [], "2 requests were retracted"),
        ({"recomputed_tokens": 7}, [], "7 tokens were recomputed"),
        ({"halvings_low": 1}, [], "low priority was halved 1 times, not twice"),
        ({"halvings_high": 0}, [], "high priority was never halved"),
    ],
)
def test_failures_say_each_broken_promise(stats: dict[str, int], differences: list[Any], message: str) -> None:
    assert failures(run_with([]), []) == []
    (fault,) = failures(run_with([], **stats), differences)
    assert re.search(message, fault)
    assert len(failures(run_with([], retractions=1, recomputed_tokens=1, halvings_low=0), [{}])) == 4


def test_first_differences_give_the_logit_gap() -> None:
    model = tiny_model(5)
    requests = [DemoRequest([5, 6, 7], 4, False), DemoRequest([9, 8, 7, 6], 4, True)]
    right = ample_answers(5, [Ask(r.prompt, 4) for r in requests], 4)
    wrong = copy.deepcopy(right)
    assert first_differences(model, requests, run_with(right), run_with(wrong)) == []
    wrong[1][2] = (wrong[1][2] + 1) % 128
    wrong[0] = wrong[0][:3]  # one answer is shorter, and the same as far as it goes
    short, changed = first_differences(model, requests, run_with(right), run_with(wrong))
    assert short == {"request": 0, "position": 3}
    logits = plain_logits(model, requests[1].prompt + right[1][:2])
    assert changed == {
        "request": 1,
        "position": 2,
        "token": right[1][2],
        "other": wrong[1][2],
        "logit_gap": float(logits[right[1][2]] - logits[wrong[1][2]]),
    }
    assert changed["logit_gap"] > 0  # the reference is greedy


def test_plain_logits_are_those_of_the_engine() -> None:
    model = tiny_model(5)
    prompt = [3, 1, 4, 1, 5]
    answer = ample_answers(5, [Ask(prompt, 6)], 4)[0]
    for i, token in enumerate(answer):
        assert int(plain_logits(model, prompt + answer[:i]).argmax()) == token


def test_pool_bar() -> None:
    pages = {"free/0": 10, "dynamic/2": 10, "high/8": 20, "high/4": 0, "low/8": 0, "low/4": 40, "low/2": 20}
    bar = pool_bar(pages, 50)
    assert bar.plain == "." * 5 + ":" * 5 + "#" * 10 + "=" * 20 + "-" * 10
    styles = {bar.plain[span.start]: span.style for span in bar.spans}
    assert styles == {".": "grey37", ":": "yellow", "#": "red", "=": "blue", "-": "blue"}


def test_pool_bar_of_an_engine_has_its_pages() -> None:
    engine = make_engine(8, 40, 4)
    assert pool_bar(engine.stats()["pages"], 40).plain == "." * 40


# ---- the command line ------------------------------------------------------------------------------------------------


def invoke(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, list(arguments), env={"COLUMNS": "120", "NO_COLOR": "1", "TERM": "dumb"})
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


def test_help_and_version() -> None:
    code, text = invoke("--help")
    assert code == 0
    assert "demo" in text
    assert "doctor" in text
    code, text = invoke("demo", "--help")
    assert code == 0
    for option in ("--requests", "--pool", "--out", "--seed", "--json"):
        assert option in text
    assert invoke("-h")[0] == 0
    assert invoke("--version") == (0, f"tidekv {tidekv.__version__}\n")


def test_doctor_prints_json() -> None:
    code, text = invoke("doctor", "--json")
    assert code == 0
    report = json.loads(text)
    assert report["packages"]["torch"] == torch.__version__
    assert {line["feature"] for line in report["verdicts"]} >= {"GPU", "model smollm2"}


@pytest.mark.parametrize("arguments", [("demo", "--requests", "2"), ("demo", "--pool", "1.5"), ("nonsense",)])
def test_wrong_arguments_are_refused(arguments: tuple[str, ...]) -> None:
    assert invoke(*arguments)[0] == 2


@pytest.mark.parametrize(
    ("error", "code"), [(ConfigError("no weights"), 2), (KeyboardInterrupt(), 130), (None, 1), (0, 0)]
)
def test_exit_codes(error: Any, code: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def run(*arguments: Any) -> int:
        if isinstance(error, BaseException):
            raise error
        return code

    monkeypatch.setattr(demo, "run_demo", run)
    assert invoke("demo", "--out", str(tmp_path))[0] == code


def test_a_fault_found_by_the_checker_fails_the_demo(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def broken(*arguments: Any) -> Run:
        raise InvariantError("pages do not add up")

    monkeypatch.setattr(demo, "load_model", lambda *arguments: model_with_text())
    monkeypatch.setattr(demo, "run_engine", broken)
    console = Console(record=True, width=200, quiet=False, file=open("/dev/null", "w"))  # noqa: SIM115
    assert demo.run_demo(console, tmp_path, count=3) == 1
    assert "the checker found fault in 'ample memory': pages do not add up" in console.export_text()
    assert not list(tmp_path.iterdir())
