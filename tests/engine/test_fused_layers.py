"""Fused decoder layers against transformers' own.

Catches: joined weights in the wrong order, a lost bias, a norm that is skipped, a residual that is added twice.
"""

from pathlib import Path

import pytest
import torch

from engine.test_model import PlainCausal, family, some_ids
from tidekv.engine.fused_layers import fuse
from tidekv.engine.model import forward_packed


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "mistral"])
def test_fused_layers_give_the_same_logits(name: str, tmp_path: Path) -> None:
    net = family(name, tmp_path).model
    for module in net.modules():  # fresh norms are all ones and fresh biases all zeros: a lost one would not show
        for parameter in module.parameters(recurse=False):
            if parameter.dim() == 1:
                parameter.copy_(torch.rand(parameter.shape, generator=torch.Generator().manual_seed(5)) + 0.5)
    arguments = some_ids(23, net.config.vocab_size), torch.arange(23), torch.tensor([3, 22])
    want = forward_packed(net, *arguments, PlainCausal([23]))
    fuse(net)
    got = forward_packed(net, *arguments, PlainCausal([23]))
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
