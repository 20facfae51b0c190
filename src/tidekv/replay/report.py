"""What a replay showed: figures for each class, one table, `report.json` and plots. Computes; decides nothing.

SLOs, stated in every output: high priority: first token within 1 s, then 50 ms a token at most on average; low
priority: first token within 10 s. Goodput is the number of requests a second that met theirs.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from tidekv.engine.request import Request
from tidekv.replay.cost import ALL_REDUCE_S, MACHINES, MEASURED_DECODE_S, MODELS
from tidekv.replay.run import PolicyRun, Replay, Sample

SLO_S = {"high": {"ttft_s": 1.0, "tpot_s": 0.05}, "low": {"ttft_s": 10.0, "tpot_s": float("inf")}}
COLORS = {"free": "#d9d9d9", "cached": "#a6cee3", "high": "#d73027", "low": "#4575b4", "dynamic": "#fee090"}


def class_figures(requests: list[Request], num_refused: int, span_s: float, slo: dict[str, float]) -> dict[str, Any]:
    """Figures of one class. Times in seconds; percentiles over requests; None where no request has the quantity.

    A request without a first token at the end of an interrupted run counts as not meeting its SLO.
    """
    started = [r for r in requests if r.first_token_s is not None]
    done = [r for r in started if r.finish_s is not None]
    ttft = np.array([r.token_times_s[0] - r.arrival_s for r in started])
    several = [r for r in done if len(r.token_times_s) > 1]
    tpot = np.array([(r.token_times_s[-1] - r.token_times_s[0]) / (len(r.token_times_s) - 1) for r in several])
    gaps = np.array([np.diff(r.token_times_s).max() for r in several])
    e2e = np.array([r.token_times_s[-1] - r.arrival_s for r in done])
    met = sum(_meets(r, slo) for r in done)
    return {
        "requests": len(requests) + num_refused,
        "finished": len(done),
        "refused": num_refused,
        "ttft_s": _percentiles(ttft, (50, 90, 99, 100)),
        "tpot_s": _percentiles(tpot, (50, 99)),
        "longest_gap_s": _percentiles(gaps, (50, 99, 100)),
        "e2e_s": _percentiles(e2e, (50, 99)),
        # Nobody starves: the longest that any request of the class went without a token, its first one included.
        "longest_wait_s": max(_percentiles(ttft, (100,))["p100"] or 0.0, _percentiles(gaps, (100,))["p100"] or 0.0),
        "slo_attainment": met / max(1, len(requests) + num_refused),
        "goodput_per_s": met / span_s,
        "output_tokens": sum(len(r.output_ids) for r in requests),
    }


def _meets(request: Request, slo: dict[str, float]) -> bool:
    times = request.token_times_s
    tpot = (times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else 0.0
    return times[0] - request.arrival_s <= slo["ttft_s"] and tpot <= slo["tpot_s"]


def _percentiles(values: np.ndarray, which: tuple[int, ...]) -> dict[str, float | None]:
    return {f"p{q}": float(np.percentile(values, q)) if len(values) else None for q in which}


def run_figures(run: PolicyRun) -> dict[str, Any]:
    """All figures of one run, JSON-ready."""
    stats = run.stats
    classes = {}
    for name, is_high in (("high", True), ("low", False)):
        mine = [r for r in run.requests if r.is_high_priority == is_high]
        refused = sum(r.is_high_priority == is_high for r in run.refused)
        classes[name] = class_figures(mine, refused, run.span_s, SLO_S[name])
    tokens = sum(figures["output_tokens"] for figures in classes.values())
    return {
        "policy": run.policy,
        "interrupted": run.interrupted,
        "num_pages": run.num_pages,
        "capacity_tokens": run.num_pages * run.page_size,
        "peak_tokens": run.peak_tokens,
        "span_s": run.span_s,
        "wall_s": run.wall_s,
        "steps": len(run.step_s),
        "step_s": _percentiles(run.step_s, (50, 99)),
        "throughput_tokens_per_s": tokens / run.span_s,
        "retractions": stats["retractions"],
        "recomputed_tokens": stats["recomputed_tokens"],
        "parkings": stats["parkings"],
        "to_host_bytes": stats["bytes_to_host"],
        "swapped_in_bytes": stats["bytes_from_host"] - stats["streamed_bytes"],
        "streamed_bytes": stats["streamed_bytes"],
        "halvings": stats["halvings_low"] + stats["halvings_high"],
        "device_busy": run.device_busy,
        "link_busy": run.link_busy,
        "modelled": asdict(run.modelled) if run.modelled is not None else None,
        "classes": classes,
        "timeline": [asdict(sample) for sample in run.samples],
    }


def report(replay: Replay) -> dict[str, Any]:
    """The whole report, JSON-ready."""
    config = replay.config
    modes = config.read_modes
    return {
        "trace": replay.trace,
        "trace_requests": replay.num_trace_requests,
        "note": "priorities are assigned by us; no source carries them",
        "config": asdict(config),
        "high_reads": modes.high.label,
        "low_reads": modes.low.label,
        "slo_s": {name: {k: v for k, v in slo.items() if v != float("inf")} for name, slo in SLO_S.items()},
        "cost_model": cost_constants(config.machine, config.model) if config.executor == "model" else None,
        "unlimited_peak_tokens": replay.unlimited_peak_tokens,
        "capacity_tokens": replay.capacity_tokens,
        "runs": [run_figures(run) for run in replay.runs],
    }


def cost_constants(machine: str, model: str) -> dict[str, Any]:
    """The constants that the virtual clock used, with their sources."""
    return {
        "machine": asdict(MACHINES[machine]),
        "model": asdict(MODELS[model]),
        "measured_decode_s": MEASURED_DECODE_S,
        "all_reduce_s": ALL_REDUCE_S,
    }


def write_report(replay: Replay, folder: Path) -> list[Path]:
    """`report.json` and two plots into `folder`; returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    figures = report(replay)
    path = folder / "report.json"
    path.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    return [path, _plot_latencies(figures, folder), _plot_pages(replay, folder)]


# ---- the table ------------------------------------------------------------------------------------------------------


def print_table(replay: Replay, console: Console) -> None:
    """Three tables that fit 80 columns: answers' speed, their ends, and what the policy did for it."""
    figures = report(replay)
    config = replay.config
    share = ""
    if replay.unlimited_peak_tokens:
        share = f" ({replay.capacity_tokens / replay.unlimited_peak_tokens:.0%} of the unlimited peak)"
    modelled = f"{config.machine}, {config.model}, modelled"
    console.print(
        f"{replay.trace}: {replay.num_trace_requests} requests; "
        f"{modelled if config.executor == 'model' else 'real executor, wall clock'}; "
        f"pool {replay.capacity_tokens:,} tokens{share}; {_reads(figures)}",
        highlight=False,
    )
    first, last, work = (Table(box=SIMPLE, padding=(0, 1)) for _ in range(3))
    _columns(first, "pressure", "class", "done", "TTFT s 50", "90", "99", "TPOT ms 50", "99")
    _columns(last, "pressure", "class", "gap s 99", "e2e s 50", "99", "SLO met", "good/s", "longest wait s")
    _columns(work, "pressure", "tok/s", "retr", "recomp", "park", "in GB", "stream GB", "device", "link")
    for run in figures["runs"]:
        label = _label(run, replay)
        for name, c in run["classes"].items():
            first.add_row(
                label, name, f"{c['finished']}/{c['requests']}", *_cells(c["ttft_s"], "p50", "p90", "p99"),
                *_cells(c["tpot_s"], "p50", "p99", scale=1e3),
            )  # fmt: skip
            last.add_row(
                label, name, *_cells(c["longest_gap_s"], "p99"), *_cells(c["e2e_s"], "p50", "p99"),
                f"{c['slo_attainment']:.1%}", f"{c['goodput_per_s']:.2f}", f"{c['longest_wait_s']:.2f}",
            )  # fmt: skip
        work.add_row(
            label, f"{run['throughput_tokens_per_s']:.0f}", str(run["retractions"]), str(run["recomputed_tokens"]),
            str(run["parkings"]), f"{run['swapped_in_bytes'] / 1e9:.1f}", f"{run['streamed_bytes'] / 1e9:.1f}",
            _share(run["device_busy"]), _share(run["link_busy"]),
        )  # fmt: skip
    for table in (first, last, work):
        console.print(table)
    console.print(
        "SLO high: TTFT 1 s and TPOT 50 ms; low: TTFT 10 s. Priorities are assigned by us, no source carries them."
    )


def _columns(table: Table, *names: str) -> None:
    for name in names:
        is_text = name in ("pressure", "class")
        table.add_column(name, justify="left" if is_text else "right", no_wrap=name == "pressure")


def _label(run: dict[str, Any], replay: Replay) -> str:
    lossy = run["policy"] == "narrow" and replay.config.read_modes.any_lossy
    return f"{run['policy']}{' LOSSY' if lossy else ''}{' (interrupted)' if run['interrupted'] else ''}"


def _reads(figures: dict[str, Any]) -> str:
    return f"high reads {figures['high_reads']}, low reads {figures['low_reads']}"


def _cells(values: dict[str, float | None], *names: str, scale: float = 1.0) -> list[str]:
    found = [values[name] for name in names]
    return ["-" if value is None else f"{value * scale:.2f}" for value in found]


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


# ---- plots ----------------------------------------------------------------------------------------------------------


def _plot_latencies(figures: dict[str, Any], folder: Path) -> Path:
    """Latency of every policy and class, p50 and p99, on a log scale."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    quantities = (("ttft_s", "time to first token"), ("longest_gap_s", "longest gap"), ("e2e_s", "end to end"))
    figure, axes = plt.subplots(2, 3, figsize=(13, 7), sharex=True)
    names = [run["policy"] for run in figures["runs"]]
    at = np.arange(len(names))
    for row, priority in enumerate(("high", "low")):
        for axis, (key, title) in zip(axes[row], quantities, strict=True):
            for shift, percentile, color in ((-0.2, "p50", "#4575b4"), (0.2, "p99", "#d73027")):
                heights = [run["classes"][priority][key][percentile] or np.nan for run in figures["runs"]]
                axis.bar(at + shift, heights, 0.38, color=color, label=percentile)
            axis.set_title(f"{priority} priority: {title}, s")
            axis.set_xticks(at, names, rotation=20)
            if not np.isnan([run["classes"][priority][key]["p50"] or np.nan for run in figures["runs"]]).all():
                axis.set_yscale("log")
    axes[0][0].legend()
    figure.suptitle(f"{figures['trace']}, pool {figures['capacity_tokens']:,} tokens, {_reads(figures)}")
    figure.tight_layout()
    path = folder / "latency.png"
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return path


def _plot_pages(replay: Replay, folder: Path) -> Path:
    """Pages by state over time, one panel a policy; narrower pages of a class are lighter."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(len(replay.runs), 1, figsize=(11, 2.6 * len(replay.runs)), sharex=True, squeeze=False)
    for axis, run in zip(axes[:, 0], replay.runs, strict=True):
        _plot_run_pages(axis, run.samples)
        axis.set_ylabel("pages")
        axis.set_title(run.policy)
    axes[-1, 0].set_xlabel("s")
    figure.tight_layout()
    path = folder / "pages.png"
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return path


def _plot_run_pages(axis: Any, samples: list[Sample]) -> None:
    if not samples:
        return
    names = [name for name in samples[0].pages if name != "free/0" and any(s.pages[name] for s in samples)]
    widest = max((int(name.split("/")[1]) for name in names), default=1)
    times = [s.time_s for s in samples]
    layers = [[s.pages[name] for s in samples] for name in names]
    colors = []
    for name in names:
        kind, width = name.split("/")
        share = 1.0 if kind == "dynamic" else 0.25 + 0.75 * int(width) / widest
        base = np.array([int(COLORS[kind][i : i + 2], 16) / 255 for i in (1, 3, 5)])
        colors.append(tuple(1 - (1 - base) * share))
    axis.stackplot(times, layers, labels=[f"{n} layers" for n in names], colors=colors)
    axis.plot(times, [s.cached_pages for s in samples], color="black", lw=0.8, label="of these cached, unreferenced")
    axis.legend(loc="upper left", fontsize=7)
