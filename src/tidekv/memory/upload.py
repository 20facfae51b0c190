"""Index lists from the host to the device: one copy for many lists, and no wait for it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from tidekv.memory.ledger import IntArray


def upload(device: torch.device, arrays: Sequence[IntArray]) -> list[torch.Tensor]:
    """int64 arrays as tensors on `device`, in their order. On CUDA they travel in one copy from pinned memory: each copy
    of its own costs 10 us of host time, and one from pageable memory may wait."""
    if device.type != "cuda":
        return [torch.from_numpy(np.ascontiguousarray(array)).to(device) for array in arrays]
    sizes = [array.size for array in arrays]
    staged = torch.empty(sum(sizes), dtype=torch.int64, pin_memory=True)
    np.concatenate([array.ravel() for array in arrays], out=staged.numpy())
    parts: list[torch.Tensor] = list(torch.split_with_sizes(staged.to(device, non_blocking=True), sizes))
    return parts
