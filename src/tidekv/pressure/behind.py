"""Copies from the host that run under a step instead of before it. Decides nothing, books nothing.

    plan of step N      add()      widened slots: their books and locations are those of the new pages at once
                        fork()     the copies start behind what the compute stream has queued so far
    forward of step N              reads none of these pages, and neither writes them nor their host pages
                        join()     what is queued from here on, the next plan's moves first, waits for the copies

So the only other reader or writer of these pages can be the rest of the same plan: whoever touches them there calls
`settle()` first, and the copies are done at once on the compute stream, as without this class. On the CPU the copies
run in `join`, the latest moment that is allowed, so that a test sees who reads too early.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from tidekv.kernels.move import link_programs
from tidekv.memory.ledger import NO_SLOTS, IntArray

CopyCells = Callable[[IntArray, IntArray, "int | None"], None]  # (host flat pages, device flat pages, programs)

_new_stream: Callable[..., Any] = torch.cuda.Stream  # torch does not type its constructor


class CopiesBehind:
    """copy: does a list of copies on the current stream. `is_collecting` is set by `collecting()` alone.

    cell_bytes: K and V of a cell; they decide how few programs copy beside a step.
    """

    def __init__(self, device: torch.device, copy: CopyCells, page_stride: int, cell_bytes: int) -> None:
        self._copy, self._page_stride = copy, page_stride
        self._programs_beside = link_programs(cell_bytes // 2)
        self._device = device
        self._stream: Any = None  # made with the first copies: most engines never need one
        self._pending: list[tuple[IntArray, IntArray]] = []
        self._forked = False
        self.is_collecting = False
        self.num_cells = 0  # copied behind a step, or waiting for one

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """Inside, what a restore brings from the host is kept for `fork`."""
        self.is_collecting = True
        try:
            yield
        finally:
            self.is_collecting = False

    def add(self, host_cells: IntArray, device_cells: IntArray) -> None:
        """Keep these copies: [n] host flat pages -> [n] device flat pages."""
        self._pending.append((host_cells, device_cells))
        self.num_cells += len(host_cells)

    @property
    def is_pending(self) -> bool:
        """There are copies that no step has taken along yet."""
        return bool(self._pending)

    def touches(self, slots: IntArray) -> bool:
        """Some of these slots ([n] combined ids) lie in a page that waits for copies."""
        pages = [np.unique(device % self._page_stride) for _, device in self._pending]
        return bool(np.isin(slots % self._page_stride, np.concatenate([NO_SLOTS, *pages])).any())

    def settle(self) -> None:
        """Do them now, on the current stream: somebody needs these pages in this very plan."""
        for host, device in self._take():
            self.num_cells -= len(host)
            self._copy(host, device, None)

    def fork(self) -> None:
        """The plan is made: the copies start, beside the step that is launched next."""
        if not self._pending or self._device.type != "cuda":
            return
        if self._stream is None:
            self._stream = _new_stream(self._device)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            for host, device in self._take():
                self._copy(host, device, self._programs_beside)
        self._forked = True

    def join(self) -> None:
        """The step is launched: later work on the current stream may use the pages."""
        if self._forked:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)
            self._forked = False
        for host, device in self._take():
            self._copy(host, device, None)

    def _take(self) -> list[tuple[IntArray, IntArray]]:
        pending, self._pending = self._pending, []
        return pending
