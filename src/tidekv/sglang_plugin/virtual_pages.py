"""Virtual page ids: what SGLang sees. Rows, tree nodes and batches hold them, and a repack never has to find those.

`first_loc[v]` is the location of the first token of virtual page v's slot (combined id * page_size), 0 where v is
free. It is the only holder of locations that the core has to rewrite.

    virtual loc  = v * page_size + offset                 SGLang: req_to_token, radix tree, out_cache_loc
    location     = first_loc[v] + offset                  the core: flat row of the slot's first cell

A fresh full-width page p gets the id p whenever that id is free. While every page in use is full width and has its own
id (`displaced` is 0), a virtual loc *is* the location, and SGLang's own kernels read the pool without knowing of this.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from tidekv.errors import DoubleFreeError, InvariantError
from tidekv.memory.ledger import BoolArray, IntArray

_new_event: Callable[..., Any] = torch.cuda.Event  # torch does not type its constructor


class VirtualPages:
    """Ids 1..num_virtual for slots of a pool with pages 1..num_physical. On the host; `on_device` mirrors the table."""

    def __init__(self, num_virtual: int, num_physical: int, page_size: int, device: torch.device) -> None:
        self.num_virtual, self.num_physical, self.page_size = num_virtual, num_physical, page_size
        self.device = device
        self.first_loc = torch.zeros(num_virtual + 1, dtype=torch.int64)
        self._first_loc: IntArray = self.first_loc.numpy()  # the same memory
        # Which assignment gave out each id: who kept an id sees by it whether the id was given to somebody else since.
        self.birth: IntArray = np.zeros(num_virtual + 1, dtype=np.int64)
        self._num_births = 0
        self.clear()

    def clear(self) -> None:
        """Every id is free."""
        self.first_loc.zero_()
        self.num_live = 0
        # Ids above P first: those up to P are kept for the pages whose own ids they are. Lowest on top of each stack.
        self._spare: list[int] = list(range(self.num_virtual, self.num_physical, -1))
        self._displaced: int | None = 0
        self._mirror: tuple[torch.Tensor, torch.cuda.Event] | None = None

    def tensors(self) -> list[torch.Tensor]:
        """The holder of locations, for `register_loc_holder`. Asking for it means that it may be about to change."""
        self._displaced, self._mirror = None, None
        return [self.first_loc]

    @property
    def num_free(self) -> int:
        """Ids that can still be handed out."""
        return self.num_virtual - self.num_live

    @property
    def displaced(self) -> int:
        """Ids in use whose slot does not start at the page of the same number."""
        if self._displaced is None:
            ids = np.arange(self.num_virtual + 1, dtype=np.int64) * self.page_size
            self._displaced = int(((self._first_loc != ids) & (self._first_loc > 0)).sum())
        return self._displaced

    def assign(self, slots: IntArray, is_full: BoolArray) -> IntArray:
        """Ids for new slots ([n] combined ids): its own number for a full-width page if that is free, else a spare."""
        if not len(slots):
            return slots
        own = is_full & (slots <= self.num_physical)
        own[own] = self._first_loc[slots[own]] == 0
        ids = np.where(own, slots, 0)
        self._first_loc[ids[own]] = slots[own] * self.page_size
        others = np.flatnonzero(~own)
        if len(others):
            ids[others] = self._take(len(others))
            self._first_loc[ids[others]] = slots[others] * self.page_size
            if self._displaced is not None:
                self._displaced += int((ids[others] != slots[others]).sum())
        self.num_live += len(ids)
        self._mirror = None
        self._num_births += 1
        self.birth[ids] = self._num_births
        return ids

    def _take(self, n: int) -> IntArray:
        if n > self.num_free:
            raise InvariantError(f"{n} virtual pages wanted, {self.num_free} free: the caller has not checked")
        spare = min(n, len(self._spare))
        taken = [self._spare.pop() for _ in range(spare)]
        if n > spare:
            free = np.flatnonzero(self._first_loc[1 : self.num_physical + 1] == 0) + 1
            taken += free[::-1][: n - spare].tolist()
        return np.array(taken, dtype=np.int64)

    def first_locs(self, ids: IntArray) -> IntArray:
        """Location of the first token of each of these virtual pages (any shape); 0 for 0 and for free ids."""
        found: IntArray = self._first_loc[ids]
        return found

    def slots_of(self, ids: IntArray) -> IntArray:
        """Combined ids of these virtual pages (any shape); 0 for 0 and for free ids."""
        slots: IntArray = self._first_loc[ids] // self.page_size
        return slots

    def release(self, ids: IntArray) -> IntArray:
        """Give ids ([n], each once) back; returns their slots. `DoubleFreeError`, nothing changed, if one is not in
        use."""
        inside = (ids > 0) & (ids <= self.num_virtual)
        bad = ids[~inside | (self._first_loc[np.where(inside, ids, 0)] == 0)]
        if len(bad) or len(np.unique(ids)) != len(ids):
            raise DoubleFreeError(f"virtual pages {(bad if len(bad) else ids)[:8].tolist()} are not in use (each once)")
        slots = self.slots_of(ids)
        if self._displaced is not None:
            self._displaced -= int((slots != ids).sum())
        self._first_loc[ids] = 0
        self._spare.extend(np.sort(ids[ids > self.num_physical])[::-1].tolist())
        self.num_live -= len(ids)
        return slots

    def free_ids(self) -> IntArray:
        """All free ids, ascending."""
        free: IntArray = np.flatnonzero(self._first_loc[1:] == 0) + 1
        return free

    def locations(self, virtual_locs: torch.Tensor) -> torch.Tensor:
        """Where virtual locs (any shape, on the device; negative: none) lie: int64 of the same shape."""
        locs = virtual_locs.to(torch.int64)
        if not self.displaced:
            return locs
        table = self.first_loc if self.device.type != "cuda" else self._on_device()
        found = table[(locs // self.page_size).clamp_min(0)] + locs % self.page_size
        return torch.where(locs >= 0, found, locs)

    def _on_device(self) -> torch.Tensor:
        """The table on the device, for the current stream: scheduling and the forward may have one each."""
        stream = torch.cuda.current_stream(self.device)
        if self._mirror is None:
            table = self.first_loc.pin_memory().to(self.device, non_blocking=True)
            event = _new_event()
            event.record(stream)
            self._mirror = table, event
        table, event = self._mirror
        stream.wait_event(event)
        table.record_stream(stream)  # it may be replaced while this stream still reads it
        return table

    def check(self) -> None:
        """Recount; `InvariantError` for the first thing that does not add up."""
        live = np.flatnonzero(self._first_loc)
        if len(live) != self.num_live:
            raise InvariantError(f"{len(live)} virtual pages in use, {self.num_live} booked")
        spare = np.array(self._spare, dtype=np.int64)
        free_high = np.flatnonzero(self._first_loc[self.num_physical + 1 :] == 0) + self.num_physical + 1
        if not np.array_equal(np.sort(spare), free_high):
            raise InvariantError("the spare virtual ids are not the free ones above the physical pages")
        if (self._first_loc[live] % self.page_size).any() or len(np.unique(self._first_loc[live])) != len(live):
            raise InvariantError("two virtual pages name one slot, or a table entry is not the start of a slot")
