"""Windows (LOSSY): which pages of a low request are old, so that they narrow first and are never streamed.

A decode step of a request that reads a window sees the first page and the last `tokens` tokens in every layer, and what
lies between only in the layers that are resident. What was computed that way is never shared through the prefix cache.
A prefill reads everything.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tidekv.memory.ledger import LOW, BoolArray, IntArray, Ledger

LEVEL = 2  # old pages keep L/4 layers: what docs/fidelity.md measures, and no fewer


@dataclass(frozen=True)
class Window:
    """tokens: the most recent ones, read in every layer."""

    tokens: int
    page_size: int

    def old_pages(self, kv_lens: IntArray) -> IntArray:
        """[B] end of each request's old pages; they are 1 .. end - 1."""
        ends: IntArray = np.maximum(1, (kv_lens - self.tokens) // self.page_size)
        return ends

    def unseen(self, kv_lens: IntArray, is_low: BoolArray, num_pages: int) -> BoolArray:
        """[B, N] pages that non-resident layers do not see; the argument of `build_batch`."""
        page = np.arange(num_pages)[None, :]
        mask: BoolArray = (page >= 1) & (page < self.old_pages(kv_lens)[:, None]) & is_low[:, None]
        return mask

    @staticmethod
    def candidates(ledger: Ledger, slots: IntArray) -> IntArray:
        """Those of the old pages' slots ([n]) that can still give up layers, each once, in the given order."""
        _, first = np.unique(slots, return_index=True)
        slots = slots[np.sort(first)]
        slots = slots[(slots > 0) & (slots < ledger.page_stride)]
        whole: IntArray = slots[(ledger.page_code[slots] == LOW) & (ledger.page_level[slots] == 0)]
        return whole
