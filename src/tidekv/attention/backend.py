"""Attention over a layer-elastic cache: write the new tokens, read every page where this layer of it is, merge
parts."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch

from tidekv.attention.flashinfer_attention import CapturedDecode, FlashInferAttention, why_not
from tidekv.attention.page_tables import HostWrites, HostWritten, NarrowTables, PackedBatch
from tidekv.attention.sdpa import DecodeGroup, decode_groups, paged_attention_sdpa
from tidekv.attention.step_tables import LayerTables, StepTables
from tidekv.errors import ConfigError, InvariantError
from tidekv.geometry import KVGeometry
from tidekv.kernels import attention as kernels
from tidekv.kernels import move
from tidekv.memory.device_pool import DeviceKVPool
from tidekv.memory.host_pool import HostKVPool
from tidekv.memory.ledger import Ledger
from tidekv.streaming.streamer import CopyLists, Streamer

log = logging.getLogger(__name__)

_new_stream: Callable[..., Any] = torch.cuda.Stream  # torch does not type these constructors
_new_event: Callable[..., Any] = torch.cuda.Event

Attended = tuple[torch.Tensor, torch.Tensor]  # out [T, Hq, D], lse [T, Hq] fp32
AttentionKind = Literal["auto", "flashinfer", "triton"]


def choose(kind: str, geometry: KVGeometry, device: torch.device) -> tuple[str, str]:
    """(name of the kernels that read this pool, why these): "flashinfer" or "triton" on CUDA, "sdpa" elsewhere.

    kind: "auto" takes FlashInfer where it is installed and compiled for this model; "flashinfer" has it compiled if
    need be, and raises ConfigError with what is missing; "triton" takes our own kernel.
    """
    if kind not in get_args(AttentionKind):
        raise ConfigError(f"attention_backend must be one of {', '.join(get_args(AttentionKind))}, got {kind!r}")
    if device.type == "cpu" and kind != "auto":
        raise ConfigError(f"attention_backend {kind!r} needs a CUDA device, the pool is on {device}; use 'auto'")
    if device.type != "cuda":
        return "sdpa", f"the pool is on {device}, where plain torch reads it"
    if kind == "triton":
        return "triton", "asked for"
    missing = why_not(geometry, device, compile_missing=kind == "flashinfer")
    if missing is None:
        return "flashinfer", "asked for" if kind == "flashinfer" else "installed, and compiled for this model"
    if kind == "flashinfer":
        raise ConfigError(f"attention_backend 'flashinfer' cannot be: {missing}; use 'auto' or 'triton'")
    return "triton", f"not FlashInfer: {missing}"


@dataclass(frozen=True)
class CapturedBuffers:
    """What a captured step reads at fixed addresses; its owner refills them before each replay."""

    plan: CapturedDecode | None
    lists: CopyLists | None


class AttentionBackend:
    """One for each engine; `begin(batch)`, then `forward` for layers 0..L-1 in order, then `end()`.

    `name` says which kernels read whole contexts, see `choose`. A context in parts, and one that leaves pages out, is
    read by our Triton kernel on CUDA under either name.
    """

    def __init__(
        self,
        ledger: Ledger,
        device_pool: DeviceKVPool,
        host_pool: HostKVPool,
        streamer: Streamer,
        kind: AttentionKind = "auto",
    ) -> None:
        self.device_pool = device_pool
        self.host_pool = host_pool
        self.streamer = streamer
        self._max_pairs = max(1, ledger.dynamic_max_pages) * len(ledger.pair_offsets)  # dynamic slots, at most
        self.tables = LayerTables(ledger, device_pool.device)
        self.page_size = device_pool.geometry.page_size
        self.name, self.reason = choose(kind, device_pool.geometry, device_pool.device)
        self._flashinfer: FlashInferAttention | None = None
        if device_pool.device.type == "cuda":
            log.info("attention: %s (%s)", self.name, self.reason)
        if self.name == "flashinfer":
            self._flashinfer = FlashInferAttention(device_pool.geometry, device_pool.device)
        self.host_bytes_out = 0
        on_cuda = device_pool.device.type == "cuda"
        self._host_writes = _new_stream(device_pool.device) if on_cuda else None
        self._computed = _new_event() if on_cuda else None
        self._compute: Any = None  # the stream of this step, if it writes to the host beside it
        self._copy_lists: CopyLists | None = None
        self._batch: PackedBatch | None = None
        self._tables = StepTables((), None, None)  # of this step
        self._groups: list[DecodeGroup] = []

    def captured_decode(self, num_requests: int, num_columns: int) -> CapturedDecode | None:
        """The plan of a decode step that is captured in a CUDA graph, to be made again before each replay; None if
        these kernels need no plan."""
        return self._flashinfer.captured_decode(num_requests, num_columns) if self._flashinfer else None

    @property
    def copy_lists(self) -> CopyLists:
        """The lists that all captured steps read, one step at a time; room for all staging, in every layer."""
        if self._copy_lists is None:
            layer_num = self.device_pool.geometry.layer_num
            self._copy_lists = CopyLists(self._max_pairs * layer_num, layer_num, self.device_pool.device)
        return self._copy_lists

    def begin(self, batch: PackedBatch, captured: CapturedBuffers | None = None) -> None:
        """Start a step; the first copies of narrowed layers set off. `captured`: the step is captured in a CUDA graph,
        which reads these in place of what would be made here."""
        self._batch = batch
        if self._flashinfer is not None:
            self._flashinfer.begin(batch, captured.plan if captured is not None else None)
        if self.name == "sdpa":
            self._groups = decode_groups(batch.q_lens, batch.kv_lens, batch.slots.shape[1], self.page_size)
        if captured is None and batch.host_writes is not None:
            self.count_host_writes(batch.host_writes)
        # A chunk of 2,048 tokens sends 268 MB of the 8B shape, 5 ms of the link: beside the step that costs 0.4 ms, in
        # line 4. A captured decode step sends 4 MB.
        beside = self._host_writes is not None and captured is None and batch.host_writes is not None
        self._compute = torch.cuda.current_stream(self.device_pool.device) if beside else None
        self._tables = self.tables.build(batch)  # a captured step builds them again at each replay
        if batch.narrow is not None:
            lists = captured.lists if captured is not None else None
            self.streamer.begin(batch.narrow.schedule, lists, len(batch.locs))

    def end(self) -> None:
        """The forward is issued; staging may be reused by what comes after it on this stream."""
        if self._batch is not None and self._batch.narrow is not None:
            self.streamer.end()
        if self._compute is not None:
            self._compute.wait_stream(self._host_writes)
            self._compute = None
        if self._flashinfer is not None:
            self._flashinfer.end()
        self._batch, self._tables = None, StepTables((), None, None)

    def forward(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scaling: float) -> torch.Tensor:
        """q [T, Hq, D], k and v [T, Hkv, D] of the new tokens -> [T, Hq, D]; K and V are written where they belong."""
        batch = self._batch
        if batch is None:
            raise RuntimeError("forward before begin")
        if batch.host_writes is not None:
            if self._tables.host_rows is None:
                raise InvariantError("a step that writes to the host without rows there")
            self._write_to_host(self._tables.host_rows[layer], batch.host_writes.tokens, k, v)
        if batch.narrow is None:  # an ordinary per-layer buffer and the ordinary table, the same for every layer
            keys, values = self.device_pool.get_key_buffer(layer), self.device_pool.get_value_buffer(layer)
            move.copy_rows(keys, values, k, v, batch.locs)
            return self._attend(batch, q, keys, values, batch.slots, scaling, whole=True)[0]
        return self._forward_narrow(batch, batch.narrow, layer, q, k, v, scaling)

    def _forward_narrow(
        self,
        batch: PackedBatch,
        narrow: NarrowTables,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scaling: float,
    ) -> torch.Tensor:
        items = {item.part: item for item in narrow.schedule.by_layer[layer]}
        if 0 in items:
            self.streamer.acquire(items[0])  # before the new tokens are written into the same cells
        keys, values = self.device_pool.k_flat, self.device_pool.v_flat
        token_rows = self._tables.token_rows
        if token_rows is None:
            raise InvariantError("a narrowed step without token rows")
        move.copy_rows(keys, values, k, v, token_rows[layer])
        one_part = len(items.keys() | {0}) == 1 and not narrow.leaves_out
        out, lse = self._attend(batch, q, keys, values, self._tables.pages[0][layer], scaling, whole=one_part)
        if 0 in items:
            self.streamer.release(items[0])
        for part, item in items.items():
            if part == 0:
                continue
            self.streamer.acquire(item)
            table = self._tables.pages[part][layer]
            more = self._attend(batch, q, keys, values, table, scaling, whole=False, few=True)
            self.streamer.release(item)
            out, lse = kernels.merge_states(out, lse, *more)
        return out

    def _write_to_host(self, rows: torch.Tensor, tokens: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """From the computed K and V, not from the pool: a row of staging may be gone by the time the copy runs."""
        stream, computed = self._host_writes, self._computed
        if self._compute is None or stream is None or computed is None:
            move.copy_rows(self.host_pool.k_flat, self.host_pool.v_flat, k, v, rows, tokens)
            return
        computed.record(self._compute)
        stream.wait_event(computed)
        with torch.cuda.stream(stream):
            move.copy_rows(self.host_pool.k_flat, self.host_pool.v_flat, k, v, rows, tokens)
        for read in (k, v):  # their memory is not given out again before this stream has read it
            read.record_stream(stream)

    def count_host_writes(self, writes: HostWrites | HostWritten) -> None:
        """Book the new tokens of a step that go to the host; of a captured one at each replay."""
        self.host_bytes_out += writes.num_written * self.device_pool.geometry.token_bytes_per_layer

    def _attend(
        self,
        batch: PackedBatch,
        q: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        table: torch.Tensor,
        scaling: float,
        *,
        whole: bool,
        few: bool = False,
    ) -> Attended:
        """`keys`, `values`: what `table` indexes, one layer's buffers or the flat tensors. `whole`: every page of every
        request is in the table (no merge follows, so no log-sum-exp is needed; FlashInfer gives none). `few`: most are
        not."""
        if whole and self._flashinfer is not None:
            return self._flashinfer.run(q, keys, values, table, scaling), q.new_empty(0, dtype=torch.float32)
        valid = None if whole else table > 0
        if self.name == "sdpa":
            return paged_attention_sdpa(
                q, keys, values, table, batch.q_lens, batch.kv_lens, self.page_size, scaling, valid, self._groups
            )
        return kernels.paged_attention(
            q,
            keys,
            values,
            table,
            batch.cu_q,
            batch.kv_lens_dev,
            self.page_size,
            scaling,
            max_q=batch.max_q,
            valid_pages=valid,
            few_valid=few,
        )
