"""Tables of a replay matrix: the figures, and the goals with what was reached. Computes; runs nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

Run = dict[str, Any]
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
        lines += [
            "| pool | policy | class | TTFT s 50 / 90 / 99 | TPOT ms 50 / 99 | gap s 99 | end to end s 50 / 99 | SLO | "
            "longest wait s | tok/s | retr | recomputed | parked | in GB | streamed GB | link |",
            "|" + "---|" * 16,
        ]
        for run in sorted(mine, key=lambda r: (-r["share"], label(r))):
            pool = "unlimited" if run["policy"] == "unlimited" else f"{run['share']:.2f}: {run['capacity_tokens']:,}"
            for name, c in run["classes"].items():
                work = ["", "", "", "", "", "", ""]
                if name == "high":
                    work = [
                        f"{run['throughput_tokens_per_s']:.0f}", str(run["retractions"]),
                        f"{run['recomputed_tokens']:,}",
                        str(run["parkings"]), f"{run['swapped_in_bytes'] / 1e9:.0f}",
                        f"{run['streamed_bytes'] / 1e9:.0f}", f"{run['link_busy']:.0%}",
                    ]  # fmt: skip
                cells = [
                    pool, label(run), name, _times(c["ttft_s"], "p50", "p90", "p99"),
                    _times(c["tpot_s"], "p50", "p99", scale=1e3), _times(c["longest_gap_s"], "p99"),
                    _times(c["e2e_s"], "p50", "p99"), f"{c['slo_attainment']:.1%}", f"{c['longest_wait_s']:.1f}", *work,
                ]  # fmt: skip
                lines.append("| " + " | ".join(cells) + " |")
        lines.append("")
    return "\n".join(lines)


def _times(values: dict[str, float | None], *names: str, scale: float = 1.0) -> str:
    return " / ".join("-" if (v := values[name]) is None else f"{v * scale:.3g}" for name in names)


# ---- goals ----------------------------------------------------------------------------------------------------------


def goals_markdown(runs: list[Run]) -> str:
    """For each mix, shape and capacity: each goal, what was reached as a ratio, and whether that meets it."""
    lines = [
        "# Goals", "",
        "Ratios of narrow to what the goal names; lower is better, but for throughput. **Bold**: missed.", "",
        "| model, mix, pool | reads | high TTFT P99 / unlimited (1.05) | high gap P99 / unlimited (1.05) | "
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
                    lines.append(_goal_row(f"{model}, {mix}, {share:.2f}", run, unlimited[0], others))
    return "\n".join(lines) + "\n"


def _goal_row(where: str, run: Run, unlimited: Run, others: list[Run]) -> str:
    lossy = "LOSSY" in run["low_reads"]
    within = 1.0 if lossy else 1.1

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
        where, "window, LOSSY" if lossy else "exact", against(high_ttft, high_ttft(unlimited), 1.05),
        against(high_gap, high_gap(unlimited), 1.05), against(ttft, best(ttft), 0.5),
        against(e2e_50, best(e2e_50), within),
        against(e2e_99, best(e2e_99), within), ", ".join(_mark(end, not lossy or end <= 1.1 + 5e-3) for end in ends),
        _mark(redone, redone == 0), _mark(rate, rate >= 0.995),
    ]  # fmt: skip
    return "| " + " | ".join(cells) + " |"


def _mark(value: float, met: bool) -> str:
    text = f"{value:.2f}" if isinstance(value, float) else str(value)
    return text if met else f"**{text}**"
