"""Streaming on the real path: staging, parts, write-back. Oracle: logits without a cache, and K and V as computed.

Catches: a page seen by two parts, a page seen by none, a stale or unwritten staging cell that is read, new tokens that
do not reach the host or reach it in another layer's place.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from engine_cases import (
    Ask,
    ample_answers,
    answers,
    assert_clean,
    drive,
    locs_of,
    make_engine,
    pages_together,
    poison_everything,
    poison_staging,
    random_load,
    tokens,
    watch_logits,
)
from tidekv.attention.page_tables import PackedBatch
from tidekv.attention.step_tables import LayerTables, StepTables
from tidekv.engine.engine import Engine
from tidekv.engine.request import Request
from tidekv.engine.sampling import SamplingParams
from tidekv.streaming import schedule as schedule_module
from tidekv.streaming.schedule import Item, StreamSchedule


def load_of(seed: int, count: int = 5) -> list[Ask]:
    return random_load(random.Random(seed), count, 40, 14)


def narrow_engine(layer_num: int, load: list[Ask], **options: Any) -> Engine:
    options.setdefault("dynamic_max_pages", 2)
    return make_engine(layer_num, max(8, int(0.35 * pages_together(load, 4))), 4, **options)


def poison_before_each_step(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """NaN in all staging before each step; the list grows by the number of staging pages."""
    poisoned: list[int] = []
    begin = engine.backend.begin

    def poison_and_begin(batch: Any, captured: Any = None) -> None:
        poisoned.append(poison_staging(engine))
        begin(batch, captured)

    monkeypatch.setattr(engine.backend, "begin", poison_and_begin)
    return poisoned


def watch_schedules(engine: Engine) -> list[StreamSchedule]:
    seen: list[StreamSchedule] = []
    begin = engine.streamer.begin

    def watched(schedule: StreamSchedule, lists: Any = None, new_tokens: int = 0) -> None:
        seen.append(schedule)
        begin(schedule, lists, new_tokens)

    engine.streamer.begin = watched  # type: ignore[method-assign]
    return seen


@pytest.mark.parametrize(
    ("layer_num", "pool_share", "dynamic_max_pages", "one", "several"),
    [(4, 0.6, 0.4, 1, 0), (8, 0.6, 0.4, 8, 0), (4, 0.35, 1, 0, 5), (5, 0.35, 1, 0, 5), (8, 0.35, 1, 1, 5)],
)
def test_one_part_and_several_give_the_logits_of_no_cache(
    layer_num: int,
    pool_share: float,
    dynamic_max_pages: float,
    one: int,
    several: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    load = load_of(1)
    expected = ample_answers(layer_num, load, 4)
    engine = make_engine(layer_num, int(pool_share * pages_together(load, 4)), 4, dynamic_max_pages=dynamic_max_pages)
    with watch_logits(engine, monkeypatch) as seen:
        assert answers(engine, load) == expected
    assert seen.compared == sum(len(out) for out in expected)
    assert seen.one_part_steps >= one, seen
    assert seen.several_parts_steps >= several, seen
    assert_clean(engine)


def mixed_widths(monkeypatch: pytest.MonkeyPatch) -> None:
    """One batch with slots of widths 4 and 2 of 8 layers, in several parts: low narrows twice before high once."""
    rng = random.Random(3)
    load = [Ask(tokens(rng, 28), 24, True), *(Ask(tokens(rng, 30), 12) for _ in range(4))]
    engine = make_engine(8, 15, 4, dynamic_max_pages=1, low_max_pages=0, high_reserved_pages=3)
    with watch_logits(engine, monkeypatch) as seen:
        answers(engine, load)
    assert seen.two_widths_in_parts > 2, seen


def test_two_narrow_widths_in_several_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    mixed_widths(monkeypatch)


def test_a_resident_page_seen_by_two_parts_would_show(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bug that was: a later part saw all pages of its slots, resident ones too, so those counted twice."""
    build = LayerTables.build

    def all_of_its_slots(self: LayerTables, batch: PackedBatch) -> StepTables:
        right = build(self, batch)
        if batch.narrow is None:
            return right
        resident, dynamic = right.pages[0], batch.narrow.dynamic
        later = (torch.where((dynamic[p] > 0) & (t == 0), resident, t) for p, t in enumerate(right.pages) if p)
        return replace(right, pages=(resident, *later))

    monkeypatch.setattr(LayerTables, "build", all_of_its_slots)
    with pytest.raises(AssertionError, match="logits off"):
        mixed_widths(monkeypatch)


@pytest.mark.parametrize("dynamic_max_pages", [1, 0.25])
@pytest.mark.parametrize("layer_num", [5, 8])
def test_poisoned_staging_changes_nothing(
    layer_num: int, dynamic_max_pages: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = load_of(10 + layer_num)
    engine = narrow_engine(layer_num, load, dynamic_max_pages=dynamic_max_pages)
    poison_everything(engine)
    poisoned = poison_before_each_step(engine, monkeypatch)
    with watch_logits(engine, monkeypatch):
        assert answers(engine, load) == ample_answers(layer_num, load, 4)
    assert sum(poisoned) > 10


def test_a_copy_that_is_left_out_would_show(monkeypatch: pytest.MonkeyPatch) -> None:
    """The oracle sees one copy of one layer that does not happen."""
    load = load_of(15)
    engine = narrow_engine(5, load)
    poison_before_each_step(engine, monkeypatch)
    copy = engine.streamer._copy
    monkeypatch.setattr(engine.streamer, "_copy", lambda item: None if item.index == 1 else copy(item))
    with watch_logits(engine, monkeypatch), pytest.raises(AssertionError, match="logits off"):
        answers(engine, load)


def test_poison_before_each_copy_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only two cells of a pair are in use: the one that an item is about to fill holds nothing needed."""
    load = load_of(31)
    engine = narrow_engine(8, load, dynamic_max_pages=1)
    copies = 0

    def poison(item: Item) -> None:
        nonlocal copies
        copies += 1
        schedule, pool = engine.streamer._schedule, engine.device_pool
        assert schedule is not None
        pages = torch.from_numpy(schedule.dst[item.begin : item.end])
        for flat in (pool.k_flat, pool.v_flat):
            flat.view(pool.geometry.num_combined, -1)[pages] = float("nan")

    engine.streamer.before_copy = poison
    with watch_logits(engine, monkeypatch):
        assert answers(engine, load) == ample_answers(8, load, 4)
    assert copies == engine.streamer.copies > 50


@pytest.mark.parametrize("dynamic_max_pages", [1, 0.4])
def test_items_alternate_between_the_two_cells(dynamic_max_pages: float) -> None:
    load = load_of(20)
    engine = narrow_engine(8, load, dynamic_max_pages=dynamic_max_pages)
    schedules = watch_schedules(engine)
    answers(engine, load)
    assert len(schedules) > 10
    stride = engine.device_pool.geometry.page_stride
    for schedule in schedules:
        assert [item.position for item in schedule.items] == [i % 2 for i in range(len(schedule.items))]
        order = [(item.layer, item.part) for item in schedule.items]
        assert order == sorted(order)
        pairs = set(schedule.dynamic.tolist())
        for item in schedule.items:
            into = schedule.dst[item.begin : item.end] - item.position * stride
            assert len(set(into.tolist())) == len(into)
            assert set(into.tolist()) <= pairs
            assert schedule.position[item.part, item.layer] == item.position


def test_items_that_share_one_cell_would_show(monkeypatch: pytest.MonkeyPatch) -> None:
    """A schedule whose table names the other cell than the copy fills reads poison."""
    build = schedule_module.build_schedule

    def swapped(*args: Any) -> StreamSchedule:
        schedule = build(*args)
        schedule.position[...] = 1 - schedule.position
        return schedule

    monkeypatch.setattr("tidekv.attention.page_tables.build_schedule", swapped)
    load = load_of(15)
    engine = narrow_engine(5, load)
    poison_before_each_step(engine, monkeypatch)
    with watch_logits(engine, monkeypatch), pytest.raises(AssertionError, match="logits off"):
        answers(engine, load)


class KvRecord:
    """K and V of every token as the model computed them, by request, layer and position."""

    def __init__(self, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.engine = engine
        self.kv: dict[tuple[str, int, int], tuple[torch.Tensor, torch.Tensor]] = {}
        self.work: list[tuple[Request, int]] = []
        run, forward = engine.runner.run, engine.backend.forward

        def watched_run(work: list[tuple[Request, int]]) -> list[tuple[Request, int]]:
            self.work = [(r, r.num_computed, n) for r, n in work]  # type: ignore[misc]
            return run(work)

        def watched_forward(layer: int, q: Any, k: torch.Tensor, v: torch.Tensor, scaling: float) -> torch.Tensor:
            at = 0
            for request, start, n in self.work:  # type: ignore[misc]
                for i in range(n):
                    self.kv[request.id, layer, start + i] = k[at + i].clone(), v[at + i].clone()
                at += n
            return forward(layer, q, k, v, scaling)

        monkeypatch.setattr(engine.runner, "run", watched_run)
        monkeypatch.setattr(engine.backend, "forward", watched_forward)

    def compare(self) -> int:
        """Read all live tokens of all layers back, bit for bit; the number of tokens and layers compared."""
        compared = 0
        for request in self.engine.scheduler.running:
            locs = locs_of(self.engine, request)
            for layer in range(self.engine.geometry.layer_num):
                k, v = self.engine.allocator.read_kv(layer, locs)
                for position in range(request.num_computed):
                    wanted = self.kv[request.id, layer, position]
                    assert torch.equal(k[position], wanted[0]), (request.id, layer, position)
                    assert torch.equal(v[position], wanted[1]), (request.id, layer, position)
                    compared += 1
        return compared


@pytest.mark.parametrize(
    ("layer_num", "options"), [(5, {}), (8, {"dynamic_max_pages": 1}), (4, {"write_through": True})]
)
def test_tokens_read_back_bit_for_bit_after_every_step(
    layer_num: int, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(layer_num)
    load = [Ask(tokens(rng, 24), 12, i == 1) for i in range(4)]
    # No prefix cache: a matched prefix was computed by another request, in another batch, so its bits may differ.
    engine = make_engine(layer_num, 15, 4, prefix_cache=False, **{"dynamic_max_pages": 2, **options})
    record = KvRecord(engine, monkeypatch)
    for ask in load:
        engine.add_request(ask.prompt, SamplingParams(max_new_tokens=ask.max_new_tokens), ask.is_high)
    compared = narrow_steps = 0
    while engine.scheduler.has_work:
        engine.step()
        narrow_steps += engine.allocator.ledger.any_narrow
        compared += record.compare()
    assert narrow_steps > 5
    assert compared > 1000


def test_new_tokens_that_miss_the_host_would_show(monkeypatch: pytest.MonkeyPatch) -> None:
    load = [Ask(tokens(random.Random(5), 24), 12) for _ in range(4)]
    engine = make_engine(5, 15, 4, prefix_cache=False, dynamic_max_pages=2)
    monkeypatch.setattr(engine.backend, "_write_to_host", lambda *args: None)
    record = KvRecord(engine, monkeypatch)
    for ask in load:
        engine.add_request(ask.prompt, SamplingParams(max_new_tokens=ask.max_new_tokens), ask.is_high)
    with pytest.raises(AssertionError):  # noqa: PT012
        while engine.scheduler.has_work:
            engine.step()
            record.compare()


def test_full_width_streams_nothing() -> None:
    load = load_of(50)
    engine = make_engine(4, pages_together(load, 4) + 8, 4)
    answers(engine, load)
    stats = engine.stats()
    assert stats["streamed_bytes"] == stats["bytes_to_host"] == stats["bytes_from_host"] == 0
    assert engine.streamer.copies == 0


def test_forward_outside_a_step_is_refused() -> None:
    engine = make_engine(4, 8, 4)
    with pytest.raises(RuntimeError, match="forward before begin"):
        engine.backend.forward(0, torch.zeros(1, 4, 16), torch.zeros(1, 2, 16), torch.zeros(1, 2, 16), 1.0)
    drive(engine)  # nothing queued: nothing happens
