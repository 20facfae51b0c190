# mypy: ignore-errors
"""SGLang's ragged list of key rows, rewritten where pages lie elsewhere than their ids say. In place, one launch.

Example: page_size 4, a request of 6 tokens whose pages begin at locations 40 and 12: its entries become 40, 41, 42, 43,
12, 13. Entries of padded rows of a captured batch become 0 and up, the sink page.
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
    tl,
    triton,
    use_triton,
)
from tidekv.kernels.launch import Launcher

_BLOCK = 1024
_DTYPES = (torch.int32, torch.int64)


# Tables begin and end anywhere: a kernel compiled for each alignment would be compiled in the middle of serving. The
# page size is a constant, since a division by a run-time int64 costs more than all the rest.
@triton.jit(do_not_specialize=list(range(5)))
def fill_rows_kernel(out, indptr, first_locs, num_requests, num_columns, PAGE_SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Program (b, c) writes entries [c * BLOCK, (c + 1) * BLOCK) of request b."""
    b = tl.program_id(0).to(tl.int64)
    begin = tl.load(indptr + b).to(tl.int64)
    length = tl.load(indptr + b + 1).to(tl.int64) - begin
    t = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = t < length
    column = t // PAGE_SIZE
    known = tl.where(b < num_requests, num_columns, 0)  # padded rows know no page
    first = tl.load(first_locs + b * num_columns + column, mask=inside & (column < known), other=0)
    tl.store(out + begin + t, (first + t % PAGE_SIZE).to(out.dtype.element_ty), mask=inside)


_fill_rows = Launcher(fill_rows_kernel)


def fill_rows_ref_(out: Tensor, indptr: Tensor, first_locs: Tensor, page_size: int) -> Tensor:
    """Torch twin of `fill_rows_`."""
    begins = indptr.to(torch.int64)
    lens = begins[1:] - begins[:-1]
    total = int(lens.sum())
    request = torch.repeat_interleave(torch.arange(len(lens), device=out.device), lens)
    t = torch.arange(total, device=out.device) - begins[:-1][request]
    known = (request < first_locs.shape[0]) & (t // page_size < first_locs.shape[1])
    first = torch.zeros_like(t)
    first[known] = first_locs[request[known], (t // page_size)[known]]
    out[:total] = (first + t % page_size).to(out.dtype)
    return out


def fill_rows_(
    out: Tensor, indptr: Tensor, first_locs: Tensor, page_size: int, max_len: int, *, backend: Backend = "auto"
) -> Tensor:
    """Writes the row of every token that each request reads, in place; returns `out`.

    Args:
        out: [>= indptr[-1]] int32 or int64, contiguous; what lies behind indptr[-1] is left alone.
        indptr: [R + 1] int32 or int64, from 0: request b owns entries [indptr[b], indptr[b + 1]).
        first_locs: [B, N] int64, contiguous: location of the first token of each page. Requests B..R-1 are padding.
        page_size: tokens a page.
        max_len: of the longest request, on the host; 1 or more.
    Raises:
        ConfigError: a dtype, shape or stride that cannot work.
    """
    check_positive("page_size", page_size)
    check_positive("max_len", max_len)
    check_tensor("out", out, 1, _DTYPES)
    check_tensor("indptr", indptr, 1, _DTYPES)
    check_tensor("first_locs", first_locs, 2, (torch.int64,))
    for name, tensor in (("out", out), ("indptr", indptr), ("first_locs", first_locs)):
        check_contiguous(name, tensor)
    num_requests, num_columns = first_locs.shape
    if indptr.numel() <= num_requests:
        raise ConfigError(f"indptr must have at least {num_requests + 1} entries, got {indptr.numel()}")
    if not use_triton(fill_rows_kernel, backend, {"out": out, "indptr": indptr, "first_locs": first_locs}):
        return fill_rows_ref_(out, indptr, first_locs, page_size)
    grid = (indptr.numel() - 1, cdiv(max_len, _BLOCK))
    _fill_rows(out, grid, (out, indptr, first_locs), (num_requests, num_columns), (page_size, _BLOCK), 4)
    return out
