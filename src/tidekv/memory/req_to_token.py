"""Which encoded location holds each token of each live request: the main holder of locations."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch

from tidekv.errors import ConfigError, DoubleFreeError


class ReqToTokenPool:
    """`req_to_token`: [size, max_context_len], encoded locations, 0 where nothing is written.

    size              rows, that is live requests at a time
    max_context_len   tokens a request at most
    index_dtype       int64 by default; int32 only while every encoded location fits (the allocator checks)
    """

    def __init__(
        self,
        size: int,
        max_context_len: int,
        device: str | torch.device,
        index_dtype: torch.dtype = torch.int64,
    ) -> None:
        if size < 1 or max_context_len < 1:
            raise ConfigError(f"size and max_context_len must be >= 1, got {size} and {max_context_len}")
        if index_dtype not in (torch.int32, torch.int64):
            raise ConfigError(f"index_dtype must be int32 or int64, got {index_dtype}")
        self.size = size
        self.max_context_len = max_context_len
        self.device = torch.device(device)
        self.req_to_token = torch.zeros((size, max_context_len), dtype=index_dtype, device=self.device)
        self._free_rows = list(range(size - 1, -1, -1))
        self._live = np.zeros(size, dtype=bool)
        self._written = np.zeros(size, dtype=np.int64)  # columns [0, written) may hold locations

    def available_size(self) -> int:
        """Rows that `alloc` can still give."""
        return len(self._free_rows)

    def alloc(self, n: int) -> list[int] | None:
        """`n` rows, all zero, or None with nothing changed when fewer are free."""
        if n < 0:
            raise ConfigError(f"n must be >= 0, got {n}")
        if n > len(self._free_rows):
            return None
        rows = [self._free_rows.pop() for _ in range(n)]
        self._live[rows] = True
        return rows

    def free(self, rows: int | Iterable[int]) -> None:
        """Give rows back and zero them. `DoubleFreeError`, with nothing changed, for a row that is not live."""
        ids = [rows] if isinstance(rows, int) else [int(r) for r in rows]
        bad = [r for r in ids if not 0 <= r < self.size or not self._live[r]]
        if bad or len(set(ids)) != len(ids):
            raise DoubleFreeError(f"rows {bad or ids} are not live (each once); live rows: {self.live_rows().tolist()}")
        if ids:
            width = int(self._written[ids].max())
            for row in ids:  # a list of ids would go to the device, and wait for it; a request gives back one row
                self.req_to_token[row, :width] = 0
            self._live[ids] = False
            self._written[ids] = 0
            self._free_rows.extend(ids)

    def write(self, indices: tuple[int, slice] | tuple[torch.Tensor, torch.Tensor], locs: torch.Tensor | int) -> None:
        """`req_to_token[indices] = locs`. Indices are (row, slice), or two tensors (rows [T], positions [T])."""
        rows, columns = indices
        if isinstance(columns, slice):
            stop = self.max_context_len if columns.stop is None else columns.stop
            self._note_written(np.asarray(rows), stop)
        else:  # positions on the device are not read back: the whole row counts as written
            self._note_written(np.asarray(rows.cpu() if isinstance(rows, torch.Tensor) else rows), self.max_context_len)
        self.req_to_token[rows, columns] = locs.to(self.req_to_token.dtype) if isinstance(locs, torch.Tensor) else locs

    def write_tokens(
        self,
        rows: torch.Tensor,
        positions: torch.Tensor,
        locs: torch.Tensor,
        host_rows: np.ndarray,
        host_ends: np.ndarray,
    ) -> None:
        """As `write` with tensors, for callers who know on the host which rows ([R]) now end where ([R])."""
        self._note_written(host_rows, host_ends)
        self.req_to_token[rows, positions] = locs.to(self.req_to_token.dtype)

    def _note_written(self, rows: np.ndarray, ends: np.ndarray | int) -> None:
        if not self._live[rows].all():
            raise ConfigError(f"rows {np.atleast_1d(rows)[~np.atleast_1d(self._live[rows])].tolist()} are not live")
        if np.max(ends, initial=0) > self.max_context_len:
            raise ConfigError(f"a row has {self.max_context_len} columns (max_context_len), not {int(np.max(ends))}")
        np.maximum.at(self._written, rows, ends)

    def live_rows(self) -> np.ndarray:
        """Row ids in use, ascending, int64 on the host."""
        return np.flatnonzero(self._live)

    def written_width(self) -> int:
        """Columns that a remap has to look at: the largest end written in a live row."""
        return int(self._written.max())
