"""Decode steps, captured once a shape and replayed: one launch instead of a thousand. CUDA only.

A step is replayed when every request decodes one token. Narrowed slots are no obstacle: which layers bring copies in is
part of the shape, what they copy is in lists that are refilled before each replay, and the copying stream forks from
and joins the captured one. Everything else runs launch by launch, and the first time that happens for a decode step
the reason is logged.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from tidekv.attention.backend import AttentionBackend, CapturedBuffers
from tidekv.attention.page_tables import HostBatch, HostWrites, NarrowTables, PackedBatch

log = logging.getLogger(__name__)

# Requests a captured step holds; a batch uses the next larger one, its empty rows write to the sink page.
BATCH_SIZES: tuple[int, ...] = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256)
MIN_TABLE_PAGES = 16
FIRST = "its shape was not seen before"

StepForward = Callable[["CapturedStep"], torch.Tensor]  # logits [size, V] of what the step's buffers hold


@dataclass(frozen=True)
class StepShape:
    """What a captured step can not change."""

    size: int  # requests
    width: int  # columns of the page tables
    copied_layers: tuple[int, ...] | None = None  # layers that bring copies in; None: nothing is narrow
    leaves_out: bool = False
    writes_to_host: bool = False


class CapturedStep:
    """A decode step over buffers of its own, and its graph once `capture` has run.

    What the host knows of a step lies in one tensor, `arena`, so that a fill is one upload; the page tables are built
    from it by the step itself. `forward` gives logits [size, V]; it reads `input_ids` and `positions` and calls the
    attention backend.
    """

    def __init__(
        self, shape: StepShape, forward: StepForward, backend: AttentionBackend, first: PackedBatch | HostBatch
    ) -> None:
        device = backend.device_pool.device
        layer_num = backend.device_pool.geometry.layer_num
        size, width = shape.size, shape.width
        self.shape, self._forward, self.backend = shape, forward, backend
        self.count = 0  # requests of the last fill
        self.graph: torch.cuda.CUDAGraph | None = None
        self.logits = torch.empty(0)
        self.input_ids, self.positions = (torch.zeros(size, dtype=torch.int64, device=device) for _ in range(2))
        self.rows = torch.arange(size, device=device)

        sections: dict[str, tuple[int, ...]] = {"kv_lens": (size,), "locs": (size,), "slots": (size, width)}
        if shape.copied_layers is not None:
            sections |= {"level": (size, width), "token_level": (size,), "token_dynamic": (size,)}
        if shape.copied_layers:
            sections["dynamic"] = (size, width)
        if shape.writes_to_host:
            sections |= {"base_rows": (size,), "layers": (layer_num, size)}
        self._sections = sections
        self._ends = np.cumsum([math.prod(dims) for dims in sections.values()]).tolist()
        self.arena = torch.zeros(self._ends[-1], dtype=torch.int64, device=device)
        self.parts = self._split(self.arena)
        self.parts["kv_lens"].fill_(1)

        def small(name: str, dtype: torch.dtype) -> torch.Tensor | None:
            return torch.zeros(sections[name], dtype=dtype, device=device) if name in sections else None

        # What kernels take in fewer bits, narrowed by the step itself.
        self._casts = {
            "level": small("level", torch.int8),
            "token_level": small("token_level", torch.int8),
            "layers": small("layers", torch.bool),
        }
        self.batch = PackedBatch(
            q_lens=np.ones(size, dtype=np.int64),
            kv_lens=np.ones(size, dtype=np.int64),
            cu_q=torch.arange(size + 1, device=device),
            kv_lens_dev=self.parts["kv_lens"],
            slots=self.parts["slots"],
            locs=self.parts["locs"],
            narrow=self._static_narrow(first),
            host_writes=self._static_writes(),
        )
        self.buffers = CapturedBuffers(
            # A context that leaves pages out is read by our own kernel, which needs no plan.
            None if shape.leaves_out else backend.captured_decode(size, width),
            backend.copy_lists if shape.copied_layers is not None else None,
        )

    def _split(self, arena: torch.Tensor) -> dict[str, torch.Tensor]:
        begins = [0, *self._ends]
        return {
            name: arena[begin:end].view(dims)
            for (name, dims), begin, end in zip(self._sections.items(), begins, self._ends, strict=False)
        }

    def _static_narrow(self, first: PackedBatch | HostBatch) -> NarrowTables | None:
        level, token_level = self._casts["level"], self._casts["token_level"]
        if first.narrow is None or level is None or token_level is None:
            return None
        schedule = first.narrow.schedule  # of it only the layers that have copies are read, and their cells
        dynamic = self.parts.get("dynamic")
        return NarrowTables(
            schedule,
            torch.from_numpy(schedule.position).to(self.arena.device),
            level,
            (torch.zeros(level.shape, dtype=torch.int64, device=self.arena.device) if dynamic is None else dynamic,),
            token_level,
            self.parts["token_dynamic"],
            self.shape.leaves_out,
        )

    def _static_writes(self) -> HostWrites | None:
        layers = self._casts["layers"]
        return None if layers is None else HostWrites(self.rows, self.parts["base_rows"], layers, 0)

    def fill(self, batch: PackedBatch | HostBatch, input_ids: torch.Tensor, positions: torch.Tensor) -> None:
        """Put a batch of this shape, or fewer requests, into the buffers, behind what has read them."""
        count = len(batch.q_lens)
        host = batch if isinstance(batch, HostBatch) else batch.host
        self.input_ids[:count].copy_(input_ids)
        self.positions[:count].copy_(positions)
        static = self.batch
        static.kv_lens[:count], static.kv_lens[count:] = batch.kv_lens, 1
        if host is not None:
            self._fill_arena(host)
        elif isinstance(batch, PackedBatch):  # at full width: all of it is on the device, or nearly
            if count < self.count:  # rows that were in use become padding again
                self.parts["locs"][count:].zero_()
                self.parts["slots"][count:].zero_()
                self.parts["kv_lens"][count:].fill_(1)
            self.parts["locs"][:count].copy_(batch.locs)
            self.parts["slots"][:count, : batch.slots.shape[1]].copy_(batch.slots)
            self.parts["kv_lens"][:count].copy_(batch.kv_lens_dev)
        self.count = count
        if self.buffers.lists is not None and batch.narrow is not None:
            self.buffers.lists.fill(batch.narrow.schedule)

    def _fill_arena(self, host: HostBatch) -> None:
        """One upload; what is not set is padding, which reads and writes the sink."""
        count, columns = host.slots.shape  # columns beyond a row's end are not read
        staged = torch.zeros(self.arena.numel(), dtype=torch.int64, pin_memory=self.arena.is_cuda)
        part = {name: tensor.numpy() for name, tensor in self._split(staged).items()}
        part["kv_lens"][:count], part["kv_lens"][count:] = host.kv_lens, 1
        part["locs"][:count] = host.locs
        part["slots"][:count, :columns] = host.slots
        narrow, writes = host.narrow, host.host_writes
        if narrow is not None:
            part["level"][:count, :columns] = narrow.level
            part["token_level"][:count], part["token_dynamic"][:count] = narrow.token_level, narrow.token_dynamic
            if "dynamic" in part:
                part["dynamic"][:count, :columns] = narrow.dynamic[0]
        if writes is not None:
            part["base_rows"][writes.tokens] = writes.base_rows
            part["layers"][:, writes.tokens] = writes.layers
        self.arena.copy_(staged, non_blocking=True)

    def forward(self) -> torch.Tensor:
        """Logits [size, V] of what the buffers hold, launch by launch."""
        for name, narrowed in self._casts.items():
            if narrowed is not None:
                narrowed.copy_(self.parts[name])  # to bool: what is not 0
        self.backend.begin(self.batch, self.buffers)
        try:
            return self._forward(self)
        finally:
            self.backend.end()

    def capture(self, memory_pool: Any) -> None:
        """Make the graph; the buffers must hold a step, which runs once on the way."""
        device = self.backend.device_pool.device
        side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side):  # kernels compile, plans and workspaces are made outside the capture
            self.forward()
        torch.cuda.current_stream(device).wait_stream(side)
        self.graph = torch.cuda.CUDAGraph()
        # Other threads of the process may go on calling CUDA: only this one must keep to what can be captured.
        with torch.cuda.graph(self.graph, pool=memory_pool, capture_error_mode="thread_local"):
            self.logits = self.forward()

    def replay(self) -> torch.Tensor:
        """Logits [size, V] of what the buffers hold, valid until the next replay of any captured step."""
        if self.graph is None:
            return self.forward()
        if self.buffers.plan is not None:
            self.buffers.plan.plan(self.batch.kv_lens)
        self.graph.replay()
        return self.logits


class DecodeGraphs:
    """Captured decode steps by shape. A full-width one is captured the first time it is wanted, a narrowed one the
    second time, since its shape may not last.

    capture: False runs the same steps over the same buffers launch by launch; it is how the CPU tests them.
    session(): entered around the making of each captured step.
    sizes, min_width, width_factor: requests, columns of the least table, and how much wider the next one is. Each
    combination that occurs is a capture of its own.
    """

    def __init__(
        self,
        forward: StepForward,
        backend: AttentionBackend,
        *,
        capture: bool = True,
        session: Callable[[], AbstractContextManager[Any]] = nullcontext,
        sizes: tuple[int, ...] = BATCH_SIZES,
        min_width: int = MIN_TABLE_PAGES,
        width_factor: int = 2,
    ) -> None:
        self.backend = backend
        self.sizes, self.min_width, self.width_factor = sizes, min_width, width_factor
        self._session = session
        self.replays = self.narrow_replays = 0
        self.eager: dict[str, int] = {}  # decode steps that were launched, by the reason
        self._forward = forward
        self._captured: dict[StepShape, CapturedStep] = {}
        self._wanted: set[StepShape] = set()
        self._memory_pool: Any = torch.cuda.graph_pool_handle() if capture else None

    def run(
        self, batch: PackedBatch | HostBatch, input_ids: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor | None:
        """Logits [B, V] of a decode step, valid until the next call; None if this step cannot be replayed.

        input_ids, positions: [B] int64 on the device, one token a request.
        """
        shape = self.shape(batch)
        if isinstance(shape, str):
            if batch.q_lens.max(initial=0) == 1:
                self.report_eager(shape)
            return None
        if batch.narrow is not None and shape not in self._wanted:
            self._wanted.add(shape)
            self.report_eager(FIRST)
            return None
        step = self._captured.get(shape)
        if step is None:
            step = self.make(shape, batch, input_ids, positions)
        else:
            step.fill(batch, input_ids, positions)
        if batch.narrow is not None:
            self.backend.streamer.count(batch.narrow.schedule)
            self.narrow_replays += 1
        if batch.host_writes is not None:
            self.backend.count_host_writes(batch.host_writes)
        self.replays += 1
        return step.replay()[: len(batch.q_lens)]

    def make(
        self, shape: StepShape, batch: PackedBatch | HostBatch, input_ids: torch.Tensor, positions: torch.Tensor
    ) -> CapturedStep:
        """The captured step of this shape, filled with `batch`, which runs once on the way."""
        step = self._captured[shape] = CapturedStep(shape, self._forward, self.backend, batch)
        self._wanted.add(shape)
        step.fill(batch, input_ids, positions)
        if self._memory_pool is not None:
            with self._session():
                step.capture(self._memory_pool)
        return step

    @property
    def eager_decodes(self) -> int:
        """Decode steps that were launched."""
        return sum(self.eager.values())

    def report_eager(self, reason: str) -> None:
        """A decode step runs launch by launch; each reason is logged once."""
        if reason not in self.eager and reason != FIRST:
            log.info("decode step not replayed from a CUDA graph: %s", reason)
        self.eager[reason] = self.eager.get(reason, 0) + 1

    def shape(self, batch: PackedBatch | HostBatch) -> StepShape | str:
        """The shape under which the step is captured, or why it is not."""
        if batch.q_lens.max(initial=0) != 1:
            return "the batch has prefill chunks"
        count = len(batch.q_lens)
        if count > self.sizes[-1]:
            return f"more than {self.sizes[-1]} requests"
        size = next(size for size in self.sizes if size >= count)
        width = self.min_width
        while width < batch.slots.shape[1]:
            width *= self.width_factor
        writes = batch.host_writes is not None
        if batch.narrow is None:
            return StepShape(size, width, writes_to_host=writes)
        schedule = batch.narrow.schedule
        if schedule.num_parts > 1:
            return "it has more narrowed slots than staging, and reads them in several parts"
        layers = tuple(item.layer for item in schedule.items)
        return StepShape(size, width, layers, batch.narrow.leaves_out, writes)
