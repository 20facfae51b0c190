"""Every place of SGLang that the plugin touches, with the signature it was written against. Imports nothing of SGLang.

`tests/sglang/test_seams.py` compares them with the installed version, and with the signatures of the other supported
versions, which were read from their wheels (`tests/sglang/seam_signatures.json`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from tidekv.errors import ConfigError

SUPPORTED = ("0.5.17", "0.5.20", "0.5.23")
RUN_HERE = "0.5.20"  # served end to end by the tests; the others are checked by signature


@dataclass(frozen=True)
class Seam:
    """path: module, class, function. parameters: names in order, `*` where keyword-only ones begin.

    how   "hook": wrapped; "override": a method of ours replaces it in a subclass; "call": we call it; "fields": a class
          of which we read these fields, in whatever order it has them
    """

    module: str
    name: str
    parameters: tuple[str, ...]
    how: Literal["hook", "override", "call", "fields"]
    cuda_only: bool = False

    @property
    def path(self) -> str:
        """Dotted, as SGLang's hook registry wants it."""
        return f"sglang.srt.{self.module}.{self.name}"


_ATTENTION = ("self", "q", "k", "v", "layer", "forward_batch", "save_kv_cache")
_TRITON = (*_ATTENTION, "sinks", "score_mod", "aux_tensors")
_PAGED = "mem_cache.allocator.paged"
_BASE = "mem_cache.allocator.base"
_POOL = "mem_cache.memory_pool"
_EXTEND = (
    "self", "prefix_lens", "prefix_lens_cpu", "seq_lens", "seq_lens_cpu", "last_loc", "extend_num_tokens",
    "num_new_pages",
)  # fmt: skip

SEAMS: tuple[Seam, ...] = (
    # sizes, pool and allocator are made here
    Seam("mem_cache.kv_cache_configurator", "KVCacheConfigurator._derive_pool_sizes", ("self", "*", "config"), "hook"),
    Seam(
        "mem_cache.kv_cache_configurator",
        "KVCacheConfigurator._build_mha_kv_pool",
        ("self", "*", "max_total_num_tokens", "mha_pool_class", "quant_method"),
        "hook",
    ),
    Seam(
        "mem_cache.kv_cache_configurator",
        "KVCacheConfigurator._build_token_to_kv_pool_allocator",
        ("self", "*", "sizes", "token_to_kv_pool", "is_dsv4_model", "req_to_token_pool", "token_to_kv_pool_allocator"),
        "hook",
    ),
    # who allocates, whether a step fits, when nothing runs
    Seam("managers.schedule_batch", "ScheduleBatch.prepare_for_extend", ("self",), "hook"),
    Seam("managers.schedule_batch", "ScheduleBatch.prepare_for_decode", ("self",), "hook"),
    Seam("managers.schedule_batch", "ScheduleBatch.check_decode_mem", ("self", "selected_indices"), "hook"),
    Seam(
        "managers.scheduler", "Scheduler.get_next_batch_to_run", ("self", "running_batch", "last_batch"), "hook"
    ),
    # who pauses: decided before a decode; merged back before SGLang handles what it received
    Seam("managers.scheduler", "Scheduler.process_input_requests", ("self", "recv_reqs"), "hook"),
    Seam("managers.scheduler", "Scheduler.get_new_batch_prefill", ("self", "running_batch"), "hook"),
    Seam("managers.scheduler", "Scheduler.update_running_batch", ("self", "batch"), "hook"),
    Seam("managers.scheduler_components.invariant_checker", "SchedulerInvariantChecker.self_check_during_busy",
         ("self",), "hook"),
    Seam("managers.schedule_policy", "PrefillAdder.add_one_req",
         ("self", "req", "has_chunked_req", "truncation_align_size"), "hook"),
    Seam("managers.schedule_batch", "ScheduleBatch.merge_batch", ("self", "other"), "call"),
    Seam("managers.scheduler", "Scheduler.on_idle", ("self",), "hook"),
    Seam("managers.scheduler", "Scheduler.__init__", ("self", "server_args", "port_args"), "hook"),
    # a forward: how its batch is read is planned once, around all of it
    Seam("model_executor.model_runner", "ModelRunner._forward_raw",
         ("self", "forward_batch", "pp_proxy_tensors", "reinit_attn_backend", "split_forward_count"), "hook"),
    Seam("model_executor.model_runner", "ModelRunnerOutput", ("logits_output", "can_run_graph"), "call"),
    Seam("model_executor.forward_context", "ForwardContext", ("attn_backend",), "call"),
    Seam("model_executor.forward_context", "forward_context", ("ctx",), "call"),
    Seam("model_executor.runner_utils.capture_mode", "model_capture_mode", (), "call"),
    Seam("distributed.parallel_state", "graph_capture", ("stream",), "call"),
    Seam(
        "model_executor.runner.decode_cuda_graph_runner",
        "DecodeCudaGraphRunner.can_run_graph",
        ("self", "forward_batch"),
        "hook",
        cuda_only=True,
    ),
    Seam(
        "model_executor.runner.prefill_cuda_graph_runner",
        "PrefillCudaGraphRunner.can_run_graph",
        ("self", "forward_batch"),
        "hook",
        cuda_only=True,
    ),
    Seam("models.utils", "enable_fused_set_kv_buffer", ("forward_batch",), "hook", cuda_only=True),
    # attention
    Seam("layers.attention.attention_registry", "register_attention_backend", ("name",), "call"),
    *(
        Seam(f"layers.attention.{module}", f"{cls}.{name}", parameters, "override")
        for module, cls, attention in (
            ("torch_native_backend", "TorchNativeAttnBackend", _ATTENTION),
            ("triton_backend", "TritonAttnBackend", _TRITON),
            ("flashinfer_backend", "FlashInferAttnBackend", _ATTENTION),
            ("flashattention_backend", "FlashAttentionBackend", _ATTENTION),
        )
        for name, parameters in (
            ("init_forward_metadata", ("self", "forward_batch")),
            ("forward_extend", attention),
            ("forward_decode", attention),
        )
    ),
    *(
        Seam(f"layers.attention.{module}", f"{cls}.init_forward_metadata_out_graph",
             ("self", "forward_batch", "in_capture"), "override")
        for module, cls in (
            ("triton_backend", "TritonAttnBackend"),
            ("flashinfer_backend", "FlashInferAttnBackend"),
            ("flashattention_backend", "FlashAttentionBackend"),
        )
    ),
    Seam("layers.attention.flashinfer_backend", "FlashInferAttnBackend.__init__",
         ("self", "model_runner", "skip_prefill", "kv_indptr_buf", "kv_last_page_len_buf", "init_new_workspace"),
         "override"),
    # what they list for their kernels
    Seam("layers.attention.triton_backend", "ForwardMetadata", ("kv_indptr", "kv_indices"), "fields"),
    Seam("layers.attention.flashinfer_backend", "DecodeMetadata", ("decode_wrappers",), "fields"),
    Seam("layers.attention.flashinfer_backend", "PrefillMetadata", ("prefill_wrappers", "use_ragged"), "fields"),
    Seam("layers.attention.flashattention_backend", "FlashAttentionMetadata", ("page_table",), "fields"),
    # the allocator's contract
    Seam(_PAGED, "PagedTokenToKVPoolAllocator.__init__",
         ("self", "size", "page_size", "dtype", "device", "kvcache", "need_sort"), "override"),
    Seam(_PAGED, "PagedTokenToKVPoolAllocator.alloc", ("self", "need_size"), "override"),
    Seam(_PAGED, "PagedTokenToKVPoolAllocator.alloc_extend", _EXTEND, "override"),
    Seam(_PAGED, "PagedTokenToKVPoolAllocator.alloc_decode",
         ("self", "seq_lens", "seq_lens_cpu", "last_loc"), "override"),
    Seam(_PAGED, "PagedTokenToKVPoolAllocator.free", ("self", "free_index"), "override"),
    Seam(_PAGED, "PagedTokenToKVPoolAllocator.free_segment", ("self", "free_index", "*", "start_pos"), "override"),
    Seam(_PAGED, "PagedTokenToKVPoolAllocator.clear", ("self",), "override"),
    Seam(_BASE, "BaseTokenToKVPoolAllocator.free_group_begin", ("self",), "override"),
    Seam(_BASE, "BaseTokenToKVPoolAllocator.free_group_end", ("self",), "override"),
    Seam(_BASE, "BaseTokenToKVPoolAllocator.resize", ("self", "config"), "override"),
    # the pool
    Seam(_POOL, "MHATokenToKVPool._create_buffers_normal", ("self",), "override"),
    Seam(_POOL, "MHATokenToKVPool.move_kv_cache", ("self", "tgt_loc", "src_loc"), "override"),
    # the prefix cache
    Seam("mem_cache.base_prefix_cache", "BasePrefixCache.evict", ("self", "params"), "call"),
    Seam("mem_cache.base_prefix_cache", "BasePrefixCache.evictable_size", ("self",), "call"),
    Seam("mem_cache.base_prefix_cache", "EvictParams", ("num_tokens", "swa_num_tokens", "mamba_num"), "call"),
)  # fmt: skip


def check_version(version: str) -> None:
    """`ConfigError` unless the plugin was checked against this version of SGLang."""
    if version not in SUPPORTED:
        raise ConfigError(
            f"SGLang {version} is not supported by tidekv: its seams were checked for {', '.join(SUPPORTED)}. "
            f"Install sglang=={RUN_HERE}, or unset TIDEKV_SGLANG for stock SGLang"
        )


def differences(signatures: Mapping[str, tuple[str, ...] | None]) -> list[str]:
    """What is wrong with {path: parameter names}, one line a seam. A missing path has None or no entry.

    A version may have *more* parameters behind ours, as long as what we use stays where it was.
    """
    out = []
    for seam in SEAMS:
        found = signatures.get(seam.path)
        if found is None:
            out.append(f"{seam.path} is not there")
        elif seam.how == "fields":
            gone = [name for name in seam.parameters if name not in found]
            if gone:
                out.append(f"{seam.path} has no {', '.join(gone)}")
        elif found[: len(seam.parameters)] != seam.parameters:
            out.append(f"{seam.path} takes ({', '.join(found)}), not ({', '.join(seam.parameters)})")
    return out
