"""KV that moves arrives bit for bit and nothing else changes. Would catch: a cell overwritten before it is read, a
tail not copied, a wrong word size."""

import pytest
import torch

from tidekv.errors import ConfigError
from tidekv.kernels.move import compact_cells, copy_cells, copy_rows, link_programs

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float8_e4m3fn]
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


def random_bits(shape, dtype, seed, device):
    """Any bit pattern, NaN payloads included."""
    raw = torch.randint(
        0, 256, (*shape[:-1], shape[-1] * dtype.itemsize), generator=torch.Generator().manual_seed(seed)
    )
    return raw.to(torch.uint8).view(dtype).to(device)


def bits(t):
    return t.view(BITS[t.element_size()]).cpu().clone()


def int64(values, device):
    return torch.tensor(values, dtype=torch.int64, device=device)


def test_compact_by_hand(backend, device):
    # L = 8, P = 10, page 3 at full width: cells 1..3 get what cells 2, 4, 6 held; every other flat page keeps its
    # number.
    k = torch.arange(88, dtype=torch.float32, device=device).repeat_interleave(2).view(-1, 1, 1)
    v = k + 1000
    factor = torch.tensor([2], dtype=torch.int32, device=device)
    compact_cells(k, v, int64([3], device), factor, 4, 11, 2, backend=backend)
    expected = list(range(88))
    expected[14], expected[25], expected[36] = 25, 47, 69
    assert k.view(-1, 2)[:, 0].tolist() == expected
    assert v.view(-1, 2)[:, 1].tolist() == [1000 + x for x in expected]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("page_size", "heads", "dim"), [(16, 2, 160), (4, 2, 16), (3, 1, 7)])
def test_compact_matches_a_loop(backend, device, dtype, page_size, heads, dim):
    if (page_size * dim * dtype.itemsize) % 2:
        dim += 1
    num_cells, stride, new_width = 13, 6, 4
    shape = (num_cells * stride * page_size, heads, dim)
    k, v = random_bits(shape, dtype, 1, device), random_bits(shape, dtype, 2, device)
    slots = [(1, 2), (4, 4), (2, 1), (5, 2), (3, 4)]  # (combined, factor)
    expected = []
    for flat in (k, v):
        pages = bits(flat).view(num_cells * stride, -1)
        original = pages.clone()
        for combined, factor in slots:
            for j in range(new_width):
                pages[combined + j * stride] = original[combined + j * factor * stride]
        expected.append(pages)
    compact_cells(
        k, v, int64([c for c, _ in slots], device), torch.tensor([f for _, f in slots], dtype=torch.int32,
        device=device), new_width, stride, page_size, backend=backend,
    )  # fmt: skip
    assert torch.equal(bits(k).view_as(expected[0]), expected[0])
    assert torch.equal(bits(v).view_as(expected[1]), expected[1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("max_programs", [None, 1, 3])
@pytest.mark.parametrize(("page_size", "heads", "dim"), [(16, 2, 160), (3, 1, 6)])
def test_copy_cells_matches_a_loop(backend, device, dtype, max_programs, page_size, heads, dim):
    src_shape, dst_shape = (9 * page_size, heads, dim), (14 * page_size, heads, dim)
    src = [random_bits(src_shape, dtype, s, device) for s in (1, 2)]
    dst = [random_bits(dst_shape, dtype, s, device) for s in (3, 4)]
    to, frm = [13, 0, 5, 6, 2], [8, 1, 1, 0, 3]  # a source page may be copied to two places
    expected = []
    for d, s in zip(dst, src, strict=True):
        pages, source = bits(d).view(14, -1), bits(s).view(9, -1)
        for a, b in zip(to, frm, strict=True):
            pages[a] = source[b]
        expected.append(pages)
    copy_cells(*dst, *src, int64(to, device), int64(frm, device), page_size, max_programs=max_programs, backend=backend)
    for d, e in zip(dst, expected, strict=True):
        assert torch.equal(bits(d).view_as(e), e)


@pytest.mark.parametrize(("begin", "end"), [(0, 5), (1, 4), (2, 2), (4, 5)])
def test_copy_cells_between_bounds_on_the_device(backend, device, begin, end):
    """What a captured launch copies is in the lists when it runs; entries outside the bounds are not touched."""
    page_size, heads, dim = 4, 2, 16
    src = [random_bits((9 * page_size, heads, dim), torch.float32, s, device) for s in (1, 2)]
    dst = [random_bits((14 * page_size, heads, dim), torch.float32, s, device) for s in (3, 4)]
    to, frm = [13, 0, 5, 6, 2], [8, 1, 1, 0, 3]
    expected = [d.clone() for d in dst]
    copy_cells(*expected, *src, int64(to[begin:end], device), int64(frm[begin:end], device), page_size, backend="torch")
    bounds = int64([begin, end], device)
    copy_cells(
        *dst, *src, int64(to, device), int64(frm, device), page_size, bounds=bounds, max_programs=3, backend=backend
    )
    for d, e in zip(dst, expected, strict=True):
        assert torch.equal(bits(d), bits(e))
    with pytest.raises(ConfigError, match="give max_programs"):
        copy_cells(*dst, *src, int64(to, device), int64(frm, device), page_size, bounds=bounds, backend=backend)


def test_copy_cells_within_one_buffer(backend, device):
    k = torch.arange(10.0, device=device).view(10, 1, 1)
    v = k + 100
    copy_cells(k, v, k, v, int64([1, 2], device), int64([8, 9], device), 1, backend=backend)
    assert k.flatten().tolist() == [0, 8, 9, 3, 4, 5, 6, 7, 8, 9]
    assert v.flatten().tolist() == [100, 108, 109, 103, 104, 105, 106, 107, 108, 109]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("heads", "dim", "layout"), [(2, 16, "plain"), (3, 6, "plain"), (2, 8, "transposed"), (4, 8, "slice")]
)
def test_copy_rows_matches_a_loop(backend, device, dtype, heads, dim, layout):
    tokens = 11
    if layout == "transposed":  # [heads, tokens, dim] memory, as a projection after HF's transpose
        src = [random_bits((heads, tokens, dim), dtype, s, device).transpose(0, 1) for s in (1, 2)]
    elif layout == "slice":  # K and V of one fused projection
        fused = random_bits((tokens, 2 * heads, dim), dtype, 1, device)
        src = [fused[:, :heads], fused[:, heads:]]
    else:
        src = [random_bits((tokens, heads, dim), dtype, s, device) for s in (1, 2)]
    dst = [random_bits((30, heads, dim), dtype, s, device) for s in (3, 4)]
    dst_rows = [29, 3, -1, 7, 0, 8, 9, -1, 10, 11, 12]
    for src_rows in (None, [10, 0, 4, 4, 3, 9, 8, 1, 2, 5, 6]):
        expected = [bits(d) for d in dst]
        for e, s in zip(expected, src, strict=True):
            for t, row in enumerate(dst_rows):
                if row >= 0:
                    e[row] = bits(s.contiguous())[t if src_rows is None else src_rows[t]]
        rows = None if src_rows is None else int64(src_rows, device)
        copy_rows(*dst, *src, int64(dst_rows, device), rows, backend=backend)
        for d, e in zip(dst, expected, strict=True):
            assert torch.equal(bits(d), e)


@pytest.mark.parametrize("max_programs", [1, 2, 100])
def test_copy_rows_by_few_programs(backend, device, max_programs):
    """11 rows of 256 words are three turns of four: the last is not full, and a program takes more than one."""
    src = [random_bits((11, 8, 128), torch.bfloat16, s, device) for s in (1, 2)]
    dst = [random_bits((30, 8, 128), torch.bfloat16, s, device) for s in (3, 4)]
    rows = int64([29, 3, -1, 7, 0, 8, 9, -1, 10, 11, 12], device)
    expected = [d.clone() for d in dst]
    copy_rows(*expected, *src, rows, backend="torch")
    copy_rows(*dst, *src, rows, max_programs=max_programs, backend=backend)
    for d, e in zip(dst, expected, strict=True):
        assert torch.equal(bits(d), bits(e))


def test_small_pages_take_more_programs_to_keep_the_link_busy():
    assert [link_programs(kib * 1024) for kib in (128, 32, 16, 8, 4, 1)] == [4, 4, 8, 16, 16, 16]


def test_nothing_to_move_changes_nothing(backend, device):
    k, v = torch.ones(6, 1, 4, device=device), torch.zeros(6, 1, 4, device=device)
    none = int64([], device)
    copy_cells(k, v, k, v, none, none, 2, backend=backend)
    copy_rows(k, v, k[:0], v[:0], none, backend=backend)
    compact_cells(k, v, none, none.int(), 2, 1, 2, backend=backend)
    assert k.eq(1).all()
    assert v.eq(0).all()


def test_refusals_name_the_value(device):
    k, v = torch.zeros(6, 1, 4, device=device), torch.zeros(6, 1, 4, device=device)
    one = int64([1], device)
    with pytest.raises(ConfigError, match="must hold whole pages of 4 rows, got 6 rows"):
        copy_cells(k, v, k, v, one, one, 4)
    with pytest.raises(ConfigError, match="k_flat must be contiguous"):
        compact_cells(k[:, :, :2], v, one, one.int(), 2, 1, 2)
    with pytest.raises(ConfigError, match=r"factor must be torch.int32, got torch.int64"):
        compact_cells(k, v, one, one, 2, 1, 2)
    with pytest.raises(ConfigError, match="dst and src must hold the same rows"):
        copy_cells(k, v, k.half(), v.half(), one, one, 2)
    with pytest.raises(ConfigError, match="dst_pages has 1 pages but src_pages has 2"):
        copy_cells(k, v, k, v, one, int64([1, 2], device), 2)
    with pytest.raises(ConfigError, match="max_programs must be at least 1, got 0"):
        copy_cells(k, v, k, v, one, one, 2, max_programs=0)
    with pytest.raises(ConfigError, match="without src_rows, dst_rows must have 6 entries, got 1"):
        copy_rows(k, v, k, v, one)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU and pinned memory")
@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_pinned_host_memory_on_either_side(backend):
    device_kv = [random_bits((40, 2, 16), torch.bfloat16, s, "cuda") for s in (1, 2)]
    host_kv = [random_bits((24, 2, 16), torch.bfloat16, s, "cpu").pin_memory() for s in (3, 4)]
    dst, src = int64([5, 0], "cuda"), int64([9, 2], "cuda")
    copy_cells(*host_kv, *device_kv, dst, src, 4, max_programs=2, backend=backend)
    torch.cuda.synchronize()
    for h, d in zip(host_kv, device_kv, strict=True):
        assert torch.equal(bits(h).view(6, -1)[[5, 0]], bits(d).view(10, -1)[[9, 2]])
    copy_cells(*device_kv, *host_kv, int64([1], "cuda"), int64([3], "cuda"), 4, backend=backend)
    copy_rows(*host_kv, *device_kv, torch.arange(40, device="cuda").sub(30), backend=backend)
    torch.cuda.synchronize()
    for h, d in zip(host_kv, device_kv, strict=True):
        assert torch.equal(bits(h)[:10], bits(d)[30:])
    with pytest.raises(ConfigError, match="pageable host memory"):
        copy_cells(*device_kv, *(h.clone() for h in host_kv), dst, src, 4)
