"""What gives way when physical pages are short, over the core's ladder: cached prefixes, then old pages of windows.

has_plenty, make_room                                     may the next decode step be allocated?
gather, evictable_pages, wide_low_pages, yielding_pages   what scheduling can count on while nobody pauses
restore                                                   widths come back while pages are plentiful
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from tidekv.allocator import DynamicPagedTokenToKVPoolAllocator
from tidekv.memory.ledger import DYNAMIC, HIGH, LOW, IntArray
from tidekv.pressure.repack import Work, leaving_cells
from tidekv.sglang_plugin.page_mirror import PageMirror
from tidekv.sglang_plugin.virtual_pages import VirtualPages
from tidekv.sglang_plugin.window import Window

if TYPE_CHECKING:
    from tidekv.sglang_plugin.paused_batch import PausedRequests

LEAST_PAGES = 16  # pages that a narrowing of old pages frees beyond the demand, if there are so many


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

    def back_up(self, slots: IntArray) -> None:
        """Every layer of these full-width slots ([n] combined ids) goes to the host, as far as there is room, and the
        copy stays theirs until they are freed. Nobody may write into them any more.

        Narrowing them then copies nothing, and what comes back when they widen may come under a step.
        """
        ledger = self.ledger
        slots = slots[~ledger.backed[slots]]
        ledger.write_through(slots)
        slots = slots[ledger.backed[slots]]
        if len(slots):
            full_width = np.zeros(len(slots), dtype=np.int64)
            cells = leaving_cells(ledger, slots, full_width, None, ledger.host_pages_of(slots))
            self._apply(Work("back up", LOW, to_host=cells))


class PressedPages:
    """The physical side of SGLang's allocator. Who uses it books frees in `collect_freed`."""

    page_size: int

    def __init__(self, core: TideCore, pages: VirtualPages) -> None:
        self.core, self.pages = core, pages
        self.batch: BatchView | None = None
        self.mirror: PageMirror | None = None  # the attention's: which pages each request's row names, on the host
        self.window: Window | None = None  # LOSSY: how low requests are read
        self.old_pages: Callable[[], IntArray] | None = None  # virtual pages that no window reaches
        self.paused: PausedRequests | None = None  # None: nobody pauses
        self.num_evictions = 0  # tokens that physical pressure took from the prefix cache
        self.num_window_pages = 0  # old pages that windows let narrow

    def collect_freed(self) -> None:
        """Book the frees whose ids were on their way from the device."""
        raise NotImplementedError

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
        self.evict_before_narrowing(demand, len(new_pages))
        return self.core.make_room(demand, lambda: self.pages.slots_of(touched()))

    def evict_before_narrowing(self, demand: dict[int, int], bs: int) -> None:
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
        if self.window is not None and (short := self._shortage(demand, bs)) > 0:
            self._narrow_old_pages(short)

    def gather(self, num_free: int) -> None:
        """`num_free` free pages, as far as cached prefixes and old pages of windows give them; nobody pauses for it."""
        self.evict_before_narrowing({HIGH: num_free}, 0)

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
        if self.window is None or self.old_pages is None:
            return
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


def demand_of(new_pages: IntArray, high: bool | Sequence[bool]) -> dict[int, int]:
    """{priority code: pages} of the requests' new pages ([bs])."""
    if isinstance(high, bool):
        return {HIGH if high else LOW: int(new_pages.sum())}
    mask = np.asarray(high, dtype=np.bool_)
    return {HIGH: int(new_pages[mask].sum()), LOW: int(new_pages[~mask].sum())}
