"""The only module that reads the environment. Everything else receives values."""

from __future__ import annotations

import os
from pathlib import Path


def cache_dir() -> Path:
    """Folder for converted models: `$XDG_CACHE_HOME/tidekv`, else `~/.cache/tidekv`."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "tidekv"


def omp_wait_policy() -> str | None:
    """`OMP_WAIT_POLICY` as the process sees it; spinning OpenMP threads can cost 40x on 2 cores."""
    return os.environ.get("OMP_WAIT_POLICY")
