"""Siblings import each other by name; what needs SGLang itself skips where it is not installed."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent))
