"""The replay benchmark over mixes, shapes, capacities, policies and read modes; all results in one file, so it resumes.

    python -m benchmarks.replay_matrix MIX.jsonl.gz [MIX ...] --out DIR --models llama-3.1-8b,llama-3.1-70b
    python -m benchmarks.replay_matrix MIX [MIX ...] --everything --jobs 16 --limit-s 540    all that the document shows
    python -m benchmarks.replay_matrix --out DIR --tables                                    the tables of what is there

Ctrl-C, or the limit, keeps every run that is done; the same command goes on with those that are missing.
`DIR/runs.jsonl` holds the figures of each run (without its timeline), a line a run, and the commit it was made with;
`DIR/tables.md` a table for each mix and shape, and `DIR/goals.md` the goals with what was reached. Half of the peak
comes first, for every mix, then the other capacities. `--everything`: the 8B shape; the 70B one, the 8B one with the
host's part, and high priority with a window at a half; then other capacities (with the host's part: first mix only).
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.replay_tables import RUNS, goals_markdown, load, tables_markdown
from tidekv.replay.command import parse_capacities
from tidekv.replay.report import run_figures
from tidekv.replay.run import UNLIMITED, ReplayConfig, run_policy, whole_trace_pages
from tidekv.replay.trace import read_trace

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
        """Of its file, without a suffix, and of letters that every file transfer takes."""
        mix = self.mix.name.split(".")[0].replace("+", "-")
        reads = (
            "" if (self.high_reads, self.low_reads) == ("exact", "exact") else f"-{self.high_reads}-{self.low_reads}"
        )
        machine = "" if self.machine == "H200" else f"_{self.machine}"
        return f"{mix}_{self.model}{machine}_{self.share:.3f}_{self.policy}{reads}"

    @property
    def ample(self) -> Cell:
        """The run that the peak is taken from."""
        return Cell(self.mix, self.model, 1.0, UNLIMITED, machine=self.machine)


def cells(
    mixes: Sequence[Path], models: Sequence[str], shares: Sequence[float], machine: str, high_reads: str = "exact"
) -> list[Cell]:
    """All runs in the order in which they are wanted. `high_reads` other than exact: that one alone, and its peak."""
    variants = VARIANTS if high_reads == "exact" else (("narrow", high_reads, "exact"),)
    found: list[Cell] = []
    for model in models:
        for index, share in enumerate(sorted(shares, key=lambda s: abs(s - 0.5))):
            for mix in mixes:
                if index == 0:
                    found.append(Cell(mix, model, 1.0, UNLIMITED, machine=machine))
                found += [Cell(mix, model, share, *variant, machine) for variant in variants]
    return found


def everything(mixes: Sequence[Path]) -> list[Cell]:
    """All that docs/replay.md shows, in the order in which it is wanted; each once."""
    shares, half = (1 / 2, 1 / 3, 2 / 3), (1 / 2,)
    found = [
        *cells(mixes, ["llama-3.1-8b"], shares, "H200"),
        *cells(mixes, ["llama-3.1-70b"], half, "H200"),
        *cells(mixes, ["llama-3.1-8b"], half, "H200-host"),
        *cells(mixes, ["llama-3.1-8b"], half, "H200", "window"),
        *cells(mixes, ["llama-3.1-70b"], shares, "H200"),
        *cells(mixes[:1], ["llama-3.1-8b"], shares, "H200-host"),
    ]
    return list(dict.fromkeys(found))


def commit() -> str:
    """Of the checkout, with a + if anything was changed since; "unknown" outside one."""
    command = ["git", "describe", "--always", "--dirty=+"]
    found = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    return found.stdout.strip() or "unknown"


def run(cell: Cell, duration_s: float, peak_tokens: int | None, snapshot: str) -> dict[str, Any]:
    """Make one run and return its figures. `peak_tokens`: of the unlimited run; None if this is it."""
    trace = read_trace(cell.mix, duration_s)
    config = ReplayConfig(machine=cell.machine, model=cell.model, high_reads=cell.high_reads, low_reads=cell.low_reads)  # type: ignore[arg-type]
    if peak_tokens is None:
        pages = whole_trace_pages(trace, config)
    else:
        pages = max(2, int(cell.share * peak_tokens) // config.page_size)
    figures = run_figures(run_policy(cell.policy, pages, trace, config))
    del figures["timeline"]
    return {
        "name": cell.name, "mix": cell.mix.name, "model": cell.model, "machine": config.machine, "share": cell.share,
        "duration_s": duration_s, "requests": len(trace), "commit": snapshot,
        "high_reads": config.read_modes.high.label, "low_reads": config.read_modes.low.label, **figures,
    }  # fmt: skip


def run_all(todo: Sequence[Cell], duration_s: float, out: Path, jobs: int, snapshot: str, limit_s: float) -> bool:
    """Make the runs that are missing, in order, `jobs` at a time; a run waits for the one that its peak comes from.
    False: the limit came first, and what had begun is given up."""
    peaks = {figures["name"]: figures["peak_tokens"] for figures in load([out])}
    missing = [cell for cell in todo if cell.name not in peaks]
    end_s = time.monotonic() + limit_s if limit_s < float("inf") else None
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=context) as pool:
        going: set[Future[dict[str, Any]]] = set()
        while missing or going:
            ready = [cell for cell in missing if cell.policy == UNLIMITED or cell.ample.name in peaks]
            for cell in ready[: jobs - len(going)]:
                missing.remove(cell)
                peak = None if cell.policy == UNLIMITED else peaks[cell.ample.name]
                going.add(pool.submit(run, cell, duration_s, peak, snapshot))
            left_s = None if end_s is None else max(0.0, end_s - time.monotonic())
            finished, going = wait(going, left_s, FIRST_COMPLETED)
            for future in finished:
                figures = future.result()
                peaks[figures["name"]] = figures["peak_tokens"]
                with (out / RUNS).open("a", encoding="utf-8") as file:
                    file.write(json.dumps(figures, separators=(",", ":")) + "\n")
                print(f"{figures['name']}: {figures['wall_s']:.0f} s", flush=True)
            if not finished:
                break
        else:
            return True
        for process in multiprocessing.active_children():
            process.terminate()
    return False


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
    parser.add_argument(
        "--everything", action="store_true", help="all that docs/replay.md shows, whatever else is said"
    )
    parser.add_argument("--limit-s", type=float, default=float("inf"), help="seconds after which it ends as it is")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time, one core each")
    parser.add_argument("--high-reads", default="exact", help="of narrow; other than exact: only that run is made")
    parser.add_argument("--commit", help="what is run, where the checkout does not say")
    parser.add_argument("--tables", action="store_true", help="write the tables of what is there, run nothing")
    args = parser.parse_args(argv)
    if args.jobs < 1:
        parser.error(f"--jobs must be >= 1, got {args.jobs}")
    args.out.mkdir(parents=True, exist_ok=True)
    mixes = [] if args.tables else args.mixes
    shares = [share for share in parse_capacities(args.capacity) if isinstance(share, float)]
    todo = cells(mixes, args.models.split(","), shares, args.machine, args.high_reads)
    if args.everything:
        todo = everything(mixes)
    try:
        is_done = run_all(todo, args.duration, args.out, args.jobs, args.commit or commit(), args.limit_s)
    except KeyboardInterrupt:
        is_done = False
    write_tables(args.out)
    if not is_done:
        print("not all is done; the same command goes on from here", file=sys.stderr)
    return 0 if is_done else 130


def write_tables(out: Path) -> None:
    """`tables.md` and `goals.md` of the runs that are there."""
    found = load([out])
    (out / "tables.md").write_text(tables_markdown(found), encoding="utf-8")
    (out / "goals.md").write_text(goals_markdown(found), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
