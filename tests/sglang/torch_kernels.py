"""FlashInfer's and FlashAttention's kernels in plain torch, so that SGLang's own backends over them run on a CPU: they
are told what to read by the same tensors, which they look at when they run, not when they are planned.

    stand_in("flashinfer") or stand_in("fa3"), once, before a model runner is made; with TRITON_INTERPRET=1, for the
    kernels by which SGLang lists rows

SGLang's classes are untouched. What they put on "cuda" by name comes to lie on the CPU.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

Attended = tuple[torch.Tensor, torch.Tensor]  # out [T, Hq, D], lse [T, Hq]


class OnCpu(TorchFunctionMode):
    """Whoever asks for "cuda" gets the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if kwargs.get("device") == "cuda":
            kwargs["device"] = "cpu"
        return func(*args, **kwargs)


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, causal: bool) -> Attended:
    """One request: q [Tq, Hq, D] are the last of its tokens if `causal`; k, v [Tk, Hkv, D]. No key: zeros, and -inf."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    if causal:
        hidden = torch.ones(len(q), len(k), dtype=torch.bool).tril(len(k) - len(q)).logical_not()
        scores = scores.masked_fill(hidden, -math.inf)
    lse = torch.logsumexp(scores, -1)
    weights = torch.exp(scores - lse[..., None]) if len(k) else scores
    return torch.einsum("hqk,khd->qhd", weights, v), lse.T


def ragged(cuts: torch.Tensor) -> Iterator[slice]:
    ends = cuts.tolist()
    return (slice(begin, end) for begin, end in itertools.pairwise(ends))


class Wrapper:
    """FlashInfer's: planned with lengths and a list of rows, of which a graph's wrapper owns the buffers."""

    def __init__(self, workspace: torch.Tensor, layout: str, use_cuda_graph: bool = False, **buffers: Any) -> None:
        self.is_cuda_graph_enabled = use_cuda_graph
        for name in ("paged_kv_indptr", "paged_kv_indices"):
            setattr(self, f"_{name}_buf", buffers.get(f"{name}_buffer", buffers.get(f"{name}_buf")))

    def _plan(self, qo_indptr: torch.Tensor, indptr: torch.Tensor, indices: torch.Tensor, page_size: int) -> None:
        assert page_size == 1, "SGLang plans pages of one token"
        self._qo_indptr = qo_indptr.clone()
        if not self.is_cuda_graph_enabled:
            self._paged_kv_indptr_buf, self._paged_kv_indices_buf = indptr, indices
            return
        self._paged_kv_indptr_buf.copy_(indptr)
        self._paged_kv_indices_buf[: len(indices)].copy_(indices)

    def _run(self, q: torch.Tensor, kv: Any, causal: bool, scale: float) -> Attended:
        out, lse = torch.zeros_like(q), torch.full(q.shape[:2], -math.inf, dtype=q.dtype)
        for mine, keys in zip(ragged(self._qo_indptr), ragged(self._paged_kv_indptr_buf), strict=True):
            rows = self._paged_kv_indices_buf[keys].long()
            out[mine], lse[mine] = attend(q[mine], kv[0][rows], kv[1][rows], scale, causal)
        return out, lse


class Decode(Wrapper):
    """BatchDecodeWithPagedKVCacheWrapper."""

    def begin_forward(self, indptr: Any, indices: Any, last: Any, q: int, k: int, d: int, page: int, **_: Any) -> None:
        self._plan(torch.arange(len(last) + 1), indptr, indices, page)

    def forward(self, q: torch.Tensor, kv: Any, sm_scale: float, **_: Any) -> torch.Tensor:
        return self._run(q, kv, False, sm_scale)[0]


def fast_decode_plan(wrapper: Decode, *args: Any, **kwargs: Any) -> None:
    """FlashInfer's, for a graph: the list is in the graph's buffer already."""
    last = args[2]
    wrapper._qo_indptr = torch.arange(len(last) + 1)


class Prefill(Wrapper):
    """BatchPrefillWithPagedKVCacheWrapper."""

    def begin_forward(
        self, qo_indptr: Any, indptr: Any, indices: Any, last: Any, q: int, k: int, d: int, page: int, **_: Any
    ) -> None:
        self._plan(qo_indptr, indptr, indices, page)

    def forward_return_lse(self, q: torch.Tensor, kv: Any, causal: bool, sm_scale: float, **_: Any) -> Attended:
        return self._run(q, kv, causal, sm_scale)

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self.forward_return_lse(*args, **kwargs)[0]


class Ragged:
    """BatchPrefillWithRaggedKVCacheWrapper: keys are the new tokens themselves."""

    def __init__(self, workspace: torch.Tensor, layout: str, **_: Any) -> None:
        self._cuts = torch.zeros(1)

    def begin_forward(self, qo_indptr: torch.Tensor, kv_indptr: torch.Tensor, *_: Any, **__: Any) -> None:
        self._cuts = qo_indptr.clone()

    def forward_return_lse(self, q: Any, k: Any, v: Any, causal: bool, sm_scale: float, **_: Any) -> Attended:
        parts = [attend(q[mine], k[mine], v[mine], sm_scale, causal) for mine in ragged(self._cuts)]
        return torch.cat([out for out, _ in parts]), torch.cat([lse for _, lse in parts])

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self.forward_return_lse(*args, **kwargs)[0]


def merge_state(v_a: torch.Tensor, s_a: torch.Tensor, v_b: torch.Tensor, s_b: torch.Tensor) -> Attended:
    """Two parts of one context."""
    lse = torch.logaddexp(s_a, s_b)
    return v_a * torch.exp(s_a - lse)[..., None] + v_b * torch.exp(s_b - lse)[..., None], lse


def flash_attn_with_kvcache(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, page_table: torch.Tensor,
    cache_seqlens: torch.Tensor, cu_seqlens_q: torch.Tensor, softmax_scale: float, causal: bool, **_: Any,
) -> torch.Tensor:  # fmt: skip
    """FlashAttention's: caches [pages, page_size, H, D], page_table [B, >= N] int32."""
    assert page_table.dtype == torch.int32, f"the page table is {page_table.dtype}, not int32"
    out, page_size = torch.zeros_like(q), k_cache.shape[1]
    for request, mine in enumerate(ragged(cu_seqlens_q)):
        length = int(cache_seqlens[request])
        pages = page_table[request, : -(-length // page_size)].long()
        k, v = (cache[pages].flatten(0, 1)[:length] for cache in (k_cache, v_cache))
        out[mine] = attend(q[mine], k, v, softmax_scale, causal)[0]
    return out


def stand_in(backend: str) -> None:
    """Put the kernels of `backend` where SGLang imports them from."""
    OnCpu().__enter__()
    if backend == "fa3":
        kernels = ModuleType("sgl_kernel.flash_attn")
        kernels.flash_attn_with_kvcache = flash_attn_with_kvcache  # type: ignore[attr-defined]
        kernels.flash_attn_varlen_func = None  # type: ignore[attr-defined]
        kernels.get_scheduler_metadata = lambda **_: None  # type: ignore[attr-defined]
        sys.modules["sgl_kernel.flash_attn"] = kernels
        from sglang.srt.layers.attention import flashattention_backend

        flashattention_backend.flash_attn_with_kvcache = flash_attn_with_kvcache
        return
    package, cascade = ModuleType("flashinfer"), ModuleType("flashinfer.cascade")
    package.BatchDecodeWithPagedKVCacheWrapper = Decode  # type: ignore[attr-defined]
    package.BatchPrefillWithPagedKVCacheWrapper = Prefill  # type: ignore[attr-defined]
    package.BatchPrefillWithRaggedKVCacheWrapper = Ragged  # type: ignore[attr-defined]
    package.fast_decode_plan = fast_decode_plan  # type: ignore[attr-defined]
    cascade.merge_state = merge_state  # type: ignore[attr-defined]
    for module in (package, cascade):
        module.__spec__ = ModuleSpec(module.__name__, None)
    from sglang.benchmark import one_batch  # noqa: F401
    from sglang.srt import utils

    # Only while this one module is imported: others of SGLang would look for the rest of FlashInfer.
    sys.modules.pop("sglang.srt.layers.attention.flashinfer_backend", None)
    available, utils.is_flashinfer_available = utils.is_flashinfer_available, lambda: True
    sys.modules |= {"flashinfer": package, "flashinfer.cascade": cascade}
    try:
        from sglang.srt.layers.attention import flashinfer_backend  # noqa: F401
    finally:
        utils.is_flashinfer_available = available
        del sys.modules["flashinfer"], sys.modules["flashinfer.cascade"]
