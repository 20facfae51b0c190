"""From a step plan to sampled tokens: pack the batch, run the model over the cache, sample."""

from __future__ import annotations

import numpy as np
import torch

from tidekv.attention.backend import AttentionBackend
from tidekv.attention.page_tables import PackedBatch, build_batch
from tidekv.engine.cuda_graphs import DecodeGraphs
from tidekv.engine.memory import RequestMemory
from tidekv.engine.model import LoadedModel, forward_packed
from tidekv.engine.request import Request
from tidekv.engine.sampling import sample
from tidekv.memory.upload import upload


class Runner:
    """Runs packed batches: decodes and prefill chunks together, no padding."""

    def __init__(
        self, model: LoadedModel, memory: RequestMemory, backend: AttentionBackend, low_reads: str = "exact"
    ) -> None:
        self.model = model
        self.low_reads = low_reads
        self.memory = memory
        self.backend = backend
        self.graphs = DecodeGraphs(model, backend) if memory.pool.device.type == "cuda" else None

    def run(self, work: list[tuple[Request, int]]) -> list[tuple[Request, int]]:
        """Compute the planned tokens; returns (request, next token) for those whose known tokens are all computed."""
        pool, page_size = self.memory.pool, self.memory.page_size
        starts = np.array([r.num_computed for r, _ in work], dtype=np.int64)
        q_lens = np.array([n for _, n in work], dtype=np.int64)
        request_rows = np.array([r.row for r, _ in work], dtype=np.int64)
        kv_lens, ends = starts + q_lens, np.cumsum(q_lens)
        ids = np.concatenate([_tokens(r, r.num_computed, n) for r, n in work])
        positions = np.arange(len(ids), dtype=np.int64) + np.repeat(starts - (ends - q_lens), q_lens)
        done = [i for i, (r, n) in enumerate(work) if r.num_computed + n == r.num_tokens]
        lists = (ids, positions, np.repeat(request_rows, q_lens), request_rows, ends[done] - 1)
        input_ids, positions_dev, token_rows, rows, last = upload(pool.device, lists)

        locs = pool.req_to_token[token_rows, positions_dev].to(torch.int64)
        width = self.memory.pages(int(kv_lens.max())) * page_size
        slots = (pool.req_to_token[:, :width:page_size][rows].to(torch.int64) // page_size).contiguous()
        windows = np.array([not r.is_high_priority for r, _ in work]) if self.low_reads == "window" else None
        batch = build_batch(self.memory.allocator.ledger, q_lens, kv_lens, slots, locs, windows)
        logits = self.graphs.run(batch, input_ids, positions_dev) if self.graphs and len(done) == len(work) else None
        if logits is None:
            logits = self._forward(batch, input_ids, positions_dev, last)
        for request, n in work:
            request.num_computed += n
        finished = [work[i][0] for i in done]
        return list(zip(finished, self._sample(finished, logits), strict=True))

    def _forward(
        self, batch: PackedBatch, input_ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor
    ) -> torch.Tensor:
        self.backend.begin(batch)
        try:
            return forward_packed(self.model.model, input_ids, positions, rows, self.backend)
        finally:
            self.backend.end()

    def _sample(self, requests: list[Request], logits: torch.Tensor) -> list[int]:
        if not requests:
            return []
        params = [r.sampling for r in requests]
        if all(p.temperature == 0.0 for p in params):
            greedy: list[int] = logits.argmax(-1).tolist()  # the wait of the step
            return greedy
        seeds = np.array([p.seed or 0 for p in params], dtype=np.uint64)
        tokens = sample(
            logits.float(),
            torch.tensor([p.temperature for p in params]),
            torch.tensor([p.top_p for p in params]),
            torch.from_numpy(seeds),
            torch.tensor([r.num_tokens for r in requests]),
        )
        return tokens.tolist()


def _tokens(request: Request, start: int, n: int) -> np.ndarray:
    """Tokens [start, start + n) of prompt and output, without joining the two lists."""
    split = len(request.prompt_ids)
    out = request.prompt_ids[start : start + n]
    if start + n > split:
        out = out + request.output_ids[max(0, start - split) : start + n - split]
    return np.array(out, dtype=np.int64)
