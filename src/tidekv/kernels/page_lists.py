# mypy: ignore-errors
"""A batch's page table as the ragged lists that FlashInfer reads. Reads no KV.

Example, page_size 4: kv_lens [5, 4], table [[7, 3, 0], [9, 0, 0]] gives indices [7, 3, 9], indptr [0, 2, 3] and
last_page_len [1, 4].
"""

import torch
from torch import Tensor

from tidekv.kernels import (
    Backend,
    cdiv,
    check_columns,
    check_contiguous,
    check_positive,
    check_tensor,
    on_device,
    require,
    tl,
    triton,
    use_triton,
)

_BLOCK = 256
_BLOCK_B = 128


@triton.jit
def page_lists_kernel(
    table,
    kv_lens,
    indices,
    indptr,
    last_page_len,
    num_columns,
    capacity,
    table_stride,
    PAGE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_B: tl.constexpr,
):
    """Program (i, b) copies BLOCK entries of row b. Each counts the pages of the rows before its own again: 256 loads
    at 256 requests, where a scan would be a second launch."""
    b = tl.program_id(1)
    before = tl.zeros([BLOCK_B], dtype=tl.int32)
    for start in range(0, b, BLOCK_B):
        at = start + tl.arange(0, BLOCK_B)
        lens = tl.load(kv_lens + at, mask=at < b, other=0).to(tl.int32)
        before += (lens + PAGE_SIZE - 1) // PAGE_SIZE
    begin = tl.sum(before, 0)
    kv_len = tl.load(kv_lens + b).to(tl.int32)
    num_pages = (kv_len + PAGE_SIZE - 1) // PAGE_SIZE
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = (n < num_pages) & (n < num_columns) & (begin + n < capacity)
    page = tl.load(table + b.to(tl.int64) * table_stride + n, mask=inside, other=0)
    tl.store(indices + begin + n, page.to(tl.int32), mask=inside)
    if tl.program_id(0) == 0:
        tl.store(indptr + b + 1, begin + num_pages)
        tl.store(last_page_len + b, kv_len - (num_pages - 1) * PAGE_SIZE)
        if b == 0:
            tl.store(indptr, b)


def page_lists_ref(
    table: Tensor, kv_lens: Tensor, page_size: int, indices: Tensor, indptr: Tensor, last_page_len: Tensor
) -> None:
    """Torch twin of `page_lists_kernel`; see `page_lists`."""
    num_pages = (kv_lens + page_size - 1) // page_size
    mine = torch.arange(table.shape[1], device=table.device)[None, :] < num_pages[:, None]
    listed = table[mine][: indices.numel()]
    indices[: listed.numel()] = listed.to(torch.int32)
    indptr[0] = 0
    indptr[1:] = num_pages.cumsum(0).to(torch.int32)
    last_page_len.copy_(kv_lens - (num_pages - 1) * page_size)


def page_lists(
    table: Tensor,
    kv_lens: Tensor,
    page_size: int,
    indices: Tensor,
    indptr: Tensor,
    last_page_len: Tensor,
    *,
    backend: Backend = "auto",
) -> None:
    """Write the pages that each request has, one request after another, in one launch.

    Args:
        table: [B, N] int64 flat pages below 2**31; row b has cdiv(kv_lens[b], page_size) <= N of them.
        kv_lens: [B] int64, tokens of each request, at least 1.
        page_size: tokens a page.
        indices: [capacity] int32, written up to the number of pages; what does not fit is not written.
        indptr: [B + 1] int32, written: where each request's pages begin in `indices`.
        last_page_len: [B] int32, written: tokens in each request's last page, 1..page_size.
    Raises:
        ConfigError: a dtype, shape, stride or device that cannot work.
    """
    check_positive("page_size", page_size)
    check_tensor("table", table, 2, (torch.int64,))
    check_tensor("kv_lens", kv_lens, 1, (torch.int64,))
    num_requests, num_columns = table.shape
    check_columns("table", table)
    for name, tensor in (("indices", indices), ("indptr", indptr), ("last_page_len", last_page_len)):
        check_tensor(name, tensor, 1, (torch.int32,))
        check_contiguous(name, tensor)
    check_contiguous("kv_lens", kv_lens)
    require(
        kv_lens.numel() == last_page_len.numel() == num_requests and indptr.numel() == num_requests + 1,
        lambda: (
            f"table has {num_requests} requests: kv_lens and last_page_len need as many entries, indptr one more; got "
            f"{kv_lens.numel()}, {last_page_len.numel()} and {indptr.numel()}"
        ),
    )
    operands = {
        "table": table,
        "kv_lens": kv_lens,
        "indices": indices,
        "indptr": indptr,
        "last_page_len": last_page_len,
    }
    if not use_triton(page_lists_kernel, backend, operands):
        page_lists_ref(table, kv_lens, page_size, indices, indptr, last_page_len)
        return
    if num_requests == 0:
        indptr.zero_()
        return
    with on_device(table):
        page_lists_kernel[(max(1, cdiv(num_columns, _BLOCK)), num_requests)](
            table,
            kv_lens,
            indices,
            indptr,
            last_page_len,
            num_columns,
            indices.numel(),
            table.stride(0),
            PAGE_SIZE=page_size,
            BLOCK=_BLOCK,
            BLOCK_B=_BLOCK_B,
        )
