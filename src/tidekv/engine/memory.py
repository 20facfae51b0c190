"""A request's hold on the cache: rows, pages, shared prefixes, parking. Does what the scheduler decides; decides
nothing."""

from __future__ import annotations

import numpy as np
import torch

from tidekv.allocator import DynamicPagedTokenToKVPoolAllocator
from tidekv.engine.host_rows import HostRows
from tidekv.engine.prefix_cache import PrefixCache
from tidekv.engine.request import Request, RequestState
from tidekv.errors import InvariantError
from tidekv.memory.ledger import NO_SLOTS, IntArray
from tidekv.memory.req_to_token import ReqToTokenPool
from tidekv.memory.upload import upload


class RequestMemory:
    """The only part of the engine that talks to the allocator and to `req_to_token`.

    Nothing here waits for the device: where pages are is known on the host (`host_rows`), so a step is planned while
    the one before still runs.
    """

    def __init__(
        self,
        allocator: DynamicPagedTokenToKVPoolAllocator,
        req_to_token_pool: ReqToTokenPool,
        prefix_cache: PrefixCache | None,
        columns_a_page: int | None = None,
    ) -> None:
        """columns_a_page: of a row of `req_to_token`; None: one a token. `PageBooks` has 1."""
        self.allocator = allocator
        self.pool = req_to_token_pool
        self.prefix_cache = prefix_cache
        self.page_size = allocator.page_size
        self.columns_a_page = columns_a_page or allocator.page_size
        self.host_rows = HostRows(req_to_token_pool.size, -(-req_to_token_pool.max_context_len // self.columns_a_page))
        allocator.loc_holders.follow(self.host_rows.remap)
        allocator.gives_dynamic_indices = False  # `host_batch` asks the books
        if prefix_cache is not None:
            allocator.evictor = prefix_cache
            allocator.register_loc_holder(prefix_cache.loc_tensors)

    # ---- counting ----------------------------------------------------------------------------------------------

    @property
    def max_context_len(self) -> int:
        """Tokens that a row has room for."""
        return self.pool.max_context_len * self.page_size // self.columns_a_page

    def pages(self, num_tokens: int) -> int:
        """Logical pages of so many tokens."""
        return -(-num_tokens // self.page_size)

    def free_pages(self) -> int:
        """Pages that nobody needs: free ones and cached prefixes that nobody references."""
        cached = self.prefix_cache.evictable_pages if self.prefix_cache else 0
        return self.allocator.num_free_pages + cached

    def slots_of(self, requests: list[Request]) -> IntArray:
        """[R, N] combined ids of the requests' pages, 0 beyond their ends, on the host."""
        width = max((self.pages(r.num_computed) for r in requests), default=0)
        return self.host_rows.first(np.array([r.row for r in requests], dtype=np.int64), width)

    def narrow_slots(self, requests: list[Request]) -> IntArray:
        """[R] narrowed slots of each request."""
        if not requests:
            return NO_SLOTS
        slots = self.slots_of(requests)
        counts: IntArray = ((slots > 0) & (self.allocator.ledger.levels_of(slots) > 0)).sum(1)
        return counts

    # ---- coming and going --------------------------------------------------------------------------------------

    def admit(self, request: Request) -> bool:
        """A row for the request, and the cached part of its prompt. False if all rows are taken."""
        rows = self.pool.alloc(1)
        if rows is None:
            return False
        request.row = rows[0]
        request.state = RequestState.PREFILL
        request.num_computed = 0
        request.owned_pages = np.empty(0, dtype=np.bool_)
        if self.prefix_cache is not None:
            # At least one token is left to compute: its logits give the next one.
            found = self.prefix_cache.match(request.all_tokens()[:-1])
            self.prefix_cache.lock(found.node_ids)
            request.prefix_nodes = found.node_ids
            request.num_shared_pages = len(found.node_ids)
            if len(found.node_ids):
                self.settle()  # some of them may be pages that are still to be filled, of a request that shares them
                request.num_computed = len(found.node_ids) * self.page_size
                request.owned_pages = np.zeros(len(found.node_ids), dtype=np.bool_)
                self.host_rows.put(request.row, np.arange(len(found.locs)), found.locs // self.page_size)
                every = self._columns(found.locs)
                self.pool.write((request.row, slice(0, len(every))), every)
                if request.is_high_priority:
                    self.allocator.promote(torch.from_numpy(found.locs))
        return True

    def release(self, request: Request) -> None:
        """Everything the request holds goes back, parked pages too; pages of the prefix cache stay there."""
        self.settle()
        if request.parked is not None:
            self.allocator.drop_parked(request.parked)
            request.parked = None
        elif request.row >= 0:
            owned = np.flatnonzero(request.owned_pages)
            if len(owned):
                self.allocator.free_slots(self.host_rows.at(request.row, owned))
        if self.prefix_cache is not None:
            self.prefix_cache.unlock(request.prefix_nodes)
        if request.row >= 0:
            self.host_rows.forget(request.row)
            self.pool.free(request.row)
        request.row, request.num_computed, request.num_shared_pages = -1, 0, 0
        request.prefix_nodes, request.owned_pages = NO_SLOTS, np.empty(0, dtype=np.bool_)

    def publish(self, request: Request) -> None:
        """The full pages that are computed become a cached prefix, for others and for a later turn.

        Not those of a request that is on the host: it may have been parked before its last token was read.
        """
        full = request.num_computed // self.page_size
        if self.prefix_cache is None or full == 0 or request.is_lossy or request.parked is not None:
            return
        locs = self.host_rows.at(request.row, np.arange(full)) * self.page_size
        result = self.prefix_cache.insert(request.all_tokens()[: full * self.page_size], locs)
        self.prefix_cache.lock(result.node_ids)
        self.prefix_cache.unlock(request.prefix_nodes)
        request.prefix_nodes = result.node_ids
        request.owned_pages[:full] &= ~result.adopted

    # ---- growing -----------------------------------------------------------------------------------------------

    def extend(self, request: Request, num_tokens: int) -> bool:
        """Room for the next `num_tokens` tokens of a prefill. False: nothing changed."""
        start, end = request.num_computed, request.num_computed + num_tokens
        lens = (np.array([start]), np.array([end]))
        prefix, seq, row, column = upload(self.pool.device, (*lens, np.array([request.row]), np.array([start - 1])))
        last = self.pool.req_to_token[row, column].to(torch.int64) if start else column
        found = self.allocator.alloc_extend(
            prefix,
            torch.from_numpy(lens[0]),
            seq,
            torch.from_numpy(lens[1]),
            last,
            num_tokens,
            request.is_high_priority,
            last_slots=self.host_rows.at(request.row, np.array([max(0, start - 1) // self.page_size])),
        )
        if found is None:
            return False
        self.pool.write((request.row, slice(start, end)), found[0])
        self.host_rows.put(request.row, np.arange(self.pages(start), self.pages(end)), self.allocator.new_slots)
        self._own_pages(request, end)
        return True

    def decode(self, requests: list[Request]) -> bool:
        """Room for one more token of each request. False: nothing changed."""
        page_size = self.page_size
        rows = np.array([r.row for r in requests])
        ends = np.array([r.num_computed + 1 for r in requests])
        rows_dev, ends_dev = upload(self.pool.device, (rows, ends))
        last_loc = self.pool.req_to_token[rows_dev, ends_dev - 2].to(torch.int64)
        high = [r.is_high_priority for r in requests]
        uniform = high[0] if all(high) or not any(high) else high
        found = self.allocator.alloc_decode(
            ends_dev,
            torch.from_numpy(ends),
            last_loc,
            uniform,
            last_slots=self.host_rows.at(rows, (ends - 2) // page_size),
        )
        if found is None:
            return False
        self.pool.write_tokens(rows_dev, ends_dev - 1, found[0], rows, ends)
        opens = np.flatnonzero((ends - 1) % page_size == 0)
        if len(opens):
            self.host_rows.put(rows[opens], (ends[opens] - 1) // page_size, self.allocator.new_slots)
            for i in opens.tolist():
                self._own_pages(requests[i], int(ends[i]))
        return True

    def _own_pages(self, request: Request, end: int) -> None:
        grown = self.pages(end) - len(request.owned_pages)
        if grown:
            request.owned_pages = np.concatenate([request.owned_pages, np.ones(grown, dtype=np.bool_)])

    def _columns(self, first: IntArray) -> torch.Tensor:
        """On the device: for each of these ([n], on the host) it and what follows it in its page, as far as a row of
        `req_to_token` has columns for it: [n * columns_a_page]."""
        there = upload(self.pool.device, (first,))[0]
        return (there[:, None] + torch.arange(self.columns_a_page, device=self.pool.device)).reshape(-1)

    def settle(self) -> None:
        """Copies that wait for a step are done at once: somebody is about to use their pages in this plan."""
        if self.allocator.repacker.behind.is_pending:
            self.allocator.repacker.behind.settle()

    # ---- leaving the device whole, and back --------------------------------------------------------------------

    def park(self, request: Request) -> bool:
        """The request's pages go to the host whole, but for those that another running request shares.

        Its published prefix goes along: pages left behind, locked by a request that waits for memory, could keep
        everybody from ever getting any. False, nothing changed: the host is full.
        """
        leaving = request.owned_pages.copy()
        if self.prefix_cache is not None:
            shared = self.prefix_cache.num_shared(request.prefix_nodes)
            leaving[shared : len(request.prefix_nodes)] = True
        pages = np.flatnonzero(leaving)
        ledger = self.allocator.ledger
        slots = self.host_rows.at(request.row, pages)
        if int((ledger.host_plus_1[slots] == 0).sum()) > len(ledger.host_free):
            return False
        self._take_back_prefix(request)
        hosts = self.allocator.park(torch.from_numpy(slots * self.page_size))
        if hosts is None:
            raise InvariantError(f"request {request.id}: the host had room for {len(slots)} pages and refused them")
        self.host_rows.forget(request.row, pages)
        self.pool.req_to_token[request.row].index_fill_(0, self._columns(pages * self.columns_a_page), 0)
        request.parked = hosts
        request.state = RequestState.PAUSED
        request.times_paused += 1
        return True

    def _take_back_prefix(self, request: Request) -> None:
        """What only this request holds of the prefix cache becomes its own again."""
        if self.prefix_cache is None:
            return
        nodes = request.prefix_nodes
        shared = self.prefix_cache.num_shared(nodes)
        cached = self.prefix_cache.locs(nodes[shared:])
        below = self.prefix_cache.take_back(nodes)
        computed_twice = request.owned_pages[shared : len(nodes)]  # the cache held another page of the same tokens
        unused = np.concatenate([below, cached[computed_twice]])
        if len(unused):
            self.allocator.free_slots(unused // self.page_size)
        request.owned_pages[shared : len(nodes)] = True
        request.prefix_nodes = nodes[:shared]
        request.num_shared_pages = min(request.num_shared_pages, shared)

    def drop_cache(self) -> None:
        """Every cached prefix that nobody references is forgotten and its pages are free."""
        if self.prefix_cache is not None and self.prefix_cache.evictable_pages:
            self.allocator.free_slots(self.prefix_cache.clear() // self.page_size)

    def unpark(self, request: Request) -> bool:
        """A parked request's pages come back to the device. False: nothing changed."""
        if request.parked is None:
            raise InvariantError(f"request {request.id} is not parked")
        locs = self.allocator.unpark(request.parked, request.is_high_priority)
        if locs is None:
            return False
        owned = np.flatnonzero(request.owned_pages)
        locs = locs.view(-1, self.page_size)[:, : self.columns_a_page].reshape(-1)
        # Only locations of computed tokens enter the row: the next extend or decode continues from there. They come
        # first, since columns ascend.
        end = -(-request.num_computed * self.columns_a_page // self.page_size)
        first = owned * self.columns_a_page
        num_live = int(np.clip(end - first, 0, self.columns_a_page).sum())
        columns = self._columns(first)[:num_live]
        rows = torch.full_like(columns, request.row)
        self.pool.write_tokens(rows, columns, locs[:num_live], np.array([request.row]), np.array([end]))
        self.host_rows.put(request.row, owned[first < end], self.allocator.new_slots[first < end])
        request.parked = None
        # A prompt with one token left is still a prefill: its end publishes the prefix.
        decodes = bool(request.output_ids) and request.num_computed + 1 == request.num_tokens
        request.state = RequestState.DECODE if decodes else RequestState.PREFILL
        return True

    # ---- the checker -------------------------------------------------------------------------------------------

    def check(self) -> None:
        """`host_rows` says what `req_to_token` says; `InvariantError` if not. Waits for the device."""
        first = self.pool.req_to_token[:, :: self.columns_a_page].cpu().numpy().astype(np.int64) // self.page_size
        wrong = np.argwhere(first != self.host_rows.first(np.arange(self.pool.size), first.shape[1]))
        if len(wrong):
            row, page = wrong[0].tolist()
            here = int(self.host_rows.at(row, np.array([page]))[0])
            raise InvariantError(f"row {row}, page {page}: slot {int(first[row, page])}, the host has {here}")
