"""What `tidekv replay` needs beside the replay itself: the meaning of `--capacity`, and progress bars."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn, TimeElapsedColumn

from tidekv.errors import ConfigError
from tidekv.replay.run import Replay, ReplayConfig, replay
from tidekv.replay.trace import read_trace


def parse_capacity(text: str) -> int | float:
    """ "0.5" and "1/2" are shares of the unlimited peak, "120000" is tokens; "1" and "1.0" are the whole peak."""
    try:
        value = float(Fraction(text.replace(" ", "")))
    except (ValueError, ZeroDivisionError):
        value = -1.0
    if 0.0 < value <= 1.0:
        return value
    if value > 1.0 and value == int(value):
        return int(value)
    raise ConfigError(f"capacity must be tokens, or a share in (0, 1] of the unlimited peak, got {text!r}")


def parse_capacities(text: str) -> list[int | float]:
    """ "1/2,1/3,2/3": one or more, with commas between them."""
    return [parse_capacity(part) for part in text.split(",")]


def run_with_progress(
    trace_path: Path,
    policies: Sequence[str],
    config: ReplayConfig,
    console: Console,
    duration_s: float | None,
    high_rate: float,
    low_rate: float,
) -> Replay:
    """Read the trace and replay it; a bar for each policy on a terminal, nothing elsewhere."""
    requests = read_trace(trace_path, duration_s, high_rate, low_rate)
    bars: dict[str, TaskID] = {}
    columns = (
        TextColumn("{task.description:>9}"), BarColumn(), TaskProgressColumn(), TextColumn("{task.fields[now]:.0f} s"),
        TimeElapsedColumn(),
    )  # fmt: skip
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:

        def show(policy: str, done: float, now_s: float) -> None:
            if policy not in bars:
                bars[policy] = progress.add_task(policy, total=1.0, now=0.0)
            progress.update(bars[policy], completed=done, now=now_s)

        return replay(requests, policies, config, trace_path.name, show)
