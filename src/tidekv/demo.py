"""`tidekv demo`: a real model answers mixed-priority requests in a pool that is far too small, three ways, side by
side."""

from __future__ import annotations

import importlib
import json
import pydoc
import random
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from tidekv.engine.engine import Engine, EngineConfig
from tidekv.engine.model import LoadedModel, forward_packed, load_model
from tidekv.engine.request import RequestOutput
from tidekv.engine.sampling import SamplingParams
from tidekv.engine.scheduler import Pressure
from tidekv.errors import InvariantError

# Long English text that is on every machine: the standard library's own documentation.
TEXT_MODULES = (
    "argparse", "subprocess", "logging", "decimal", "unittest.mock", "typing", "asyncio.events", "datetime",
    "itertools", "re", "zipfile", "socket", "csv", "threading", "email.message", "pathlib", "random", "statistics",
    "tempfile", "shutil", "difflib", "contextlib", "json", "pickle",
)  # fmt: skip
COLORS = {"free": "grey37", "high": "red", "low": "blue", "dynamic": "yellow"}
PAGE_SIZE = 16


@dataclass(frozen=True)
class DemoRequest:
    """One request of the workload; a third of them are high priority."""

    prompt: list[int]
    max_new_tokens: int
    is_high_priority: bool


@dataclass
class Run:
    """One way of serving the workload: its outputs, its counters, and the pool at every step."""

    name: str
    outputs: list[RequestOutput]
    stats: dict[str, Any]
    wall_s: float
    history: list[dict[str, Any]] = field(default_factory=list)


def workload(loaded: LoadedModel, count: int, seed: int) -> list[DemoRequest]:
    """`count` requests: prompts of 200 to 1,500 tokens (many short, some long), 48 to 96 new tokens, every third
    high."""
    rng = random.Random(seed)
    lengths = [round(200 + 1300 * (i / max(1, count - 1)) ** 16) for i in range(count)]
    rng.shuffle(lengths)
    requests = []
    plaintext = getattr(pydoc, "plaintext")  # noqa: B009 (not in the type stubs)
    for i, length in enumerate(lengths):
        module = importlib.import_module(TEXT_MODULES[i % len(TEXT_MODULES)])
        text = pydoc.render_doc(module, renderer=plaintext)
        ids = loaded.tokenizer(f"Summarise document {i}.\n\n{text[:12_000]}")["input_ids"]  # type: ignore[misc]
        requests.append(DemoRequest(list(ids[:length]), 48 + round(48 * rng.random() ** 4), i % 3 == 0))
    return requests


def pages_needed(requests: list[DemoRequest]) -> int:
    """Pages that all requests need together at their ends."""
    return sum(-(-(len(r.prompt) + r.max_new_tokens - 1) // PAGE_SIZE) for r in requests)


def tokens_to_generate(requests: list[DemoRequest]) -> int:
    """New tokens of all requests together."""
    return sum(r.max_new_tokens for r in requests)


def run_engine(
    name: str, loaded: LoadedModel, requests: list[DemoRequest], pressure: Pressure, num_pages: int, screen: Screen
) -> Run:
    """Serve the workload once; every step adds a line to the history. The checker runs at the end."""
    engine = Engine(
        EngineConfig(device="cpu", num_pages=num_pages, page_size=PAGE_SIZE, pressure=pressure, prefill_chunk=512),
        loaded=loaded,
    )
    history: list[dict[str, Any]] = []
    start = time.perf_counter()

    def on_step(engine: Engine) -> None:
        stats = engine.stats()
        history.append({
            "s": time.perf_counter() - start,
            "pages": stats["pages"],
            "halvings_low": stats["halvings_low"],
            "halvings_high": stats["halvings_high"],
            "restores": stats["restores"],
            "retractions": stats["retractions"],
            "tokens": stats["generated_tokens"],
        })  # fmt: skip
        screen.update(name, engine, history[-1])

    # A request's own stop token ends it in all three runs alike; ignoring it keeps the lengths as stated.
    params = [SamplingParams(max_new_tokens=r.max_new_tokens, ignore_eos=True) for r in requests]
    outputs = engine.generate([r.prompt for r in requests], params, [r.is_high_priority for r in requests], on_step)
    engine.check()
    return Run(name, outputs, engine.stats(), time.perf_counter() - start, history)


class Screen:
    """Live picture on a terminal; a line every 10 s elsewhere; nothing when quiet."""

    def __init__(self, console: Console, total_tokens: int, quiet: bool) -> None:
        self.console = console
        self.total_tokens = total_tokens
        self.quiet = quiet
        self._live: Live | None = None
        self._printed_s = 0.0

    @contextmanager
    def running(self) -> Iterator[None]:
        """While inside, the picture is live."""
        if self.quiet or not self.console.is_terminal:
            yield
            return
        with Live(console=self.console, refresh_per_second=8, transient=True) as self._live:
            yield
        self._live = None

    def update(self, name: str, engine: Engine, entry: dict[str, Any]) -> None:
        """Called after every step."""
        scheduler = engine.scheduler
        line = (
            f"{name}: {entry['s']:5.1f} s  {entry['tokens']:>4}/{self.total_tokens} tokens  "
            f"running {len(scheduler.running)} waiting {len(scheduler.waiting)} parked {len(scheduler.parked)}  "
            f"halvings low {entry['halvings_low']} high {entry['halvings_high']}  restores {entry['restores']}  "
            f"retractions {entry['retractions']}"
        )
        if self._live is not None:
            self._live.update(Group(Text(line), pool_bar(entry["pages"], self.console.width - 2), legend()))
        elif not self.quiet and (entry["s"] - self._printed_s >= 10.0 or entry["s"] < self._printed_s):
            self._printed_s = entry["s"]
            self.console.print(line, soft_wrap=True, highlight=False)


def pool_bar(pages: dict[str, int], width: int) -> Text:
    """All pages as one bar: high red, low blue, staging yellow, free grey; `#` full width, `=` half, `-` less."""
    total = max(1, sum(pages.values()))
    widest = max(int(key.split("/")[1]) for key in pages)
    bar = Text()
    for key, count in pages.items():
        name, slot_width = key.split("/")
        share = int(slot_width) / widest
        glyph = (
            "." if name == "free" else ":" if name == "dynamic" else "#" if share > 0.9 else "=" if share > 0.4 else "-"
        )
        bar.append(glyph * round(width * count / total), style=COLORS[name])
    return bar


def legend() -> Text:
    """What the bar's signs mean."""
    return Text("# all layers  = half  - a quarter or less  : staging  . free      red high, blue low", style="dim")


def first_differences(
    loaded: LoadedModel, requests: list[DemoRequest], reference: Run, other: Run
) -> list[dict[str, Any]]:
    """Answers that differ, each with the gap between the two logits at the first token that differs."""
    found = []
    for index, (a, b) in enumerate(zip(reference.outputs, other.outputs, strict=True)):
        if a.token_ids == b.token_ids:
            continue
        pairs = list(zip(a.token_ids, b.token_ids, strict=False))
        at = next((i for i, (x, y) in enumerate(pairs) if x != y), len(pairs))
        entry: dict[str, Any] = {"request": index, "position": at}
        if at < len(pairs):
            logits = plain_logits(loaded, requests[index].prompt + a.token_ids[:at])
            x, y = pairs[at]
            entry |= {"token": x, "other": y, "logit_gap": float(logits[x] - logits[y])}
        found.append(entry)
    return found


def plain_logits(loaded: LoadedModel, ids: list[int]) -> torch.Tensor:
    """Next-token logits [V] of one sequence, without any cache."""
    tokens = torch.tensor(ids)
    context = _PlainAttention()
    return forward_packed(loaded.model, tokens, torch.arange(len(ids)), torch.tensor([len(ids) - 1]), context)[0]


class _PlainAttention:
    def forward(
        self, layer_idx: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scaling: float
    ) -> torch.Tensor:
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=True)
        return out[0].transpose(0, 1)


def latencies(run: Run, requests: list[DemoRequest], high: bool) -> tuple[float, float]:
    """(median TTFT in s, median time a token in ms) of one class."""
    mine = [o for o, r in zip(run.outputs, requests, strict=True) if r.is_high_priority is high]
    ttft = statistics.median(o.ttft_s for o in mine if o.ttft_s is not None)
    gaps = [o.per_token_s for o in mine if o.per_token_s is not None]
    return ttft, 1e3 * statistics.median(gaps)


def result_table(runs: list[Run], requests: list[DemoRequest], changed: dict[str, int]) -> Table:
    """The figures of all runs beside one another."""
    table = Table(title=f"The same {len(requests)} requests, three ways", title_justify="left")
    table.add_column("")
    for run in runs:
        table.add_column(run.name, justify="right")

    def row(label: str, values: list[str]) -> None:
        table.add_row(label, *values)

    def mib(key: str) -> list[str]:
        return [f"{run.stats[key] / 2**20:.1f}" for run in runs]

    row("pool, pages", [str(sum(run.stats["pages"].values())) for run in runs])
    row("halvings, low / high", [f"{r.stats['halvings_low']} / {r.stats['halvings_high']}" for r in runs])
    for key in ("pages_freed", "restores"):
        row(key.replace("_", " "), [str(run.stats[key]) for run in runs])
    row("MiB moved on the device", mib("device_bytes_moved"))
    row("MiB to the host", mib("bytes_to_host"))
    row("MiB from the host", mib("bytes_from_host"))
    row("requests parked", [str(run.stats["parkings"]) for run in runs])
    row("requests retracted", [str(run.stats["retractions"]) for run in runs])
    row("tokens recomputed", [str(run.stats["recomputed_tokens"]) for run in runs])
    row("answers changed", ["reference", *(str(changed[run.name]) for run in runs[1:])])
    row("wall time, s", [f"{run.wall_s:.1f}" for run in runs])
    for high in (True, False):
        figures = [latencies(run, requests, high) for run in runs]
        name = "high" if high else "low"
        row(f"{name}: median TTFT, s", [f"{ttft:.2f}" for ttft, _ in figures])
        row(f"{name}: median ms a token", [f"{per_token:.0f}" for _, per_token in figures])
    return table


def failures(narrow: Run, differences: list[dict[str, Any]]) -> list[str]:
    """What the narrow run promised and did not keep; empty when all of it held."""
    stats = narrow.stats
    promises = (
        (not differences, f"{len(differences)} answers changed under narrow: {differences}"),
        (stats["retractions"] == 0, f"{stats['retractions']} requests were retracted under narrow"),
        (stats["recomputed_tokens"] == 0, f"{stats['recomputed_tokens']} tokens were recomputed under narrow"),
        (
            stats["halvings_low"] >= 2,
            f"low priority was halved {stats['halvings_low']} times, not twice: too much memory",
        ),
        (stats["halvings_high"] >= 1, "high priority was never halved: too much memory"),
    )
    return [message for kept, message in promises if not kept]


def plot(runs: list[Run], path: Path) -> None:
    """Pages by state and width over time, halvings and restores marked, one panel a run."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    keys = list(runs[0].history[0]["pages"])
    keys.sort(key=lambda key: (("high", "low", "dynamic", "free").index(key.split("/")[0]), -int(key.split("/")[1])))
    shades = {"high": plt.get_cmap("Reds"), "low": plt.get_cmap("Blues")}
    widest = max(int(key.split("/")[1]) for key in keys)

    def color(key: str) -> Any:
        name, width = key.split("/")
        if name in shades:
            return shades[name](0.25 + 0.6 * int(width) / widest)
        return "#f2c14e" if name == "dynamic" else "#ececec"

    def label(key: str) -> str:
        name, width = key.split("/")
        return {"free": "free", "dynamic": "staging"}.get(name, f"{name}, {width} of {widest} layers")

    figure, axes = plt.subplots(len(runs), 1, figsize=(11, 3.4 * len(runs)), squeeze=False)
    for axis, run in zip(axes[:, 0], runs, strict=True):
        times = [entry["s"] for entry in run.history]
        present = [key for key in keys if any(entry["pages"].get(key, 0) for entry in run.history)]
        axis.stackplot(
            times,
            [[entry["pages"].get(key, 0) for entry in run.history] for key in present],
            labels=[label(key) for key in present],
            colors=[color(key) for key in present],
            step="post",
        )
        for counter, style, text in (
            ("halvings_low", ("tab:blue", "v"), "low halved"),
            ("halvings_high", ("tab:red", "v"), "high halved"),
            ("restores", ("tab:green", "^"), "widened"),
            ("retractions", ("black", "x"), "retracted"),
        ):
            steps = zip([0, *(entry[counter] for entry in run.history)], run.history, strict=False)
            marks = [entry["s"] for before, entry in steps if entry[counter] > before]
            if marks:
                top = sum(run.history[0]["pages"].values())
                axis.scatter(
                    marks, [top * 1.03] * len(marks), c=style[0], marker=style[1], s=36, label=text, clip_on=False
                )
        axis.set_ylabel("pages")
        axis.set_title(f"{run.name}  ({run.wall_s:.0f} s)", loc="left", fontsize=10)
        axis.margins(x=0)
        axis.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=8, frameon=False)
    axes[-1, 0].set_xlabel("seconds")
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def run_demo(
    console: Console, out: Path, count: int = 24, pool_share: float = 0.4, seed: int = 0, as_json: bool = False
) -> int:
    """Run the demo; returns the exit code: 0 only if everything that `narrow` promises held."""
    loaded = load_model("smollm2", "cpu", torch.float32)
    requests = workload(loaded, count, seed)
    needed = pages_needed(requests)
    small, ample = max(1, int(needed * pool_share)), needed + 64
    if not as_json:
        highs = sum(r.is_high_priority for r in requests)
        console.print(
            f"{count} requests ({highs} high priority), prompts of {min(len(r.prompt) for r in requests)} to "
            f"{max(len(r.prompt) for r in requests)} tokens, {tokens_to_generate(requests)} tokens to generate; "
            f"together they need {needed} pages of {PAGE_SIZE} tokens. They are served three times: with {ample}; "
            f"by tidekv, which narrows, with {small} ({pool_share:.0%} of the need); and by an engine that retracts "
            f"(drops a request's cache and computes it again), with the same {small}.",
            highlight=False,
            soft_wrap=not console.is_terminal,  # a log keeps the line whole
        )
    screen = Screen(console, tokens_to_generate(requests), quiet=as_json)
    plans: tuple[tuple[str, Pressure, int], ...] = (
        ("ample memory", "narrow", ample),
        ("narrow (tidekv)", "narrow", small),
        ("retract", "retract", small),
    )
    runs: list[Run] = []
    faults: list[str] = []
    with screen.running():
        for name, pressure, num_pages in plans:
            try:
                runs.append(run_engine(name, loaded, requests, pressure, num_pages, screen))
            except InvariantError as error:
                faults.append(f"the checker found fault in '{name}': {error}")
                break
    if faults:
        for fault in faults:
            console.print(f"FAILED: {fault}", style="bold red")
        return 1
    differences = {run.name: first_differences(loaded, requests, runs[0], run) for run in runs[1:]}
    changed = {name: len(found) for name, found in differences.items()}
    faults = failures(runs[1], differences[runs[1].name])
    out.mkdir(parents=True, exist_ok=True)
    report: dict[str, Any] = {
        "requests": [
            {"prompt_tokens": len(r.prompt), "new_tokens": r.max_new_tokens, "high": r.is_high_priority}
            for r in requests
        ],
        "pages_needed": needed,
        "pool_pages": small,
        "runs": [
            {
                "name": run.name,
                "wall_s": run.wall_s,
                "stats": run.stats,
                "answers_changed": None if run is runs[0] else changed[run.name],
                "first_differences": differences.get(run.name, []),
                "latency": {
                    name: dict(
                        zip(("median_ttft_s", "median_ms_per_token"), latencies(run, requests, high), strict=True)
                    )
                    for name, high in (("high", True), ("low", False))
                },
                "history": run.history,
            }
            for run in runs
        ],
        "failures": faults,
    }
    (out / "demo.json").write_text(json.dumps(report, indent=1))
    plot(runs, out / "demo.png")
    if as_json:
        brief = [{key: value for key, value in run.items() if key != "history"} for run in report["runs"]]
        console.print_json(json.dumps({**report, "runs": brief}))
    else:
        show_result(console, runs, requests, changed, differences, faults, out)
    return 1 if faults else 0


def show_result(
    console: Console,
    runs: list[Run],
    requests: list[DemoRequest],
    changed: dict[str, int],
    differences: dict[str, list[dict[str, Any]]],
    faults: list[str],
    out: Path,
) -> None:
    """The table, what it says in one line, and where the rest is."""
    table: RenderableType = result_table(runs, requests, changed)
    console.print(table)
    for name, found in differences.items():
        for entry in found:
            console.print(
                f"{name}: request {entry['request']} differs at token {entry['position']}: {entry}", highlight=False
            )
    stats = runs[1].stats
    console.print(
        f"narrow: {stats['retractions']} requests retracted, {stats['recomputed_tokens']} tokens recomputed, "
        f"{changed[runs[1].name]} answers changed; retract: {runs[2].stats['retractions']} retracted, "
        f"{runs[2].stats['recomputed_tokens']} recomputed.",
        style="bold green" if not faults else "bold red",
        highlight=False,
    )
    for fault in faults:
        console.print(f"FAILED: {fault}", style="bold red", highlight=False)
    console.print(
        "The price is the MiB from the host: every step that reads a narrowed page brings its missing layers in.",
        highlight=False,
    )
    console.print(f"figures: {out / 'demo.json'}   picture: {out / 'demo.png'}", highlight=False)
