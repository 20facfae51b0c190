"""Everyone who keeps copies of locations, so that a repack can rewrite them all by one lookup table."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from tidekv.errors import ConfigError
from tidekv.kernels import remap
from tidekv.memory.ledger import IntArray
from tidekv.memory.req_to_token import ReqToTokenPool
from tidekv.memory.upload import upload

# Tensors (any device, int32 or int64, any shape) that a repack rewrites in place; 0, the sink, stays 0. A callable is
# asked for its tensors at every repack, for holders whose tensors come and go.
LocHolder = torch.Tensor | Callable[[], Sequence[torch.Tensor]]


class LocHolders:
    """`req_to_token` (live rows only) and whatever else was registered."""

    def __init__(self, req_to_token_pool: ReqToTokenPool | None, page_size: int) -> None:
        self.req_to_token_pool = req_to_token_pool
        self.page_size = page_size
        self._others: list[LocHolder] = []
        self._followers: list[Callable[[IntArray], None]] = []

    def register(self, holder: LocHolder) -> Callable[[], None]:
        """Adds a holder; the returned function takes it out again."""
        if not isinstance(holder, torch.Tensor) and not callable(holder):
            raise ConfigError(
                f"a location holder is a tensor or a callable that gives tensors, got {type(holder).__name__}"
            )
        self._others.append(holder)

        def unregister() -> None:
            self._others = [other for other in self._others if other is not holder]

        return unregister

    def follow(self, remap: Callable[[IntArray], None]) -> None:
        """`remap(lookup)` is called at every repack: for a copy on the host of what a holder says already. The checker
        does not count it as a holder."""
        self._followers.append(remap)

    def other_tensors(self) -> list[torch.Tensor]:
        """The tensors of all holders but `req_to_token`, as they are now."""
        tensors: list[torch.Tensor] = []
        for holder in self._others:
            tensors.extend([holder] if isinstance(holder, torch.Tensor) else holder())
        return tensors

    def remap(self, lookup: IntArray) -> None:
        """`loc -> lookup[loc // page_size] * page_size + loc % page_size` in every holder. One launch a tensor."""
        tables: dict[torch.device, torch.Tensor] = {}

        def table(device: torch.device) -> torch.Tensor:
            if device not in tables:
                tables[device] = upload(device, (lookup,))[0]
            return tables[device]

        pool = self.req_to_token_pool
        if pool is not None and len(pool.live_rows()):
            rows = upload(pool.device, (pool.live_rows(),))[0]
            remap.remap_rows_(pool.req_to_token, rows, pool.written_width(), table(pool.device), self.page_size)
        for tensor in self.other_tensors():
            remap.remap_locs_(tensor, table(tensor.device), self.page_size)
        for follower in self._followers:
            follower(lookup)

    def remapped(self, locs: torch.Tensor, lookup: IntArray) -> torch.Tensor:
        """A rewritten copy of `locs`; the argument is left alone."""
        return remap.remap_locs_(locs.clone(), upload(locs.device, (lookup,))[0], self.page_size)

    def live_slots(self) -> tuple[IntArray, IntArray]:
        """For the checker: (one entry a slot and live row that holds it, slots that the other holders name)."""
        in_rows: IntArray = np.empty(0, dtype=np.int64)
        others = [t.reshape(-1).cpu().numpy().astype(np.int64) // self.page_size for t in self.other_tensors()]
        elsewhere = np.unique(np.concatenate([in_rows, *others]))
        pool = self.req_to_token_pool
        if pool is not None and len(pool.live_rows()):
            table = pool.req_to_token[torch.from_numpy(pool.live_rows()).to(pool.device)].cpu().numpy()
            row, column = np.nonzero(table)
            slots = table[row, column].astype(np.int64) // self.page_size
            if len(slots):
                least = int(slots.min())
                keys = row * (int(slots.max()) - least + 1) + slots - least  # one key a (row, slot)
                in_rows = slots[np.unique(keys, return_index=True)[1]]
        return in_rows, elsewhere
