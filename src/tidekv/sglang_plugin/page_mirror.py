"""Which virtual pages each request's row of `req_to_token` names, on the host: a batch is planned without waiting for
the device.

Kept up as pages are opened. SGLang also writes rows where nothing is opened: a prefix hit, and after a prefill the
prefix cache's own pages in the place of equal ones that are freed. Such a row is read back, once, when it is wanted:

    known[row]        so many pages from the front were seen (a prefix hit leaves 0)
    birth[row, page]  which assignment gave out the id; another one now means that the page was freed since

So an id that is trusted here is one that held this page of the request and was not freed since: what it holds is right,
even where the row already names an equal page and the free is still on its way from the device.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from tidekv.memory.ledger import BoolArray, IntArray
from tidekv.sglang_plugin.virtual_pages import VirtualPages


class PageMirror:
    """req_to_token: [R, C] on the device, what SGLang's kernels read."""

    def __init__(self, pages: VirtualPages, req_to_token: torch.Tensor) -> None:
        self.pages, self.req_to_token = pages, req_to_token
        num_rows, num_columns = req_to_token.shape
        # Never written where no request lies, so that the system gives no memory for it.
        shape = (num_rows, -(-num_columns // pages.page_size))
        self.ids: IntArray = np.zeros(shape, dtype=np.int64)
        self.birth: IntArray = np.zeros(shape, dtype=np.int64)
        self.known: IntArray = np.zeros(num_rows, dtype=np.int64)
        self.owner: IntArray = np.zeros(num_rows, dtype=np.int64)  # `serial_of` the request; rows are used again
        self.num_read_back = 0  # rows
        self._serials = itertools.count(1)

    def opened(self, reqs: Sequence[Any], first: IntArray, count: IntArray, ids: IntArray) -> None:
        """Request i got `count[i]` pages, its pages first[i] .. first[i] + count[i] - 1.

        ids: [sum of count], request after request.
        """
        if not len(ids):
            return
        taken, rows = 0, rows_of(reqs)
        for i in np.flatnonzero(count > 0).tolist():
            row, begin, n = rows[i], int(first[i]), int(count[i])
            self._take_over(row, reqs[i], begin)
            mine = slice(begin, begin + n)
            self.ids[row, mine] = ids[taken : taken + n]
            self.birth[row, mine] = self.pages.birth[ids[taken : taken + n]]
            if self.known[row] >= begin:
                self.known[row] = begin + n
            taken += n

    def _take_over(self, row: int, req: Any, begin: int) -> None:
        serial = self.serial_of(req)
        if self.owner[row] != serial or begin == 0:
            self.owner[row], self.known[row] = serial, 0

    def serial_of(self, req: Any) -> int:
        """A number of this request's own, kept on it; request ids may be used again."""
        serial: int | None = getattr(req, "tidekv_serial", None)
        if serial is None:
            serial = req.tidekv_serial = next(self._serials)
        return serial

    def ids_of(self, reqs: Sequence[Any], num_pages: IntArray) -> IntArray:
        """[B, N] virtual page ids of the requests' first `num_pages` ([B]) pages, 0 beyond. Reads back rows that it
        does not know."""
        rows = np.array(rows_of(reqs), dtype=np.int64)
        try:
            serials = np.array([req.tidekv_serial for req in reqs], dtype=np.int64)
        except AttributeError:  # a newcomer among them
            serials = np.array([self.serial_of(req) for req in reqs], dtype=np.int64)
        inside = np.arange(int(num_pages.max(initial=0)))[None, :] < num_pages[:, None]
        unknown = (self.owner[rows] != serials) | (self.known[rows] < num_pages)
        ids = np.where(inside, self.ids[rows, : inside.shape[1]], 0)
        unknown |= self._changed(rows, ids).any(axis=1)
        if unknown.any():
            self._read_back(rows[unknown], serials[unknown], num_pages[unknown])
            ids = np.where(inside, self.ids[rows, : inside.shape[1]], 0)
        return ids

    def _changed(self, rows: IntArray, ids: IntArray) -> BoolArray:
        """[B, N] ids that were freed since they were seen."""
        changed: BoolArray = (self.pages.birth[ids] != self.birth[rows, : ids.shape[1]]) & (ids > 0)
        changed |= (self.pages.first_locs(ids) == 0) & (ids > 0)
        return changed

    def _read_back(self, rows: IntArray, serials: IntArray, num_pages: IntArray) -> None:
        ids = read_rows(self.req_to_token, torch.from_numpy(rows), num_pages, self.pages.page_size)
        width = ids.shape[1]
        self.ids[rows, :width] = ids
        self.birth[rows, :width] = self.pages.birth[ids]
        self.known[rows], self.owner[rows] = num_pages, serials
        self.num_read_back += len(rows)


def read_rows(req_to_token: torch.Tensor, rows: torch.Tensor, num_pages: IntArray, page_size: int) -> IntArray:
    """[B, N] virtual page ids from the rows themselves, 0 beyond `num_pages` ([B]). Waits for the device."""
    width = int(num_pages.max(initial=0))
    locs = req_to_token[:, : width * page_size : page_size][rows.to(req_to_token.device, torch.int64)]
    ids: IntArray = locs.cpu().numpy().astype(np.int64) // page_size
    ids[np.arange(width)[None, :] >= num_pages[:, None]] = 0  # beyond the end rows hold old ids
    return ids


def row_of(req: Any) -> int | None:
    """The request's row of `req_to_token`, None if it holds none: on the request up to 0.5.20, on its KV record
    later."""
    return rows_of([req])[0]


def rows_of(reqs: Sequence[Any]) -> list[int]:
    """`row_of` of each, who must hold one; 64 of them in 3 us."""
    if reqs and hasattr(reqs[0], "req_pool_idx"):
        return [req.req_pool_idx for req in reqs]
    return [req.kv.req_pool_idx for req in reqs]
