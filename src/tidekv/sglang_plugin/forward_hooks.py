"""What SGLang calls in a forward: each function wraps one of its functions (`original`)."""

from __future__ import annotations

import logging
from typing import Any

from sglang.srt.model_executor.model_runner import ModelRunnerOutput
from sglang.srt.model_executor.runner.decode_cuda_graph_runner import DecodeCudaGraphRunner

from tidekv.attention.page_tables import HostBatch
from tidekv.sglang_plugin.attention import TideAttention
from tidekv.sglang_plugin.build import Original, here
from tidekv.sglang_plugin.graphs import NarrowGraphs

logger = logging.getLogger(__name__)


def forward_raw(original: Original, runner: Any, forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
    """Plan how the batch is read; a narrowed decode step may be a replay of ours."""
    attention = runner.attn_backend
    if not isinstance(attention, TideAttention):
        return original(runner, forward_batch, *args, **kwargs)
    attention.tide.core.repacker.behind.fork()
    with attention.planned(forward_batch) as plan:
        graphs = narrow_graphs(runner, attention)
        if graphs is not None and not graphs.is_prepared and forward_batch.forward_mode.is_decode():
            graphs.prepare(forward_batch)
        if isinstance(plan, HostBatch) and graphs is not None:
            logits = graphs.run(plan, forward_batch)
            if logits is not None:
                return ModelRunnerOutput(logits_output=logits, can_run_graph=True)
        return original(runner, forward_batch, *args, **kwargs)


def narrow_graphs(runner: Any, attention: TideAttention) -> NarrowGraphs | None:
    """Where SGLang captures decode steps, narrowed ones are captured, too."""
    if not attention.captures_narrow:
        return None
    if attention.narrow_graphs is None and isinstance(runner.decode_cuda_graph_runner, DecodeCudaGraphRunner):
        attention.narrow_graphs = NarrowGraphs(runner, attention, capture=True)
    graphs: NarrowGraphs | None = attention.narrow_graphs
    return graphs


def decode_can_run_graph(original: Original, graph_runner: Any, forward_batch: Any) -> bool:
    """SGLang's captured steps read full-width pages, wherever they lie."""
    attention = graph_runner.model_runner.attn_backend
    if isinstance(attention, TideAttention) and isinstance(attention.tide_plan, HostBatch):
        return False
    return bool(original(graph_runner, forward_batch))


def prefill_can_run_graph(original: Original, graph_runner: Any, forward_batch: Any) -> bool:
    """Captured prefills read pages under their own ids only."""
    attention = graph_runner.model_runner.attn_backend
    if isinstance(attention, TideAttention) and attention.tide_plan is not None:
        return False
    return bool(original(graph_runner, forward_batch))


def enable_fused_set_kv_buffer(original: Original, forward_batch: Any) -> bool:
    """Models that store K and V inside their RoPE kernel know full-width places only."""
    allocator = here().allocator
    attention = None if allocator is None else allocator.attention
    if attention is not None and attention.reads_in_core:
        return False
    return bool(original(forward_batch))
