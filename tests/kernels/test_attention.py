"""Attention over page tables. Would catch: a causal bound off by one, a stale or NaN row that leaks in, a split or a
head merged wrongly."""

import itertools
import math

import numpy as np
import pytest
import torch

from tidekv.attention.sdpa import paged_attention_sdpa
from tidekv.errors import ConfigError
from tidekv.kernels.attention import merge_states, paged_attention


def naive(q, k_flat, v_flat, table, cu_q, kv_lens, page_size, scale, window=None, valid=None):
    """One query, one head at a time, in float64, straight from the definition."""
    tokens, hq, _ = q.shape
    group = hq // k_flat.shape[1]
    out, lse = torch.zeros_like(q, dtype=torch.float64), torch.full((tokens, hq), -math.inf, dtype=torch.float64)
    for b, kv_len in enumerate(kv_lens):
        q_len = cu_q[b + 1] - cu_q[b]
        for i in range(q_len):
            pos = kv_len - q_len + i
            seen = [
                p
                for p in range(pos + 1)
                if (window is None or p > pos - window) and (valid is None or valid[b][p // page_size])
            ]
            rows = [int(table[b][p // page_size]) * page_size + p % page_size for p in seen]
            if not rows:
                continue
            t = cu_q[b] + i
            for h in range(hq):
                scores = k_flat[rows, h // group].double() @ q[t, h].double() * scale
                lse[t, h] = torch.logsumexp(scores, 0)
                out[t, h] = torch.softmax(scores, 0) @ v_flat[rows, h // group].double()
    return out, lse


def make_batch(q_lens, kv_lens, hq, hkv, dim, page_size, dtype, seed, num_pages=90):
    """Random KV in scattered pages; whatever no request owns is NaN, so a leak shows."""
    g = torch.Generator().manual_seed(seed)
    n = max(-(-kv // page_size) for kv in kv_lens) + 1
    table = torch.zeros(len(kv_lens), n, dtype=torch.int64)
    free = (torch.randperm(num_pages - 1, generator=g) + 1).tolist()
    k = torch.full((num_pages * page_size, hkv, dim), math.nan)
    v = k.clone()
    for b, kv in enumerate(kv_lens):
        for p in range(kv):
            if p % page_size == 0:
                table[b, p // page_size] = free.pop()
            row = int(table[b, p // page_size]) * page_size + p % page_size
            k[row], v[row] = torch.randn(hkv, dim, generator=g), torch.randn(hkv, dim, generator=g)
    q = torch.randn(sum(q_lens), hq, dim, generator=g).to(dtype)
    cu_q = [0]
    for x in q_lens:
        cu_q.append(cu_q[-1] + x)
    return q, k.to(dtype), v.to(dtype), table, cu_q, kv_lens


def run(batch, page_size, scale, device, backend, **kw):
    q, k, v, table, cu_q, kv_lens = batch
    max_q = max(b - a for a, b in itertools.pairwise(cu_q))
    cu = torch.tensor(cu_q, dtype=kw.pop("cu_dtype", torch.int32), device=device)
    tensors = [t.to(device) for t in (q, k, v, table)]
    out, lse = paged_attention(
        *tensors, cu, torch.tensor(kv_lens, device=device), page_size, scale, max_q=max_q, backend=backend, **kw
    )
    return out.cpu(), lse.cpu()


def close(got, expected, dtype, lse_tol=2e-5):
    tol = {torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}[dtype]
    torch.testing.assert_close(got[0].double(), expected[0], rtol=tol, atol=tol)
    torch.testing.assert_close(got[1].double(), expected[1], rtol=lse_tol, atol=lse_tol)


CASES = {
    "decode": ([1, 1, 1], [1, 33, 70], 4, 2),
    "prefill": ([5, 37], [5, 37], 2, 2),
    # the third request's queries sit on both sides of key 64, where a tile of keys ends
    "extend, one request idle": ([3, 0, 20, 1], [40, 9, 75, 64], 6, 2),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(
    ("dtype", "dim", "page_size"),
    [(torch.float32, 16, 4), (torch.float16, 16, 16), (torch.float16, 24, 3), (torch.bfloat16, 24, 3)],
)
def test_matches_one_query_at_a_time(backend, device, case, dtype, dim, page_size):
    if dtype == torch.bfloat16 and backend == "triton" and device == "cpu":
        pytest.skip("the interpreter keeps bf16 as raw 16-bit integers and multiplies those in tl.dot")
    q_lens, kv_lens, hq, hkv = CASES[case]
    batch = make_batch(q_lens, kv_lens, hq, hkv, dim, page_size, dtype, seed=5)
    got = run(batch, page_size, 0.3, device, backend, cu_dtype=torch.int64)
    assert got[0].dtype == dtype
    assert got[1].dtype == torch.float32
    close(got, naive(*batch, page_size, 0.3), dtype)


@pytest.mark.parametrize("num_splits", [2, 3, 8])
def test_split_keys_merge_to_the_same(backend, device, num_splits):
    # kv 1 with 8 splits: most parts see no key at all
    batch = make_batch([1, 2, 1], [150, 70, 1], 4, 2, 16, 4, torch.float32, seed=6, num_pages=80)
    close(run(batch, 4, 0.25, device, backend, num_splits=num_splits), naive(*batch, 4, 0.25), torch.float32)


@pytest.mark.parametrize("window", [1, 5, 64])
def test_window(backend, device, window):
    batch = make_batch([1, 30], [150, 90], 2, 1, 16, 4, torch.float32, seed=7, num_pages=80)
    close(run(batch, 4, 0.25, device, backend, window=window), naive(*batch, 4, 0.25, window=window), torch.float32)


@pytest.mark.parametrize("few_valid", [False, True])
def test_invalid_pages_are_neither_seen_nor_loaded(backend, device, few_valid):
    page_size = 4
    batch = make_batch([1, 9, 4], [70, 33, 4], 4, 2, 16, page_size, torch.float32, seed=8)
    _, k, v, table, _, kv_lens = batch
    valid = torch.rand(table.shape, generator=torch.Generator().manual_seed(9)) > 0.5
    valid[0, :17], valid[0, 17] = False, True  # one page of two keys is left at the end
    valid[2] = False  # no key at all
    for b in range(len(kv_lens)):
        for page in table[b, ~valid[b]].tolist():  # poison what must not be read
            k[page * page_size : (page + 1) * page_size] = math.nan
            v[page * page_size : (page + 1) * page_size] = math.nan
    expected = naive(*batch, page_size, 0.25, valid=valid.tolist())
    masks = {"valid_pages": valid.to(device), "few_valid": few_valid}
    for num_splits in (1, 3):
        got = run(batch, page_size, 0.25, device, backend, **masks, num_splits=num_splits)
        close(got, expected, torch.float32)
        assert got[0][-4:].eq(0).all()
        assert got[1][-4:].eq(-math.inf).all()


def test_query_of_any_strides(backend, device):
    batch = make_batch([3, 2], [20, 9], 4, 2, 16, 4, torch.float32, seed=10)
    expected = naive(*batch, 4, 0.25)
    transposed = batch[0].transpose(0, 1).contiguous().transpose(0, 1)  # [Hq, T, D] memory
    assert not transposed.is_contiguous()
    close(run((transposed, *batch[1:]), 4, 0.25, device, backend), expected, torch.float32)


def test_parts_of_the_context_merge_to_the_whole(backend, device):
    page_size = 4
    batch = make_batch([1, 9], [70, 33], 4, 2, 16, page_size, torch.float32, seed=11)
    even = (torch.arange(batch[3].shape[1]) % 2 == 0).expand(2, -1).contiguous()
    parts = [run(batch, page_size, 0.25, device, backend, valid_pages=m.to(device)) for m in (even, ~even)]
    moved = [t.to(device) for part in parts for t in part]
    out, lse = merge_states(*moved, backend=backend)
    close((out.cpu(), lse.cpu()), naive(*batch, page_size, 0.25), torch.float32)


def test_merge_by_hand(backend, device):
    nan, inf = math.nan, math.inf
    out_a = torch.tensor([[[1.0, 5.0]], [[2.0, 2.0]], [[nan, nan]], [[nan, nan]]], device=device)
    out_b = torch.tensor([[[3.0, 7.0]], [[4.0, 4.0]], [[6.0, 8.0]], [[nan, nan]]], device=device)
    lse_a = torch.tensor([[0.0], [math.log(3)], [-inf], [-inf]], device=device)
    lse_b = torch.tensor([[0.0], [0.0], [2.0], [-inf]], device=device)
    out, lse = merge_states(out_a, lse_a, out_b, lse_b, backend=backend)
    # equal weights; 3 : 1; only b; neither (and NaN where there was no key does not come through)
    assert out.flatten().tolist() == pytest.approx([2.0, 6.0, 2.5, 2.5, 6.0, 8.0, 0.0, 0.0])
    assert lse.flatten().tolist() == pytest.approx([math.log(2), math.log(4), 2.0, -inf])


def test_fp8_cache(device):
    batch = make_batch([1, 4], [20, 9], 4, 2, 16, 4, torch.float32, seed=12)
    k, v = (t.nan_to_num(0.0).to(torch.float8_e4m3fn) for t in batch[1:3])
    expected = naive(batch[0], k.float(), v.float(), *batch[3:], 4, 0.25)
    close(run((batch[0], k, v, *batch[3:]), 4, 0.25, device, "auto"), expected, torch.float32)


def test_empty_and_refusals(backend, device):
    q, kv = torch.zeros(0, 4, 16, device=device), torch.zeros(8, 2, 16, device=device)
    table = torch.zeros(2, 3, dtype=torch.int64, device=device)
    cu, lens = torch.zeros(3, dtype=torch.int32, device=device), torch.zeros(2, dtype=torch.int64, device=device)
    out, lse = paged_attention(q, kv, kv, table, cu, lens, 4, 1.0, max_q=1, backend=backend)
    assert out.shape == (0, 4, 16)
    assert lse.shape == (0, 4)
    with pytest.raises(ConfigError, match="q's 3 heads must be a multiple of the 2 KV heads"):
        paged_attention(q[:, :3], kv, kv, table, cu, lens, 4, 1.0, max_q=1)
    with pytest.raises(ConfigError, match="max_q must be at least 1, got 0"):
        paged_attention(q, kv, kv, table, cu, lens, 4, 1.0, max_q=0)
    with pytest.raises(ConfigError, match="cu_q needs 3 entries, kv_lens 2; got 2 and 2"):
        paged_attention(q, kv, kv, table, cu[:2], lens, 4, 1.0, max_q=1)
    with pytest.raises(ConfigError, match=r"k_flat must be torch.float32 as q is, or fp8, got torch.float16"):
        paged_attention(q, kv.half(), kv.half(), table, cu, lens, 4, 1.0, max_q=1)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("share", [None, 0.5])
def test_the_cpus_fused_kernel_gives_the_same(case, dtype, share):
    """Whole requests, and the pages of one part alone (everything else NaN), with the log-sum-exp of a merge."""
    page_size = 4
    q_lens, kv_lens, hq, hkv = CASES[case]
    batch = make_batch(q_lens, kv_lens, hq, hkv, 16, page_size, dtype, seed=11)
    q, k, v, table, _, _ = batch
    valid = None
    if share is not None:
        valid = torch.rand(table.shape, generator=torch.Generator().manual_seed(12)) > share
        valid[:, 0] = False  # the first queries of a prompt see nothing
        for b in range(len(kv_lens)):
            for page in table[b, ~valid[b]].tolist():
                k[page * page_size : (page + 1) * page_size] = math.nan
                v[page * page_size : (page + 1) * page_size] = math.nan
    expected = naive(*batch, page_size, 0.3, valid=None if valid is None else valid.tolist())
    out, lse = paged_attention_sdpa(q, k, v, table, np.array(q_lens), np.array(kv_lens), page_size, 0.3, valid)
    # torch's kernel takes its exponentials of bf16 scores in a coarser way: 2e-4 seen
    close((out, expected[1] if valid is None else lse), expected, dtype, 2e-5 if dtype == torch.float32 else 1e-3)
    assert (len(lse) == 0) == (valid is None)
