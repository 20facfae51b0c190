"""SGLang's attention backends that are served, and how each of them is told where moved pages lie: its own list of what
it reads is rewritten in place, after SGLang has made it and before the first layer runs.

    triton        kv_indices   ragged, the row of each token       eager: its metadata; captured: the graphs' one buffer
    flashinfer    kv_indices   the same in int32                   of the wrapper that was planned
    fa3           page_table   [B, N] int32, a number a page       of its metadata
    torch_native  none: it reads `req_to_token` itself, so the core reads moved pages

A full-width page begins at row page * page_size of every layer's buffer. So one list serves all layers, and every entry
fits where SGLang's own did. The new tokens' K and V go where `out_cache_loc` says, which names real rows meanwhile
(`TideAttention.planned`).
"""

from __future__ import annotations

from typing import Any

import torch

from tidekv.errors import ConfigError
from tidekv.kernels.row_lists import fill_rows_
from tidekv.sglang_plugin.attention import TideAttention
from tidekv.sglang_plugin.batch_plan import Moved


class TideTorchNative(TideAttention):
    """Its kernels look rows up themselves."""

    lists_rows = False


class TideTriton(TideAttention):
    """An extend lists its prefixes only: new tokens are read from the activations."""

    def list_moved(self, moved: Moved, first_locs: torch.Tensor, forward_batch: Any, captured: bool) -> None:
        if captured:
            rows, indptr = self.cuda_graph_kv_indices, self.kv_indptr[: forward_batch.batch_size + 1]
        else:
            rows, indptr = self.forward_metadata.kv_indices, self.forward_metadata.kv_indptr
        lens = moved.kv_lens if forward_batch.forward_mode.is_decode() else moved.kv_lens - moved.q_lens
        if lens.any():
            fill_rows_(rows, indptr, first_locs, self.tide.pages.page_size, int(lens.max()))


class TideFlashInfer(TideAttention):
    """FlashInfer's FA2 kernels are planned over lengths alone, at a page size of 1, and look at the list when they run.
    So it may be rewritten after `plan`, eager or captured: a wrapper keeps the tensor that it was planned with, and one
    of a graph copies into the graph's buffer."""

    def __init__(self, model_runner: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(model_runner, *args, **kwargs)
        if self.num_wrappers != 1:
            raise ConfigError(
                f"FlashInfer keeps a list for each kind of layer here ({self.dispatch_reason}), not one for all"
            )
        kernels = {self.prefill_backend, self.decode_backend}
        if kernels != {"fa2"}:
            raise ConfigError(
                f"FlashInfer runs {' and '.join(sorted(kernels))} kernels here; tidekv knows that plans of fa2 do not "
                "depend on where pages lie, not that those do. Set --attention-backend triton"
            )

    def list_moved(self, moved: Moved, first_locs: torch.Tensor, forward_batch: Any, captured: bool) -> None:
        lens = moved.kv_lens
        if captured:
            wrapper = self.decode_cuda_graph_metadata[forward_batch.batch_size][0]
        elif forward_batch.forward_mode.is_decode():
            wrapper = self.forward_metadata.decode_wrappers[0]
        else:
            wrapper = self.forward_metadata.prefill_wrappers[0]
            if self.forward_metadata.use_ragged:  # new tokens are read from the activations
                lens = moved.kv_lens - moved.q_lens
        if lens.any():
            rows, indptr = wrapper._paged_kv_indices_buf, wrapper._paged_kv_indptr_buf
            fill_rows_(rows, indptr, first_locs, self.tide.pages.page_size, int(lens.max()))


class TideFlashAttention(TideAttention):
    """FlashAttention 3 reads a table of pages; columns beyond a request's end are not read. Rows of a graph's padding
    stay SGLang's: its row 0 of `req_to_token`, which names the sink page."""

    def __init__(self, model_runner: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(model_runner, *args, **kwargs)
        if self.has_local_attention:
            raise ConfigError(
                "this model's chunked local attention has page tables of its own; tidekv writes one for all"
            )

    def list_moved(self, moved: Moved, first_locs: torch.Tensor, forward_batch: Any, captured: bool) -> None:
        num_requests, num_pages = first_locs.shape
        table = self.forward_metadata.page_table[:num_requests, :num_pages]
        torch.div(first_locs, self.tide.pages.page_size, rounding_mode="floor", out=table)

    def get_fused_kv_write_buffers(self, layer: Any, forward_batch: Any) -> Any:
        """0.5.23's: where a model's own kernel may store K and V, None where it may not."""
        if self.reads_in_core:
            return None
        return super().get_fused_kv_write_buffers(layer, forward_batch)


def register() -> None:
    """Ours over the names that SGLang knows, so that everything that goes by name goes on working."""
    from sglang.srt.layers.attention.attention_registry import register_attention_backend

    def torch_native(runner: Any) -> Any:
        from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

        return type("TideTorchNative", (TideTorchNative, TorchNativeAttnBackend), {})(runner)

    def triton(runner: Any) -> Any:
        from sglang.srt.layers.attention.triton_backend import TritonAttnBackend

        return type("TideTriton", (TideTriton, TritonAttnBackend), {})(runner)

    def flashinfer(runner: Any) -> Any:
        from sglang.srt.layers.attention.flashinfer_backend import FlashInferAttnBackend

        return type("TideFlashInfer", (TideFlashInfer, FlashInferAttnBackend), {})(
            runner, init_new_workspace=runner.init_new_workspace
        )

    def fa3(runner: Any) -> Any:
        major = torch.cuda.get_device_capability()[0] if torch.cuda.is_available() else 9
        if major not in (8, 9):
            raise ConfigError(f"FlashAttention 3 has no kernels for compute capability {major}.x, only for 8.x and 9.x")
        from sglang.srt.layers.attention.flashattention_backend import FlashAttentionBackend

        return type("TideFlashAttention", (TideFlashAttention, FlashAttentionBackend), {})(runner)

    for make in (torch_native, triton, flashinfer, fa3):
        register_attention_backend(make.__name__)(make)
