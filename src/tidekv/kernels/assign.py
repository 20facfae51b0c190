# mypy: ignore-errors
"""Which location each new token gets: fills last pages, then hands out new slots. Reads no KV and never waits for the
device.

A request's tokens [prefix, seq) are placed in two runs (ps = page_size, boundary = ceil(prefix / ps) * ps):

    [prefix, min(boundary, seq))  the rest of its last page: last_loc + 1, last_loc + 2, ...
    [boundary, seq)               new slots, ceil(seq / ps) - ceil(prefix / ps) of them: loc = slot * ps + pos % ps

`new_slots` holds combined ids in the order of use. `order` is the order in which requests take from it (None: 0, 1, 2,
...); a mixed batch passes [high requests..., low requests...] and `new_slots` = [high slots..., low slots...]. The
output is always in the caller's request order.
"""

import torch
from torch import Tensor

from tidekv.errors import ConfigError
from tidekv.kernels import (
    Backend,
    cdiv,
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

# A cumulative sum reads the batch in chunks of at most this many: 4 at bs = 4096. Smaller batches use a kernel of their
# own power of two. page_size is a constant too: a division by a run-time int64 costs more than all the rest.
_BLOCK_REQUESTS = 1024
_BLOCK_TOKENS = 1024


def _block_requests(bs: int) -> int:
    return max(16, min(_BLOCK_REQUESTS, next_power_of_2(bs)))


@triton.jit
def alloc_extend_kernel(
    prefix_lens,
    seq_lens,
    last_loc,
    new_slots,
    order,
    out,
    bs,
    num_new_slots,
    num_tokens,
    PAGE_SIZE: tl.constexpr,
    HAS_ORDER: tl.constexpr,
    BLOCK_BS: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """Programs (turn, 0..n): each sums what comes before its request (in both orders), then writes every n-th block of
    its tokens."""
    turn = tl.program_id(0)  # the turn in which this request takes slots
    request = turn.to(tl.int64)
    if HAS_ORDER:
        request = tl.load(order + turn)
    out_start = tl.zeros((), dtype=tl.int64)
    slot_start = tl.zeros((), dtype=tl.int64)
    for chunk in range(0, bs, BLOCK_BS):
        k = chunk + tl.arange(0, BLOCK_BS)
        before_me = (k < bs) & (k < request)
        prefix_k = tl.load(prefix_lens + k, mask=before_me, other=0)
        seq_k = tl.load(seq_lens + k, mask=before_me, other=0)
        out_start += tl.sum(seq_k - prefix_k)
        earlier = (k < bs) & (k < turn)
        if HAS_ORDER:
            who = tl.load(order + k, mask=earlier, other=0)
            prefix_k = tl.load(prefix_lens + who, mask=earlier, other=0)
            seq_k = tl.load(seq_lens + who, mask=earlier, other=0)
        slot_start += tl.sum((seq_k + PAGE_SIZE - 1) // PAGE_SIZE - (prefix_k + PAGE_SIZE - 1) // PAGE_SIZE)

    prefix = tl.load(prefix_lens + request)
    seq = tl.load(seq_lens + request)
    last = tl.load(last_loc + request)
    first_new_page = (prefix + PAGE_SIZE - 1) // PAGE_SIZE
    length = (seq - prefix).to(tl.int32)
    for start in range(tl.program_id(1) * BLOCK_T, length, tl.num_programs(1) * BLOCK_T):
        t = start + tl.arange(0, BLOCK_T).to(tl.int64)
        pos = prefix + t
        # The bounds on slots and tokens guard memory against host counts that disagree with the lens; the host's own
        # counts are checked elsewhere.
        inside = (pos < seq) & (out_start + t < num_tokens)
        page = pos // PAGE_SIZE
        in_new = page >= first_new_page
        slot_index = slot_start + page - first_new_page
        slot = tl.load(new_slots + slot_index, mask=inside & in_new & (slot_index < num_new_slots), other=0)
        loc = tl.where(in_new, slot * PAGE_SIZE + pos % PAGE_SIZE, last + 1 + t)
        tl.store(out + out_start + t, loc, mask=inside)


def alloc_extend_ref(
    prefix_lens: Tensor,
    seq_lens: Tensor,
    last_loc: Tensor,
    new_slots: Tensor,
    num_tokens: int,
    page_size: int,
    order: Tensor | None = None,
) -> Tensor:
    """Torch twin of `alloc_extend_kernel`; see `alloc_extend`."""
    extend_lens = seq_lens - prefix_lens
    out_start = torch.cumsum(extend_lens, 0) - extend_lens
    first_new_page = (prefix_lens + page_size - 1) // page_size
    num_new = (seq_lens + page_size - 1) // page_size - first_new_page
    if order is None:
        slot_start = torch.cumsum(num_new, 0) - num_new
    else:
        in_turn = num_new[order]
        slot_start = torch.empty_like(num_new)
        slot_start[order] = torch.cumsum(in_turn, 0) - in_turn
    request = torch.repeat_interleave(
        torch.arange(len(seq_lens), device=seq_lens.device), extend_lens, output_size=num_tokens
    )
    t = torch.arange(num_tokens, device=seq_lens.device) - out_start[request]
    pos = prefix_lens[request] + t
    page = pos // page_size
    in_new = page >= first_new_page[request]
    loc = last_loc[request] + 1 + t
    slot_index = (slot_start[request] + page - first_new_page[request])[in_new]
    loc[in_new] = new_slots[slot_index] * page_size + pos[in_new] % page_size
    return loc


def alloc_extend(
    prefix_lens: Tensor,
    seq_lens: Tensor,
    last_loc: Tensor,
    new_slots: Tensor,
    num_tokens: int,
    page_size: int,
    order: Tensor | None = None,
    *,
    backend: Backend = "auto",
    checked: bool = False,
) -> Tensor:
    """Encoded locations of the new tokens of a prefill or extend batch.

    Args:
        prefix_lens: [bs] int64, tokens already placed.
        seq_lens: [bs] int64, tokens after this call; seq >= prefix.
        last_loc: [bs] int64, encoded location of token prefix - 1 (anything where prefix is a multiple of page_size).
        new_slots: [n] int64, combined ids in the order of use; n is the sum of ceil(seq / page_size) - ceil(prefix /
            page_size).
        num_tokens: the sum of seq - prefix. The host knows it, so nothing waits for the device.
        page_size: tokens a page.
        order: [bs] int64, a permutation: who takes slots first. None: in the caller's order.
        checked: the caller vouches for the arguments; the checks take longer than the launch.
    Returns:
        [num_tokens] int64, request after request in the caller's order.
    Raises:
        ConfigError: a dtype, shape or device that cannot work.

    Example: page_size 4, prefix 6, seq 11, last_loc 13 (page 3, offset 1), new_slots [7] -> 14, 15, 28, 29, 30.
    """
    if checked and not last_loc.is_cuda:
        return alloc_extend_ref(prefix_lens, seq_lens, last_loc, new_slots, num_tokens, page_size, order)
    if checked:
        return _launch_extend(prefix_lens, seq_lens, last_loc, new_slots, num_tokens, page_size, order)
    _check_batch(last_loc, new_slots, page_size, order, prefix_lens=prefix_lens, seq_lens=seq_lens)
    require(num_tokens >= 0, lambda: f"num_tokens must not be negative, got {num_tokens}")
    operands = {
        "prefix_lens": prefix_lens,
        "seq_lens": seq_lens,
        "last_loc": last_loc,
        "new_slots": new_slots,
        "order": order,
    }
    if not use_triton(alloc_extend_kernel, backend, operands):
        return alloc_extend_ref(prefix_lens, seq_lens, last_loc, new_slots, num_tokens, page_size, order)
    return _launch_extend(prefix_lens, seq_lens, last_loc, new_slots, num_tokens, page_size, order)


def _launch_extend(
    prefix_lens: Tensor,
    seq_lens: Tensor,
    last_loc: Tensor,
    new_slots: Tensor,
    num_tokens: int,
    page_size: int,
    order: Tensor | None,
) -> Tensor:
    bs = seq_lens.numel()
    out = torch.empty(num_tokens, dtype=torch.int64, device=seq_lens.device)
    if bs and num_tokens:
        with on_device(seq_lens):
            # Blocks that an average request has; a longer one walks on.
            blocks = min(64, cdiv(cdiv(num_tokens, bs), _BLOCK_TOKENS))
            alloc_extend_kernel[(bs, blocks)](
                prefix_lens,
                seq_lens,
                last_loc,
                new_slots,
                seq_lens if order is None else order,
                out,
                bs,
                new_slots.numel(),
                num_tokens,
                PAGE_SIZE=page_size,
                HAS_ORDER=order is not None,
                BLOCK_BS=_block_requests(bs),
                BLOCK_T=_BLOCK_TOKENS,
            )
    return out


@triton.jit
def alloc_decode_kernel(
    seq_lens,
    last_loc,
    new_slots,
    order,
    out,
    bs,
    num_new_slots,
    PAGE_SIZE: tl.constexpr,
    HAS_ORDER: tl.constexpr,
    BLOCK_BS: tl.constexpr,
):
    """One program a block of turns: counts the new pages of all earlier blocks, then scans its own."""
    block = tl.program_id(0)
    opened = tl.zeros((), dtype=tl.int64)
    for chunk in range(0, block):
        k = chunk * BLOCK_BS + tl.arange(0, BLOCK_BS)
        who = k.to(tl.int64)
        if HAS_ORDER:
            who = tl.load(order + k, mask=k < bs, other=0)
        seq = tl.load(seq_lens + who, mask=k < bs, other=0)
        opened += tl.sum(((seq - 1) % PAGE_SIZE == 0).to(tl.int64))  # whole blocks only, so every k < bs
    k = block * BLOCK_BS + tl.arange(0, BLOCK_BS)
    inside = k < bs
    who = k.to(tl.int64)
    if HAS_ORDER:
        who = tl.load(order + k, mask=inside, other=0)
    seq = tl.load(seq_lens + who, mask=inside, other=0)
    is_new = inside & ((seq - 1) % PAGE_SIZE == 0)
    slot_index = opened + tl.cumsum(is_new.to(tl.int64), 0) - 1
    slot = tl.load(new_slots + slot_index, mask=is_new & (slot_index < num_new_slots), other=0)
    last = tl.load(last_loc + who, mask=inside, other=0)
    tl.store(out + who, tl.where(is_new, slot * PAGE_SIZE, last + 1), mask=inside)


def alloc_decode_ref(
    seq_lens: Tensor, last_loc: Tensor, new_slots: Tensor, page_size: int, order: Tensor | None = None
) -> Tensor:
    """Torch twin of `alloc_decode_kernel`; see `alloc_decode`."""
    turns = torch.arange(len(seq_lens), device=seq_lens.device) if order is None else order
    openers = turns[(seq_lens[turns] - 1) % page_size == 0]  # the requests that open a page, in turn
    out = last_loc + 1
    out[openers] = new_slots[: len(openers)] * page_size
    return out


def alloc_decode(
    seq_lens: Tensor,
    last_loc: Tensor,
    new_slots: Tensor,
    page_size: int,
    order: Tensor | None = None,
    *,
    backend: Backend = "auto",
    checked: bool = False,
) -> Tensor:
    """Encoded location of one new token a request.

    Args:
        seq_lens: [bs] int64, >= 1, the new token counted in.
        last_loc: [bs] int64, encoded location of the token before it.
        new_slots: [n] int64, combined ids in the order of use; n is the number of requests with (seq - 1) % page_size
            == 0.
        page_size: tokens a page.
        order: [bs] int64, a permutation: who takes slots first. None: in the caller's order.
        checked: the caller vouches for the arguments; the checks take longer than the launch.
    Returns:
        [bs] int64, in the caller's order.
    Raises:
        ConfigError: a dtype, shape or device that cannot work.

    Example: page_size 4, seq_lens [9, 7], last_loc [15, 21], new_slots [5] -> [20, 22].
    """
    if checked and not last_loc.is_cuda:
        return alloc_decode_ref(seq_lens, last_loc, new_slots, page_size, order)
    if not checked:
        _check_batch(last_loc, new_slots, page_size, order, seq_lens=seq_lens)
        operands = {"seq_lens": seq_lens, "last_loc": last_loc, "new_slots": new_slots, "order": order}
        if not use_triton(alloc_decode_kernel, backend, operands):
            return alloc_decode_ref(seq_lens, last_loc, new_slots, page_size, order)
    bs = last_loc.numel()
    out = torch.empty(bs, dtype=torch.int64, device=seq_lens.device)
    if bs:
        with on_device(seq_lens):
            block = _block_requests(bs)
            alloc_decode_kernel[(cdiv(bs, block),)](
                seq_lens,
                last_loc,
                new_slots,
                seq_lens if order is None else order,
                out,
                bs,
                new_slots.numel(),
                PAGE_SIZE=page_size,
                HAS_ORDER=order is not None,
                BLOCK_BS=block,
            )
    return out


def _check_batch(last_loc: Tensor, new_slots: Tensor, page_size: int, order: Tensor | None, **lens: Tensor) -> int:
    """Checks what both launchers share and returns bs."""
    check_positive("page_size", page_size)
    bs = last_loc.numel()
    per_request = {**lens, "last_loc": last_loc} | ({} if order is None else {"order": order})
    for name, tensor in {**per_request, "new_slots": new_slots}.items():
        check_tensor(name, tensor, 1, (torch.int64,))
        check_contiguous(name, tensor)
        if not (name == "new_slots" or tensor.numel() == bs):
            raise ConfigError(f"{name} must have {bs} entries as last_loc has, got {tensor.numel()}")
    return bs
