"""Where a narrowed step finds each page and writes each new token, layer by layer. On the device, made before layer
0."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tidekv.attention.page_tables import HostWrites, NarrowTables, PackedBatch
from tidekv.kernels import tables as kernels
from tidekv.memory.ledger import Ledger


@dataclass(frozen=True)
class StepTables:
    """All layers of one step.

    pages       one [L, B, N] int64 for each part: flat pages, 0 where the part does not see the page
    token_rows  [L, T] int64: flat row of each new token, in its slot or in its staging cell; None at full width
    host_rows   [L, h] int64: row of the host pool for each token that is written there, -1 in layers that are not;
                None if none is
    """

    pages: tuple[torch.Tensor, ...]
    token_rows: torch.Tensor | None
    host_rows: torch.Tensor | None


class LayerTables:
    """Makes them: one launch a part and one for the tokens, whatever the number of layers; none at full width."""

    def __init__(self, ledger: Ledger, device: torch.device) -> None:
        self.page_stride = ledger.page_stride
        self.row_stride = ledger.geometry.pool_stride
        self.host_rows_a_layer = ledger.num_host_pages * ledger.geometry.page_size
        self.resident_pos = torch.from_numpy(ledger.resident_pos).to(device)
        self.layers = torch.arange(ledger.geometry.layer_num, device=device)

    def build(self, batch: PackedBatch) -> StepTables:
        """For the batch as it is now."""
        token_rows = None
        pages: tuple[torch.Tensor, ...] = ()
        if batch.narrow is not None:
            token_rows = self._token_rows(batch, batch.narrow)
            pages = tuple(self._pages(batch, batch.narrow, part) for part in range(len(batch.narrow.dynamic)))
        return StepTables(pages, token_rows, None if batch.host_writes is None else self._host_rows(batch.host_writes))

    def _pages(self, batch: PackedBatch, narrow: NarrowTables, part: int) -> torch.Tensor:
        """[L, B, N]. Part 0 sees all resident pages and its own staged ones; a later part its own staged ones only."""
        table = kernels.layer_tables(
            batch.slots,
            narrow.dynamic[part],
            narrow.level,
            self.resident_pos,
            narrow.position[part],
            self.layers,
            self.page_stride,
        )
        if part > 0:
            away = self.resident_pos[narrow.level.long()].movedim(-1, 0) < 0  # [L, B, N]
            table = torch.where(away & (narrow.dynamic[part] > 0), table, 0)
        return table.contiguous()

    def _token_rows(self, batch: PackedBatch, narrow: NarrowTables) -> torch.Tensor:
        return kernels.token_rows(
            batch.locs,
            narrow.token_dynamic,
            narrow.token_level,
            None,
            self.resident_pos,
            narrow.position[0],
            self.row_stride,
        )

    def _host_rows(self, writes: HostWrites) -> torch.Tensor:
        rows = writes.base_rows + self.layers[:, None] * self.host_rows_a_layer
        return torch.where(writes.layers, rows, -1)
