"""`RequestMemory` for an engine whose KV does not exist: one location a page instead of one a token.

A replay on the virtual clock never reads a token's location. What decides is which page belongs to whom and how wide it
is, so a row of `req_to_token` holds the location of each page's first token and nothing else: a remap looks at 1/64 of
the entries, and a decode step asks the allocator only for the requests that open a page.
"""

from __future__ import annotations

import numpy as np
import torch

from tidekv.allocator import DynamicPagedTokenToKVPoolAllocator
from tidekv.engine.memory import RequestMemory
from tidekv.engine.prefix_cache import PrefixCache
from tidekv.engine.request import Request
from tidekv.memory.ledger import IntArray
from tidekv.memory.req_to_token import ReqToTokenPool


class PageBooks(RequestMemory):
    """Takes the pool of `page_rows`. On the CPU alone.

    The same pages are taken and given back, in the same order, as with a location for each token. One difference: a
    full-width page that goes on being filled, and that the ladder narrows later in the same step, asks for no staging.
    """

    def __init__(
        self,
        allocator: DynamicPagedTokenToKVPoolAllocator,
        req_to_token_pool: ReqToTokenPool,
        prefix_cache: PrefixCache | None,
    ) -> None:
        super().__init__(allocator, req_to_token_pool, prefix_cache, columns_a_page=1)

    @staticmethod
    def page_rows(max_running: int, max_context_len: int, page_size: int) -> ReqToTokenPool:
        """[max_running, pages of the longest context]."""
        return ReqToTokenPool(max_running, -(-max_context_len // page_size), "cpu")

    def extend(self, request: Request, num_tokens: int) -> bool:
        """Room for the next `num_tokens` tokens of a prefill. False: nothing changed."""
        start, end, page_size = request.num_computed, request.num_computed + num_tokens, self.page_size
        last = self._last_locs([request]) if start else np.array([-1])
        prefix, seq = torch.tensor([start]), torch.tensor([end])
        found = self.allocator.alloc_extend(
            prefix, prefix, seq, seq, torch.from_numpy(last), num_tokens, request.is_high_priority
        )
        if found is None:
            return False
        pages = np.arange(self.pages(start), self.pages(end))
        self.pool.write(
            (request.row, slice(self.pages(start), self.pages(end))), found[0][-start % page_size :: page_size]
        )
        self.host_rows.put(request.row, pages, self.allocator.new_slots)
        self._own_pages(request, end)
        return True

    def decode(self, requests: list[Request]) -> bool:
        """Room for one more token of each request. False: nothing changed."""
        chosen = [r for r in requests if r.num_computed % self.page_size == 0]
        if self.allocator.ledger.any_narrow:  # a narrow page that goes on needs staging
            going_on = [r for r in requests if r.num_computed % self.page_size]
            levels = self.allocator.ledger.levels_of(self._last_locs(going_on) // self.page_size)
            chosen += [going_on[i] for i in np.flatnonzero(levels).tolist()]
        if not chosen:
            return True
        last = self._last_locs(chosen)
        ends = np.array([r.num_computed + 1 for r in chosen])
        high = [r.is_high_priority for r in chosen]
        uniform = high[0] if all(high) or not any(high) else high
        lens = torch.from_numpy(ends)
        found = self.allocator.alloc_decode(lens, lens, torch.from_numpy(last), uniform)
        if found is None:
            return False
        for request, end, loc in zip(chosen, ends.tolist(), found[0].tolist(), strict=True):
            if (end - 1) % self.page_size == 0:
                page = self.pages(end) - 1
                self.pool.write((request.row, slice(page, page + 1)), loc)
                self.host_rows.put(request.row, np.array([page]), np.array([loc // self.page_size]))
                self._own_pages(request, end)
        return True

    def _last_locs(self, requests: list[Request]) -> IntArray:
        """[R] location of the last computed token of each."""
        last = np.array([r.num_computed - 1 for r in requests], dtype=np.int64)
        rows = np.array([r.row for r in requests], dtype=np.int64)
        return self.host_rows.at(rows, last // self.page_size) * self.page_size + last % self.page_size
