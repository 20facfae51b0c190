"""A decoder layer with its small steps fused, for CUDA: the same weights and the same arithmetic as `transformers`'
own.

`fuse(model)` replaces the forward of each decoder layer of the four supported families, whose layers differ only in
biases (Qwen2) and in norms of q and k (Qwen3). Projections that read the same input become one matrix product.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tidekv.kernels import fused


def fuse(net: Any) -> None:
    """Fuse every decoder layer of a supported causal language model, in place; frees the weights it joined."""
    on_cuda = net.device.type == "cuda"
    for layer in net.model.layers:
        layer.forward = _FusedLayer(layer, on_cuda)


def _join(*parts: nn.Linear) -> tuple[nn.Parameter, Tensor | None]:
    """One weight (and bias) for projections of the same input; the parts' own memory is released."""
    weight = nn.Parameter(torch.cat([part.weight for part in parts]), requires_grad=False)
    bias = torch.cat([part.bias for part in parts]) if parts[0].bias is not None else None
    for part in parts:
        part.weight = nn.Parameter(torch.empty(0, device=weight.device, dtype=weight.dtype), requires_grad=False)
    return weight, bias


class _FusedLayer:
    """Stands in for `LlamaDecoderLayer.forward`: hidden_states [1, T, F] -> [1, T, F]."""

    def __init__(self, layer: Any, use_triton: bool) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self.layer_idx: int = attention.layer_idx
        self.scaling: float = attention.scaling
        self.head_dim: int = attention.head_dim
        self.use_triton = use_triton
        self.qkv_weight, self.qkv_bias = _join(attention.q_proj, attention.k_proj, attention.v_proj)
        self.gate_up_weight, self.gate_up_bias = _join(mlp.gate_proj, mlp.up_proj)
        attention.qkv_weight, mlp.gate_up_weight = (
            self.qkv_weight,
            self.gate_up_weight,
        )  # the model still owns its weights
        self.o_proj, self.down_proj = attention.o_proj, mlp.down_proj
        self.num_q_heads = self.o_proj.in_features // self.head_dim
        self.num_kv_heads = (self.qkv_weight.shape[0] // self.head_dim - self.num_q_heads) // 2
        self.input_norm, self.post_norm = layer.input_layernorm, layer.post_attention_layernorm
        self.q_norm, self.k_norm = getattr(attention, "q_norm", None), getattr(attention, "k_norm", None)

    def __call__(
        self, hidden_states: Tensor, *args: Any, position_embeddings: tuple[Tensor, Tensor], **kwargs: Any
    ) -> Tensor:
        # Updated in place: it is the output of the layer before, or of the embedding, and nobody reads that again.
        residual = hidden_states[0]
        tokens = residual.shape[0]
        normed = self._norm(residual, None, self.input_norm)
        qkv = F.linear(normed, self.qkv_weight, self.qkv_bias).view(tokens, -1, self.head_dim)
        q, k, v = torch.split(qkv, [self.num_q_heads, self.num_kv_heads, self.num_kv_heads], dim=1)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        cos, sin = position_embeddings
        fused.rope_(q, k, cos[0], sin[0], use_triton=self.use_triton)
        attended = kwargs["tidekv"].forward(self.layer_idx, q, k, v, self.scaling)
        normed = self._norm(self.o_proj(attended.reshape(tokens, -1)), residual, self.post_norm)
        gate_up = F.linear(normed, self.gate_up_weight, self.gate_up_bias)
        residual += self.down_proj(fused.silu_mul(gate_up, use_triton=self.use_triton))
        return residual[None]

    def _norm(self, x: Tensor, residual: Tensor | None, norm: Any) -> Tensor:
        out: Tensor = fused.add_rms_norm(x, residual, norm.weight, norm.variance_epsilon, use_triton=self.use_triton)
        return out
