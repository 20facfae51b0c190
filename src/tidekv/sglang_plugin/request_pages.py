"""The pages of SGLang's requests: which virtual pages they are, and how those narrow and widen."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from tidekv.memory.ledger import LOW, NO_SLOTS, BoolArray, IntArray
from tidekv.sglang_plugin.allocator import TideAllocator
from tidekv.sglang_plugin.page_mirror import read_rows, rows_of


class RequestPages:
    """rows: SGLang's table of virtual locs, [requests, tokens]; is_high: a request's class"""

    def __init__(self, allocator: TideAllocator, rows: torch.Tensor, is_high: Callable[[Any], bool]) -> None:
        self.allocator, self.rows, self.is_high = allocator, rows, is_high

    def of(self, reqs: Sequence[Any]) -> list[IntArray]:
        """Virtual pages of each request's committed tokens, in order: known on the host, or one read of their rows."""
        if not reqs:
            return []
        page_size = int(self.allocator.page_size)
        counts = np.array([-(-committed_len(req) // page_size) for req in reqs], dtype=np.int64)
        if self.allocator.mirror is not None:
            found = self.allocator.mirror.ids_of(reqs, counts)
        else:
            found = read_rows(self.rows, torch.tensor(rows_of(reqs)), counts, page_size)
        return [found[i, :count] for i, count in enumerate(counts.tolist())]

    def parts(self, req: Any, pages: IntArray) -> tuple[IntArray, IntArray]:
        """Its pages that are read in every layer, and those that its window, if it has one, does not reach."""
        if self.allocator.window is None or self.is_high(req):
            return pages, NO_SLOTS
        end = int(self.allocator.window.old_pages(np.array([committed_len(req)]))[0])
        return np.concatenate([pages[:1], pages[end:]]), pages[1:end]

    def are_narrow(self, pages: IntArray) -> BoolArray:
        """[n] which of these virtual pages have given up layers."""
        narrow: BoolArray = self.allocator.core.ledger.levels_of(self.allocator.pages.slots_of(pages)) > 0
        return narrow

    def narrow(self, pages: Sequence[IntArray], width: int, complete: Sequence[IntArray] = ()) -> int:
        """Cut those of these virtual pages that are full width and of low priority, in one repack; how many.

        complete: those of them that no token is written into any more: the host keeps every layer of them.
        """
        core = self.allocator.core
        ids = np.unique(np.concatenate([NO_SLOTS, *pages]))
        slots = self.allocator.pages.slots_of(ids)
        taken = (slots > 0) & (core.ledger.levels_of(slots) == 0)
        taken[taken] = core.ledger.page_code[slots[taken]] == LOW  # a full-width slot has the id of its page
        if not taken.any():
            return 0
        core.back_up(slots[taken & np.isin(ids, np.concatenate([NO_SLOTS, *complete]))])
        return int(core.narrow_slots(slots[taken], width))

    def widen(self, pages: IntArray) -> int:
        """Full width for these virtual pages, as far as there are free ones. Returns how many widened."""
        slots = self.allocator.pages.slots_of(pages[self.are_narrow(pages)])
        if not len(slots):
            return 0
        self.allocator.gather(len(slots))
        return int(self.allocator.core.widen_slots(slots))

    def widen_behind(self, pages: IntArray) -> int:
        """The same for those whose copy on the host is whole and stays theirs; what comes from there is copied under
        the next forward, which must not read these pages. (The host page of another slot is free at once, and the
        same step may give it away.)"""
        core = self.allocator.core
        pages = pages[core.ledger.backed[self.allocator.pages.slots_of(pages)]]
        with core.repacker.behind.collecting():
            return self.widen(pages)


def committed_len(req: Any) -> int:
    """Tokens whose KV is written: on the request in 0.5.17, on its KV record later."""
    own = getattr(req, "kv_committed_len", None)
    return int(req.kv.kv_committed_len if own is None else own)
