"""The prefix cache against hand examples and against a naive oracle: a dict from prefix to page."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tidekv.engine.prefix_cache import InsertResult, PrefixCache
from tidekv.errors import ConfigError, InvariantError

PAGE_SIZE = 2


def locs(*pages: int) -> np.ndarray:
    return np.array(pages, dtype=np.int64) * PAGE_SIZE


def insert(cache: PrefixCache, tokens: list[int], *pages: int) -> InsertResult:
    return cache.insert(tokens, locs(*pages))


def test_match_gives_whole_pages_only() -> None:
    cache = PrefixCache(PAGE_SIZE)
    result = insert(cache, [5, 6, 7, 8, 9], 3, 7)
    assert result.adopted.tolist() == [True, True]
    assert cache.num_nodes == cache.evictable_pages == 2
    assert cache.match([5, 6, 7, 8]).locs.tolist() == [6, 14]
    assert cache.match([5, 6, 7]).locs.tolist() == [6]
    assert cache.match([5, 6, 1, 2]).node_ids.tolist() == result.node_ids[:1].tolist()
    assert cache.match([7, 8]).locs.tolist() == []  # cached, but under another parent
    assert cache.match([5]).locs.tolist() == []
    assert cache.match([]).node_ids.dtype == np.int64
    cache.check()


def test_insert_adopts_only_what_is_new() -> None:
    cache = PrefixCache(PAGE_SIZE)
    first = insert(cache, [1, 2, 3, 4], 1, 2)
    second = insert(cache, [1, 2, 3, 4, 5, 6], 1, 8, 9)  # page 8: computed twice, stays the caller's
    assert second.adopted.tolist() == [False, False, True]
    assert second.node_ids[:2].tolist() == first.node_ids.tolist()
    assert cache.locs(second.node_ids).tolist() == locs(1, 2, 9).tolist()
    assert sorted(cache.all_locs().tolist()) == locs(1, 2, 9).tolist()
    assert insert(cache, [1]).adopted.tolist() == []
    cache.check()


@pytest.mark.parametrize(
    ("page_locs", "message"),
    [
        (locs(1), r"expected int64 \[2\].*got int64 \[1\]"),
        (locs(1, 2).astype(np.int32), r"expected int64 \[2\].*got int32"),
        (locs(1, 0), "0 is not the first loc of a page"),
        (np.array([2, 5]), "5 is not the first loc of a page"),
        (np.array([2, -2]), "-2 is not the first loc of a page"),
    ],
)
def test_insert_refuses_bad_locs_and_changes_nothing(page_locs: np.ndarray, message: str) -> None:
    cache = PrefixCache(PAGE_SIZE)
    with pytest.raises(ConfigError, match=message):
        cache.insert([1, 2, 3, 4, 5], page_locs)
    assert cache.num_nodes == 0
    cache.check()


@pytest.mark.parametrize(("page_size", "capacity"), [(0, 1), (1, 0)])
def test_refuses_a_geometry_that_cannot_work(page_size: int, capacity: int) -> None:
    with pytest.raises(ConfigError, match="must be >= 1"):
        PrefixCache(page_size, capacity)


def test_evicts_least_recently_used_first_and_leaves_before_parents() -> None:
    cache = PrefixCache(PAGE_SIZE)
    insert(cache, [1, 1, 2, 2, 3, 3], 1, 2, 3)
    insert(cache, [1, 1, 4, 4], 1, 5)
    insert(cache, [6, 6], 6)
    cache.match([1, 1, 2, 2])  # page 3, under them, stays as old as it was
    assert cache.peek_evictable(99).tolist() == locs(3, 5, 6, 2, 1).tolist()
    assert cache.evict(2).tolist() == locs(3, 5).tolist()
    assert cache.evictable_pages == cache.num_nodes == 3
    cache.match([6, 6])
    assert cache.peek_evictable(2).tolist() == locs(2, 1).tolist()
    assert cache.clear().tolist() == locs(2, 1, 6).tolist()
    assert cache.num_nodes == cache.evictable_pages == 0
    assert cache.evict(1).tolist() == []
    assert not cache.loc_tensors()[0].any()
    with pytest.raises(ConfigError, match="num_pages must be >= 0, got -1"):
        cache.evict(-1)
    cache.check()


def test_locks_add_up_and_hold_the_whole_path() -> None:
    cache = PrefixCache(PAGE_SIZE)
    long = insert(cache, [1, 1, 2, 2, 3, 3], 1, 2, 3).node_ids
    side = insert(cache, [1, 1, 4, 4], 1, 5).node_ids
    cache.lock(long[:2])
    cache.lock(side)
    assert cache.evictable_pages == 1
    assert cache.clear().tolist() == locs(3).tolist()
    cache.unlock(side)
    assert cache.peek_evictable(9).tolist() == locs(5).tolist()  # page 1 still has the first lock
    cache.unlock(long[:2])
    assert cache.clear().tolist() == locs(5, 2, 1).tolist()  # an unlock is a use: 5's came first
    cache.check()


def test_a_lock_can_be_extended_and_cut() -> None:
    cache = PrefixCache(PAGE_SIZE)
    path = insert(cache, [1, 1, 2, 2, 3, 3], 1, 2, 3).node_ids
    cache.lock(path[:1])
    cache.lock(path[1:])  # now one lock of the whole path
    cache.check()
    with pytest.raises(InvariantError, match="where no lock ends"):
        cache.unlock(path[:1])
    cache.unlock(path[2:])
    assert cache.clear().tolist() == locs(3).tolist()
    cache.unlock(path[:2])
    assert cache.clear().tolist() == locs(2, 1).tolist()
    cache.check()


def test_a_cut_lock_still_evicts_leaves_before_parents() -> None:
    """Cut, then unlocked from the rest: the parent's stamp is renewed, or it would be older than its child."""
    cache = PrefixCache(PAGE_SIZE)
    path = insert(cache, [1, 1, 2, 2], 1, 2).node_ids
    cache.lock(path)
    cache.unlock(path[1:])
    cache.unlock(path[:1])
    assert cache.evict(1).tolist() == locs(2).tolist()
    cache.check()


def test_lock_and_unlock_refuse_what_is_no_path_or_not_locked() -> None:
    cache = PrefixCache(PAGE_SIZE)
    path = insert(cache, [1, 1, 2, 2, 3, 3], 1, 2, 3).node_ids
    for bad in (path[[0, 2]], path[::-1], path[[0, 0]], np.array([0]), np.array([path.max() + 1])):
        with pytest.raises(InvariantError, match="not a path"):
            cache.lock(bad)
    with pytest.raises(InvariantError, match="where no lock ends"):
        cache.lock(path[1:])
    with pytest.raises(InvariantError, match="where no lock ends"):
        cache.unlock(path)
    cache.lock(path[:0])
    cache.unlock(path[:0])
    assert cache.evictable_pages == 3
    cache.check()


def test_a_remap_in_place_is_seen_also_after_growth() -> None:
    cache = PrefixCache(PAGE_SIZE, capacity_nodes=1)
    node_ids = insert(cache, [1, 1, 2, 2, 3, 3], 1, 2, 3).node_ids
    lut = np.array([0, 12, 11, 10])
    for tensor in cache.loc_tensors():
        combined = tensor.numpy() // PAGE_SIZE
        tensor.copy_(tensor.new_tensor(lut[combined] * PAGE_SIZE))
    assert cache.locs(node_ids).tolist() == locs(12, 11, 10).tolist()
    assert cache.match([1, 1, 2, 2]).locs.tolist() == locs(12, 11).tolist()
    assert cache.evict(3).tolist() == locs(10, 11, 12).tolist()
    cache.check()


def test_an_old_match_is_a_copy() -> None:
    cache = PrefixCache(PAGE_SIZE)
    match = (insert(cache, [1, 1], 1), cache.match([1, 1]))[1]
    cache.loc_tensors()[0].mul_(5)
    assert match.locs.tolist() == locs(1).tolist()


def test_a_snapshot_full_of_stale_entries_is_looked_through() -> None:
    """300 entries, most touched after the snapshot was made: more than the first look of 2 * n + 64 covers."""
    cache = PrefixCache(PAGE_SIZE)
    for i in range(300):
        insert(cache, [i, i], i + 1)
    assert cache.peek_evictable(1).tolist() == locs(1).tolist()
    for i in range(290):
        cache.match([i, i])
    cache.check()
    assert cache.evict(12).tolist() == locs(*range(291, 301), 1, 2).tolist()
    cache.check()


def test_a_lock_after_the_snapshot_counts() -> None:
    """A lock is no use and renews no stamp: the snapshot must look at the refcount too."""
    cache = PrefixCache(PAGE_SIZE)
    node_ids = insert(cache, [1, 1], 1).node_ids
    insert(cache, [2, 2], 2)
    assert cache.peek_evictable(2).tolist() == locs(1, 2).tolist()
    cache.lock(node_ids)
    assert cache.peek_evictable(2).tolist() == cache.evict(2).tolist() == locs(2).tolist()
    cache.check()


@pytest.mark.parametrize("array", ["_locs", "_refcount", "_last_use"])
def test_check_sees_an_unused_entry_that_holds_something(array: str) -> None:
    cache = PrefixCache(PAGE_SIZE)
    node = int(insert(cache, [1, 1], 1).node_ids[0])
    cache.clear()
    getattr(cache, array)[node] = PAGE_SIZE
    with pytest.raises(InvariantError, match="prefix cache"):
        cache.check()


@pytest.mark.parametrize(
    "breakage",
    ["_parent", "_refcount", "_lock_ends", "_last_use", "_num_children", "_locs"],
)
def test_check_sees_a_broken_entry(breakage: str) -> None:
    cache = PrefixCache(PAGE_SIZE)
    cache.lock(insert(cache, [1, 1, 2, 2], 1, 2).node_ids)
    insert(cache, [1, 1, 3, 3, 4, 4], 1, 5, 6)
    cache.check()
    node = int(cache.match([1, 1, 3, 3]).node_ids[1])
    getattr(cache, breakage)[node] += 1 if breakage != "_last_use" else -100
    with pytest.raises(InvariantError, match="prefix cache"):
        cache.check()


@dataclass
class Cached:
    page: int
    locks: int
    last_use: int


Prefix = tuple[tuple[int, int], ...]
token_lists = st.lists(st.integers(0, 1), max_size=9)


class PrefixCacheMachine(RuleBasedStateMachine):
    """Catches a wrong match, adoption, count, order of eviction, a page lost or taken twice, and a stale location.

    The oracle knows no stamps within a path, no arena and no snapshot: it drops the oldest leaf, one at a time.
    """

    def __init__(self) -> None:
        super().__init__()
        self.cache = PrefixCache(PAGE_SIZE, capacity_nodes=2)
        self.oracle: dict[Prefix, Cached] = {}
        self.locks: list[tuple[Prefix, np.ndarray]] = []  # prefix, node ids
        self.next_page = 1
        self.clock = 0

    def prefixes(self, tokens: list[int]) -> list[Prefix]:
        pages = [(tokens[i], tokens[i + 1]) for i in range(0, len(tokens) - 1, 2)]
        return [tuple(pages[: n + 1]) for n in range(len(pages))]

    def use(self, prefixes: list[Prefix]) -> None:
        self.clock += 1
        for prefix in prefixes:
            self.oracle[prefix].last_use = self.clock

    def match(self, tokens: list[int]) -> tuple[list[Prefix], np.ndarray]:
        known = [prefix for prefix in self.prefixes(tokens) if prefix in self.oracle]
        result = self.cache.match(tokens)
        assert result.locs.tolist() == [self.oracle[prefix].page * PAGE_SIZE for prefix in known]
        self.use(known)
        return known, result.node_ids

    def expected_evictions(self, num_pages: int) -> list[Prefix]:
        left = dict(self.oracle)
        order: list[Prefix] = []
        while len(order) < num_pages:
            parents = {prefix[:-1] for prefix in left}
            leaves = [prefix for prefix in left if prefix not in parents and left[prefix].locks == 0]
            if not leaves:
                break
            order.append(min(leaves, key=lambda prefix: left[prefix].last_use))
            del left[order[-1]]
        return order

    @rule(tokens=token_lists)
    def match_rule(self, tokens: list[int]) -> None:
        self.match(tokens)

    @rule(tokens=token_lists)
    def insert_rule(self, tokens: list[int]) -> None:
        prefixes = self.prefixes(tokens)
        pages = range(self.next_page, self.next_page + len(prefixes))
        self.next_page += len(prefixes)
        result = self.cache.insert(tokens, locs(*pages))
        assert result.adopted.tolist() == [prefix not in self.oracle for prefix in prefixes]
        for prefix, page in zip(prefixes, pages, strict=True):
            self.oracle.setdefault(prefix, Cached(page, 0, 0))
        self.use(prefixes)
        assert self.cache.locs(result.node_ids).tolist() == [self.oracle[p].page * PAGE_SIZE for p in prefixes]

    @rule(tokens=token_lists)
    def lock_rule(self, tokens: list[int]) -> None:
        known, node_ids = self.match(tokens)
        self.cache.lock(node_ids)
        if known:
            self.locks.append((known[-1], node_ids))
        for prefix in known:
            self.oracle[prefix].locks += 1

    @precondition(lambda self: self.locks)
    @rule(data=st.data(), tokens=token_lists)
    def extend_rule(self, data: st.DataObject, tokens: list[int]) -> None:
        at = data.draw(st.integers(0, len(self.locks) - 1))
        prefix, held = self.locks[at]
        known, node_ids = self.match([token for page in prefix for token in page] + tokens)
        self.cache.lock(node_ids[len(held) :])
        for longer in known[len(held) :]:
            self.oracle[longer].locks += 1
        self.locks[at] = (known[-1], node_ids)

    @precondition(lambda self: self.locks)
    @rule(data=st.data())
    def unlock_rule(self, data: st.DataObject) -> None:
        prefix, node_ids = self.locks.pop(data.draw(st.integers(0, len(self.locks) - 1)))
        keep = data.draw(st.integers(0, len(node_ids)))
        self.cache.unlock(node_ids[keep:])
        cut = [prefix[:n] for n in range(keep + 1, len(prefix) + 1)]
        for dropped in cut:
            self.oracle[dropped].locks -= 1
        self.use(cut)
        if keep:
            self.locks.append((prefix[:keep], node_ids[:keep]))

    @rule(num_pages=st.integers(0, 5))
    def peek_rule(self, num_pages: int) -> None:
        expected = [self.oracle[prefix].page * PAGE_SIZE for prefix in self.expected_evictions(num_pages)]
        assert self.cache.peek_evictable(num_pages).tolist() == expected

    @rule(num_pages=st.integers(0, 3))
    def evict_rule(self, num_pages: int) -> None:
        expected = self.expected_evictions(num_pages)
        dropped = self.cache.evict(num_pages)
        assert dropped.tolist() == [self.oracle.pop(prefix).page * PAGE_SIZE for prefix in expected]

    @rule()
    def clear_rule(self) -> None:
        expected = self.expected_evictions(len(self.oracle))
        dropped = self.cache.clear()
        assert dropped.tolist() == [self.oracle.pop(prefix).page * PAGE_SIZE for prefix in expected]

    @rule()
    def remap_rule(self) -> None:
        """Every page moves: ids run the other way round."""
        lut = np.zeros(self.next_page, dtype=np.int64)
        for cached in self.oracle.values():
            lut[cached.page] = self.next_page - cached.page
            cached.page = self.next_page - cached.page
        for tensor in self.cache.loc_tensors():
            tensor.copy_(tensor.new_tensor(lut[tensor.numpy() // PAGE_SIZE] * PAGE_SIZE))

    @invariant()
    def books_add_up(self) -> None:
        self.cache.check()
        pages = [cached.page * PAGE_SIZE for cached in self.oracle.values()]
        assert sorted(self.cache.all_locs().tolist()) == sorted(pages)
        assert self.cache.num_nodes == len(self.oracle)
        assert self.cache.evictable_pages == sum(cached.locks == 0 for cached in self.oracle.values())


PrefixCacheMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestPrefixCacheMachine = PrefixCacheMachine.TestCase
