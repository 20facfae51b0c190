"""Any layer of any live token, wherever it lives. Slow and simple: for tests, tools and prefills without an engine."""

from __future__ import annotations

import numpy as np
import torch

from tidekv.errors import ConfigError
from tidekv.memory.device_pool import DeviceKVPool
from tidekv.memory.host_pool import HostKVPool
from tidekv.memory.ledger import BoolArray, IntArray, Ledger


def locate(ledger: Ledger, layer: int, locs: IntArray) -> tuple[BoolArray, IntArray, IntArray]:
    """(resident [T] bool, device rows [T] (valid where resident), host rows [T] (-1 without a host copy of this
    layer))."""
    geometry = ledger.geometry
    if not 0 <= layer < geometry.layer_num:
        raise ConfigError(f"layer must lie in 0..{geometry.layer_num - 1}, got {layer}")
    combined, offset = locs // geometry.page_size, locs % geometry.page_size
    bad = ~ledger.is_slot(combined)
    if bad.any():
        raise ConfigError(f"location {int(locs[bad][0])} is not handed out")
    position = ledger.resident_pos[ledger.levels_of(combined), layer].astype(np.int64)
    resident = position >= 0
    hosts = ledger.host_pages_of(combined)
    on_host = (hosts >= 0) & (~resident | ledger.backed[combined])
    host_rows = np.where(on_host, (layer * ledger.num_host_pages + hosts) * geometry.page_size + offset, -1)
    return resident, locs + position * geometry.pool_stride, host_rows


def write_kv(
    ledger: Ledger, device: DeviceKVPool, host: HostKVPool, layer: int, locs: IntArray, k: torch.Tensor, v: torch.Tensor
) -> None:
    """K and V [T, heads, dim] of `layer` into every place that holds it: the device, the host, or both
    (write-through)."""
    expected = (len(locs), device.geometry.num_kv_heads, device.geometry.head_dim)
    for name, tensor in (("k", k), ("v", v)):
        if tuple(tensor.shape) != expected or tensor.dtype != device.geometry.dtype:
            raise ConfigError(
                f"{name} must be {device.geometry.dtype} {expected}, got {tensor.dtype} {tuple(tensor.shape)}"
            )
    resident, device_rows, host_rows = locate(ledger, layer, locs)
    for flat_of, rows, mask in ((device, device_rows, resident), (host, host_rows, host_rows >= 0)):
        if mask.any():
            picked = torch.from_numpy(np.flatnonzero(mask))
            where = torch.from_numpy(rows[mask]).to(flat_of.k_flat.device)
            flat_of.k_flat[where] = k[picked.to(k.device)].to(flat_of.k_flat.device)
            flat_of.v_flat[where] = v[picked.to(v.device)].to(flat_of.v_flat.device)


def read_kv(
    ledger: Ledger, device: DeviceKVPool, host: HostKVPool, layer: int, locs: IntArray
) -> tuple[torch.Tensor, torch.Tensor]:
    """(k, v) [T, heads, dim] of `layer` on the device: resident rows from there, the others from the host."""
    resident, device_rows, host_rows = locate(ledger, layer, locs)
    shape = (len(locs), device.geometry.num_kv_heads, device.geometry.head_dim)
    out = []
    for name in ("k_flat", "v_flat"):
        values = torch.empty(shape, dtype=device.geometry.dtype, device=device.device)
        for flat, rows, mask in (
            (getattr(device, name), device_rows, resident),
            (getattr(host, name), host_rows, ~resident),
        ):
            if mask.any():
                picked = torch.from_numpy(np.flatnonzero(mask)).to(device.device)
                values[picked] = flat[torch.from_numpy(rows[mask]).to(flat.device)].to(device.device)
        out.append(values)
    return out[0], out[1]
