"""Apply: what a plan means for K and V, as lists of flat pages and a fixed number of launches. Decides nothing.

Order of one repack:  back up (device -> host)  ->  A in-page halving  ->  B cross-page merge  ->  C remap (by the
allocator). Slots that both halve and move skip A: B reads their old layout with a stride and writes the new one, so
their bytes move once. B runs after A, because the receiving cells are those that A has just compacted away.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from tidekv.kernels import move as kernels
from tidekv.memory.device_pool import DeviceKVPool
from tidekv.memory.host_pool import HostKVPool
from tidekv.memory.ledger import NO_SLOTS, IntArray, Ledger
from tidekv.memory.upload import upload
from tidekv.pressure.behind import CopiesBehind
from tidekv.pressure.plan import RepackPlan


@dataclass(frozen=True)
class CellCopies:
    """Flat pages to copy: [n] int64 each. Which pool each side indexes is said by the field that holds it."""

    src: IntArray
    dst: IntArray

    def __len__(self) -> int:
        return len(self.src)


NO_COPIES = CellCopies(NO_SLOTS, NO_SLOTS)


@dataclass(frozen=True)
class Work:
    """The device's part of one booked decision. Empty parts launch nothing."""

    name: str
    code: int
    to_host: CellCopies = NO_COPIES
    compact_slots: IntArray = field(default_factory=lambda: NO_SLOTS)
    compact_factor: IntArray = field(default_factory=lambda: NO_SLOTS)
    new_width: int = 0
    on_device: CellCopies = NO_COPIES
    from_host: CellCopies = NO_COPIES
    lookup: IntArray | None = None  # over combined ids; None: no location changed
    freed_pages: int = 0


@dataclass
class MoveCounters:
    """Bytes (K and V) and launches since the start."""

    device_bytes: int = 0
    to_host_bytes: int = 0
    from_host_bytes: int = 0
    launches: int = 0
    by_name: dict[str, int] = field(default_factory=dict)


def leaving_cells(
    ledger: Ledger, slots: IntArray, from_level: IntArray, to_level: int | None, host_pages: IntArray
) -> CellCopies:
    """Cells of the layers that `slots` lose: device flat page -> host flat page, layer-major so that host runs are
    long.

    `to_level` None: all resident layers leave (parking).
    """
    src, dst = [NO_SLOTS], [NO_SLOTS]
    for level in range(len(ledger.ladder)):
        here = from_level == level
        if not here.any():
            continue
        position = ledger.resident_pos[level].astype(np.int64)
        leaves = position >= 0
        if to_level is not None:
            leaves &= ledger.resident_pos[to_level] < 0
        layers = np.flatnonzero(leaves)
        src.append((slots[here][None, :] + position[layers][:, None] * ledger.page_stride).ravel())
        dst.append((layers[:, None] * ledger.num_host_pages + host_pages[here][None, :]).ravel())
    return CellCopies(np.concatenate(src), np.concatenate(dst))


def work_of_repack(plan: RepackPlan, ledger: Ledger) -> Work:
    """Book `plan` and say what the device has to do for it."""
    backed = ledger.backed[plan.shrink]
    plan_shrink_level = plan.from_level.astype(np.int64)
    target = 0 if plan.target_level is None else plan.target_level
    moved = np.zeros(ledger.geometry.num_combined, dtype=np.bool_)
    moved[plan.moves.src] = True
    factor_of = np.ones(ledger.geometry.num_combined, dtype=np.int64)
    factor_of[plan.shrink] = 1 << (target - plan_shrink_level)

    ledger.give_host_pages(plan.bare)
    hosts = ledger.host_pages_of(plan.shrink)
    to_host = leaving_cells(ledger, plan.shrink[~backed], plan_shrink_level[~backed], target, hosts[~backed])
    plan.apply_to(ledger)

    stays = plan.shrink[~moved[plan.shrink]]
    src, dst = [NO_SLOTS], [NO_SLOTS]
    for level in range(1, len(ledger.ladder)):
        mine = plan.moves.width_level == level
        if mine.any():
            cell = np.arange(ledger.ladder[level], dtype=np.int64)[:, None] * ledger.page_stride
            from_slots = plan.moves.src[mine][None, :]
            src.append((from_slots + cell * factor_of[from_slots]).ravel())
            dst.append((plan.moves.dst[mine][None, :] + cell).ravel())
    return Work(
        name="merge" if plan.target_level is None else "halve",
        code=plan.code,
        to_host=to_host,
        compact_slots=stays,
        compact_factor=factor_of[stays],
        new_width=ledger.ladder[target],
        on_device=CellCopies(np.concatenate(src), np.concatenate(dst)),
        lookup=plan.lookup(ledger.geometry.num_combined) if len(plan.moves.src) else None,
        freed_pages=len(plan.moves.freed_pages),
    )


class Repacker:
    """Runs the copies of a `Work` on the current stream: at most one launch for each of its parts.

    What comes from the host may run beside a step: then `behind` keeps it, and whoever runs the steps calls its `fork`
    and `join`.
    """

    def __init__(self, device_pool: DeviceKVPool, host_pool: HostKVPool) -> None:
        self.device_pool = device_pool
        self.host_pool = host_pool
        self.cell_bytes = device_pool.geometry.cell_bytes
        self.counters = MoveCounters()
        geometry = device_pool.geometry
        self.behind = CopiesBehind(device_pool.device, self._bring_cells, geometry.page_stride, geometry.cell_bytes)

    @property
    def behind_bytes(self) -> int:
        """Of `counters.from_host_bytes`: what came in under steps."""
        return self.behind.num_cells * self.cell_bytes

    def back_up(self, work: Work) -> None:
        """Layers that leave go to the host, bit for bit."""
        # Merges, widening and what comes back move no full-width page, so no page that waits for copies.
        if self.behind.is_pending and work.name in ("halve", "park"):
            whole = work.name == "park" or len(work.on_device)  # which slots those are, the work does not say
            if whole or self.behind.touches(work.compact_slots):
                self.behind.settle()
        if len(work.to_host):
            self._copy(self.host_pool, self.device_pool, work.to_host)
            self.counters.to_host_bytes += len(work.to_host) * self.cell_bytes

    def halve_in_page(self, work: Work) -> None:
        """A: within each slot, resident layer `factor * j` moves to position j."""
        if not len(work.compact_slots):
            return
        # The first cell stays where it is, so a slot of width w moves w - 1 cells.
        self.counters.device_bytes += len(work.compact_slots) * (work.new_width - 1) * self.cell_bytes
        self.counters.launches += 1
        if self.device_pool.has_storage:
            geometry = self.device_pool.geometry
            kernels.compact_cells(
                self.device_pool.k_flat,
                self.device_pool.v_flat,
                self._on_device(work.compact_slots),
                self._on_device(work.compact_factor).to(torch.int32),
                work.new_width,
                geometry.page_stride,
                geometry.page_size,
            )

    def merge_across_pages(self, work: Work) -> None:
        """B: slots move to other pages (cell by cell, from the old layout where the slot halves as it moves)."""
        if len(work.on_device):
            self._copy(self.device_pool, self.device_pool, work.on_device)
            self.counters.device_bytes += len(work.on_device) * self.cell_bytes

    def bring_back(self, work: Work) -> None:
        """Layers that return come from the host, bit for bit."""
        if not len(work.from_host):
            return
        self.counters.from_host_bytes += len(work.from_host) * self.cell_bytes
        if self.behind.is_collecting:
            self.behind.add(work.from_host.src, work.from_host.dst)
        else:
            self._copy(self.device_pool, self.host_pool, work.from_host)

    def _bring_cells(self, host_cells: IntArray, device_cells: IntArray, programs: int | None) -> None:
        self._copy(self.device_pool, self.host_pool, CellCopies(host_cells, device_cells), programs)

    def _copy(
        self,
        dst: DeviceKVPool | HostKVPool,
        src: DeviceKVPool | HostKVPool,
        cells: CellCopies,
        max_programs: int | None = None,
    ) -> None:
        self.counters.launches += 1
        if self.device_pool.has_storage:
            kernels.copy_cells(
                dst.k_flat,
                dst.v_flat,
                src.k_flat,
                src.v_flat,
                self._on_device(cells.dst),
                self._on_device(cells.src),
                self.device_pool.geometry.page_size,
                max_programs=max_programs,
            )

    def _on_device(self, ids: IntArray) -> torch.Tensor:
        return upload(self.device_pool.device, (ids,))[0]
