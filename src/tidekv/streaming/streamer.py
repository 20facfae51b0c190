"""Runs a step's copies, host -> staging cells, in step with the layers that need them. Decides nothing.

On CUDA the copies run on their own stream. Three orders keep them right, each by one event:
  - a step's first copies wait for what the compute stream did before (write-back of the last step's tokens, repacks);
  - attention of an item waits for that item's copy only (`acquire`);
  - the copy of item i + 2, which overwrites the cell of item i, waits for the attention of item i (`release`).
On the CPU the same calls copy at once.

A kernel of few programs copies, or, in a step with a long chunk of a prompt, the copy engine (`COPY_ENGINE_TOKENS`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from tidekv.errors import InvariantError
from tidekv.kernels import copy_engine
from tidekv.kernels import move as kernels
from tidekv.kernels.copy_engine import BatchedCopy, Words, page_addresses
from tidekv.memory.device_pool import DeviceKVPool
from tidekv.memory.host_pool import HostKVPool
from tidekv.memory.upload import upload
from tidekv.streaming.schedule import Item, Runs, StreamSchedule, runs_of

# torch does not type these constructors; the annotations keep the rest of the module checked.
_new_stream: Callable[..., Any] = torch.cuda.Stream
_new_event: Callable[..., Any] = torch.cuda.Event

# The copy engine copies for launched steps of so many new tokens, in runs of so many bytes of K (or V) on average.
# Under a chunk of 2,048 tokens it hides all of the copies' time; a kernel, whose blocks wait behind those of matrix
# products and hold them up, hides 0.67 to 0.70. Of 1,024 tokens: 0.90 to 0.93 for 0.41 to 0.52 (one H200, pages of
# 128 KiB). A smaller chunk waits for the host, and that is what a run costs: 0.5 us, in which the link brings 27 KiB.
COPY_ENGINE_TOKENS = 1024
COPY_ENGINE_RUN_BYTES = 64 * 1024
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


class _EngineRuns:
    """Addresses and bytes of each run of a step, K and V in turn, item after item."""

    def __init__(self, schedule: StreamSchedule, runs: Runs, there: DeviceKVPool, here: HostKVPool) -> None:
        page_bytes = there.geometry.cell_bytes // 2
        dst, src = schedule.dst[runs.first], schedule.src[runs.first]
        self._dst = self._in_turn(*(page_addresses(flat, dst, page_bytes) for flat in (there.k_flat, there.v_flat)))
        self._src = self._in_turn(*(page_addresses(flat, src, page_bytes) for flat in (here.k_flat, here.v_flat)))
        self._sizes = np.repeat(runs.length.astype(np.uint64) * np.uint64(page_bytes), 2)
        self._bounds = (2 * runs.bounds).tolist()

    @staticmethod
    def _in_turn(keys: Words, values: Words) -> Words:
        return np.stack([keys, values], axis=1).ravel()

    def of(self, item: Item) -> tuple[Words, Words, Words]:
        """(dst, src, sizes) of one item's runs."""
        mine = slice(self._bounds[item.index], self._bounds[item.index + 1])
        return self._dst[mine], self._src[mine], self._sizes[mine]


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
        self.engine = BatchedCopy() if on_cuda and copy_engine.why_not() is None else None
        self._compute: Any = None  # the stream of this step: asking for it costs 5 us, and a layer would ask 3 times
        self._runs: _EngineRuns | None = None  # of this step, if the engine copies
        self._schedule: StreamSchedule | None = None
        self._lists: CopyLists | None = None
        self._copied: dict[int, torch.cuda.Event] = {}

    def begin(self, schedule: StreamSchedule, lists: CopyLists | None = None, new_tokens: int = 0) -> None:
        """Start a step of so many new tokens: upload its lists once and set the first copies going.

        lists: the step is captured in a CUDA graph. Its copies read their pages there, and how many; `schedule` says
        only which layers have one.
        """
        self._schedule, self._lists = schedule, lists
        self._runs = self._engine_runs(schedule) if lists is None and new_tokens >= COPY_ENGINE_TOKENS else None
        device = self.device_pool.device
        if self._runs is not None:
            pass  # the driver takes lists of the host
        elif lists is not None:
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
        self._compute = torch.cuda.current_stream(device)
        self._stream.wait_stream(self._compute)
        for item in schedule.items[:AHEAD]:
            self._issue(item, self._stream)

    def _engine_runs(self, schedule: StreamSchedule) -> _EngineRuns | None:
        """None: no engine, or its runs would be too short."""
        if self.engine is None:
            return None
        runs = runs_of(schedule)
        page_bytes = self.device_pool.geometry.cell_bytes // 2
        if len(schedule.src) * page_bytes < len(runs.first) * COPY_ENGINE_RUN_BYTES:
            return None
        return _EngineRuns(schedule, runs, self.device_pool, self.host_pool)

    def count(self, schedule: StreamSchedule) -> None:
        """Book the copies of a step; of a captured one at each replay."""
        self.copies += len(schedule.items)
        self.bytes_in += len(schedule.src) * self.device_pool.geometry.cell_bytes

    def acquire(self, item: Item) -> None:
        """From here on the stream of the step may read the item's staging cells."""
        if self._stream is None:
            self._copy(item)
        else:
            self._compute.wait_event(self._copied.pop(item.index))

    def release(self, item: Item) -> None:
        """The step's stream has issued its last read of the item's cells: the copy after next may overwrite them."""
        if self._schedule is None:
            raise InvariantError("release outside a step")
        follower = item.index + AHEAD
        if self._stream is not None and follower < len(self._schedule.items):
            done = _new_event()
            done.record(self._compute)
            self._stream.wait_event(done)
            self._issue(self._schedule.items[follower], self._stream)

    def end(self) -> None:
        """The step is over; later work on the current stream may reuse staging and host pages."""
        if self._stream is not None:
            self._compute.wait_stream(self._stream)
        self._schedule = self._lists = self._runs = None

    def _issue(self, item: Item, stream: torch.cuda.Stream) -> None:
        with torch.cuda.stream(stream):
            self._copy(item)
            event = _new_event()
            event.record(stream)
        self._copied[item.index] = event

    def _copy(self, item: Item) -> None:
        if self.before_copy is not None:
            self.before_copy(item)
        if self.engine is not None and self._runs is not None and self._stream is not None:
            self.engine.copy(*self._runs.of(item), self._stream)
            return
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
