"""Random load against the cache for as long as it is told, with a full recount and read-back after every operation.

    python -m tests.stateful.soak --seconds 600 --seed 7
    python -m tests.stateful.soak --operations 100000

Catches: any KV that is lost, stale or in a wrong place; any page, slot, staging or host page that leaks or is owned
twice; any refusal that changes something. It runs the operations of `oracle.CacheModel`, as the hypothesis machine
does, without the cost of shrinking. On failure it prints the seed and the run, which `--seed S --run R` repeats alone.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

if __name__ == "__main__":  # the paths that pytest takes from pyproject.toml
    sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2] / "src")]

import torch

from oracle import CacheModel
from strategies import CONFIG, OPERATIONS

RUN_OPERATIONS = 400  # then a new geometry
NAMES = list(OPERATIONS)
WEIGHTS = [OPERATIONS[name][0] for name in NAMES]


@dataclass
class Totals:
    """What the soak has exercised; a soak that never halves proves nothing."""

    operations: int = 0
    runs: int = 0
    events: Counter[str] = field(default_factory=Counter)

    def add(self, model: CacheModel) -> None:
        a = model.allocator
        self.runs += 1
        self.events.update(
            halved_high=a.num_halvings[1],
            halved_low=a.num_halvings[2],
            merged=a.num_merges,
            restored=a.num_restores,
            evicted=a.num_evicted_pages,
            refused=model.refused,
            served=model.served,
            to_host_bytes=a.repacker.counters.to_host_bytes,
            from_host_bytes=a.repacker.counters.from_host_bytes,
        )


def one_run(seed: int, run: int, operations: int, totals: Totals) -> None:
    """One geometry, `operations` random operations, everything freed at the end."""
    rng = random.Random(f"{seed}:{run}")
    config = CONFIG.sample(rng)
    model = CacheModel(config)
    trace: list[str] = []
    try:
        for _ in range(operations):
            name = rng.choices(NAMES, WEIGHTS)[0]
            arguments = OPERATIONS[name][1].sample(rng)
            trace.append(f"{name}({arguments})")
            getattr(model, name)(**arguments)
            model.verify()
            totals.operations += 1
        trace.append("finish()")
        model.finish()
    except BaseException:
        recent = "\n  ".join(trace[-6:])
        print(
            f"\nsoak failed: --seed {seed} --run {run}, operation {len(trace)}\n  {config}\n  {recent}",
            file=sys.stderr,
            flush=True,
        )
        raise
    totals.add(model)


def soak(seed: int, operations: int | None = None, seconds: float | None = None, progress: bool = False) -> Totals:
    """Runs until `operations` are done or `seconds` are over; raises at the first fault."""
    totals, start, shown = Totals(), time.monotonic(), 0.0
    while True:
        elapsed = time.monotonic() - start
        if progress and elapsed - shown >= 5:
            shown = elapsed
            print(
                f"{totals.operations} operations, {totals.operations / elapsed:.0f}/s, {totals.runs} runs", flush=True
            )
        if (seconds is not None and elapsed >= seconds) or (operations is not None and totals.operations >= operations):
            return totals
        left = RUN_OPERATIONS if operations is None else min(RUN_OPERATIONS, operations - totals.operations)
        one_run(seed, totals.runs, left, totals)


def main() -> None:
    parser = argparse.ArgumentParser(description="random load with a full recount and read-back after every operation")
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--seconds", type=float, help="stop after this long (default: 60)")
    length.add_argument("--operations", type=int, help="stop after this many operations")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**32))
    parser.add_argument("--run", type=int, help="repeat this run of the seed alone")
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(f"seed {args.seed}", flush=True)
    start = time.monotonic()
    if args.run is not None:
        totals = Totals()
        one_run(args.seed, args.run, RUN_OPERATIONS, totals)
    else:
        seconds = 60.0 if args.seconds is None and args.operations is None else args.seconds
        totals = soak(args.seed, args.operations, seconds, progress=True)
    elapsed = time.monotonic() - start
    print(f"{totals.operations} operations in {elapsed:.1f} s, {totals.operations / elapsed:.0f} operations per second")
    print(f"{totals.runs} geometries, {dict(totals.events)}")


if __name__ == "__main__":
    main()
