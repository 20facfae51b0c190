"""Under every policy and any pool, the engine's answers are those of ample memory.

Catches: answers that depend on memory, memory that is read before it was written, bytes that are not counted.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

from engine_cases import (
    Ask,
    ample_answers,
    answers,
    assert_clean,
    load_for,
    make_engine,
    poison_everything,
    pool_for,
    tokens,
    watch_logits,
)
from tidekv.engine.request import RequestState


@pytest.mark.parametrize("layer_num", [4, 5, 8])
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_narrow_equals_ample(layer_num: int, page_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    narrow_steps = 0
    for seed, share in ((1, 0.3), (4, 0.3)):
        load = load_for(100 * layer_num + seed, page_size)
        staging = {"dynamic_max_pages": 1} if seed == 4 else {}  # the less staging, the more is admitted
        engine = make_engine(layer_num, pool_for(load, page_size, share), page_size, host_pages=1000, **staging)
        begin = engine.backend.begin

        def count(batch: Any, begin: Any = begin) -> None:
            nonlocal narrow_steps
            narrow_steps += batch.narrow is not None
            begin(batch)

        monkeypatch.setattr(engine.backend, "begin", count)
        assert answers(engine, load) == ample_answers(layer_num, load, page_size), (seed, share)
        stats = engine.stats()
        assert stats["retractions"] == stats["recomputed_tokens"] == 0
        assert_clean(engine)
    assert narrow_steps > 0


@pytest.mark.parametrize("pressure", ["retract", "swap", "reserve"])
@pytest.mark.parametrize("prefix_cache", [True, False])
def test_the_other_policies_give_the_same_answers(pressure: str, prefix_cache: bool) -> None:
    worked = 0
    for seed, layer_num, page_size in ((1, 4, 4), (2, 5, 1), (3, 8, 4), (4, 4, 16)):
        load = load_for(seed, page_size)
        engine = make_engine(
            layer_num, pool_for(load, page_size, 0.4), page_size, pressure=pressure, prefix_cache=prefix_cache
        )
        assert answers(engine, load) == ample_answers(layer_num, load, page_size), seed
        stats = engine.stats()
        assert stats["halvings_low"] == stats["halvings_high"] == stats["streamed_bytes"] == 0
        if pressure != "swap":
            assert stats["parkings"] == 0
        if pressure != "retract":
            assert stats["retractions"] == stats["recomputed_tokens"] == 0
        worked += {"retract": stats["retractions"], "swap": stats["parkings"], "reserve": 1}[pressure]
        assert_clean(engine)
    assert worked > 0


def test_swapping_moves_the_bytes_that_it_says() -> None:
    rng = random.Random(2)
    load = [Ask(tokens(rng, 12), 16) for _ in range(3)]
    engine = make_engine(4, 10, 4, pressure="swap", prefix_cache=False)
    assert answers(engine, load) == ample_answers(4, load, 4)
    stats = engine.stats()
    page_bytes = engine.geometry.page_bytes
    assert stats["parkings"] > 0
    assert stats["bytes_to_host"] == stats["bytes_from_host"] > 0
    assert stats["bytes_to_host"] % page_bytes == 0


def test_write_through_equals_ample_and_halving_copies_nothing() -> None:
    rng = random.Random(7)
    load = [Ask(tokens(rng, 40), 12) for _ in range(5)]  # low only: their KV is on the host as it is produced
    expected = ample_answers(8, load, 4)
    to_host = {}
    for write_through in (False, True):
        engine = make_engine(8, 26, 4, write_through=write_through, host_pages=200)
        assert answers(engine, load) == expected
        assert engine.stats()["streamed_bytes"] > 0
        to_host[write_through] = engine.allocator.repacker.counters.to_host_bytes
        assert_clean(engine)
    assert to_host[False] > 0
    assert to_host[True] == 0


def test_write_through_with_a_host_pool_too_small_for_it() -> None:
    load = load_for(3, 4)
    engine = make_engine(5, pool_for(load, 4, 0.45), 4, write_through=True, host_pages=7)
    assert answers(engine, load) == ample_answers(5, load, 4)
    assert_clean(engine)


@pytest.mark.parametrize("host_pages", [0, 1, 6, 14])
def test_a_full_host_pool_falls_back_and_the_answers_stay(host_pages: int) -> None:
    rng = random.Random(5)
    load = [Ask(tokens(rng, rng.randint(8, 24)), 14, i % 3 == 0) for i in range(6)]
    engine = make_engine(4, 12, 4, host_pages=host_pages)
    assert answers(engine, load) == ample_answers(4, load, 4)
    if host_pages == 0:
        stats = engine.stats()
        assert stats["halvings_low"] == stats["halvings_high"] == stats["parkings"] == stats["bytes_to_host"] == 0
    assert_clean(engine)


def test_memory_that_nobody_wrote_is_never_read(monkeypatch: pytest.MonkeyPatch) -> None:
    load = load_for(9, 4)
    engine = make_engine(8, pool_for(load, 4, 0.35), 4)
    poison_everything(engine)
    with watch_logits(engine, monkeypatch) as seen:
        assert answers(engine, load) == ample_answers(8, load, 4)
    assert seen.one_part_steps + seen.several_parts_steps > 0


@pytest.mark.parametrize("pressure", ["narrow", "retract", "swap"])
def test_sampling_does_not_depend_on_memory(pressure: str) -> None:
    rng = random.Random(11)
    load = [Ask(tokens(rng, rng.randint(4, 30)), 16, i % 3 == 0) for i in range(6)]
    sampling = {"temperature": 0.8, "top_p": 0.9}
    expected = ample_answers(5, load, 4, {**sampling, "seed": 3})
    assert expected != ample_answers(5, load, 4, {**sampling, "seed": 4})  # the seed decides something
    assert expected != ample_answers(5, load, 4)
    engine = make_engine(5, pool_for(load, 4, 0.4), 4, pressure=pressure)
    assert answers(engine, load, {**sampling, "seed": 3}) == expected
    stats = engine.stats()
    assert stats["halvings_low"] + stats["parkings"] + stats["retractions"] > 0


def test_chunks_of_a_prompt_equal_one_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(4)
    load = [Ask(tokens(rng, 61), 4), Ask(tokens(rng, 33), 4, True)]
    expected = ample_answers(4, load, 4)
    for chunk, least_steps in ((4, 24), (12, 8), (256, 1)):
        engine = make_engine(4, 60, 4, prefill_chunk=chunk)
        sizes: list[int] = []
        run = engine.runner.run

        def watched(work: Any, run: Any = run, sizes: list[int] = sizes) -> Any:
            sizes.append(sum(n for r, n in work if r.state is RequestState.PREFILL))
            return run(work)

        monkeypatch.setattr(engine.runner, "run", watched)
        assert answers(engine, load) == expected
        assert max(sizes) <= chunk
        assert sum(size > 0 for size in sizes) >= least_steps
