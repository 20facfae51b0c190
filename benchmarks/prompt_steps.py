"""What a step with a prompt's chunk hides: layers that are streamed under it, and KV that is written through to the
host.

    python -m benchmarks.prompt_steps --out DIR

24 requests of 1,024 tokens decode, some of them narrowed to half their layers, while a long prompt of high priority is
computed beside them, chunk by chunk. Milliseconds a chunk, of consecutive chunks, beside the time that the streamed
bytes take on the link; "hidden" is the share of that time by which the step did not get longer. Written through: the
same prompt at low priority, backed on the host page by page, with nothing narrow.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch

from benchmarks.engine import prompts
from benchmarks.report import Report, arguments
from benchmarks.timing import device, link_gbps, on_gpu, synchronize
from tidekv import Engine, EngineConfig
from tidekv.engine.model import load_model
from tidekv.engine.request import RequestState
from tidekv.engine.sampling import SamplingParams
from tidekv.memory.ledger import LOW
from tidekv.streaming import streamer

WAYS = ("copy engine", "kernel, 4 programs", "kernel, 16 programs")
NEVER = 1 << 60


@contextmanager
def copies_by(engine: Engine, way: str) -> Iterator[None]:
    """How streamed layers come in, while the context lasts."""
    kept, programs = streamer.COPY_ENGINE_TOKENS, engine.streamer.max_programs
    streamer.COPY_ENGINE_TOKENS = 0 if way == "copy engine" else NEVER
    if way.startswith("kernel"):
        engine.streamer.max_programs = int(way.split()[1])
    try:
        yield
    finally:
        streamer.COPY_ENGINE_TOKENS, engine.streamer.max_programs = kept, programs


@contextmanager
def decoding(engine: Engine, sizes: SimpleNamespace, narrowed: int) -> Iterator[None]:
    """A batch that decodes, `narrowed` of it with half of its layers; all gone afterwards."""
    scheduler, chunk, end_step = engine.scheduler, engine.scheduler.prefill_chunk, engine.scheduler.end_step
    vocab = int(engine.model.config.vocab_size)
    sampling = SamplingParams(max_new_tokens=sizes.tokens_out, ignore_eos=True)
    given = prompts(random.Random(narrowed), sizes.batch, sizes.tokens_in, vocab)
    names = [engine.add_request(p, sampling, i >= narrowed) for i, p in enumerate(given)]
    scheduler.end_step = lambda: None  # type: ignore[method-assign]  # or the widths would come back at once
    try:
        while any(engine.requests[name].state is not RequestState.DECODE for name in names):
            engine.step()
        if narrowed and not engine.allocator._halve_and_repack(LOW, 0):
            raise RuntimeError(str(engine.allocator.refusals))
        yield
    finally:
        scheduler.prefill_chunk, scheduler.end_step = chunk, end_step  # type: ignore[method-assign]
        for name in names:
            engine.abort(name)
        while engine.allocator.restore_widths(1000, start_free=0.0, stop_free=0.0):
            pass


def chunk_ms(engine: Engine, sizes: SimpleNamespace, chunk: int, *, is_high: bool = True) -> tuple[float, float]:
    """(milliseconds, streamed bytes) of a step with a chunk of so many prompt tokens, of consecutive ones."""
    engine.scheduler.prefill_chunk = chunk
    vocab = int(engine.model.config.vocab_size)
    prompt = prompts(random.Random(chunk), 1, chunk * (sizes.chunks + 2), vocab)[0]
    name = engine.add_request(prompt, SamplingParams(max_new_tokens=2, ignore_eos=True), is_high)
    try:
        engine.step()
        synchronize()
        before, begin = engine.stats()["streamed_bytes"], time.perf_counter()
        for _ in range(sizes.chunks):
            engine.step()
        synchronize()
        ms = (time.perf_counter() - begin) * 1e3 / sizes.chunks
        if engine.requests[name].num_computed < chunk * sizes.chunks:
            raise RuntimeError(f"chunks of {chunk} tokens: {engine.requests[name].num_computed} are computed")
        return ms, (engine.stats()["streamed_bytes"] - before) / sizes.chunks
    finally:
        engine.abort(name)


def streamed(report: Report, engine: Engine, sizes: SimpleNamespace, narrowed: int) -> None:
    """Each chunk size in each way, and alone."""
    link = report.data["ceilings"].get("pinned_h2d_gbps")
    alone: dict[int, float] = {}
    with decoding(engine, sizes, 0):
        for chunk in sizes.chunk_tokens:
            alone[chunk] = min(chunk_ms(engine, sizes, chunk)[0] for _ in range(2))
    with decoding(engine, sizes, narrowed):
        for chunk in sizes.chunk_tokens:
            for way in WAYS if engine.streamer.engine is not None else WAYS[1:]:
                with copies_by(engine, way):
                    ms, streamed_bytes = min(chunk_ms(engine, sizes, chunk) for _ in range(2))
                row: dict[str, Any] = {"chunk": chunk, "narrowed": narrowed, "way": way}
                row |= {"streamed_mb": round(streamed_bytes / 1e6), "alone_ms": round(alone[chunk], 2)}
                row["ms"] = round(ms, 2)
                if link:
                    link_ms = streamed_bytes / link / 1e6
                    row["link_ms"] = round(link_ms, 2)
                    row["hidden"] = round(1 - (ms - alone[chunk]) / link_ms, 2)
                report.row("streamed under a chunk", **row)


def written(report: Report, engine: Engine, sizes: SimpleNamespace) -> None:
    """A low prompt that is written through, on the compute stream and beside it, against a high one that is not."""
    backend = engine.backend
    beside = backend._host_writes
    with decoding(engine, sizes, 0):
        for chunk in sizes.chunk_tokens:
            row: dict[str, Any] = {"chunk": chunk}
            row["not_written_ms"] = round(min(chunk_ms(engine, sizes, chunk)[0] for _ in range(2)), 2)
            for name, stream in (("beside_ms", beside), ("in_line_ms", None)):
                backend._host_writes = stream
                before = backend.host_bytes_out
                row[name] = round(min(chunk_ms(engine, sizes, chunk, is_high=False)[0] for _ in range(2)), 2)
                row["written_mb"] = round((backend.host_bytes_out - before) / 1e6 / (2 * (sizes.chunks + 1)))
            backend._host_writes = beside
            report.row("written through", **row)


def main() -> int:
    parser, make = arguments("prompt_steps", 150, __doc__)
    args = parser.parse_args()
    sizes = SimpleNamespace(
        model="random:llama-3.1-8b", dtype=torch.bfloat16, pages=1600, host_memory="9GiB", page_size=64, batch=24,
        tokens_in=1024, tokens_out=400, chunks=5, chunk_tokens=(256, 1024, 2048), narrowed=(8, 16), copy_bytes=1 << 30,
    )  # fmt: skip
    if args.smoke:
        vars(sizes).update(
            model="random:tiny", dtype=torch.float32, pages=120, host_memory="4MiB", page_size=16, batch=3,
            tokens_in=48, tokens_out=200, chunks=2, chunk_tokens=(32, 64), narrowed=(1,), copy_bytes=1 << 20,
        )  # fmt: skip
    report = make(args)
    made: list[Engine] = []

    def start() -> None:
        config = EngineConfig(
            num_pages=sizes.pages, host_memory=sizes.host_memory, page_size=sizes.page_size, write_through=True,
            prefill_chunk=max(sizes.chunk_tokens), max_running=sizes.batch + 2, prefix_cache=False,
            max_context_len=max(sizes.chunk_tokens) * (sizes.chunks + 3),
        )  # fmt: skip
        made.append(Engine(config, load_model(sizes.model, device(), sizes.dtype)))
        report.row("start", attention=made[0].backend.name, copy_engine=made[0].streamer.engine is not None)

    if on_gpu():
        report.phase("link", lambda: report.ceiling("pinned_h2d_gbps", link_gbps(sizes.copy_bytes)) and None)
    if report.phase("start", start):
        phases: list[tuple[str, Callable[..., None], tuple[Any, ...]]] = [("written through", written, ())]
        phases += [(f"{n} narrowed", streamed, (n,)) for n in sizes.narrowed]
        for name, body, extra in phases:
            report.phase(name, body, report, made[0], sizes, *extra)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
