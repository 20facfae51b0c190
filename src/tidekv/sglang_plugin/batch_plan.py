"""How a forward batch of SGLang is read: by SGLang's own kernels as it is, by the same kernels over translated
locations, or by the core's attention. Decided from the host's books alone; waits for the device only where they do not
know a row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tidekv.attention.page_tables import HostBatch, host_batch, slot_levels
from tidekv.errors import InvariantError
from tidekv.memory.ledger import BoolArray, IntArray
from tidekv.sglang_plugin.allocator import TideAllocator
from tidekv.sglang_plugin.page_mirror import read_rows


@dataclass(frozen=True)
class Moved:
    """Every page of the batch is full width, but not every one lies where its id says.

    q_lens, kv_lens [B]; first_locs [B, N] int64: location of the first token of each page, 0 beyond the end;
    locs [T] int64: locations of the new tokens.
    """

    q_lens: IntArray
    kv_lens: IntArray
    first_locs: IntArray
    locs: IntArray

    def as_batch(self, page_size: int) -> HostBatch:
        """For a backend whose kernels read rows themselves: the core's attention reads it at full width."""
        return HostBatch(self.q_lens, self.kv_lens, self.first_locs // page_size, self.locs, None, None)


def lens_of(forward_batch: Any) -> tuple[IntArray, IntArray]:
    """(q_lens, kv_lens): new tokens and all tokens of each request, [B] int64, on the host."""
    if forward_batch.seq_lens_cpu is None:
        raise InvariantError(
            "SGLang's batch has no lengths on the host, though nothing speculates; its pages are unknown"
        )
    kv_lens = forward_batch.seq_lens_cpu.numpy().astype(np.int64)
    if forward_batch.forward_mode.is_decode():
        return np.ones(len(kv_lens), dtype=np.int64), kv_lens
    return np.asarray(forward_batch.extend_seq_lens_cpu, dtype=np.int64), kv_lens


def plan_batch(allocator: TideAllocator, req_to_token: torch.Tensor, forward_batch: Any) -> HostBatch | Moved | None:
    """None: every page of the batch is full width under its own id, so virtual locs are rows of the stock buffers."""
    pages, ledger = allocator.pages, allocator.core.ledger
    if forward_batch.forward_mode.is_idle() or not (ledger.any_narrow or pages.displaced):
        return None
    q_lens, kv_lens = lens_of(forward_batch)
    page_size = pages.page_size
    num_pages = -(-kv_lens // page_size)
    reqs = requests_of(allocator, forward_batch)
    if reqs is not None and allocator.mirror is not None:
        ids = allocator.mirror.ids_of(reqs, num_pages)
    else:
        ids = read_rows(req_to_token, forward_batch.req_pool_indices, num_pages, page_size)
    first_locs = pages.first_locs(ids)
    free = (first_locs == 0) & (ids > 0)
    if free.any():
        raise InvariantError(f"the batch reads virtual page {int(ids[free][0])}, which is free")
    slots = levels = None
    if ledger.any_narrow:
        slots = first_locs // page_size
        levels = slot_levels(ledger, slots)
        if not levels.any():
            levels = None
    if levels is None and np.array_equal(first_locs, ids * page_size):
        return None
    locs = new_locs(first_locs, q_lens, kv_lens, page_size)
    if slots is None or levels is None:
        return Moved(q_lens, kv_lens, first_locs, locs)
    unseen = None
    if reqs is not None and forward_batch.forward_mode.is_decode():
        unseen = _unseen(allocator, reqs, kv_lens, levels)
    return host_batch(ledger, q_lens, kv_lens, slots, locs, unseen, levels)


def requests_of(allocator: TideAllocator, forward_batch: Any) -> Sequence[Any] | None:
    """The requests of the batch, in its order: those announced last, or by their ids. None: somebody is not known."""
    rids = getattr(forward_batch, "rids", None)
    if rids is None:
        return None
    view = allocator.batch
    if view is not None and rids == [req.rid for req in view.reqs]:
        return view.reqs
    found = [allocator.known.get(rid) for rid in rids]
    return None if None in found else found


def new_locs(first_locs: IntArray, q_lens: IntArray, kv_lens: IntArray, page_size: int) -> IntArray:
    """[T] locations of tokens kv_lens - q_lens .. kv_lens - 1 of each request, request after request."""
    requests = np.repeat(np.arange(len(q_lens)), q_lens)
    ends = np.cumsum(q_lens)
    at = np.arange(len(requests)) + np.repeat(kv_lens - ends, q_lens)
    locs: IntArray = first_locs[requests, at // page_size] + at % page_size
    return locs


def _unseen(
    allocator: TideAllocator, reqs: Sequence[Any], kv_lens: IntArray, levels: npt.NDArray[np.int8]
) -> BoolArray | None:
    """[B, N] what windows do not see in this decode step. A prefill reads everything: it hides the link, and what it
    computes may be shared. What a decode step computes with loss is kept out of the prefix cache."""
    window = allocator.window
    if window is None:
        return None
    is_low = np.array([not req.tidekv_high for req in reqs], dtype=np.bool_)
    unseen = window.unseen(kv_lens, is_low, levels.shape[1])
    unseen &= levels > 0
    for index in np.flatnonzero(unseen.any(1)).tolist():
        req = reqs[index]
        req.tidekv_lossy = req.skip_radix_cache_insert = True
    return unseen
