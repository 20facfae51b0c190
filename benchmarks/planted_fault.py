"""A fault on purpose, to see that a comparison of answers can fail: a plugin of SGLang beside tidekv's.

Of every request that goes on after a pause, the pages that come back read the next page's K and V in one layer: the
middle one, which is moved on the device. (What comes from the host may come later and would put it right.)
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch


def register() -> None:
    """Called by SGLang in every process, after tidekv's own entry point."""
    from tidekv.sglang_plugin.request_pages import RequestPages

    original = RequestPages.widen

    def widen(requests: Any, pages: np.ndarray) -> int:
        widened = original(requests, pages)
        allocator = requests.allocator
        ledger, size = allocator.core.ledger, int(allocator.page_size)
        slots = allocator.pages.slots_of(pages)
        slots = slots[(slots > 0) & (ledger.levels_of(slots) == 0)]
        if widened and len(slots) > 1:
            pool = allocator.core.kvcache
            layer = pool.get_layer_num() // 2
            rows = torch.from_numpy(slots[:, None] * size + np.arange(size)).to(pool.get_key_buffer(layer).device)
            for buffer in (pool.get_key_buffer(layer), pool.get_value_buffer(layer)):
                buffer[rows] = buffer[rows.roll(1, 0)]
        return widened

    RequestPages.widen = widen  # type: ignore[method-assign]
