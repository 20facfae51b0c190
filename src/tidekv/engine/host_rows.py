"""Which slot holds each page of each request, on the host: what `req_to_token` says on the device, without asking it.

The host decides which slots a request gets and where they move, so it notes both as it queues them. A plan of a step
reads only this: it does not wait for the step before, which may still run.
"""

from __future__ import annotations

import numpy as np

from tidekv.memory.ledger import IntArray


class HostRows:
    """[num_rows, max_pages] combined ids, 0 where a row has no page.

    Follows `LocHolders.remap`, so it always is what the device's rows are once all that is queued has run.
    """

    def __init__(self, num_rows: int, max_pages: int) -> None:
        self._slots = np.zeros((num_rows, max_pages), dtype=np.int64)
        self._ends = np.zeros(num_rows, dtype=np.int64)  # pages [0, end) of a row may hold slots

    def first(self, rows: IntArray, num_pages: int) -> IntArray:
        """[R, num_pages] slots of the first pages of these rows (a copy)."""
        return self._slots[rows, :num_pages]

    def at(self, rows: IntArray | int, pages: IntArray) -> IntArray:
        """[n] slots of these pages, each of its row, or of one row (a copy)."""
        found: IntArray = self._slots[rows, pages]
        return found

    def put(self, rows: IntArray | int, pages: IntArray, slots: IntArray) -> None:
        """These pages ([n]) of their rows, or of one row, lie in these slots ([n])."""
        self._slots[rows, pages] = slots
        np.maximum.at(self._ends, np.broadcast_to(rows, pages.shape), pages + 1)

    def forget(self, row: int, pages: IntArray | None = None) -> None:
        """These pages of the row lie nowhere any more; None: the row is given back."""
        if pages is not None:
            self._slots[row, pages] = 0
        else:
            self._slots[row, : self._ends[row]] = 0
            self._ends[row] = 0

    def remap(self, lookup: IntArray) -> None:
        """Slots have moved: `lookup` over combined ids, lookup[0] = 0."""
        live = np.flatnonzero(self._ends)
        if len(live):
            width = int(self._ends.max())
            self._slots[live, :width] = lookup[self._slots[live, :width]]
