"""Each kernel against its torch twin, both on the GPU, on data large enough for many programs. Catches: what Triton's
interpreter hides (races, wrong masks at a program's edge, bf16 and fp8 arithmetic), and a twin that drifted from its
kernel."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tidekv.kernels import HAS_TRITON, assign, attention, fused, move, remap, tables

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn]


@pytest.fixture
def kernel(on_gpu: bool) -> Any:
    """The backend under test; the twin stands in for it where there is no GPU."""
    if on_gpu and not HAS_TRITON:
        pytest.skip("Triton is not installed")
    return "triton" if on_gpu else "torch"


def noise(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> torch.Tensor:
    """Any bit pattern."""
    raw = torch.randint(0, 256, (*shape[:-1], shape[-1] * dtype.itemsize), dtype=torch.uint8, device=device)
    return raw.view(dtype)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("page_size", "heads", "dim"), [(64, 8, 128), (16, 3, 40), (1, 1, 8)])
def test_compact_cells(
    kernel: Any, device: str, on_gpu: bool, dtype: torch.dtype, page_size: int, heads: int, dim: int
) -> None:
    layers, pages = 13, 60 if on_gpu else 12
    stride = pages + 1
    pair = [noise((layers * stride * page_size, heads, dim), dtype, device) for _ in range(2)]
    twin = [flat.clone() for flat in pair]
    slots = torch.randperm(pages, device=device)[: pages // 2] + 1
    factor = torch.randint(0, 3, slots.shape, device=device).exp2().to(torch.int32)  # 1, 2 or 4
    for flats, backend in ((pair, kernel), (twin, "torch")):
        move.compact_cells(*flats, slots, factor, 4, stride, page_size, backend=backend)
    assert all(same(a, b) for a, b in zip(pair, twin, strict=True))
    assert not same(pair[0], pair[1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("max_programs", [None, 1, 8])
@pytest.mark.parametrize("host_side", ["none", "source", "destination"])
def test_copy_cells(
    kernel: Any, device: str, on_gpu: bool, dtype: torch.dtype, max_programs: int | None, host_side: str
) -> None:
    page_size, heads, dim, pages = 16, 3, 48, 300 if on_gpu else 20

    def pair(side: str) -> list[torch.Tensor]:
        flats = [noise((pages * page_size, heads, dim), dtype, device) for _ in range(2)]
        return [flat.cpu().pin_memory() for flat in flats] if on_gpu and host_side == side else flats

    src, dst = pair("source"), pair("destination")
    twin = [flat.clone().pin_memory() if on_gpu and not flat.is_cuda else flat.clone() for flat in dst]
    to, at = (torch.randperm(pages, device=device)[: pages // 2] for _ in range(2))
    for flats, backend in ((dst, kernel), (twin, "torch")):
        move.copy_cells(*flats, *src, to, at, page_size, max_programs=max_programs, backend=backend)
    if on_gpu:
        torch.cuda.synchronize()
    assert all(same(a, b) for a, b in zip(dst, twin, strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("to_host", [False, True])
@pytest.mark.parametrize("layout", ["plain", "transposed", "slice"])
def test_copy_rows(kernel: Any, device: str, on_gpu: bool, dtype: torch.dtype, to_host: bool, layout: str) -> None:
    tokens, heads, dim, rows = 777, 4, 48, 4000
    if layout == "transposed":
        src = [noise((heads, tokens, dim), dtype, device).transpose(0, 1) for _ in range(2)]
    elif layout == "slice":
        fused = noise((tokens, 2 * heads, dim), dtype, device)
        src = [fused[:, :heads], fused[:, heads:]]
    else:
        src = [noise((tokens, heads, dim), dtype, device) for _ in range(2)]
    flats = [noise((rows, heads, dim), dtype, device) for _ in range(2)]
    dst = [flat.cpu().pin_memory() for flat in flats] if to_host and on_gpu else flats
    twin = [flat.clone().pin_memory() if to_host and on_gpu else flat.clone() for flat in dst]
    where = torch.randperm(rows, device=device)[:tokens]
    where[::7] = -1
    for pair, backend in ((dst, kernel), (twin, "torch")):
        move.copy_rows(*pair, *src, where, backend=backend)
    if on_gpu:
        torch.cuda.synchronize()
    assert all(same(a, b) for a, b in zip(dst, twin, strict=True))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_remap(kernel: Any, device: str, dtype: torch.dtype) -> None:
    page_size, combined = 16, 5000
    lookup = torch.cat([torch.zeros(1, dtype=torch.int64), torch.randperm(combined - 1) + 1]).to(device)
    table = torch.randint(-1, combined * page_size, (37, 3001), device=device).to(dtype)
    rows = torch.randperm(37, device=device)[:20]
    found = [table.clone(), table.clone()]
    for locs, backend in zip(found, (kernel, "torch"), strict=True):
        remap.remap_rows_(locs, rows, 2900, lookup, page_size, backend=backend)
        remap.remap_locs_(locs[0], lookup, page_size, backend=backend)
    assert torch.equal(*found)
    assert not torch.equal(found[0], table)


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("batch", [1, 37, 1025, 2100])
def test_alloc_decode_and_extend(kernel: Any, device: str, page_size: int, batch: int) -> None:
    seq = torch.randint(1, 400, (batch,))
    prefix = (seq - torch.randint(0, 200, (batch,))).clamp_min(0)
    for kind in ("decode", "extend"):
        start = seq - 1 if kind == "decode" else prefix
        last = (torch.randperm(batch) + 1) * page_size + (start - 1) % page_size
        new = int((-(-seq // page_size) - -(-start // page_size)).sum())
        slots = torch.randperm(new + 10, device=device)[:new] + 10 * batch
        got = []
        for backend in (kernel, "torch"):
            lens = (seq.to(device), last.to(device), slots)
            if kind == "decode":
                got.append(assign.alloc_decode(*lens, page_size, backend=backend))
            else:
                total = int((seq - prefix).sum())
                got.append(assign.alloc_extend(prefix.to(device), *lens, total, page_size, backend=backend))
        assert torch.equal(*got)


def test_layer_tables_and_token_rows(kernel: Any, device: str) -> None:
    layers, levels, stride, batch, columns = 12, 3, 1001, 33, 57
    resident = torch.full((levels, layers), -1, dtype=torch.int32)
    for level in range(levels):
        kept = torch.arange(0, layers, 2**level)[: layers >> level]
        resident[level, kept] = torch.arange(len(kept), dtype=torch.int32)
    maps = (resident.to(device), torch.randint(0, 2, (layers,), dtype=torch.int32, device=device))
    combined = torch.randint(0, 1000, (batch, columns), device=device)
    level = torch.randint(0, levels, (batch, columns), dtype=torch.int8, device=device)
    dynamic = torch.randint(0, 1000, (batch, columns), device=device) * (level > 0)
    wanted = torch.arange(layers, device=device)
    got = [
        tables.layer_tables(combined, dynamic, level, *maps, wanted, stride, backend=backend)
        for backend in (kernel, "torch")
    ]
    assert torch.equal(*got)
    locs, staged, lv = combined.reshape(-1) * 16 + 3, dynamic.reshape(-1) * 16 + 3, level.reshape(-1)
    for layer in range(layers):
        rows = [tables.token_rows(locs, staged, lv, layer, *maps, stride * 16, backend=b) for b in (kernel, "torch")]
        assert torch.equal(*rows)


SHAPES = {
    "decode": ([1] * 9, [1, 5, 64, 65, 300, 1000, 2000, 129, 4000]),
    "prefill": ([300, 1, 64], [300, 1, 64]),
    "extend": ([17, 0, 128, 1], [1000, 40, 640, 900]),
}


# Few combinations: each is a kernel of its own to compile, 2 s on the machine with the GPU.
CASES = {
    "bf16": (
        torch.bfloat16,
        torch.bfloat16,
        3e-2,
        64,
        32,
        8,
        128,
        ({}, {"num_splits": 5}, {"window": 70}, {"valid": 0.3}, {"valid": 0.95, "few_valid": True}),
    ),
    "fp32": (torch.float32, torch.float32, 1e-4, 16, 9, 3, 64, ({}, {"num_splits": 5}, {"valid": 0.3})),
    "fp16": (torch.float16, torch.float16, 4e-3, 1, 4, 4, 32, ({},)),
    "fp8 cache": (torch.bfloat16, torch.float8_e4m3fn, 3e-2, 64, 32, 8, 128, ({},)),
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("case", CASES)
def test_paged_attention(kernel: Any, device: str, on_gpu: bool, shape: str, case: str) -> None:
    dtype, cache, tolerance, page_size, hq, hkv, dim, variants = CASES[case]
    q_lens, kv_lens = SHAPES[shape]
    if not on_gpu:
        kv_lens = [max(q, kv // 8) for q, kv in zip(q_lens, kv_lens, strict=True)]
    columns = max(-(-kv // page_size) for kv in kv_lens)
    needed = sum(-(-kv // page_size) for kv in kv_lens)
    free = (torch.randperm(needed) + 1).tolist()
    table = torch.zeros(len(kv_lens), columns, dtype=torch.int64)
    for b, kv in enumerate(kv_lens):
        for n in range(-(-kv // page_size)):
            table[b, n] = free.pop()
    flats = [torch.randn((needed + 1) * page_size, hkv, dim, device=device).to(cache) for _ in range(2)]
    query = torch.randn(sum(q_lens), hq, dim, device=device).to(dtype)
    cu_q = torch.tensor([0, *torch.tensor(q_lens).cumsum(0).tolist()], device=device)
    table, lens = table.to(device), torch.tensor(kv_lens, device=device)
    for options in variants:
        options = dict(options)
        if "valid" in options:
            options["valid_pages"] = torch.rand(table.shape, device=device) > options.pop("valid")
        got = [
            attention.paged_attention(
                query, *flats, table, cu_q, lens, page_size, dim**-0.5, max_q=max(q_lens), backend=backend, **options
            )
            for backend in (kernel, "torch")
        ]
        for mine, twin in zip(*got, strict=True):
            assert not mine.isnan().any()
            torch.testing.assert_close(mine.float(), twin.float(), rtol=tolerance, atol=tolerance)


def test_the_same_shape_gives_the_same_bits(device: str) -> None:
    """Narrow and ample memory run the same kernel on other pages: their results may not differ in a single bit."""
    page_size, batch, columns, hkv, dim, pages = 16, 5, 40, 2, 64, 1000
    flats = [torch.randn(pages * page_size, hkv, dim, device=device) for _ in range(2)]
    table = torch.randperm(pages // 2, device=device)[: batch * columns].view(batch, columns)
    moved = table + pages // 2
    for flat in flats:
        view = flat.view(pages, -1)
        view[moved.reshape(-1)] = view[table.reshape(-1)]
    query = torch.randn(batch, 8, dim, device=device)
    cu_q, lens = torch.arange(batch + 1, device=device), torch.full((batch,), columns * page_size - 3, device=device)
    first, second = (
        attention.paged_attention(query, *flats, t, cu_q, lens, page_size, 0.1, max_q=1)[0] for t in (table, moved)
    )
    assert torch.equal(first, second)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_merge_states(kernel: Any, device: str, dtype: torch.dtype) -> None:
    outs = [torch.randn(501, 8, 128, device=device).to(dtype) for _ in range(2)]
    logs = [torch.randn(501, 8, device=device) * 5 for _ in range(2)]
    logs[0][::5], logs[1][::10] = -torch.inf, -torch.inf
    got = [attention.merge_states(outs[0], logs[0], outs[1], logs[1], backend=b) for b in (kernel, "torch")]
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    for mine, twin in zip(*got, strict=True):
        torch.testing.assert_close(mine, twin, rtol=tolerance, atol=tolerance)


def test_no_size_has_an_attention_kernel_of_its_own(on_gpu: bool, device: str) -> None:
    """Each would be compiled while serving, 1.5 s a time: numbers of tokens, of columns and of splits, and where the
    lists of a batch begin in memory."""
    if not (on_gpu and HAS_TRITON):
        pytest.skip("counts compiled kernels: needs Triton and a CUDA device")
    page_size, hkv, dim = 16, 2, 64
    flats = [torch.randn(600 * page_size, hkv, dim, device=device, dtype=torch.float16) for _ in range(2)]
    before = len(attention._attend._compiled)
    for max_q, columns, splits in ((40, 9, 1), (41, 16, 1), (33, 32, 16), (48, 1, 5), (64, 33, 2)):
        query = torch.randn(max_q + 3, 4, dim, device=device, dtype=torch.float16)
        cu_q = torch.tensor([7, 0, 3, max_q + 3], device=device)[1:]  # starts between multiples of 16 bytes
        table = torch.randint(1, 600, (2, columns), device=device)
        lens = torch.tensor([3, max_q], device=device)
        got = [
            attention.paged_attention(
                query, *flats, table.repeat(1, 5), cu_q, lens, page_size, 0.1, max_q=max_q, num_splits=splits, backend=b
            )
            for b in ("triton", "torch")
        ]
        torch.testing.assert_close(got[0][0], got[1][0], rtol=4e-3, atol=4e-3)
    assert len(attention._attend._compiled) - before <= 2  # one split writes its result as it is, several in fp32


@pytest.mark.parametrize("tokens", [1, 16, 33])
def test_fused_steps(on_gpu: bool, device: str, tokens: int) -> None:
    """Twice each: the second launch skips Triton's own."""
    if not (on_gpu and HAS_TRITON):
        pytest.skip("needs Triton and a CUDA device; tests/kernels/test_fused.py has the interpreter")
    for _ in range(2):
        x, residual, weight = (torch.randn(n, 256, device=device).bfloat16() for n in (tokens, tokens, 1))
        for residuals in ((None, None), (residual.clone(), residual.clone())):
            got = fused.add_rms_norm(x, residuals[0], weight[0], 1e-5, use_triton=True)
            torch.testing.assert_close(got, fused.add_rms_norm_ref(x, residuals[1], weight[0], 1e-5))
            torch.testing.assert_close(residuals[0], residuals[1])
        both = torch.randn(tokens, 3000, device=device).bfloat16()
        torch.testing.assert_close(fused.silu_mul(both, use_triton=True), fused.silu_mul_ref(both))
        qkv = torch.randn(tokens, 12, 64, device=device).bfloat16()
        twin, cos, sin = qkv.clone(), *(torch.randn(tokens, 64, device=device).bfloat16() for _ in range(2))
        fused.rope_(qkv[:, :8], qkv[:, 8:10], cos, sin, use_triton=True)
        fused.rope_ref_(twin[:, :8], twin[:, 8:10], cos, sin)
        torch.testing.assert_close(qkv, twin, rtol=1e-2, atol=1e-2)
