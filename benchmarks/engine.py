"""The embedded engine with random weights in Llama-3.1-8B shape: tokens a second, the floor, and where a decode step
goes.

    python -m benchmarks.engine --out DIR [--sglang FOLDER_WITH_CONFIG]

1,024 tokens in, 128 out, ample memory, pages of 64, greedy. With --sglang a stock SGLang engine (where it is installed)
serves the same prompts on the same GPU, one run of it after one of ours.
"""

from __future__ import annotations

import random
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch

from benchmarks.report import Report, arguments
from benchmarks.timing import copy_gbps, device, link_gbps, on_gpu, synchronize
from tidekv import Engine, EngineConfig
from tidekv.engine.model import load_model
from tidekv.engine.request import RequestState
from tidekv.engine.sampling import SamplingParams
from tidekv.memory.ledger import LOW


def prompts(rng: random.Random, count: int, length: int, vocab: int) -> list[list[int]]:
    return [[rng.randrange(vocab // 128, vocab - vocab // 16) for _ in range(length)] for _ in range(count)]


def make_engine(sizes: SimpleNamespace, loaded: Any) -> Engine:
    """Ample: nothing ever narrows. A small host pool, since its memory is pinned at the start."""
    config = EngineConfig(
        model=sizes.model,
        device=device(),
        dtype=sizes.dtype,
        kv_memory=sizes.kv_memory,
        host_memory=sizes.host_memory,
        page_size=sizes.page_size,
        prefill_chunk=sizes.prefill_chunk,
        max_running=max(sizes.batches),
        max_context_len=sizes.tokens_in + sizes.tokens_out + sizes.page_size,
    )
    return Engine(config, loaded)


class Timeline:
    """Wall time of each step, and whether it was a decode of the whole batch."""

    def __init__(self, batch: int) -> None:
        self.batch = batch
        self.last = time.perf_counter()
        self.decode_ms: list[float] = []
        self.prefill_s = 0.0
        self.steps = 0
        self._was_decoding = False

    def __call__(self, engine: Engine) -> None:
        now = time.perf_counter()
        spent, self.last = now - self.last, now
        running = [r for r in engine.scheduler.running if r.state is RequestState.DECODE]
        self.steps += 1
        if self._was_decoding:
            self.decode_ms.append(spent * 1e3)
        else:
            self.prefill_s += spent
        self._was_decoding = len(running) == self.batch


def floor(report: Report, engine: Engine, sizes: SimpleNamespace) -> dict[int, float]:
    """Milliseconds that reading the weights and the KV of a step takes at the measured copy rate."""
    copy_rate = report.data["ceilings"]["device_copy_gbps"]
    net = engine.model.model
    weights = sum(p.numel() * p.element_size() for p in net.parameters())
    embedding = net.get_input_embeddings().weight
    weights -= embedding.numel() * embedding.element_size()  # a step reads one row a token of it
    token = engine.geometry.token_bytes_per_layer * engine.geometry.layer_num
    out = {}
    for batch in sizes.batches:
        kv = batch * (sizes.tokens_in + sizes.tokens_out / 2) * token
        out[batch] = (weights + kv) / copy_rate / 1e6
    report.row(
        "bytes of a step",
        weights_gb=round(weights / 1e9, 2),
        kv_kib_a_token=token // 1024,
        **{f"floor_ms at {batch}": round(ms, 3) for batch, ms in out.items()},
    )
    return out


class SGLang:
    """A stock SGLang engine with random weights of the same shape, in its own processes on the same GPU."""

    def __init__(self, folder: str) -> None:
        import sglang

        self.version = sglang.__version__
        self.engine = sglang.Engine(
            model_path=folder,
            load_format="dummy",
            skip_tokenizer_init=True,
            dtype="bfloat16",
            attention_backend="triton",
            sampling_backend="pytorch",
            page_size=64,
            mem_fraction_static=0.45,  # the other half of the GPU is ours
            cuda_graph_bs_decode=[1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128],
            disable_prefill_cuda_graph=True,
            context_length=32768,
            chunked_prefill_size=8192,
            max_running_requests=256,
            random_seed=1,
            log_level="error",
        )

    def generate(self, given: list[list[int]], new_tokens: int) -> float:
        """Seconds."""
        begin = time.perf_counter()
        self.engine.generate(
            input_ids=given, sampling_params={"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True}
        )
        return time.perf_counter() - begin


def side_by_side(report: Report, engine: Engine, sizes: SimpleNamespace, peer: SGLang, batch: int) -> None:
    """Decode rate of both by one measure: (seconds of 129 new tokens - seconds of one) / 128 a step."""
    rng, vocab = random.Random(batch), int(engine.model.config.vocab_size)

    def ours(given: list[list[int]], new_tokens: int) -> float:
        engine.memory.drop_cache()
        synchronize()
        begin = time.perf_counter()
        engine.generate(given, SamplingParams(max_new_tokens=new_tokens, ignore_eos=True))
        return time.perf_counter() - begin

    def step_ms(generate: Callable[[list[list[int]], int], float]) -> tuple[float, float]:
        first = generate(prompts(rng, batch, sizes.tokens_in, vocab), 1)
        whole = generate(prompts(rng, batch, sizes.tokens_in, vocab), sizes.tokens_out + 1)
        return (whole - first) / sizes.tokens_out * 1e3, batch * sizes.tokens_in / first

    for generate in (ours, peer.generate):
        generate(prompts(rng, batch, sizes.tokens_in, vocab), 4)
    mine, theirs = [], []
    for _ in range(3):
        mine.append(step_ms(ours))
        theirs.append(step_ms(peer.generate))
    ms, peer_ms = (statistics.median(step for step, _ in rows) for rows in (mine, theirs))
    report.row(
        "beside SGLang, interleaved",
        batch=batch,
        ms_a_step=round(ms, 3),
        tok_s=round(batch * 1e3 / ms),
        sglang=peer.version,
        sglang_ms=round(peer_ms, 3),
        sglang_tok_s=round(batch * 1e3 / peer_ms),
        of_sglang=round(peer_ms / ms, 3),
        prefill_tok_s=round(statistics.median(rate for _, rate in mine)),
        sglang_prefill_tok_s=round(statistics.median(rate for _, rate in theirs)),
    )


def throughput(report: Report, engine: Engine, sizes: SimpleNamespace, batch: int, floors: dict[int, float]) -> None:
    rng = random.Random(batch)
    vocab = int(engine.model.config.vocab_size)
    sampling = SamplingParams(max_new_tokens=sizes.tokens_out + 1, ignore_eos=True)
    # Long enough for the last prompt to be through before the first request ends: then the whole batch has decoded
    # once.
    warm = SamplingParams(max_new_tokens=6 + batch * sizes.tokens_in // sizes.prefill_chunk, ignore_eos=True)
    engine.memory.drop_cache()
    engine.generate(prompts(rng, batch, sizes.tokens_in, vocab), warm)
    for repeat in range(sizes.repeats):
        engine.memory.drop_cache()
        given = prompts(rng, batch, sizes.tokens_in, vocab)
        synchronize()
        timeline = Timeline(batch)
        begin = time.perf_counter()
        outputs = engine.generate(given, sampling, on_step=timeline)
        wall = time.perf_counter() - begin
        if any(len(o.token_ids) != sizes.tokens_out + 1 for o in outputs):
            raise RuntimeError("a request ended early")
        mean = sum(timeline.decode_ms) / max(1, len(timeline.decode_ms))
        row: dict[str, Any] = {
            "batch": batch,
            "repeat": repeat,
            "decode_steps": len(timeline.decode_ms),
            "ms_step_mean": round(mean, 3),
            "ms_step_median": round(statistics.median(timeline.decode_ms), 3),
            "decode_tok_s": round(batch * 1e3 / mean, 1),
            "prefill_tok_s": round(batch * sizes.tokens_in / timeline.prefill_s),
            "wall_s": round(wall, 2),
        }
        if batch in floors:
            row["floor_ms"] = round(floors[batch], 3)
            row["over_floor"] = round(mean / floors[batch], 2)
        if batch in sizes.sglang_tok_s:
            row["sglang_earlier_tok_s"] = sizes.sglang_tok_s[batch]
            row["of_sglang"] = round(row["decode_tok_s"] / sizes.sglang_tok_s[batch], 3)
        graphs = getattr(engine.runner, "graphs", None)
        if graphs is not None:
            row["graph_replays"], row["eager_decodes"] = graphs.replays, graphs.eager_decodes
        stats = engine.stats()
        if stats["halvings_low"] or stats["retractions"]:
            row["note"] = "memory was not ample"
        report.row("throughput", **row)


# ---- where a step goes -----------------------------------------------------------------------------------------------


@contextmanager
def timed(parts: list[tuple[str, Any, str]], spent: dict[str, list[float]]) -> Any:
    """Host time of the named methods of these objects or modules, while the context lasts."""
    saved = []
    for name, owner, attribute in parts:
        original = getattr(owner, attribute, None)
        if original is None:
            continue
        own = attribute in vars(owner)
        spent[name] = []

        def wrapper(*args: Any, _original: Any = original, _name: str = name, **kwargs: Any) -> Any:
            begin = time.perf_counter()
            try:
                return _original(*args, **kwargs)
            finally:
                spent[_name].append((time.perf_counter() - begin) * 1e3)

        setattr(owner, attribute, wrapper)
        saved.append((owner, attribute, original, own))
    try:
        yield
    finally:
        for owner, attribute, original, own in reversed(saved):
            if own:
                setattr(owner, attribute, original)
            else:
                delattr(owner, attribute)


@contextmanager
def decoding(engine: Engine, sizes: SimpleNamespace, batch: int) -> Any:
    """A batch that has finished its prefill and decodes on; gone afterwards."""
    vocab = int(engine.model.config.vocab_size)
    sampling = SamplingParams(max_new_tokens=sizes.tokens_out, ignore_eos=True)
    names = [
        engine.add_request(p, sampling) for p in prompts(random.Random(1000 + batch), batch, sizes.tokens_in, vocab)
    ]
    try:
        while any(engine.requests[name].state is not RequestState.DECODE for name in names):
            engine.step()
        for _ in range(3):
            engine.step()
        yield
    finally:
        for name in names:
            engine.abort(name)


def host_parts(report: Report, engine: Engine, sizes: SimpleNamespace, batch: int, graphs_on: bool) -> None:
    """Host milliseconds of each part of a decode step. "forward" is issuing; with overlap "wait for
    the tokens" is what the host has to spare."""
    import tidekv.engine.runner as runner_module

    runner: Any = engine.runner
    kept = getattr(runner, "graphs", None)
    if not graphs_on:
        if kept is None:
            return
        runner.graphs = None
    elif kept is None and on_gpu():
        return
    parts = [
        ("plan", engine.scheduler, "plan"),
        ("plan: memory.decode", engine.memory, "decode"),
        ("plan: alloc_decode", engine.allocator, "alloc_decode"),
        ("run", runner, "launch"),
        ("run: build_batch", runner_module, "build_batch"),
        ("run: forward, issue", runner, "_forward"),
        ("run: attention of a layer, issue", engine.backend, "forward"),
        ("run: sample, issue", runner, "_sample"),
        ("wait for the tokens", runner_module.Launched, "read"),
        ("restore_widths", engine.allocator, "restore_widths"),
    ]
    if runner.graphs is not None:
        parts.append(("run: graph replay, issue", runner.graphs, "run"))
    spent: dict[str, list[float]] = {}
    steps: list[float] = []
    try:
        with decoding(engine, sizes, batch), timed(parts, spent):
            for _ in range(sizes.profile_steps):
                begin = time.perf_counter()
                engine.step()
                steps.append((time.perf_counter() - begin) * 1e3)
    finally:
        runner.graphs = kept
    row = {"batch": batch, "graphs": graphs_on and kept is not None, "step": round(statistics.median(steps), 3)}
    for name, values in spent.items():
        row[name] = round(statistics.median(values), 4) if values else None
    calls = len(spent.get("run: attention of a layer, issue", ())) / max(1, len(steps))
    if calls:
        row["attention, all layers, issue"] = round(sum(spent["run: attention of a layer, issue"]) / len(steps), 3)
    report.row("host time of a decode step, ms", **row)


def kernels(report: Report, engine: Engine, sizes: SimpleNamespace, batch: int) -> None:
    """What the GPU does in a decode step: its busy time, and the ten kernels that take most of it."""
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CUDA] if on_gpu() else [ProfilerActivity.CPU]
    with decoding(engine, sizes, batch):
        synchronize()
        with profile(activities=activities) as seen:
            begin = time.perf_counter()
            for _ in range(sizes.profile_steps):
                engine.step()
            synchronize()
            wall = (time.perf_counter() - begin) * 1e3 / sizes.profile_steps
    busy: dict[str, tuple[float, int]] = {}
    for event in seen.events():
        if on_gpu() and event.device_type != torch.autograd.DeviceType.CUDA:
            continue
        us = float(event.time_range.elapsed_us())
        total, count = busy.get(event.name, (0.0, 0))
        busy[event.name] = (total + us, count + 1)
    total_ms = sum(us for us, _ in busy.values()) / 1e3 / sizes.profile_steps
    launches = sum(count for _, count in busy.values()) / sizes.profile_steps
    report.row(
        "device time of a decode step",
        batch=batch,
        kernel="all",
        ms_a_step=round(total_ms, 3),
        launches_a_step=round(launches, 1),
        share=1.0,
        wall_ms_under_profiler=round(wall, 3),
    )
    for name, (us, count) in sorted(busy.items(), key=lambda item: -item[1][0])[:10]:
        report.row(
            "device time of a decode step",
            batch=batch,
            kernel=name[:90],
            ms_a_step=round(us / 1e3 / sizes.profile_steps, 4),
            launches_a_step=round(count / sizes.profile_steps, 1),
            share=round(us / 1e3 / sizes.profile_steps / total_ms, 3),
        )


WAYS = ("full width", "narrow, replayed", "narrow, replayed, not ahead", "narrow, launch by launch")


def narrowed(report: Report, engine: Engine, sizes: SimpleNamespace, batch: int, lows: int) -> None:
    """A decode step of `batch` requests of which `lows` are narrowed to half their layers, beside the time that their
    missing layers take on the link: replayed and launched ahead of the last one's tokens, replayed behind them, launch
    by launch. And where the host's part of it goes: "wait" is what it has to spare."""
    import tidekv.engine.runner as runner_module

    vocab, rng = int(engine.model.config.vocab_size), random.Random(2000 + batch + lows)
    runner: Any = engine.runner
    scheduler = engine.scheduler
    graphs, end_step = getattr(runner, "graphs", None), scheduler.end_step
    # The ways, and what the prompts' last chunks leave.
    steps = len(WAYS) * (sizes.profile_steps + 12)
    sampling = SamplingParams(max_new_tokens=min(sizes.tokens_out, steps), ignore_eos=True)
    engine.memory.drop_cache()
    given = prompts(rng, batch, sizes.tokens_in, vocab)
    names = [engine.add_request(p, sampling, i >= lows) for i, p in enumerate(given)]
    scheduler.end_step = lambda: None  # type: ignore[method-assign]  # or the widths would come back at once
    row: dict[str, Any] = {"batch": batch, "narrowed": lows}
    try:
        while any(engine.requests[name].state is not RequestState.DECODE for name in names):
            engine.step()
        for how in WAYS:
            if how == "narrow, replayed" and not engine.allocator._halve_and_repack(LOW, 0):
                raise RuntimeError(str(engine.allocator.refusals))
            runner.graphs = None if how == "narrow, launch by launch" else graphs
            if how == "narrow, replayed, not ahead":
                engine._may_stay_unread = lambda _: False  # type: ignore[method-assign]
            for _ in range(4):
                engine.step()
            synchronize()
            parts = [
                ("plan", scheduler, "plan"),
                ("launch", runner, "launch"),
                ("launch: look up", runner_module, "host_batch"),
                ("wait", runner_module.Launched, "read"),
            ]
            if runner.graphs is not None:
                parts.append(("launch: fill and replay", runner.graphs, "run"))
            spent: dict[str, list[float]] = {}
            before, begin = engine.stats()["streamed_bytes"], time.perf_counter()
            with timed(parts, spent):
                for _ in range(sizes.profile_steps):
                    engine.step()
            synchronize()
            row[f"{how}, ms"] = round((time.perf_counter() - begin) * 1e3 / sizes.profile_steps, 3)
            streamed = (engine.stats()["streamed_bytes"] - before) / sizes.profile_steps
            host = {part: round(statistics.median(values), 3) for part, values in spent.items() if values}
            report.row("host time of a narrowed decode step, ms", batch=batch, narrowed=lows, way=how, **host)
            if how == "narrow, replayed, not ahead":
                del engine._may_stay_unread  # type: ignore[method-assign]
        row["streamed_mb_a_step"] = round(streamed / 1e6, 1)
        if report.data["ceilings"].get("pinned_h2d_gbps"):
            row["link_ms"] = round(streamed / report.data["ceilings"]["pinned_h2d_gbps"] / 1e6, 3)
        report.row("narrowed decode step", **row)
    finally:
        vars(engine).pop("_may_stay_unread", None)
        runner.graphs, scheduler.end_step = graphs, end_step  # type: ignore[method-assign]
        for name in names:
            engine.abort(name)
        while engine.allocator.restore_widths(1000, start_free=0.0, stop_free=0.0):
            pass


def main() -> int:
    parser, make = arguments("engine", 240, __doc__)
    parser.add_argument("--batches", type=int, nargs="+", help="default: 1 32 128")
    parser.add_argument("--sglang", help="model folder for a stock SGLang engine on the same GPU")
    parser.add_argument("--only", default="", help="phases whose name begins with this; the start runs anyway")
    args = parser.parse_args()
    sizes = SimpleNamespace(
        model="random:llama-3.1-8b",
        dtype=torch.bfloat16,
        kv_memory="32GiB",
        host_memory="10GiB",
        page_size=64,
        prefill_chunk=8192,
        batches=args.batches or [1, 32, 128],
        tokens_in=1024,
        tokens_out=128,
        repeats=2,
        profile_steps=10,
        copy_bytes=4 << 30,
        sglang_tok_s={1: 198, 32: 5140, 128: 9850},  # stock 0.5.17, triton attention, one H200, another day
    )
    if args.smoke:
        vars(sizes).update(
            model="random:tiny",
            dtype=torch.float32,
            kv_memory="64MiB",
            host_memory="1MiB",
            page_size=16,
            prefill_chunk=128,
            batches=[1, 3],
            tokens_in=48,
            tokens_out=44,
            repeats=1,
            profile_steps=2,
            copy_bytes=1 << 20,
            sglang_tok_s={},
        )
    report = make(args)
    made: list[Engine] = []
    peers: list[SGLang] = []
    floors: dict[int, float] = {}

    def start() -> None:
        begin = time.perf_counter()
        loaded = load_model(sizes.model, device(), sizes.dtype)
        synchronize()
        load_s = time.perf_counter() - begin
        made.append(make_engine(sizes, loaded))
        synchronize()
        report.row(
            "start",
            model_s=round(load_s, 1),
            engine_s=round(time.perf_counter() - begin - load_s, 1),
            pages=made[0].geometry.num_pages,
            attention=made[0].backend.name,
        )

    report.phase("device copy", lambda: report.ceiling("device_copy_gbps", copy_gbps(sizes.copy_bytes)) and None)
    if on_gpu():
        report.phase("link", lambda: report.ceiling("pinned_h2d_gbps", link_gbps(sizes.copy_bytes // 4)) and None)
    if args.sglang:  # first: it sizes itself by what is free
        report.phase("start SGLang", lambda: peers.append(SGLang(args.sglang)))
    if not report.phase("start", start):
        return report.finish()
    engine = made[0]
    report.phase("floor", lambda: floors.update(floor(report, engine, sizes)))
    phases: list[tuple[str, Callable[..., None], tuple[Any, ...]]] = []
    for batch in sizes.batches:
        if peers:
            phases.append((f"beside SGLang, batch {batch}", side_by_side, (peers[0], batch)))
        phases.append((f"throughput, batch {batch}", throughput, (batch, floors)))
        phases.append((f"host parts, batch {batch}", host_parts, (batch, True)))
        phases.append((f"kernels, batch {batch}", kernels, (batch,)))
    phases += [(f"host parts without graphs, batch {batch}", host_parts, (batch, False)) for batch in sizes.batches]
    for batch in sizes.batches[1:]:
        for lows in (max(1, batch // 8), batch // 2):
            phases.append((f"narrowed, {lows} of {batch}", narrowed, (batch, lows)))
    for name, body, extra in [phase for phase in phases if phase[0].startswith(args.only)]:
        report.phase(name, body, report, engine, sizes, *extra)
    for peer in peers:
        peer.engine.shutdown()
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
