"""Which kernels read a pool, and why. Would catch: an unsupported model sent to FlashInfer, a refusal that does not say
what is missing, a workspace too small for FlashInfer's planner."""

from __future__ import annotations

import pytest
import torch

from tidekv import ConfigError, KVGeometry
from tidekv.attention.backend import choose
from tidekv.attention.flashinfer_attention import why_not, workspace_bytes

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def geometry(head_dim: int = 128, dtype: torch.dtype = torch.bfloat16, pages: int = 10, layers: int = 2) -> KVGeometry:
    return KVGeometry(layers, pages, 16, 8, head_dim, dtype)


@pytest.mark.parametrize("device", [CPU, torch.device("meta")])
def test_without_cuda_plain_torch_is_taken(device: torch.device) -> None:
    name, why = choose("auto", geometry(), device)
    assert name == "sdpa"
    assert str(device) in why


@pytest.mark.parametrize("kind", ["flashinfer", "triton"])
def test_what_needs_cuda_is_refused_on_the_cpu(kind: str) -> None:
    with pytest.raises(ConfigError, match=f"'{kind}' needs a CUDA device, the pool is on cpu"):
        choose(kind, geometry(), CPU)


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(ConfigError, match="must be one of auto, flashinfer, triton, got 'flash'"):
        choose("flash", geometry(), CPU)


@pytest.mark.parametrize(
    ("shape", "reason"),
    [
        (geometry(dtype=torch.float32), "the cache is float32"),
        (geometry(dtype=torch.float8_e4m3fn), "the cache is float8_e4m3fn"),
        (geometry(head_dim=96), "the model has 96"),
        (geometry(pages=2**28, layers=16), r"int32, the pool has 4294967312 flat pages"),
    ],
)
def test_a_pool_that_flashinfer_cannot_read(shape: KVGeometry, reason: str) -> None:
    """Known from the shape alone, so also on a machine without FlashInfer."""
    assert reason in str(why_not(shape, CUDA))
    name, why = choose("auto", shape, CUDA)
    assert name == "triton"
    assert reason in why
    with pytest.raises(ConfigError, match="'flashinfer' cannot be: .*" + reason):
        choose("flashinfer", shape, CUDA)


def test_a_cpu_pool_is_named() -> None:
    assert why_not(geometry(), CPU) == "it needs a CUDA device, the pool is on cpu"


@pytest.mark.parametrize("group", [1, 4, 8, 16])
@pytest.mark.parametrize("captured", [0, 1, 32, 256])
def test_workspace_holds_what_the_planner_asks_for(group: int, captured: int) -> None:
    """The planner's own sum, for the largest plan that it may make on 132 SMs."""
    kv_heads, head_dim = 8, 128
    blocks = 2 * 132 // kv_heads
    tiles = -(-captured * group // 16) + captured - 1
    for rows, count in ((16, max(blocks, tiles) if captured else blocks), (128, 0 if captured else blocks)):
        partial = kv_heads * group * count * rows * head_dim * 4
        log_sums = kv_heads * group * count * rows * 4
        assert partial + log_sums + 32 <= workspace_bytes(kv_heads * group, kv_heads, head_dim, 132, captured)
