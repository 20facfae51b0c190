"""Windows (LOSSY): which pages of a low request are old, so that they narrow first and are never streamed.

A decode step of a request that reads a window sees the first page and the last `tokens` tokens in every layer, and what
lies between only in the layers that are resident. What was computed that way is never shared through the prefix cache.
A prefill reads everything.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tidekv.memory.ledger import LOW, BoolArray, IntArray, Ledger

LEVEL = 2  # old pages keep L/4 layers, which is what docs/fidelity.md measures; fewer only where that does not do


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
    def level(ledger: Ledger, num_slots: int = 0, short: int = 0) -> int:
        """Ladder index for old pages: `LEVEL`, or the first below it at which so many slots free `short` pages."""
        lowest = len(ledger.ladder) - 1
        level = min(LEVEL, lowest)
        while level < lowest and Window.gives(ledger, num_slots, level) < short:
            level += 1
        return level

    @staticmethod
    def gives(ledger: Ledger, num_slots: int, level: int) -> int:
        """Pages that so many full-width pages free when they are cut to ladder[level]."""
        return num_slots - -(-num_slots // (1 << level)) if 0 < level < len(ledger.ladder) else 0

    @staticmethod
    def pages_for(ledger: Ledger, short: int, level: int) -> int:
        """Full-width pages to cut so that `short` become free: one cut to 1/s gives up (s - 1)/s of itself."""
        return -(-short * (1 << level) // ((1 << level) - 1)) if 0 < level < len(ledger.ladder) else 0

    @staticmethod
    def candidates(ledger: Ledger, slots: IntArray) -> IntArray:
        """Those of the old pages' slots ([n]) that can still give up layers, each once, in the given order."""
        _, first = np.unique(slots, return_index=True)
        slots = slots[np.sort(first)]
        slots = slots[(slots > 0) & (slots < ledger.page_stride)]
        whole: IntArray = slots[(ledger.page_code[slots] == LOW) & (ledger.page_level[slots] == 0)]
        return whole
