"""Decode steps over buffers at fixed addresses, as CUDA graphs replay them; here launch by launch. Would catch: a
buffer that is not refilled, padding that is read or written, copies of an earlier step, a shape that is too coarse."""

from __future__ import annotations

import random
from typing import Any

import pytest

from engine_cases import answers, assert_clean, make_engine, pages_together, poison_everything, random_load
from tidekv.attention.captured_steps import CapturedStep, DecodeGraphs


def replaying(layer_num: int, pages: int, **options: Any) -> Any:
    engine = make_engine(layer_num, pages, 4, **options)
    engine.runner.graphs = DecodeGraphs(engine.runner.captured_forward, engine.backend, capture=False)
    return engine


@pytest.mark.parametrize(("layer_num", "share", "dynamic_max_pages"), [(4, 0.3, 2), (5, 0.3, 2), (8, 0.4, 0.4)])
@pytest.mark.parametrize("write_through", [False, True])
def test_narrowed_steps_give_the_same_answers(
    layer_num: int, share: float, dynamic_max_pages: float, write_through: bool
) -> None:
    load = random_load(random.Random(layer_num), 12, 30, 40)
    pages = max(8, int(share * pages_together(load, 4)))
    options = {"dynamic_max_pages": dynamic_max_pages, "write_through": write_through}
    plain = make_engine(layer_num, pages, 4, **options)
    expected = answers(plain, load)
    engine = replaying(layer_num, pages, **options)
    poison_everything(engine)
    assert answers(engine, load) == expected
    graphs = engine.runner.graphs
    assert graphs.narrow_replays > 10
    assert graphs.replays > graphs.narrow_replays
    assert any(shape.writes_to_host for shape in graphs._captured)
    for name in ("streamed_bytes", "bytes_to_host", "halvings_low", "restores"):
        assert engine.stats()[name] == plain.stats()[name], name
    assert_clean(engine)


@pytest.mark.parametrize("part", ["token_dynamic", "base_rows", "slots", "dynamic", "lists"])
def test_a_buffer_that_is_not_refilled_would_show(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted error shows in the answers, or in what is read back later."""
    load = random_load(random.Random(8), 12, 30, 40)
    pages = max(8, int(0.4 * pages_together(load, 4)))
    expected = answers(make_engine(8, pages, 4, dynamic_max_pages=0.4), load)
    engine = replaying(8, pages, dynamic_max_pages=0.4)
    fill, filled = CapturedStep.fill, set()

    def forgetful(step: CapturedStep, *args: Any) -> None:
        lists = step.buffers.lists
        copied = [lists.src, lists.dst] if lists is not None else []
        kept = copied if part == "lists" else [step.parts[part]] if part in step.parts else []
        before = [t.clone() for t in kept]
        fill(step, *args)
        if step in filled:
            for tensor, old in zip(kept, before, strict=True):
                tensor.copy_(old)
        filled.add(step)

    monkeypatch.setattr(CapturedStep, "fill", forgetful)
    try:
        assert answers(engine, load) != expected
    except IndexError:  # a slot of another layout lies outside the pool
        assert part == "slots"
