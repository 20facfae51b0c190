"""FlashInfer in the place of our kernel. Catches: a plan that looks at page ids, lists of one layer read by another, a
row past the end of a request that is read, an offset held in 32 bits, a replay that runs an older plan."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch

from gpu.engine_pair import Recorder, live_kv, load, make, run, start
from tidekv import ConfigError, DeviceKVPool, KVGeometry
from tidekv.attention.flashinfer_attention import FlashInferAttention, why_not
from tidekv.attention.page_tables import PackedBatch
from tidekv.kernels.attention import paged_attention_ref
from tidekv.memory.ledger import LOW

LAYERS, SCALE = 3, 0.3
BATCHES = {
    "decode of one": ([1], [77]),
    "decode": ([1] * 7, [1, 16, 17, 64, 65, 200, 1500]),
    "prefill": ([5, 64, 300], [5, 64, 300]),
    "extend": ([3, 20, 100], [40, 75, 1024]),
    "mixed": ([1, 1, 130, 7], [400, 64, 130, 71]),
}
# bf16 keeps 8 bits: the reference rounds once, at the end, FlashInfer also rounds the weights.
TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 4e-3}


def reader(geometry: KVGeometry) -> FlashInferAttention:
    """Skips with the reason where FlashInfer cannot read this pool; kernels are not compiled for a test."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    missing = why_not(geometry, device)
    if missing is not None:
        pytest.skip(f"FlashInfer: {missing}")
    return FlashInferAttention(geometry, device)


def pack(
    q_lens: list[int], kv_lens: list[int], geometry: KVGeometry, seed: int
) -> tuple[PackedBatch, list[torch.Tensor], torch.Tensor, torch.Tensor]:
    """(batch, a flat page table for each layer, K, V): other scattered pages in each layer. Whatever no request owns
    is NaN, so a leak shows."""
    rng, page_size = np.random.default_rng(seed), geometry.page_size
    pages = [-(-n // page_size) for n in kv_lens]
    num_pages = geometry.num_pages
    shape = (geometry.flat_rows, geometry.num_kv_heads, geometry.head_dim)
    g = torch.Generator("cuda").manual_seed(seed)
    k, v = (torch.full(shape, math.nan, dtype=geometry.dtype, device="cuda") for _ in range(2))
    tables = []
    for layer in range(geometry.layer_num):
        free = rng.permutation(num_pages)[: sum(pages)] + 1 + layer * geometry.page_stride
        table = np.zeros((len(pages), max(pages) + 2), dtype=np.int64)
        begin = 0
        for b, (count, kv_len) in enumerate(zip(pages, kv_lens, strict=True)):
            table[b, :count] = free[begin : begin + count]
            begin += count
            at = np.arange(kv_len)
            rows = torch.from_numpy(table[b, at // page_size] * page_size + at % page_size).cuda()
            for flat in (k, v):
                new = torch.randn(kv_len, *shape[1:], device="cuda", generator=g)
                flat[rows] = new.to(geometry.dtype)
        tables.append(torch.from_numpy(table).cuda())
    cu_q = torch.tensor([0, *itertools.accumulate(q_lens)], device="cuda")
    batch = PackedBatch(
        np.array(q_lens),
        np.array(kv_lens),
        cu_q,
        torch.tensor(kv_lens, device="cuda"),
        tables[0],
        torch.zeros(sum(q_lens), dtype=torch.int64, device="cuda"),
        None,
        None,
    )
    return batch, tables, k, v


def small(page_size: int, dtype: torch.dtype, pages: int = 240) -> KVGeometry:
    return KVGeometry(LAYERS, pages, page_size, 2, 128, dtype)


@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("page_size", "group"), [(16, 4), (64, 4), (16, 1), (64, 8), (1, 4)])
def test_one_plan_for_tables_that_differ_by_layer(name: str, dtype: torch.dtype, page_size: int, group: int) -> None:
    geometry = small(page_size, dtype, pages=240 if page_size > 1 else 3000)
    attention = reader(geometry)
    batch, tables, k, v = pack(*BATCHES[name], geometry, seed=3)
    attention.begin(batch)
    for table in [*tables, tables[0]]:
        q = torch.randn(int(batch.cu_q[-1]), 2 * group, 128, device="cuda").to(dtype)
        got = attention.run(q, k, v, table, SCALE)
        want = paged_attention_ref(q, k, v, table, batch.cu_q, batch.kv_lens_dev, page_size, SCALE)[0]
        torch.testing.assert_close(got, want, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    attention.end()


def test_a_later_step_and_other_lengths() -> None:
    """Wrappers and buffers are reused: a smaller batch after a larger one, decode after extend, and back."""
    geometry = small(16, torch.bfloat16)
    attention = reader(geometry)
    for i, name in enumerate(("decode", "extend", "decode of one", "prefill", "decode", "mixed")):
        batch, tables, k, v = pack(*BATCHES[name], geometry, seed=20 + i)
        q = torch.randn(int(batch.cu_q[-1]), 8, 128, device="cuda").to(torch.bfloat16)
        attention.begin(batch)
        got = attention.run(q, k, v, tables[1], SCALE)
        attention.end()
        want = paged_attention_ref(q, k, v, tables[1], batch.cu_q, batch.kv_lens_dev, 16, SCALE)[0]
        torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)


def test_query_of_any_strides() -> None:
    geometry = small(16, torch.bfloat16)
    attention = reader(geometry)
    for name in ("decode", "mixed"):
        batch, tables, k, v = pack(*BATCHES[name], geometry, seed=5)
        tokens = int(batch.cu_q[-1])
        q = torch.randn(8, tokens, 256, device="cuda").to(torch.bfloat16)[..., :128].transpose(0, 1)
        assert not q.is_contiguous()
        attention.begin(batch)
        got = attention.run(q, k, v, tables[0], SCALE)
        attention.end()
        want = paged_attention_ref(q, k, v, tables[0], batch.cu_q, batch.kv_lens_dev, 16, SCALE)[0]
        torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)


def test_steps_planned_while_the_device_is_busy() -> None:
    """Many plans queued behind a sleep: none may be overtaken by the next in the buffer that it is copied from."""
    geometry = small(16, torch.bfloat16)
    attention = reader(geometry)
    made = [pack([1] * n, list(range(100, 100 + 57 * n, 57)), geometry, seed=n) for n in (1, 3, 5)]
    q = torch.randn(5, 8, 128, device="cuda").to(torch.bfloat16)
    torch.cuda._sleep(200_000_000)  # 0.1 s
    got = []
    for batch, tables, k, v in made:
        attention.begin(batch)
        got.append(attention.run(q[: len(batch.kv_lens)], k, v, tables[0], SCALE))
        attention.end()
    for (batch, tables, k, v), mine in zip(made, got, strict=True):
        query = q[: len(batch.kv_lens)]
        want = paged_attention_ref(query, k, v, tables[0], batch.cu_q, batch.kv_lens_dev, 16, SCALE)[0]
        torch.testing.assert_close(mine, want, rtol=2e-2, atol=2e-2)


def test_rows_past_2_to_the_31() -> None:
    """One KV head of 128: 2**31 elements are 2**24 rows; 2**31 rows would be 550 GB. The last pages of a pool of 2**25
    rows are read, 2**32 elements in; `test_large_pool` covers rows with our own kernels."""
    geometry = KVGeometry(2, 2**18 + 5, 64, 1, 128, torch.bfloat16)
    attention = reader(geometry)
    pool = DeviceKVPool(geometry, "cuda")
    assert pool.k_flat.numel() > 2**32
    kv_lens = [150, 64]
    top = geometry.layer_num * geometry.page_stride
    table = torch.tensor([[top - 1, top - 7, top - 3], [top - 2, 0, 0]], device="cuda")
    for page in (1, 2, 3, 7):
        rows = slice((top - page) * 64, (top - page + 1) * 64)
        pool.k_flat[rows].normal_()
        pool.v_flat[rows].normal_()
    for q_lens in ([1, 1], [20, 64]):
        cu_q = torch.tensor([0, *itertools.accumulate(q_lens)], device="cuda")
        lens = torch.tensor(kv_lens, device="cuda")
        locs = torch.zeros(sum(q_lens), dtype=torch.int64, device="cuda")
        batch = PackedBatch(np.array(q_lens), np.array(kv_lens), cu_q, lens, table, locs, None, None)
        q = torch.randn(sum(q_lens), 4, 128, device="cuda").to(torch.bfloat16)
        attention.begin(batch)
        got = attention.run(q, pool.k_flat, pool.v_flat, table, SCALE)
        attention.end()
        want = paged_attention_ref(q, pool.k_flat, pool.v_flat, table, cu_q, lens, 64, SCALE)[0]
        torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)


def test_a_replay_runs_the_plan_of_its_own_lengths() -> None:
    """Captured with lengths of 1, replayed with others, longer and shorter, whose pages lie elsewhere: as planned
    afresh."""
    geometry, width = small(16, torch.bfloat16), 128
    attention = reader(geometry)
    size, captured = 8, attention.captured_decode(8, width)
    k, v = (torch.randn(geometry.flat_rows, 2, 128, device="cuda").to(torch.bfloat16) for _ in range(2))
    q = torch.randn(size, 8, 128, device="cuda").to(torch.bfloat16)

    def step(table: torch.Tensor, lens: np.ndarray) -> PackedBatch:
        ones, on_device = np.ones(size, dtype=np.int64), torch.from_numpy(lens).cuda()
        return PackedBatch(ones, lens, torch.arange(size + 1, device="cuda"), on_device, table, table[:, 0], None, None)

    static = step(torch.zeros(size, width, dtype=torch.int64, device="cuda"), np.ones(size, dtype=np.int64))

    def forward() -> list[torch.Tensor]:
        attention.begin(static, captured)
        results = [attention.run(q, k, v, static.slots, scale) for scale in (SCALE, 2 * SCALE)]
        attention.end()
        return results

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        forward()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = forward()
    rng = np.random.default_rng(1)
    for longest in (40, 1900, 17, 700):
        lens = rng.integers(1, longest, size)
        table = torch.from_numpy(rng.integers(1, geometry.num_pages + 1, (size, width))).cuda()
        static.slots.copy_(table)
        static.kv_lens_dev.copy_(torch.from_numpy(lens))
        captured.plan(lens)
        graph.replay()
        batch = step(table, lens)
        for out, scale in zip(outs, (SCALE, 2 * SCALE), strict=True):
            want = paged_attention_ref(q, k, v, table, batch.cu_q, batch.kv_lens_dev, 16, scale)[0]
            torch.testing.assert_close(out, want, rtol=2e-2, atol=2e-2)
        attention.begin(batch)
        eager = attention.run(q, k, v, table, SCALE)
        attention.end()
        torch.testing.assert_close(outs[0], eager, rtol=2e-2, atol=2e-2)


# ---- the engine ------------------------------------------------------------------------------------------------------


def attends_with(engine: Any) -> str:
    return str(engine.stats()["attention"])


def test_the_engine_narrows_and_widens_by_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Narrow batches read in one part have the plan and the kernels of ample memory: not one bit differs."""
    reader(KVGeometry(8, 600, 16, 8, 128, torch.bfloat16))
    loaded, recorder, results = load("cuda", "llama", torch.bfloat16), Recorder(monkeypatch), []
    for narrow in (False, True):
        engine = make(loaded, "cuda", torch.bfloat16)
        assert attends_with(engine) == "flashinfer"
        names = start(engine, [300, 33, 700], 30)
        run(engine, 5)
        if narrow:
            assert engine.allocator._halve_and_repack(LOW, 0), engine.allocator.refusals
        run(engine, 8)
        results.append((recorder.take(), live_kv(engine, names)))
        del engine
    for mine, want in zip(results[1][0] + results[1][1], results[0][0] + results[0][1], strict=True):
        assert torch.equal(mine, want)


def test_replayed_steps_match_launched_ones() -> None:
    """Each replayed step is computed once more launch by launch, over a batch that shrinks and grows."""
    reader(KVGeometry(8, 600, 16, 8, 128, torch.bfloat16))
    engine = make(load("cuda", "llama", torch.bfloat16), "cuda", torch.bfloat16, graphs=True)
    runner: Any = engine.runner
    replay, sizes = runner.graphs.run, []

    def both(batch: PackedBatch, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor | None:
        logits: torch.Tensor | None = replay(batch, input_ids, positions)
        if logits is not None:
            sizes.append(len(batch.q_lens))
            rows = torch.arange(len(batch.q_lens), device="cuda")
            want = runner._forward(batch, input_ids, positions, rows)
            torch.testing.assert_close(logits, want, rtol=0, atol=0.03 * float(want.abs().max()))
        return logits

    runner.graphs.run = both
    names = start(engine, [300, 33, 700, 20, 161], 40)
    run(engine, 8)
    engine.abort(names[1])
    engine.abort(names[3])
    run(engine, 4)
    start(engine, [90, 15], 30)
    run(engine, 8)
    assert {5, 3} <= set(sizes)
    assert len(sizes) >= 15


def test_asked_for_by_name_and_missing() -> None:
    """fp32 is what FlashInfer has not, here and on any machine."""
    from tidekv.attention.backend import choose

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with pytest.raises(ConfigError, match="flashinfer"):
        choose("flashinfer", small(16, torch.float32), device)
