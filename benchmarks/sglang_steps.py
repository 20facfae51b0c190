"""Milliseconds a decode step of one SGLang model runner, by where its pages lie and which of them are narrow.

    python3 -m benchmarks.sglang_steps --out FOLDER            about 2 minutes on an H200
    python3 -m benchmarks.sglang_steps --smoke --out FOLDER    the same code on a CPU: measures nothing

--attention-backend chooses SGLang's kernels: triton, flashinfer or fa3.

No server and no scheduler: a batch of requests decodes, and between two series its pages are narrowed or moved by hand.
It needs SGLang on the path, TIDEKV_SGLANG=1, and a folder with a config.json (random weights): --config, or
$SGLANG_LLAMA8B.

    full     every page full width under its own id: SGLang's graphs
    moved    full width, pages of one request elsewhere: the same graphs over translated locations
    window   two thirds of the requests read a window, their old pages keep a quarter of the layers: our graphs
    exact    two requests narrow, their missing layers are streamed at every step: our graphs
    ... launched    the same two, layer by layer
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.sglang_runner import BACKENDS, make_request, make_runner

PAGE_SIZE, PROMPT, REQUESTS, STEPS, WARM = 64, 960, 64, 24, 6


class Clock:
    """Host time of a few functions, by wrapping them."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def wrap(self, owner: Any, name: str, label: str) -> None:
        original = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            begin = time.perf_counter()
            try:
                return original(*args, **kwargs)
            finally:
                self.seconds[label] = self.seconds.get(label, 0.0) + time.perf_counter() - begin

        setattr(owner, name, timed)


def runner_of(config: str, backend: str, smoke: bool) -> Any:
    """A model runner over random weights of this shape."""
    options: dict[str, Any] = {"device": "cuda", "attention_backend": backend, "dtype": "bfloat16"}
    if smoke:
        options = {"device": "cpu", "attention_backend": "torch_native", "dtype": "float32"}
    else:
        options |= {"cuda_graph_bs_decode": [1, 8, 64], "disable_prefill_cuda_graph": True}
    return make_runner(
        config, load_format="dummy", page_size=PAGE_SIZE, max_total_tokens=REQUESTS * (PROMPT + 5 * PAGE_SIZE),
        max_running_requests=REQUESTS, context_length=512 if smoke else 4096, sampling_backend="pytorch",
        mem_fraction_static=0.85, random_seed=1, **options,
    )  # fmt: skip


class Batch:
    """Requests of PROMPT tokens, prefilled; `series` decodes."""

    def __init__(self, runner: Any, vocab: int) -> None:
        from sglang.benchmark import one_batch

        self.runner, self.tide, self.one_batch = runner, runner.token_to_kv_pool_allocator, one_batch
        runner.req_to_token_pool.clear()
        self.tide.clear()
        rng = np.random.default_rng(1)
        self.reqs: list[Any] = []
        self.batch: Any = None
        for begin in range(0, REQUESTS, 8):
            new = [
                make_request(index, rng.integers(0, vocab, PROMPT).tolist(), 1000, 5 if index % 3 == 0 else 0)
                for index in range(begin, min(REQUESTS, begin + 8))
            ]
            tokens, _, batch = one_batch.extend(new, runner)
            self.tide.end_step()
            batch.output_ids = tokens
            self.reqs += new
            if self.batch is None:
                self.batch, self.tokens = batch, tokens
            else:
                self.batch.merge_batch(batch)
                self.tokens = torch.cat([self.tokens, tokens])
        self.length = PROMPT

    def slots(self, index: int, begin: int, end: int) -> np.ndarray:
        ids = self.tide.mirror.ids_of([self.reqs[index]], np.array([end]))[0, begin:]
        return np.asarray(self.tide.pages.slots_of(ids))

    def series(self, name: str, clock: Clock) -> dict[str, Any]:
        """STEPS decode steps, each waited for."""
        times = []
        for step in range(WARM + STEPS):
            if step == WARM:
                clock.seconds.clear()
            begin = time.perf_counter()
            self.tokens, logits = self.one_batch.decode(self.tokens, self.batch, self.runner)
            if logits.is_cuda:
                torch.cuda.synchronize()
            times.append((time.perf_counter() - begin) * 1e3)
            self.tide.end_step()
            self.length += 1
        graphs = self.runner.attn_backend.narrow_graphs
        return {
            "state": name,
            "ms_a_step": round(statistics.median(times[WARM:]), 3),
            "slowest_ms": round(max(times[WARM:]), 2),
            "first_steps_ms": [round(t, 1) for t in times[:WARM]],
            "host_ms": {label: round(s / STEPS * 1e3, 3) for label, s in clock.seconds.items()},
            "narrow_replays": graphs.steps.narrow_replays if graphs else 0,
            "narrow_slots": int(sum(self.tide.core.ledger.num_narrow)),
            "displaced": int(self.tide.pages.displaced),
            "finite": bool(torch.isfinite(logits).all()),
        }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--config", default=os.environ.get("SGLANG_LLAMA8B"), required="SGLANG_LLAMA8B" not in os.environ
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--attention-backend", choices=BACKENDS, default=BACKENDS[0])
    parser.add_argument("--smoke", action="store_true")
    args = parser.parse_args()
    if args.smoke:
        globals().update(PAGE_SIZE=16, PROMPT=96, REQUESTS=6, STEPS=3, WARM=3)
    runner = runner_of(args.config, args.attention_backend, args.smoke)
    from tidekv.attention.captured_steps import CapturedStep
    from tidekv.sglang_plugin import attention as attention_module
    from tidekv.sglang_plugin.graphs import NarrowGraphs
    from tidekv.sglang_plugin.window import Window

    clock = Clock()
    clock.wrap(attention_module, "plan_batch", "plan")
    clock.wrap(attention_module, "upload", "upload of moved locations")
    clock.wrap(CapturedStep, "fill", "fill")
    clock.wrap(CapturedStep, "replay", "replay")
    attention = runner.attn_backend
    if args.smoke:
        attention.narrow_graphs = NarrowGraphs(runner, attention, capture=False)
    batch = Batch(runner, int(json.loads((Path(args.config) / "config.json").read_text())["vocab_size"]))
    core, pages = batch.tide.core, PROMPT // PAGE_SIZE
    ladder = core.ledger.ladder
    kernels = {"sglang": type(attention).__name__, "core": attention.tide_core.name}
    results = [batch.series("full", clock)]
    core.narrow_slots(batch.slots(0, 0, pages), ladder[1])
    core.widen_slots(batch.slots(0, 0, pages))
    results.append(batch.series("moved", clock))
    window = Window(PROMPT // 2, PAGE_SIZE)
    batch.tide.window = window
    end = int(window.old_pages(np.array([batch.length]))[0])
    old = np.concatenate([batch.slots(i, 1, end) for i in range(REQUESTS) if i % 3])
    core.narrow_slots(old, ladder[2])
    results.append(batch.series("window", clock))
    attention.captures_narrow = False
    results.append(batch.series("window, launched", clock))
    attention.captures_narrow, batch.tide.window = True, None
    while sum(core.ledger.num_narrow):
        core.restore_widths(start_free=0.0, stop_free=0.0)
    core.narrow_slots(np.concatenate([batch.slots(i, 0, pages) for i in (1, 2)]), ladder[1])
    results.append(batch.series("exact", clock))
    attention.captures_narrow = False
    results.append(batch.series("exact, launched", clock))
    batch.tide.check()
    args.out.mkdir(parents=True, exist_ok=True)
    with (args.out / f"sglang_steps_{args.attention_backend}.json").open("w") as out:
        json.dump(kernels | {"series": results}, out, indent=1)
    print(json.dumps(kernels))
    for result in results:
        print(json.dumps(result), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
