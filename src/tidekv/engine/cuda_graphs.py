"""Decode steps, captured once a shape and replayed: one launch instead of a thousand. CUDA only.

A step is replayed when every request decodes one token. Narrowed slots are no obstacle: which layers bring copies in is
part of the shape, what they copy is in lists that are refilled before each replay, and the copying stream forks from
and joins the captured one. Everything else runs launch by launch, and the first time that happens for a decode step
the reason is logged.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from tidekv.attention.backend import AttentionBackend, CapturedBuffers
from tidekv.attention.page_tables import HostWrites, PackedBatch
from tidekv.attention.step_tables import StepTables
from tidekv.engine.model import LoadedModel, forward_packed

log = logging.getLogger(__name__)

# Requests a captured step holds; a batch uses the next larger one, its empty rows write to the sink page.
BATCH_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256)
MIN_TABLE_PAGES = 16


@dataclass(frozen=True)
class StepShape:
    """What a captured step can not change."""

    size: int  # requests
    width: int  # columns of the page tables
    copied_layers: tuple[int, ...] | None = None  # layers that bring copies in; None: nothing is narrow
    leaves_out: bool = False
    writes_to_host: bool = False


class CapturedStep:
    """A decode step over buffers of its own, and its graph once `capture` has run."""

    def __init__(self, shape: StepShape, model: LoadedModel, backend: AttentionBackend, first: PackedBatch) -> None:
        device = backend.device_pool.device
        layer_num = backend.device_pool.geometry.layer_num
        size, width = shape.size, shape.width

        def ids(*dims: int) -> torch.Tensor:
            return torch.zeros(dims, dtype=torch.int64, device=device)

        self.model, self.backend = model, backend
        self.count = 0  # requests of the last fill
        self.graph: torch.cuda.CUDAGraph | None = None
        self.logits = torch.empty(0)
        self.input_ids, self.positions, self.rows = ids(size), ids(size), torch.arange(size, device=device)
        writes = None
        if shape.writes_to_host:
            nothing = torch.empty(0, dtype=torch.int64, device=device)
            writes = HostWrites(self.rows, nothing, nothing, 0)
        self.batch = PackedBatch(
            q_lens=np.ones(size, dtype=np.int64),
            kv_lens=np.ones(size, dtype=np.int64),
            cu_q=torch.arange(size + 1, device=device),
            kv_lens_dev=torch.ones(size, dtype=torch.int64, device=device),
            slots=ids(size, width),
            locs=ids(size),
            narrow=first.narrow,  # of it only the layers that have copies are read
            host_writes=writes,
        )
        narrow = first.narrow is not None
        self.buffers = CapturedBuffers(
            # A context that leaves pages out is read by our own kernel, which needs no plan.
            None if shape.leaves_out else backend.captured_decode(size, width),
            StepTables(
                (ids(layer_num, size, width),) if narrow else (),
                ids(layer_num, size) if narrow else None,
                ids(layer_num, size) if shape.writes_to_host else None,
            ),
            backend.copy_lists if narrow else None,
        )

    def fill(self, batch: PackedBatch, input_ids: torch.Tensor, positions: torch.Tensor) -> None:
        """Put a batch of this shape, or fewer requests, into the buffers, behind what has read them."""
        static, tables, count = self.batch, self.buffers.tables, len(batch.q_lens)
        columns = batch.slots.shape[1]  # those beyond a row's end are not read
        now = self.backend.tables.build(batch)
        if count < self.count:  # rows that were in use become padding again
            for rows in (static.locs, static.slots):
                rows[count:].zero_()
            static.kv_lens_dev[count:].fill_(1)
            for page_table in tables.pages:
                page_table[:, count:].zero_()
            if tables.token_rows is not None:
                tables.token_rows[:, count:].zero_()
        self.count = count
        static.kv_lens[:count], static.kv_lens[count:] = batch.kv_lens, 1
        self.input_ids[:count].copy_(input_ids)
        self.positions[:count].copy_(positions)
        static.locs[:count].copy_(batch.locs)
        static.slots[:count, :columns].copy_(batch.slots)
        static.kv_lens_dev[:count].copy_(batch.kv_lens_dev)
        for target, source in zip(tables.pages, now.pages, strict=True):
            target[:, :count, :columns].copy_(source)
        if tables.token_rows is not None and now.token_rows is not None:
            tables.token_rows[:, :count].copy_(now.token_rows)
        if tables.host_rows is not None and now.host_rows is not None and batch.host_writes is not None:
            tables.host_rows.fill_(-1)
            tables.host_rows.index_copy_(1, batch.host_writes.tokens, now.host_rows)
        if self.buffers.lists is not None and batch.narrow is not None:
            self.buffers.lists.fill(batch.narrow.schedule)

    def forward(self) -> torch.Tensor:
        """Logits [size, V] of what the buffers hold, launch by launch."""
        self.backend.begin(self.batch, self.buffers)
        try:
            return forward_packed(self.model.model, self.input_ids, self.positions, self.rows, self.backend)
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
        with torch.cuda.graph(self.graph, pool=memory_pool):
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
    """

    def __init__(self, model: LoadedModel, backend: AttentionBackend, *, capture: bool = True) -> None:
        self.model = model
        self.backend = backend
        self.replays = self.narrow_replays = self.eager_decodes = 0
        self._captured: dict[StepShape, CapturedStep] = {}
        self._wanted: set[StepShape] = set()
        self._memory_pool: Any = torch.cuda.graph_pool_handle() if capture else None
        self._reported: set[str] = set()

    def run(self, batch: PackedBatch, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor | None:
        """Logits [B, V] of a decode step, valid until the next call; None if this step cannot be replayed.

        input_ids, positions: [B] int64 on the device, one token a request.
        """
        shape = self._shape(batch)
        if isinstance(shape, str):
            if batch.max_q == 1:
                self.eager_decodes += 1
                if shape not in self._reported:
                    self._reported.add(shape)
                    log.info("decode step not replayed from a CUDA graph: %s", shape)
            return None
        if batch.narrow is not None and shape not in self._wanted:
            self._wanted.add(shape)
            self.eager_decodes += 1
            return None
        step = self._captured.get(shape)
        if step is None:
            step = self._captured[shape] = CapturedStep(shape, self.model, self.backend, batch)
            step.fill(batch, input_ids, positions)
            if self._memory_pool is not None:
                step.capture(self._memory_pool)
        else:
            step.fill(batch, input_ids, positions)
        if batch.narrow is not None:
            self.backend.streamer.count(batch.narrow.schedule)
            self.narrow_replays += 1
        if batch.host_writes is not None:
            self.backend.count_host_writes(batch.host_writes)
        self.replays += 1
        return step.replay()[: len(batch.q_lens)]

    def _shape(self, batch: PackedBatch) -> StepShape | str:
        """The shape under which the step is captured, or why it is not."""
        if batch.max_q != 1:
            return "the batch has prefill chunks"
        count = len(batch.q_lens)
        if count > BATCH_SIZES[-1]:
            return f"more than {BATCH_SIZES[-1]} requests"
        size = next(size for size in BATCH_SIZES if size >= count)
        width = max(MIN_TABLE_PAGES, 1 << (batch.slots.shape[1] - 1).bit_length())
        writes = batch.host_writes is not None
        if batch.narrow is None:
            return StepShape(size, width, writes_to_host=writes)
        schedule = batch.narrow.schedule
        if schedule.num_parts > 1:
            return "it has more narrowed slots than staging, and reads them in several parts"
        layers = tuple(item.layer for item in schedule.items)
        return StepShape(size, width, layers, batch.narrow.leaves_out, writes)
