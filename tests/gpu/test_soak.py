"""The soak's random load with K, V and locations on the GPU. Catches: a kernel that moves or remaps wrongly inside a
real history, a launch on a wrong stream, a deferred free that is lost, booked twice or booked too late."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import pytest

from gpu.mirrored import MirroredModel
from stateful import soak

SECONDS = 25.0
SEED = 20261130


def test_random_load_on_cuda_tensors(monkeypatch: pytest.MonkeyPatch, device: str, on_gpu: bool) -> None:
    monkeypatch.setattr(soak, "CacheModel", partial(MirroredModel, device=device))
    monkeypatch.setattr(soak, "RUN_OPERATIONS", 200)
    begin = time.monotonic()
    totals: Any = soak.soak(SEED, seconds=SECONDS if on_gpu else 3.0)
    print(
        f"{totals.operations} operations in {time.monotonic() - begin:.0f} s, {totals.runs} runs, {dict(totals.events)}"
    )
    assert totals.operations > 100
    for name in ("halved_high", "halved_low", "merged", "refused", "to_host_bytes", "from_host_bytes"):
        assert totals.events[name] > 0, f"the soak has not {name} anything: {dict(totals.events)}"
