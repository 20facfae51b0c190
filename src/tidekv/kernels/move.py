# mypy: ignore-errors
"""Everything that moves KV: `compact_cells` within pages, `copy_cells` for whole flat pages anywhere, `copy_rows` for
tokens. Decides nothing.

KV is moved as raw integer words, so any dtype arrives bit for bit (NaN payloads too) and no kernel is compiled per
dtype. The word is the widest integer that divides the run and the addresses: int64 for every ordinary geometry, so
that a thread's access is 16 bytes.
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
from tidekv.kernels.launch import Launcher

_WORDS = ((8, torch.int64), (4, torch.int32), (2, torch.int16), (1, torch.int8))
# 8 KiB of K and 8 KiB of V in flight a program: with 4 warps four 16-byte accesses each for K and for V a thread
_BLOCK_WORDS = 1024
_WORDS_A_WARP = 256
# What hides the latency of the link is bytes under way: 64 KiB of them bring half of its rate, 128 KiB 0.88, 256 KiB
# 0.92 (one H200, 4, 8 and 16 programs of 1,024 words). So the fewer programs, the more each of them carries: 4 of 4,096
# words bring 0.92 too.
_WORDS_UNDER_WAY = 16 * 1024  # of K, and as many of V
_MOST_WORDS = 4096  # of a program: 16 warps of 32 data registers a thread
# Rows of 2,048 tokens on their way to the host: with a program for every 4 of them a matmul beside it takes 1.7 times
# as long as beside a plain copy, decode attention 2.3 times; with 16 programs 1.11 and 1.68, with 8 1.05 and 1.13, with
# 4 1.02 and 1.00, at 0.94, 0.94, 0.94 and 0.92 of the link (one H200, rows of 2 KiB).
HOST_WRITE_PROGRAMS = 4


def link_programs(page_bytes: int) -> int:
    """How many programs of `copy_cells` keep a PCIe link busy and leave the other SMs alone; `page_bytes` of K a page.

    One H200, pages of 32 and 128 KiB: 4 programs bring 92 % of the pinned link, as a full grid does, and decode
    attention takes no longer beside them than beside a plain copy (1.06 of its time alone; 1.10 beside 16 programs).
    Beside a matmul they keep 44 GB/s where 16 keep 38: fewer of them wait behind its blocks. A program carries at most
    a page at a time, so small pages take more of them.
    """
    return max(4, min(16, cdiv(8 * _WORDS_UNDER_WAY, page_bytes)))


@triton.jit
def compact_cells_kernel(k, v, combined, factor, new_width, page_stride, page_words, num_chunks, BLOCK: tl.constexpr):
    """A program owns BLOCK words of every cell of one slot and walks the cells upwards.

    Cell j is overwritten after it was read as the source of j // f (j // f < j for f >= 2), by the same program and
    the same lanes: loads and stores of one block share a layout, so no barrier is needed between the read of a word
    and its later overwrite.
    """
    pid = tl.program_id(0)
    slot = (pid // num_chunks).to(tl.int64)
    offs = (pid % num_chunks).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offs < page_words
    f = tl.load(factor + slot).to(tl.int64)
    base = tl.load(combined + slot)
    if f > 1:
        for j in range(1, new_width):
            # int64: 80 cells * 1M pages * 4096 words > 2**31
            src = (base + f * j * page_stride) * page_words + offs
            dst = (base + j * page_stride) * page_words + offs
            k_words = tl.load(k + src, mask=inside)
            v_words = tl.load(v + src, mask=inside)
            tl.store(k + dst, k_words, mask=inside)
            tl.store(v + dst, v_words, mask=inside)


def compact_cells_ref(
    k_flat: Tensor, v_flat: Tensor, combined: Tensor, factor: Tensor, new_width: int, page_stride: int, page_size: int
) -> None:
    """Torch twin of `compact_cells_kernel`: one gather and one scatter a cell; see `compact_cells`."""
    moving = factor > 1
    base, step = combined[moving], factor[moving].to(torch.int64) * page_stride
    for flat in (k_flat, v_flat):
        pages = _words(flat, page_size)
        for j in range(
            1, new_width
        ):  # ascending: cell j is read (as the source of j // factor) before it is overwritten
            pages[base + j * page_stride] = pages[base + j * step]


def compact_cells(
    k_flat: Tensor,
    v_flat: Tensor,
    combined: Tensor,
    factor: Tensor,
    new_width: int,
    page_stride: int,
    page_size: int,
    *,
    backend: Backend = "auto",
) -> None:
    """Halves slots within their pages: cell j of each slot gets what its cell j * factor held, for j in [1,
    new_width), in place.

    Args:
        k_flat, v_flat: [rows, num_kv_heads, head_dim], any dtype, contiguous; flat page f is rows [f * page_size, (f +
            1) * page_size).
        combined: [n] int64, the slots, distinct. factor: [n] int32, 2 for one halving, 4 for two at once, 1 to leave
            the slot alone.
        new_width: cells to fill. A slot must have been at least (new_width - 1) * factor + 1 cells wide.
        page_stride: P + 1, flat pages from one cell to the next. page_size: tokens a page.
    Raises:
        ConfigError: a dtype, shape, stride or device that cannot work.

    Example: L = 8, page_stride 11, combined 3, factor 2, new_width 4: flat pages 14, 25, 36 get what 25, 47, 69 held.
    """
    check_positive("page_stride", page_stride)
    check_positive("new_width", new_width)
    _check_flat_pair("k_flat", k_flat, "v_flat", v_flat, page_size)
    check_tensor("combined", combined, 1, (torch.int64,))
    check_tensor("factor", factor, 1, (torch.int32,))
    require(combined.is_contiguous() and factor.is_contiguous(), "combined and factor must be contiguous")
    require(
        combined.numel() == factor.numel(),
        lambda: f"combined has {combined.numel()} slots but factor has {factor.numel()}",
    )
    if not use_triton(
        compact_cells_kernel, backend, {"k_flat": k_flat, "v_flat": v_flat, "combined": combined, "factor": factor}
    ):
        compact_cells_ref(k_flat, v_flat, combined, factor, new_width, page_stride, page_size)
        return
    if combined.numel() == 0 or new_width == 1:
        return
    (k_words, v_words), page_words = _as_words((k_flat, v_flat), _page_bytes(k_flat, page_size))
    num_chunks = cdiv(page_words, _BLOCK_WORDS)
    with on_device(k_flat):
        compact_cells_kernel[(combined.numel() * num_chunks,)](
            k_words,
            v_words,
            combined,
            factor,
            new_width,
            page_stride,
            page_words,
            num_chunks,
            BLOCK=_BLOCK_WORDS,
            num_stages=1,
        )


@triton.jit
def _copy_item(dst_k, dst_v, src_k, src_v, dst_pages, src_pages, item, page_words, num_chunks, BLOCK: tl.constexpr):
    """BLOCK words of one page, of K and of V."""
    which = item // num_chunks
    offs = (item % num_chunks).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offs < page_words
    src = tl.load(src_pages + which) * page_words + offs
    dst = tl.load(dst_pages + which) * page_words + offs
    k_words = tl.load(src_k + src, mask=inside)
    v_words = tl.load(src_v + src, mask=inside)
    tl.store(dst_k + dst, k_words, mask=inside)
    tl.store(dst_v + dst, v_words, mask=inside)


@triton.jit(do_not_specialize=["num_items"])
def copy_cells_kernel(
    dst_k, dst_v, src_k, src_v, dst_pages, src_pages, num_items, page_words, num_chunks, BLOCK: tl.constexpr
):
    """Persistent: program p takes items p, p + programs, ..."""
    for item in range(tl.program_id(0), num_items, tl.num_programs(0)):
        _copy_item(dst_k, dst_v, src_k, src_v, dst_pages, src_pages, item, page_words, num_chunks, BLOCK)


@triton.jit
def copy_listed_cells_kernel(
    dst_k, dst_v, src_k, src_v, dst_pages, src_pages, bounds, page_words, num_chunks, BLOCK: tl.constexpr
):
    """`copy_cells_kernel` for entries [bounds[0], bounds[1]) of the lists: a captured launch copies as many pages as
    the lists hold when it is replayed."""
    begin = tl.load(bounds) * num_chunks + tl.program_id(0)
    end = tl.load(bounds + 1) * num_chunks
    for item in range(begin, end, tl.num_programs(0)):
        _copy_item(dst_k, dst_v, src_k, src_v, dst_pages, src_pages, item, page_words, num_chunks, BLOCK)


_cells, _listed_cells = Launcher(copy_cells_kernel), Launcher(copy_listed_cells_kernel)


def copy_cells_ref(
    dst_k: Tensor, dst_v: Tensor, src_k: Tensor, src_v: Tensor, dst_pages: Tensor, src_pages: Tensor, page_size: int
) -> None:
    """Torch twin of `copy_cells_kernel`; also between devices. See `copy_cells`."""
    for dst, src in ((dst_k, src_k), (dst_v, src_v)):
        moved = _words(src, page_size).index_select(0, src_pages.to(src.device)).to(dst.device)
        _words(dst, page_size).index_copy_(0, dst_pages.to(dst.device), moved)


def copy_cells(
    dst_k: Tensor,
    dst_v: Tensor,
    src_k: Tensor,
    src_v: Tensor,
    dst_pages: Tensor,
    src_pages: Tensor,
    page_size: int,
    *,
    bounds: Tensor | None = None,
    max_programs: int | None = None,
    backend: Backend = "auto",
) -> None:
    """Copies whole flat pages, K and V, between any two flat buffers: device to device, to and from pinned host memory.

    Args:
        dst_k, dst_v, src_k, src_v: [rows, num_kv_heads, head_dim], one dtype, contiguous, on the device or pinned on
            the host. Where source and destination are one buffer, the two sets of pages must be disjoint.
        dst_pages, src_pages: [m] int64 flat pages, on the device if any buffer is there; dst_pages distinct.
        page_size: tokens a page.
        bounds: [2] int64 on the device: entries [bounds[0], bounds[1]) of the lists are copied, read when the copy
            runs, so that a captured launch follows what the lists hold at each replay; needs `max_programs`. None: all.
        max_programs: at most this many thread blocks, so that a transfer over PCIe leaves the other SMs to compute.
            None: as many as there is work.
    Raises:
        ConfigError: a dtype, shape, stride or device that cannot work, host memory that is not pinned.
    """
    _check_flat_pair("dst_k", dst_k, "dst_v", dst_v, page_size)
    _check_flat_pair("src_k", src_k, "src_v", src_v, page_size)
    require(
        dst_k.dtype == src_k.dtype and dst_k.shape[1:] == src_k.shape[1:],
        lambda: (
            f"dst and src must hold the same rows, got {dst_k.dtype} {tuple(dst_k.shape[1:])} "
            f"and {src_k.dtype} {tuple(src_k.shape[1:])}"
        ),
    )
    for name, pages in (("dst_pages", dst_pages), ("src_pages", src_pages)):
        check_tensor(name, pages, 1, (torch.int64,))
        check_contiguous(name, pages)
    require(
        dst_pages.numel() == src_pages.numel(),
        lambda: f"dst_pages has {dst_pages.numel()} pages but src_pages has {src_pages.numel()}",
    )
    if max_programs is not None:
        check_positive("max_programs", max_programs)
    if bounds is not None:
        check_tensor("bounds", bounds, 1, (torch.int64,))
        require(bounds.numel() == 2, lambda: f"bounds must have 2 entries, got {bounds.numel()}")
        require(max_programs is not None, "with bounds the host does not know the work: give max_programs")
    flats = {"dst_k": dst_k, "dst_v": dst_v, "src_k": src_k, "src_v": src_v}
    if not use_triton(
        copy_cells_kernel, backend, {**flats, "dst_pages": dst_pages, "src_pages": src_pages}, may_be_host=flats
    ):
        if bounds is not None:
            begin, end = bounds.tolist()
            dst_pages, src_pages = dst_pages[begin:end], src_pages[begin:end]
        copy_cells_ref(dst_k, dst_v, src_k, src_v, dst_pages, src_pages, page_size)
        return
    if dst_pages.numel() == 0:
        return
    words, page_words = _as_words(tuple(flats.values()), _page_bytes(dst_k, page_size))
    block = _BLOCK_WORDS
    if max_programs is not None:
        wanted = min(_MOST_WORDS, next_power_of_2(page_words), next_power_of_2(cdiv(_WORDS_UNDER_WAY, max_programs)))
        block = max(block, wanted)
    num_chunks = cdiv(page_words, block)
    num_items = dst_pages.numel() * num_chunks
    num_warps = block // _WORDS_A_WARP
    if bounds is not None:
        tensors = (*words, dst_pages, src_pages, bounds)
        _listed_cells(dst_pages, (max_programs, 1), tensors, (page_words, num_chunks), (block,), num_warps)
        return
    grid = (min(num_items, max_programs or num_items), 1)
    _cells(dst_pages, grid, (*words, dst_pages, src_pages), (num_items, page_words, num_chunks), (block,), num_warps)


@triton.jit(do_not_specialize=["num_rows"])  # else 1 row and multiples of 16 are compiled apart, while serving
def copy_rows_kernel(
    dst_k,
    dst_v,
    src_k,
    src_v,
    dst_rows,
    src_rows,
    num_rows,
    k_row_stride,
    k_head_stride,
    v_row_stride,
    v_head_stride,
    row_words,
    HEAD_WORDS: tl.constexpr,
    HAS_SRC_ROWS: tl.constexpr,
    PACKED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Persistent: program (p, c) copies words [c * BLOCK, (c + 1) * BLOCK) of ROWS rows, then of the next ROWS that no
    other program takes; strides are in words."""
    offs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    if PACKED:
        k_offs = offs
        v_offs = offs
    else:
        head = (offs // HEAD_WORDS).to(tl.int64)
        k_offs = head * k_head_stride + offs % HEAD_WORDS
        v_offs = head * v_head_stride + offs % HEAD_WORDS
    for first in range(tl.program_id(0) * ROWS, num_rows, tl.num_programs(0) * ROWS):
        t = first + tl.arange(0, ROWS)
        dst_row = tl.load(dst_rows + t, mask=t < num_rows, other=-1)
        src_row = t.to(tl.int64)
        if HAS_SRC_ROWS:
            src_row = tl.load(src_rows + t, mask=t < num_rows, other=0)
        inside = (dst_row >= 0)[:, None] & (offs < row_words)[None, :]
        k_words = tl.load(src_k + src_row[:, None] * k_row_stride + k_offs[None, :], mask=inside)
        v_words = tl.load(src_v + src_row[:, None] * v_row_stride + v_offs[None, :], mask=inside)
        to = dst_row[:, None] * row_words + offs[None, :]
        tl.store(dst_k + to, k_words, mask=inside)
        tl.store(dst_v + to, v_words, mask=inside)


_rows = Launcher(copy_rows_kernel)


def copy_rows_ref(
    dst_k: Tensor, dst_v: Tensor, src_k: Tensor, src_v: Tensor, dst_rows: Tensor, src_rows: Tensor | None = None
) -> None:
    """Torch twin of `copy_rows_kernel`; also between devices. See `copy_rows`."""
    kept = dst_rows >= 0
    to = dst_rows[kept]
    rows = torch.nonzero(kept).squeeze(1) if src_rows is None else src_rows[kept]
    for dst, src in ((dst_k, src_k), (dst_v, src_v)):
        moved = _words(src.index_select(0, rows.to(src.device)), 1)
        _words(dst, 1).index_copy_(0, to.to(dst.device), moved.to(dst.device))


def copy_rows(
    dst_k: Tensor,
    dst_v: Tensor,
    src_k: Tensor,
    src_v: Tensor,
    dst_rows: Tensor,
    src_rows: Tensor | None = None,
    *,
    max_programs: int | None = None,
    backend: Backend = "auto",
) -> None:
    """Scatters rows (one token of one layer: [num_kv_heads, head_dim]) of K and V into flat tensors.

    Args:
        dst_k, dst_v: [rows, num_kv_heads, head_dim], contiguous, on the device or pinned on the host.
        src_k, src_v: [S, num_kv_heads, head_dim], the same dtype; any row and head strides (a transposed projection
            needs no copy), head_dim adjacent.
        dst_rows: [t] int64, flat rows, distinct among those >= 0 (the sink's rows may repeat); a negative row skips
            its token.
        src_rows: [t] int64 rows of the source; None: token i is row i, and t = S.
        max_programs: at most so many thread blocks (times the pieces of 8 KiB that a row has). None: one a row, or
            `HOST_WRITE_PROGRAMS` if the rows go to the host.
    Raises:
        ConfigError: a dtype, shape, stride or device that cannot work, host memory that is not pinned.
    """
    _check_flat_pair("dst_k", dst_k, "dst_v", dst_v, 1)
    check_tensor("src_k", src_k, 3, (dst_k.dtype,))
    check_tensor("src_v", src_v, 3, (dst_k.dtype,))
    require(
        src_k.shape == src_v.shape and src_k.shape[1:] == dst_k.shape[1:],
        lambda: (
            f"src_k {tuple(src_k.shape)} and src_v {tuple(src_v.shape)} must be alike, "
            f"with rows of {tuple(dst_k.shape[1:])} as dst has"
        ),
    )
    check_tensor("dst_rows", dst_rows, 1, (torch.int64,))
    require(dst_rows.is_contiguous(), lambda: f"dst_rows must be contiguous, got strides {dst_rows.stride()}")
    if src_rows is None:
        require(
            dst_rows.numel() == src_k.shape[0],
            lambda: f"without src_rows, dst_rows must have {src_k.shape[0]} entries, got {dst_rows.numel()}",
        )
    else:
        check_tensor("src_rows", src_rows, 1, (torch.int64,))
        require(src_rows.is_contiguous(), lambda: f"src_rows must be contiguous, got strides {src_rows.stride()}")
        require(
            src_rows.numel() == dst_rows.numel(),
            lambda: f"src_rows has {src_rows.numel()} entries but dst_rows has {dst_rows.numel()}",
        )
    if max_programs is not None:
        check_positive("max_programs", max_programs)
    flats = {"dst_k": dst_k, "dst_v": dst_v, "src_k": src_k, "src_v": src_v}
    if not use_triton(
        copy_rows_kernel, backend, {**flats, "dst_rows": dst_rows, "src_rows": src_rows}, may_be_host=flats
    ):
        copy_rows_ref(dst_k, dst_v, src_k, src_v, dst_rows, src_rows)
        return
    if dst_rows.numel() == 0 or dst_k[0].numel() == 0:
        return
    require(
        src_k.stride(2) == 1 and src_v.stride(2) == 1,
        lambda: f"src rows must have head_dim adjacent, got strides {src_k.stride()}, {src_v.stride()}",
    )
    itemsize, num_heads, head_dim = dst_k.element_size(), dst_k.shape[1], dst_k.shape[2]
    strides = [s for src in (src_k, src_v) for s in src.stride()[:2]]
    packed = all(src.stride(1) == head_dim or num_heads == 1 for src in (src_k, src_v))
    # One word must divide a head's run and every stride, or a row would begin inside a word.
    word_bytes, word = _widest_word(
        (dst_k, dst_v, src_k, src_v), [head_dim * itemsize, *(s * itemsize for s in strides)]
    )
    row_words = num_heads * head_dim * itemsize // word_bytes
    block = min(1024, next_power_of_2(row_words))
    num_rows = dst_rows.numel()
    if max_programs is None and dst_rows.is_cuda and not dst_k.is_cuda:
        max_programs = HOST_WRITE_PROGRAMS
    rows = 1 if max_programs is None else max(1, _BLOCK_WORDS // block)
    turns = cdiv(num_rows, rows)
    _rows(
        dst_rows,
        (min(turns, max_programs or turns), cdiv(row_words, block)),
        (
            dst_k.view(word),
            dst_v.view(word),
            _reinterpret(src_k, word),
            _reinterpret(src_v, word),
            dst_rows,
            dst_rows if src_rows is None else src_rows,
        ),
        (num_rows, *(s * itemsize // word_bytes for s in strides), row_words),
        (head_dim * itemsize // word_bytes, src_rows is not None, packed, rows, block),
        num_warps=max(1, min(4, rows * block // 64)),
    )


def _check_flat_pair(k_name: str, k: Tensor, v_name: str, v: Tensor, page_size: int) -> None:
    """K and V of one pool: the same shape and dtype, contiguous, whole pages."""
    check_positive("page_size", page_size)
    for name, flat in ((k_name, k), (v_name, v)):
        check_tensor(name, flat, 3, None)
        check_contiguous(name, flat)
        if not (flat.shape[0] % page_size == 0):
            raise ConfigError(f"{name} must hold whole pages of {page_size} rows, got {flat.shape[0]} rows")
    require(
        k.shape == v.shape and k.dtype == v.dtype,
        lambda: f"{k_name} and {v_name} must be alike, got {k.dtype} {tuple(k.shape)} and {v.dtype} {tuple(v.shape)}",
    )


def _page_bytes(flat: Tensor, page_size: int) -> int:
    return page_size * flat.shape[1] * flat.shape[2] * flat.element_size()


def _widest_word(tensors: tuple[Tensor, ...], runs_bytes: list[int]) -> tuple[int, torch.dtype]:
    """The widest integer (bytes, dtype) that divides every run, address and storage offset."""
    # data_ptr and storage offset both: torch views by offset from the storage, whose own base is 64-byte aligned
    # unless it came from outside. The lowest set bit of all of them is what divides all of them.
    low_bits = 0
    for run in runs_bytes:
        low_bits |= run
    for t in tensors:
        low_bits |= t.data_ptr() | (t.storage_offset() * t.element_size())
    return next((width, dtype) for width, dtype in _WORDS if low_bits % width == 0)


def _as_words(flats: tuple[Tensor, ...], run_bytes: int) -> tuple[list[Tensor], int]:
    """Views of contiguous tensors as integer words, and the words in a run of `run_bytes`."""
    width, word = _widest_word(flats, [run_bytes])
    row_ends_on_word = flats[0].shape[2] * flats[0].element_size() % width == 0
    return [(flat if row_ends_on_word else flat.view(-1)).view(word) for flat in flats], run_bytes // width


def _reinterpret(t: Tensor, word: torch.dtype) -> Tensor:
    """A [rows, heads, dim] tensor of any outer strides as words: only its address is used, the strides travel apart."""
    if t.element_size() == word.itemsize or t.is_contiguous():
        return t.view(word)
    return t.as_strided((t.shape[2],), (1,)).view(word)


def _words(flat: Tensor, page_size: int) -> Tensor:
    """[pages, bytes / itemsize] integer view of a contiguous flat tensor, so that twins move fp8 too (torch has no
    index_copy for it)."""
    same_size = next(dtype for width, dtype in _WORDS if width == flat.element_size())
    return flat.view(same_size).view(-1, page_size * flat.shape[1] * flat.shape[2])
