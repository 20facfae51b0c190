"""Paged attention on the CPU by torch's fused kernel: decoding requests in groups of about one length, prompts one by
one. Reads KV, writes none."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from tidekv.memory.ledger import IntArray

_PAD_SHARE = 0.25  # keys a group may compute in vain; each group saves about 0.2 ms of calls for each request


@dataclass(frozen=True)
class DecodeGroup:
    """Decoding requests of about the same length n, computed in one call.

    tokens  [g] int64: their rows of q
    entries, offsets  [g * n] int64: page table entry (flat) and row in the page of each key; beyond a request's end
        those of its first key, since rows that it does not own may hold NaN
    mask    [g, 1, 1, n] bool: the keys that count
    """

    tokens: torch.Tensor
    entries: torch.Tensor
    offsets: torch.Tensor
    mask: torch.Tensor


def decode_groups(q_lens: IntArray, kv_lens: IntArray, table_width: int, page_size: int) -> list[DecodeGroup]:
    """All requests with one new token, by length; none is longer than 1 + `_PAD_SHARE` times the shortest of its
    group. The others are not in any group. table_width: N of the page tables [B, N]."""
    decoding = np.flatnonzero(q_lens == 1)
    decoding = decoding[np.argsort(kv_lens[decoding], kind="stable")]
    first_token = np.cumsum(q_lens) - q_lens
    groups = []
    while len(decoding):
        lens = kv_lens[decoding]
        count = int(np.searchsorted(lens, lens[0] * (1 + _PAD_SHARE), side="right"))
        mine, decoding = decoding[:count], decoding[count:]
        position = np.arange(lens[count - 1])
        own = position < lens[:count, None]
        position = np.where(own, position, 0)
        entries = mine[:, None] * table_width + position // page_size
        groups.append(
            DecodeGroup(
                torch.from_numpy(first_token[mine]),
                torch.from_numpy(entries.ravel()),
                torch.from_numpy((position % page_size).ravel()),
                torch.from_numpy(own)[:, None, None],
            )
        )
    return groups


def paged_attention_sdpa(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    page_table: torch.Tensor,
    q_lens: IntArray,
    kv_lens: IntArray,
    page_size: int,
    scale: float,
    valid_pages: torch.Tensor | None = None,
    groups: list[DecodeGroup] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What `kernels.attention.paged_attention` computes, without its tiles.

    q [T, Hq, D]; keys, values [rows, Hkv, D]; page_table [B, N] int64; q_lens, kv_lens [B] on the host; valid_pages
    [B, N] bool or None for all; groups: `decode_groups` of this batch if the caller has them already. Returns out [T,
    Hq, D] and, only when `valid_pages` is given (then a merge follows), lse [T, Hq] fp32, else an empty tensor. A query
    that sees no key: 0 and -inf.
    """
    num_kv_heads = keys.shape[1]
    if valid_pages is not None:
        return _partial(q, keys, values, page_table, q_lens, kv_lens, page_size, scale, valid_pages)
    out = torch.empty_like(q)
    if groups is None:
        groups = decode_groups(q_lens, kv_lens, page_table.shape[1], page_size)
    for group in groups:
        rows = page_table.view(-1).index_select(0, group.entries).mul_(page_size).add_(group.offsets)
        count = len(group.tokens)
        k = keys.index_select(0, rows).view(count, -1, num_kv_heads, keys.shape[-1]).transpose(1, 2)  # [g, Hkv, n, D]
        v = values.index_select(0, rows).view(count, -1, num_kv_heads, keys.shape[-1]).transpose(1, 2)
        # The query heads of one KV head become its queries: K and V are not repeated.
        queries = q.index_select(0, group.tokens).view(count, num_kv_heads, -1, q.shape[-1])
        result = F.scaled_dot_product_attention(queries, k, v, attn_mask=group.mask, scale=scale)
        out.index_copy_(0, group.tokens, result.flatten(1, 2))
    k_pages, v_pages = (x.view(-1, page_size, num_kv_heads, x.shape[-1]) for x in (keys, values))
    begin = 0
    for b, (q_len, kv_len) in enumerate(zip(q_lens.tolist(), kv_lens.tolist(), strict=True)):
        mine, begin = slice(begin, begin + q_len), begin + q_len
        if q_len > 1:
            pages = page_table[b, : -(-kv_len // page_size)]
            # index_select: half the time of k_pages[pages] here.
            k = k_pages.index_select(0, pages).flatten(0, 1)[:kv_len].transpose(0, 1)[None]  # [1, Hkv, kv_len, D]
            v = v_pages.index_select(0, pages).flatten(0, 1)[:kv_len].transpose(0, 1)[None]
            out[mine] = _attend_all(q[mine], k, v, scale)
    return out, torch.empty(0)


def _partial(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    page_table: torch.Tensor,
    q_lens: IntArray,
    kv_lens: IntArray,
    page_size: int,
    scale: float,
    valid_pages: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Over the valid pages alone, request by request; requests that have none in this part cost nothing."""
    k_pages, v_pages = (x.view(-1, page_size, *x.shape[1:]) for x in (keys, values))
    out = torch.zeros_like(q)
    lse = torch.full(q.shape[:2], -math.inf, dtype=torch.float32, device=q.device)
    begin = 0
    for b, (q_len, kv_len) in enumerate(zip(q_lens.tolist(), kv_lens.tolist(), strict=True)):
        mine, begin = slice(begin, begin + q_len), begin + q_len
        logical = valid_pages[b, : -(-kv_len // page_size)].nonzero()[:, 0]
        if not len(logical) or not q_len:
            continue
        positions = (logical[:, None] * page_size + torch.arange(page_size)).flatten()
        positions = positions[: len(positions) - max(0, int(positions[-1]) + 1 - kv_len)]
        pages = page_table[b].index_select(0, logical)
        k = k_pages.index_select(0, pages).flatten(0, 1)[: len(positions)].transpose(0, 1)[None]
        v = v_pages.index_select(0, pages).flatten(0, 1)[: len(positions)].transpose(0, 1)[None]
        # Queries before the first of these keys see none of them: left at 0 and -inf.
        first = max(0, int(positions[0]) - (kv_len - q_len))
        if first < q_len:
            seeing = slice(mine.start + first, mine.stop)
            out[seeing], lse[seeing] = _attend_some(q[seeing], k, v, positions, kv_len, scale)
    return out, lse


def _attend_all(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """q [t, Hq, D] over all keys of its request, k and v [1, Hkv, kv_len, D] -> [t, Hq, D]."""
    q_len, kv_len = len(q), k.shape[2]
    result = F.scaled_dot_product_attention(
        q.transpose(0, 1)[None],
        k,
        v,
        # A prompt from its first token needs no mask tensor, and half of the products are skipped.
        attn_mask=None if q_len == kv_len else _see(torch.arange(kv_len), q_len, kv_len),
        is_causal=q_len == kv_len,
        scale=scale,
        enable_gqa=True,
    )
    return result[0].transpose(0, 1)


def _attend_some(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, positions: torch.Tensor, kv_len: int, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The last t queries of a request, q [t, Hq, D], over the keys at `positions` [n], each of them seen by at least
    one -> out [t, Hq, D], lse [t, Hq].

    torch's own operator behind scaled_dot_product_attention, which does not hand out its log-sum-exp.
    """
    group = q.shape[1] // k.shape[1]
    mask = None
    if len(q) > 1:
        mask = torch.zeros(len(q), len(positions), dtype=q.dtype)
        mask.masked_fill_(~_see(positions, len(q), kv_len), -math.inf)
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q.transpose(0, 1)[None],
        k.repeat_interleave(group, dim=1),
        v.repeat_interleave(group, dim=1),
        attn_mask=mask,
        scale=scale,
    )
    return out[0].transpose(0, 1), lse[0].transpose(0, 1)


def _see(positions: torch.Tensor, q_len: int, kv_len: int) -> torch.Tensor:
    """[q_len, n] bool: query i, at position kv_len - q_len + i, sees keys up to its own position."""
    return positions[None, :] <= torch.arange(kv_len - q_len, kv_len)[:, None]
