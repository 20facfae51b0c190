"""From a step plan to sampled tokens: pack the batch, run the model over the cache, sample."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from tidekv.attention.backend import AttentionBackend
from tidekv.attention.captured_steps import CapturedStep, DecodeGraphs
from tidekv.attention.page_tables import HostBatch, PackedBatch, build_batch, host_batch
from tidekv.engine.memory import RequestMemory
from tidekv.engine.model import LoadedModel, forward_packed
from tidekv.engine.read_modes import ReadModes
from tidekv.engine.request import Request
from tidekv.engine.sampling import sample
from tidekv.memory.ledger import IntArray
from tidekv.memory.upload import upload

_new_event: Callable[..., Any] = torch.cuda.Event  # torch does not type its constructor


@dataclass(frozen=True)
class Launched:
    """A step whose work is queued: the next token of each of these requests, tokens [R] int64, is or will be on the
    device."""

    requests: list[Request]
    tokens: torch.Tensor
    on_host: torch.Tensor  # [R]: the same, once `copied` has happened
    copied: Any | None  # torch.cuda.Event; None on the CPU

    def read(self) -> list[tuple[Request, int]]:
        """(request, token) of each; on CUDA the wait of the step."""
        if self.copied is not None:
            self.copied.synchronize()
        return list(zip(self.requests, self.on_host.tolist(), strict=True))


EXACT = ReadModes()


class Runner:
    """Runs packed batches: decodes and prefill chunks together, no padding."""

    def __init__(
        self,
        model: LoadedModel,
        memory: RequestMemory,
        backend: AttentionBackend,
        read_modes: ReadModes = EXACT,
    ) -> None:
        self.model = model
        self.read_modes = read_modes
        self.memory = memory
        self.backend = backend
        self.graphs = DecodeGraphs(self.captured_forward, backend) if memory.pool.device.type == "cuda" else None

    def run(self, work: list[tuple[Request, int]]) -> list[tuple[Request, int]]:
        """Compute the planned tokens; returns (request, next token) for those whose tokens are all computed."""
        return self.launch(work).read()

    def launch(self, work: list[tuple[Request, int]], unread: Launched | None = None) -> Launched:
        """Queue the planned work. `unread`: the step before, if its tokens have not been read: they are taken over on
        the device, so that nothing here waits for them."""
        device, ledger = self.memory.pool.device, self.memory.allocator.ledger
        starts = np.array([r.num_computed for r, _ in work], dtype=np.int64)
        q_lens = np.array([n for _, n in work], dtype=np.int64)
        kv_lens, ends = starts + q_lens, np.cumsum(q_lens)
        ids = np.concatenate([_tokens(r, r.num_computed, n) for r, n in work])
        positions = np.arange(len(ids), dtype=np.int64) + np.repeat(starts - (ends - q_lens), q_lens)
        done = [i for i, (r, n) in enumerate(work) if r.num_computed + n == r.num_tokens]
        request_rows = np.array([r.row for r, _ in work], dtype=np.int64)
        token_rows = np.repeat(request_rows, q_lens)
        lists = [ids, positions, ends[done] - 1]
        batch: PackedBatch | HostBatch
        if ledger.any_narrow or ledger.any_backed:
            input_ids, positions_dev, last = upload(device, lists)
            batch = self._on_host(work, q_lens, kv_lens, request_rows, token_rows, positions)
        else:
            input_ids, positions_dev, last, token_rows_dev, rows = upload(device, [*lists, token_rows, request_rows])
            locs, slots = self._on_device(token_rows_dev, positions_dev, rows, int(kv_lens.max()))
            batch = build_batch(ledger, q_lens, kv_lens, slots, locs)
        if unread is not None:
            input_ids = _with_unread(input_ids, work, ends, unread)
        logits = self.graphs.run(batch, input_ids, positions_dev) if self.graphs and len(done) == len(work) else None
        if logits is None:
            batch = batch.on(device) if isinstance(batch, HostBatch) else batch
            logits = self._forward(batch, input_ids, positions_dev, last)
        for request, n in work:
            request.num_computed += n
        finished = [work[i][0] for i in done]
        tokens = self._sample(finished, logits)
        if tokens.device.type != "cuda":
            return Launched(finished, tokens, tokens, None)
        on_host = torch.empty(len(finished), dtype=torch.int64, pin_memory=True)
        on_host.copy_(tokens, non_blocking=True)
        copied = _new_event()
        copied.record()
        return Launched(finished, tokens, on_host, copied)

    def _on_host(
        self,
        work: list[tuple[Request, int]],
        q_lens: IntArray,
        kv_lens: IntArray,
        rows: IntArray,
        token_rows: IntArray,
        positions: IntArray,
    ) -> HostBatch:
        """The batch by what the host knows of the rows: `rows` [B] of its requests, `token_rows`, `positions` [T]."""
        page_size, host_rows = self.memory.page_size, self.memory.host_rows
        slots = host_rows.first(rows, self.memory.pages(int(kv_lens.max())))
        locs = host_rows.at(token_rows, positions // page_size) * page_size + positions % page_size
        windows = None
        if self.read_modes.any_lossy:
            windows = np.array([self.read_modes.of(r.is_high_priority).streams_nothing for r, _ in work])
        return host_batch(self.memory.allocator.ledger, q_lens, kv_lens, slots, locs, windows)

    def _on_device(
        self, token_rows: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor, longest: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(locs [T], slots [B, N]) of a batch at full width: the host need not know them. longest: tokens."""
        table, page_size = self.memory.pool.req_to_token, self.memory.page_size
        width = self.memory.pages(longest) * page_size
        slots = table[:, :width:page_size][rows].to(torch.int64) // page_size
        return table[token_rows, positions].to(torch.int64), slots.contiguous()

    def captured_forward(self, step: CapturedStep) -> torch.Tensor:
        """Logits [size, V] of a decode step that is, or is about to be, captured."""
        return forward_packed(self.model.model, step.input_ids, step.positions, step.rows, self.backend)

    def _forward(
        self, batch: PackedBatch, input_ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor
    ) -> torch.Tensor:
        self.backend.begin(batch)
        try:
            return forward_packed(self.model.model, input_ids, positions, rows, self.backend)
        finally:
            self.backend.end()

    def _sample(self, requests: list[Request], logits: torch.Tensor) -> torch.Tensor:
        """[R] int64 on the device; nothing waits."""
        if not requests:
            return torch.empty(0, dtype=torch.int64)
        params = [r.sampling for r in requests]
        if all(p.temperature == 0.0 for p in params):
            return logits.argmax(-1)
        seeds = np.array([p.seed or 0 for p in params], dtype=np.uint64)
        return sample(
            logits.float(),
            torch.tensor([p.temperature for p in params]),
            torch.tensor([p.top_p for p in params]),
            torch.from_numpy(seeds),
            torch.tensor([r.num_tokens for r in requests]),
        )


def _with_unread(
    input_ids: torch.Tensor, work: list[tuple[Request, int]], ends: IntArray, unread: Launched
) -> torch.Tensor:
    """`input_ids` [T] with the tokens that the host does not know yet: each is the last of its request's tokens."""
    if [r for r, n in work if n == 1 and r.num_computed + 1 == r.num_tokens] == unread.requests == [r for r, _ in work]:
        return unread.tokens  # the same batch decodes on: its tokens as they are
    row_of = {request: row for row, request in enumerate(unread.requests)}
    found = [
        (int(ends[i]) - 1, row_of[request])
        for i, (request, n) in enumerate(work)
        if request.num_unread and request.num_computed + n == request.num_tokens
    ]
    if found:
        at, rows = upload(input_ids.device, (np.array(found)[:, 0], np.array(found)[:, 1]))
        input_ids = input_ids.index_copy(0, at, unread.tokens.index_select(0, rows))
    return input_ids


def _tokens(request: Request, start: int, n: int) -> np.ndarray:
    """Tokens [start, start + n) of prompt and output, without joining the two lists; 0 for the one not read yet."""
    split = len(request.prompt_ids)
    out = request.prompt_ids[start : start + n]
    if start + n > split:
        out = out + request.output_ids[max(0, start - split) : start + n - split]
    if len(out) < n:
        out = [*out, 0]
    return np.array(out, dtype=np.int64)
