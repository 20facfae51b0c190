"""How wide a request's pages are; makes them narrower or wider. Does what the scheduler decides; decides nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from tidekv.engine.memory import RequestMemory
from tidekv.engine.read_modes import ReadModes
from tidekv.engine.request import Request
from tidekv.memory.ledger import HIGH, LOW, BoolArray, IntArray


class RequestWidths:
    """Counts and changes the widths of the pages of requests that hold a row."""

    def __init__(self, memory: RequestMemory, read_modes: ReadModes) -> None:
        self.memory = memory
        self.read_modes = read_modes
        self.allocator = memory.allocator

    @property
    def lowest_width(self) -> int:
        """The narrowest width of the ladder."""
        return self.allocator.ledger.ladder[-1]

    @property
    def can_narrow(self) -> bool:
        """There is a narrower width, and the host has room to narrow something."""
        ledger = self.allocator.ledger
        return len(ledger.ladder) > 1 and ledger.num_host_pages > 0

    def available_pages(self) -> int:
        """Pages to be had without narrowing anything: free, cached but unreferenced, freed by a merge.

        A cached page counts by its width: requests end narrow, too, and 16 slots of a sixteenth are one page.
        """
        ledger, cache = self.allocator.ledger, self.memory.prefix_cache
        free = self.memory.free_pages()
        if cache is not None and cache.evictable_pages and ledger.any_narrow:
            slots = cache.evictable_locs() // self.memory.page_size
            free += int((0.5 ** ledger.levels_of(slots)).sum()) - len(slots)
        return free + sum(ledger.mergeable_pages(code, level) for code, level in ledger.partial)

    def new_pages(self, requests: list[Request]) -> int:
        """Pages that one more token of each of these requests opens."""
        page_size = self.memory.page_size
        return sum(r.num_computed % page_size == 0 for r in requests)

    def count_away(self, requests: list[Request]) -> None:
        """Set `away_cells` of each, cells of its pages that are not on the device (0 is full width), and `due_pages`,
        those narrow pages that its read mode reads in full."""
        ledger = self.allocator.ledger
        if not ledger.any_narrow or not requests:
            for request in requests:
                request.away_cells = request.due_pages = 0
            return
        slots = self.memory.slots_of(requests)
        levels = np.where(slots > 0, ledger.levels_of(slots), 0)
        away = ledger.geometry.layer_num - np.array(ledger.ladder, dtype=np.int64)
        cells = away[levels].sum(1)
        due = ((levels > 0) & self._read_in_full(requests, slots.shape[1])).sum(1)
        for request, away_cells, due_pages in zip(requests, cells.tolist(), due.tolist(), strict=True):
            request.away_cells, request.due_pages = away_cells, due_pages

    def _read_in_full(self, requests: list[Request], columns: int) -> BoolArray:
        """[R, columns] pages that each request reads in all layers: all of them, or those that a window keeps."""
        column, every = np.arange(columns), np.ones((len(requests), columns), dtype=np.bool_)
        for row, request in enumerate(requests):
            mode = self.read_modes.of(request.is_high_priority)
            if mode.streams_nothing:
                first, last = mode.kept()
                every[row] = (column < first) | (column >= self.memory.pages(request.num_computed) - last)
        return every

    def narrow(
        self, request: Request, width: int, keep_first: int = 0, keep_last: int = 0, max_slots: int | None = None
    ) -> int:
        """Cut the request's full-width pages to `width`, the last `max_slots` of them; but its `keep_first` first and
        `keep_last` last pages stay, and those that another running request shares. Returns the pages narrowed."""
        slots = self.memory.slots_of([request])[0]
        slots = slots[: self.memory.pages(request.num_computed)]
        first = keep_first
        if self.memory.prefix_cache is not None:
            first = max(first, self.memory.prefix_cache.num_shared(request.prefix_nodes))
        chosen = slots[first : max(first, len(slots) - keep_last)]
        chosen = chosen[self.allocator.ledger.levels_of(chosen) == 0]
        if max_slots is not None:
            chosen = chosen[max(0, len(chosen) - max_slots) :]
        narrowed = self.allocator.narrow_slots(chosen, width)
        self.count_away([request])
        return narrowed

    def due_slots(self, request: Request) -> IntArray:
        """Combined ids of its `due_pages`, in order of their tokens."""
        slots = self.memory.slots_of([request])[0]
        narrow = np.where(slots > 0, self.allocator.ledger.levels_of(slots), 0) > 0
        due: IntArray = slots[narrow & self._read_in_full([request], len(slots))[0]]
        return due

    def widen(self, request: Request, max_slots: int) -> int:
        """Widen up to `max_slots` of its due pages, the oldest tokens first, into pages that can be had without
        pressure. Returns the pages widened."""
        widened = self.allocator.widen_slots(self.due_slots(request)[:max_slots])
        self.count_away([request])
        return widened

    def widen_behind(self, request: Request, max_slots: int) -> int:
        """The same, but what comes from the host is copied under the step that is being planned: the request must not
        be in it. Returns the pages widened; none where a copy could not wait.

        Only pages whose host copy stays theirs: the host page of another one is free at once, and this very plan may
        give it away. Only pages that no other running request reads.
        """
        slots = self.due_slots(request)
        if self.memory.prefix_cache is not None and (
            shared := self.memory.prefix_cache.num_shared(request.prefix_nodes)
        ):
            slots = slots[~np.isin(slots, self.memory.slots_of([request])[0][:shared])]
        slots = slots[self.allocator.ledger.backed[slots]][:max_slots]
        with self.allocator.repacker.behind.collecting():
            widened = self.allocator.widen_slots(slots) if len(slots) else 0
        self.count_away([request])
        return widened

    @contextmanager
    def opening_low_at(self, width: int) -> Iterator[None]:
        """Inside, new low pages are opened at `width`."""
        level = self.allocator.ledger.ladder.index(width)
        before = self.allocator.ledger.level[LOW]
        self.allocator.ledger.level[LOW] = level
        try:
            yield
        finally:
            # The ledger may be another object by now (a decision was rolled back): ask for it again.
            self.allocator.ledger.level[LOW] = before

    def open_wide(self) -> None:
        """New pages of both classes are full width again: what the ladder once took is not taken from newcomers."""
        self.allocator.ledger.level[HIGH] = self.allocator.ledger.level[LOW] = 0
