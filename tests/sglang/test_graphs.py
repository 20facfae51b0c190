"""Full-width, moved and narrowed batches of a real SGLang model give the same logits, launch by launch and over the
buffers that graphs replay. Would catch: a page read or written where its id says and not where it lies, a buffer that
is not refilled, a step planned for another batch, a window that hides what it should show."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from serving import environment

if importlib.util.find_spec("sglang") is None or importlib.util.find_spec("sglang.version") is None:
    pytest.skip("SGLang is not installed", allow_module_level=True)

SCRIPT = Path(__file__).with_name("one_runner.py")
ROOT = str(SCRIPT.parents[2])  # for `benchmarks`
ROUNDING = 1e-4  # in fp32, of logits whose spread is 2: attention sums in another order


def see(folder: Path, *flags: str, **variables: str) -> dict[str, Any]:
    """What a process with one model runner saw."""
    out = folder / "found.json"
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(folder), str(out), *flags],
        env=environment({"TIDEKV_SGLANG": "1", "PYTHONPATH": os.pathsep.join([*sys.path, ROOT]), **variables}),
        cwd=folder, capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    read: dict[str, Any] = json.loads(out.read_text())
    return read


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """All the runs on SGLang's backend for a CPU."""
    read = see(tmp_path_factory.mktemp("model"))
    assert read["spread"] > 1, "the model's logits are too flat to show an error"
    return read


@pytest.mark.parametrize("backend", ["triton_kernels", "flashinfer", "fa3"])
def test_sglangs_own_backends_read_moved_pages(backend: str, tmp_path: Path) -> None:
    seen = see(tmp_path, "--backend", backend.removesuffix("_kernels"), TRITON_INTERPRET="1")
    assert seen["displaced"] > 0
    assert seen["spread"] > 1
    assert seen["largest_difference"] == 0
    assert seen["prefix_displaced"] > 0
    assert seen["prefix_difference"] == 0
    assert len(set(seen["lie"])) == len(seen["lie"])
    assert seen["launched"] == seen["lie"]
    assert seen["replayed"] == seen["lie"]
    assert seen["written"] == seen["last"]
    assert all(0 <= row < 4 for row in seen["padded"]), "padding reads the sink page"
    assert seen["own_locs_are_back"]


@pytest.mark.parametrize("moved", ["moved", "moved_launched", "moved_prefix"])
def test_moved_pages_are_read_where_they_lie(found: dict[str, Any], moved: str) -> None:
    assert found[moved]["displaced"] > 0
    assert found[moved]["largest_difference"] < ROUNDING


def test_narrowed_steps_are_exact(found: dict[str, Any]) -> None:
    assert found["eager"]["streamed"] > 0
    assert found["eager"]["largest_difference"] < ROUNDING
    assert found["eager"]["same_tokens"]


def test_narrowed_steps_are_the_cores_at_full_width(found: dict[str, Any]) -> None:
    assert found["core"]["largest_difference"] < ROUNDING
    assert found["narrow_in_core"]["streamed"] > 0
    assert found["narrow_in_core"]["largest_difference"] == 0


def test_captured_steps_are_the_launched_ones(found: dict[str, Any]) -> None:
    assert found["captured"]["replays"] > 5
    assert found["captured_as_eager"]["largest_difference"] < ROUNDING
    assert found["captured"]["streamed"] == found["eager"]["streamed"]


def test_windows_are_captured_and_stream_nothing(found: dict[str, Any]) -> None:
    assert found["window"]["replays"] > 10
    assert found["window"]["largest_difference"] < ROUNDING
    assert found["window"]["streamed"] == 0
    assert found["window_is_lossy"]["largest_difference"] > 0.1
    assert found["high_in_window"] == 0


def test_the_rows_are_never_read_back(found: dict[str, Any]) -> None:
    assert all(seen["read_back"] == 0 for seen in found.values() if isinstance(seen, dict))
