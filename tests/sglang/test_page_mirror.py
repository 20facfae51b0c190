"""The host's copy of the rows is the rows, whatever SGLang does to them. Would catch: ids booked for the wrong request
of a mixed batch, a row that SGLang rewrote behind the copy, a row or an id that somebody else has by now."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tidekv.sglang_plugin.page_mirror import PageMirror, read_rows
from tidekv.sglang_plugin.virtual_pages import VirtualPages

PAGE_SIZE = 4


class Rows:
    """Requests with rows as SGLang fills them: pages opened, prefixes taken over, equal pages replaced, rows reused."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.pages = VirtualPages(600, 400, PAGE_SIZE, torch.device("cpu"))
        self.rows = torch.zeros((9, 40 * PAGE_SIZE), dtype=torch.int32)
        self.mirror = PageMirror(self.pages, self.rows)
        self.free_rows = list(range(1, 9))
        self.reqs: list[Any] = []
        self.tree: list[list[int]] = []  # cached prefixes, as page ids
        self.used = np.zeros(401, dtype=np.int64)

    def open(self, reqs: list[Any], first: list[int], count: list[int]) -> None:
        total = sum(count)
        slots = np.flatnonzero(self.used[1:] == 0)[:total] + 1
        self.used[slots] = 1
        ids = self.pages.assign(slots, self.rng.choice([np.ones, np.zeros])(total, dtype=np.bool_))
        self.mirror.opened(reqs, np.array(first), np.array(count), ids)
        taken = 0
        for req, begin, n in zip(reqs, first, count, strict=True):
            self.write(req, begin, ids[taken : taken + n].tolist())
            taken += n

    def write(self, req: Any, first: int, ids: list[int]) -> None:
        for k, page in enumerate(ids, first):
            locs = page * PAGE_SIZE + torch.arange(PAGE_SIZE, dtype=torch.int32)
            self.rows[req.req_pool_idx, k * PAGE_SIZE : (k + 1) * PAGE_SIZE] = locs
        req.ids = req.ids[:first] + ids

    def release(self, ids: list[int]) -> None:
        if ids:
            self.used[self.pages.release(np.array(ids))] = 0

    def prefill(self) -> None:
        new = []
        for _ in range(self.rng.randint(1, 3)):
            if self.free_rows and self.pages.num_free > 60:
                req = SimpleNamespace(req_pool_idx=self.free_rows.pop(0), ids=[], shared=0)
                if self.tree and self.rng.random() < 0.6:
                    prefix = self.rng.choice(self.tree)
                    self.write(req, 0, prefix[: self.rng.randint(1, len(prefix))])
                    req.shared = len(req.ids)
                new.append(req)
        if new:
            self.open(new, [len(r.ids) for r in new], [self.rng.randint(1, 4) for _ in new])
            self.reqs += new

    def decode(self) -> None:
        grows = [r for r in self.reqs if len(r.ids) < 30]
        if grows:
            self.open(grows, [len(r.ids) for r in grows], [int(self.rng.random() < 0.4) for _ in grows])

    def dedupe(self) -> None:
        """The cache has equal pages: the row names those, its own are freed."""
        req, other = self.rng.choice(self.reqs), self.rng.choice(self.reqs)
        n = min(len(req.ids), len(other.ids), 3)
        mine = req.ids[:n]
        if req is not other and not req.shared and not set(mine) & {i for t in self.tree for i in t}:
            self.tree.append(other.ids[:n])
            self.write(req, 0, other.ids[:n] + req.ids[n:])
            req.shared = other.shared = n
            self.release(mine)

    def end(self) -> None:
        req = self.reqs.pop(self.rng.randrange(len(self.reqs)))
        cached = {i for t in self.tree for i in t} | {i for r in self.reqs for i in r.ids}
        self.release([i for i in req.ids if i not in cached])
        self.free_rows.append(req.req_pool_idx)

    def compare(self) -> None:
        if not self.reqs:
            return
        batch = self.rng.sample(self.reqs, self.rng.randint(1, len(self.reqs)))
        num = np.array([len(r.ids) for r in batch])
        rows = read_rows(self.rows, torch.tensor([r.req_pool_idx for r in batch]), num, PAGE_SIZE)
        assert [row[row > 0].tolist() for row in rows] == [r.ids for r in batch]
        assert np.array_equal(self.mirror.ids_of(batch, num), rows)


@pytest.mark.parametrize("seed", range(6))
def test_it_is_what_the_rows_say(seed: int) -> None:
    rows = Rows(seed)
    for _ in range(300):
        kind = rows.rng.random()
        if kind < 0.25:
            rows.prefill()
        elif kind < 0.7:
            rows.decode()
        elif kind < 0.85 and len(rows.reqs) > 1:
            rows.dedupe()
        elif rows.reqs:
            rows.end()
        rows.compare()


def test_the_steady_state_reads_nothing_back() -> None:
    rows = Rows(0)
    reqs = [SimpleNamespace(req_pool_idx=row, ids=[], shared=0) for row in (1, 2, 3)]
    rows.open(reqs, [0, 0, 0], [2, 1, 3])
    for _ in range(5):
        rows.open(reqs, [len(r.ids) for r in reqs], [1, 0, 1])
        rows.mirror.ids_of(reqs, np.array([len(r.ids) for r in reqs]))
    assert rows.mirror.num_read_back == 0
