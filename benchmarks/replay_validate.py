"""Is the cost model right? One small workload with the real executor and with the model executor, and the differences.

    python -m benchmarks.replay_validate --out DIR                    on a machine with a GPU: 50 s a policy
    python -m benchmarks.replay_validate --out DIR --policies unlimited,narrow
    python -m benchmarks.replay_validate --out DIR --smoke            a tiny model on the CPU: tries the code
    python -m benchmarks.replay_validate --out DIR --again            what DIR measured against the model as it is now:
                                                                      DIR/again.md, on any machine

Tables: `steps` (each kind of step: measured, and what the model says for just that load), `requests` (TTFT and TPOT of
whole replays, medians over requests), `fit` (least squares over the measured steps: what the constants would have to
be). `replay_steps.json` holds every measured step, so constants can be fitted again without the machine. Goal: medians
within 15 %.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from benchmarks.report import Report, arguments
from benchmarks.timing import device, on_gpu
from tidekv.engine.engine import Engine
from tidekv.engine.model import LoadedModel, load_model
from tidekv.engine.request import Request
from tidekv.engine.runner import Launched, Runner
from tidekv.replay.cost import MODELS, CostModel, StepLoad, cost_model
from tidekv.replay.executor import LoadCounter
from tidekv.replay.run import UNLIMITED, Driver, ReplayConfig, build_engine, run_policy, whole_trace_pages
from tidekv.replay.trace import TraceRequest

GOAL = 0.15  # of the medians
POLICIES = (UNLIMITED, "narrow", "swap")
MAX_RUNNING = 128

GPU = SimpleNamespace(
    model="random:llama-3.1-8b", requests=80, gap_s=0.12, short=(200, 1500), long=(2000, 4000), out=(60, 200), warm=2,
)  # fmt: skip
SMOKE = SimpleNamespace(
    model="random:tiny", requests=10, gap_s=1e-4, short=(20, 150), long=(200, 400), out=(6, 20), warm=1,
)  # fmt: skip


@dataclass
class MeasuredStep:
    """One step of the real engine, planning and sampling included."""

    policy: str
    load: StepLoad
    graphed: bool  # replayed from a CUDA graph
    seconds: float

    @property
    def kind(self) -> str:
        """What dominates it."""
        load = self.load
        name = "prefill" if load.prefill_tokens else "decode"
        if load.decode_batch and load.prefill_tokens:
            name = "prefill + decode"
        if load.streamed_bytes:
            name += ", streaming"
        if load.from_host_bytes or load.to_host_bytes:
            name += ", moves"
        if load.behind_bytes:
            name += ", pages coming in under it"
        return name + ("" if self.graphed or load.prefill_tokens else ", launch by launch")


class Watched:
    """A real runner that notes what each step had to do."""

    def __init__(self, engine: Engine, runner: Runner) -> None:
        self.runner, self.counter = runner, LoadCounter(engine)
        self.loads: list[tuple[StepLoad, bool]] = []

    def run(self, work: list[tuple[Request, int]]) -> list[tuple[Request, int]]:
        """As the runner's."""
        return self.launch(work).read()

    def launch(self, work: list[tuple[Request, int]], unread: Launched | None = None) -> Launched:
        """As the runner's: an engine that overlaps reads a step's tokens when the next one is launched."""
        load = self.counter.load_of(work)
        graphs = self.runner.graphs
        before = graphs.replays if graphs else 0
        launched = self.runner.launch(work, unread)
        self.loads.append((load, bool(graphs and graphs.replays > before)))
        return launched


def workload(sizes: SimpleNamespace, seed: int = 0) -> list[TraceRequest]:
    """Chats of high priority, documents of low; arrivals at random, the last quarter in one burst."""
    rng = random.Random(seed)
    at, trace = 0.0, []
    for index in range(sizes.requests):
        if index < 3 * sizes.requests // 4:
            at += rng.expovariate(1 / sizes.gap_s)
        is_high = rng.random() < 0.6
        trace.append(
            TraceRequest(index, at, rng.randint(*(sizes.short if is_high else sizes.long)), rng.randint(*sizes.out),
                         is_high)
        )  # fmt: skip
    return trace


def measure(
    policy: str, pages: int, trace: Sequence[TraceRequest], config: ReplayConfig, loaded: LoadedModel, warm: int
) -> tuple[list[MeasuredStep], list[Request]]:
    """The trace on the wall clock, after it ran `warm` times already: kernels are compiled and graphs captured by then,
    and a step that captures takes a hundred times as long as one that does not."""
    longest = max(r.prompt_tokens + r.output_tokens for r in trace)
    engine, _ = build_engine(policy, pages, longest + config.page_size, config, loaded)
    for _ in range(warm):
        for _ in Driver(engine, trace, 1.0).steps():
            pass
    assert isinstance(engine.runner, Runner)
    watched = engine.runner = Watched(engine, engine.runner)
    if engine._ahead is not None:  # steps are launched ahead of the last one's tokens
        engine._ahead = watched  # type: ignore[assignment]
    driver = Driver(engine, trace, 1.0)
    steps: list[MeasuredStep] = []
    for _ in driver.steps():
        if len(watched.loads) > len(steps):
            load, graphed = watched.loads[-1]
            steps.append(MeasuredStep(policy, load, graphed, driver.step_s[-1]))
    return steps, driver.requests


def medians(requests: Sequence[Request]) -> dict[str, dict[str, float]]:
    """Per class, seconds: medians of the time to first token and of the time a token after it."""
    found: dict[str, dict[str, float]] = {}
    for name, is_high in (("high", True), ("low", False)):
        mine = [r for r in requests if r.is_high_priority == is_high and len(r.token_times_s) > 1]
        if mine:
            ttft = [r.token_times_s[0] - r.arrival_s for r in mine]
            tpot = [(r.token_times_s[-1] - r.token_times_s[0]) / (len(r.token_times_s) - 1) for r in mine]
            found[name] = {"ttft_s": float(np.median(ttft)), "tpot_s": float(np.median(tpot))}
    return found


def step_rows(report: Report, steps: Sequence[MeasuredStep], cost: CostModel) -> None:
    """Each kind of step with at least 5 of it: median of the measured, median of the modelled, and of the errors."""
    for kind in sorted({step.kind for step in steps}):
        mine = [step for step in steps if step.kind == kind]
        if len(mine) < 5:
            continue
        real = np.array([step.seconds for step in mine])
        said = np.array([cost.step_s(step.load) for step in mine])
        error = float(np.median(said) / np.median(real) - 1)
        report.row(
            "steps", kind=kind, steps=len(mine), real_ms=round(float(np.median(real)) * 1e3, 3),
            model_ms=round(float(np.median(said)) * 1e3, 3), error=round(error, 3),
            median_error_a_step=round(float(np.median(said / real - 1)), 3), within_goal=abs(error) <= GOAL,
        )  # fmt: skip


def request_rows(report: Report, policy: str, real: Sequence[Request], model: Sequence[Request]) -> None:
    """TTFT and TPOT of the two replays, medians over requests."""
    said = medians(model)
    for name, measured in medians(real).items():
        for quantity, value in measured.items():
            other = said[name][quantity]
            error = other / value - 1
            report.row(
                "requests", policy=policy, cls=name, quantity=quantity, real_ms=round(value * 1e3, 2),
                model_ms=round(other * 1e3, 2), error=round(error, 3), within_goal=abs(error) <= GOAL,
            )  # fmt: skip


def fit_rows(report: Report, steps: Sequence[MeasuredStep]) -> None:
    """Least squares, steps weighted by 1 / seconds so that short ones count as much: seconds for each unit of load."""
    columns = ("base_s", "request_s", "context_s", "prompt_s", "prompt_context_s")
    for kind in sorted({step.kind for step in steps if "streaming" not in step.kind and "moves" not in step.kind}):
        mine = [step for step in steps if step.kind == kind]
        loads = [step.load for step in mine]
        counts = np.array([
            [1, load.decode_batch, load.decode_context, load.prefill_tokens, load.prefill_context_sum]
            for load in loads
        ], dtype=float)  # fmt: skip
        used = [i for i in range(len(columns)) if len(np.unique(counts[:, i])) > 1 or (i == 0)]
        if len(mine) < 5 * len(used):
            continue
        seconds = np.array([step.seconds for step in mine])
        found, *_ = np.linalg.lstsq(counts[:, used] / seconds[:, None], np.ones(len(mine)), rcond=None)
        left = counts[:, used] @ found / seconds - 1
        units = {columns[i]: float(f"{c:.4g}") for i, c in zip(used, found, strict=True)}
        error = round(float(np.median(np.abs(left))), 3)
        report.row("fit", kind=kind, steps=len(mine), **units, median_abs_error=error)


def main(argv: Sequence[str] | None = None) -> int:
    parser, make = arguments("replay_validate", 230.0, __doc__)
    parser.add_argument("--machine", default="H200", help="preset of the cost model; with H200-serial nothing narrows")
    parser.add_argument("--policies", default=",".join(POLICIES), help=f"some of {', '.join(POLICIES)}, with commas")
    parser.add_argument("--again", action="store_true", help="compare what --out measured with the model as it is now")
    args = parser.parse_args(argv)
    policies = args.policies.split(",")
    if args.again:
        (args.out / "again.md").write_text(again(args.out, ("H200", "H200-serial")), encoding="utf-8")
        return 0
    if unknown := [policy for policy in policies if policy not in POLICIES]:
        parser.error(f"--policies must be some of {', '.join(POLICIES)}, got {', '.join(unknown)}")
    report = make(args)
    smoke = bool(args.smoke)
    sizes = SMOKE if smoke else GPU
    trace = workload(sizes)
    whole = ReplayConfig(
        executor="real", real_model=sizes.model, prefix_cache=False, max_running=MAX_RUNNING, machine=args.machine
    )
    loaded: list[LoadedModel] = []
    steps: list[MeasuredStep] = []
    cost = cost_model(whole.machine, whole.model)

    def load() -> None:
        begin = time.perf_counter()
        loaded.append(load_model(sizes.model, device(), torch.bfloat16 if on_gpu() else torch.float32))
        report.row("start", model=sizes.model, model_s=round(time.perf_counter() - begin, 1), requests=len(trace))

    def one(policy: str) -> None:
        net = loaded[0]
        token_bytes = 2 * net.layer_num * net.num_kv_heads * net.head_dim * (2 if on_gpu() else 4)
        tokens = sum(r.prompt_tokens + r.output_tokens for r in trace)
        pages = pool_pages(policy, trace)
        # Pinned memory is slow to get: no more than the whole trace could need.
        host = (tokens + 4096) * token_bytes
        config = ReplayConfig(**{**asdict(whole), "host_memory": host})
        measured, requests = measure(policy, pages, trace, config, net, sizes.warm)
        steps.extend(measured)
        save_steps(args.out / "replay_steps.json", steps)
        modelled = run_policy(policy, pages, trace, ReplayConfig(**{**asdict(config), "executor": "model"}))
        request_rows(report, policy, requests, modelled.requests)

    if report.phase("load", load):
        for policy in policies:
            report.phase(policy, one, policy, needs_s=1.0 if smoke else 45.0)
        step_rows(report, steps, cost)
        fit_rows(report, steps)
    return report.finish()


def again(folder: Path, machines: Sequence[str]) -> str:
    """Markdown: what a run on a GPU measured, beside the model of today on each of these machines."""
    measured = json.loads((folder / "replay_validate.json").read_text())
    if measured["about"]["smoke"]:
        raise ValueError(f"{folder}: a smoke run measures nothing")
    lines = ["| policy, class | real TTFT, TPOT ms | " + " | ".join(f"`{name}`" for name in machines) + " |"]
    lines.append("|" + "---|" * (2 + len(machines)))
    rows = [row for row in measured["rows"] if row["table"] == "requests"]
    real = {(row["policy"], row["cls"], row["quantity"]): row["real_ms"] / 1e3 for row in rows}
    trace = workload(GPU)
    said = {}
    for name in machines:
        for policy in dict.fromkeys(row["policy"] for row in rows):
            requests = run_policy(policy, pool_pages(policy, trace), trace, gpu_config(trace, name)).requests
            said[name, policy] = medians(requests)
    for policy, cls in dict.fromkeys((row["policy"], row["cls"]) for row in rows):
        ttft, tpot = (real[policy, cls, quantity] for quantity in ("ttft_s", "tpot_s"))
        cells = [f"{policy}, {cls}", f"{ttft * 1e3:.1f}, {tpot * 1e3:.1f}"]
        for name in machines:
            found = said[name, policy][cls]
            cells.append(f"{found['ttft_s'] / ttft - 1:+.0%}, {found['tpot_s'] / tpot - 1:+.0%}")
        lines.append("| " + " | ".join(cells) + " |")
    lines += ["", "| kind of step | steps | real ms, median | " + " | ".join(f"`{name}`" for name in machines) + " |"]
    lines.append("|" + "---|" * (3 + len(machines)))
    names = [f.name for f in fields(StepLoad)]
    steps = []
    for row in json.loads((folder / "replay_steps.json").read_text()):
        # Files of before say nothing of a narrow pool: it is known only of steps that read something of it.
        row.setdefault("any_narrow", bool(row["streamed_bytes"] or row["behind_bytes"]))
        load = StepLoad(**{name: row[name] for name in names})
        steps.append(MeasuredStep(row["policy"], load, row["graphed"], row["seconds"]))
    for kind in sorted({step.kind for step in steps}):
        mine = [step for step in steps if step.kind == kind]
        if len(mine) >= 5:
            cells = [kind, str(len(mine)), f"{np.median([step.seconds for step in mine]) * 1e3:.1f}"]
            for name in machines:
                cost = cost_model(name, ReplayConfig().model)
                ratios = [cost.step_s(step.load) / step.seconds - 1 for step in mine]
                cells.append(f"{np.median(ratios):+.0%}")
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def pool_pages(policy: str, trace: Sequence[TraceRequest]) -> int:
    """An eighth of the whole trace, a few of the longest: most requests meet pressure. All of it if unlimited."""
    pages = whole_trace_pages(trace, ReplayConfig(max_running=MAX_RUNNING))
    return pages if policy == UNLIMITED else pages // 8


def gpu_config(trace: Sequence[TraceRequest], machine: str) -> ReplayConfig:
    """Of the model's side of a run on a GPU."""
    token_bytes = MODELS[ReplayConfig().model].token_bytes
    host = (sum(r.prompt_tokens + r.output_tokens for r in trace) + 4096) * token_bytes
    return ReplayConfig(prefix_cache=False, max_running=MAX_RUNNING, machine=machine, host_memory=host)


def save_steps(path: Path, steps: Sequence[MeasuredStep]) -> None:
    """Every measured step, one a line of JSON's list."""
    rows: list[dict[str, Any]] = [
        {"policy": s.policy, "graphed": s.graphed, "seconds": round(s.seconds, 6), **asdict(s.load)} for s in steps
    ]
    path.write_text("[\n" + ",\n".join(map(json.dumps, rows)) + "\n]\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
