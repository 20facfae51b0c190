# mypy: ignore-errors
"""Rewrites locations after slots moved. One lookup table over combined ids serves every holder: loc -> lut[loc // ps]
* ps + loc % ps.

Example: page_size 4, slot 47 moved to slot 14 (lut[47] = 14): loc 190 = 47 * 4 + 2 becomes 14 * 4 + 2 = 58. The sink
stays: lut[0] = 0. A negative loc means "none" and is left alone.
"""

import torch
from torch import Tensor

from tidekv.kernels import (
    Backend,
    cdiv,
    check_columns,
    check_positive,
    check_tensor,
    on_device,
    require,
    tl,
    triton,
    use_triton,
)

_BLOCK = 1024
_LOC_DTYPES = (torch.int32, torch.int64)


@triton.jit
def remap_kernel(
    locs, rows, lut, row_stride, row_len, num_combined, page_size, HAS_ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    """Program (c, i) rewrites columns [c * BLOCK, (c + 1) * BLOCK) of row rows[i]."""
    base = locs
    if HAS_ROWS:
        base = locs + tl.load(rows + tl.program_id(1)) * row_stride
    col = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = col < row_len
    loc = tl.load(base + col, mask=inside, other=-1).to(tl.int64)
    combined = loc // page_size
    known = (
        inside & (loc >= 0) & (combined < num_combined)
    )  # a loc outside the table is a bug that must not become a wild read
    moved = tl.load(lut + combined, mask=known, other=0) * page_size + loc % page_size
    tl.store(base + col, moved.to(locs.dtype.element_ty), mask=known)


def remap_locs_ref_(locs: Tensor, lut: Tensor, page_size: int) -> Tensor:
    """Torch twin of `remap_locs_`."""
    wide = locs.to(torch.int64)
    moved = lut[(wide // page_size).clamp_min(0)] * page_size + wide % page_size
    return locs.copy_(torch.where(wide >= 0, moved, wide))


def remap_locs_(locs: Tensor, lut: Tensor, page_size: int, *, backend: Backend = "auto") -> Tensor:
    """Remaps every location of `locs` in place and returns it.

    Args:
        locs: any shape, int32 or int64, contiguous.
        lut: [num_combined] int64, new combined id of each combined id; lut[0] = 0, unmoved slots map to themselves.
        page_size: tokens a page.
    Raises:
        ConfigError: a dtype, stride or device that cannot work.
    """
    check_tensor("locs", locs, None, _LOC_DTYPES)
    require(
        locs.is_contiguous(),
        lambda: f"locs must be contiguous, got strides {locs.stride()}; use remap_rows_ for part of a matrix",
    )
    _check_lut(lut, page_size)
    if not use_triton(remap_kernel, backend, {"locs": locs, "lut": lut}):
        return remap_locs_ref_(locs, lut, page_size)
    if locs.numel():
        with on_device(locs):
            grid = (cdiv(locs.numel(), _BLOCK), 1)
            remap_kernel[grid](locs, lut, lut, 0, locs.numel(), lut.numel(), page_size, HAS_ROWS=False, BLOCK=_BLOCK)
    return locs


def remap_rows_ref_(req_to_token: Tensor, rows: Tensor, max_len: int, lut: Tensor, page_size: int) -> Tensor:
    """Torch twin of `remap_rows_`."""
    part = req_to_token[rows, :max_len]  # a copy: rows are gathered
    req_to_token[rows, :max_len] = remap_locs_ref_(part, lut, page_size)
    return req_to_token


def remap_rows_(
    req_to_token: Tensor, rows: Tensor, max_len: int, lut: Tensor, page_size: int, *, backend: Backend = "auto"
) -> Tensor:
    """Remaps the first `max_len` columns of the given rows in place and returns `req_to_token`.

    Args:
        req_to_token: [R, C] int32 or int64, columns adjacent in memory.
        rows: [n] int64, live rows, distinct (a row named twice would be remapped twice).
        max_len: columns to rewrite, 0 <= max_len <= C; the longest live request's tokens.
        lut: [num_combined] int64, as in `remap_locs_`.
        page_size: tokens a page.
    Raises:
        ConfigError: a dtype, shape, stride or device that cannot work.
    """
    check_tensor("req_to_token", req_to_token, 2, _LOC_DTYPES)
    check_tensor("rows", rows, 1, (torch.int64,))
    _check_lut(lut, page_size)
    check_columns("req_to_token", req_to_token)
    require(rows.is_contiguous(), lambda: f"rows must be contiguous, got strides {rows.stride()}")
    require(
        0 <= max_len <= req_to_token.shape[1], lambda: f"max_len must be in [0, {req_to_token.shape[1]}], got {max_len}"
    )
    if not use_triton(remap_kernel, backend, {"req_to_token": req_to_token, "rows": rows, "lut": lut}):
        return remap_rows_ref_(req_to_token, rows, max_len, lut, page_size)
    if rows.numel() and max_len:
        # Rows go to grid dimension y, which ends at 65535; a batch has at most a few thousand.
        require(rows.numel() <= 65535, lambda: f"rows must have at most 65535 entries, got {rows.numel()}")
        with on_device(req_to_token):
            grid = (cdiv(max_len, _BLOCK), rows.numel())
            remap_kernel[grid](
                req_to_token,
                rows,
                lut,
                req_to_token.stride(0),
                max_len,
                lut.numel(),
                page_size,
                HAS_ROWS=True,
                BLOCK=_BLOCK,
            )
    return req_to_token


def _check_lut(lut: Tensor, page_size: int) -> None:
    check_positive("page_size", page_size)
    check_tensor("lut", lut, 1, (torch.int64,))
    require(lut.is_contiguous(), lambda: f"lut must be contiguous, got strides {lut.stride()}")
