"""The fidelity benchmark on a tiny random model: what it masks and how it sums up.

Catches: a window that hides what it should show, resident layers that are masked, figures mixed up between ways.
"""

from __future__ import annotations

import importlib
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from tidekv.engine.model import load_model

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def fidelity(monkeypatch: pytest.MonkeyPatch) -> Any:
    """`benchmarks` lies beside `src` and is no part of the package."""
    monkeypatch.syspath_prepend(ROOT)
    return importlib.import_module("benchmarks.fidelity")


def test_a_window_that_holds_everything_changes_nothing_and_a_small_one_does(fidelity: Any) -> None:
    loaded = load_model("random:tiny", "cpu", torch.float32)
    ids = torch.randint(0, 512, (96,)).tolist()
    ways = [(None, None), (4, 8), (2, 96), (2, 8)]  # full; all layers resident; all in the window; half and a window
    figures = fidelity.document_figures(loaded, ids, 40, ways)
    full = figures[0]
    for same in figures[1:3]:
        assert same[0] == pytest.approx(full[0], rel=1e-5)
        assert same[1] == 0
    assert abs(figures[3][0] - full[0]) > 1e-3
    assert figures[3][1] > 0
    answer = fidelity.logits_of(loaded, ids, torch.tensor([95]), None, None).argmax(-1).tolist()
    assert fidelity.needle_figures(loaded, ids, answer, ways)[:3] == [True, True, True]


def test_the_summary_is_over_what_is_done(fidelity: Any) -> None:
    ways = [(None, None), (15, 64)]
    done = {
        "documents": {"0": [(10.0, 0), (20.0, 5)], "1": [(30.0, 0), (40.0, 7)]},
        "needles": {"0": [True, False], "1": [True, True], "2": [False, False]},
    }
    full, window = fidelity.summary(done, ways, 100)
    assert (full.perplexity, full.changed, full.needles, full.needles_of) == (math.exp(0.2), 0.0, 2, 3)
    assert (window.perplexity, window.changed, window.needles) == (math.exp(0.3), 12 / 200, 1)
