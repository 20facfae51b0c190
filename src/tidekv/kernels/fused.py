# mypy: ignore-errors
"""The small steps between a decoder layer's matrix products, each in one launch. CUDA only pays for launches, so the
CPU keeps the model library's own code.

At batch 32 of an 8B Llama on one H200 the library's separate kernels for these take 3 ms of a 10 ms step.
"""

import torch
from torch import Tensor

from tidekv.kernels import cdiv, next_power_of_2, require, tl, triton
from tidekv.kernels.launch import Launcher


@triton.jit
def rope_kernel(
    q, k, cos, sin, q_stride_t, q_stride_h, k_stride_t, k_stride_h, table_stride, HQ: tl.constexpr, HKV: tl.constexpr,
    HALF: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Program t rotates all heads of token t in place: (x1, x2) -> (x1 cos - x2 sin, x2 cos + x1 sin)."""
    t = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    inside_d = d < HALF
    c1 = tl.load(cos + t * table_stride + d, mask=inside_d, other=0.0).to(tl.float32)[None, :]
    s1 = tl.load(sin + t * table_stride + d, mask=inside_d, other=0.0).to(tl.float32)[None, :]
    c2 = tl.load(cos + t * table_stride + HALF + d, mask=inside_d, other=0.0).to(tl.float32)[None, :]
    s2 = tl.load(sin + t * table_stride + HALF + d, mask=inside_d, other=0.0).to(tl.float32)[None, :]
    h = tl.arange(0, BLOCK_H)
    in_q = (h < HQ)[:, None] & inside_d[None, :]
    at = q + t * q_stride_t + h[:, None].to(tl.int64) * q_stride_h + d[None, :]
    x1 = tl.load(at, mask=in_q, other=0.0).to(tl.float32)
    x2 = tl.load(at + HALF, mask=in_q, other=0.0).to(tl.float32)
    tl.store(at, (x1 * c1 - x2 * s1).to(q.dtype.element_ty), mask=in_q)
    tl.store(at + HALF, (x2 * c2 + x1 * s2).to(q.dtype.element_ty), mask=in_q)
    in_k = (h < HKV)[:, None] & inside_d[None, :]
    at = k + t * k_stride_t + h[:, None].to(tl.int64) * k_stride_h + d[None, :]
    x1 = tl.load(at, mask=in_k, other=0.0).to(tl.float32)
    x2 = tl.load(at + HALF, mask=in_k, other=0.0).to(tl.float32)
    tl.store(at, (x1 * c1 - x2 * s1).to(k.dtype.element_ty), mask=in_k)
    tl.store(at + HALF, (x2 * c2 + x1 * s2).to(k.dtype.element_ty), mask=in_k)


_rope = Launcher(rope_kernel)


def rope_ref_(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Torch twin of `rope_kernel`; see `rope_`."""
    for x in (q, k):
        half = x.shape[-1] // 2
        c, s = cos[:, None, :].float(), sin[:, None, :].float()
        wide = x.float()
        turned = torch.cat((-wide[..., half:], wide[..., :half]), dim=-1)
        x.copy_((wide * c + turned * s).to(x.dtype))


def rope_(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, use_triton: bool) -> None:
    """Rotary embedding of q [T, Hq, D] and k [T, Hkv, D], in place; cos, sin [T, D]. Any token and head strides.

    fp32 arithmetic, one rounding. Source: Su et al., RoFormer (arXiv 2104.09864), in the half-split layout.
    """
    require(q.stride(-1) == k.stride(-1) == 1, "q and k must have head_dim adjacent")
    require(cos.stride(-1) == sin.stride(-1) == 1 and cos.stride(0) == sin.stride(0), "cos and sin must be rows alike")
    if not use_triton:
        rope_ref_(q, k, cos, sin)
        return
    half = q.shape[-1] // 2
    strides = (q.stride(0), q.stride(1), k.stride(0), k.stride(1), cos.stride(0))
    heads = (q.shape[1], k.shape[1], half, next_power_of_2(max(q.shape[1], k.shape[1])), next_power_of_2(half))
    _rope(q, (q.shape[0],), (q, k, cos, sin), strides, heads)


@triton.jit
def silu_mul_kernel(gate_up, out, width, row_stride, BLOCK: tl.constexpr):
    """Program (row, block): out = silu(gate) * up, gate and up the two halves of a row."""
    row = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = d < width
    gate = tl.load(gate_up + row * row_stride + d, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * row_stride + width + d, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * width + d, (gate * tl.sigmoid(gate) * up).to(out.dtype.element_ty), mask=inside)


_silu_mul = Launcher(silu_mul_kernel)


def silu_mul_ref(gate_up: Tensor) -> Tensor:
    """Torch twin of `silu_mul_kernel`; see `silu_mul`."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (torch.nn.functional.silu(gate) * up).to(gate_up.dtype)


def silu_mul(gate_up: Tensor, *, use_triton: bool) -> Tensor:
    """[T, 2 * F] -> [T, F]: silu of the first half times the second. fp32 arithmetic, one rounding."""
    require(gate_up.dim() == 2 and gate_up.stride(1) == 1, "gate_up must be [T, 2F] with adjacent columns")
    if not use_triton:
        return silu_mul_ref(gate_up)
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((rows, width), dtype=gate_up.dtype, device=gate_up.device)
    _silu_mul(gate_up, (rows, cdiv(width, 1024)), (gate_up, out), (width, gate_up.stride(0)), (1024,))
    return out


@triton.jit
def add_rms_norm_kernel(
    x, residual, weight, out, width, EPS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, BLOCK: tl.constexpr
):
    """Program t: residual += x (if there is one), out = weight * rms_norm(residual), in fp32."""
    row = tl.program_id(0).to(tl.int64) * width
    d = tl.arange(0, BLOCK)
    inside = d < width
    value = tl.load(x + row + d, mask=inside, other=0.0)
    if HAS_RESIDUAL:
        value = (value.to(tl.float32) + tl.load(residual + row + d, mask=inside, other=0.0).to(tl.float32)).to(
            residual.dtype.element_ty
        )
        tl.store(residual + row + d, value, mask=inside)
    wide = value.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / width + EPS)
    normed = (wide * scale).to(out.dtype.element_ty)
    gain = tl.load(weight + d, mask=inside, other=0.0)
    tl.store(out + row + d, normed * gain, mask=inside)


_add_rms_norm = Launcher(add_rms_norm_kernel)


def add_rms_norm_ref(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    """Torch twin of `add_rms_norm_kernel`; see `add_rms_norm`."""
    if residual is not None:
        residual.add_(x)
        x = residual
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


def add_rms_norm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, *, use_triton: bool) -> Tensor:
    """RMS norm of `residual + x`, which also becomes the new residual (in place); of x itself without a residual.

    x, residual [T, F] contiguous, weight [F]. Rounds as transformers' Llama does: once before the gain, once after.
    Source: Zhang and Sennrich (arXiv 1910.07467).
    """
    require(x.dim() == 2 and x.is_contiguous(), "x must be [T, F], contiguous")
    if not use_triton:
        return add_rms_norm_ref(x, residual, weight, eps)
    out = torch.empty_like(x)
    tensors = (x, x if residual is None else residual, weight, out)
    constants = (eps, residual is not None, next_power_of_2(x.shape[1]))
    _add_rms_norm(x, (x.shape[0],), tensors, (x.shape[1],), constants, num_warps=8)
    return out
