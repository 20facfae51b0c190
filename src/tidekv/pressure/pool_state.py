"""What the allocator owns when nobody allocates: books, pools, holders, frees, counts, snapshots, access to KV.

`DynamicPagedTokenToKVPoolAllocator` adds how room is found and made.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from tidekv.errors import ConfigError, InvariantError
from tidekv.memory import contract, kv_access
from tidekv.memory.device_pool import DeviceKVPool
from tidekv.memory.host_pool import HostKVPool
from tidekv.memory.ledger import DYNAMIC, HIGH, LOW, NO_SLOTS, IntArray, Ledger
from tidekv.memory.loc_holders import LocHolder, LocHolders
from tidekv.memory.req_to_token import ReqToTokenPool
from tidekv.memory.upload import upload
from tidekv.pressure import repack
from tidekv.pressure.decision import Decision
from tidekv.pressure.ladder import Budgets

INT32_MAX = 2**31 - 1
_new_event: Callable[..., Any] = torch.cuda.Event  # torch does not type its constructor


class Evictor(Protocol):
    """A prefix cache that gives up unreferenced pages before anything narrows (rung 0)."""

    @property
    def evictable_pages(self) -> int: ...

    def peek_evictable(self, n: int) -> IntArray:
        """Locations (first token of each page) that `evict(n)` would drop; changes nothing."""

    def evict(self, n: int) -> IntArray:
        """Drop them and return them. The allocator frees the pages."""


@dataclass(frozen=True)
class AllocatorState:
    """What `backup_state` gives and `restore_state` takes."""

    ledger: Ledger
    num_repacks: int
    num_evicted_pages: int
    next_stamp: int


class PagedPoolState:
    """The state of a layer-elastic pool; see `DynamicPagedTokenToKVPoolAllocator` for the arguments."""

    def __init__(
        self,
        size: int,
        page_size: int,
        dtype: torch.dtype,
        device: str | torch.device,
        kvcache: DeviceKVPool,
        need_sort: bool = False,
        *,
        req_to_token_pool: ReqToTokenPool | None = None,
        host_pool: HostKVPool | None = None,
        low_max_pages: int | float | None = None,
        high_reserved_pages: int | float | None = None,
        dynamic_max_pages: int | float | None = None,
        min_slot_width: int = 2,
        write_through: bool = False,
    ) -> None:
        geometry = kvcache.geometry
        for name, got, want in (
            ("page_size", page_size, geometry.page_size),
            ("size", size, geometry.num_pages * geometry.page_size),
            ("dtype", dtype, geometry.dtype),
        ):
            if got != want:
                raise ConfigError(f"{name} must be {want}, as in the geometry of the pool, got {got}")
        is_int32 = req_to_token_pool is not None and req_to_token_pool.req_to_token.dtype == torch.int32
        if is_int32 and geometry.flat_rows > INT32_MAX:
            raise ConfigError(
                f"encoded locations reach {geometry.flat_rows}, over int32: make req_to_token int64, or lower num_pages"
            )
        self.size, self.page_size, self.dtype, self.device = size, page_size, dtype, torch.device(device)
        self.geometry, self.kvcache, self.need_sort = geometry, kvcache, need_sort
        self.req_to_token_pool = req_to_token_pool
        steps = geometry.ladder(min_slot_width)
        if host_pool is None:
            # Pinned memory is real memory: as much as the device has. On the CPU untouched memory costs nothing: room
            # for every slot that the pool could ever hold.
            slots = geometry.num_pages << (0 if self.device.type == "cuda" else len(steps) - 1)
            host_pool = HostKVPool(geometry, slots * geometry.page_bytes, materialize=kvcache.has_storage)
        self.host_pool = host_pool
        self.write_through = write_through
        # On CUDA a mixed batch at full width takes pages as its requests come: high before low would cost an upload and
        # half of the call's time again, and one free page is as good as another.
        self.mixed_in_one_run = self.device.type == "cuda"
        pages = geometry.num_pages
        usual = Budgets.defaults(pages, geometry.layer_num)
        low = contract.budget_pages("low_max_pages", low_max_pages, usual.low_max_pages, pages)
        staging = contract.budget_pages("dynamic_max_pages", dynamic_max_pages, usual.dynamic_max_pages, pages)
        high = contract.budget_pages("high_reserved_pages", high_reserved_pages, max(0, pages - low - staging), pages)
        self.budgets = Budgets(low, high, staging)
        self.ledger = Ledger(geometry, steps, self.host_pool.num_pages, staging)
        self.repacker = repack.Repacker(kvcache, self.host_pool)
        self.evictor: Evictor | None = None
        self.loc_holders = LocHolders(req_to_token_pool, page_size)
        self._free_group: IntArray | None = None
        self._frees_in_flight: list[tuple[torch.Tensor, torch.cuda.Event]] = []
        self._decision: Decision | None = None
        self._device_free_list: tuple[int, torch.Tensor] = (-1, torch.empty(0, dtype=torch.int64))
        self._in_step = False
        # Of this step: the slots that each call gave tokens to (read only if something gets narrow), with the number of
        # lookup tables that were applied before it; and those tables.
        self._written: list[tuple[Callable[[], IntArray], int]] = []
        self._lookups: list[IntArray] = []
        self.may_halve = True  # False: the ladder stops at rung 0, and the scheduler chooses what narrows
        self.num_halvings = {HIGH: 0, LOW: 0}
        self.num_merges = self.num_pages_freed = self.num_restores = self.num_repacks = self.num_evicted_pages = 0
        self.refusals: list[str] = []  # why halvings were refused, newest last, at most 32
        # Of the last allocating call (or `unpark`), for callers with page ids of their own: the slots that it opened,
        # request after request in the caller's order.
        self.new_slots: IntArray = NO_SLOTS
        # False: calls return None for `dynamic_indices`, and who runs the step looks staging up in the books, as
        # `host_batch` does. A tensor of it takes ten launches.
        self.gives_dynamic_indices = True

    def promote(self, locs: torch.Tensor) -> None:
        """Pages of these locations count as high from now on: a page shared with a high request is a high page."""
        self.ledger.promote(locs.cpu().numpy().astype(np.int64) // self.page_size)

    # ==== freeing ===============================================================================================

    def free(self, free_index: torch.Tensor) -> None:
        """Free the slots that these locations lie in: any subset of a slot's tokens frees the slot, as in SGLang.

        `DoubleFreeError`, with nothing changed, for what is not handed out. On CUDA the locations are read back
        behind the queued work without waiting for it; a bad free is then reported by the next call that needs the
        freed pages.
        """
        contract.check_locs("free_index", free_index)
        if free_index.numel() == 0:
            return
        if self.device.type == "cuda" and self._free_group is None:
            self._free_later(free_index)
            return
        locs = free_index.cpu().numpy().astype(np.int64, copy=False).reshape(-1)
        slots = contract.slots_to_free(self.ledger, locs, self._collected_frees())
        if self._free_group is None:
            self.ledger.release(slots)
        else:
            self._free_group = np.concatenate([self._free_group, slots])

    def free_slots(self, slots: IntArray) -> None:
        """Free slots whose combined ids ([n]) the caller knows on the host. `DoubleFreeError`: nothing changed."""
        self._collect_freed()
        self.ledger.release(contract.slots_to_free(self.ledger, slots * self.page_size, self._collected_frees()))

    def free_group_begin(self) -> None:
        """Frees until `free_group_end` are collected and done at once. They are checked at once all the same."""
        self._collect_freed()
        if self._free_group is None:  # a second begin goes on collecting: nothing collected is lost
            self._free_group = NO_SLOTS

    def free_group_end(self) -> None:
        """Do the collected frees."""
        group, self._free_group = self._free_group, None
        if group is not None:
            self.ledger.release(group)

    def _collected_frees(self) -> IntArray:
        return NO_SLOTS if self._free_group is None else self._free_group

    def _free_later(self, locs: torch.Tensor) -> None:
        """Read the locations back behind the queued work: no wait here, the event is waited for when pages run
        short."""
        copy = torch.empty(locs.numel(), dtype=torch.int64, pin_memory=True)
        copy.copy_(locs.reshape(-1), non_blocking=True)
        event = _new_event()
        event.record()
        self._frees_in_flight.append((copy, event))

    def _collect_freed(self) -> None:
        """Book the frees whose locations are still on their way. Called at points fixed by counts, never by a query."""
        while self._frees_in_flight:
            locs, event = self._frees_in_flight.pop(0)
            event.synchronize()
            self.ledger.release(contract.slots_to_free(self.ledger, locs.numpy(), NO_SLOTS))

    def clear(self) -> None:
        """Everything is free and full width again; all locations handed out before are void."""
        self._frees_in_flight, self._free_group = [], None
        version = self.ledger.free_list.version
        self.ledger.clear()
        self.ledger.free_list.version = version + 1

    # ==== counts, state, holders, KV ==============================================================================

    @property
    def high_used(self) -> int:
        """Pages of high priority."""
        self._collect_freed()
        return self.ledger.used[HIGH]

    @property
    def low_used(self) -> int:
        """Pages of low priority."""
        self._collect_freed()
        return self.ledger.used[LOW]

    @property
    def dynamic_used(self) -> int:
        """Staging pages; 0 while nothing is narrow."""
        self._collect_freed()
        return self.ledger.used[DYNAMIC]

    @property
    def num_free_pages(self) -> int:
        """Pages that nobody owns, those waiting to be sorted in included."""
        self._collect_freed()
        return self.ledger.num_free_pages

    @property
    def high_current_slot_width(self) -> int:
        """Width at which new slots of high priority are opened."""
        return self.ledger.ladder[self.ledger.level[HIGH]]

    @property
    def low_current_slot_width(self) -> int:
        """Width at which new slots of low priority are opened."""
        return self.ledger.ladder[self.ledger.level[LOW]]

    @property
    def free_pages(self) -> torch.Tensor:
        """Free page ids on the device, next first; those waiting to be sorted in come last."""
        self._collect_freed()
        return torch.from_numpy(self.ledger.free_list.all_pages()).to(self.device)

    def backup_state(self) -> AllocatorState:
        """A snapshot for `restore_state`, to take back speculative allocations."""
        self._collect_freed()
        return AllocatorState(self.ledger.clone(), self.num_repacks, self.num_evicted_pages, self.ledger.next_stamp)

    def restore_state(self, state: AllocatorState) -> None:
        """Undo the allocations (and frees) since `backup_state`.

        If slots were repacked in between, KV has moved and stays where it is; prefixes evicted in between are gone from
        their cache. Then the slots allocated since are freed, and frees done since stay done.
        """
        self._collect_freed()
        if (state.num_repacks, state.num_evicted_pages) == (self.num_repacks, self.num_evicted_pages):
            version = self.ledger.free_list.version
            self.ledger = state.ledger.clone()
            self.ledger.free_list.version = version + 1  # the device's mirror may be of another order
        else:
            since = np.flatnonzero(self.ledger.occupied & (self.ledger.stamp >= state.next_stamp))
            self.ledger.release(since)

    def _slots_on_device(self, slots: IntArray, is_run: bool) -> tuple[torch.Tensor, tuple[int, int]]:
        """A tensor on the device and the run of it that is `slots`."""
        if is_run:
            return self._free_list_run(len(slots))
        return torch.from_numpy(slots).to(self.device, non_blocking=True), (0, len(slots))

    def _locs_of(self, slots: IntArray, is_run: bool) -> torch.Tensor:
        """[len(slots) * page_size] all locations of these slots, in their order."""
        there, (first, count) = self._slots_on_device(slots, is_run)
        offsets = torch.arange(self.page_size, device=self.device)
        return (there[first : first + count, None] * self.page_size + offsets).reshape(-1)

    def _free_list_run(self, n: int) -> tuple[torch.Tensor, tuple[int, int]]:
        """The `n` page ids that the ledger has just handed out, as a run of the device's mirror of the free list: no
        copy, and no slice, which would cost as much as the rest of the call."""
        pages = self.ledger.free_list
        if self._device_free_list[0] != pages.version:
            self._device_free_list = (pages.version, upload(self.device, (pages.pages,))[0])
        return self._device_free_list[1], (pages.head - n, n)

    def register_loc_holder(self, holder: LocHolder) -> Callable[[], None]:
        """Tensors of locations (or a callable that gives them) to rewrite in place at every repack. Returns the way
        out."""
        return self.loc_holders.register(holder)

    def write_kv(self, layer: int, locs: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """K and V [T, heads, dim] of any layer of live tokens, wherever the layer lives. Slow; for tests and tools."""
        kv_access.write_kv(self.ledger, self.kvcache, self.host_pool, layer, locs.cpu().numpy().astype(np.int64), k, v)

    def read_kv(self, layer: int, locs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(k, v) [T, heads, dim] of any layer of live tokens, wherever the layer lives. Slow; for tests and tools."""
        return kv_access.read_kv(self.ledger, self.kvcache, self.host_pool, layer, locs.cpu().numpy().astype(np.int64))

    def check(self) -> None:
        """Recount everything from scratch; `InvariantError` for the first thing that does not add up."""
        self._collect_freed()
        self.ledger.check()
        in_rows, elsewhere = self.loc_holders.live_slots()
        elsewhere = elsewhere[elsewhere > 0]  # 0 is the sink, a negative location is "none"
        for name, slots in (("a live row", in_rows), ("a registered holder", elsewhere)):
            dead = slots[~self.ledger.is_slot(slots)]
            if len(dead):
                raise InvariantError(f"{name} names slot {int(dead[0])}, which is not occupied")
        slots, counts = np.unique(in_rows, return_counts=True)
        stray = slots[(counts > 1) & ~np.isin(slots, elsewhere)]
        if len(stray):
            raise InvariantError(f"slot {int(stray[0])} belongs to two requests and the prefix cache does not share it")
