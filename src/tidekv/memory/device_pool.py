"""K and V of the device: one flat tensor each, cell-major. Knows nothing of who owns what."""

from __future__ import annotations

import torch

from tidekv.errors import ConfigError
from tidekv.geometry import KVGeometry


class DeviceKVPool:
    """`k_flat`, `v_flat`: [L * (P + 1) * page_size, num_kv_heads, head_dim].

    Cell c of page p starts at row (c * (P + 1) + p) * page_size, so at full width layer l is the contiguous run of rows
    [l * pool_stride, (l + 1) * pool_stride): an ordinary per-layer buffer, which ordinary kernels use unchanged.
    With `device="meta"` the pool has shapes and no storage: the books run, no KV moves (used to replay traces).
    """

    def __init__(self, geometry: KVGeometry, device: str | torch.device) -> None:
        self.geometry = geometry
        self.device = torch.device(device)
        shape = (geometry.flat_rows, geometry.num_kv_heads, geometry.head_dim)
        try:
            self.k_flat = torch.zeros(shape, dtype=geometry.dtype, device=self.device)
            self.v_flat = torch.zeros(shape, dtype=geometry.dtype, device=self.device)
        except (RuntimeError, torch.OutOfMemoryError) as error:
            raise ConfigError(
                f"a pool of {geometry.num_pages} pages needs {geometry.pool_bytes / 2**30:.2f} GiB on {self.device}, "
                f"which could not be had; lower num_pages ({geometry.page_bytes / 2**20:.2f} MiB a page)"
            ) from error

    @property
    def has_storage(self) -> bool:
        """False for a `meta` pool: then moves are booked and nothing is copied."""
        return self.device.type != "meta"

    def get_layer_num(self) -> int:
        """L, the layers of the model."""
        return self.geometry.layer_num

    def get_key_buffer(self, layer: int) -> torch.Tensor:
        """View [(P + 1) * page_size, num_kv_heads, head_dim]: K of `layer` for full-width slots, indexed by loc."""
        return self.k_flat[self._rows(layer)]

    def get_value_buffer(self, layer: int) -> torch.Tensor:
        """View [(P + 1) * page_size, num_kv_heads, head_dim]: V of `layer` for full-width slots, indexed by loc."""
        return self.v_flat[self._rows(layer)]

    def _rows(self, layer: int) -> slice:
        if not 0 <= layer < self.geometry.layer_num:
            raise ConfigError(f"layer must lie in 0..{self.geometry.layer_num - 1}, got {layer}")
        stride = self.geometry.pool_stride
        return slice(layer * stride, (layer + 1) * stride)
