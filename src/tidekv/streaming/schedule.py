"""Which layer of which slots is brought in when, and into which staging cell: decided before the step, as data.

A narrowed slot of the batch owns a dynamic slot, a pair of cells. The copies of a step are *items* (layer, part) in the
order in which the forward needs them; item i uses cell i % 2 of the pairs, so that the copy of item i + 1 runs under
the attention of item i and the copy of item i + 2 waits for it. If there are more narrowed slots than dynamic slots
they are cut into parts that use the same pairs one after the other, and attention merges the parts by log-sum-exp.

Example: 30 layers, slots of width 15, one part: items (1, 0) (3, 0) (5, 0) ... (29, 0) in cells 0, 1, 0, ...
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tidekv.memory.ledger import IntArray


@dataclass(frozen=True)
class Item:
    """One copy of a step: entries [begin, end) of the schedule's lists, for `layer`, into cell `position` of the
    pairs."""

    index: int
    layer: int
    part: int
    position: int
    begin: int
    end: int


@dataclass(frozen=True)
class StreamSchedule:
    """All copies of one step.

    slots, dynamic, part   [n] int64: narrowed slots of the batch, the dynamic slot of each, and its part
    src, dst               flat pages, host -> device, one run of entries an item
    by_layer               items of each layer, by part
    position               [num_parts, L] int32: the cell that holds a part's non-resident copy of a layer
    """

    slots: IntArray
    dynamic: IntArray
    part: IntArray
    num_parts: int
    items: tuple[Item, ...]
    src: IntArray
    dst: IntArray
    by_layer: tuple[tuple[Item, ...], ...]
    position: npt.NDArray[np.int32]


@dataclass(frozen=True)
class Runs:
    """The copies of a step as runs of neighbours: pages that follow each other on both sides are one.

    first, length   [r] int64: entries [first, first + length) of the schedule's lists
    bounds          [items + 1] int64: the runs of item i are [bounds[i], bounds[i + 1])
    """

    first: IntArray
    length: IntArray
    bounds: IntArray


def runs_of(schedule: StreamSchedule) -> Runs:
    """The longest runs, none of them in two items. Example: dst 5 6 7 9, src 2 3 8 9: three, of 2, 1 and 1 pages."""
    src, dst = schedule.src, schedule.dst
    begins = np.array([item.begin for item in schedule.items], dtype=np.int64)
    starts = np.ones(len(src), dtype=np.bool_)
    starts[1:] = (np.diff(src) != 1) | (np.diff(dst) != 1)
    starts[begins] = True
    first = np.flatnonzero(starts)
    return Runs(first, np.diff(first, append=len(src)), np.append(np.searchsorted(first, begins), len(first)))


def build_schedule(
    resident_pos: npt.NDArray[np.int32],
    slots: IntArray,
    levels: IntArray,
    host_pages: IntArray,
    dynamic_slots: IntArray,
    page_stride: int,
    num_host_pages: int,
) -> StreamSchedule:
    """The copies of a step that reads `slots` ([n], with their ladder levels and host pages) through `dynamic_slots`
    ([c]).

    Slot i lands in dynamic slot i % c in part i // c, so slots that receive tokens in this step must come first, in the
    order of their own dynamic slots: they are all in part 0, where the new tokens are written.
    """
    count, capacity, layer_num = len(slots), max(1, len(dynamic_slots)), resident_pos.shape[1]
    part = np.arange(count, dtype=np.int64) // capacity
    dynamic = dynamic_slots[np.arange(count) % capacity]
    num_parts = int(part[-1]) + 1 if count else 0
    # By layer, then by slot, and parts ascend with slots: this is the order of the items already.
    layers, which = np.nonzero((resident_pos < 0).T[:, levels])
    parts = part[which]
    begins = np.flatnonzero(np.concatenate([[True], (np.diff(layers) != 0) | (np.diff(parts) != 0)])[: len(layers)])
    ends = np.append(begins, len(layers))[1:]
    item_of = np.repeat(np.arange(len(begins)), ends - begins)
    items = tuple(
        Item(index, layer, p, index % 2, begin, end)
        for index, (layer, p, begin, end) in enumerate(
            zip(layers[begins].tolist(), parts[begins].tolist(), begins.tolist(), ends.tolist(), strict=True)
        )
    )
    position = np.zeros((max(1, num_parts), layer_num), dtype=np.int32)
    by_layer: list[list[Item]] = [[] for _ in range(layer_num)]
    for item in items:
        by_layer[item.layer].append(item)
        position[item.part, item.layer] = item.position
    return StreamSchedule(
        slots, dynamic, part, num_parts, items,
        layers * num_host_pages + host_pages[which], dynamic[which] + item_of % 2 * page_stride,
        tuple(tuple(mine) for mine in by_layer), position,
    )  # fmt: skip
