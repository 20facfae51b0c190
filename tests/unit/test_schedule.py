"""The copies of a step, against a loop over layers, parts and slots. Would catch: an item out of order, a copy of the
wrong layer or into the cell that is being read, parts mixed up."""

from __future__ import annotations

import random

import numpy as np
import pytest

from tidekv.streaming.schedule import build_schedule

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
