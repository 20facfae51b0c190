"""The allocator under SGLang's contract, with real pools and no server: KV is written, pages narrow, KV is read."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

pytest.importorskip("sglang.srt")

from tidekv.errors import DoubleFreeError
from tidekv.geometry import KVGeometry
from tidekv.memory.device_pool import DeviceKVPool
from tidekv.memory.host_pool import HostKVPool
from tidekv.memory.ledger import HIGH, LOW
from tidekv.sglang_plugin.allocator import TideAllocator
from tidekv.sglang_plugin.capacity import plan_capacity
from tidekv.sglang_plugin.pressed_pages import BatchView, TideCore
from tidekv.sglang_plugin.window import Window

LAYERS, PAGES, PAGE_SIZE = 8, 24, 4


class Row:
    """One request as SGLang keeps it: virtual locs, and (ours) what was written for each token."""

    def __init__(self, high: bool) -> None:
        self.high = high
        self.locs: list[int] = []
        self.values: list[float] = []


class Driver:
    """Calls the allocator as SGLang's scheduler does."""

    def __init__(self, overcommit: float = 2.5) -> None:
        geometry = KVGeometry(LAYERS, PAGES, PAGE_SIZE, 1, 4, torch.float32)
        pool = DeviceKVPool(geometry, "cpu")
        capacity = plan_capacity(PAGES, LAYERS, 3, 8, overcommit)
        host = HostKVPool(geometry, capacity.host_pages * geometry.page_bytes)
        core = TideCore(PAGES * PAGE_SIZE, PAGE_SIZE, torch.float32, "cpu", pool, host_pool=host)
        core.fence = self.fence
        self.fences = 0
        size = capacity.virtual_pages * PAGE_SIZE
        self.tide = TideAllocator(size, PAGE_SIZE, torch.float32, "cpu", pool, False, core)  # type: ignore[arg-type]
        self.rows: list[Row] = []
        self.cached: list[list[int]] = []  # a prefix cache: pages' locs that nobody references
        self.next_value = 1.0

    def fence(self) -> None:
        self.fences += 1

    def view(self, rows: list[Row]) -> None:
        self.tide.batch = BatchView(
            tuple(row.high for row in rows), rows, lambda: sum(map(len, self.cached)), self.evict
        )

    def evict(self, tokens: int) -> None:
        while tokens > 0 and self.cached:
            locs = self.cached.pop(0)
            tokens -= len(locs)
            self.tide.free(torch.tensor(locs))

    def extend(self, rows: list[Row], counts: list[int]) -> bool:
        self.view(rows)
        prefix = torch.tensor([len(r.locs) for r in rows])
        seq = prefix + torch.tensor(counts)
        last = torch.tensor([r.locs[-1] if r.locs else -1 for r in rows])
        out = self.tide.alloc_extend(prefix, prefix, seq, seq, last, sum(counts))
        return self.take(rows, counts, out)

    def decode(self, rows: list[Row]) -> bool:
        self.view(rows)
        lens = np.array([len(r.locs) for r in rows])
        opens = lens % PAGE_SIZE == 0

        def touched() -> np.ndarray:
            last = [r.locs[-1] // PAGE_SIZE for r in rows if len(r.locs) % PAGE_SIZE]
            return np.unique(np.array(last, dtype=np.int64))

        need = int(opens.sum()) * PAGE_SIZE
        if need > self.tide.available_size():
            self.evict(need - self.tide.available_size())
        if need > self.tide.available_size():
            return False
        fits = self.tide.make_room(opens.astype(np.int64), [r.high for r in rows], lens, touched)
        assert fits, "virtual room, no pages"
        seq = torch.from_numpy(lens + 1)
        out = self.tide.alloc_decode(seq, seq, torch.tensor([r.locs[-1] for r in rows]))
        assert out is not None, "a step that fits was refused"
        return self.take(rows, [1] * len(rows), out)

    def take(self, rows: list[Row], counts: list[int], out: torch.Tensor | None) -> bool:
        if out is None:
            return False
        for row, locs in zip(rows, out.split(counts), strict=True):
            for loc in locs.tolist():
                row.locs.append(loc)
                row.values.append(self.next_value)
                self.next_value += 1
            values = torch.tensor(row.values[-len(locs) :])
            for layer in range(LAYERS):
                kv = (values * LAYERS + layer).view(-1, 1, 1).expand(-1, 1, 4)
                self.tide.core.write_kv(layer, self.tide.pages.locations(locs), kv, -kv)
        self.tide.end_step()
        return True

    def read(self) -> None:
        """Every layer of every token of every request is what was written, wherever it lies now."""
        for row in self.rows:
            locs = self.tide.pages.locations(torch.tensor(row.locs))
            for layer in range(LAYERS):
                k, v = self.tide.core.read_kv(layer, locs)
                want = torch.tensor(row.values) * LAYERS + layer
                assert torch.equal(k[:, 0, 0], want)
                assert torch.equal(v[:, 0, 0], -want)

    def check(self) -> None:
        self.tide.check()
        held = sum(-(-len(r.locs) // PAGE_SIZE) for r in self.rows) + sum(len(c) // PAGE_SIZE for c in self.cached)
        assert self.tide.available_size() + held * PAGE_SIZE == self.tide.size  # SGLang's own leak check


def test_full_width_is_the_identity() -> None:
    driver = Driver()
    driver.rows = [Row(True), Row(False)]
    assert driver.extend(driver.rows, [6, 9])
    assert driver.decode(driver.rows)
    assert driver.tide.pages.displaced == 0
    for row in driver.rows:
        locs = torch.tensor(row.locs)
        assert torch.equal(driver.tide.pages.locations(locs), locs)
        assert driver.tide.core.kvcache.get_key_buffer(5)[locs, 0, 0].tolist() == [v * LAYERS + 5 for v in row.values]
    driver.check()


def test_pressure_narrows_low_first_and_virtual_locs_stay() -> None:
    driver = Driver()
    driver.rows = [Row(True), *(Row(False) for _ in range(6))]
    for row in driver.rows:
        assert driver.extend([row], [20])
    before = [list(row.locs) for row in driver.rows]
    assert driver.tide.core.num_halvings[LOW] > 0
    assert driver.tide.core.num_halvings[HIGH] == 0
    assert driver.tide.pages.displaced > 0
    assert driver.fences == driver.tide.core.num_repacks > 0
    driver.read()
    driver.check()
    assert [row.locs for row in driver.rows] == before
    assert driver.decode(driver.rows)
    driver.read()
    driver.check()


def test_cached_prefixes_go_before_anything_narrows() -> None:
    driver = Driver()
    row = Row(False)
    assert driver.extend([row], [PAGES * PAGE_SIZE])
    driver.cached = [row.locs[i : i + PAGE_SIZE] for i in range(0, len(row.locs), PAGE_SIZE)]
    driver.rows = [Row(False)]
    assert driver.extend(driver.rows, [10 * PAGE_SIZE])
    assert sum(driver.tide.core.num_halvings.values()) == 0
    assert len(driver.cached) == PAGES - 10
    assert driver.tide.num_evictions == 10 * PAGE_SIZE
    driver.check()


def test_widths_come_back_and_new_pages_are_the_identity_again() -> None:
    driver = Driver()
    driver.rows = [Row(False) for _ in range(7)]
    for row in driver.rows:
        assert driver.extend([row], [20])
    gone, driver.rows = driver.rows[1:], driver.rows[:1]
    driver.tide.free_group_begin()
    for row in gone:
        driver.tide.free_segment(torch.tensor(row.locs), start_pos=0)
    driver.tide.free_group_end()
    assert driver.tide.restore(0.25) == 5
    assert not driver.tide.core.ledger.any_narrow
    driver.read()
    driver.check()
    driver.tide.free(torch.tensor(driver.rows.pop().locs))
    fresh = Row(False)
    driver.rows = [fresh]
    assert driver.extend([fresh], [20])
    assert driver.tide.pages.displaced == 0
    driver.check()


def test_a_shared_page_counts_as_high() -> None:
    driver = Driver()
    row = Row(False)
    assert driver.extend([row], [8])
    driver.tide.promote(np.unique(np.array(row.locs) // PAGE_SIZE))
    assert (driver.tide.core.high_used, driver.tide.core.low_used) == (2, 0)


def test_a_double_free_is_refused() -> None:
    driver = Driver()
    row = Row(False)
    assert driver.extend([row], [8])
    driver.tide.free(torch.tensor(row.locs))
    with pytest.raises(DoubleFreeError):
        driver.tide.free(torch.tensor(row.locs))


def test_clear_forgets_everything() -> None:
    driver = Driver()
    driver.rows = [Row(False) for _ in range(7)]
    for row in driver.rows:
        assert driver.extend([row], [20])
    driver.rows = []
    driver.tide.clear()
    driver.check()
    assert driver.tide.available_size() == driver.tide.size


def test_a_window_gives_up_its_old_pages_first() -> None:
    driver = Driver()
    driver.rows = [Row(False), Row(False)]
    assert driver.extend(driver.rows, [40, 40])
    window = driver.tide.window = Window(8, PAGE_SIZE)

    def old_pages() -> np.ndarray:
        ends = window.old_pages(np.array([len(r.locs) for r in driver.rows]))
        return np.concatenate([
            np.array(r.locs[PAGE_SIZE : end * PAGE_SIZE : PAGE_SIZE]) // PAGE_SIZE
            for r, end in zip(driver.rows, ends, strict=True)
        ])  # fmt: skip

    driver.tide.old_pages = old_pages
    third = Row(False)
    assert driver.extend([third], [40])
    driver.rows.append(third)
    ledger = driver.tide.core.ledger
    assert ledger.level == [0, 0, 0, 0]  # no class was halved: new pages are full width
    assert driver.tide.num_window_pages > 0
    for row in driver.rows[:2]:
        ids = np.array(row.locs[::PAGE_SIZE]) // PAGE_SIZE
        levels = ledger.levels_of(driver.tide.pages.slots_of(ids))
        assert levels[0] == 0
        assert not levels[-2:].any()
    driver.read()  # nothing is lost: the host has what the window does not look at
    driver.check()


@pytest.mark.parametrize("seed", range(12))
def test_random_load_keeps_kv_and_books(seed: int) -> None:
    rng = random.Random(seed)
    driver = Driver(overcommit=rng.choice([1.0, 1.7, 2.5, 64.0]))
    for _ in range(150):
        kind = rng.random()
        if kind < 0.35 and len(driver.rows) < 8:
            fresh = [Row(rng.random() < 0.3) for _ in range(rng.randint(1, 2))]
            counts = [rng.randint(1, 14) for _ in fresh]
            need = sum(-(-n // PAGE_SIZE) for n in counts) * PAGE_SIZE
            if need <= driver.tide.available_size():
                assert driver.extend(fresh, counts), "admitted, and no memory"
                driver.rows += fresh
        elif kind < 0.75 and driver.rows:
            driver.decode(rng.sample(driver.rows, rng.randint(1, len(driver.rows))))
        elif kind < 0.9 and driver.rows:
            row = driver.rows.pop(rng.randrange(len(driver.rows)))
            whole = len(row.locs) // PAGE_SIZE * PAGE_SIZE
            if rng.random() < 0.5:  # its full pages become a cached prefix
                driver.cached += [row.locs[i : i + PAGE_SIZE] for i in range(0, whole, PAGE_SIZE)]
                if row.locs[whole:]:
                    driver.tide.free_segment(torch.tensor(row.locs[whole:]), start_pos=whole)
            else:
                driver.tide.free(torch.tensor(row.locs))
        else:
            driver.tide.end_step()
            driver.tide.restore(rng.choice([0.25, 0.5]))
        driver.check()
    driver.read()
    for row in driver.rows:
        driver.tide.free(torch.tensor(row.locs))
    driver.rows = []
    driver.evict(10**9)
    driver.check()
    assert driver.tide.available_size() == driver.tide.size
