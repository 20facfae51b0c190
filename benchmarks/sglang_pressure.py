"""Stock SGLang and tidekv inside it, on one GPU: full width, two workloads under pressure, and answers in fp32.

    python3 -m benchmarks.sglang_pressure --group full --out FOLDER        about 6 minutes on an H200
    python3 -m benchmarks.sglang_pressure --group pressure --out FOLDER
    python3 -m benchmarks.sglang_pressure --group answers --out FOLDER

`--smoke` runs the same code on a CPU with 1/32 of the tokens: it checks this program and measures nothing.

It needs SGLang on the path and a folder with a config.json (random weights): --config, or $SGLANG_LLAMA8B. Each engine
is a process of its own; a result is one JSON line in FOLDER/sglang_pressure.jsonl, and a table at the end.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

SMALL_POOL = 60_000  # tokens; the workloads need 164k and 98k
HIGH, LOW = 10, 0
SMOKE = 32
START_SECONDS = 240  # 75 s the first time on an H200, then 40 s
COUNTS = ("decode_steps", "pauses", "resumes", "gb_to_host", "gb_from_host")
IDLE = re.compile(
    r"tidekv idle\. #decode-step: (\d+), #pause: (\d+), #resume: (\d+), to host: (\S+) GB, from host: (\S+) GB"
)
DIST_INFO = {
    "METADATA": "Metadata-Version: 2.1\nName: tidekv\nVersion: 0.1.0\n",
    "entry_points.txt": "[sglang.srt.plugins]\ntidekv = tidekv.sglang_plugin.plugin:register\n",
}


@dataclass(frozen=True)
class Run:
    """One engine: its environment (None: stock), its arguments beyond the common ones, what to measure."""

    name: str
    tide: dict[str, str] | None
    engine: dict[str, Any]
    phases: tuple[str, ...]


@dataclass(frozen=True)
class Workload:
    """64 requests at once, a third of them high."""

    num_requests: int
    prompt: int
    output: int

    def scaled(self, smoke: bool) -> Workload:
        """As it is, or 1/32 of the tokens."""
        return Workload(self.num_requests, self.prompt // SMOKE, self.output // SMOKE) if smoke else self


# Untimed, before everything else: 80k tokens that share no prefix with those of the workloads, so that all kernels are
# compiled, those of a pool that is full included.
WARM_UP = Workload(40, 1984, 96)
WORKLOADS = {"2k_in_512_out": Workload(64, 2048, 512), "512_in_1k_out": Workload(64, 512, 1024)}


def runs(group: str, overcommits: list[float], extra: dict[str, str], overlaps: list[int]) -> list[Run]:
    """The engines of a group, stock and tidekv in turn. extra, overlaps: tidekv's settings, for group `pressure`."""
    engine: dict[str, Any]
    shape: dict[str, Any]
    out: list[Run] = []
    if group == "full":
        for overlap in (False, True):
            word, engine = ("overlap" if overlap else "no overlap"), {"disable_overlap_schedule": not overlap}
            tide = {"TIDEKV_OVERLAP": "1" if overlap else "0", "TIDEKV_OVERCOMMIT": "1.0"}
            out.append(Run(f"stock, {word}", None, engine, ("decode",)))
            # One host page: full width is what is measured, and pinned memory for 800k tokens takes minutes.
            out.append(Run(f"tidekv, {word}", tide | {"TIDEKV_HOST_TOKENS": "64"}, engine, ("decode",)))
    elif group == "pressure":
        ranked: dict[str, Any] = {"enable_priority_scheduling": True, "default_priority_value": LOW}
        small = ranked | {"max_total_tokens": SMALL_POOL}
        out.append(Run("stock, ample", None, ranked, tuple(WORKLOADS)))
        for phase, conservativeness in (("2k_in_512_out", 1.0), ("512_in_1k_out", 0.1)):
            # At 1.0 stock waits, at 0.1 it retracts. tidekv admits by physical pages: one engine serves both workloads.
            engine = small | {"schedule_conservativeness": conservativeness}
            out.append(Run("stock, 60k", None, engine, (phase,)))
        for reads in ("exact", "window"):
            for overcommit, on in itertools.product(overcommits, overlaps):
                tide = {"TIDEKV_OVERCOMMIT": str(overcommit), "TIDEKV_LOW_READS": reads}
                tide |= {"TIDEKV_WINDOW_TOKENS": "512", "TIDEKV_OVERLAP": str(on)}
                tide["TIDEKV_HOST_TOKENS"] = str(int(SMALL_POOL * overcommit))  # pinning more takes seconds a start
                engine = small | {"disable_overlap_schedule": not on}
                name = f"tidekv, 60k, {overcommit} x, {reads}" + (", overlap" if on else "")
                out.append(Run(name, tide | extra, engine, tuple(WORKLOADS)))
    else:
        # 8 layers hold 4 staging pairs a page: a small step keeps staging small beside a pool of 100 pages.
        shape = {"json_model_override_args": json.dumps({"num_hidden_layers": 8}), "dtype": "float32"}
        shape |= {"max_running_requests": 32, "chunked_prefill_size": 1024}
        ample, small = shape | {"max_total_tokens": 40_000}, shape | {"max_total_tokens": 6_400}
        out.append(Run("stock, ample", None, ample | {"disable_overlap_schedule": True}, ("answers",)))
        for overlap in (False, True):
            tide = {"TIDEKV_OVERCOMMIT": "3.0", "TIDEKV_OVERLAP": "1" if overlap else "0"}
            engine = small | {"disable_overlap_schedule": not overlap}
            out.append(Run(f"tidekv, small, {'overlap' if overlap else 'no overlap'}", tide, engine, ("answers",)))
    return out


# ---- in the child: one engine ----------------------------------------------------------------------------------------


@dataclass
class Timing:
    """One request: seconds to the first token and to the end, tokens, retractions, and the tokens themselves."""

    priority: int
    first: float
    total: float
    retractions: int
    tokens: list[int] = field(repr=False)

    @property
    def per_token(self) -> float:
        return (self.total - self.first) / max(1, len(self.tokens) - 1)


def prompts(count: int, length: int, vocab: int, seed: int) -> list[list[int]]:
    """Token ids that share no prefix; the same for every engine."""
    rng = random.Random(seed)
    return [[rng.randrange(1000, vocab - 1000) for _ in range(length)] for _ in range(count)]


def emit(**result: Any) -> None:
    print("RESULT " + json.dumps(result), flush=True)


def child(run: Run, config: str, smoke: bool) -> None:
    """Build the engine, measure, shut down."""
    import sglang

    begin = time.time()
    vocab = int(json.loads((Path(config) / "config.json").read_text())["vocab_size"])
    common: dict[str, Any] = {
        "model_path": config, "load_format": "dummy", "skip_tokenizer_init": True, "dtype": "bfloat16",
        "attention_backend": "triton", "sampling_backend": "pytorch", "page_size": 64, "mem_fraction_static": 0.85,
        "cuda_graph_bs_decode": [1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128], "disable_prefill_cuda_graph": True,
        "context_length": 32768, "chunked_prefill_size": 8192, "max_running_requests": 256, "random_seed": 1,
        "log_level": "info", "stream_interval": 16,
    }  # fmt: skip
    common |= run.engine
    if smoke:
        common |= {"device": "cpu", "attention_backend": "torch_native", "dtype": "float32", "context_length": 2048}
        # Stock has no kernels for larger pages on a CPU.
        common |= {"page_size": 1 if run.tide is None else 16, "max_running_requests": 64, "chunked_prefill_size": 256}
        pool = run.engine.get("max_total_tokens", 0)
        common["max_total_tokens"] = pool // SMOKE if pool else 16_384
        common.pop("json_model_override_args", None)
    engine = sglang.Engine(**common)
    emit(run=run.name, phase="start", seconds=round(time.time() - begin, 1))
    if "decode" not in run.phases:  # those warm up batch by batch
        _, seconds = ask(engine, WARM_UP.scaled(smoke), HIGH, vocab, seed=11)
        engine.flush_cache()
        emit(run=run.name, phase="warm-up", seconds=round(seconds, 2))
    for phase in run.phases:
        if phase == "decode":
            decode(run, engine, smoke, vocab)
        elif phase == "answers":
            timings, seconds = ask(engine, Workload(24, 512, 128).scaled(smoke), None, vocab)
            emit(run=run.name, phase=phase, seconds=seconds, answers=[t.tokens for t in timings], **retracted(timings))
        else:
            pressure(run, engine, phase, smoke, vocab)
    engine.shutdown()


def decode(run: Run, engine: Any, smoke: bool, vocab: int) -> None:
    """Steps at batch 1, 32, 128 behind 1k prompts: the time of 129 tokens less that of one."""
    for batch in (1, 2) if smoke else (1, 32, 128):
        ask(engine, Workload(batch, 1024, 2), None, vocab)
        steps = []
        for _ in range(3):
            _, short = ask(engine, Workload(batch, 1024, 1), None, vocab)
            _, long = ask(engine, Workload(batch, 1024, 129), None, vocab)
            steps.append((long - short) / 128 * 1e3)
        emit(run=run.name, phase="decode", batch=batch, ms_a_step=round(statistics.median(steps), 3), all=steps)


def pressure(run: Run, engine: Any, phase: str, smoke: bool, vocab: int) -> None:
    workload = WORKLOADS[phase].scaled(smoke)
    timings, seconds = ask(engine, workload, HIGH, vocab)
    result: dict[str, Any] = {"seconds": round(seconds, 2), **retracted(timings)}
    for name, priority in (("high", HIGH), ("low", LOW)):
        mine = [t for t in timings if t.priority == priority]
        result[f"{name}_ttft_p50"] = round(statistics.median(t.first for t in mine), 3)
        result[f"{name}_ttft_max"] = round(max(t.first for t in mine), 3)
        result[f"{name}_tpot_p50_ms"] = round(statistics.median(t.per_token for t in mine) * 1e3, 2)
        result[f"{name}_total_max"] = round(max(t.total for t in mine), 2)
    emit(run=run.name, phase=phase, **result)


def retracted(timings: list[Timing]) -> dict[str, int]:
    counts = [t.retractions for t in timings]
    return {"retractions": sum(counts), "requests_retracted": sum(count > 0 for count in counts)}


def ask(engine: Any, workload: Workload, high: int | None, vocab: int, seed: int = 7) -> tuple[list[Timing], float]:
    """All requests at once; (timings in their order, seconds until the last ended)."""
    sampling = {"temperature": 0, "max_new_tokens": workload.output, "ignore_eos": True}

    async def one(index: int, ids: list[int], begin: float) -> Timing:
        priority = None if high is None else (high if index % 3 == 0 else LOW)
        extra = {} if priority is None else {"priority": priority}
        first, tokens, retractions = 0.0, [], 0
        stream = await engine.async_generate(input_ids=ids, sampling_params=sampling, stream=True, **extra)
        async for chunk in stream:
            first = first or time.monotonic() - begin
            tokens = chunk["output_ids"]
            retractions = chunk["meta_info"].get("num_retractions") or 0
        return Timing(priority or LOW, first, time.monotonic() - begin, retractions, list(tokens))

    async def every() -> list[Timing]:
        begin = time.monotonic()
        texts = prompts(workload.num_requests, workload.prompt, vocab, seed)
        return await asyncio.gather(*(one(i, ids, begin) for i, ids in enumerate(texts)))

    begin = time.monotonic()
    timings = engine.loop.run_until_complete(every())
    return timings, time.monotonic() - begin


# ---- in the parent ---------------------------------------------------------------------------------------------------


def start(run: Run, config: str, seconds: float, smoke: bool) -> list[dict[str, Any]]:
    """Run one engine in a process of its own; its results, or one that says how it failed."""
    with tempfile.TemporaryDirectory() as folder:
        info = Path(folder) / "tidekv-0.1.0.dist-info"
        info.mkdir()
        for name, text in DIST_INFO.items():  # what pip would write: SGLang finds plugins by installed metadata
            (info / name).write_text(text)
        kept = {key: value for key, value in os.environ.items() if not key.startswith("TIDEKV_")}
        path = os.pathsep.join(part for part in (folder, kept.get("PYTHONPATH", "")) if part)
        switch = {} if run.tide is None else {"TIDEKV_SGLANG": "1", **run.tide}
        if smoke and run.tide is not None:  # a quantum, a turn and a window of 1/32 of the tokens, too
            switch.pop("TIDEKV_HOST_TOKENS", None)
            switch |= {"TIDEKV_QUANTUM": "2", "TIDEKV_TURN_TOKENS": "8", "TIDEKV_WINDOW_TOKENS": "16"}
        line = [sys.executable, "-m", "benchmarks.sglang_pressure", "--config", config]
        line += ["--child", json.dumps(asdict(run)), *(["--smoke"] if smoke else [])]
        log = Path(folder) / "log"
        with log.open("w") as out:
            process = subprocess.Popen(
                line, env=kept | {"PYTHONPATH": path} | switch, stdout=out, stderr=subprocess.STDOUT, text=True,
                start_new_session=True,
            )  # fmt: skip
        try:
            late = not watch(process, log, seconds)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # the engine's own processes, too
        lines = log.read_text().splitlines()
    results = [json.loads(text.removeprefix("RESULT ")) for text in lines if text.startswith("RESULT ")]
    # What tidekv counted in each busy time: the warm-up's comes first.
    busy = [match.groups() for match in map(IDLE.search, lines) if match and match[1] != "0"]
    for result, counts in zip((r for r in results if r["phase"] in WORKLOADS), busy[1:], strict=False):
        result |= dict(zip(COUNTS, map(float, counts), strict=True))
    told = [text for text in lines if "tidekv " in text]
    for text in told[:2] + [text for text in told[2:] if "idle" in text or text in told[2:4] + told[-3:]]:
        print("   ", text[:230], file=sys.stderr, flush=True)
    if late or process.returncode or results[-1:] == [] or results[-1]["phase"] != run.phases[-1]:
        print("\n".join(text[:400] for text in lines[-60:]), file=sys.stderr, flush=True)
        reason = f"not done in {seconds:.0f} s" if late else f"exit code {process.returncode}"
        results.append({"run": run.name, "phase": "failed", "reason": reason})
    return results


def watch(process: subprocess.Popen[str], log: Path, seconds: float) -> bool:
    """Whether it ended within START_SECONDS until it serves and `seconds` from then on. Results are told as they
    come."""
    deadline, seen = time.monotonic() + START_SECONDS, 0
    while process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.2)
        results = [text for text in log.read_text().splitlines() if text.startswith("RESULT ")]
        for text in results[seen:]:
            print("   ", text[:230], file=sys.stderr, flush=True)
        if results and not seen:
            deadline = time.monotonic() + seconds
        seen = len(results)
    return process.poll() is not None


def report(results: list[dict[str, Any]]) -> str:
    """Every result but the starts, one line each; answers are compared with the first run's."""
    lines, reference = [], None
    for result in results:
        shown = {key: value for key, value in result.items() if key not in ("run", "phase", "all", "answers")}
        if "answers" in result:
            reference = reference or result["answers"]
            shown["answers_changed"] = sum(a != b for a, b in zip(result["answers"], reference, strict=True))
        if result["phase"] not in ("start", "warm-up"):
            text = "  ".join(f"{key} {value}" for key, value in shown.items())
            lines.append(f"{result['run']:32s} {result['phase']:16s} {text}")
    decode_ms = {(r["run"], r["batch"]): r["ms_a_step"] for r in results if r["phase"] == "decode"}
    for (name, batch), ms in decode_ms.items():
        stock = decode_ms.get((name.replace("tidekv", "stock"), batch))
        if name.startswith("tidekv") and stock:
            lines.append(f"{name}: batch {batch}: {stock / ms:.3f} of stock's tokens a second (goal 0.98)")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--group", choices=("full", "pressure", "answers"), default="full")
    parser.add_argument("--out", type=Path, default=Path("out"))
    parser.add_argument("--config", default=os.environ.get("SGLANG_LLAMA8B", ""))
    parser.add_argument("--overcommit", type=float, nargs="+", default=[3.0])
    parser.add_argument("--overlap", type=int, nargs="+", choices=(0, 1), default=[1], help="of tidekv under pressure")
    parser.add_argument("--set", nargs="+", default=[], metavar="NAME=VALUE", help="settings of tidekv under pressure")
    parser.add_argument(
        "--phases", nargs="+", choices=tuple(WORKLOADS), help="workloads of group pressure; default all"
    )
    parser.add_argument("--only", nargs="+", metavar="RUN", help="these runs of the group, by name, in this order")
    parser.add_argument("--seconds", type=float, default=120, help="limit for one engine once it serves")
    parser.add_argument("--smoke", action="store_true", help="check this program on a CPU")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if not args.config:
        parser.error("give --config FOLDER (with a config.json), or set SGLANG_LLAMA8B")
    if args.child:
        given = json.loads(args.child)
        child(Run(given["name"], given["tide"], given["engine"], tuple(given["phases"])), args.config, args.smoke)
        return 0
    args.out.mkdir(parents=True, exist_ok=True)
    results: list[dict[str, Any]] = []
    chosen = runs(args.group, args.overcommit, dict(pair.split("=", 1) for pair in args.set), args.overlap)
    if args.phases:
        chosen = [replace(run, phases=tuple(p for p in run.phases if p in args.phases)) for run in chosen]
        chosen = [run for run in chosen if run.phases]
    if args.only:
        unknown = sorted(set(args.only) - {run.name for run in chosen})
        if unknown:
            parser.error(f"no run {unknown} in group {args.group}; it has {sorted({run.name for run in chosen})}")
        chosen = [run for name in args.only for run in chosen if run.name == name]
    for run in chosen:
        print(f"{run.name}: {', '.join(run.phases)}", file=sys.stderr, flush=True)
        now = start(run, args.config, args.seconds, args.smoke)
        results += now
        with (args.out / "sglang_pressure.jsonl").open("a") as file:
            file.writelines(json.dumps(r) + "\n" for r in now)
    print(report(results))
    return 1 if any(r["phase"] == "failed" for r in results) else 0


if __name__ == "__main__":
    sys.exit(main())
