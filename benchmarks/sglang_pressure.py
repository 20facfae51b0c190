"""Stock SGLang and tidekv inside it, on one GPU: full width, two workloads under pressure, and their answers.

    python3 -m benchmarks.sglang_pressure --group full --out FOLDER        about 6 minutes on an H200
    python3 -m benchmarks.sglang_pressure --group pressure --out FOLDER
    python3 -m benchmarks.sglang_pressure --group answers --out FOLDER     6 engines, judged as sglang_answers says

`--smoke` runs the same code on a CPU with few tokens: it checks this program and measures nothing.

It needs SGLang on the path and a folder with a config.json (random weights): --config, or $SGLANG_LLAMA8B. Group
`answers` writes a model of its own, or takes the one in --model. Each engine is a process of its own; a result is one
JSON line in FOLDER/sglang_pressure.jsonl, and a table at the end.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gzip
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

from benchmarks import sglang_answers
from benchmarks.sglang_answers import ANSWERS, FAULT, FLOOR, REFERENCE

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
PLANTED = "planted_fault = benchmarks.planted_fault:register\n"


@dataclass(frozen=True)
class Run:
    """One engine: its environment (None: stock), its arguments beyond the common ones, what to measure; and whether
    benchmarks.planted_fault is loaded beside tidekv."""

    name: str
    tide: dict[str, str] | None
    engine: dict[str, Any]
    phases: tuple[str, ...]
    fault: bool = False


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
        out += answer_runs()
    return out


def answer_runs() -> list[Run]:
    """Who answers; the reference comes last and scores them all. Much comes and goes, so that much could go wrong."""
    pool = 16_384  # tokens; the load holds 41k
    # 8 layers hold 4 staging pairs a page: a small step keeps staging small beside a pool of 256 pages.
    shape: dict[str, Any] = {"max_running_requests": 64, "chunked_prefill_size": 1024, "enable_fp32_lm_head": True}
    shape |= {"load_format": "auto", "context_length": 2048, "max_total_tokens": pool, "schedule_conservativeness": 0.1}
    shape |= {"enable_priority_scheduling": True, "default_priority_value": LOW}
    tide = {"TIDEKV_OVERCOMMIT": "3.0", "TIDEKV_HOST_TOKENS": str(3 * pool), "TIDEKV_PAUSED_SHARE": "0.25"}
    tide |= {"TIDEKV_TURN_TOKENS": "64", "TIDEKV_QUANTUM": "8"}
    ladder = tide | {"TIDEKV_PAUSING": "0", "TIDEKV_OVERLAP": "1"}  # every step streams what is narrow
    out = [Run(FLOOR, None, shape, ("answers",))]
    for overlap, word in ((False, "no overlap"), (True, "overlap")):
        engine = shape | {"disable_overlap_schedule": not overlap}
        out.append(Run(f"tidekv, small, {word}", tide | {"TIDEKV_OVERLAP": str(int(overlap))}, engine, ("answers",)))
    out.append(Run("tidekv, small, overlap, nobody pauses", ladder, shape, ("answers",)))
    out.append(Run(FAULT, tide | {"TIDEKV_OVERLAP": "1"}, shape, ("answers",), fault=True))
    ample = shape | {"max_total_tokens": 8 * pool, "schedule_conservativeness": 1.0}
    out.append(Run(REFERENCE, None, ample, ("answers", "scores")))
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


def child(run: Run, config: str, smoke: bool, folder: Path) -> None:
    """Build the engine, measure, shut down. folder: has the answers of other runs, and gets this one's (what is too
    long for a line of a log that several processes write)."""
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
        if "answers" in run.phases:
            common |= {"max_running_requests": 16, "enable_fp32_lm_head": False}
    engine = sglang.Engine(**common)
    emit(run=run.name, phase="start", seconds=round(time.time() - begin, 1))
    if set(run.phases) <= set(WORKLOADS):  # group `full` warms up batch by batch
        _, seconds = ask(engine, WARM_UP.scaled(smoke), HIGH, vocab, seed=11)
        engine.flush_cache()
        emit(run=run.name, phase="warm-up", seconds=round(seconds, 2))
    load, raw = sglang_answers.SMOKE if smoke else sglang_answers.FULL, {}
    for phase in run.phases:
        if phase == "decode":
            decode(run, engine, smoke, vocab)
        elif phase == "answers":
            raw = sglang_answers.answer(engine, load, HIGH, LOW)
            emit(run=run.name, phase=phase, retractions=raw.pop("retractions"))
        elif phase == "scores":
            others = json.loads((folder / "answers.json").read_text())
            raw |= sglang_answers.scores(engine, load, others | {run.name: raw["answers"]})
            emit(run=run.name, phase=phase)
        else:
            pressure(run, engine, phase, smoke, vocab)
    (folder / "raw.json").write_text(json.dumps(raw))
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


def start(
    run: Run, config: str, seconds: float, smoke: bool, answers: dict[str, Any]
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Run one engine in a process of its own; its results, or one that says how it failed, and what is too long for
    them. answers: other runs', for one that scores."""
    with tempfile.TemporaryDirectory() as folder:
        info = Path(folder) / "tidekv-0.1.0.dist-info"
        info.mkdir()
        for name, text in DIST_INFO.items():  # what pip would write: SGLang finds plugins by installed metadata
            (info / name).write_text(text + (PLANTED if run.fault and name == "entry_points.txt" else ""))
        kept = {key: value for key, value in os.environ.items() if not key.startswith("TIDEKV_")}
        path = os.pathsep.join(part for part in (folder, kept.get("PYTHONPATH", "")) if part)
        switch = {} if run.tide is None else {"TIDEKV_SGLANG": "1", **run.tide}
        if smoke and run.tide is not None:  # a quantum, a turn and a window of 1/32 of the tokens, too
            switch.pop("TIDEKV_HOST_TOKENS", None)
            switch |= {"TIDEKV_QUANTUM": "2", "TIDEKV_TURN_TOKENS": "8", "TIDEKV_WINDOW_TOKENS": "16"}
        line = [sys.executable, "-m", "benchmarks.sglang_pressure", "--config", config]
        line += ["--child", json.dumps(asdict(run)), *(["--smoke"] if smoke else [])]
        (Path(folder) / "answers.json").write_text(json.dumps(answers))
        line += ["--folder", folder]
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
        written = Path(folder) / "raw.json"
        raw = json.loads(written.read_text()) if written.is_file() else {}
    results = [json.loads(text.removeprefix("RESULT ")) for text in lines if text.startswith("RESULT ")]
    # What tidekv counted in each busy time: the warm-up's, if there was one, comes first.
    busy = [match.groups() for match in map(IDLE.search, lines) if match and any(map(float, match.groups()))]
    timed = [r for r in results if r["phase"] in (*WORKLOADS, "warm-up", "answers")]
    for result, counts in zip(timed, busy, strict=False):
        result |= dict(zip(COUNTS, map(float, counts), strict=True))
    told = [text for text in lines if "tidekv " in text]
    for text in told[:2] + [text for text in told[2:] if "idle" in text or text in told[2:4] + told[-3:]]:
        print("   ", text[:230], file=sys.stderr, flush=True)
    if late or process.returncode or results[-1:] == [] or results[-1]["phase"] != run.phases[-1]:
        print("\n".join(text[:400] for text in lines[-60:]), file=sys.stderr, flush=True)
        reason = f"not done in {seconds:.0f} s" if late else f"exit code {process.returncode}"
        results.append({"run": run.name, "phase": "failed", "reason": reason})
    return results, raw


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
    """Every result but the starts, one line each."""
    lines = []
    for result in results:
        shown = {key: value for key, value in result.items() if key not in ("run", "phase", "all")}
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
    parser.add_argument("--model", default="", help="of group answers: a folder with weights; default: one made here")
    parser.add_argument("--attention-backend", choices=("triton", "flashinfer"), default="triton")
    parser.add_argument("--overcommit", type=float, nargs="+", default=[3.0])
    parser.add_argument("--overlap", type=int, nargs="+", choices=(0, 1), default=[1], help="of tidekv under pressure")
    parser.add_argument("--set", nargs="+", default=[], metavar="NAME=VALUE", help="settings of tidekv under pressure")
    parser.add_argument(
        "--phases", nargs="+", choices=tuple(WORKLOADS), help="workloads of group pressure; default all"
    )
    parser.add_argument("--only", nargs="+", metavar="RUN", help="these runs of the group, by name, in this order")
    parser.add_argument("--seconds", type=float, default=120, help="limit for one engine once it serves")
    parser.add_argument("--judge", action="store_true", help=f"only judge the answers that lie in --out ({ANSWERS})")
    parser.add_argument("--smoke", action="store_true", help="check this program on a CPU")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        given = json.loads(args.child)
        run = Run(given["name"], given["tide"], given["engine"], tuple(given["phases"]))
        child(run, args.config, args.smoke, args.folder)
        return 0
    if args.judge:
        with gzip.open(args.out / ANSWERS, "rt") as file:
            return tell(args.out, [], sglang_answers.judge(json.load(file)), [])
    with tempfile.TemporaryDirectory() as folder:
        config = args.config
        if args.group == "answers":
            config = args.model or folder
            if not args.model:
                sglang_answers.write_model(Path(folder), args.smoke)
        if not config:
            parser.error("give --config FOLDER (with a config.json), or set SGLANG_LLAMA8B")
        return measure(parser, args, config)


def measure(parser: argparse.ArgumentParser, args: argparse.Namespace, config: str) -> int:
    """Run the engines one after another, write down and tell what they did."""
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
    raw: dict[str, dict[str, Any]] = {}
    for run in chosen:
        print(f"{run.name}: {', '.join(run.phases)}", file=sys.stderr, flush=True)
        run = replace(run, engine={"attention_backend": args.attention_backend} | run.engine)
        told = {name: mine["answers"] for name, mine in raw.items()}
        now, long = start(run, config, args.seconds, args.smoke, told)
        results += now
        if "answers" in long:
            counts = next(r for r in now if r["phase"] == "answers")
            raw[run.name] = long | {"counts": {name: counts[name] for name in COUNTS if name in counts}}
            with gzip.open(args.out / ANSWERS, "wt") as file:  # for `--judge`
                json.dump(raw, file)
        with (args.out / "sglang_pressure.jsonl").open("a") as file:
            file.writelines(json.dumps(r) + "\n" for r in now)
    wrong = [f"{r['run']}: {r['reason']}" for r in results if r["phase"] == "failed"]
    return tell(args.out, results, sglang_answers.judge(raw), wrong)


def tell(out: Path, results: list[dict[str, Any]], judged: list[dict[str, Any]], wrong: list[str]) -> int:
    """Write down and print what came out; the exit code."""
    with (out / "sglang_pressure.jsonl").open("a") as file:
        file.writelines(json.dumps(r) + "\n" for r in judged)
    wrong += sglang_answers.verdict(judged)
    print(report(results + judged))
    print("\n".join(f"not as it should be: {text}" for text in wrong) or "everything as it should be")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
