"""Runs a step's copies, host -> staging cells, in step with the layers that need them. Decides nothing.

On CUDA the copies run on their own stream. Three orders keep them right, each by one event:
  - a step's first copies wait for what the compute stream did before (write-back of the last step's tokens, repacks);
  - attention of an item waits for that item's copy only (`acquire`);
  - the copy of item i + 2, which overwrites the cell of item i, waits for the attention of item i (`release`).
On the CPU the same calls copy at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from tidekv.errors import InvariantError
from tidekv.kernels import move as kernels
from tidekv.memory.device_pool import DeviceKVPool
from tidekv.memory.host_pool import HostKVPool
from tidekv.memory.upload import upload
from tidekv.streaming.schedule import Item, StreamSchedule

# torch does not type these constructors; the annotations keep the rest of the module checked.
_new_stream: Callable[..., Any] = torch.cuda.Stream
_new_event: Callable[..., Any] = torch.cuda.Event

AHEAD = 2  # items in flight: one being read, one being filled. More would need more than two cells a slot.


class CopyLists:
    """The copies of captured steps, at addresses that do not change; refilled before each replay.

    src, dst [capacity] int64: flat pages, one run of entries an item; bounds [items + 1] int64: where the runs begin.
    """

    def __init__(self, capacity: int, max_items: int, device: torch.device) -> None:
        self.src, self.dst = (torch.zeros(capacity, dtype=torch.int64, device=device) for _ in range(2))
        self.bounds = torch.zeros(max_items + 1, dtype=torch.int64, device=device)

    def fill(self, schedule: StreamSchedule) -> None:
        """On the current stream, behind what has read them."""
        bounds = np.array([*(item.begin for item in schedule.items), len(schedule.src)], dtype=np.int64)
        parts = upload(self.src.device, (schedule.src, schedule.dst, bounds))
        for target, part in zip((self.src, self.dst, self.bounds), parts, strict=True):
            target[: len(part)].copy_(part)


class Streamer:
    """before_copy: called on the copying stream before each copy; tests delay or poison through it."""

    def __init__(
        self,
        device_pool: DeviceKVPool,
        host_pool: HostKVPool,
        before_copy: Callable[[Item], None] | None = None,
    ) -> None:
        self.device_pool = device_pool
        self.host_pool = host_pool
        self.before_copy = before_copy
        # The driver's batched copy reaches 91 to 99 % of the link where this reaches 92, but costs 0.3 to 1 ms of host
        # time an item where this costs 0.05, and a step has an item a layer.
        self.max_programs = kernels.link_programs(device_pool.geometry.cell_bytes // 2)
        self.bytes_in = 0
        self.copies = 0
        on_cuda = device_pool.device.type == "cuda"
        self._stream: torch.cuda.Stream | None = _new_stream(device_pool.device) if on_cuda else None
        self._schedule: StreamSchedule | None = None
        self._lists: CopyLists | None = None
        self._copied: dict[int, torch.cuda.Event] = {}

    def begin(self, schedule: StreamSchedule, lists: CopyLists | None = None) -> None:
        """Start a step: upload its lists once and set the first copies going.

        lists: the step is captured in a CUDA graph. Its copies read their pages there, and how many; `schedule` says
        only which layers have one.
        """
        self._schedule, self._lists = schedule, lists
        device = self.device_pool.device
        if lists is not None:
            self._src, self._dst = lists.src, lists.dst
        elif self._stream is None:
            self._src, self._dst = torch.from_numpy(schedule.src), torch.from_numpy(schedule.dst)
        else:
            self._src = torch.from_numpy(schedule.src).pin_memory().to(device, non_blocking=True)
            self._dst = torch.from_numpy(schedule.dst).pin_memory().to(device, non_blocking=True)
        if lists is None:
            self.count(schedule)
        if self._stream is None:
            return
        self._copied = {}
        self._stream.wait_stream(torch.cuda.current_stream(device))
        for item in schedule.items[:AHEAD]:
            self._issue(item, self._stream)

    def count(self, schedule: StreamSchedule) -> None:
        """Book the copies of a step; of a captured one at each replay."""
        self.copies += len(schedule.items)
        self.bytes_in += len(schedule.src) * self.device_pool.geometry.cell_bytes

    def acquire(self, item: Item) -> None:
        """From here on the current stream may read the item's staging cells."""
        if self._stream is None:
            self._copy(item)
        else:
            torch.cuda.current_stream(self.device_pool.device).wait_event(self._copied.pop(item.index))

    def release(self, item: Item) -> None:
        """The current stream has issued its last read of the item's cells: the copy after next may overwrite them."""
        if self._schedule is None:
            raise InvariantError("release outside a step")
        follower = item.index + AHEAD
        if self._stream is not None and follower < len(self._schedule.items):
            done = _new_event()
            done.record(torch.cuda.current_stream(self.device_pool.device))
            self._stream.wait_event(done)
            self._issue(self._schedule.items[follower], self._stream)

    def end(self) -> None:
        """The step is over; later work on the current stream may reuse staging and host pages."""
        if self._stream is not None:
            torch.cuda.current_stream(self.device_pool.device).wait_stream(self._stream)
        self._schedule = self._lists = None

    def _issue(self, item: Item, stream: torch.cuda.Stream) -> None:
        with torch.cuda.stream(stream):
            self._copy(item)
            event = _new_event()
            event.record(stream)
        self._copied[item.index] = event

    def _copy(self, item: Item) -> None:
        if self.before_copy is not None:
            self.before_copy(item)
        mine = slice(item.begin, item.end) if self._lists is None else slice(None)
        kernels.copy_cells(
            self.device_pool.k_flat,
            self.device_pool.v_flat,
            self.host_pool.k_flat,
            self.host_pool.v_flat,
            self._dst[mine],
            self._src[mine],
            self.device_pool.geometry.page_size,
            bounds=None if self._lists is None else self._lists.bounds[item.index : item.index + 2],
            max_programs=self.max_programs,
        )
