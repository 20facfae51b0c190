"""The replay benchmark over mixes, shapes, capacities, policies and read modes; one result file a run, so it resumes.

    python -m benchmarks.replay_matrix MIX.jsonl.gz [MIX ...] --out DIR --models llama-3.1-8b,llama-3.1-70b
    python -m benchmarks.replay_matrix ... --jobs 16           that many runs at a time, one core each
    python -m benchmarks.replay_matrix --out DIR --tables      the tables of what is there

Ctrl-C keeps every run that is done; the same command goes on with those that are missing. `DIR/runs/*.json` holds the
figures of each run (without its timeline) and the commit it was made with, `DIR/tables.md` a table for each mix and
shape, and `DIR/goals.md` the goals with what was reached. Half of the peak comes first, for every mix, then the other
capacities.
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

from benchmarks.replay_tables import goals_markdown, load, tables_markdown
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
    found = []
    for model in models:
        for index, share in enumerate(sorted(shares, key=lambda s: abs(s - 0.5))):
            for mix in mixes:
                if index == 0:
                    found.append(Cell(mix, model, 1.0, UNLIMITED, machine=machine))
                found += [Cell(mix, model, share, *variant, machine) for variant in variants]
    return found


def commit() -> str:
    """Of the checkout, with a + if anything was changed since; "unknown" outside one."""
    command = ["git", "describe", "--always", "--dirty=+"]
    found = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    return found.stdout.strip() or "unknown"


def run(cell: Cell, duration_s: float, runs: Path, snapshot: str) -> tuple[str, float]:
    """Make one run and write its figures to `runs`; (its name, seconds it took)."""
    begin = time.perf_counter()
    trace = read_trace(cell.mix, duration_s)
    config = ReplayConfig(machine=cell.machine, model=cell.model, high_reads=cell.high_reads, low_reads=cell.low_reads)  # type: ignore[arg-type]
    if cell.policy == UNLIMITED:
        pages = whole_trace_pages(trace, config)
    else:
        peak_tokens = int(json.loads((runs / f"{cell.ample.name}.json").read_text())["peak_tokens"])
        pages = max(2, int(cell.share * peak_tokens) // config.page_size)
    figures = run_figures(run_policy(cell.policy, pages, trace, config))
    del figures["timeline"]
    figures = {
        "mix": cell.mix.name, "model": cell.model, "machine": config.machine, "share": cell.share,
        "duration_s": duration_s, "requests": len(trace), "commit": snapshot,
        "high_reads": config.read_modes.high.label, "low_reads": config.read_modes.low.label, **figures,
    }  # fmt: skip
    part = runs / f"{cell.name}.part"
    part.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    part.replace(runs / f"{cell.name}.json")
    return cell.name, time.perf_counter() - begin


def run_all(todo: Sequence[Cell], duration_s: float, out: Path, jobs: int, snapshot: str) -> None:
    """Make the runs that are missing, in order, `jobs` at a time; a run waits for the one that its peak comes from."""
    runs = out / "runs"
    missing = [cell for cell in todo if not (runs / f"{cell.name}.json").is_file()]
    if jobs == 1:
        for cell in missing:
            _done(out, *run(cell, duration_s, runs, snapshot))
        return
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        going: set[Future[tuple[str, float]]] = set()
        while missing or going:
            ready = [c for c in missing if c.policy == UNLIMITED or (runs / f"{c.ample.name}.json").is_file()]
            for cell in ready[: jobs - len(going)]:
                missing.remove(cell)
                going.add(pool.submit(run, cell, duration_s, runs, snapshot))
            finished, going = wait(going, return_when=FIRST_COMPLETED)
            for future in finished:
                _done(out, *future.result())


def _done(out: Path, name: str, seconds: float) -> None:
    print(f"{name}: {seconds:.0f} s", flush=True)
    write_tables(out)


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
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time, one core each")
    parser.add_argument("--high-reads", default="exact", help="of narrow; other than exact: only that run is made")
    parser.add_argument("--commit", help="what is run, where the checkout does not say")
    parser.add_argument("--tables", action="store_true", help="write the tables of what is there, run nothing")
    args = parser.parse_args(argv)
    if args.jobs < 1:
        parser.error(f"--jobs must be >= 1, got {args.jobs}")
    (args.out / "runs").mkdir(parents=True, exist_ok=True)
    index, parts = (int(part) for part in args.part.split("/"))
    mixes = [] if args.tables else args.mixes[index::parts]
    shares = [share for share in parse_capacities(args.capacity) if isinstance(share, float)]
    todo = cells(mixes, args.models.split(","), shares, args.machine, args.high_reads)
    try:
        run_all(todo, args.duration, args.out, args.jobs, args.commit or commit())
    except KeyboardInterrupt:
        print("interrupted; the same command goes on from here", file=sys.stderr)
        return 130
    write_tables(args.out)
    return 0


def write_tables(out: Path) -> None:
    """`tables.md` and `goals.md` of the runs that are there."""
    found = load([out])
    (out / "tables.md").write_text(tables_markdown(found), encoding="utf-8")
    (out / "goals.md").write_text(goals_markdown(found), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
