"""SGLang's paged allocator contract in virtual page ids, over the core's allocator. Adapts; decides nothing of its own.

    SGLang asks for tokens  ->  the core opens slots (and narrows, merges, refuses)  ->  each slot gets a virtual id
    SGLang frees tokens     ->  their virtual pages  ->  the core releases the slots

Counts that SGLang sees (`size`, `available_size`) are virtual, so its admission and its leak check work as they are.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import torch
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator

from tidekv.errors import InvariantError
from tidekv.kernels import assign
from tidekv.memory import contract
from tidekv.memory.ledger import HIGH, NO_SLOTS, IntArray
from tidekv.sglang_plugin.freeing import Freeing
from tidekv.sglang_plugin.pool import TideKVPool
from tidekv.sglang_plugin.pressed_pages import PressedPages, TideCore, demand_of
from tidekv.sglang_plugin.virtual_pages import VirtualPages


class TideAllocator(PressedPages, PagedTokenToKVPoolAllocator):  # type: ignore[misc]  # sglang is untyped here
    """`size` in virtual tokens. `core` owns the physical pages; its ids appear nowhere outside."""

    def __init__(
        self,
        size: int,
        page_size: int,
        dtype: torch.dtype,
        device: str,
        kvcache: TideKVPool,
        need_sort: bool,
        core: TideCore,
    ) -> None:
        pages = VirtualPages(size // page_size, core.geometry.num_pages, page_size, core.device)
        PressedPages.__init__(self, core, pages)
        core.register_loc_holder(pages.tensors)
        self.attention: Any = None  # the TideAttention that reads this pool
        self.known: WeakValueDictionary[str, Any] = WeakValueDictionary()  # requests that were announced, by rid
        self.num_changes = 0  # allocations and frees: the idle check runs when it has moved
        PagedTokenToKVPoolAllocator.__init__(self, size, page_size, dtype, device, kvcache, need_sort)

    # ---- counts: virtual -----------------------------------------------------------------------------------------

    def available_size(self) -> int:
        """Tokens in free virtual pages. Frees whose ids are still on their way from the device are counted."""
        coming = self._freeing.num_coming()  # first: it may book some of them
        return (self.pages.num_free + coming) * int(self.page_size)

    def get_all_free_pages(self) -> torch.Tensor:
        self.collect_freed()
        return torch.from_numpy(self.pages.free_ids()).to(self.device)

    def merge_and_sort_free(self) -> None:
        """The core keeps its free list sorted."""

    def clear(self) -> None:
        """Everything is free, and full width again."""
        self.core.clear()
        self.pages.clear()
        self.free_pages = self.release_pages = None
        self._freeing = Freeing(self._release)

    # ---- allocation ----------------------------------------------------------------------------------------------

    def alloc(self, need_size: int) -> torch.Tensor | None:
        """Whole pages, as high priority. SGLang uses it where no request is known."""
        pages = need_size // self.page_size
        if pages > self.pages.num_free:
            self.collect_freed()
        if pages > self.pages.num_free:
            return None
        self.evict_before_narrowing({HIGH: pages}, 0)
        if self.core.alloc(pages * self.page_size, True) is None:
            return None
        ids = self._upload(self._assign_ids())
        offsets = torch.arange(self.page_size, device=self.device)
        locs: torch.Tensor = (ids[:, None] * self.page_size + offsets).reshape(-1)
        return locs

    def alloc_extend(
        self,
        prefix_lens: torch.Tensor,
        prefix_lens_cpu: torch.Tensor,
        seq_lens: torch.Tensor,
        seq_lens_cpu: torch.Tensor,
        last_loc: torch.Tensor,
        extend_num_tokens: int,
        num_new_pages: int | None = None,
    ) -> torch.Tensor | None:
        """Tokens [prefix, seq) of each request -> virtual locs [extend_num_tokens] int64; None: nothing changed."""
        page_size = int(self.page_size)
        prefix, seq = prefix_lens_cpu.numpy(), seq_lens_cpu.numpy()
        new_pages = -(-seq // page_size) - -(-prefix // page_size)
        high = self._priorities(len(seq))
        if not self._prepare(new_pages, high, may_pause=True):
            return None
        prefix_lens, seq_lens, last = (t.to(torch.int64) for t in (prefix_lens, seq_lens, last_loc))
        found = None
        if not self._open_wide(new_pages, high, prefix):
            found = self.core.alloc_extend(
                prefix_lens, prefix_lens_cpu, seq_lens, seq_lens_cpu,
                self.pages.locations(last).contiguous(), extend_num_tokens, high,
            )  # fmt: skip
            if found is None:
                return None
        ids = self._assign_ids()
        self._tell_mirror(-(-prefix // page_size), new_pages, ids)
        if found is not None and not self.pages.displaced and np.array_equal(ids, self.core.new_slots):
            return found[0]
        return assign.alloc_extend(
            prefix_lens, seq_lens, last, self._upload(ids), extend_num_tokens, page_size, checked=True
        )

    def alloc_decode(
        self, seq_lens: torch.Tensor, seq_lens_cpu: torch.Tensor, last_loc: torch.Tensor
    ) -> torch.Tensor | None:
        """One more token for each request -> virtual locs [bs] int64; None: nothing changed."""
        seq = seq_lens_cpu.numpy()
        high = self._priorities(len(seq))
        new_pages = (seq % self.page_size == 1).astype(np.int64)
        if not self._prepare(new_pages, high):
            return None
        seq_lens, last = seq_lens.to(torch.int64), last_loc.to(torch.int64)
        found = None
        if not self._open_wide(new_pages, high, seq - 1):
            found = self.core.alloc_decode(seq_lens, seq_lens_cpu, self.pages.locations(last).contiguous(), high)
            if found is None:
                return None
        ids = self._assign_ids()
        self._tell_mirror(seq // int(self.page_size), new_pages, ids)
        if found is not None and not self.pages.displaced and np.array_equal(ids, self.core.new_slots):
            return found[0]
        return assign.alloc_decode(seq_lens, last, self._upload(ids), int(self.page_size), checked=True)

    def _tell_mirror(self, first: IntArray, new_pages: IntArray, ids: IntArray) -> None:
        """The announced requests got these pages, from page `first` [bs] of each on."""
        if self.mirror is not None and self.batch is not None and len(self.batch.reqs) == len(first):
            self.mirror.opened(self.batch.reqs, first, new_pages, ids)

    def _open_wide(self, new_pages: IntArray, high: bool | list[bool], lens: IntArray) -> bool:
        """Fresh full-width pages for a batch that writes nothing narrow, while other pages are narrow or have moved:
        nothing has to be decided, nothing staged, and no location is read back. They are `core.new_slots` then."""
        ledger, total = self.core.ledger, int(new_pages.sum())
        plain = ledger.at_full_width and not self.pages.displaced  # the core's own fast path uploads nothing
        if plain or total > ledger.num_free_pages or self.writes_narrow(lens):
            return False
        slots = NO_SLOTS
        if total:
            slots = ledger.open_pages(contract.codes_of_new_pages(high, new_pages, total), total)
        self.core.new_slots = slots
        return True

    def _upload(self, ids: IntArray) -> torch.Tensor:
        return torch.from_numpy(ids).to(self.device, non_blocking=True)

    def _priorities(self, bs: int) -> bool | list[bool]:
        """One bool if the batch is all of one class. A batch with rows that no request was announced for is high."""
        high = self.batch.high if self.batch is not None else ()
        if len(high) != bs or all(high):
            return True
        return list(high) if any(high) else False

    def _prepare(self, new_pages: IntArray, high: bool | list[bool], may_pause: bool = False) -> bool:
        """Virtual ids for the demand are there, and cached prefixes, then whoever may pause, went before the ladder."""
        total = int(new_pages.sum())
        if total > self.pages.num_free or total > self.core.ledger.num_free_pages:
            self.collect_freed()
        if total > self.pages.num_free:
            return False
        self.evict_before_narrowing(demand_of(new_pages, high), len(new_pages))
        short = total - self.core.ledger.num_free_pages
        if may_pause and short > 0 and self.paused is not None:
            self.paused.make_pages(short)
        return True

    def _assign_ids(self) -> IntArray:
        slots = self.core.new_slots
        self.num_changes += 1
        return self.pages.assign(slots, self.core.ledger.levels_of(slots) == 0)

    def end_step(self) -> None:
        """The forward that used the staging pairs is over."""
        self.core.ledger.end_step()

    # ---- freeing -------------------------------------------------------------------------------------------------

    def free(self, free_index: torch.Tensor) -> None:
        """Free the virtual pages that these locs lie in."""
        if free_index.numel():
            self._freeing.add(free_index // self.page_size, None)

    def free_segment(self, free_index: torch.Tensor, *, start_pos: int) -> None:
        """Free the pages of a run of one request's row that starts on a page boundary."""
        if start_pos % self.page_size:
            raise InvariantError(f"segment start {start_pos} is not on a boundary of pages of {self.page_size}")
        if free_index.numel():
            self.free_page_ids(free_index[:: self.page_size] // self.page_size)

    def free_page_ids(self, page_ids: torch.Tensor) -> None:
        """Free exactly these pages, each once."""
        if page_ids.numel():
            self._freeing.add(page_ids, page_ids.numel())

    def free_group_begin(self) -> None:
        """Collect frees until the end of the group. A second begin goes on collecting."""
        self._freeing.begin()

    def free_group_end(self) -> None:
        """Do the collected frees."""
        self._freeing.end()

    def collect_freed(self) -> None:
        """Book the frees whose ids were on their way. At points fixed by counts, so that all ranks do it alike."""
        self._freeing.collect()

    def _release(self, ids: IntArray) -> None:
        self.core.free_slots(self.pages.release(np.unique(ids.astype(np.int64, copy=False))))
        self.num_changes += 1

    # ---- checks, and what is refused -----------------------------------------------------------------------------

    def check(self) -> None:
        """The books of both sides, and that they agree; `InvariantError` for the first thing that is off."""
        self.collect_freed()
        self.pages.check()
        self.core.check()
        occupied = int(self.core.ledger.occupied.sum())
        if occupied != self.pages.num_live:
            raise InvariantError(f"{occupied} slots are occupied, {self.pages.num_live} virtual pages are in use")

    def resize(self, config: Any) -> None:
        raise InvariantError("tidekv's pool cannot be resized after start: unset SGLang's post-capture KV sizing")
