"""Is the cost model right? A small workload with the real executor and with the model executor, and the differences.

    python -m benchmarks.replay_validate --out DIR                    on a machine with a GPU: 50 s a policy
    python -m benchmarks.replay_validate --out DIR --policies unlimited,narrow --workloads code
    python -m benchmarks.replay_validate --out DIR --smoke            a tiny model on the CPU: tries the code
    python -m benchmarks.replay_validate --out DIR --again            what DIR measured against the model as it is now:
                                                                      DIR/again.md, and what its terms for the host
                                                                      come from: DIR/host.md; on any machine

Tables: `steps` (each kind of step: measured, and what the model says for just that load), `requests` (TTFT and TPOT of
whole replays, medians over requests), `fit` (what the constants of prompts would have to be). `replay_steps.json` holds
every measured step (`measured_steps.py`), so constants can be fitted again without the machine. Goal: medians within
15 %.
"""

from __future__ import annotations

import gc
import json
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch

from benchmarks.measured_steps import STEPS, MeasuredStep, kinds, save_steps, saved_steps, stretches
from benchmarks.report import Report, arguments
from benchmarks.timing import device, on_gpu
from tidekv.engine.engine import Engine
from tidekv.engine.model import LoadedModel, load_model
from tidekv.engine.request import Request
from tidekv.engine.runner import Launched, Runner
from tidekv.engine.sampling import SamplingParams
from tidekv.replay.cost import MACHINES, MODELS, CostModel, StepLoad, cost_model
from tidekv.replay.executor import LoadCounter
from tidekv.replay.run import UNLIMITED, Driver, ReplayConfig, build_engine, run_policy, whole_trace_pages
from tidekv.replay.trace import TraceRequest

GOAL = 0.15  # of the medians
POLICIES = (UNLIMITED, "narrow", "swap")
MAX_RUNNING = 128

MODEL, SMOKE_MODEL = "random:llama-3.1-8b", "random:tiny"
# Tokens in and out of high and of low priority. The constants of the model come from steps of "chats"; "code" and
# "agents" were made up afterwards and are looked at as they come.
GPU = {
    "chats": SimpleNamespace(
        requests=80, gap_s=0.12, warm=2, high_share=0.6,
        high_in=(200, 1500), high_out=(60, 200), low_in=(2000, 4000), low_out=(60, 200),
    ),
    "code": SimpleNamespace(
        requests=80, gap_s=0.15, warm=2, high_share=0.5,
        high_in=(100, 1200), high_out=(40, 250), low_in=(1000, 7000), low_out=(8, 60),
    ),
    "agents": SimpleNamespace(
        requests=70, gap_s=0.12, warm=2, high_share=0.3,
        high_in=(500, 3000), high_out=(100, 300), low_in=(300, 2500), low_out=(150, 400),
    ),
}  # fmt: skip
SMOKE = SimpleNamespace(
    requests=10, gap_s=1e-4, warm=1, high_share=0.6,
    high_in=(20, 150), high_out=(6, 20), low_in=(200, 400), low_out=(6, 20),
)  # fmt: skip


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
    """Arrivals at random, the last quarter in one burst."""
    rng = random.Random(seed)
    at, trace = 0.0, []
    for index in range(sizes.requests):
        if index < 3 * sizes.requests // 4:
            at += rng.expovariate(1 / sizes.gap_s)
        is_high = rng.random() < sizes.high_share
        tokens_in, tokens_out = (sizes.high_in, sizes.high_out) if is_high else (sizes.low_in, sizes.low_out)
        trace.append(TraceRequest(index, at, rng.randint(*tokens_in), rng.randint(*tokens_out), is_high))
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
            unread = engine._unread is not None
            steps.append(MeasuredStep(policy, load, graphed, driver.step_s[-1], unread=unread))
    return steps, driver.requests


def launch_floor_s(loaded: LoadedModel, config: ReplayConfig, repeats: int = 30) -> float:
    """Median of a step with a prompt's chunk of one page beside 8 decodes: so small that the GPU waits for the host,
    which launches it kernel by kernel. A figure of the host: it differs between machines with the same GPU."""
    engine, _ = build_engine("reserve", 256, 16 * config.page_size, config, loaded)
    vocab, took = int(engine.model.config.vocab_size), []
    prompt = [vocab // 2] * config.page_size
    for _ in range(8):
        engine.add_request(prompt, SamplingParams(max_new_tokens=14 * config.page_size, ignore_eos=True))
    for _ in range(2 + repeats):
        for _ in range(3):
            engine.step()
        engine.add_request(prompt, SamplingParams(max_new_tokens=1, ignore_eos=True))
        begin = time.perf_counter()
        engine.step()
        took.append(time.perf_counter() - begin)
        if engine.scheduler.waiting:
            raise RuntimeError("the prompt has not run: what was timed is a decode step")
    return float(np.median(took[2:]))


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


def step_rows(report: Report, name: str, steps: Sequence[MeasuredStep], cost: CostModel) -> None:
    """Each kind: medians of the measured and of the modelled, the median of the errors, and the error of the sum."""
    for kind, mine in kinds(steps, cost):
        real = np.array([stretch.seconds for stretch in mine])
        said = np.array([stretch.said_s(cost) for stretch in mine])
        error = float(np.median(said / real - 1))
        report.row(
            "steps", workload=name, kind=kind, times=len(mine), real_ms=round(float(np.median(real)) * 1e3, 3),
            model_ms=round(float(np.median(said)) * 1e3, 3), error=round(error, 3),
            error_of_sum=round(float(said.sum() / real.sum() - 1), 3), within_goal=abs(error) <= GOAL,
        )  # fmt: skip


def request_rows(report: Report, workload: str, policy: str, real: Sequence[Request], model: Sequence[Request]) -> None:
    """TTFT and TPOT of the two replays, medians over requests."""
    said = medians(model)
    for name, measured in medians(real).items():
        for quantity, value in measured.items():
            other = said[name][quantity]
            error = other / value - 1
            report.row(
                "requests", workload=workload, policy=policy, cls=name, quantity=quantity,
                real_ms=round(value * 1e3, 2), model_ms=round(other * 1e3, 2),
                error=round(error, 3), within_goal=abs(error) <= GOAL,
            )  # fmt: skip


def fit_rows(report: Report, steps: Sequence[MeasuredStep], cost: CostModel) -> None:
    """Least squares over stretches whose chunks are long and move nothing, each weighted by 1 / seconds: what a prompt
    token and a token that it attends to take, beside the decode steps as the model has them."""
    counts, left, weights = [], [], []
    for kind, mine in kinds(steps, cost):
        if kind != "stretch with prompts' chunks":
            continue
        for stretch in mine:
            chunks = [step.load for step in stretch.steps if step.load.prefill_tokens]
            if min(load.prefill_tokens for load in chunks) < 1024:  # else the host's launches are the longer part
                continue
            decode = [cost.compute_s(step.load) for step in stretch.steps if not step.load.prefill_tokens]
            beside = [cost.decode_s(load.decode_batch, load.decode_context) - cost.weights_s for load in chunks]
            counts.append([sum(load.prefill_tokens for load in chunks), sum(c.prefill_context_sum for c in chunks)])
            left.append(stretch.seconds - sum(decode) - sum(beside))
            weights.append(stretch.seconds)
    if len(left) < 10:
        return
    a, y, w = np.array(counts, dtype=float), np.array(left), np.array(weights)
    found, *_ = np.linalg.lstsq(a / w[:, None], y / w, rcond=None)
    shape = cost.shape
    report.row(
        "fit", stretches=len(y), prompt_tok_s=round(1 / found[0]),
        attention_tflops=round(4 * shape.num_q_heads * shape.head_dim * shape.layer_num / found[1] / 1e12),
        median_abs_error=round(float(np.median(np.abs(a @ found - y) / w)), 3),
    )  # fmt: skip


def host_markdown(steps: Sequence[MeasuredStep]) -> str:
    """Markdown: what steps take beyond `H200-host` without its terms for what streams or comes in, which come from
    here: the median of decode steps, and the mean a chunk that streams over stretches that move nothing."""
    shape, host = MODELS[ReplayConfig().model], replace(MACHINES["H200-host"], narrow_chunk_s=0.0)
    cost, bare = CostModel(host, shape), CostModel(replace(host, narrow_step_s=0.0, behind_step_s=0.0), shape)
    lines = ["| workload | kind | number | ms beyond |", "|---|---|---|---|"]
    for name in dict.fromkeys(step.workload for step in steps):
        beyond: dict[str, list[float]] = {}
        chunks = 0
        for each in stretches([step for step in steps if step.workload == name], cost):
            streaming = sum(s.load.prefill_tokens > 0 and s.load.streamed_bytes > 0 for s in each.steps)
            if each.kind.startswith("decode") or (streaming and "moves" not in each.kind):
                kind = "a chunk that streams" if streaming else each.kind
                beyond.setdefault(kind, []).append((each.seconds - each.said_s(cost if streaming else bare)) * 1e3)
                chunks += streaming
        for kind, found in sorted(beyond.items()):
            is_chunk = kind == "a chunk that streams"
            ms, number = (sum(found) / chunks, chunks) if is_chunk else (float(np.median(found)), len(found))
            lines.append(f"| {name} | {kind} | {number} | {ms:.2f} |")
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    parser, make = arguments("replay_validate", 230.0, __doc__)
    parser.add_argument(
        "--machine", default="H200-host", help="preset: the real engine plans by its rates, too; default: %(default)s"
    )
    parser.add_argument("--policies", default=",".join(POLICIES), help=f"some of {', '.join(POLICIES)}, with commas")
    parser.add_argument("--workloads", nargs="+", default=["chats"], choices=list(GPU), help="default: chats")
    parser.add_argument("--again", action="store_true", help="compare what --out measured with the model as it is now")
    args = parser.parse_args(argv)
    policies = args.policies.split(",")
    if args.again:
        (args.out / "again.md").write_text(again(args.out, ("H200", "H200-host")), encoding="utf-8")
        (args.out / "host.md").write_text(host_markdown(saved_steps(args.out)), encoding="utf-8")
        return 0
    if unknown := [policy for policy in policies if policy not in POLICIES]:
        parser.error(f"--policies must be some of {', '.join(POLICIES)}, got {', '.join(unknown)}")
    report = make(args)
    smoke = bool(args.smoke)
    model = SMOKE_MODEL if smoke else MODEL
    whole = ReplayConfig(
        executor="real", real_model=model, prefix_cache=False, max_running=MAX_RUNNING, machine=args.machine
    )
    loaded: list[LoadedModel] = []
    steps: list[MeasuredStep] = []
    cost = cost_model(whole.machine, whole.model)

    def load() -> None:
        begin = time.perf_counter()
        loaded.append(load_model(model, device(), torch.bfloat16 if on_gpu() else torch.float32))
        floor_s = launch_floor_s(loaded[0], whole)
        report.row(
            "start", machine=args.machine, model=model, model_s=round(time.perf_counter() - begin, 1),
            launch_floor_ms=round(floor_s * 1e3, 2),
        )  # fmt: skip

    def one(policy: str, name: str) -> None:
        gc.collect()  # the engine before this one: its pinned memory would be cached for a size that is not asked again
        if on_gpu() and hasattr(torch.accelerator, "empty_host_cache"):  # not in torch 2.11
            torch.accelerator.empty_host_cache()
        elif on_gpu():
            torch._C._host_emptyCache()  # type: ignore[attr-defined]
        net, sizes = loaded[0], SMOKE if smoke else GPU[name]
        trace = workload(sizes)
        token_bytes = 2 * net.layer_num * net.num_kv_heads * net.head_dim * (2 if on_gpu() else 4)
        tokens = sum(r.prompt_tokens + r.output_tokens for r in trace)
        pages = pool_pages(policy, trace)
        # Pinned memory is slow to get: no more than the whole trace could need.
        host = (tokens + 4096) * token_bytes
        config = replace(whole, host_memory=host)
        measured, requests = measure(policy, pages, trace, config, net, sizes.warm)
        steps.extend(replace(step, workload=name) for step in measured)
        save_steps(args.out / STEPS, steps)
        modelled = run_policy(policy, pages, trace, replace(config, executor="model"))
        request_rows(report, name, policy, requests, modelled.requests)

    if report.phase("load", load):
        for name in args.workloads:
            for policy in policies:
                report.phase(f"{name}, {policy}", one, policy, name, needs_s=1.0 if smoke else 45.0)
            step_rows(report, name, [step for step in steps if step.workload == name], cost)
        fit_rows(report, steps, cost)
    return report.finish()


def again(folder: Path, machines: Sequence[str]) -> str:
    """Markdown: what a run on a GPU measured, beside the model of today on each of these machines."""
    measured = json.loads((folder / "replay_validate.json").read_text())
    if measured["about"]["smoke"]:
        raise ValueError(f"{folder}: a smoke run measures nothing")
    lines = ["| workload, policy, class | real TTFT, TPOT ms | " + " | ".join(f"`{name}`" for name in machines) + " |"]
    lines.append("|" + "---|" * (2 + len(machines)))
    # Files of before know one workload.
    rows = [{"workload": "chats", **row} for row in measured["rows"] if row["table"] == "requests"]
    real = {(row["workload"], row["policy"], row["cls"], row["quantity"]): row["real_ms"] / 1e3 for row in rows}
    said = {}
    for machine in machines:
        for name, policy in dict.fromkeys((row["workload"], row["policy"]) for row in rows):
            trace = workload(GPU[name])
            requests = run_policy(policy, pool_pages(policy, trace), trace, gpu_config(trace, machine)).requests
            said[machine, name, policy] = medians(requests)
    for name, policy, cls in dict.fromkeys((row["workload"], row["policy"], row["cls"]) for row in rows):
        ttft, tpot = (real[name, policy, cls, quantity] for quantity in ("ttft_s", "tpot_s"))
        cells = [f"{name}, {policy}, {cls}", f"{ttft * 1e3:.1f}, {tpot * 1e3:.1f}"]
        for machine in machines:
            found = said[machine, name, policy][cls]
            cells.append(f"{found['ttft_s'] / ttft - 1:+.0%}, {found['tpot_s'] / tpot - 1:+.0%}")
        lines.append("| " + " | ".join(cells) + " |")
    lines += ["", "| kind of step | times | real ms, median | " + " | ".join(f"`{name}`" for name in machines) + " |"]
    lines.append("|" + "---|" * (3 + len(machines)))
    costs = [cost_model(machine, ReplayConfig().model) for machine in machines]
    for kind, mine in kinds(saved_steps(folder), costs[0]):
        real = np.array([stretch.seconds for stretch in mine])
        cells = [kind, str(len(mine)), f"{np.median(real) * 1e3:.1f}"]
        for cost in costs:
            ratios = np.array([stretch.said_s(cost) for stretch in mine]) / real - 1
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


if __name__ == "__main__":
    sys.exit(main())
