# mypy: ignore-errors
"""Which location each new token gets: fills last pages, then hands out new slots. Reads no KV and never waits for the
device.

A request's tokens [prefix, seq) are placed in two runs (ps = page_size, boundary = ceil(prefix / ps) * ps):

    [prefix, min(boundary, seq))  the rest of its last page: last_loc + 1, last_loc + 2, ...
    [boundary, seq)               new slots, ceil(seq / ps) - ceil(prefix / ps) of them: loc = slot * ps + pos % ps

`new_slots` holds combined ids, request after request in the caller's order: what a mixed batch gives to high and to low
is settled before (`tidekv.allocator`).
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
    require,
    tl,
    triton,
    use_triton,
)
from tidekv.kernels.launch import Launcher

# A decode batch is scanned in blocks of at most this many: 4 at bs = 4096. Smaller batches, and all of extend, use a
# kernel of their own power of two. page_size is a constant too: a division by a run-time int64 costs more than all the
# rest. Nothing else is specialised: the new slots start anywhere in the free list, and a kernel compiled for each
# alignment would be compiled in the middle of serving.
_BLOCK_REQUESTS = 1024
_BLOCK_TOKENS = 512
# Of a decode (benchmarks.launches): 1,024 requests take 2.49 us with 8 warps, 2.56 with 4; 256 take 2.09 with 4 or 8,
# 2.76 with one.
_REQUESTS_A_WARP, _MOST_WARPS = 64, 8
_MAX_TOKENS = 2**31 - 1  # of one extend; see the packed sum of its kernel


@triton.jit(do_not_specialize=list(range(9)))
def alloc_extend_kernel(
    prefix_lens,
    seq_lens,
    last_loc,
    new_slots,
    out,
    bs,
    first_slot,
    num_new_slots,
    num_tokens,
    PAGE_SIZE: tl.constexpr,
    BLOCK_BS: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """Programs (request, 0..n): each sums what comes before its request, then writes every n-th block of its tokens."""
    request = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, BLOCK_BS)
    earlier = (k < bs) & (k < request)
    prefix_k = tl.load(prefix_lens + k, mask=earlier, other=0)
    seq_k = tl.load(seq_lens + k, mask=earlier, other=0)
    # Asked for before the sum, so that one wait for memory serves both.
    prefix = tl.load(prefix_lens + request)
    seq = tl.load(seq_lens + request)
    last = tl.load(last_loc + request)
    tokens = seq_k - prefix_k
    slots = (seq_k + PAGE_SIZE - 1) // PAGE_SIZE - (prefix_k + PAGE_SIZE - 1) // PAGE_SIZE
    # Tokens in the upper half, slots in the lower: one sum across the warps instead of two. Both stay below 2**31.
    before_me = tl.sum((tokens << 32) + slots)
    out_start = before_me >> 32
    slot_start = before_me & 0xFFFFFFFF

    length = (seq - prefix).to(tl.int32)
    # Tokens that the last page still takes; from there on 32 bits do, and unsigned division is a shift.
    rest = ((prefix + PAGE_SIZE - 1) // PAGE_SIZE * PAGE_SIZE - prefix).to(tl.int32)
    for start in range(tl.program_id(1) * BLOCK_T, length, tl.num_programs(1) * BLOCK_T):
        t = start + tl.arange(0, BLOCK_T)
        # The bounds on slots and tokens guard memory against host counts that disagree with the lens; the host's own
        # counts are checked elsewhere.
        inside = (t < length) & (out_start + t < num_tokens)
        in_new = t >= rest
        pos = (t - rest).to(tl.uint32)
        slot_index = slot_start + pos // PAGE_SIZE
        is_there = inside & in_new & (slot_index < num_new_slots)
        slot = tl.load(new_slots + first_slot + slot_index, mask=is_there, other=0)
        loc = tl.where(in_new, slot * PAGE_SIZE + pos % PAGE_SIZE, last + 1 + t)
        tl.store(out + out_start + t, loc, mask=inside)


_extend = Launcher(alloc_extend_kernel)


def alloc_extend_ref(
    prefix_lens: Tensor, seq_lens: Tensor, last_loc: Tensor, new_slots: Tensor, num_tokens: int, page_size: int
) -> Tensor:
    """Torch twin of `alloc_extend_kernel`; see `alloc_extend`."""
    extend_lens = seq_lens - prefix_lens
    out_start = torch.cumsum(extend_lens, 0) - extend_lens
    first_new_page = (prefix_lens + page_size - 1) // page_size
    num_new = (seq_lens + page_size - 1) // page_size - first_new_page
    slot_start = torch.cumsum(num_new, 0) - num_new
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
    *,
    run: tuple[int, int] | None = None,
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
        run: (first, count): only that run of `new_slots` is used. A slice costs the host as much as two `torch.empty`.
        checked: the caller vouches for the arguments; the checks take longer than the launch.
    Returns:
        [num_tokens] int64, request after request in the caller's order.
    Raises:
        ConfigError: a dtype, shape or device that cannot work.

    Example: page_size 4, prefix 6, seq 11, last_loc 13 (page 3, offset 1), new_slots [7] -> 14, 15, 28, 29, 30.
    """
    by_triton = last_loc.is_cuda
    if not checked:
        _check_batch(last_loc, new_slots, page_size, run, prefix_lens=prefix_lens, seq_lens=seq_lens)
        require(num_tokens >= 0, lambda: f"num_tokens must not be negative, got {num_tokens}")
        operands = {"prefix_lens": prefix_lens, "seq_lens": seq_lens, "last_loc": last_loc, "new_slots": new_slots}
        by_triton = use_triton(alloc_extend_kernel, backend, operands)
    first, count = (0, new_slots.numel()) if run is None else run
    if not by_triton:
        mine = new_slots[first : first + count]
        return alloc_extend_ref(prefix_lens, seq_lens, last_loc, mine, num_tokens, page_size)
    require(num_tokens <= _MAX_TOKENS, lambda: f"num_tokens must be at most {_MAX_TOKENS}, got {num_tokens}")
    bs = seq_lens.numel()
    out = torch.empty(num_tokens, dtype=torch.int64, device=seq_lens.device)
    if num_tokens:
        # Blocks that an average request has; a longer one walks on.
        blocks = min(64, cdiv(num_tokens, bs * _BLOCK_TOKENS))
        _extend(
            last_loc,
            (bs, blocks),
            (prefix_lens, seq_lens, last_loc, new_slots, out),
            (bs, first, count, num_tokens),
            (page_size, max(16, next_power_of_2(bs)), _BLOCK_TOKENS),
            num_warps=4 if bs <= 1024 else 8,
        )
    return out


@triton.jit
def _opens_page(seq, PAGE_SIZE: tl.constexpr):
    """Token seq - 1 is the first of a page. Unsigned: the remainder by a power of two is then a mask."""
    return (seq - 1).to(tl.uint64) % PAGE_SIZE == 0


@triton.jit(do_not_specialize=list(range(7)))
def alloc_decode_kernel(
    seq_lens,
    last_loc,
    new_slots,
    out,
    bs,
    first_slot,
    num_new_slots,
    PAGE_SIZE: tl.constexpr,
    BLOCK_BS: tl.constexpr,
):
    """One program a block of requests: counts the new pages of all earlier blocks, then scans its own."""
    block = tl.program_id(0)
    k = block * BLOCK_BS + tl.arange(0, BLOCK_BS)
    inside = k < bs
    seq = tl.load(seq_lens + k, mask=inside, other=0)
    last = tl.load(last_loc + k, mask=inside, other=0)
    opened = tl.zeros((), dtype=tl.int32)
    for chunk in range(0, block):
        earlier = chunk * BLOCK_BS + tl.arange(0, BLOCK_BS)  # whole blocks, so every one < bs
        opened += tl.sum(_opens_page(tl.load(seq_lens + earlier), PAGE_SIZE).to(tl.int32))
    is_new = inside & _opens_page(seq, PAGE_SIZE)
    slot_index = opened + tl.cumsum(is_new.to(tl.int32), 0) - 1
    slot = tl.load(new_slots + first_slot + slot_index, mask=is_new & (slot_index < num_new_slots), other=0)
    tl.store(out + k, tl.where(is_new, slot * PAGE_SIZE, last + 1), mask=inside)


_decode = Launcher(alloc_decode_kernel)


def alloc_decode_ref(seq_lens: Tensor, last_loc: Tensor, new_slots: Tensor, page_size: int) -> Tensor:
    """Torch twin of `alloc_decode_kernel`; see `alloc_decode`."""
    openers = ((seq_lens - 1) % page_size == 0).nonzero()[:, 0]  # the requests that open a page
    out = last_loc + 1
    out[openers] = new_slots[: len(openers)] * page_size
    return out


def alloc_decode(
    seq_lens: Tensor,
    last_loc: Tensor,
    new_slots: Tensor,
    page_size: int,
    *,
    run: tuple[int, int] | None = None,
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
        run: (first, count): only that run of `new_slots` is used. A slice costs the host as much as two `torch.empty`.
        checked: the caller vouches for the arguments; the checks take longer than the launch.
    Returns:
        [bs] int64, in the caller's order.
    Raises:
        ConfigError: a dtype, shape or device that cannot work.

    Example: page_size 4, seq_lens [9, 7], last_loc [15, 21], new_slots [5] -> [20, 22].
    """
    by_triton = last_loc.is_cuda
    if not checked:
        _check_batch(last_loc, new_slots, page_size, run, seq_lens=seq_lens)
        operands = {"seq_lens": seq_lens, "last_loc": last_loc, "new_slots": new_slots}
        by_triton = use_triton(alloc_decode_kernel, backend, operands)
    first, count = (0, new_slots.numel()) if run is None else run
    if not by_triton:
        return alloc_decode_ref(seq_lens, last_loc, new_slots[first : first + count], page_size)
    bs = last_loc.numel()
    out = torch.empty_like(last_loc)
    if bs:
        block = max(16, min(_BLOCK_REQUESTS, next_power_of_2(bs)))
        _decode(
            last_loc,
            (cdiv(bs, block), 1),
            (seq_lens, last_loc, new_slots, out),
            (bs, first, count),
            (page_size, block),
            num_warps=max(1, min(_MOST_WARPS, block // _REQUESTS_A_WARP)),
        )
    return out


def _check_batch(
    last_loc: Tensor,
    new_slots: Tensor,
    page_size: int,
    run: tuple[int, int] | None,
    **lens: Tensor,
) -> None:
    """Checks what both launchers share."""
    check_positive("page_size", page_size)
    bs = last_loc.numel()
    for name, tensor in {**lens, "last_loc": last_loc, "new_slots": new_slots}.items():
        check_tensor(name, tensor, 1, (torch.int64,))
        check_contiguous(name, tensor)
        if not (name == "new_slots" or tensor.numel() == bs):
            raise ConfigError(f"{name} must have {bs} entries as last_loc has, got {tensor.numel()}")
    if run is not None and not (min(run) >= 0 and sum(run) <= new_slots.numel()):
        raise ConfigError(f"run must be (first, count) within the {new_slots.numel()} new_slots, got {run}")
