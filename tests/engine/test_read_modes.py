"""Read modes by class: what each one keeps, streams and is called, and who may ask for it."""

from __future__ import annotations

import random

import numpy as np
import pytest

from engine_cases import Ask, ample_answers, answers, assert_clean, make_engine, tokens
from tidekv.engine.read_modes import Exact, ReadModes, Window
from tidekv.engine.streaming_policy import StepRates
from tidekv.errors import ConfigError

FAST = StepRates(link_rate=2e7, base_s=5e-3, request_s=0.0, context_s=0.0, prompt_s=1e-5)


def test_what_a_mode_keeps_and_streams() -> None:
    narrow = np.array([False, True, True, False])
    slots = np.arange(1, 5)
    exact, window = Exact(), Window(3)
    assert (exact.kept(), window.kept()) == ((0, 0), (1, 4))
    assert exact.streamed(slots, narrow).tolist() == narrow.tolist()
    assert not window.streamed(slots, narrow).any()
    assert (exact.width((8, 4, 2)), window.width((32, 16, 8, 4, 2)), window.width((4, 2))) == (2, 8, 2)
    assert "LOSSY" in window.label
    assert "LOSSY" not in exact.label


def test_names() -> None:
    modes = ReadModes.named("window", "exact", window_tokens=100, page_size=16)
    assert modes.high == Window(7)  # 100 tokens are 7 pages of 16
    assert modes.of(True) is modes.high
    assert modes.any_lossy
    assert not ReadModes().any_lossy
    with pytest.raises(ConfigError, match="low_reads must be one of exact, window, got 'recent'"):
        ReadModes.named("exact", "recent", 100, 16)
    with pytest.raises(ConfigError, match="needs pressure='narrow' and rates"):
        make_engine(4, 8, 4, high_reads="window")


def test_a_window_for_high_priority_streams_nothing_and_leaves_low_alone() -> None:
    rng = random.Random(7)
    load = [Ask(tokens(rng, 40), 24, True) for _ in range(4)] + [Ask(tokens(rng, 12), 12)]
    engine = make_engine(8, 40, 4, host_pages=2000, rates=FAST, high_reads="window", window_tokens=8)
    given, right = answers(engine, load), ample_answers(8, load, 4)
    stats = engine.stats()
    assert (stats["high_reads"], stats["low_reads"]) == ("window (LOSSY)", "exact")
    assert stats["halvings_high"] > 0
    assert given[4] == right[4]  # low priority reads everything
    assert given[:4] != right[:4]  # the loss is real
    assert_clean(engine)


@pytest.mark.parametrize("seed", range(2))
def test_windows_that_hold_the_context_are_exact(seed: int) -> None:
    rng = random.Random(seed)
    load = [Ask(tokens(rng, 30), 16, i % 2 == 0) for i in range(6)]
    engine = make_engine(
        8, 32, 4, host_pages=2000, rates=FAST, high_reads="window", low_reads="window", window_tokens=64
    )
    assert answers(engine, load) == ample_answers(8, load, 4)
    assert not any(request.is_lossy for request in engine.requests.values())  # paused at most, as if exact
    assert_clean(engine)
