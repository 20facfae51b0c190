"""Attention of our Triton kernel and of FlashInfer, interleaved, beside the floor: the bytes of K and V over the copy
rate of the same run.

    python -m benchmarks.attention --out DIR

Llama-3.1-8B's heads (32 query, 8 KV, of 128, bf16). Decode is timed as an engine runs it: the layers of a step in one
CUDA graph, FlashInfer's launch that lists the pages in it, its plan on the host apart. Without FlashInfer, and on the
CPU (--smoke), its columns are left out.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from benchmarks.report import Report, arguments
from benchmarks.timing import copy_gbps, device, device_ms, host_us, on_gpu, pin_core, synchronize
from tidekv import DeviceKVPool, KVGeometry
from tidekv.attention.flashinfer_attention import FlashInferAttention, why_not
from tidekv.attention.page_tables import PackedBatch
from tidekv.kernels.attention import paged_attention

L2_BYTES = 256 << 20  # layers in turn until they are several times any L2, so that nothing is read from there


class Setup:
    """A pool of several layers, a batch over scattered pages of it, and the queries of its new tokens."""

    def __init__(self, sizes: SimpleNamespace, page_size: int, q_lens: list[int], kv_lens: list[int]) -> None:
        heads, dim = sizes.kv_heads, sizes.dim
        pages = [-(-n // page_size) for n in kv_lens]
        layer_bytes = 2 * sum(kv_lens) * heads * dim * 2
        layers = max(2, min(sizes.layers, -(-sizes.l2_bytes // layer_bytes)))
        self.geometry = KVGeometry(layers, sum(pages), page_size, heads, dim, torch.bfloat16)
        self.pool = DeviceKVPool(self.geometry, device())
        for flat in (self.pool.k_flat, self.pool.v_flat):
            flat.normal_()
        order = np.random.default_rng(1).permutation(sum(pages)) + 1
        table, begin = np.zeros((len(pages), max(pages)), dtype=np.int64), 0
        for b, count in enumerate(pages):
            table[b, :count], begin = order[begin : begin + count], begin + count
        self.table = torch.from_numpy(table).to(device())
        self.scale = dim**-0.5
        self.max_q = max(q_lens)
        self.query = torch.randn(sum(q_lens), sizes.q_heads, dim, device=device(), dtype=torch.bfloat16)
        self.batch = PackedBatch(
            np.array(q_lens),
            np.array(kv_lens),
            torch.tensor([0, *np.cumsum(q_lens).tolist()], device=device()),
            torch.tensor(kv_lens, device=device()),
            self.table,
            torch.zeros(sum(q_lens), dtype=torch.int64, device=device()),
            None,
            None,
        )
        self.layer_bytes = layer_bytes
        self.flops = sum(
            4 * q * (kv - (q - 1) / 2) * sizes.q_heads * dim for q, kv in zip(q_lens, kv_lens, strict=True)
        )
        self.why_not = why_not(self.geometry, self.pool.device)
        self.flashinfer = FlashInferAttention(self.geometry, self.pool.device) if self.why_not is None else None

    def layer(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.pool.get_key_buffer(layer), self.pool.get_value_buffer(layer)

    def triton(self, keys: torch.Tensor, values: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        return paged_attention(
            self.query,
            keys,
            values,
            table,
            self.batch.cu_q,
            self.batch.kv_lens_dev,
            self.geometry.page_size,
            self.scale,
            max_q=self.max_q,
        )[0]


def step_of_layers(setup: Setup, attend: Callable[..., torch.Tensor], tables: list[torch.Tensor] | None) -> Any:
    """All layers of a step. tables: flat pages a layer, over the flat tensors; None: the ordinary view of each
    layer."""

    def step() -> torch.Tensor:
        out = setup.query
        for layer in range(setup.geometry.layer_num):
            if tables is None:
                out = attend(*setup.layer(layer), setup.table)
            else:
                out = attend(setup.pool.k_flat, setup.pool.v_flat, tables[layer])
        return out

    return step


def as_graph(step: Callable[[], torch.Tensor]) -> Callable[[], object]:
    """The step captured once, after a run that compiles and plans; on the CPU the step itself."""
    if not on_gpu():
        step()
        return step
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = step()
    replay: Any = graph.replay

    def run() -> object:
        replay()
        return kept  # the graph writes it: it must live as long

    return run


def with_flashinfer(setup: Setup, flashinfer: FlashInferAttention, captured: Any, inner: Any) -> Any:
    """`inner` between begin and end, as the engine's forward is."""

    def step() -> torch.Tensor:
        flashinfer.begin(setup.batch, captured)
        try:
            result: torch.Tensor = inner()
        finally:
            flashinfer.end()
        return result

    return step


def decode(report: Report, sizes: SimpleNamespace, page_size: int, requests: int, context: int) -> None:
    """A captured step of either kernel; then over one layout and the other."""
    setup = Setup(sizes, page_size, [1] * requests, [context] * requests)
    layers, flashinfer = setup.geometry.layer_num, setup.flashinfer
    tables = [setup.table + layer * setup.geometry.page_stride for layer in range(layers)]
    apart = [tuple(x.clone() for x in setup.layer(layer)) for layer in range(layers)]

    def ordinary(attend: Callable[..., torch.Tensor]) -> Callable[[], torch.Tensor]:
        def step() -> torch.Tensor:
            return [attend(*buffers, setup.table) for buffers in apart][-1]

        return step

    steps: dict[str, Any] = {
        "triton": step_of_layers(setup, setup.triton, None),
        "triton ordinary": ordinary(setup.triton),
        "triton a table a layer": step_of_layers(setup, setup.triton, tables),
    }
    plans: dict[str, Any] = {}
    if flashinfer is not None:

        def attend(keys: torch.Tensor, values: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
            return flashinfer.run(setup.query, keys, values, table, setup.scale)

        inner = {
            "flashinfer": step_of_layers(setup, attend, None),
            "flashinfer ordinary": ordinary(attend),
            "flashinfer a table a layer": step_of_layers(setup, attend, tables),
        }
        for name, step in inner.items():
            plans[name] = flashinfer.captured_decode(requests, setup.table.shape[1])
            steps[name] = with_flashinfer(setup, flashinfer, plans[name], step)
    calls = {name: as_graph(step) for name, step in steps.items()}
    for plan in plans.values():
        plan.plan(setup.batch.kv_lens)
    synchronize()
    # One integer workspace holds one plan at a time: all three are the same plan, so each may run the last one's.
    times = {name: ms / layers * 1e3 for name, ms in device_ms(calls, sizes.repeats).items()}
    floor = setup.layer_bytes / report.data["ceilings"]["device_copy_gbps"] / 1e3
    row: dict[str, Any] = {"page_size": page_size, "requests": requests, "context": context, "layers": layers}
    row |= {"floor_us": round(floor, 2), "triton_us": round(times["triton"], 2)}
    row["triton / floor"] = round(times["triton"] / floor, 2)
    row["triton ours / ordinary"] = round(times["triton"] / times["triton ordinary"], 3)
    row["triton a table a layer / ordinary"] = round(times["triton a table a layer"] / times["triton ordinary"], 3)
    if flashinfer is not None:
        mine = times["flashinfer"]
        row |= {"flashinfer_us": round(mine, 2), "flashinfer / floor": round(mine / floor, 2)}
        row["flashinfer / triton"] = round(mine / times["triton"], 3)
        row["flashinfer ours / ordinary"] = round(mine / times["flashinfer ordinary"], 3)
        other = times["flashinfer a table a layer"] / times["flashinfer ordinary"]
        row["flashinfer a table a layer / ordinary"] = round(other, 3)
        row["plan_host_us"] = round(plan_us(plans["flashinfer"], setup, sizes), 1)
    else:
        row["note"] = f"no FlashInfer: {setup.why_not}"
    report.row("decode, microseconds a layer", **row)


def plan_us(plan: Any, setup: Setup, sizes: SimpleNamespace) -> float:
    """Host time of the plan of a captured step, the device idle."""

    def nothing() -> None:
        return None

    return host_us({"plan": lambda: plan.plan(setup.batch.kv_lens)}, {"plan": nothing}, sizes.repeats * 4, 3)["plan"]


def extend(report: Report, sizes: SimpleNamespace, page_size: int, q_lens: list[int], kv_lens: list[int]) -> None:
    """Launched layer by layer, as the engine runs prefill chunks; FlashInfer planned once before."""
    setup = Setup(sizes, page_size, q_lens, kv_lens)
    layers, flashinfer, turn = setup.geometry.layer_num, setup.flashinfer, {"triton": 0, "flashinfer": 0}

    def next_layer(name: str) -> tuple[torch.Tensor, torch.Tensor]:
        turn[name] += 1
        return setup.layer(turn[name] % layers)

    calls: dict[str, Any] = {"triton": lambda: setup.triton(*next_layer("triton"), setup.table)}
    row: dict[str, Any] = {"page_size": page_size, "new_tokens": str(q_lens), "context": str(kv_lens)}
    if flashinfer is not None:
        flashinfer.begin(setup.batch)
        calls["flashinfer"] = lambda: flashinfer.run(setup.query, *next_layer("flashinfer"), setup.table, setup.scale)
        got, want = calls["flashinfer"](), calls["triton"]()
        row["largest difference"] = round(float((got.float() - want.float()).abs().max()), 4)
    times = device_ms(calls, sizes.repeats)
    row["floor_us"] = round(setup.layer_bytes / report.data["ceilings"]["device_copy_gbps"] / 1e3, 1)
    for name, ms in times.items():
        row[f"{name}_us"] = round(ms * 1e3, 1)
        row[f"{name}_tflops"] = round(setup.flops / ms / 1e9)
    if flashinfer is not None:
        row["flashinfer / triton"] = round(times["flashinfer"] / times["triton"], 3)
        flashinfer.end()

        def plan() -> None:
            flashinfer.begin(setup.batch)
            flashinfer.run(setup.query, *setup.layer(0), setup.table, setup.scale)

        def run() -> None:
            flashinfer.run(setup.query, *setup.layer(0), setup.table, setup.scale)

        def nothing() -> None:
            return None

        host = host_us({"plan": plan, "run": run}, {"plan": nothing, "run": nothing}, sizes.repeats, 2)
        row |= {"plan_host_us": round(host["plan"] - host["run"], 1), "run_host_us": round(host["run"], 1)}
        flashinfer.end()
    report.row("extend, microseconds a layer", **row)


def copy_rate(report: Report, sizes: SimpleNamespace) -> None:
    report.ceiling("device_copy_gbps", copy_gbps(sizes.copy_bytes))


def main() -> int:
    parser, make = arguments("attention", 150, __doc__)
    args = parser.parse_args()
    sizes = SimpleNamespace(
        q_heads=32,
        kv_heads=8,
        dim=128,
        layers=32,
        l2_bytes=L2_BYTES,
        repeats=15,
        copy_bytes=2 << 30,
        page_sizes=(64, 16),
        decodes=[(n, context) for context in (1024, 8192) for n in (1, 32, 128)],
        extends=[([8192], [8192]), ([512] * 4, [4096] * 4), ([1] * 31 + [2048], [2048] * 32)],
    )
    if args.smoke:
        vars(sizes).update(
            q_heads=4,
            kv_heads=2,
            dim=16,
            layers=2,
            l2_bytes=1 << 10,
            repeats=2,
            copy_bytes=1 << 16,
            page_sizes=(16,),
            decodes=[(2, 40)],
            extends=[([5], [20])],
        )
    report = make(args)
    pin_core()
    report.phase("device copy", copy_rate, report, sizes)
    for page_size in sizes.page_sizes:
        for requests, context in sizes.decodes:
            name = f"decode of {requests} x {context}, page {page_size}"
            report.phase(name, decode, report, sizes, page_size, requests, context)
        for q_lens, kv_lens in sizes.extends:
            name = f"extend by {sum(q_lens)}, page {page_size}"
            report.phase(name, extend, report, sizes, page_size, q_lens, kv_lens)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
