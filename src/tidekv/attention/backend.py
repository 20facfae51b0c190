"""Attention over a layer-elastic cache: write the new tokens, read every page where this layer of it is, merge
parts."""

from __future__ import annotations

import torch

from tidekv.attention.page_tables import HostWrites, LayerTables, NarrowTables, PackedBatch
from tidekv.attention.sdpa import DecodeGroup, decode_groups, paged_attention_sdpa
from tidekv.kernels import attention as kernels
from tidekv.kernels import move
from tidekv.memory.device_pool import DeviceKVPool
from tidekv.memory.host_pool import HostKVPool
from tidekv.memory.ledger import Ledger
from tidekv.streaming.streamer import Streamer

Attended = tuple[torch.Tensor, torch.Tensor]  # out [T, Hq, D], lse [T, Hq] fp32


class AttentionBackend:
    """One for each engine; `begin(batch)`, then `forward` for layers 0..L-1 in order, then `end()`.

    `name` says which kernels read the pages: "triton" on CUDA, "sdpa" (torch) on the CPU.
    """

    def __init__(self, ledger: Ledger, device_pool: DeviceKVPool, host_pool: HostKVPool, streamer: Streamer) -> None:
        self.device_pool = device_pool
        self.host_pool = host_pool
        self.streamer = streamer
        self.tables = LayerTables(ledger, device_pool.device)
        self.page_size = device_pool.geometry.page_size
        self.name = "triton" if device_pool.device.type == "cuda" else "sdpa"
        self.host_bytes_out = 0
        self._batch: PackedBatch | None = None
        self._tables: tuple[torch.Tensor, ...] = ()  # of this step: one [L, B, N] for each part
        self._groups: list[DecodeGroup] = []

    def begin(self, batch: PackedBatch) -> None:
        """Start a step; the first copies of narrowed layers set off."""
        self._batch = batch
        if self.name == "sdpa":
            self._groups = decode_groups(batch.q_lens, batch.kv_lens, batch.slots.shape[1], self.page_size)
        if batch.narrow is not None:
            self.streamer.begin(batch.narrow.schedule)
            self._tables = self.tables.build(batch, batch.narrow)

    def end(self) -> None:
        """The forward is issued; staging may be reused by what comes after it on this stream."""
        if self._batch is not None and self._batch.narrow is not None:
            self.streamer.end()
        self._batch, self._tables = None, ()

    def forward(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scaling: float) -> torch.Tensor:
        """q [T, Hq, D], k and v [T, Hkv, D] of the new tokens -> [T, Hq, D]; K and V are written where they belong."""
        batch = self._batch
        if batch is None:
            raise RuntimeError("forward before begin")
        if batch.host_writes is not None:
            self._write_to_host(batch.host_writes, layer, k, v)
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
        move.copy_rows(keys, values, k, v, self.tables.token_rows(batch, narrow, layer))
        one_part = len(items.keys() | {0}) == 1 and not narrow.leaves_out
        out, lse = self._attend(batch, q, keys, values, self._tables[0][layer], scaling, whole=one_part)
        if 0 in items:
            self.streamer.release(items[0])
        for part, item in items.items():
            if part == 0:
                continue
            self.streamer.acquire(item)
            more = self._attend(batch, q, keys, values, self._tables[part][layer], scaling, whole=False)
            self.streamer.release(item)
            out, lse = kernels.merge_states(out, lse, *more)
        return out

    def _write_to_host(self, writes: HostWrites, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """From the computed K and V, not from the pool: a row of staging may be gone by the time the copy runs."""
        rows_per_layer = self.host_pool.num_pages * self.page_size
        if self.device_pool.device.type == "cuda":
            rows = torch.where(writes.layers[layer], writes.base_rows + layer * rows_per_layer, -1)
            move.copy_rows(self.host_pool.k_flat, self.host_pool.v_flat, k, v, rows, writes.tokens)
            self.host_bytes_out += len(rows) * self.device_pool.geometry.token_bytes_per_layer
            return
        mine = writes.layers[layer]
        if mine.any():
            rows, tokens = writes.base_rows[mine] + layer * rows_per_layer, writes.tokens[mine]
            self.host_pool.k_flat[rows] = k[tokens]
            self.host_pool.v_flat[rows] = v[tokens]
            self.host_bytes_out += len(rows) * self.device_pool.geometry.token_bytes_per_layer

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
    ) -> Attended:
        """`keys`, `values`: what `table` indexes, one layer's buffers or the flat tensors. `whole`: every page of every
        request is in the table (no merge follows, so no log-sum-exp is needed)."""
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
        )
