"""Tables of a replay matrix: the figures, the goals with what was reached, what the time went to. Runs nothing.

    python -m benchmarks.replay_tables RESULTS [RESULTS ...] --into docs/replay.md

fills the places of a document that look like this, from `RESULTS/goals.md` and `tables.md`, and the costs from
`RESULTS/runs.jsonl`. A machine, shape and mix that a later folder has comes from there alone.

    <!-- table: goals -->                                      the goals, a row a run of narrow
    <!-- table: times azure_conv+arxiv llama-3.1-8b H200 0.50 -->    all runs of one mix, shape, machine and pool
    <!-- table: costs azure_conv+arxiv llama-3.1-8b H200 -->   what the time of its runs went to
    <!-- end -->                                               after each of them
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

Run = dict[str, Any]
RUNS = "runs.jsonl"  # in a folder of results: a line a run
ALTERNATIVES = ("reserve", "retract", "swap")


def label(run: Run) -> str:
    """ "narrow", "narrow LOSSY: low window", "swap" """
    if run["policy"] != "narrow":
        return str(run["policy"])
    lossy = [f"{name} window" for name in ("high", "low") if "LOSSY" in run[f"{name}_reads"]]
    return "narrow LOSSY: " + ", ".join(lossy) if lossy else "narrow, exact"


def groups(runs: Iterable[Run]) -> dict[tuple[str, str], list[Run]]:
    """(machine and model, mix) -> its runs."""
    found: dict[tuple[str, str], list[Run]] = {}
    for run in runs:
        found.setdefault((f"{run['machine']}, {run['model']}", run["mix"].split(".")[0]), []).append(run)
    return dict(sorted(found.items()))


def load(folders: Sequence[Path]) -> list[Run]:
    """All runs of these results."""
    files = [folder / RUNS for folder in folders if (folder / RUNS).is_file()]
    return [json.loads(line) for file in files for line in file.read_text(encoding="utf-8").splitlines()]


def tables_markdown(runs: list[Run]) -> str:
    """One table a mix and shape, a row a run and class."""
    lines = [
        "# Replays, modelled",
        "",
        "Priorities are assigned by the makers of the mixes; no source carries them.",
        "",
    ]
    for (model, mix), mine in groups(runs).items():
        first = mine[0]
        lines += [
            f"## {mix}, {model}: first {first['duration_s']:g} s, {first['requests']} requests",
            "",
        ]
        lines += times_table(mine)
        lines.append("")
    return "\n".join(lines)


def times_table(runs: list[Run]) -> list[str]:
    """A row a run and class: latencies, and beside high priority's what the run as a whole did."""
    lines = [
        "| pool | policy | class | TTFT s 50 / 90 / 99 | TPOT ms 50 / 99 | gap s 99 | end to end s 50 / 99 | SLO | "
        "longest wait s | tok/s | retr | recomputed | parked | in GB | streamed GB | link |",
        "|" + "---|" * 16,
    ]
    for run in sorted(runs, key=lambda r: (-r["share"], label(r))):
        pool = "unlimited" if run["policy"] == "unlimited" else f"{run['share']:.2f}: {run['capacity_tokens']:,}"
        for name, c in run["classes"].items():
            work = ["", "", "", "", "", "", ""]
            if name == "high":
                work = [
                    f"{run['throughput_tokens_per_s']:.0f}", str(run["retractions"]), f"{run['recomputed_tokens']:,}",
                    str(run["parkings"]), f"{run['swapped_in_bytes'] / 1e9:.0f}",
                    f"{run['streamed_bytes'] / 1e9:.0f}", f"{run['link_busy']:.0%}",
                ]  # fmt: skip
            cells = [
                pool, label(run), name, _times(c["ttft_s"], "p50", "p90", "p99"),
                _times(c["tpot_s"], "p50", "p99", scale=1e3), _times(c["longest_gap_s"], "p99"),
                _times(c["e2e_s"], "p50", "p99"), f"{c['slo_attainment']:.1%}", f"{c['longest_wait_s']:.1f}", *work,
            ]  # fmt: skip
            lines.append("| " + " | ".join(cells) + " |")
    return lines


def costs_table(runs: list[Run]) -> list[str]:
    """What each run's time went to, in the terms of the cost model."""
    lines = [
        "| machine, model, mix, pool | policy | span s | computing s | moved between steps s | waited for link, "
        "host s | idle s | in under steps GB | in in all GB | streamed GB | low TTFT P50 s |",
        "|" + "---|" * 11,
    ]
    for run in sorted(runs, key=lambda r: (r["machine"], r["model"], r["mix"], r["share"], label(r))):
        done = run.get("modelled")
        if done is None:
            continue
        where = f"{run['machine']}, {run['model']}, {run['mix'].split('.')[0]}, {run['share']:.2f}"
        cells = [
            where, label(run), *(f"{max(0.0, v):.1f}" for v in (
                run["span_s"], done["compute_s"], done["moves_s"], done["waits_s"], run["span_s"] - done["busy_s"],
            )), *(f"{v / 1e9:.0f}" for v in (done["behind_bytes"], run["swapped_in_bytes"], run["streamed_bytes"])),
            f"{run['classes']['low']['ttft_s']['p50']:.3g}",
        ]  # fmt: skip
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def _times(values: dict[str, float | None], *names: str, scale: float = 1.0) -> str:
    return " / ".join("-" if (v := values[name]) is None else f"{v * scale:.3g}" for name in names)


# ---- goals ----------------------------------------------------------------------------------------------------------


def goals_markdown(runs: list[Run]) -> str:
    """For each mix, shape and capacity: each goal, what was reached as a ratio, and whether that meets it."""
    lines = [
        "# Goals", "",
        "Ratios of narrow to what the goal names; lower is better, but for throughput. **Bold**: missed.", "",
    ]  # fmt: skip
    return "\n".join([*lines, *goals_table(runs)]) + "\n"


def goals_table(runs: list[Run]) -> list[str]:
    """A row for each run of narrow beside which all alternatives were run."""
    lines = [
        "| machine, model, mix, pool | reads | high TTFT P99 / unlimited (1.05) | high gap P99 / unlimited (1.05) | "
        "low TTFT P50 / best (0.5) | low e2e P50 / best (exact 1.1, window 1.0) | low e2e P99 / best (likewise) | "
        "low e2e P50, P99 / unlimited (window 1.1) | retracted, recomputed (0) | throughput / best (1) |",
        "|" + "---|" * 10,
    ]  # fmt: skip
    for (model, mix), mine in groups(runs).items():
        unlimited = [run for run in mine if run["policy"] == "unlimited"]
        for share in sorted({run["share"] for run in mine if run["policy"] != "unlimited"}):
            here = [run for run in mine if run["share"] == share and run["policy"] != "unlimited"]
            others = [run for run in here if run["policy"] in ALTERNATIVES]
            for run in (run for run in here if run["policy"] == "narrow"):
                if unlimited and len(others) == len(ALTERNATIVES):
                    where = f"{model}, {mix}, {share:.2f}"
                    if run["duration_s"] != 300.0:
                        where += f", {run['duration_s']:g} s"
                    lines.append(_goal_row(where, run, unlimited[0], others))
    return lines


def _goal_row(where: str, run: Run, unlimited: Run, others: list[Run]) -> str:
    lossy = "LOSSY" in run["low_reads"]
    within = 1.0 if lossy else 1.1
    reads = [f"{name} window, LOSSY" for name in ("high", "low") if "LOSSY" in run[f"{name}_reads"]]

    def best(figure: Callable[[Run], float]) -> float:
        return min(figure(other) for other in others)

    def figure(cls: str, quantity: str, percentile: str) -> Callable[[Run], float]:
        return lambda r: float(r["classes"][cls][quantity][percentile])

    def against(pick: Callable[[Run], float], base: float, most: float) -> str:
        return _mark(pick(run) / base, pick(run) / base <= most + 5e-3)  # as printed: two digits

    high_ttft, high_gap = figure("high", "ttft_s", "p99"), figure("high", "longest_gap_s", "p99")
    ttft, e2e_50, e2e_99 = figure("low", "ttft_s", "p50"), figure("low", "e2e_s", "p50"), figure("low", "e2e_s", "p99")
    ends = [pick(run) / pick(unlimited) for pick in (e2e_50, e2e_99)]
    redone = run["retractions"] + run["recomputed_tokens"]
    rate = run["throughput_tokens_per_s"] / max(other["throughput_tokens_per_s"] for other in others)
    cells = [
        where, "; ".join(reads) or "exact", against(high_ttft, high_ttft(unlimited), 1.05),
        against(high_gap, high_gap(unlimited), 1.05), against(ttft, best(ttft), 0.5),
        against(e2e_50, best(e2e_50), within),
        against(e2e_99, best(e2e_99), within), ", ".join(_mark(end, not lossy or end <= 1.1 + 5e-3) for end in ends),
        _mark(redone, redone == 0), _mark(rate, rate >= 0.995),
    ]  # fmt: skip
    return "| " + " | ".join(cells) + " |"


def _mark(value: float, met: bool) -> str:
    text = f"{value:.2f}" if isinstance(value, float) else str(value)
    return text if met else f"**{text}**"


# ---- into a document ------------------------------------------------------------------------------------------------

PLACE = re.compile(r"(<!-- table: ([^>]*?) -->\n).*?(<!-- end -->)", re.DOTALL)


def fill(text: str, folders: Sequence[Path]) -> str:
    """The document with its tables made anew. ValueError names a place that no run fits, or no table is known for."""

    def table(match: re.Match[str]) -> str:
        kind, *words = match[2].split()
        if kind == "goals":
            lines = goals_of(folders)
        elif kind == "costs" and len(words) == 3:
            mine = [r for r in load(folders) if [r["mix"].split(".")[0], r["model"], r["machine"]] == words]
            lines = costs_table(mine)
        elif kind == "times" and len(words) == 4:
            lines = times_of(folders, *words)
        else:
            raise ValueError(f"no table {match[2]!r}: goals, costs MIX MODEL MACHINE, or times MIX MODEL MACHINE SHARE")
        if len(lines) < 3:
            raise ValueError(f"no run for the table {match[2]!r}")
        return "\n".join([match[1], *lines, "", match[3]])

    return PLACE.sub(table, text)


def goals_of(folders: Sequence[Path]) -> list[str]:
    """The rows of their `goals.md`, those of one machine, shape and mix from the last folder that has any."""
    head: list[str] = []
    rows: dict[tuple[str, ...], list[str]] = {}
    for folder in folders:
        lines = [line for line in (folder / "goals.md").read_text(encoding="utf-8").splitlines() if line[:1] == "|"]
        head, found = lines[:2], {}
        for line in lines[2:]:
            found.setdefault(tuple(line.split(",")[:3]), []).append(line)
        rows.update(found)
    return [*head, *(line for key in sorted(rows) for line in sorted(rows[key]))]


def times_of(folders: Sequence[Path], mix: str, model: str, machine: str, share: str) -> list[str]:
    """The rows of one mix, shape, machine and pool in the last of their `tables.md` that has them."""
    found: list[str] = []
    for folder in folders:
        text = (folder / "tables.md").read_text(encoding="utf-8")
        for section in text.split("\n## ")[1:]:
            if section.startswith(f"{mix}, {machine}, {model}: "):
                lines = [line for line in section.splitlines() if line[:1] == "|"]
                mine = [line for line in lines[2:] if line.startswith(("| unlimited |", f"| {share}: "))]
                found = [*lines[:2], *mine] if any(line.startswith(f"| {share}: ") for line in mine) else found
    return found


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.replay_tables", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("results", nargs="+", type=Path, help="folders that replay_matrix wrote")
    parser.add_argument("--into", type=Path, required=True, help="document with places for tables")
    args = parser.parse_args(argv)
    args.into.write_text(fill(args.into.read_text(encoding="utf-8"), args.results), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
