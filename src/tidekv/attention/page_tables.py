"""What one forward over a packed batch needs to know: where tokens go, where every page of every layer is.

If nothing in the batch is narrow the ordinary table plus a constant per layer is used and no table kernel runs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tidekv.errors import InvariantError
from tidekv.memory.ledger import DYNAMIC, BoolArray, IntArray, Ledger
from tidekv.memory.upload import INLINE_BYTES, upload
from tidekv.streaming.schedule import StreamSchedule, build_schedule


@dataclass(frozen=True)
class NarrowTables:
    """The part of a batch that only exists when some of its slots are narrow. Tensors on the device.

    position   [parts, L] int32: the staging cell of each part and layer
    level      [B, N] int8: ladder level of each slot
    dynamic    one [B, N] int64 for each part: the slot's dynamic slot in this part, 0 where it has none
    token_level [T] int8, token_dynamic [T] int64: the same for the new tokens (locations in part 0)
    leaves_out  some request reads a window (LOSSY): layers that are not resident do not see its old pages at all
    """

    schedule: StreamSchedule
    position: torch.Tensor
    level: torch.Tensor
    dynamic: tuple[torch.Tensor, ...]
    token_level: torch.Tensor
    token_dynamic: torch.Tensor
    leaves_out: bool = False


@dataclass(frozen=True)
class HostWrites:
    """New tokens whose K and V also go to the host: all layers of written-through slots, non-resident ones of narrow
    slots.

    tokens [h] int64: indices into the batch; base_rows [h] int64: host row of the token in layer 0;
    layers [L, h] bool: which of them are written in each layer; num_written: how many in all layers together.
    """

    tokens: torch.Tensor
    base_rows: torch.Tensor
    layers: torch.Tensor
    num_written: int


@dataclass(frozen=True)
class HostNarrow:
    """`NarrowTables` before they are on the device: the same names, in numpy."""

    schedule: StreamSchedule
    level: npt.NDArray[np.int8]
    dynamic: tuple[IntArray, ...]
    token_level: npt.NDArray[np.int8]
    token_dynamic: IntArray
    leaves_out: bool


@dataclass(frozen=True)
class HostWritten:
    """`HostWrites` before they are on the device."""

    tokens: IntArray
    base_rows: IntArray
    layers: BoolArray
    num_written: int


@dataclass(frozen=True)
class HostBatch:
    """A batch as it was looked up in the ledger, on the host: `on(device)` for a step that is launched, or what fills
    the buffers of a captured one. Fields as in `PackedBatch`; slots [B, N], locs [T] int64."""

    q_lens: IntArray
    kv_lens: IntArray
    slots: IntArray
    locs: IntArray
    narrow: HostNarrow | None
    host_writes: HostWritten | None

    def on(
        self, device: torch.device, slots: torch.Tensor | None = None, locs: torch.Tensor | None = None
    ) -> PackedBatch:
        """slots, locs: the same on the device, where they are there already."""
        cu_q, kv_lens = upload(device, (np.concatenate([[0], np.cumsum(self.q_lens)]), self.kv_lens))
        if slots is None or locs is None:
            slots, locs = _there(device, self.slots), _there(device, self.locs)
        return PackedBatch(
            self.q_lens, self.kv_lens, cu_q, kv_lens, slots, locs,
            None if self.narrow is None else _narrow_on(device, self.narrow),
            None if self.host_writes is None else _writes_on(device, self.host_writes),
            self,
        )  # fmt: skip


@dataclass(frozen=True)
class PackedBatch:
    """Requests packed without padding: tokens [cu_q[b], cu_q[b + 1]) are the new tokens of request b.

    q_lens, kv_lens   [B] int64 on the host: new tokens, and all tokens with the new ones counted in
    cu_q, kv_lens_dev [B + 1], [B] int64 on the device
    slots             [B, N] int64 on the device: combined id of each logical page, 0 beyond the end
    locs              [T] int64 on the device: encoded locations of the new tokens
    host              the same on the host, if it was looked up there
    """

    q_lens: IntArray
    kv_lens: IntArray
    cu_q: torch.Tensor
    kv_lens_dev: torch.Tensor
    slots: torch.Tensor
    locs: torch.Tensor
    narrow: NarrowTables | None
    host_writes: HostWrites | None
    host: HostBatch | None = None

    @property
    def max_q(self) -> int:
        return int(self.q_lens.max(initial=0))


def build_batch(
    ledger: Ledger,
    q_lens: IntArray,
    kv_lens: IntArray,
    slots: torch.Tensor,
    locs: torch.Tensor,
    windows: BoolArray | None = None,
) -> PackedBatch:
    """Look up what the batch needs in the ledger. Reads `slots` back from the device only if something is narrow or
    backed. `windows`: as in `host_batch`."""
    device = slots.device
    if not ledger.any_narrow and not ledger.any_backed:
        cu_q, kv_dev = upload(device, (np.concatenate([[0], np.cumsum(q_lens)]), kv_lens))
        return PackedBatch(q_lens, kv_lens, cu_q, kv_dev, slots, locs, None, None)
    found = host_batch(ledger, q_lens, kv_lens, slots.cpu().numpy(), locs.cpu().numpy(), windows)
    return found.on(device, slots, locs)


def host_batch(
    ledger: Ledger,
    q_lens: IntArray,
    kv_lens: IntArray,
    slots: IntArray,
    locs: IntArray,
    windows: BoolArray | None = None,
    levels: npt.NDArray[np.int8] | None = None,
) -> HostBatch:
    """Look up what the batch needs in the ledger, for a caller that has its slots and locations on the host, and
    perhaps their levels ([B, N], `slot_levels`).

    Narrowed slots that have no dynamic slot yet get one, as far as staging goes; if it does not go round, the
    schedule has several parts.

    windows: [B] True: the request reads a window (LOSSY). Its narrowed pages are read in their resident layers only, so
    nothing is streamed for them; [B, N]: the same, page by page; None: everybody reads everything.
    """
    token_slots = locs // ledger.geometry.page_size
    token_levels = ledger.levels_of(token_slots)
    narrow = None
    if ledger.any_narrow:
        levels = slot_levels(ledger, slots) if levels is None else levels
        if levels.any():
            narrow = _narrow_tables(ledger, slots, levels, locs, token_slots, token_levels, windows)
    return HostBatch(q_lens, kv_lens, slots, locs, narrow, _host_writes(ledger, locs, token_slots, token_levels))


def slot_levels(ledger: Ledger, slots: IntArray) -> npt.NDArray[np.int8]:
    """[B, N] int8: ladder level of each slot, 0 for padding."""
    levels = ledger.levels_of(slots)
    levels[slots == 0] = 0
    return levels


def _narrow_tables(
    ledger: Ledger,
    host_slots: IntArray,
    levels: npt.NDArray[np.int8],
    host_locs: IntArray,
    token_slots: IntArray,
    token_level: npt.NDArray[np.int8],
    windows: BoolArray | None,
) -> HostNarrow:
    page_size = ledger.geometry.page_size
    to_read, leaves_out = levels > 0, False
    left_out: BoolArray | None = None
    if windows is not None:  # a page that gets tokens in this step is read whole
        left_out = (windows if windows.ndim == 2 else windows[:, None]) & to_read
        left_out[left_out] = ledger.dynamic_of[host_slots[left_out]] == 0
        leaves_out = bool(left_out.any())
        to_read &= ~left_out
    read = np.unique(host_slots[to_read])
    unstaged = token_slots[(token_level > 0) & (ledger.dynamic_of[token_slots] == 0)]
    if len(unstaged):  # its staging copy could overtake the write of its new token
        raise InvariantError(f"slot {int(unstaged[0])} gets tokens in this step, is narrow and has no staging")
    has = ledger.dynamic_of[read] > 0  # given by the allocating call: these slots receive tokens in this step
    written, others = read[has], read[~has]
    # Neighbours on the host come into neighbouring staging cells, so that the copy engine has fewer runs to copy.
    others = others[np.argsort(ledger.host_pages_of(others), kind="stable")]
    short = ledger.staging_pages_for(len(others))
    wanted = ledger.staging_target(sum(ledger.num_narrow)) - ledger.used[DYNAMIC]
    ledger.grow_staging(max(0, min(short, wanted, ledger.num_free_pages)))
    ledger.assign_dynamic(others[: len(ledger.staging_free)])
    ordered = np.concatenate([written, others])
    pairs = ledger.dynamic_of[ordered]
    schedule = build_schedule(
        ledger.resident_pos,
        ordered,
        ledger.levels_of(ordered).astype(np.int64),
        ledger.host_pages_of(ordered),
        pairs[pairs > 0],
        ledger.page_stride,
        ledger.num_host_pages,
    )
    dynamic = []
    if len(ordered):
        order = np.argsort(ordered)
        at = np.minimum(np.searchsorted(ordered[order], host_slots), len(ordered) - 1)
        found, index = (ordered[order][at] == host_slots) & to_read, order[at]
        for part in range(schedule.num_parts):
            mine = found & (schedule.part[index] == part)
            dynamic.append(np.where(mine, schedule.dynamic[index], 0))
    else:  # nothing but left-out pages: one part that stages nothing
        dynamic.append(np.zeros(host_slots.shape, dtype=np.int64))
    token_dynamic = ledger.dynamic_of[token_slots]
    token_dynamic = np.where(token_dynamic > 0, token_dynamic * page_size + host_locs % page_size, 0)
    return HostNarrow(schedule, levels, tuple(dynamic), token_level, token_dynamic, leaves_out)


def _host_writes(
    ledger: Ledger, host_locs: IntArray, token_slots: IntArray, levels: npt.NDArray[np.int8]
) -> HostWritten | None:
    tokens = np.flatnonzero((levels > 0) | ledger.backed[token_slots])
    if not len(tokens):
        return None
    page_size, hosts = ledger.geometry.page_size, ledger.host_pages_of(token_slots)
    base = hosts[tokens] * page_size + host_locs[tokens] % page_size
    layers = (ledger.resident_pos[levels[tokens]] < 0) | ledger.backed[token_slots[tokens]][:, None]  # [h, L]
    return HostWritten(tokens, base, np.ascontiguousarray(layers.T), int(np.count_nonzero(layers)))


def _there(device: torch.device, array: npt.NDArray[Any]) -> torch.Tensor:
    """As `upload`, an array at a time: of any dtype, and aligned, since kernels are compiled for an alignment."""
    tensor = torch.from_numpy(array)
    if device.type == "cuda" and array.nbytes > INLINE_BYTES:
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def _narrow_on(device: torch.device, narrow: HostNarrow) -> NarrowTables:
    return NarrowTables(
        narrow.schedule,
        _there(device, narrow.schedule.position),
        _there(device, narrow.level),
        tuple(_there(device, part) for part in narrow.dynamic),
        _there(device, narrow.token_level),
        _there(device, narrow.token_dynamic),
        narrow.leaves_out,
    )


def _writes_on(device: torch.device, writes: HostWritten) -> HostWrites:
    tokens, base_rows = upload(device, (writes.tokens, writes.base_rows))
    return HostWrites(tokens, base_rows, _there(device, writes.layers), writes.num_written)
