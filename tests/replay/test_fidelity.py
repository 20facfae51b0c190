"""The fidelity benchmark on a tiny random model: what it masks, what it asks, and how it sums up.

Catches: a window that hides what it should show, resident layers that are masked, a decode step that sees other keys
than a whole forward, figures mixed up between ways or batches, needles in the wrong place, a run that does not go on
where it was cut.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tidekv.engine.model import load_model

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> Any:
    """`benchmarks` lies beside `src` and is no part of the package."""
    monkeypatch.syspath_prepend(ROOT)
    names = ("fidelity", "fidelity_tables", "masked_reads")
    return SimpleNamespace(**{name: importlib.import_module(f"benchmarks.{name}") for name in names})


@pytest.fixture(scope="module")
def loaded() -> Any:
    """Four layers, and a tokenizer that makes a token of each character."""
    tiny = load_model("random:tiny", "cpu", torch.float32)
    return dataclasses.replace(tiny, tokenizer=lambda text: {"input_ids": [ord(c) % 512 for c in text]})


def test_a_window_that_holds_everything_changes_nothing_and_a_small_one_does(benchmark: Any, loaded: Any) -> None:
    way = benchmark.masked_reads.Way
    ids = torch.randint(0, 512, (2, 96), generator=torch.Generator().manual_seed(0))
    # Full; all layers resident; all in the window; masked, hiding nothing; half of the layers and a window.
    ways = [way(None, None), way(4, 8), way(2, 96), way(2, None), way(2, 8)]
    figures = benchmark.fidelity.document_figures(loaded, ids, 40, ways)
    for item, of_item in enumerate(figures):
        alone = benchmark.fidelity.document_figures(loaded, ids[item : item + 1], 40, ways)[0]
        assert [pair[0] for pair in of_item] == pytest.approx([pair[0] for pair in alone], rel=1e-5)
        for loss, changed in of_item[1:4]:
            assert loss == pytest.approx(of_item[0][0], rel=1e-5)
            assert changed == 0
        assert abs(of_item[4][0] - of_item[0][0]) > 1e-3
        assert of_item[4][1] > 0


def test_a_window_of_8_is_the_query_and_the_7_tokens_before_it(benchmark: Any) -> None:
    reads = benchmark.masked_reads.MaskedReads(1, frozenset(), 8)
    seen = reads._mask(3, 40, torch.device("cpu"))
    sinks = list(range(benchmark.masked_reads.SINK_TOKENS))
    assert [row.nonzero()[:, 0].tolist() for row in seen] == [sinks + list(range(q - 7, q + 1)) for q in (37, 38, 39)]


def test_answers_come_from_the_keys_that_a_whole_forward_sees(benchmark: Any, loaded: Any) -> None:
    way = benchmark.masked_reads.Way
    prompts = torch.randint(0, 512, (3, 40), generator=torch.Generator().manual_seed(1))
    ways = [way(None, None), way(2, None), way(2, 8)]
    answers = [benchmark.masked_reads.greedy(loaded, prompts, 6, each) for each in ways]
    for each, answer in zip(ways, answers, strict=True):
        ids = torch.cat([prompts, answer], dim=1)
        whole = benchmark.masked_reads.logits_of(loaded, ids, torch.arange(39, 45), each).argmax(-1)
        assert torch.equal(whole, answer)
    assert torch.equal(answers[0], answers[1])
    assert not torch.equal(answers[0], answers[2])
    firsts = benchmark.fidelity.answer_figures(loaded, prompts, 6, ways)
    for item, (own, masked, window) in enumerate(firsts):
        assert (own, masked) == (None, None)
        same = (answers[0][item] == answers[2][item]).tolist()
        assert window == (same.index(False) if False in same else None)


def test_needles_lie_at_their_depths_and_only_where_they_are_stated(benchmark: Any, loaded: Any) -> None:
    stream = [3] * 5_000
    depths = benchmark.fidelity.DEPTHS
    found = []
    for i, (prompt, bare, answer) in enumerate(benchmark.fidelity.needle_prompts(loaded, stream, 10, 1_000)):
        assert len(prompt) == len(bare) == 1_000
        text, without = ("".join(map(chr, ids)) for ids in (prompt, bare))
        code = "".join(map(chr, answer))
        fact, ask = f"\n\nRemember this: the secret access code is{code}.\n\n", "\n\nTo repeat what was said above: "
        assert text.index(fact) == int(text.replace(fact, "").index(ask) * depths[i % len(depths)])
        assert code not in without
        assert text.endswith("the secret access code is")
        found.append(code)
    assert len(set(found)) == 10

    ids = torch.randint(0, 512, (1, 30)).tolist()[0]
    full = benchmark.masked_reads.Way(None, None)
    right = benchmark.masked_reads.greedy(loaded, torch.tensor([ids]), 3, full)[0].tolist()
    wrong = [*right[:2], (right[2] + 1) % 512]
    items = [(ids, ids[::-1], right), (ids, ids, wrong)]
    assert benchmark.fidelity.needle_figures(loaded, items, [full]) == [[True, False], [False, False]]


def test_pieces_come_from_every_text_and_cross_none(benchmark: Any) -> None:
    streams = [[1] * 7, [2] * 2, [3] * 9]
    assert benchmark.fidelity.pieces(streams, 3, 9) == [[1] * 3, [3] * 3, [1] * 3, [3] * 3, [3] * 3]
    assert benchmark.fidelity.pieces(streams, 3, 2) == [[1] * 3, [3] * 3]


def test_a_run_that_was_cut_goes_on_and_gives_the_same(
    benchmark: Any, loaded: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(benchmark.fidelity, "load_model", lambda *_: loaded)
    monkeypatch.setattr(benchmark.fidelity, "WINDOWS", (4, 16))
    text = tmp_path / "text.jsonl"
    text.write_text("".join(json.dumps({"text": chr(97 + i) * 100 + "some words " * 40}) + "\n" for i in range(3)))
    options = [str(text), "--documents", "3", "--tokens", "64", "--answers", "2", "--answer-tokens", "4"]
    options += ["--needles", "5", "--needle-tokens", "200", "--device", "cpu"]
    assert benchmark.fidelity.main([*options, "--out", str(tmp_path / "a"), "--batch-tokens", "128"]) == 0
    assert benchmark.fidelity.main([*options, "--out", str(tmp_path / "b"), "--seconds", "0"]) == 3
    assert not (tmp_path / "b" / "fidelity.json").exists()
    assert benchmark.fidelity.main([*options, "--out", str(tmp_path / "b")]) == 0
    a, b = (json.loads((tmp_path / name / "fidelity.json").read_text())["done"] for name in "ab")
    assert {group: len(items) for group, items in a.items()} == {"documents 64": 3, "answers 64": 2, "needles 200": 5}
    for group in ("answers 64", "needles 200"):
        assert a[group] == b[group]
    for key, of_item in a["documents 64"].items():
        assert [pair[0] for pair in of_item] == pytest.approx([pair[0] for pair in b["documents 64"][key]], rel=1e-4)
    other = [*options, "--out", str(tmp_path / "a"), "--answer-tokens", "5"]
    assert benchmark.fidelity.main(other) == 2


def test_the_tables_are_over_what_is_done(benchmark: Any) -> None:
    about = {
        "layers": 30,
        "ways": [[None, None], [15, 64]],
        "scored_from": 10,
        "answer_tokens": 8,
        "depths": [0.1, 0.9],
    }
    done = {
        "documents 111": {"0": [[100.0, 0], [120.0, 5]], "1": [[300.0, 0], [340.0, 7]]},
        "answers 111": {"0": [None, 3], "1": [None, None], "2": [None, 0]},
        "needles 500": {"0": [True, False, False], "1": [True, True, False], "2": [False, False, True]},
    }
    lines = benchmark.fidelity_tables.tables(about, done).splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert cells[2] == ["30 (full)", "everything", f"{math.exp(2):.2f}", "0.0 ± 0.0 %", "0 of 3", "8"]
    # Losses a token grow by 0.2 and 0.4: mean 0.3, standard error 0.1. Changed: 5 and 7 %.
    more = f"{100 * math.expm1(0.3):+.1f} ± {10 * math.exp(0.3):.1f} %"
    assert cells[3] == ["15 (L/2)", "64", more, "6.0 ± 1.0 %", "2 of 3", "3"]
    # Needles at depths 0.1 and 0.9 of 500 tokens: 450 and 50 tokens from the end.
    assert cells[7] == ["30 (full)", "everything", "2 of 3", "", ""]
    assert cells[8] == ["15 (L/2)", "64", "1 of 3", "1 of 1 (21 to 100 %)", "0 of 2 (0 to 66 %)"]
    assert cells[9] == ["30 (full)", "everything; not stated", "1 of 3", "", ""]


def test_the_page_shows_the_tables_of_its_results(benchmark: Any) -> None:
    result = json.loads((ROOT / "benchmarks/results/2026-12-01-h200/fidelity.json").read_text())
    page = (ROOT / "docs/fidelity.md").read_text(encoding="utf-8")
    for table in benchmark.fidelity_tables.tables(result["about"], result["done"]).split("\n\n"):
        assert table.strip() in page


def test_wilson_intervals_are_those_of_the_textbook(benchmark: Any) -> None:
    # https://en.wikipedia.org/wiki/Binomial_proportion_confidence_interval: 1 of 10 -> 0.0179 to 0.4042.
    assert benchmark.fidelity_tables.wilson(1, 10) == pytest.approx((0.0179, 0.4042), abs=1e-4)
    assert benchmark.fidelity_tables.wilson(0, 10) == pytest.approx((0, 0.2775), abs=1e-4)
