"""From SGLang's forward batch to the core's packed batch, or None where SGLang's own kernels can read it."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from tidekv.attention.page_tables import PackedBatch, build_batch
from tidekv.errors import InvariantError
from tidekv.memory.ledger import BoolArray, IntArray
from tidekv.sglang_plugin.allocator import TideAllocator


def lens_of(forward_batch: Any) -> tuple[IntArray, IntArray]:
    """(q_lens, kv_lens): new tokens and all tokens of each request, [B] int64, on the host."""
    kv_lens = forward_batch.seq_lens_cpu.numpy().astype(np.int64)
    if forward_batch.forward_mode.is_decode():
        return np.ones(len(kv_lens), dtype=np.int64), kv_lens
    return np.asarray(forward_batch.extend_seq_lens_cpu, dtype=np.int64), kv_lens


def plan_batch(allocator: TideAllocator, req_to_token: torch.Tensor, forward_batch: Any) -> PackedBatch | None:
    """None: every page of the batch is full width under its own id, so virtual locs are rows of the stock buffers.

    Otherwise the batch in the core's terms. Waits for the device only in that case.
    """
    pages, ledger = allocator.pages, allocator.core.ledger
    if forward_batch.forward_mode.is_idle() or not (ledger.any_narrow or pages.displaced):
        return None
    q_lens, kv_lens = lens_of(forward_batch)
    page_size = pages.page_size
    width = -(-int(kv_lens.max()) // page_size)
    rows = req_to_token[:, : width * page_size : page_size][forward_batch.req_pool_indices.long()]
    ids = rows.cpu().numpy().astype(np.int64) // page_size
    ids[np.arange(width)[None, :] >= -(-kv_lens // page_size)[:, None]] = 0  # beyond the end rows hold old ids
    slots = pages.slots_of(ids)
    if ((slots == 0) & (ids > 0)).any():
        raise InvariantError(f"the batch reads virtual page {int(ids[(slots == 0) & (ids > 0)][0])}, which is free")
    if (slots == ids).all() and not (ledger.levels_of(slots)[slots > 0] > 0).any():
        return None
    locs = pages.locations(forward_batch.out_cache_loc)
    unseen = _unseen(allocator, kv_lens, slots) if forward_batch.forward_mode.is_decode() else None
    return build_batch(ledger, q_lens, kv_lens, torch.from_numpy(slots).to(allocator.core.device), locs, unseen)


def _unseen(allocator: TideAllocator, kv_lens: IntArray, slots: IntArray) -> BoolArray | None:
    """[B, N] what windows do not see in this decode step. A prefill reads everything: it hides the link, and what it
    computes may be shared. What a decode step computes with loss is kept out of the prefix cache."""
    window, view = allocator.window, allocator.batch
    if window is None or view is None or len(view.high) != len(kv_lens):
        return None
    unseen = window.unseen(kv_lens, ~np.array(view.high, dtype=np.bool_), slots.shape[1])
    unseen &= (slots > 0) & (allocator.core.ledger.levels_of(slots) > 0)
    for index in np.flatnonzero(unseen.any(1)).tolist():
        req = view.reqs[index]
        req.tidekv_lossy = req.skip_radix_cache_insert = True
    return unseen


def any_narrow(allocator: TideAllocator) -> bool:
    """Whether some batch may need `plan_batch`: then no captured graph may be replayed."""
    return bool(allocator.core.ledger.any_narrow or allocator.pages.displaced)
