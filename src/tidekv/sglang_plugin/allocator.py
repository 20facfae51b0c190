"""SGLang's paged allocator contract in virtual page ids, over the core's allocator. Adapts; decides nothing of its own.

    SGLang asks for tokens  ->  the core opens slots (and narrows, merges, refuses)  ->  each slot gets a virtual id
    SGLang frees tokens     ->  their virtual pages  ->  the core releases the slots

Counts that SGLang sees (`size`, `available_size`) are virtual, so its admission and its leak check work as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import numpy as np
import torch
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator

from tidekv.allocator import DynamicPagedTokenToKVPoolAllocator
from tidekv.errors import InvariantError
from tidekv.kernels import assign
from tidekv.memory import contract
from tidekv.memory.ledger import DYNAMIC, HIGH, LOW, NO_SLOTS, IntArray
from tidekv.pressure.repack import Work
from tidekv.sglang_plugin.page_mirror import PageMirror
from tidekv.sglang_plugin.pool import TideKVPool
from tidekv.sglang_plugin.virtual_pages import VirtualPages
from tidekv.sglang_plugin.window import Window

if TYPE_CHECKING:
    from tidekv.sglang_plugin.paused_batch import PausedRequests

LEAST_PAGES = 16  # pages that a narrowing of old pages frees beyond the demand, if there are so many
_new_event: Callable[..., Any] = torch.cuda.Event  # torch does not type its constructor


@dataclass(frozen=True)
class BatchView:
    """Who allocates: announced by the hooks before SGLang prepares a batch.

    high   [bs] bool, and reqs: the requests themselves, in the batch's order
    evict(tokens)   drop so many tokens of cached prefixes; evictable(): tokens that could be dropped
    """

    high: tuple[bool, ...]
    reqs: Sequence[Any]
    evictable: Callable[[], int]
    evict: Callable[[int], None]


class TideCore(DynamicPagedTokenToKVPoolAllocator):
    """The core's allocator; before it moves anything, `fence` orders the move behind a forward that is still running.

    With overlap scheduling the next batch is allocated, on the scheduler's stream, while the forward of the last one
    runs on another. What the move touches is read again only by the next forward, which waits for this stream.
    """

    fence: Callable[[], None] | None = None

    def _apply(self, work: Work) -> None:
        if self.fence is not None:
            self.fence()
        super()._apply(work)


class TideAllocator(PagedTokenToKVPoolAllocator):  # type: ignore[misc]  # sglang is untyped here
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
        self.core = core
        self.pages = VirtualPages(size // page_size, core.geometry.num_pages, page_size, core.device)
        core.register_loc_holder(self.pages.tensors)
        self.batch: BatchView | None = None
        self.mirror: PageMirror | None = None  # the attention's: which pages each request's row names, on the host
        self.attention: Any = None  # the TideAttention that reads this pool
        self.known: WeakValueDictionary[str, Any] = WeakValueDictionary()  # requests that were announced, by rid
        self.window: Window | None = None  # LOSSY: how low requests are read
        self.old_pages: Callable[[], IntArray] | None = None  # virtual pages that no window reaches
        self.paused: PausedRequests | None = None  # None: nobody pauses
        self.num_evictions = 0  # tokens that physical pressure took from the prefix cache
        self.num_window_pages = 0  # old pages that windows let narrow
        self.num_changes = 0  # allocations and frees: the idle check runs when it has moved
        super().__init__(size, page_size, dtype, device, kvcache, need_sort)

    # ---- counts: virtual -----------------------------------------------------------------------------------------

    def available_size(self) -> int:
        """Tokens in free virtual pages. Frees whose ids are still on their way from the device are counted."""
        if any(count is None for _, _, count in self._in_flight):
            self.collect_freed()
        coming = sum(count or 0 for _, _, count in self._in_flight)
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
        self.free_group: list[torch.Tensor] | None = None
        self.free_page_ids_group: list[torch.Tensor] = []
        self._in_flight: list[tuple[torch.Tensor, torch.cuda.Event, int | None]] = []

    # ---- allocation ----------------------------------------------------------------------------------------------

    def alloc(self, need_size: int) -> torch.Tensor | None:
        """Whole pages, as high priority. SGLang uses it where no request is known."""
        pages = need_size // self.page_size
        if pages > self.pages.num_free:
            self.collect_freed()
        if pages > self.pages.num_free:
            return None
        self._evict_before_narrowing({HIGH: pages}, 0)
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
        self._evict_before_narrowing(demand_of(new_pages, high), len(new_pages))
        short = total - self.core.ledger.num_free_pages
        if may_pause and short > 0 and self.paused is not None:
            self.paused.make_pages(short)
        return True

    def _assign_ids(self) -> IntArray:
        slots = self.core.new_slots
        self.num_changes += 1
        return self.pages.assign(slots, self.core.ledger.levels_of(slots) == 0)

    # ---- pressure ------------------------------------------------------------------------------------------------

    def has_plenty(self, num_pages: int) -> bool:
        """Everything is full width and so many pages are free: nothing has to be decided."""
        ledger = self.core.ledger
        return ledger.at_full_width and num_pages <= ledger.num_free_pages

    @property
    def reads_narrow(self) -> bool:
        """Some narrow page belongs to somebody who is not paused, or new pages are opened narrow."""
        ledger = self.core.ledger
        resting = 0 if self.paused is None else self.paused.num_resting
        return any(ledger.level) or sum(ledger.num_narrow) > resting

    def writes_narrow(self, lens: IntArray) -> bool:
        """Whether one of the announced requests, with `lens` [bs] tokens each, goes on filling a page that is narrow,
        so that what it writes has to be staged; or may do so, where that is not known on the host."""
        if not self.reads_narrow:
            return False
        batch, mirror, page_size = self.batch, self.mirror, int(self.page_size)
        goes_on = lens % page_size != 0
        if any(self.core.ledger.level):
            return True
        if not goes_on.any():
            return False
        if mirror is None or batch is None or len(batch.reqs) != len(lens):
            return True
        counts = -(-lens // page_size)
        last = mirror.ids_of(batch.reqs, counts)[np.arange(len(lens)), counts - 1][goes_on]
        return bool((self.core.ledger.levels_of(self.pages.slots_of(last)) > 0).any())

    def make_room(self, new_pages: IntArray, high: list[bool], lens: IntArray, touched: Callable[[], IntArray]) -> bool:
        """Whether the next decode step fits, narrowing if that makes it fit. new_pages: [bs] pages each request opens.

        lens: [bs] tokens that each has. touched(): virtual pages that the step goes on filling; read from the device
        only if one of them may be narrow.
        """
        demand, total = demand_of(new_pages, high), int(new_pages.sum())
        if self.has_plenty(total):
            return True
        self.collect_freed()
        if total <= self.core.ledger.num_free_pages and not self.writes_narrow(lens):
            return True
        self._evict_before_narrowing(demand, len(new_pages))
        return self.core.make_room(demand, lambda: self.pages.slots_of(touched()))

    def _evict_before_narrowing(self, demand: dict[int, int], bs: int) -> None:
        """Cached prefixes that nobody references go while physical pages are short: rung 0 of the ladder, with SGLang's
        own cache and order of eviction."""
        batch = self.batch
        while batch is not None and (short := self._shortage(demand, bs)) > 0 and batch.evictable() > 0:
            before = self.pages.num_free
            batch.evict(min(short * int(self.page_size), batch.evictable()))
            self.collect_freed()
            gained = self.pages.num_free - before
            self.num_evictions += max(0, gained) * int(self.page_size)
            if gained <= 0:
                break
        if self.window is not None and self.old_pages is not None and (short := self._shortage(demand, bs)) > 0:
            self._narrow_old_pages(short)

    def gather(self, num_free: int) -> None:
        """`num_free` free pages, as far as cached prefixes and old pages of windows give them; nobody pauses for it."""
        self._evict_before_narrowing({HIGH: num_free}, 0)

    def evictable_pages(self) -> int:
        """Full-width pages of cached prefixes that nobody references."""
        return self.batch.evictable() // int(self.page_size) if self.batch is not None else 0

    def wide_low_pages(self) -> int:
        """Full-width pages of low priority, cached ones included."""
        ledger = self.core.ledger
        return int(((ledger.page_code == LOW) & (ledger.page_level == 0)).sum())

    def yielding_pages(self) -> int:
        """Pages that old pages of windows would free if they narrowed to the width that windows are measured at."""
        if self.window is None or self.old_pages is None:
            return 0
        slots = self.window.candidates(self.core.ledger, self.pages.slots_of(self.old_pages()))
        return self.window.gives(self.core.ledger, len(slots), self.window.level(self.core.ledger))

    def _narrow_old_pages(self, short: int) -> None:
        """Old pages of windows go before anybody pauses: nothing will have to be streamed for them."""
        assert self.window is not None
        assert self.old_pages is not None
        ledger = self.core.ledger
        slots = self.window.candidates(ledger, self.pages.slots_of(self.old_pages()))
        level = self.window.level(ledger, len(slots), short)
        # A few more at once, so that not every step repacks.
        wanted = self.window.pages_for(ledger, short + LEAST_PAGES, level)
        if len(slots) and wanted:
            self.num_window_pages += self.core.narrow_slots(slots[:wanted], ledger.ladder[level])

    def _shortage(self, demand: dict[int, int], bs: int) -> int:
        """Physical pages that are missing for the demand at the present widths, staging for the step included."""
        ledger = self.core.ledger
        need = 0
        for code, pages in demand.items():
            level = ledger.level[code]
            rest = max(0, pages - len(ledger.partial_slots(code, level)))
            need += -(-rest // (1 << level))
        if any(ledger.level) or (self.window is None and self.reads_narrow):
            need += max(0 if ledger.used[DYNAMIC] else 1, ledger.staging_pages_for(bs + sum(demand.values())))
        return need - ledger.num_free_pages

    def promote(self, ids: IntArray) -> None:
        """These virtual pages are read by a high-priority request from now on."""
        slots = self.pages.slots_of(ids)
        slots = slots[slots > 0]
        if len(slots) and self.core.ledger.used[LOW]:
            self.core.ledger.promote(slots)

    def restore(self, start_free: float) -> int:
        """Widths come back while physical pages are plentiful; cached prefixes count as plenty. Returns slots
        widened."""
        core, batch = self.core, self.batch
        ledger = core.ledger
        if not ledger.any_narrow and not any(ledger.level):
            return 0
        self.collect_freed()
        wanted = int(start_free * core.geometry.num_pages) + 1
        short = wanted - ledger.num_free_pages
        # A cached page may be narrow and give up less than a page: at least half of what the cache holds must do.
        if short > 0 and batch is not None and batch.evictable() >= 2 * short * self.page_size:
            batch.evict(short * int(self.page_size))
            self.collect_freed()
        return core.restore_widths(start_free=start_free, stop_free=start_free / 2)

    def end_step(self) -> None:
        """The forward that used the staging pairs is over."""
        self.core.ledger.end_step()

    # ---- freeing -------------------------------------------------------------------------------------------------

    def free(self, free_index: torch.Tensor) -> None:
        """Free the virtual pages that these locs lie in."""
        if free_index.numel():
            self._free_ids(free_index // self.page_size, None)

    def free_segment(self, free_index: torch.Tensor, *, start_pos: int) -> None:
        """Free the pages of a run of one request's row that starts on a page boundary."""
        if start_pos % self.page_size:
            raise InvariantError(f"segment start {start_pos} is not on a boundary of pages of {self.page_size}")
        if free_index.numel():
            self.free_page_ids(free_index[:: self.page_size] // self.page_size)

    def free_page_ids(self, page_ids: torch.Tensor) -> None:
        """Free exactly these pages, each once."""
        if page_ids.numel():
            self._free_ids(page_ids, page_ids.numel())

    def _free_ids(self, ids: torch.Tensor, count: int | None) -> None:
        """`count`: how many distinct pages they are, where the caller knows."""
        if self.free_group is not None:
            if count is None:
                self.free_group.append(ids.clone())
            else:
                self.free_page_ids_group.append(ids.clone())
        elif not ids.is_cuda:
            self._release(ids.numpy())
        else:  # read back behind the queued work; booked when a count or a page is needed
            copy = torch.empty(ids.numel(), dtype=torch.int64, pin_memory=True)
            copy.copy_(ids.reshape(-1), non_blocking=True)
            event = _new_event()
            event.record()
            self._in_flight.append((copy, event, count))

    def free_group_begin(self) -> None:
        """Collect frees until the end of the group. A second begin goes on collecting."""
        if self.free_group is None:
            self.free_group, self.free_page_ids_group = [], []

    def free_group_end(self) -> None:
        """Do the collected frees."""
        loose, self.free_group = self.free_group, None
        exact, self.free_page_ids_group = self.free_page_ids_group, []
        if exact:
            ids = torch.cat(exact)
            self._free_ids(ids, ids.numel())
        if loose:
            self._free_ids(torch.cat(loose), None)

    def collect_freed(self) -> None:
        """Book the frees whose ids were on their way. At points fixed by counts, so that all ranks do it alike."""
        while self._in_flight:
            ids, event, _ = self._in_flight.pop(0)
            event.synchronize()
            self._release(ids.numpy())

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


def demand_of(new_pages: IntArray, high: bool | Sequence[bool]) -> dict[int, int]:
    """{priority code: pages} of the requests' new pages ([bs])."""
    if isinstance(high, bool):
        return {HIGH if high else LOW: int(new_pages.sum())}
    mask = np.asarray(high, dtype=np.bool_)
    return {HIGH: int(new_pages[mask].sum()), LOW: int(new_pages[~mask].sum())}
