"""The lossy read mode `window` as attention masks: what a model answers where old tokens are gone from some layers.

Non-resident layers see the first SINK_TOKENS tokens and the last W; resident layers see everything. Token by token and
with every old page narrow: the worst that the engine's window can come to, which narrows whole pages, and only under
pressure.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from tidekv.engine.model import LoadedModel, forward_packed
from tidekv.geometry import KVGeometry

SINK_TOKENS = 16


@dataclass(frozen=True)
class Way:
    """One way of reading. width None: everything, in every layer; window None: the same, but through a mask."""

    width: int | None
    window: int | None

    def resident(self, loaded: LoadedModel) -> frozenset[int]:
        """Layers that see everything."""
        if self.width is None:
            return frozenset(range(loaded.layer_num))
        shape = KVGeometry(loaded.layer_num, 1, 16, loaded.num_kv_heads, loaded.head_dim, torch.float32)
        return frozenset(shape.resident_layers(self.width))


class MaskedReads:
    """An attention context over n sequences of one length, packed one after another.

    With `keep` it holds on to K and V, and a later forward goes on where the last one ended.
    """

    def __init__(self, sequences: int, resident: frozenset[int], window: int | None, keep: bool = False) -> None:
        self.sequences = sequences
        self.resident = resident
        self.window = window
        self.keep = keep
        self.kept: dict[int, tuple[Tensor, Tensor]] = {}
        self.masks: dict[tuple[int, int], Tensor] = {}

    def forward(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scaling: float) -> Tensor:
        """q [n * T, Hq, D], k and v [n * T, Hkv, D] -> [n * T, Hq, D]; T new tokens of each sequence."""
        q, k, v = (x.unflatten(0, (self.sequences, -1)).transpose(1, 2) for x in (q, k, v))
        if layer in self.kept:
            k, v = (torch.cat(pair, dim=2) for pair in zip(self.kept[layer], (k, v), strict=True))
        if self.keep:
            self.kept[layer] = (k, v)
        # Repeated by hand: with enable_gqa, CUDA has only the kernel that writes out all scores for float32.
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
        new, length = q.shape[2], k.shape[2]
        if layer not in self.resident:
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=self._mask(new, length, q.device), scale=scaling)
        elif new == length:
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling)
        elif new == 1:
            out = F.scaled_dot_product_attention(q, k, v, scale=scaling)
        else:
            raise ValueError(f"{new} new tokens after {length - new}: give a whole prompt or one token at a time")
        return out.transpose(1, 2).flatten(0, 1)

    def _mask(self, new: int, length: int, device: torch.device) -> Tensor:
        """[new, length] bool: what the last `new` of `length` tokens see in a layer that is not resident."""
        if (new, length) not in self.masks:
            key = torch.arange(length, device=device)[None, :]
            query = torch.arange(length - new, length, device=device)[:, None]
            seen = key <= query
            if self.window is not None:
                seen &= (key < SINK_TOKENS) | (key > query - self.window)
            self.masks = {(new, length): seen}
        return self.masks[new, length]


def logits_of(loaded: LoadedModel, ids: Tensor, rows: Tensor, way: Way) -> Tensor:
    """Next-token logits [n, R, V] after positions rows [R] of sequences ids [n, T], read in one way."""
    context = MaskedReads(len(ids), way.resident(loaded), way.window)
    return _forward(loaded, ids, 0, rows, context)


def greedy(loaded: LoadedModel, prompts: Tensor, steps: int, way: Way) -> Tensor:
    """The `steps` most likely next tokens [n, steps], one after another, of prompts [n, T], read in one way."""
    context = MaskedReads(len(prompts), way.resident(loaded), way.window, keep=True)
    last = torch.tensor([prompts.shape[1] - 1], device=prompts.device)
    tokens = _forward(loaded, prompts, 0, last, context).argmax(-1)  # [n, 1]
    answer = [tokens]
    for done in range(prompts.shape[1], prompts.shape[1] + steps - 1):
        tokens = _forward(loaded, tokens, done, torch.zeros_like(last), context).argmax(-1)
        answer.append(tokens)
    return torch.cat(answer, dim=1)


def _forward(loaded: LoadedModel, ids: Tensor, first: int, rows: Tensor, context: MaskedReads) -> Tensor:
    """ids [n, T] are tokens first, first + 1, ... of each sequence; logits [n, R, V] after rows [R] of the T."""
    n, length = ids.shape
    at = torch.arange(first, first + length, device=ids.device)
    packed_rows = (rows + length * torch.arange(n, device=ids.device)[:, None]).flatten()
    logits = forward_packed(loaded.model, ids.flatten(), at.repeat(n), packed_rows, context)
    return logits.float().unflatten(0, (n, -1))
