"""The independent side of the tests: what must be true, in plain Python and numpy, with none of tidekv's own helpers.

`CacheModel` drives an allocator as an engine would and keeps its own record of every live token: a plain table from
(request, position) to a serial number. K and V of (serial, layer) carry bits that no other token and layer has: a cell
that lands in a wrong place, is lost, or is read from a stale copy shows at the next read-back.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np
import pytest
import torch

from tidekv import ConfigError, DeviceKVPool, DoubleFreeError, HostKVPool, KVGeometry, ReqToTokenPool
from tidekv.allocator import DynamicPagedTokenToKVPoolAllocator

V_BITS = 0x55AA5A5A  # V = K's bits xor this


# ---- the layout, from its definition ------------------------------------------------------------------------------


def resident_lists(layer_num: int, min_slot_width: int) -> list[list[int]]:
    """Resident layers by level: every second one of the level above, cut to half the width (rounded down)."""
    levels = [list(range(layer_num))]
    while len(levels[-1]) // 2 >= min_slot_width:
        levels.append(levels[-1][::2][: len(levels[-1]) // 2])
    return levels


def resident_positions(layer_num: int, min_slot_width: int) -> np.ndarray:
    """[levels, L]: position of each layer in a slot of each level, -1 where it is not resident."""
    lists = resident_lists(layer_num, min_slot_width)
    return np.array([[layers.index(x) if x in layers else -1 for x in range(layer_num)] for layers in lists])


def k_bits(serials: np.ndarray, layer_num: int) -> np.ndarray:
    """[T, L] int32: the bits of K of each token and layer (V: the same xor `V_BITS`)."""
    return (np.asarray(serials)[:, None] * 64 + np.arange(layer_num) + 1).astype(np.int32)


def least_pages(counts: list[int], slots_a_page: int) -> int:
    """Exhaustive: the fewest pages of one width that a merge can leave, trying every set of donors."""
    n = len(counts)
    for freed in range(n, 0, -1):
        for donors in combinations(range(n), freed):
            room = sum(slots_a_page - counts[i] for i in range(n) if i not in donors)
            if sum(counts[i] for i in donors) <= room:
                return n - freed
    return n


# ---- snapshots: "refused" means that nothing changed ---------------------------------------------------------------


def snapshot(allocator: DynamicPagedTokenToKVPoolAllocator, *tensors: torch.Tensor) -> dict[str, Any]:
    """Everything that a refusal must leave alone: books, K and V on both sides, req_to_token, holders."""
    ledger, pool = allocator.ledger, allocator.req_to_token_pool
    state: dict[str, Any] = {
        name: value.tobytes() for name, value in vars(ledger).items() if isinstance(value, np.ndarray)
    }
    state["free list"] = ledger.free_list.all_pages().tobytes()
    state["free list head"] = (len(ledger.free_list), ledger.free_list.num_waiting)
    # An empty entry of the partial pool means the same as none.
    state["partial"] = {key: value.tolist() for key, value in ledger.partial.items() if len(value)}
    state["next_stamp"] = ledger.next_stamp
    flats = {"device": allocator.kvcache, "host": allocator.host_pool}
    for name, flat in flats.items():
        state[name] = flat.k_flat.view(torch.int32).numpy().tobytes() + flat.v_flat.view(torch.int32).numpy().tobytes()
    if pool is not None:
        state["req_to_token"] = pool.req_to_token.numpy().tobytes()
        state["rows"] = (pool.live_rows().tolist(), pool.available_size(), pool._written.tolist())
    state["holders"] = [t.tolist() for t in (*allocator.loc_holders.other_tensors(), *tensors)]
    group = allocator._free_group
    state["free group"] = None if group is None else group.tolist()
    state["counts"] = (allocator.num_repacks, allocator.num_evicted_pages, allocator.num_pages_freed)
    return state


def assert_same(before: dict[str, Any], after: dict[str, Any]) -> None:
    changed = [name for name in before if before[name] != after[name]]
    assert not changed, f"a refusal changed {changed}"
    assert before.keys() == after.keys()


# ---- a cache with its parts -----------------------------------------------------------------------------------------


def make_allocator(
    layer_num: int = 8,
    num_pages: int = 10,
    page_size: int = 4,
    *,
    host_pages: int | None = None,
    rows: int = 8,
    max_context_len: int = 256,
    index_dtype: torch.dtype = torch.int64,
    heads: int = 1,
    head_dim: int = 1,
    **options: Any,
) -> DynamicPagedTokenToKVPoolAllocator:
    """An allocator on the CPU, float32, with a ReqToTokenPool; `host_pages` None: room for everything."""
    geometry = KVGeometry(layer_num, num_pages, page_size, heads, head_dim, torch.float32)
    host = None if host_pages is None else HostKVPool(geometry, host_pages * geometry.page_bytes)
    return DynamicPagedTokenToKVPoolAllocator(
        num_pages * page_size,
        page_size,
        torch.float32,
        "cpu",
        DeviceKVPool(geometry, "cpu"),
        host_pool=host,
        req_to_token_pool=ReqToTokenPool(rows, max_context_len, "cpu", index_dtype),
        **options,
    )


# ---- the model ------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Prefix:
    """Whole pages that a prefix cache holds: a location holder."""

    locs: torch.Tensor
    serials: np.ndarray
    users: int


@dataclass(eq=False)
class Request:
    row: int
    high: bool
    serials: np.ndarray  # position -> serial
    prefix: Prefix | None = None

    def __len__(self) -> int:
        return len(self.serials)

    @property
    def shared(self) -> int:
        """Tokens [0, shared) lie in pages of the prefix cache."""
        return 0 if self.prefix is None else len(self.prefix.serials)


@dataclass(eq=False)
class Parked:
    host_pages: np.ndarray
    serials: np.ndarray


class CacheModel:
    """An engine's use of the allocator, reduced to what it does to the cache. Each public method is one operation.

    Every layer is written and read where the design says that it lies; one layer in turn goes through `write_kv` and
    `read_kv` instead, or all of them with `read_all` (several times slower).
    It is the allocator's evictor too: prefixes that no request uses can be evicted, the last page of the oldest first.
    """

    def __init__(self, config: dict[str, Any], *, read_all: bool = False) -> None:
        c = dict(config)
        self.config, self.read_all, self.turn = config, read_all, 0
        self.layer_num, self.page_size = c["layer_num"], c["page_size"]
        pages, fraction = c["num_pages"], {}
        for name in ("low_max_pages", "high_reserved_pages", "dynamic_max_pages"):
            value = c[name]
            fraction[name] = min(value, pages) if isinstance(value, int) else value
        self.max_context_len = 2 * pages * self.page_size
        self.allocator = make_allocator(
            self.layer_num,
            pages,
            self.page_size,
            host_pages=c["host_pages"],
            rows=12,
            max_context_len=self.max_context_len,
            index_dtype=torch.int32 if c["int32"] else torch.int64,
            min_slot_width=c["min_slot_width"],
            need_sort=c["need_sort"],
            write_through=c["write_through"],
            **fraction,
        )
        self.pool = self.allocator.req_to_token_pool
        self.table = self.pool.req_to_token.numpy()
        self.positions = resident_positions(self.layer_num, c["min_slot_width"])
        kv, host = self.allocator.kvcache, self.allocator.host_pool
        self.flats = [
            tuple(t.view(torch.int32).numpy().reshape(-1) for t in (flat.k_flat, flat.v_flat)) for flat in (kv, host)
        ]
        self.requests: list[Request] = []
        self.prefixes: list[Prefix] = []
        self.parked: list[Parked] = []
        self.scope: AbstractContextManager[None] | None = None
        self.staged: dict[int, int] = {}  # serial -> staging location given in this step
        self.next_serial = 1
        self.refused = self.served = 0
        self.allocator.register_loc_holder(lambda: [p.locs for p in self.prefixes])
        if c["evictor"]:
            self.allocator.evictor = self

    # -- evictor

    def _evictable(self) -> list[tuple[Prefix, int]]:
        out = []
        for prefix in self.prefixes:
            if not prefix.users:
                out += [(prefix, at) for at in range(len(prefix.serials) - self.page_size, -1, -self.page_size)]
        return out

    @property
    def evictable_pages(self) -> int:
        return len(self._evictable())

    def peek_evictable(self, n: int) -> np.ndarray:
        return np.array([int(p.locs[at]) for p, at in self._evictable()[:n]], dtype=np.int64)

    def evict(self, n: int) -> np.ndarray:
        dropped = self.peek_evictable(n)
        for prefix, at in self._evictable()[:n]:
            prefix.locs, prefix.serials = prefix.locs[:at].clone(), prefix.serials[:at]
        self.prefixes = [p for p in self.prefixes if len(p.serials)]
        return dropped

    # -- operations

    def extend(self, items: list[dict[str, Any]], form: int) -> None:
        self._extend(items, form)

    def decode(self, picks: list[int], form: int) -> None:
        batch = self._distinct(picks)
        batch = [r for r in batch if len(r) < self.max_context_len]
        if not batch:
            return
        seq = torch.tensor([len(r) + 1 for r in batch])
        before = self._snapshot()
        result = self.allocator.alloc_decode(seq, seq, self._last_locs(batch), self._priorities(batch, form))
        if self._refused(before, result):
            return
        self._place(batch, [1] * len(batch), *result)

    def alloc(self, pages: int, tokens: int, high: bool) -> None:
        n = min(pages * self.page_size + tokens, self.max_context_len)
        rows = self.pool.alloc(1)
        if rows is None:
            return
        request = Request(rows[0], high, np.empty(0, dtype=np.int64))
        available = self.allocator.available_size(high)
        before = self._snapshot()
        result = self.allocator.alloc(n, high)
        assert result is not None or n > available, "available_size promised more than alloc gives"
        if self._refused(before, result):
            self.pool.free(request.row)
            return
        self.requests.append(request)
        self._place([request], [n], *result)

    def free(self, picks: list[int], which: int, group: bool) -> None:
        if group:
            self.allocator.free_group_begin()
        for request in self._distinct(picks):
            self._free(request, which)
        if group:
            self.allocator.free_group_end()

    def free_group_around_extend(self, pick: int, items: list[dict[str, Any]], form: int) -> None:
        """An allocation (which may repack) while frees are collected."""
        self.allocator.free_group_begin()
        for request in self._distinct([pick]):
            self._free(request, 0)
        self._extend(items, form)
        self.allocator.free_group_end()

    def abort(self, items: list[dict[str, Any]], form: int) -> None:
        """Requests that end between their allocation and their forward: nothing was written."""
        for request in self._extend(items, form, write=False):
            self._free(request, 0)

    def share(self, pick: int, pages: int) -> None:
        """The first pages of a request become a prefix that others can use; the cache owns them from now on."""
        for request in self._distinct([pick]):
            n = min(pages, len(request) // self.page_size) * self.page_size
            if request.prefix is None and n:
                locs = self.pool.req_to_token[request.row, :n].to(torch.int64).clone()
                request.prefix = Prefix(locs, request.serials[:n], 1)
                self.prefixes.append(request.prefix)

    def drop_prefix(self, pick: int) -> None:
        unused = [p for p in self.prefixes if not p.users]
        if unused:
            prefix = unused[pick % len(unused)]
            self.allocator.free(prefix.locs[:: self.page_size])
            self.prefixes.remove(prefix)

    def ensure_capacity(self, pages: int, high: bool) -> None:
        before = self._snapshot()
        if not self.allocator.ensure_capacity(pages, 1 if high else 2):
            assert_same(before, self._snapshot())

    def halve(self, high: bool, keep: int) -> None:
        before = self._snapshot()
        if not self.allocator._halve_and_repack(1 if high else 2, keep):
            assert_same(before, self._snapshot())

    def restore_widths(self, max_slots: int, start: float, stop: float) -> None:
        self.staged.clear()
        before = self._snapshot()
        free = self.allocator.num_free_pages + (self.evictable_pages if self.allocator.evictor else 0)
        widened = self.allocator.restore_widths(max_slots, start_free=start, stop_free=start * stop)
        assert widened <= max_slots
        if free < start * self.config["num_pages"]:
            assert widened == 0
            assert_same(before, self._snapshot())

    def park(self, pick: int) -> None:
        self.staged.clear()
        for request in self._distinct([pick]):
            if request.prefix is not None:
                continue
            before = self._snapshot()
            hosts = self.allocator.park(self._own_locs(request))
            if self._refused(before, hosts):
                continue
            assert len(hosts) == -(-len(request) // self.page_size)
            self.parked.append(Parked(hosts, request.serials))
            self._forget(request)

    def unpark(self, pick: int, high: bool) -> None:
        if not self.parked:
            return
        rows = self.pool.alloc(1)
        if rows is None:
            return
        parked = self.parked[pick % len(self.parked)]
        before = self._snapshot()
        locs = self.allocator.unpark(parked.host_pages, high)
        if self._refused(before, locs):
            self.pool.free(rows)
            return
        assert locs.dtype == torch.int64
        assert len(locs) == len(parked.host_pages) * self.page_size
        self.parked.remove(parked)
        self.pool.write((rows[0], slice(0, len(parked.serials))), locs[: len(parked.serials)])
        self.requests.append(Request(rows[0], high, parked.serials))

    def drop_parked(self, pick: int) -> None:
        if self.parked:
            parked = self.parked.pop(pick % len(self.parked))
            self.allocator.drop_parked(parked.host_pages)

    def promote(self, pick: int) -> None:
        for request in self._distinct([pick]):
            request.high = True
            locs = self.pool.req_to_token[request.row, : len(request)]
            self.allocator.promote(locs)
            codes = self.allocator.ledger.page_code[locs.numpy() // self.page_size % (self.config["num_pages"] + 1)]
            assert (codes == 1).all()

    def backup_extend_restore(self, items: list[dict[str, Any]], form: int) -> None:
        """A speculative extend that is taken back, tokens and all."""
        self.staged.clear()
        state = self.allocator.backup_state()
        lengths = {id(r): len(r) for r in self.requests}
        known = set(lengths)
        batch = self._extend(items, form)
        self.allocator.restore_state(state)
        self._take_back(batch, lengths, known)
        self.staged.clear()

    def backup_free_restore(self, pick: int, items: list[dict[str, Any]], form: int) -> None:
        """A free and an extend that are taken back. If KV moved in between, the free stays done."""
        self.staged.clear()
        if not self.requests:
            return
        victim = self.requests[pick % len(self.requests)]
        locs = self.pool.req_to_token[victim.row, : len(victim)].clone()
        state = self.allocator.backup_state()
        moved = (self.allocator.num_repacks, self._evicted_pages())
        self._free(victim, 0)
        lengths = {id(r): len(r) for r in self.requests}
        batch = self._extend(items, form, write=False)
        undone = moved == (self.allocator.num_repacks, self._evicted_pages())
        self.allocator.restore_state(state)
        self._take_back(batch, lengths, set(lengths))
        if undone:
            victim.row = self.pool.alloc(1)[0]
            self.pool.write((victim.row, slice(0, len(victim))), locs)
            if victim.prefix is not None:
                victim.prefix.users += 1
            self.requests.append(victim)
        self.staged.clear()

    def rewrite(self, pick: int, position: int) -> None:
        """A token's K and V are written again, wherever its layers live now."""
        for request in self._distinct([pick]):
            if len(request) > request.shared:
                at = request.shared + position % (len(request) - request.shared)
                request.serials = request.serials.copy()
                request.serials[at] = self._serials(1)[0]
                self._write_kv(self.pool.req_to_token[request.row, at : at + 1], request.serials[at : at + 1])

    def step(self) -> None:
        """Enter a step, or leave the one that is open."""
        self.staged.clear()
        if self.scope is None:
            self.scope = self.allocator.step()
            self.scope.__enter__()
        else:
            scope, self.scope = self.scope, None
            scope.__exit__(None, None, None)
            assert not len(self.allocator.ledger.staging_assigned)

    def toggle_write_through(self) -> None:
        self.allocator.write_through = not self.allocator.write_through

    def misuse(self, pick: int, kind: int) -> None:
        """What a buggy caller might do: refused, and nothing changes."""
        occupied = self.allocator.ledger.occupied
        free = np.flatnonzero(~occupied)
        bad = [
            torch.tensor([0]),
            torch.tensor([int(free[pick % len(free)]) * self.page_size]),
            torch.tensor([-1 - pick]),
            torch.tensor([len(occupied) * self.page_size + pick]),
        ]
        before = self._snapshot()
        if kind < 4:
            with pytest.raises(DoubleFreeError):
                self.allocator.free(bad[kind])
        elif self.requests:
            request = self.requests[pick % len(self.requests)]
            seq = torch.tensor([len(request) + 1])
            wrong = self._last_locs([request]) + 1
            if self.page_size > 1:
                with pytest.raises(ConfigError):
                    self.allocator.alloc_decode(seq, seq, wrong)
        assert_same(before, self._snapshot())

    def clear(self, really: bool) -> None:
        if really:
            self.allocator.clear()
            if self.requests:
                self.pool.free([r.row for r in self.requests])
            self.requests, self.prefixes, self.parked = [], [], []
            self.staged.clear()
            assert self.allocator.num_free_pages == self.config["num_pages"]

    # -- the end of a run

    def finish(self) -> None:
        """Everything goes, and everything is back: a leak shows here at the latest."""
        if self.scope is not None:
            self.step()
        for request in list(self.requests):
            self._free(request, 1)
        for prefix in self.prefixes:
            self.allocator.free(prefix.locs)
        for parked in self.parked:
            self.allocator.drop_parked(parked.host_pages)
        self.prefixes, self.parked = [], []
        self.verify()
        assert self.allocator.num_free_pages == self.config["num_pages"]
        assert len(self.allocator.ledger.host_free) == self.config["host_pages"]

    # -- after every operation

    def verify(self) -> None:
        """The allocator's own recount, no slot leaked, and every live token of every layer bit for bit."""
        allocator, ledger = self.allocator, self.allocator.ledger
        allocator.check()
        in_rows = [(self.table[r.row, : len(r)], r.serials) for r in self.requests]
        live = in_rows + [(p.locs.numpy(), p.serials) for p in self.prefixes]
        assert np.count_nonzero(self.table) == sum(len(serials) for _, serials in in_rows)
        locs = np.concatenate([np.empty(0, dtype=np.int64), *(locs for locs, _ in live)])
        serials = np.concatenate([np.empty(0, dtype=np.int64), *(serials for _, serials in live)])
        slots, offsets = locs // self.page_size, locs % self.page_size
        named = np.zeros_like(ledger.occupied)
        named[slots] = True
        assert (named == ledger.occupied).all(), "a slot leaked or is gone"
        hosts_kept = sum(len(p.host_pages) for p in self.parked)
        assert int(ledger.host_parked.sum()) == hosts_kept
        want = k_bits(serials, self.layer_num)
        self._verify_layout(locs, want)
        self.turn += 1
        if len(locs):
            layers = range(self.layer_num) if self.read_all else [self.turn % self.layer_num]
            self._verify_read_kv(layers, torch.from_numpy(locs), want)
        for parked in self.parked:
            self._verify_parked(parked)
        if self.staged:
            self._verify_staging(slots, offsets, serials)

    def _places(self, locs: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Where the design says that each layer of each token lies, all [T, L]:
        (resident, device rows where resident, has a valid host copy, host rows where it has one)."""
        ledger, stride = self.allocator.ledger, self.config["num_pages"] + 1
        slots = locs // self.page_size
        position = self.positions[ledger.page_level[slots % stride]]
        resident = position >= 0
        hosts = ledger.host_plus_1[slots].astype(np.int64) - 1
        copied = (hosts >= 0)[:, None] & (~resident | ledger.backed[slots][:, None])
        assert (resident | copied).all(), "a layer is nowhere"
        host_rows = (np.arange(self.layer_num) * self.config["host_pages"] + hosts[:, None]) * self.page_size
        return (
            resident,
            locs[:, None] + position * stride * self.page_size,
            copied,
            host_rows + (locs % self.page_size)[:, None],
        )

    def _verify_layout(self, locs: np.ndarray, want: np.ndarray) -> None:
        """Reads the flat tensors: the device where a layer is resident, the host where it is not, or has a copy."""
        for where, flats in zip(self._by_side(locs), self.flats, strict=True):
            mask, rows = where
            at, bits = rows[mask], want[mask]
            for name, flat, expected in (("K", flats[0], bits), ("V", flats[1], bits ^ V_BITS)):
                wrong = flat[at] != expected
                assert not wrong.any(), f"{wrong.sum()} cells of {name} hold wrong bits, first row {at[wrong][0]}"

    def _by_side(self, locs: np.ndarray) -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
        resident, rows, copied, host_rows = self._places(locs)
        return (resident, rows), (copied, host_rows)

    def _verify_read_kv(self, layers: Iterable[int], locs: torch.Tensor, want: np.ndarray) -> None:
        for layer in layers:
            k, v = self.allocator.read_kv(layer, locs)
            assert (k.view(torch.int32).numpy().reshape(-1) == want[:, layer]).all(), f"K of layer {layer}"
            assert (v.view(torch.int32).numpy().reshape(-1) == want[:, layer] ^ V_BITS).all(), f"V of layer {layer}"

    def _verify_parked(self, parked: Parked) -> None:
        at = np.arange(len(parked.serials))
        hosts = parked.host_pages[at // self.page_size]
        rows = (np.arange(self.layer_num) * self.config["host_pages"] + hosts[:, None]) * self.page_size
        rows += (at % self.page_size)[:, None]
        want = k_bits(parked.serials, self.layer_num)
        assert np.array_equal(self.flats[1][0][rows], want), "parked K"
        assert np.array_equal(self.flats[1][1][rows], want ^ V_BITS), "parked V"

    def _verify_staging(self, slots: np.ndarray, offsets: np.ndarray, serials: np.ndarray) -> None:
        """Within a step a token keeps its staging location while its slot is narrow, wherever the slot moves."""
        ledger = self.allocator.ledger
        for i in np.flatnonzero(np.isin(serials, list(self.staged))):
            if ledger.page_level[slots[i] % ledger.page_stride] > 0:
                now = int(ledger.dynamic_of[slots[i]]) * self.page_size + int(offsets[i])
                assert now == self.staged[int(serials[i])], "a dynamic slot changed within its step"

    # -- helpers

    def _snapshot(self) -> dict[str, Any]:
        return snapshot(self.allocator)

    def _refused(self, before: dict[str, Any], result: Any) -> bool:
        if result is None:
            assert_same(before, self._snapshot())
            self.refused += 1
            return True
        self.served += 1
        return False

    def _evicted_pages(self) -> int:
        return sum(len(p.serials) for p in self.prefixes)

    def _distinct(self, picks: list[int]) -> list[Request]:
        if not self.requests:
            return []
        return list(dict.fromkeys(self.requests[pick % len(self.requests)] for pick in picks))

    def _serials(self, n: int) -> np.ndarray:
        self.next_serial += n
        return np.arange(self.next_serial - n, self.next_serial)

    def _last_locs(self, batch: list[Request]) -> torch.Tensor:
        return torch.tensor([int(self.table[r.row, len(r) - 1]) if len(r) else -1 for r in batch], dtype=torch.int64)

    def _priorities(self, batch: list[Request], form: int) -> Any:
        high = [r.high for r in batch]
        if form == 1:
            return high
        if form == 2 or len(set(high)) > 1:
            return torch.tensor(high)
        return None if high[0] else False

    def _own_locs(self, request: Request) -> torch.Tensor:
        return self.pool.req_to_token[request.row, request.shared : len(request)]

    def _extend(self, items: list[dict[str, Any]], form: int, write: bool = True) -> list[Request]:
        """The requests that got tokens; none if it was refused (then nothing changed)."""
        batch: list[Request] = []
        grows: list[int] = []
        created: list[Request] = []
        for item in items:
            if item["fresh"] or not self.requests:
                request = self._new_request(item)
                if request is None:
                    continue
                created.append(request)
            else:
                request = self.requests[item["pick"] % len(self.requests)]
            if request not in batch:
                batch.append(request)
                grow = item["pages"] * self.page_size + item["tokens"] % (self.page_size + 1)
                grows.append(min(grow, self.max_context_len - len(request)))
        if not batch:
            return []
        prefix = torch.tensor([len(r) for r in batch])
        seq = prefix + torch.tensor(grows)
        before = self._snapshot()
        result = self.allocator.alloc_extend(
            prefix, prefix.clone(), seq, seq.clone(), self._last_locs(batch), sum(grows), self._priorities(batch, form)
        )
        if self._refused(before, result):
            for request in created:
                if request.prefix is not None:
                    request.prefix.users -= 1
                self.pool.free(request.row)
            return []
        self.requests += created
        self._place(batch, grows, *result, write=write)
        return batch

    def _new_request(self, item: dict[str, Any]) -> Request | None:
        rows = self.pool.alloc(1)
        if rows is None:
            return None
        request = Request(rows[0], item["high"], np.empty(0, dtype=np.int64))
        if item["share"] and self.prefixes:
            prefix = self.prefixes[item["pick"] % len(self.prefixes)]
            prefix.users += 1
            request.prefix, request.serials = prefix, prefix.serials
            self.pool.write((request.row, slice(0, len(request))), prefix.locs)
        return request

    def _place(
        self,
        batch: list[Request],
        grows: list[int],
        out: torch.Tensor,
        dynamic: torch.Tensor | None,
        write: bool = True,
    ) -> None:
        """Check what an allocation returned, note it in req_to_token and the record, and write K and V."""
        assert out.dtype == torch.int64
        assert out.shape == (sum(grows),)
        locs, size = out.numpy(), self.page_size
        positions = np.concatenate([np.arange(len(r), len(r) + n) for r, n in zip(batch, grows, strict=True)])
        assert np.array_equal(locs % size, positions % size)
        at = 0
        for request, n in zip(batch, grows, strict=True):
            self.pool.write((request.row, slice(len(request), len(request) + n)), out[at : at + n])
            request.serials = np.concatenate([request.serials, self._serials(n)])
            slots = self.table[request.row, : len(request)] // size
            assert np.array_equal(slots, slots[::size].repeat(size)[: len(slots)]), "a page of tokens spans two slots"
            at += n
        serials = np.arange(self.next_serial - sum(grows), self.next_serial)
        self._verify_dynamic(locs, dynamic, serials)
        if write:
            self._write(out, serials)

    def _verify_dynamic(self, locs: np.ndarray, dynamic: torch.Tensor | None, serials: np.ndarray) -> None:
        ledger, size = self.allocator.ledger, self.page_size
        slots = locs // size
        narrow = ledger.page_level[slots % ledger.page_stride] > 0
        if dynamic is None:
            assert not narrow.any(), "a narrow token without a staging location"
            return
        assert narrow.any(), "staging for a batch that lies at full width"
        staged = dynamic.numpy()
        assert staged.shape == locs.shape
        assert not staged[~narrow].any()
        assert (ledger.page_code[staged[narrow] // size % ledger.page_stride] == 3).all()
        assert np.array_equal(staged[narrow] % size, locs[narrow] % size)
        pairs = np.unique(np.stack([slots[narrow], staged[narrow] // size]), axis=1)
        assert len(np.unique(pairs[0])) == len(np.unique(pairs[1])) == pairs.shape[1], "one dynamic slot each"
        if self.scope is not None:
            self.staged.update(zip(serials[narrow].tolist(), staged[narrow].tolist(), strict=True))

    def _write_kv(self, locs: torch.Tensor, serials: np.ndarray) -> None:
        bits = k_bits(serials, self.layer_num)
        for layer in range(self.layer_num):
            self._write_layer(layer, locs, bits)

    def _write_layer(self, layer: int, locs: torch.Tensor, bits: np.ndarray) -> None:
        column = bits[:, layer].copy()
        k = torch.from_numpy(column).view(torch.float32).view(-1, 1, 1)
        v = torch.from_numpy(column ^ np.int32(V_BITS)).view(torch.float32).view(-1, 1, 1)
        self.allocator.write_kv(layer, locs, k, v)

    def _write(self, locs: torch.Tensor, serials: np.ndarray) -> None:
        if not len(serials):
            return
        bits = k_bits(serials, self.layer_num)
        for (mask, rows), (k_flat, v_flat) in zip(self._by_side(locs.numpy()), self.flats, strict=True):
            k_flat[rows[mask]] = bits[mask]
            v_flat[rows[mask]] = bits[mask] ^ V_BITS
        layer = self.turn % self.layer_num
        for flats, (mask, rows) in zip(self.flats, self._by_side(locs.numpy()), strict=True):
            for flat in flats:  # poison what write_kv has to write
                flat[rows[:, layer][mask[:, layer]]] = -1
        self._write_layer(layer, locs, bits)

    def _free(self, request: Request, which: int) -> None:
        """Free a request by all its tokens, by the first of each page, or in reverse order."""
        locs = self._own_locs(request)
        locs = (locs, locs[:: self.page_size], locs.flip(0))[which].clone()
        self.allocator.free(locs)
        if request.prefix is not None:
            request.prefix.users -= 1
        self._forget(request)

    def _forget(self, request: Request) -> None:
        self.pool.free(request.row)
        self.requests.remove(request)

    def _take_back(self, batch: list[Request], lengths: dict[int, int], known: set[int]) -> None:
        for request in batch:
            if id(request) in known:
                n = lengths[id(request)]
                self.pool.write((request.row, slice(n, len(request))), 0)
                request.serials = request.serials[:n]
            else:
                if request.prefix is not None:
                    request.prefix.users -= 1
                self._forget(request)
