"""Runs the Triton kernels on the GPU where there is one, else under Triton's interpreter on the CPU.

The interpreter is chosen when a kernel is decorated, so the variable must be set before tidekv.kernels is first
imported: run this folder in its own pytest invocation.
"""

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

from tidekv.kernels import HAS_TRITON  # the import must follow the line above


@pytest.fixture
def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(
    params=["torch", pytest.param("triton", marks=pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed"))]
)
def backend(request: pytest.FixtureRequest) -> str:
    """Both implementations of each kernel; the same tests run both."""
    return request.param
