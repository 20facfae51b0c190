"""What fits, and what never can.

Catches: a request that hangs, or is refused wrongly; pressure that takes more than it must.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

from engine_cases import (
    LONGEST,
    Ask,
    ample_answers,
    answers,
    assert_clean,
    make_engine,
    random_load,
    tokens,
)
from tidekv.engine.sampling import SamplingParams
from tidekv.errors import CapacityError

# layers, pages, page size, options: two and three widths and more, odd counts, host pools that are the limit or absent
GEOMETRIES: list[tuple[int, int, int, dict[str, Any]]] = [
    (4, 6, 4, {}),
    (4, 6, 4, {"prefix_cache": False}),
    (4, 9, 1, {"dynamic_max_pages": 1}),
    (5, 7, 4, {}),
    (5, 7, 16, {"dynamic_max_pages": 0}),
    (8, 5, 4, {}),
    (8, 8, 4, {"dynamic_max_pages": 1}),
    (8, 12, 1, {"low_max_pages": 12, "high_reserved_pages": 12}),
    (8, 9, 4, {"low_max_pages": 0, "high_reserved_pages": 0, "write_through": True}),
    (8, 3, 4, {"min_slot_width": 1, "dynamic_max_pages": 1}),
    (3, 6, 4, {"min_slot_width": 1, "dynamic_max_pages": 1}),  # one pair of staging cells a page
    (2, 6, 4, {"min_slot_width": 1, "dynamic_max_pages": 1}),
    (8, 6, 4, {"dynamic_max_pages": 1, "host_pages": 13}),
    (8, 6, 4, {"dynamic_max_pages": 1, "host_pages": 7}),
    (8, 6, 4, {"dynamic_max_pages": 1, "host_pages": 3}),
    (5, 6, 4, {"host_pages": 0}),
    (4, 1, 4, {}),
    (4, 2, 4, {}),
    (8, 2, 4, {"dynamic_max_pages": 1}),
]


@pytest.mark.parametrize(("layer_num", "num_pages", "page_size", "options"), GEOMETRIES)
def test_the_largest_request_runs_alone_and_one_token_more_is_refused(
    layer_num: int, num_pages: int, page_size: int, options: dict[str, Any]
) -> None:
    for prompt_share, is_high in ((0.5, False), (0.95, True)):  # growth by decoding, and by prefill
        engine = make_engine(layer_num, num_pages, page_size, **options)
        most = engine.scheduler.largest_request()
        assert num_pages * page_size <= most <= num_pages * page_size << 3
        prompt = tokens(random.Random(1), max(1, int(prompt_share * most)))
        new = most - len(prompt) + 1  # the last token is never fed back
        with pytest.raises(CapacityError, match=rf"needs room for {most + 1} tokens .* at most {most} fit"):
            engine.add_request(prompt, SamplingParams(max_new_tokens=new + 1), is_high)
        assert not engine.scheduler.has_work
        assert answers(engine, [Ask(prompt, new, is_high)]) == ample_answers(
            layer_num, [Ask(prompt, new, is_high)], page_size
        )
        assert engine.stats()["retractions"] == 0
        assert_clean(engine)


def test_narrowing_lets_a_request_grow_past_full_width() -> None:
    engine = make_engine(8, 8, 4, dynamic_max_pages=1)
    assert engine.scheduler.largest_request() > 2 * 8 * 4
    for pressure in ("retract", "swap", "reserve"):
        assert make_engine(8, 8, 4, pressure=pressure).scheduler.largest_request() == 8 * 4
    assert make_engine(8, 8, 4, dynamic_max_pages=1, max_context_len=50).scheduler.largest_request() == 50


@pytest.mark.parametrize(
    ("layer_num", "num_pages", "page_size", "options"), [g for g in GEOMETRIES if g[1] > 4 and g[2] < 16]
)
def test_the_largest_request_runs_alone_after_others_left_their_prefixes(
    layer_num: int, num_pages: int, page_size: int, options: dict[str, Any]
) -> None:
    """Shared pages of the other class, narrow ones too, must not cost the page that it needs at its end."""
    rng = random.Random(2)
    engine = make_engine(layer_num, num_pages, page_size, **options)
    most = engine.scheduler.largest_request()
    prefix = tokens(rng, most // 2)
    answers(engine, [Ask(prefix[: most // 3], 2, True), Ask(tokens(rng, most // 3), 2), Ask(prefix, 1, True)])
    ask = Ask(prefix + tokens(rng, most // 4), 1)
    ask = Ask(ask.prompt, most - len(ask.prompt) + 1)
    assert answers(engine, [ask]) == ample_answers(layer_num, [ask], page_size)
    assert_clean(engine)


@pytest.mark.parametrize("pressure", ["narrow", "swap", "retract", "reserve"])
@pytest.mark.parametrize("seed", range(6))
def test_tiny_pools_never_hang(pressure: str, seed: int, request: pytest.FixtureRequest) -> None:
    """Everything finishes, right, in a bounded number of steps, however small the pools."""
    rng = random.Random(f"{request.node.name}")
    layer_num, page_size = rng.choice([3, 4, 5, 8]), rng.choice([1, 4])
    load = random_load(rng, 7, LONGEST[page_size], 12)
    pages = sorted(ask.pages(page_size) for ask in load)
    num_pages = pages[len(pages) // 2] if pressure == "narrow" else pages[-1]
    options = {"dynamic_max_pages": 1} if rng.random() < 0.5 else {}
    if rng.random() < 0.5:
        options["host_pages"] = rng.choice([num_pages // 2, num_pages, 2 * num_pages])
    engine = make_engine(
        layer_num,
        max(2, num_pages),
        page_size,
        pressure=pressure,
        prefill_chunk=page_size * rng.choice([1, 3, 16]),
        max_running=rng.choice([2, 3, 8]),
        min_slot_width=rng.choice([1, 2]),
        write_through=rng.random() < 0.3,
        **options,
    )
    most = engine.scheduler.largest_request()
    load = [ask for ask in load if len(ask.prompt) + ask.max_new_tokens - 1 <= most]
    assert load
    assert answers(engine, load) == ample_answers(layer_num, load, page_size)
    assert_clean(engine)


def test_growth_under_narrow_never_retracts_while_the_host_has_room() -> None:
    rng = random.Random(3)
    for seed, layer_num in enumerate((5, 8)):
        load = [Ask(tokens(rng, rng.randint(4, 12)), rng.randint(16, 28), rng.random() < 0.3) for _ in range(6)]
        engine = make_engine(layer_num, 11, 4, dynamic_max_pages=1, host_pages=400)
        answers(engine, load)
        stats = engine.stats()
        assert stats["retractions"] == stats["recomputed_tokens"] == 0, seed
        assert stats["halvings_low"] > 0
