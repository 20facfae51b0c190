"""Which pages a window does not see, and that the tables leave out just those."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tidekv.allocator import DynamicPagedTokenToKVPoolAllocator
from tidekv.attention.page_tables import build_batch
from tidekv.errors import ConfigError
from tidekv.geometry import KVGeometry
from tidekv.memory.device_pool import DeviceKVPool
from tidekv.sglang_plugin.config import Settings, read_settings
from tidekv.sglang_plugin.window import Window


def test_old_pages_are_between_the_first_and_the_window() -> None:
    window = Window(tokens=8, page_size=4)
    assert window.old_pages(np.array([3, 12, 16, 21])).tolist() == [1, 1, 2, 3]
    unseen = window.unseen(np.array([21, 21, 12]), np.array([True, False, True]), 6)
    assert unseen.tolist() == [[False, True, True, False, False, False], [False] * 6, [False] * 6]


def test_the_last_tokens_are_never_old() -> None:
    for kv_len in range(1, 80):
        (end,) = Window(tokens=8, page_size=4).old_pages(np.array([kv_len])).tolist()
        assert end == 1 or end * 4 <= kv_len - 8


def test_read_modes_are_named() -> None:
    wanted = Settings(low_reads="window", window_tokens=64)
    assert read_settings({"TIDEKV_LOW_READS": "window", "TIDEKV_WINDOW_TOKENS": "64"}) == wanted
    with pytest.raises(ConfigError, match="exact or window, got 'all'"):
        read_settings({"TIDEKV_LOW_READS": "all"})


def test_a_mask_by_page_leaves_out_just_those_pages() -> None:
    geometry = KVGeometry(8, 16, 4, 1, 4, torch.float32)
    core = DynamicPagedTokenToKVPoolAllocator(64, 4, torch.float32, "cpu", DeviceKVPool(geometry, "cpu"))
    found = core.alloc(20, False)
    assert found is not None
    locs = found[0][::4].clone()  # the first of each of five pages
    core.register_loc_holder(locs)
    assert core.narrow_slots(locs.numpy()[1:4] // 4, 4) == 3
    unseen = np.array([[False, True, True, False, False]])
    batch = build_batch(core.ledger, np.array([1]), np.array([20]), (locs // 4)[None, :], locs[-1:] + 3, unseen)
    assert batch.narrow is not None
    assert batch.narrow.leaves_out
    staged = sum((dynamic > 0).int() for dynamic in batch.narrow.dynamic)
    assert staged.tolist() == [[0, 0, 0, 1, 0]]  # page 3 is narrow and seen: it is streamed
