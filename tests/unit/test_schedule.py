"""The copies of a step, against a loop over layers, parts and slots. Would catch: an item out of order, a copy of the
wrong layer or into the cell that is being read, parts mixed up."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

from tidekv.streaming.schedule import build_schedule, runs_of

RESIDENT = np.array([[0, 1, 2, 3, 4, 5], [0, -1, 1, -1, 2, -1], [0, -1, -1, -1, 1, -1]], dtype=np.int32)
STRIDE, HOST_PAGES = 100, 50


@pytest.mark.parametrize("seed", range(20))
def test_it_is_the_loop(seed: int) -> None:
    rng = random.Random(seed)
    count = rng.choice([0, 1, 5, 12])
    capacity = rng.choice([1, 3, 4, 20])
    slots = np.array(rng.sample(range(1, 99), count), dtype=np.int64)
    levels = np.array([rng.choice([1, 2]) for _ in slots], dtype=np.int64)
    hosts = np.array(rng.sample(range(HOST_PAGES), count), dtype=np.int64)
    pairs = np.array(rng.sample(range(200, 299), capacity), dtype=np.int64)[: max(1, count)]
    found = build_schedule(RESIDENT, slots, levels, hosts, pairs, STRIDE, HOST_PAGES)
    src, dst, items, cells = [], [], [], {}
    for layer in range(RESIDENT.shape[1]):
        for part in range(-(-count // len(pairs))):
            mine = [i for i in range(count) if i // len(pairs) == part and RESIDENT[levels[i], layer] < 0]
            if mine:
                cell = len(items) % 2
                items.append((len(items), layer, part, cell, len(src), len(src) + len(mine)))
                cells[part, layer] = cell
                src += [layer * HOST_PAGES + int(hosts[i]) for i in mine]
                dst += [int(pairs[i % len(pairs)]) + cell * STRIDE for i in mine]
    seen = [(item.index, item.layer, item.part, item.position, item.begin, item.end) for item in found.items]
    assert seen == items
    assert found.src.tolist() == src
    assert found.dst.tolist() == dst
    assert found.num_parts == -(-count // len(pairs))
    assert [item for mine in found.by_layer for item in mine] == list(found.items)
    assert all(found.position[key] == cell for key, cell in cells.items())


@pytest.mark.parametrize("seed", range(20))
def test_runs_are_the_longest_and_stay_within_an_item(seed: int) -> None:
    """Neighbours on both sides, page by page, cover the lists once; two runs of an item could not have been one."""
    rng = random.Random(seed)
    count = rng.choice([0, 1, 8, 20])
    slots = np.array(rng.sample(range(1, 99), count), dtype=np.int64)
    levels = np.array([rng.choice([1, 1, 1, 2]) for _ in slots], dtype=np.int64)
    hosts = np.sort(np.array(rng.sample(range(24), count), dtype=np.int64))
    pairs = np.arange(200, 200 + max(1, rng.choice([count, count // 2])), dtype=np.int64)
    found = build_schedule(RESIDENT, slots, levels, hosts, pairs, STRIDE, HOST_PAGES)
    runs = runs_of(found)
    assert len(runs.bounds) == len(found.items) + 1
    covered: list[int] = []
    for item in found.items:
        mine = range(runs.bounds[item.index], runs.bounds[item.index + 1])
        inside = [(int(runs.first[i]), int(runs.length[i])) for i in mine]
        assert inside[0][0] == item.begin
        assert inside[-1][0] + inside[-1][1] == item.end
        for first, length in inside:
            for k in range(length):
                assert found.src[first + k] == found.src[first] + k
                assert found.dst[first + k] == found.dst[first] + k
            covered += range(first, first + length)
        for (a, length), (b, _) in itertools.pairwise(inside):
            assert (found.src[b] - found.src[a], found.dst[b] - found.dst[a]) != (length, length)
    assert covered == list(range(len(found.src)))


def test_runs_by_hand() -> None:
    slots, levels = np.array([3, 4, 9, 11]), np.array([1, 1, 1, 1])
    found = build_schedule(RESIDENT, slots, levels, np.array([2, 3, 8, 9]), np.array([5, 6, 7, 9]), STRIDE, HOST_PAGES)
    runs = runs_of(found)
    assert runs.first.tolist() == [0, 2, 3, 4, 6, 7, 8, 10, 11]  # three layers
    assert runs.length.tolist() == [2, 1, 1] * 3
    assert runs.bounds.tolist() == [0, 3, 6, 9]
