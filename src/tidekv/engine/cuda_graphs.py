"""Decode steps at full width, captured once a shape and replayed: one launch instead of a thousand. CUDA only.

A step is replayed when every request decodes one token, nothing in the batch is narrow and nothing is written through
to the host. Everything else runs launch by launch, and the first time that happens for a decode step the reason is
logged.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import numpy as np
import torch

from tidekv.attention.backend import AttentionBackend
from tidekv.attention.flashinfer_attention import CapturedDecode
from tidekv.attention.page_tables import PackedBatch
from tidekv.engine.model import LoadedModel, forward_packed

log = logging.getLogger(__name__)

# Requests a captured step holds; a batch uses the next larger one, its empty rows write to the sink page.
BATCH_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256)
MIN_TABLE_PAGES = 16


@dataclass
class _Captured:
    graph: torch.cuda.CUDAGraph
    batch: PackedBatch
    input_ids: torch.Tensor
    positions: torch.Tensor
    rows: torch.Tensor  # read by the graph at every replay, so it must live as long
    logits: torch.Tensor
    attention: CapturedDecode | None  # of kernels that need a plan of the lengths
    count: int = 0  # requests of the last replay


class DecodeGraphs:
    """Captured decode steps by (batch size, table width); each is captured the first time it is wanted."""

    def __init__(self, model: LoadedModel, backend: AttentionBackend) -> None:
        self.model = model
        self.backend = backend
        self.replays = self.eager_decodes = 0
        self._captured: dict[tuple[int, int], _Captured] = {}
        self._memory_pool = torch.cuda.graph_pool_handle()
        self._reported: set[str] = set()

    def run(self, batch: PackedBatch, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor | None:
        """Logits [B, V] of a decode step, valid until the next call; None if this step cannot be replayed.

        input_ids, positions: [B] int64 on the device, one token a request.
        """
        reason = self._why_not(batch)
        if reason is not None:
            if batch.max_q == 1:
                self.eager_decodes += 1
                if reason not in self._reported:
                    self._reported.add(reason)
                    log.info("decode step not replayed from a CUDA graph: %s", reason)
            return None
        count = len(batch.q_lens)
        size = next(size for size in BATCH_SIZES if size >= count)
        width = max(MIN_TABLE_PAGES, 1 << (batch.slots.shape[1] - 1).bit_length())
        step = self._captured.get((size, width)) or self._capture(size, width)
        static = step.batch
        if count < step.count:  # rows that were in use become padding again
            static.locs[count:].zero_()
            static.slots[count:].zero_()
            static.kv_lens_dev[count:].fill_(1)
        step.count = count
        step.input_ids[:count].copy_(input_ids)
        step.positions[:count].copy_(positions)
        static.locs[:count].copy_(batch.locs)
        static.slots[:count, : batch.slots.shape[1]].copy_(batch.slots)  # columns beyond a row's end are not read
        static.kv_lens_dev[:count].copy_(batch.kv_lens_dev)
        if step.attention is not None:
            lens = np.ones(size, dtype=np.int64)
            lens[:count] = batch.kv_lens
            step.attention.plan(lens)
        step.graph.replay()
        self.replays += 1
        return step.logits[:count]

    @staticmethod
    def _why_not(batch: PackedBatch) -> str | None:
        if batch.max_q != 1:
            return "the batch has prefill chunks"
        if len(batch.q_lens) > BATCH_SIZES[-1]:
            return f"more than {BATCH_SIZES[-1]} requests"
        if batch.narrow is not None:
            return "some of its slots are narrow, and their copies run on another stream in step with the layers"
        if batch.host_writes is not None:
            return "its tokens are written through to the host"
        return None

    def _capture(self, size: int, width: int) -> _Captured:
        device = self.backend.device_pool.device

        def ids(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.int64, device=device)

        batch = PackedBatch(
            q_lens=np.ones(size, dtype=np.int64),
            kv_lens=np.ones(size, dtype=np.int64),
            cu_q=torch.arange(size + 1, device=device),
            kv_lens_dev=torch.ones(size, dtype=torch.int64, device=device),
            slots=ids(size, width),
            locs=ids(size),
            narrow=None,
            host_writes=None,
        )
        input_ids, positions, rows = ids(size), ids(size), torch.arange(size, device=device)
        attention = self.backend.captured_decode(size, width)

        def forward() -> torch.Tensor:
            self.backend.begin(batch, attention)
            try:
                return forward_packed(self.model.model, input_ids, positions, rows, self.backend)
            finally:
                self.backend.end()

        side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side):  # kernels compile, plans and workspaces are made outside the capture
            forward()
        torch.cuda.current_stream(device).wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._memory_pool):
            logits = forward()
        step = self._captured[size, width] = _Captured(graph, batch, input_ids, positions, rows, logits, attention)
        return step
