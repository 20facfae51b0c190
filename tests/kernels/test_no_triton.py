"""The package must import and its twins must run where Triton is not installed."""

import os
import subprocess
import sys

SCRIPT = """
import sys
sys.modules["triton"] = None  # import triton now raises ImportError
import torch
from tidekv.errors import ConfigError
from tidekv.kernels import HAS_TRITON, assign, attention, move, remap, tables
assert not HAS_TRITON
one = torch.tensor([9])
assert assign.alloc_decode(one, one + 6, one - 4, 4).tolist() == [20]
try:
    assign.alloc_decode(one, one, one, 4, backend="triton")
except ConfigError as error:
    assert "not installed" in str(error)
else:
    raise SystemExit("backend=triton was accepted")
"""


def test_twins_run_without_triton():
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}  # runs from a bare checkout too
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
