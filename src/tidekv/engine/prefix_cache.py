"""Which cached pages hold which token prefixes. Owns pages by location; holds no KV and never calls the allocator."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tidekv.errors import ConfigError, InvariantError

Int64Array = NDArray[np.int64]
BoolArray = NDArray[np.bool_]

ROOT = 0  # the empty prefix; owns no page, so its value stays 0 and a remap (lut[0] == 0) leaves it alone
NO_PARENT = -1  # marks an unused entry of the arena


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """The longest cached prefix, one entry a page, first page first.

    `locs` is a copy, not a registered holder: after a call that may repack, read `PrefixCache.locs(node_ids)` again.
    """

    node_ids: Int64Array  # [N]
    locs: Int64Array  # [N] encoded loc of each page's first token


@dataclass(frozen=True, slots=True)
class InsertResult:
    """What an insert did, one entry a page, first page first."""

    node_ids: Int64Array  # [N] the whole path, old nodes and new
    adopted: BoolArray  # [N] True: the tree took this page. False: a node was there before, so owners are unchanged


class PrefixCache:
    """A radix tree in which a node is one whole page of tokens under its parent.

    Why an arena and not node objects: when pages move, every location must be rewritten. All of them lie in one flat
    int64 tensor, so the allocator does that in one vectorised step, whatever the number of nodes.

    Why no heap for the LRU order: a walk stamps its path with falling counter values, and an unlock stamps again. So
    among unlocked nodes a parent is always newer than its children, the order of stamps is itself a legal order of
    eviction (leaves before parents), and a sorted snapshot stays exact: whatever becomes evictable later is newer than
    all of it. The snapshot is consumed from the front and rebuilt when it runs out: O(log n) a page, amortised.

    Example, page_size 2: insert([5, 6, 7, 8, 9], [6, 14]) makes nodes 1 = (5, 6) at loc 6 and 2 = (7, 8) under it at
    loc 14; token 9 fills no page. match([5, 6, 1, 2]) then gives node_ids [1], locs [6].
    """

    def __init__(self, page_size: int, capacity_nodes: int = 1024) -> None:
        """An empty tree. `capacity_nodes` is the arena's first size; it doubles whenever it is full."""
        if page_size < 1 or capacity_nodes < 1:
            raise ConfigError(f"page_size and capacity_nodes must be >= 1, got {page_size} and {capacity_nodes}")
        self.page_size = page_size
        self._node_of: dict[tuple[int, tuple[int, ...]], int] = {}  # (parent, the page's tokens) -> node
        self._tokens: list[tuple[int, ...]] = [()]  # the page's tokens of each node, to unlink it
        self.values = torch.zeros(1, dtype=torch.int64)  # encoded loc of the page's first token, 0 = empty
        self._locs = self.values.numpy()  # the same memory
        self._parent = np.full(1, NO_PARENT, dtype=np.int64)
        self._refcount = np.zeros(1, dtype=np.int64)  # locks whose path runs through the node
        self._lock_ends = np.zeros(1, dtype=np.int64)  # locks whose path ends at it: tells a valid unlock in O(1)
        self._last_use = np.zeros(1, dtype=np.int64)  # a counter, not a clock: all ranks must evict alike
        self._num_children = np.zeros(1, dtype=np.int64)
        self._free_ids: list[int] = []
        self._counter = 0
        self._num_evictable = 0
        self._queue = np.empty(0, dtype=np.int64)  # snapshot of evictable nodes, least recently used first
        self._queue_stamps = np.empty(0, dtype=np.int64)  # their last_use then; a different one now = entry is stale
        self._grow(1 + capacity_nodes)

    @property
    def num_nodes(self) -> int:
        """Nodes, which is also the number of pages owned. Not `__len__`: an empty cache must not be falsy."""
        return len(self._node_of)

    @property
    def evictable_pages(self) -> int:
        """Pages in nodes that no lock holds. O(1)."""
        return self._num_evictable

    def evictable_locs(self) -> Int64Array:
        """Locs of those pages, in no order: for who wants to know what they are worth, not which one goes first."""
        found: Int64Array = self._locs[(self._locs > 0) & (self._refcount == 0)]
        return found

    def loc_tensors(self) -> list[Tensor]:
        """The holder's part: int64 CPU tensors of encoded locs to rewrite in place, 0 = empty.

        Ask anew for each remap: the arena is another tensor after it grew.
        """
        return [self.values]

    def locs(self, node_ids: Int64Array) -> Int64Array:
        """[N] encoded locs of the nodes' pages as they are now (a copy)."""
        return self._locs[node_ids]

    def all_locs(self) -> Int64Array:
        """Encoded locs of every page the tree owns, in order of node id."""
        return self._locs[self._live()]

    def match(self, tokens: Sequence[int]) -> PrefixMatch:
        """Longest cached prefix of `tokens` in whole pages; counts as a use.

        Pass all tokens but the last, so that one is left to compute: its logits are needed. Lock what you mean to use
        before anything that may evict: ids of evicted nodes are used again.
        """
        path: list[int] = []
        parent = ROOT
        for key in self._pages(tokens):
            node = self._node_of.get((parent, key))
            if node is None:
                break
            path.append(node)
            parent = node
        node_ids = np.array(path, dtype=np.int64)
        self._touch(node_ids)
        return PrefixMatch(node_ids, self._locs[node_ids])

    def insert(self, tokens: Sequence[int], page_locs: Int64Array) -> InsertResult:
        """Add every whole page of `tokens`; counts as a use. New nodes are not locked: lock before the next eviction.

        page_locs: [len(tokens) // page_size] encoded locs of the pages' first tokens. Where a node exists already its
        own page stays, and `adopted` is False: the caller keeps (and later frees) what it owned before the call.
        Raises ConfigError, with nothing changed, if the count is wrong or a loc is not the first of a page above 0.
        """
        page_locs = np.asarray(page_locs)
        num_pages = len(tokens) // self.page_size
        if page_locs.dtype != np.int64 or page_locs.shape != (num_pages,):
            raise ConfigError(
                f"page_locs: expected int64 [{num_pages}], one for each whole page of {self.page_size} of the "
                f"{len(tokens)} tokens, got {page_locs.dtype} {list(page_locs.shape)}"
            )
        bad = page_locs[(page_locs <= 0) | (page_locs % self.page_size != 0)]
        if bad.size:
            raise ConfigError(
                f"page_locs: {bad[0]} is not the first loc of a page: expected a multiple of {self.page_size}, above 0"
            )
        if len(self._free_ids) < num_pages:
            self._grow(2 * len(self._parent) + num_pages)
        path, first_new, parent = [], num_pages, ROOT
        for i, key in enumerate(self._pages(tokens)):
            node = self._node_of.get((parent, key))
            if node is None:  # from here on every page is new: a new node has no children
                first_new = min(first_new, i)
                node = self._free_ids.pop()
                self._node_of[parent, key] = node
                self._tokens[node] = key
            path.append(node)
            parent = node
        node_ids = np.array(path, dtype=np.int64)
        new_ids = node_ids[first_new:]
        if new_ids.size:
            parents = np.concatenate([[ROOT], node_ids])[first_new:-1]
            self._parent[new_ids] = parents
            self._num_children[parents] += 1  # a path has no node twice, so += counts each once
            self._locs[new_ids] = page_locs[first_new:]
            self._num_evictable += len(new_ids)
        self._touch(node_ids)
        return InsertResult(node_ids, np.arange(num_pages) >= first_new)

    def lock(self, node_ids: Int64Array) -> None:
        """Keep a path from eviction until it is unlocked; locks add up.

        The path starts at the root's child, or extends a lock that ends at its parent. Raises InvariantError if not.
        """
        parent = self._check_path(node_ids)
        if parent is None:
            return
        if parent != ROOT:
            if self._lock_ends[parent] == 0:
                raise InvariantError(f"lock of a path below node {parent}, where no lock ends")
            self._lock_ends[parent] -= 1
        self._num_evictable -= int((self._refcount[node_ids] == 0).sum())
        self._refcount[node_ids] += 1
        self._lock_ends[node_ids[-1]] += 1

    def unlock(self, node_ids: Int64Array) -> None:
        """Undo one lock, whole or its last part (it then ends at the parent of what was cut). Counts as a use.

        Raises InvariantError, with nothing changed, if no lock ends where the path ends.
        """
        parent = self._check_path(node_ids)
        if parent is None:
            return
        if self._lock_ends[node_ids[-1]] == 0:
            raise InvariantError(f"unlock of a path to node {node_ids[-1]}, where no lock ends")
        self._lock_ends[node_ids[-1]] -= 1
        if parent != ROOT:
            self._lock_ends[parent] += 1
        self._refcount[node_ids] -= 1
        self._num_evictable += int((self._refcount[node_ids] == 0).sum())
        self._touch(node_ids)  # the use ends now; also what keeps the snapshot exact (see the class)

    def peek_evictable(self, num_pages: int) -> Int64Array:
        """Locs of the up to `num_pages` pages that `evict(num_pages)` would drop, in that order. Changes nothing."""
        return self._locs[self._oldest(num_pages)]

    def evict(self, num_pages: int) -> Int64Array:
        """Drop up to `num_pages` pages, least recently used first, leaves before parents.

        Returns their locs, int64 [<= num_pages]; the caller now owns these pages and releases them in the ledger.
        """
        node_ids = self._oldest(num_pages)
        dropped = self._locs[node_ids]
        self._drop(node_ids)
        return dropped

    def num_shared(self, node_ids: Int64Array) -> int:
        """Of a path from the root that the caller has locked: leading nodes that another lock holds too."""
        return int((self._refcount[node_ids] > 1).sum())  # refcounts never rise along a path

    def take_back(self, node_ids: Int64Array) -> Int64Array:
        """Undo the insertion of `node_ids[num_shared(node_ids):]`, and the caller's lock on them.

        node_ids: a path from the root that the caller has locked; the lock then ends at the last shared node. Cached
        pages below, which nobody references, go too. Returns the locs of the pages below, int64; the caller owns all
        of them now.
        """
        mine = node_ids[self.num_shared(node_ids) :]
        if not len(mine):
            return np.empty(0, dtype=np.int64)
        self.unlock(mine)
        below = np.zeros(len(self._parent), dtype=np.bool_)
        below[mine[0]] = True
        while True:  # one round a level of the tree
            grown = below | (below[self._parent] & (self._parent > ROOT))
            if np.array_equal(grown, below):
                break
            below = grown
        rest = np.setdiff1d(np.flatnonzero(below), mine)
        dropped = self._locs[rest]
        self._drop(np.concatenate([mine, rest]))
        return dropped

    def _drop(self, node_ids: Int64Array) -> None:
        """Forget nodes that no lock holds, together with all that hangs below them."""
        parents = self._parent[node_ids]
        for node, parent in zip(node_ids.tolist(), parents.tolist(), strict=True):
            del self._node_of[parent, self._tokens[node]]
            self._tokens[node] = ()
        np.subtract.at(self._num_children, parents, 1)
        self._locs[node_ids] = 0
        self._parent[node_ids] = NO_PARENT
        self._last_use[node_ids] = 0  # no stamp is 0, so snapshot entries of these nodes are stale
        self._free_ids.extend(node_ids[::-1].tolist())
        self._num_evictable -= len(node_ids)

    def clear(self) -> Int64Array:
        """Drop everything that no lock holds; returns the locs, as `evict` does."""
        return self.evict(self._num_evictable)

    def check(self) -> None:
        """Recount everything from scratch; raises InvariantError at the first thing that does not add up."""
        live = self._live()
        parents, refcount = self._parent[live], self._refcount[live]
        capacity = len(self._parent)
        ids = np.concatenate([[ROOT], live, np.array(self._free_ids, dtype=np.int64)])
        self._require(np.array_equal(np.sort(ids), np.arange(capacity)), "free + live nodes != the arena")
        linked = {(p, self._tokens[n]): n for n, p in zip(live.tolist(), parents.tolist(), strict=True)}
        self._require(linked == self._node_of, "the lookup disagrees with the nodes' parents and tokens")
        self._require(all(len(key) == self.page_size for _, key in linked), "a node is not one whole page")
        above = np.maximum(self._parent, ROOT)
        for _ in range(capacity.bit_length()):  # pointer doubling: after log2(nodes) rounds all are at the root
            above = above[above]
        self._require(not above.any(), "a node does not hang from the root")
        unused = self._parent == NO_PARENT
        for array in (self._locs, self._refcount, self._last_use):
            self._require(not array[unused].any(), "an unused node holds something")
        locs = self._locs[live]
        self._require(bool((locs > 0).all()) and not (locs % self.page_size).any(), "a loc is not a page's first")
        self._require(len(np.unique(locs)) == len(locs), "one page is in two nodes")
        children = np.bincount(parents, minlength=capacity)
        self._require(np.array_equal(children, self._num_children), "num_children is wrong")
        through = np.bincount(parents, weights=refcount, minlength=capacity).astype(np.int64)
        through[ROOT] = 0  # the root needs no lock
        self._require(np.array_equal(self._refcount, through + self._lock_ends), "refcounts do not add up")
        self._require(bool((self._lock_ends >= 0).all()), "a negative lock count")
        evictable = live[refcount == 0]
        self._require(len(evictable) == self._num_evictable, "evictable_pages is wrong")
        stamps = self._last_use[live]
        self._require(len(np.unique(stamps)) == len(stamps) and bool((stamps > 0).all()), "a stamp is not unique")
        up = self._parent[evictable]
        exempt = (up == ROOT) | (self._refcount[up] > 0)  # a locked parent is stamped when it is unlocked
        newer = self._last_use[up] > self._last_use[evictable]
        self._require(bool((exempt | newer).all()), "an unlocked parent is older than its child")
        by_age = evictable[np.argsort(self._last_use[evictable])]
        queued = self._queue[self._current(len(self._queue))]
        self._require(np.array_equal(queued, by_age[: len(queued)]), "the eviction snapshot is out of order")

    @staticmethod
    def _require(holds: bool, what: str) -> None:
        if not holds:
            raise InvariantError(f"prefix cache: {what}")

    def _pages(self, tokens: Sequence[int]) -> Iterator[tuple[int, ...]]:
        """The whole pages of `tokens` as keys, made one by one: most walks of a long prompt end early."""
        step = self.page_size
        return (tuple(tokens[start : start + step]) for start in range(0, len(tokens) - step + 1, step))

    def _live(self) -> Int64Array:
        return np.flatnonzero(self._parent != NO_PARENT)

    def _touch(self, path: Int64Array) -> None:
        """Newest stamps for a path, falling from the first page to the last: a parent outlives its children."""
        self._counter += len(path)
        self._last_use[path] = self._counter - np.arange(len(path))

    def _check_path(self, node_ids: Int64Array) -> int | None:
        """The parent of a path's first node; None for an empty path. Raises InvariantError if it is not a path."""
        if len(node_ids) == 0:
            return None
        parents = self._parent[node_ids]
        if parents[0] == NO_PARENT or not np.array_equal(parents[1:], node_ids[:-1]):
            raise InvariantError(f"not a path of cached pages: nodes {node_ids.tolist()}, parents {parents.tolist()}")
        return int(parents[0])

    def _current(self, width: int) -> Int64Array:
        """Which of the snapshot's first `width` entries still stand. What fell never stands again: no stamp recurs."""
        queue = self._queue[:width]
        return np.flatnonzero((self._last_use[queue] == self._queue_stamps[:width]) & (self._refcount[queue] == 0))

    def _oldest(self, num_pages: int) -> Int64Array:
        """Up to `num_pages` evictable nodes, least recently used first. Changes at most the snapshot."""
        if num_pages < 0:
            raise ConfigError(f"num_pages must be >= 0, got {num_pages}")
        num_pages = min(num_pages, self._num_evictable)
        width = 2 * num_pages + 64  # some entries are stale; a longer look only if too many are
        while len(current := self._current(width)) < num_pages and width < len(self._queue):
            width *= 2
        if len(current) < num_pages:
            evictable = np.flatnonzero((self._parent != NO_PARENT) & (self._refcount == 0))
            self._queue = evictable[np.argsort(self._last_use[evictable])]
            self._queue_stamps = self._last_use[self._queue]
            return self._queue[:num_pages]
        oldest = self._queue[current[:num_pages]]
        num_stale = int(current[0]) if len(current) else min(width, len(self._queue))
        self._queue, self._queue_stamps = self._queue[num_stale:], self._queue_stamps[num_stale:]
        return oldest

    def _grow(self, capacity: int) -> None:
        """Make room for `capacity` entries, the root included."""
        old = len(self._parent)
        more = capacity - old
        self.values = torch.cat([self.values, torch.zeros(more, dtype=torch.int64)])
        self._locs = self.values.numpy()
        self._parent = np.pad(self._parent, (0, more), constant_values=NO_PARENT)
        self._refcount, self._lock_ends, self._last_use, self._num_children = (
            np.pad(array, (0, more)) for array in (self._refcount, self._lock_ends, self._last_use, self._num_children)
        )
        self._tokens.extend([()] * more)
        self._free_ids.extend(range(capacity - 1, old - 1, -1))  # popped from the end: low ids first
