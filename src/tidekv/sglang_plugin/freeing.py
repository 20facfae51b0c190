"""Frees on their way: SGLang names pages by tensors, on a GPU behind queued work; they are booked once they are on the
host. Waits for the device only where a count or a page is needed (`collect`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tidekv.memory.ledger import IntArray

_new_event: Callable[..., Any] = torch.cuda.Event  # torch does not type its constructor


class Freeing:
    """release([n] virtual page ids, perhaps more than once each): book them, now."""

    def __init__(self, release: Callable[[IntArray], None]) -> None:
        self._release = release
        self._loose: list[torch.Tensor] | None = None  # None: no group is open
        self._exact: list[torch.Tensor] = []  # of the open group: each page once
        self._in_flight: list[tuple[torch.Tensor, Any, int | None]] = []  # (pinned copy, event, pages if known)

    def add(self, ids: torch.Tensor, count: int | None) -> None:
        """ids: pages of one free. count: how many distinct ones they are, where the caller knows."""
        if self._loose is not None:
            (self._loose if count is None else self._exact).append(ids.clone())
        elif not ids.is_cuda:
            self._release(ids.numpy())
        else:
            copy = torch.empty(ids.numel(), dtype=torch.int64, pin_memory=True)
            copy.copy_(ids.reshape(-1), non_blocking=True)
            event = _new_event()
            event.record()
            self._in_flight.append((copy, event, count))

    def begin(self) -> None:
        """Collect frees until the end of the group. A second begin goes on collecting."""
        if self._loose is None:
            self._loose, self._exact = [], []

    def end(self) -> None:
        """Do the collected frees."""
        loose, self._loose = self._loose, None
        exact, self._exact = self._exact, []
        if exact:
            ids = torch.cat(exact)
            self.add(ids, ids.numel())
        if loose:
            self.add(torch.cat(loose), None)

    def num_coming(self) -> int:
        """Distinct pages whose ids are still on their way. Waits for them where that is not known."""
        if any(count is None for _, _, count in self._in_flight):
            self.collect()
        return sum(count or 0 for _, _, count in self._in_flight)

    def collect(self) -> None:
        """Book what is on its way. At points fixed by counts, so that all ranks do it alike."""
        while self._in_flight:
            ids, event, _ = self._in_flight.pop(0)
            event.synchronize()
            self._release(ids.numpy())
