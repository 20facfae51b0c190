"""The replay benchmark over mixes, shapes, capacities, policies and read modes; one result file a run, so it resumes.

    python -m benchmarks.replay_matrix MIX.jsonl.gz [MIX ...] --out DIR --models llama-3.1-8b,llama-3.1-70b
    python -m benchmarks.replay_matrix --out DIR --tables      the tables of what is there

Ctrl-C keeps every run that is done; the same command goes on with those that are missing. `DIR/runs/*.json` holds the
figures of each run (without its timeline), `DIR/tables.md` a table for each mix and shape, and `DIR/goals.md` the goals
with what was reached. Half of the peak comes first, for every mix, then the other capacities.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.replay_tables import goals_markdown, tables_markdown
from tidekv.replay.command import parse_capacities
from tidekv.replay.report import run_figures
from tidekv.replay.run import UNLIMITED, ReplayConfig, run_policy, whole_trace_pages
from tidekv.replay.trace import TraceRequest, read_trace

# A run of the matrix: (policy, high reads, low reads).
VARIANTS = (
    ("narrow", "exact", "exact"),
    ("narrow", "exact", "window"),
    ("reserve", "exact", "exact"),
    ("retract", "exact", "exact"),
    ("swap", "exact", "exact"),
)


@dataclass(frozen=True)
class Cell:
    """One run. `share` 1.0 with policy unlimited: the run that the peak is taken from."""

    mix: Path
    model: str
    share: float
    policy: str
    high_reads: str = "exact"
    low_reads: str = "exact"
    machine: str = "H200"

    @property
    def name(self) -> str:
        """Of its file, without a suffix."""
        mix = self.mix.name.split(".")[0]
        reads = (
            "" if (self.high_reads, self.low_reads) == ("exact", "exact") else f"-{self.high_reads}-{self.low_reads}"
        )
        machine = "" if self.machine == "H200" else f"_{self.machine}"
        return f"{mix}_{self.model}{machine}_{self.share:.3f}_{self.policy}{reads}"


def cells(mixes: Sequence[Path], models: Sequence[str], shares: Sequence[float], machine: str) -> list[Cell]:
    """All runs in the order in which they are wanted."""
    found = []
    for model in models:
        for index, share in enumerate(sorted(shares, key=lambda s: abs(s - 0.5))):
            for mix in mixes:
                if index == 0:
                    found.append(Cell(mix, model, 1.0, UNLIMITED, machine=machine))
                found += [Cell(mix, model, share, *variant, machine) for variant in VARIANTS]
    return found


def run(cell: Cell, trace: list[TraceRequest], duration_s: float, peak_tokens: int | None) -> dict[str, Any]:
    """The figures of one run, JSON-ready."""
    config = ReplayConfig(machine=cell.machine, model=cell.model, high_reads=cell.high_reads, low_reads=cell.low_reads)  # type: ignore[arg-type]
    if peak_tokens is None:
        pages = whole_trace_pages(trace, config)
    else:
        pages = max(2, int(cell.share * peak_tokens) // config.page_size)
    done = run_policy(cell.policy, pages, trace, config)
    figures = run_figures(done)
    del figures["timeline"]
    return {
        "mix": cell.mix.name, "model": cell.model, "machine": config.machine, "share": cell.share,
        "duration_s": duration_s, "requests": len(trace), "high_reads": config.read_modes.high.label,
        "low_reads": config.read_modes.low.label, **figures,
    }  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.replay_matrix", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("mixes", nargs="*", type=Path, help="traces with classes; none with --tables")
    parser.add_argument("--out", type=Path, default=Path("out/replay-matrix"))
    parser.add_argument("--models", default="llama-3.1-8b", help="presets, with commas between them")
    parser.add_argument("--machine", default="H200", help="preset of the cost model")
    parser.add_argument("--capacity", default="1/2,1/3,2/3", help="shares of the unlimited peak")
    parser.add_argument("--duration", type=float, default=300.0, help="seconds of each trace")
    parser.add_argument("--part", default="0/1", help="i/n: every n-th mix from the i-th, for n processes side by side")
    parser.add_argument("--tables", action="store_true", help="write the tables of what is there, run nothing")
    args = parser.parse_args(argv)
    runs = args.out / "runs"
    runs.mkdir(parents=True, exist_ok=True)
    index, parts = (int(part) for part in args.part.split("/"))
    mixes = [] if args.tables else args.mixes[index::parts]
    shares = [share for share in parse_capacities(args.capacity) if isinstance(share, float)]
    todo = cells(mixes, args.models.split(","), shares, args.machine)
    traces: dict[Path, list[TraceRequest]] = {}
    try:
        for number, cell in enumerate(todo, start=1):
            path = runs / f"{cell.name}.json"
            if path.is_file():
                continue
            if cell.mix not in traces:
                traces[cell.mix] = read_trace(cell.mix, args.duration)
            peak = None
            if cell.policy != UNLIMITED:
                unlimited = runs / f"{Cell(cell.mix, cell.model, 1.0, UNLIMITED, machine=cell.machine).name}.json"
                peak = int(json.loads(unlimited.read_text())["peak_tokens"])
            begin = time.perf_counter()
            figures = run(cell, traces[cell.mix], args.duration, peak)
            part = path.with_suffix(".part")
            part.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
            part.replace(path)
            print(f"{number}/{len(todo)} {cell.name}: {time.perf_counter() - begin:.0f} s", flush=True)
            write_tables(args.out)
    except KeyboardInterrupt:
        print("interrupted; the same command goes on from here", file=sys.stderr)
        return 130
    write_tables(args.out)
    return 0


def write_tables(out: Path) -> None:
    """`tables.md` and `goals.md` of the runs that are there."""
    found = [json.loads(path.read_text()) for path in sorted((out / "runs").glob("*.json"))]
    (out / "tables.md").write_text(tables_markdown(found), encoding="utf-8")
    (out / "goals.md").write_text(goals_markdown(found), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
