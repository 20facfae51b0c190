"""K and V on the host for layers that left the device. Layer-major; knows nothing of who owns what."""

from __future__ import annotations

import torch

from tidekv.errors import ConfigError
from tidekv.geometry import KVGeometry


class HostKVPool:
    """`k_flat`, `v_flat`: [L * num_pages * page_size, num_kv_heads, head_dim], pinned where CUDA is there.

    A host page has room for **all** L layers of one logical page, whatever the slot's width. That costs host memory and
    buys three guarantees: halving a narrowed slot again, and parking it whole, never need more host room, and one host
    page id serves every layer. Host flat page of (layer, host_page) = layer * num_pages + host_page, so one layer of
    many host pages with neighbouring ids is one contiguous run, which is what a copy engine likes.

    capacity_bytes   rounded down to whole host pages; 0 gives a pool that refuses everything, so nothing ever narrows
    pin              None: pinned if and only if CUDA is there
    materialize      False: shapes only (beside a `meta` device pool)
    """

    def __init__(
        self, geometry: KVGeometry, capacity_bytes: int, pin: bool | None = None, *, materialize: bool = True
    ) -> None:
        if capacity_bytes < 0:
            raise ConfigError(f"capacity_bytes must be >= 0, got {capacity_bytes}")
        self.geometry = geometry
        self.capacity_bytes = capacity_bytes
        self.num_pages = capacity_bytes // geometry.page_bytes
        self.pinned = torch.cuda.is_available() if pin is None else pin
        rows = geometry.layer_num * self.num_pages * geometry.page_size
        shape = (rows, geometry.num_kv_heads, geometry.head_dim)
        device = "cpu" if materialize else "meta"
        try:
            # empty, not zeros: an untouched page costs no physical memory until a layer moves there (unpinned).
            self.k_flat = torch.empty(shape, dtype=geometry.dtype, device=device, pin_memory=self.pinned and rows > 0)
            self.v_flat = torch.empty(shape, dtype=geometry.dtype, device=device, pin_memory=self.pinned and rows > 0)
        except RuntimeError as error:
            kind, size_gib = "pinned" if self.pinned else "pageable", self.num_pages * geometry.page_bytes / 2**30
            raise ConfigError(
                f"{size_gib:.2f} GiB of {kind} host memory could not be had; lower capacity_bytes"
            ) from error

    def flat_pages(self, layer: int, host_pages: torch.Tensor) -> torch.Tensor:
        """Flat pages of `layer` of these host pages: [n] int64 -> [n] int64."""
        return host_pages + layer * self.num_pages
