# mypy: ignore-errors
"""Paged attention over per-layer page tables, and the merge of partial results. Reads KV, writes none.

One kernel serves prefill, extend and decode: a program owns BLOCK_M rows (query tokens x the query heads that share a
KV head, so that decode fills a tensor-core tile) and walks the keys in tiles of BLOCK_N. When there are too few
programs for the GPU the keys are split among several of them, whose partial results a second kernel merges by
log-sum-exp. Rows of a page that the request does not own yet, and whole invalid pages, are never loaded: staging may
hold NaN there.
"""

import functools
import math

import torch
from torch import Tensor

from tidekv.errors import ConfigError
from tidekv.kernels import (
    Backend,
    cdiv,
    check_columns,
    check_contiguous,
    check_positive,
    check_tensor,
    next_power_of_2,
    on_device,
    require,
    tl,
    triton,
    use_triton,
)
from tidekv.kernels.launch import Launcher

_MAX_SPLITS = 32  # bounds the scratch: 32 * T * Hq * (D + 1) * 4 bytes, and only for batches that cannot fill the GPU
_MIN_SPLIT_TOKENS = 256  # below this the merge costs more than the parallelism gains
_FLOATS = (torch.float16, torch.bfloat16, torch.float32)


@triton.jit
def _attend_tile(
    acc,
    row_max,
    row_sum,
    q_tile,
    qpos,
    k,
    v,
    table_row,
    pos,
    key_ok,
    head,
    scale_log2,
    window,
    HKV: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    MASKED: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_VALID: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One step of the online softmax: the keys at positions `pos`, those that are `key_ok`."""
    offs_d = tl.arange(0, BLOCK_D)
    page = tl.load(table_row + pos // PAGE_SIZE, mask=key_ok, other=0)
    # int64 from the table on: rows * heads * dim passes 2**31
    elem = ((page * PAGE_SIZE + pos % PAGE_SIZE) * HKV + head) * D
    load_ok = key_ok[:, None]
    if BLOCK_D != D:
        load_ok = load_ok & (offs_d < D)[None, :]
    k_tile = tl.load(k + elem[:, None] + offs_d[None, :], mask=load_ok, other=0.0).to(q_tile.dtype)
    scores = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION) * scale_log2
    if MASKED:
        see = key_ok[None, :] & (pos[None, :] <= qpos[:, None])
        if HAS_WINDOW:
            see = see & (pos[None, :] > qpos[:, None] - window)
        scores = tl.where(see, scores, -float("inf"))
    elif HAS_VALID:
        scores = tl.where(key_ok[None, :], scores, -float("inf"))
    new_max = tl.maximum(row_max, tl.max(scores, 1))
    # a row that has seen no key yet: exp2(-inf - 0) = 0, not NaN
    safe_max = tl.where(new_max == -float("inf"), 0.0, new_max)
    weights = tl.math.exp2(scores - safe_max[:, None])
    shrink = tl.math.exp2(row_max - safe_max)
    row_sum = row_sum * shrink + tl.sum(weights, 1)
    v_tile = tl.load(v + elem[:, None] + offs_d[None, :], mask=load_ok, other=0.0).to(q_tile.dtype)
    acc = acc * shrink[:, None] + tl.dot(weights.to(q_tile.dtype), v_tile, input_precision=PRECISION)
    return acc, new_max, row_sum


@triton.jit
def _attend_range(
    acc,
    row_max,
    row_sum,
    q_tile,
    qpos,
    k,
    v,
    table_row,
    valid_row,
    lo,
    hi,
    key_end,
    head,
    scale_log2,
    window,
    HKV: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_VALID: tl.constexpr,
    SKIPS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Online softmax over keys [lo, hi); MASKED says that some query may not see all of them, SKIPS that tiles without
    a valid key are passed over."""
    for start in range(lo, hi, BLOCK_N):
        pos = start + tl.arange(0, BLOCK_N)
        key_ok = pos < key_end
        if HAS_VALID:
            key_ok = key_ok & (tl.load(valid_row + pos // PAGE_SIZE, mask=key_ok, other=0) != 0)
        if SKIPS:
            if tl.max(key_ok.to(tl.int32), 0) > 0:
                acc, row_max, row_sum = _attend_tile(
                    acc, row_max, row_sum, q_tile, qpos, k, v, table_row, pos, key_ok, head, scale_log2, window,
                    HKV, D, BLOCK_D, PAGE_SIZE, MASKED, HAS_WINDOW, HAS_VALID, PRECISION,
                )  # fmt: skip
        else:
            acc, row_max, row_sum = _attend_tile(
                acc, row_max, row_sum, q_tile, qpos, k, v, table_row, pos, key_ok, head, scale_log2, window,
                HKV, D, BLOCK_D, PAGE_SIZE, MASKED, HAS_WINDOW, HAS_VALID, PRECISION,
            )  # fmt: skip
    return acc, row_max, row_sum


# Sizes that change from step to step: a kernel compiled for each kind of value is a stall of 1.5 s while serving.
@triton.jit(
    do_not_specialize=["scale_log2", "table_stride", "valid_stride", "num_tokens", "num_splits", "window"],
    do_not_specialize_on_alignment=["page_table", "valid_pages", "cu_q", "kv_lens"],
)
def paged_attention_kernel(
    q,
    k,
    v,
    out,
    lse,
    page_table,
    valid_pages,
    cu_q,
    kv_lens,
    scale_log2,
    q_stride_t,
    q_stride_h,
    table_stride,
    valid_stride,
    num_tokens,
    num_splits,
    window,
    HQ: tl.constexpr,
    HKV: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_VALID: tl.constexpr,
    SKIPS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Program (block of queries x split, KV head, request); `out` and `lse` are [num_splits, T, HQ, ...]."""
    GROUP: tl.constexpr = HQ // HKV
    BLOCK_Q: tl.constexpr = BLOCK_M // GROUP_PAD
    block = tl.program_id(0) // num_splits
    split = tl.program_id(0) % num_splits
    head = tl.program_id(1)
    b = tl.program_id(2).to(tl.int64)
    q_start = tl.load(cu_q + b).to(tl.int64)
    q_len = (tl.load(cu_q + b + 1) - q_start).to(tl.int32)
    if block * BLOCK_Q < q_len:
        kv_len = tl.load(kv_lens + b).to(tl.int32)
        rows = tl.arange(0, BLOCK_M)
        local = block * BLOCK_Q + rows // GROUP_PAD
        q_head = head * GROUP + rows % GROUP_PAD
        row_ok = (local < q_len) & (rows % GROUP_PAD < GROUP)
        token = q_start + local
        qpos = kv_len - q_len + local
        offs_d = tl.arange(0, BLOCK_D)
        io_ok = row_ok[:, None] & (offs_d < D)[None, :]
        q_tile = tl.load(
            q + token[:, None] * q_stride_t + q_head[:, None] * q_stride_h + offs_d[None, :], mask=io_ok, other=0.0
        )

        # keys [lo, key_end) are seen by some query of the block; [lo, full_end) by all of them (without a window)
        first_qpos = kv_len - q_len + block * BLOCK_Q
        key_end = tl.minimum(kv_len, first_qpos + BLOCK_Q)
        lo = key_end * 0
        if HAS_WINDOW:
            lo = tl.maximum(first_qpos - window + 1, 0) // BLOCK_N * BLOCK_N
        span = tl.cdiv(tl.cdiv(key_end - lo, num_splits), BLOCK_N) * BLOCK_N
        lo = lo + split * span
        key_end = tl.minimum(key_end, lo + span)
        full_end = lo
        if not HAS_WINDOW:
            full_end = lo + tl.maximum(tl.minimum(key_end, first_qpos + 1) - lo, 0) // BLOCK_N * BLOCK_N

        acc = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
        row_max = tl.full([BLOCK_M], -float("inf"), dtype=tl.float32)
        row_sum = tl.zeros([BLOCK_M], dtype=tl.float32)
        table_row = page_table + b * table_stride
        valid_row = valid_pages + b * valid_stride
        if not HAS_WINDOW:
            acc, row_max, row_sum = _attend_range(
                acc, row_max, row_sum, q_tile, qpos, k, v, table_row, valid_row, lo, full_end, key_end, head,
                scale_log2, window, HKV, D, BLOCK_D, PAGE_SIZE, BLOCK_N, False, False, HAS_VALID, SKIPS, PRECISION,
            )  # fmt: skip
        acc, row_max, row_sum = _attend_range(
            acc, row_max, row_sum, q_tile, qpos, k, v, table_row, valid_row, full_end, key_end, key_end, head,
            scale_log2, window, HKV, D, BLOCK_D, PAGE_SIZE, BLOCK_N, True, HAS_WINDOW, HAS_VALID, SKIPS, PRECISION,
        )  # fmt: skip

        some = row_sum > 0
        safe_sum = tl.where(some, row_sum, 1.0)
        result = acc / safe_sum[:, None]
        row_lse = tl.where(some, (row_max + tl.math.log2(safe_sum)) * 0.6931471805599453, -float("inf"))
        at = (split.to(tl.int64) * num_tokens + token) * HQ + q_head
        tl.store(lse + at, row_lse, mask=row_ok)
        tl.store(out + at[:, None] * D + offs_d[None, :], result.to(out.dtype.element_ty), mask=io_ok)


@triton.jit(do_not_specialize=["num_rows", "num_splits"])
def merge_splits_kernel(
    part_out, part_lse, out, lse, num_rows, num_splits, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_S: tl.constexpr
):
    """Program r merges the partial results of one (token, head)."""
    r = tl.program_id(0).to(tl.int64)
    s = tl.arange(0, BLOCK_S)
    offs_d = tl.arange(0, BLOCK_D)
    at = s.to(tl.int64) * num_rows + r
    split_lse = tl.load(part_lse + at, mask=s < num_splits, other=-float("inf"))
    top = tl.max(split_lse, 0)
    safe_top = tl.where(top == -float("inf"), 0.0, top)
    weights = tl.exp(split_lse - safe_top)
    total = tl.sum(weights, 0)
    safe_total = tl.where(total > 0, total, 1.0)
    parts = tl.load(
        part_out + at[:, None] * D + offs_d[None, :], mask=(s < num_splits)[:, None] & (offs_d < D)[None, :], other=0.0
    )
    result = tl.sum(parts * weights[:, None], 0) / safe_total
    tl.store(out + r * D + offs_d, result.to(out.dtype.element_ty), mask=offs_d < D)
    tl.store(lse + r, tl.where(total > 0, safe_top + tl.log(safe_total), -float("inf")))


_attend, _merge_splits = Launcher(paged_attention_kernel), Launcher(merge_splits_kernel)


def paged_attention_ref(
    q: Tensor,
    k_flat: Tensor,
    v_flat: Tensor,
    page_table: Tensor,
    cu_q: Tensor,
    kv_lens: Tensor,
    page_size: int,
    scale: float,
    *,
    window: int | None = None,
    valid_pages: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Torch twin of `paged_attention_kernel`: fp32 softmax, a loop over requests; see `paged_attention`."""
    num_tokens, num_q_heads, head_dim = q.shape
    num_kv_heads = k_flat.shape[1]
    out = torch.zeros_like(q, memory_format=torch.contiguous_format)
    lse = torch.full((num_tokens, num_q_heads), -math.inf, dtype=torch.float32, device=q.device)
    bounds, lens = cu_q.tolist(), kv_lens.tolist()
    for b, kv_len in enumerate(lens):
        start, end = bounds[b], bounds[b + 1]
        if start == end:
            continue
        pos = torch.arange(kv_len, device=q.device)
        if valid_pages is not None:
            pos = pos[valid_pages[b, pos // page_size]]  # invalid pages are not read at all
        rows = page_table[b, pos // page_size] * page_size + pos % page_size
        qpos = kv_len - (end - start) + torch.arange(end - start, device=q.device)
        see = pos[None, :] <= qpos[:, None]  # [q_len, keys]
        if window is not None:
            see &= pos[None, :] > qpos[:, None] - window
        qs = q[start:end].float().view(end - start, num_kv_heads, -1, head_dim)  # [q_len, Hkv, G, D]
        scores = torch.einsum("qhgd,khd->qhgk", qs, k_flat[rows].float()) * scale
        scores = scores.masked_fill(~see[:, None, None, :], -math.inf)
        row_lse = torch.logsumexp(scores, -1)  # -inf where no key is seen
        weights = torch.exp(scores - row_lse.nan_to_num(neginf=0.0)[..., None])
        result = torch.einsum("qhgk,khd->qhgd", weights, v_flat[rows].float())
        out[start:end] = result.reshape(end - start, num_q_heads, head_dim).to(q.dtype)
        lse[start:end] = row_lse.reshape(end - start, num_q_heads)
    return out, lse


def paged_attention(
    q: Tensor,
    k_flat: Tensor,
    v_flat: Tensor,
    page_table: Tensor,
    cu_q: Tensor,
    kv_lens: Tensor,
    page_size: int,
    scale: float,
    *,
    max_q: int,
    window: int | None = None,
    valid_pages: Tensor | None = None,
    few_valid: bool = False,
    num_splits: int | None = None,
    backend: Backend = "auto",
) -> tuple[Tensor, Tensor]:
    """Causal attention of a packed batch over one layer's page table.

    Query i of request b has position kv_lens[b] - q_len + i (q_len = cu_q[b + 1] - cu_q[b]) and sees the keys at
    positions <= its own whose page is valid.

    Args:
        q: [T, Hq, D] fp16, bf16 or fp32, any token and head strides, D adjacent.
        k_flat, v_flat: [rows, Hkv, D] contiguous, q's dtype or fp8 (converted to q's dtype); flat page f is rows [f *
            page_size, (f + 1) * page_size).
        page_table: [B, N] int64 flat pages of this layer; entry n holds positions [n * page_size, (n + 1) * page_size).
        cu_q: [B + 1] int32 or int64, rising from 0 to T. kv_lens: [B] int64, tokens with those of q counted in, <= N *
            page_size, >= q_len.
        page_size: tokens a page. scale: factor on q . k.
        max_q: at least the longest q_len; known to the host, so that nothing waits for the device. Queries past it
            would not be computed.
        window: a query sees only the last `window` positions up to its own; None: all.
        valid_pages: [B, N] bool; keys of other pages are neither seen nor loaded. None: all valid.
        few_valid: most pages are not valid; the same result, sooner if they are, later if they are not.
        num_splits: parts into which the keys are split; None: chosen from the shapes alone, so the same batch shape
            always gives the same bits.
    Returns:
        out [T, Hq, D] in q's dtype, and lse [T, Hq] fp32: the natural log of the sum of exp(scale * q . k). A query
        that sees no key: 0 and -inf.
    Raises:
        ConfigError: a dtype, shape, stride or device that cannot work.
    """
    check_positive("page_size", page_size)
    check_positive("max_q", max_q)
    check_tensor("q", q, 3, _FLOATS)
    num_tokens, num_q_heads, head_dim = q.shape
    for name, flat in (("k_flat", k_flat), ("v_flat", v_flat)):
        check_tensor(name, flat, 3, None)
        check_contiguous(name, flat)
        if not (flat.dtype == q.dtype or flat.element_size() == 1):
            raise ConfigError(f"{name} must be {q.dtype} as q is, or fp8, got {flat.dtype}")
    num_kv_heads = k_flat.shape[1]
    require(
        k_flat.shape == v_flat.shape and k_flat.dtype == v_flat.dtype and k_flat.shape[2] == head_dim,
        lambda: (
            f"k_flat {tuple(k_flat.shape)} and v_flat {tuple(v_flat.shape)} must be alike, with q's head_dim {head_dim}"
        ),
    )
    require(
        num_q_heads % num_kv_heads == 0,
        lambda: f"q's {num_q_heads} heads must be a multiple of the {num_kv_heads} KV heads",
    )
    require(q.stride(2) == 1, lambda: f"q must have head_dim adjacent, got strides {q.stride()}")
    check_tensor("page_table", page_table, 2, (torch.int64,))
    num_requests, num_columns = page_table.shape
    check_tensor("cu_q", cu_q, 1, (torch.int32, torch.int64))
    check_tensor("kv_lens", kv_lens, 1, (torch.int64,))
    require(
        cu_q.numel() == num_requests + 1 and kv_lens.numel() == num_requests,
        lambda: (
            f"page_table has {num_requests} requests: cu_q needs {num_requests + 1} entries, kv_lens {num_requests}; "
            f"got {cu_q.numel()} and {kv_lens.numel()}"
        ),
    )
    require(cu_q.is_contiguous() and kv_lens.is_contiguous(), "cu_q and kv_lens must be contiguous")
    if window is not None:
        check_positive("window", window)
    if num_splits is not None:
        check_positive("num_splits", num_splits)
    tables = {"page_table": page_table}
    if valid_pages is not None:
        check_tensor("valid_pages", valid_pages, 2, (torch.bool,))
        require(
            valid_pages.shape == page_table.shape,
            lambda: f"valid_pages {tuple(valid_pages.shape)} must have page_table's shape",
        )
        tables["valid_pages"] = valid_pages
    for name, table in tables.items():
        check_columns(name, table)
    operands = {"q": q, "k_flat": k_flat, "v_flat": v_flat, "cu_q": cu_q, "kv_lens": kv_lens, **tables}
    if not use_triton(paged_attention_kernel, backend, operands):
        return paged_attention_ref(
            q, k_flat, v_flat, page_table, cu_q, kv_lens, page_size, scale, window=window, valid_pages=valid_pages
        )

    out = torch.empty((num_tokens, num_q_heads, head_dim), dtype=q.dtype, device=q.device)
    lse = torch.empty((num_tokens, num_q_heads), dtype=torch.float32, device=q.device)
    if num_tokens == 0 or num_requests == 0:
        return out, lse
    group_pad = next_power_of_2(num_q_heads // num_kv_heads)
    # 16 rows is the smallest tensor-core tile; 128 rows reuse a loaded key enough for prefill.
    block_m = max(group_pad, min(128, max(16, next_power_of_2(max_q * group_pad))))
    q_blocks = cdiv(max_q, block_m // group_pad)
    if num_splits is None:
        num_splits = _choose_splits(q, q_blocks * num_kv_heads * num_requests, num_columns * page_size)
    if num_splits == 1:
        part_out, part_lse = out, lse
    else:
        part_out = torch.empty((num_splits, num_tokens, num_q_heads, head_dim), dtype=torch.float32, device=q.device)
        part_lse = torch.empty((num_splits, num_tokens, num_q_heads), dtype=torch.float32, device=q.device)
    block_d = max(16, next_power_of_2(head_dim))
    block_n, num_warps, num_stages = _choose_tile(q, block_m, block_d)
    valid = page_table if valid_pages is None else valid_pages.view(torch.uint8)
    _attend(
        q,
        (q_blocks * num_splits, num_kv_heads, num_requests),
        (q, k_flat, v_flat, part_out, part_lse, page_table, valid, cu_q, kv_lens),
        (
            scale * 1.4426950408889634,  # exp2 is one instruction, exp is not: scores carry log2(e)
            q.stride(0),
            q.stride(1),
            page_table.stride(0),
            valid.stride(0),
            num_tokens,
            num_splits,
            window or 0,
        ),
        (
            num_q_heads,
            num_kv_heads,
            group_pad,
            head_dim,
            block_d,
            page_size,
            block_m,
            block_n,
            window is not None,
            valid_pages is not None,
            valid_pages is not None and few_valid,
            "ieee" if q.dtype == torch.float32 else "tf32",  # fp32 through TF32 would keep 10 bits of mantissa
        ),
        num_warps,
        num_stages,
    )
    if num_splits > 1:
        tensors, num_rows = (part_out, part_lse, out, lse), num_tokens * num_q_heads
        constants = (head_dim, block_d, next_power_of_2(num_splits))
        _merge_splits(q, (num_rows,), tensors, (num_rows, num_splits), constants)
    return out, lse


@functools.cache
def _gpu_limits(device_index: int) -> tuple[int, int]:
    """Streaming multiprocessors of a GPU, and the bytes of shared memory a program may have."""
    properties = torch.cuda.get_device_properties(device_index)
    return properties.multi_processor_count, properties.shared_memory_per_block_optin


def _choose_splits(q: Tensor, num_programs: int, max_kv_len: int) -> int:
    """As many splits as fill the GPU, from shapes alone; 1 on the CPU.

    Rounded down to whole waves: on an H200, 4 requests of 32768 tokens (32 programs) take 0.150 ms with 16 splits and
    0.174 with 17. At least 2 below a wave: 512 programs of 4096 tokens in pages of 64 take 0.261 ms with 2 splits,
    0.320 with 1.
    """
    if not q.is_cuda:
        return 1
    wave = 4 * _gpu_limits(q.get_device())[0]  # decode programs that fit the GPU at once, 4 an SM
    if num_programs >= wave:
        return 1
    return max(1, min(max(2, wave // num_programs), max_kv_len // _MIN_SPLIT_TOKENS, _MAX_SPLITS))


def _choose_tile(q: Tensor, block_m: int, block_d: int) -> tuple[int, int, int]:
    """(keys a tile, warps, pipeline stages).

    Measured on an H200, bf16, head_dim 128, 8 KV heads: decode of 64 x 4096 tokens takes 0.250 ms with (64, 4, 2) and
    0.323 ms with 3 stages (the device copies 4.2 TB/s: 0.251 ms); prefill of 8192 tokens runs at 394 TFLOP/s with
    (128, 8, 3) and 354 with (64, 8, 3).
    """
    row_bytes = block_d * q.element_size()
    if row_bytes > 256:
        return 32, 8 if block_m >= 128 else 4, 2
    if block_m < 128:
        return 64, 4, 2
    # q and three stages of K and V: 224 KiB at head_dim 128, which an H100 or H200 has and an A100 (163 KiB) has not
    fits = q.is_cuda and _gpu_limits(q.get_device())[1] >= (block_m + 3 * 2 * 128) * row_bytes
    return (128, 8, 3) if fits else (64, 8, 2)


@triton.jit
def merge_states_kernel(
    out_a, lse_a, out_b, lse_b, out, lse, num_rows, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_R: tl.constexpr
):
    """One program a block of (token, head) rows."""
    r = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    offs_d = tl.arange(0, BLOCK_D)
    inside = r < num_rows
    a = tl.load(lse_a + r, mask=inside, other=-float("inf"))
    b = tl.load(lse_b + r, mask=inside, other=-float("inf"))
    top = tl.maximum(a, b)
    safe_top = tl.where(top == -float("inf"), 0.0, top)
    weight_a = tl.exp(a - safe_top)
    weight_b = tl.exp(b - safe_top)
    total = weight_a + weight_b
    safe_total = tl.where(total > 0, total, 1.0)
    at = r[:, None] * D + offs_d[None, :]
    io_ok = inside[:, None] & (offs_d < D)[None, :]
    part_a = tl.load(out_a + at, mask=io_ok & (weight_a > 0)[:, None], other=0.0).to(tl.float32)
    part_b = tl.load(out_b + at, mask=io_ok & (weight_b > 0)[:, None], other=0.0).to(tl.float32)
    merged = (part_a * weight_a[:, None] + part_b * weight_b[:, None]) / safe_total[:, None]
    tl.store(out + at, merged.to(out.dtype.element_ty), mask=io_ok)
    tl.store(lse + r, tl.where(total > 0, safe_top + tl.log(safe_total), -float("inf")), mask=inside)


def merge_states_ref(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Torch twin of `merge_states_kernel`; see `merge_states`."""
    lse = torch.logaddexp(lse_a, lse_b)
    base = lse.nan_to_num(neginf=0.0)
    weight_a, weight_b = torch.exp(lse_a - base)[..., None], torch.exp(lse_b - base)[..., None]
    # A state with no key has weight 0; where() also keeps whatever its out holds (NaN, say) from coming through as NaN
    # * 0.
    part_a = torch.where(weight_a > 0, out_a.float() * weight_a, 0.0)
    part_b = torch.where(weight_b > 0, out_b.float() * weight_b, 0.0)
    return (part_a + part_b).to(out_a.dtype), lse


def merge_states(
    out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor, *, backend: Backend = "auto"
) -> tuple[Tensor, Tensor]:
    """Attention over the union of two disjoint sets of keys, from the results over each.

    Args:
        out_a, out_b: [T, H, D], one dtype. lse_a, lse_b: [T, H] fp32, natural log; -inf where that part saw no key
            (its out is then not read).
    Returns:
        (out [T, H, D] in out_a's dtype, lse [T, H] fp32).
    Raises:
        ConfigError: a dtype, shape, stride or device that cannot work.

    Example: lse_a = lse_b = 0, out_a = 1, out_b = 3 -> out 2, lse log 2.
    """
    check_tensor("out_a", out_a, 3, _FLOATS)
    check_tensor("out_b", out_b, 3, (out_a.dtype,))
    for name, tensor in (("lse_a", lse_a), ("lse_b", lse_b)):
        check_tensor(name, tensor, 2, (torch.float32,))
        if not (tensor.shape == out_a.shape[:2]):
            raise ConfigError(f"{name} must have shape {tuple(out_a.shape[:2])}, got {tuple(tensor.shape)}")
    require(
        out_a.shape == out_b.shape,
        lambda: f"out_a and out_b must have one shape, got {tuple(out_a.shape)} and {tuple(out_b.shape)}",
    )
    require(
        all(t.is_contiguous() for t in (out_a, lse_a, out_b, lse_b)), "out_a, lse_a, out_b and lse_b must be contiguous"
    )
    if not use_triton(merge_states_kernel, backend, {"out_a": out_a, "lse_a": lse_a, "out_b": out_b, "lse_b": lse_b}):
        return merge_states_ref(out_a, lse_a, out_b, lse_b)
    out, lse = torch.empty_like(out_a), torch.empty_like(lse_a)
    num_rows, head_dim = lse_a.numel(), out_a.shape[2]
    if num_rows:
        block_d = next_power_of_2(head_dim)
        block_r = max(1, 2048 // block_d)
        with on_device(out_a):
            merge_states_kernel[(cdiv(num_rows, block_r),)](
                out_a, lse_a, out_b, lse_b, out, lse, num_rows, D=head_dim, BLOCK_D=block_d, BLOCK_R=block_r
            )
    return out, lse
