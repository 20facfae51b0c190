# mypy: ignore-errors
"""Where each layer of a slot lies: page tables for attention and rows for writing tokens. Reads no KV.

    resident (j = resident_pos[level, layer] >= 0):  combined + j * page_stride           (the slot's j-th cell)
    staged   (j < 0):                                dynamic + position[layer] * page_stride  (one of the dynamic
    slot's two cells)

Example: L = 8, P = 10, page_stride 11, combined 47 at level 1 (layers 0, 2, 4, 6): layer 4 is its third layer, flat
page 47 + 2 * 11 = 69. Layer 5 is not resident: with dynamic slot 9 and position[5] = 1 it is read at flat page 9 + 11
= 20.
"""

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
    on_device,
    require,
    tl,
    triton,
    use_triton,
)

_BLOCK = 512
_LEVEL_DTYPES = (torch.uint8, torch.int8)


@triton.jit
def layer_tables_kernel(
    combined,
    dynamic,
    level,
    resident_pos,
    position,
    layers,
    out,
    num_entries,
    num_columns,
    combined_stride,
    dynamic_stride,
    level_stride,
    num_layers,
    page_stride,
    BLOCK: tl.constexpr,
):
    """Program (i, n) writes BLOCK entries of the table of layers[n]."""
    entry = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = entry < num_entries
    b = entry // num_columns
    n = entry % num_columns
    which = tl.program_id(1).to(tl.int64)
    layer = tl.load(layers + which)
    slot = tl.load(combined + b * combined_stride + n, mask=inside, other=0)
    staged = tl.load(dynamic + b * dynamic_stride + n, mask=inside, other=0)
    lv = tl.load(level + b * level_stride + n, mask=inside, other=0).to(tl.int64)
    # Padding (slot 0) counts as resident at j = 0, which gives flat page 0, the sink.
    j = tl.load(resident_pos + lv * num_layers + layer, mask=inside & (slot > 0), other=0).to(tl.int64)
    cell = tl.load(position + layer).to(tl.int64)
    page = tl.where(j >= 0, slot + j * page_stride, tl.where(staged > 0, staged + cell * page_stride, 0))
    tl.store(out + which * num_entries + entry, page, mask=inside)


def layer_tables_ref(
    combined: Tensor,
    dynamic: Tensor,
    level: Tensor,
    resident_pos: Tensor,
    position: Tensor,
    layers: Tensor,
    page_stride: int,
) -> Tensor:
    """Torch twin of `layer_tables_kernel`; see `layer_tables`."""
    j = resident_pos[:, layers].to(torch.int64)[level.to(torch.int64)].movedim(-1, 0)  # [n_layers, B, N]
    cell = position[layers].to(torch.int64)[:, None, None]
    staged = torch.where(dynamic > 0, dynamic + cell * page_stride, 0)
    page = torch.where(j >= 0, combined + j * page_stride, staged)
    return torch.where(combined > 0, page, 0)


def layer_tables(
    combined: Tensor,
    dynamic: Tensor,
    level: Tensor,
    resident_pos: Tensor,
    position: Tensor,
    layers: Tensor,
    page_stride: int,
    *,
    backend: Backend = "auto",
) -> Tensor:
    """Page tables of the given layers for the whole batch, in one launch.

    Args:
        combined: [B, N] int64, each logical page's slot; 0 is padding and gives 0 (the sink).
        dynamic: [B, N] int64, the slot's dynamic slot, 0 for none.
        level: [B, N] uint8 or int8, index of the slot's width in the ladder (0 = full).
        resident_pos: [num_levels, L] int32, the layer's cell within a slot of that level, -1 when it is not resident.
        position: [L] int32, the cell (0 or 1) of a dynamic slot that stages this layer.
        layers: [n_layers] int64.
        page_stride: P + 1, flat pages from one cell to the next.
    Returns:
        [n_layers, B, N] int64 flat pages. A non-resident layer of a slot with no dynamic slot gives 0.
    Raises:
        ConfigError: a dtype, shape, stride or device that cannot work.
    """
    check_positive("page_stride", page_stride)
    check_tensor("combined", combined, 2, (torch.int64,))
    check_tensor("dynamic", dynamic, 2, (torch.int64,))
    check_tensor("level", level, 2, _LEVEL_DTYPES)
    check_tensor("layers", layers, 1, (torch.int64,))
    _check_layer_maps(resident_pos, position)
    for name, tensor in (("dynamic", dynamic), ("level", level)):
        if not (tensor.shape == combined.shape):
            raise ConfigError(f"{name} must have combined's shape {tuple(combined.shape)}, got {tuple(tensor.shape)}")
    num_rows, num_columns = combined.shape
    for name, tensor in (("combined", combined), ("dynamic", dynamic), ("level", level)):
        check_columns(name, tensor)
    operands = {
        "combined": combined,
        "dynamic": dynamic,
        "level": level,
        "resident_pos": resident_pos,
        "position": position,
        "layers": layers,
    }
    if not use_triton(layer_tables_kernel, backend, operands):
        return layer_tables_ref(combined, dynamic, level, resident_pos, position, layers, page_stride)
    out = torch.empty((layers.numel(), num_rows, num_columns), dtype=torch.int64, device=combined.device)
    if out.numel():
        with on_device(combined):
            layer_tables_kernel[(cdiv(num_rows * num_columns, _BLOCK), layers.numel())](
                combined,
                dynamic,
                level,
                resident_pos,
                position,
                layers.contiguous(),
                out,
                num_rows * num_columns,
                num_columns,
                combined.stride(0),
                dynamic.stride(0),
                level.stride(0),
                position.numel(),
                page_stride,
                BLOCK=_BLOCK,
            )
    return out


# first_layer changes from call to call: specialising on its value 1, or on divisibility by 16, would compile the
# kernel three times for nothing.
@triton.jit(do_not_specialize=["first_layer"])
def token_rows_kernel(
    locs,
    dynamic_locs,
    level,
    resident_pos,
    position,
    out,
    num_tokens,
    first_layer,
    num_layers,
    row_stride,
    BLOCK: tl.constexpr,
):
    """Program (i, n) writes BLOCK tokens of layer first_layer + n."""
    layer = first_layer + tl.program_id(1)
    t = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = t < num_tokens
    loc = tl.load(locs + t, mask=inside, other=0)
    staged = tl.load(dynamic_locs + t, mask=inside, other=0)
    lv = tl.load(level + t, mask=inside, other=0).to(tl.int64)
    j = tl.load(resident_pos + lv * num_layers + layer, mask=inside, other=0).to(tl.int64)
    cell = tl.load(position + layer).to(tl.int64)
    tl.store(
        out + tl.program_id(1).to(tl.int64) * num_tokens + t,
        tl.where(j >= 0, loc + j * row_stride, staged + cell * row_stride),
        mask=inside,
    )


def token_rows_ref(
    locs: Tensor,
    dynamic_locs: Tensor | None,
    level: Tensor | None,
    layer: int | None,
    resident_pos: Tensor,
    position: Tensor,
    row_stride: int,
) -> Tensor:
    """Torch twin of `token_rows_kernel`; see `token_rows`."""
    if layer is None:
        every = range(position.numel())
        rows = [token_rows_ref(locs, dynamic_locs, level, n, resident_pos, position, row_stride) for n in every]
        return torch.stack(rows)
    if dynamic_locs is None or level is None:
        return locs + layer * row_stride
    j = resident_pos[:, layer].to(torch.int64)[level.to(torch.int64)]
    return torch.where(j >= 0, locs + j * row_stride, dynamic_locs + position[layer].to(torch.int64) * row_stride)


def token_rows(
    locs: Tensor,
    dynamic_locs: Tensor | None,
    level: Tensor | None,
    layer: int | None,
    resident_pos: Tensor,
    position: Tensor,
    row_stride: int,
    *,
    backend: Backend = "auto",
) -> Tensor:
    """The flat row where each token's K and V of `layer` are written; of every layer, in one launch, if it is None.

    Args:
        locs: [T] int64, encoded.
        dynamic_locs: [T] int64, encoded location in a dynamic slot, 0 (the sink) for tokens of full-width slots; None
            when all are full width.
        level: [T] uint8 or int8, index of the slot's width in the ladder; None when all are full width.
        layer: 0 <= layer < L, or None.
        resident_pos: [num_levels, L] int32; position: [L] int32; as in `layer_tables`.
        row_stride: (P + 1) * page_size, rows from one cell to the next.
    Returns:
        [T] int64 flat rows; [L, T] for every layer.
    Raises:
        ConfigError: a dtype, shape, stride or device that cannot work.
    """
    check_positive("row_stride", row_stride)
    check_tensor("locs", locs, 1, (torch.int64,))
    _check_layer_maps(resident_pos, position)
    require(
        layer is None or 0 <= layer < position.numel(), lambda: f"layer must be in [0, {position.numel()}), got {layer}"
    )
    require(
        (dynamic_locs is None) == (level is None),
        "dynamic_locs and level must be given together, or neither for a full-width batch",
    )
    if dynamic_locs is None:
        # full width: an ordinary paged cache, no kernel of ours
        return token_rows_ref(locs, None, None, layer, resident_pos, position, row_stride)
    check_tensor("dynamic_locs", dynamic_locs, 1, (torch.int64,))
    check_tensor("level", level, 1, _LEVEL_DTYPES)
    for name, tensor in (("locs", locs), ("dynamic_locs", dynamic_locs), ("level", level)):
        if not (tensor.numel() == locs.numel()):
            raise ConfigError(f"{name} must have {locs.numel()} entries as locs has, got {tensor.numel()}")
        check_contiguous(name, tensor)
    operands = {
        "locs": locs,
        "dynamic_locs": dynamic_locs,
        "level": level,
        "resident_pos": resident_pos,
        "position": position,
    }
    if not use_triton(token_rows_kernel, backend, operands):
        return token_rows_ref(locs, dynamic_locs, level, layer, resident_pos, position, row_stride)
    num_layers = position.numel() if layer is None else 1
    out = locs.new_empty((num_layers, locs.numel()))
    if locs.numel():
        with on_device(locs):
            token_rows_kernel[(cdiv(locs.numel(), _BLOCK), num_layers)](
                locs,
                dynamic_locs,
                level,
                resident_pos,
                position,
                out,
                locs.numel(),
                layer or 0,
                position.numel(),
                row_stride,
                BLOCK=_BLOCK,
            )
    return out if layer is None else out[0]


def _check_layer_maps(resident_pos: Tensor, position: Tensor) -> None:
    check_tensor("resident_pos", resident_pos, 2, (torch.int32,))
    check_tensor("position", position, 1, (torch.int32,))
    require(resident_pos.is_contiguous() and position.is_contiguous(), "resident_pos and position must be contiguous")
    require(
        resident_pos.shape[1] == position.numel(),
        lambda: f"resident_pos and position must have one length L, got {resident_pos.shape[1]} and {position.numel()}",
    )
