"""Tests of what only a GPU shows. Skipped without one; `--on-cpu` runs their logic with the torch twins at tiny
sizes. `python -m tests.gpu.run` runs them in several processes at once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from gpu.engine_pair import load
from tidekv.engine.model import LoadedModel

HERE = Path(__file__).parent


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--on-cpu", action="store_true", help="tests/gpu: try the tests themselves on the CPU")

    parser.addoption("--shard", default="0/1", help="I/N: tests/gpu: every N-th test from the I-th on, I from 0")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    # Every N-th, not a block: tests that take long (each compiles its kernels) are neighbours.
    index, count = (int(part) for part in str(config.getoption("--shard", default="0/1")).split("/"))
    mine = [item for item in items if HERE in item.path.parents]
    left_out = {id(item) for i, item in enumerate(mine) if i % count != index}
    items[:] = [item for item in items if id(item) not in left_out]
    on_cpu = config.getoption("--on-cpu", default=False)
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            if not torch.cuda.is_available() and not on_cpu:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device (--on-cpu tries the test itself)"))


@pytest.fixture
def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture
def on_gpu() -> bool:
    return torch.cuda.is_available()


@pytest.fixture(scope="module")
def llama() -> Iterator[tuple[LoadedModel, torch.dtype]]:
    """Llama-3.1-8B's layers in bf16 on the GPU; something small on the CPU."""
    on_gpu = torch.cuda.is_available()
    dtype = torch.bfloat16 if on_gpu else torch.float32
    yield load("cuda" if on_gpu else "cpu", "llama" if on_gpu else "tiny", dtype), dtype
    if on_gpu:
        torch.cuda.empty_cache()


@pytest.fixture(scope="module")
def tiny() -> LoadedModel:
    return load("cuda" if torch.cuda.is_available() else "cpu", "tiny", torch.float32)
