"""The copy engine's runs, executed byte by byte on the CPU, against the kernel's twin. Catches: a run that is too long,
of the wrong tensor or the wrong item, and runs too short to be worth the host's time."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest
import torch

from tidekv import DeviceKVPool, HostKVPool, KVGeometry
from tidekv.kernels import move
from tidekv.streaming import streamer as module
from tidekv.streaming.schedule import StreamSchedule, build_schedule
from tidekv.streaming.streamer import Streamer

GEOMETRY = KVGeometry(4, 12, 4, 2, 8, torch.float32)
RESIDENT = np.array([[0, 1, 2, 3], [0, -1, 1, -1], [0, -1, -1, -1]], dtype=np.int32)


def made(hosts: list[int], levels: list[int]) -> tuple[Streamer, StreamSchedule]:
    pools = DeviceKVPool(GEOMETRY, "cpu"), HostKVPool(GEOMETRY, 20 * GEOMETRY.page_bytes, pin=False)
    for pool in pools:
        pool.k_flat.normal_()
        pool.v_flat.normal_()
    streamer = Streamer(*pools)
    streamer.engine = object()  # type: ignore[assignment]  # as on a GPU with the driver's batched copy
    slots = np.arange(1, len(hosts) + 1)
    schedule = build_schedule(
        RESIDENT, slots, np.array(levels), np.array(hosts), slots, GEOMETRY.page_stride, pools[1].num_pages
    )
    return streamer, schedule


def by_bytes(streamer: Streamer, schedule: StreamSchedule, runs: Any, item: int) -> None:
    for dst, src, size in zip(*(part.tolist() for part in runs.of(schedule.items[item])), strict=True):
        ctypes.memmove(dst, src, size)


@pytest.mark.parametrize("hosts", [[3, 4, 5, 6, 7], [9, 2, 7, 4, 12], [0, 1, 8, 9, 3]])
@pytest.mark.parametrize("levels", [[1, 1, 1, 1, 1], [2, 2, 1, 2, 2]])
def test_runs_bring_what_the_kernel_brings(
    hosts: list[int], levels: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "COPY_ENGINE_RUN_BYTES", 0)
    streamer, schedule = made(hosts, levels)
    runs = streamer._engine_runs(schedule)
    there, here = streamer.device_pool, streamer.host_pool
    for item in range(len(schedule.items)):
        want_k, want_v = there.k_flat.clone(), there.v_flat.clone()
        mine = slice(schedule.items[item].begin, schedule.items[item].end)
        dst, src = (torch.from_numpy(pages[mine]) for pages in (schedule.dst, schedule.src))
        move.copy_cells(want_k, want_v, here.k_flat, here.v_flat, dst, src, GEOMETRY.page_size)
        by_bytes(streamer, schedule, runs, item)
        assert torch.equal(there.k_flat, want_k)
        assert torch.equal(there.v_flat, want_v)


def test_short_runs_are_left_to_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    page_bytes = GEOMETRY.cell_bytes // 2
    monkeypatch.setattr(module, "COPY_ENGINE_RUN_BYTES", 2 * page_bytes)
    neighbours, scattered = made([3, 4, 5, 6], [1] * 4), made([3, 5, 7, 9], [1] * 4)
    assert neighbours[0]._engine_runs(neighbours[1]) is not None  # two items of one run of 4 pages
    assert scattered[0]._engine_runs(scattered[1]) is None
    neighbours[0].engine = None
    assert neighbours[0]._engine_runs(neighbours[1]) is None
