"""rope_, silu_mul, add_rms_norm. Catches: halves swapped, a stride ignored, a residual not written back, a wrong
gain."""

import pytest
import torch

from tidekv.kernels import HAS_TRITON, fused

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PATHS = [False, True] if HAS_TRITON else [False]


@pytest.mark.parametrize("use_triton", PATHS)
def test_rope_by_hand(use_triton):
    # One head of 2: x = (3, 4) turned by 90 degrees is (-4, 3).
    q = torch.tensor([[[3.0, 4.0]]], device=DEVICE)
    k = q.clone()
    fused.rope_(q, k, torch.zeros(1, 2, device=DEVICE), torch.ones(1, 2, device=DEVICE), use_triton=use_triton)
    assert q.tolist() == k.tolist() == [[[-4.0, 3.0]]]


@pytest.mark.parametrize("use_triton", PATHS)
@pytest.mark.parametrize(("heads_q", "heads_kv", "dim"), [(9, 3, 64), (4, 4, 10), (1, 1, 2)])
def test_rope_turns_strided_views_in_place(use_triton, heads_q, heads_kv, dim):
    generator = torch.Generator().manual_seed(1)
    joined = torch.randn(5, heads_q + 2 * heads_kv, dim, generator=generator).to(DEVICE)
    angle = torch.rand(5, dim // 2, generator=generator).to(DEVICE) * 6
    cos, sin = (torch.cat((f(angle), f(angle)), dim=-1) for f in (torch.cos, torch.sin))
    before = joined.clone()
    q, k, _ = joined.split([heads_q, heads_kv, heads_kv], dim=1)
    fused.rope_(q, k, cos, sin, use_triton=use_triton)
    turn = torch.polar(torch.ones_like(angle), angle)[:, None]  # the same rotation, as complex numbers
    turned = before[:, : heads_q + heads_kv]
    want = torch.complex(turned[..., : dim // 2], turned[..., dim // 2 :]) * turn
    torch.testing.assert_close(joined[:, : heads_q + heads_kv], torch.cat((want.real, want.imag), dim=-1))
    assert torch.equal(joined[:, heads_q + heads_kv :], before[:, heads_q + heads_kv :])  # v is left alone


@pytest.mark.parametrize("use_triton", PATHS)
@pytest.mark.parametrize("width", [1, 96, 1500])
def test_silu_mul(use_triton, width):
    gate_up = torch.randn(3, 2 * width, generator=torch.Generator().manual_seed(2)).to(DEVICE)
    gate, up = gate_up.double()[:, :width], gate_up.double()[:, width:]
    want = gate / (1 + (-gate).exp()) * up
    torch.testing.assert_close(fused.silu_mul(gate_up, use_triton=use_triton).double(), want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("use_triton", PATHS)
@pytest.mark.parametrize("has_residual", [False, True])
@pytest.mark.parametrize("width", [8, 100])
def test_add_rms_norm(use_triton, has_residual, width):
    generator = torch.Generator().manual_seed(3)
    x, residual = (torch.randn(4, width, generator=generator).to(DEVICE) for _ in range(2))
    weight = torch.rand(width, generator=generator).to(DEVICE)
    total = (x + residual if has_residual else x).double()
    want = total / (total.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    given = residual.clone() if has_residual else None
    got = fused.add_rms_norm(x, given, weight, 1e-5, use_triton=use_triton)
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)
    if given is not None:
        torch.testing.assert_close(given.double(), total, rtol=1e-6, atol=1e-6)
