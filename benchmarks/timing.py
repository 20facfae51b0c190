"""Medians of host time and of device time, for several candidates interleaved. On the CPU both are wall time."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Mapping

import torch

Call = Callable[[], object]


def on_gpu() -> bool:
    return torch.cuda.is_available()


def device() -> str:
    return "cuda" if on_gpu() else "cpu"


def synchronize() -> None:
    if on_gpu():
        torch.cuda.synchronize()


def pin_core() -> int | None:
    """Bind this thread to one core: host timings of an unpinned process swing by 2x. Returns the core."""
    if not hasattr(os, "sched_setaffinity"):
        return None
    core = max(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {core})
    return core


def host_us(calls: Mapping[str, Call], between: Mapping[str, Call], n: int, warm: int) -> dict[str, float]:
    """Median microseconds until each call returns, the device idle before it; `between` runs untimed after each."""
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for i in range(warm + n):
        for name, call in calls.items():
            synchronize()
            begin = time.perf_counter()
            call()
            end = time.perf_counter()
            between[name]()
            if i >= warm:
                taken[name].append(end - begin)
    return {name: statistics.median(values) * 1e6 for name, values in taken.items()}


def host_us_behind(
    calls: Mapping[str, Call], between: Mapping[str, Call], n: int, queued_ms: float
) -> dict[str, float]:
    """As `host_us`, with `queued_ms` of GPU work queued before the call: a call that waits takes that long."""
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(n):
        for name, call in calls.items():
            synchronize()
            sleep_ms(queued_ms)
            begin = time.perf_counter()
            call()
            taken[name].append(time.perf_counter() - begin)
            between[name]()
    synchronize()
    return {name: statistics.median(values) * 1e6 for name, values in taken.items()}


def queued_device_us(
    calls: Mapping[str, Call], between: Mapping[str, Call], k: int, repeats: int, sleep: float = 20.0
) -> dict[str, float]:
    """Median device microseconds a call: k calls queued behind a sleep, so that launches never wait for the host.

    `between` must not touch the device. On the CPU: wall time of the call.
    """
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeats):
        for name, call in calls.items():
            if not on_gpu():
                begin = time.perf_counter()
                call()
                taken[name].append((time.perf_counter() - begin) * 1e6)
                between[name]()
                continue
            begin_event, end_event = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            synchronize()
            sleep_ms(sleep)
            begin_event.record()
            for _ in range(k):
                call()
                between[name]()
            end_event.record()
            synchronize()
            taken[name].append(begin_event.elapsed_time(end_event) * 1e3 / k)
    return {name: statistics.median(values) for name, values in taken.items()}


def device_ms(calls: Mapping[str, Call], n: int, warm: int = 2) -> dict[str, float]:
    """Median milliseconds of each call on the device, by events around it, interleaved."""
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for i in range(warm + n):
        for name, call in calls.items():
            if not on_gpu():
                begin = time.perf_counter()
                call()
                value = (time.perf_counter() - begin) * 1e3
            else:
                begin_event, end_event = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                # The sleep lets the host run ahead, so that its launch time is not in the figure.
                sleep_ms(0.5)
                begin_event.record()
                call()
                end_event.record()
                synchronize()
                value = begin_event.elapsed_time(end_event)
            if i >= warm:
                taken[name].append(value)
    return {name: statistics.median(values) for name, values in taken.items()}


def sleep_ms(milliseconds: float) -> None:
    """Keep the current stream busy. 1.98 GHz is the H200's clock under load: a little long on a slower one."""
    if on_gpu() and milliseconds > 0:
        torch.cuda._sleep(int(milliseconds * 1.98e6))


def random_fill(*tensors: torch.Tensor) -> None:
    """Random bits: zeros run faster than real data and hide what was not written."""
    for tensor in tensors:
        tensor.view(torch.int16).random_(-(2**15), 2**15)


def link_gbps(num_bytes: int, n: int = 3) -> float:
    """One large copy from pinned host memory to the device, GB/s."""
    host = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
    there = torch.empty(num_bytes, dtype=torch.uint8, device="cuda")
    return num_bytes / device_ms({"link": lambda: there.copy_(host, non_blocking=True)}, n)["link"] / 1e6


def copy_gbps(num_bytes: int, n: int = 5) -> float:
    """GB/s, read + write, of a device-to-device copy of `num_bytes`."""
    src = torch.empty(num_bytes // 2, dtype=torch.int16, device=device())
    random_fill(src)
    dst = torch.empty_like(src)
    return 2 * src.nbytes / device_ms({"copy": lambda: dst.copy_(src)}, n)["copy"] / 1e6
