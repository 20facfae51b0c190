"""What the plugin cannot serve. Each refusal says which flag to change; the server does not start with one.

Pure functions over SGLang's arguments and objects, read by attribute so that the three versions share one list.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tidekv.errors import ConfigError

# attribute of the server arguments -> (values that are fine, what to do otherwise)
_OFF: tuple[object, ...] = (None, False, 0, "")
FLAGS: Mapping[str, tuple[tuple[object, ...], str]] = {
    "speculative_algorithm": (_OFF, "drop --speculative-algorithm: drafts write KV that is not the request's yet"),
    "disaggregation_mode": (
        (None, "null"),
        "drop --disaggregation-mode: transfers register the pool's buffers by full-width pages",
    ),
    "enable_hierarchical_cache": (_OFF, "drop --enable-hierarchical-cache: it copies pages by their full-width places"),
    "enable_hisparse": (_OFF, "drop --enable-hisparse"),
    "enable_lmcache": (_OFF, "drop --enable-lmcache: it reads the pool's buffers by full-width pages"),
    "enable_flexkv": (_OFF, "drop --enable-flexkv: it reads the pool's buffers by full-width pages"),
    "enable_unified_memory": (_OFF, "drop --enable-unified-memory: it has an allocator of its own"),
    "enable_unified_cache_external_linker": (_OFF, "drop --enable-unified-cache-external-linker"),
    "enable_memory_saver": (_OFF, "drop --enable-memory-saver: the pool is one allocation of tidekv's"),
    "enable_mixed_chunk": (_OFF, "drop --enable-mixed-chunk: a step would hold a prefill and decodes"),
    "enable_dp_attention": (_OFF, "drop --enable-dp-attention: padded batches have rows of no request"),
    "enable_two_batch_overlap": (_OFF, "drop --enable-two-batch-overlap: a step would be two forwards"),
    "enable_pdmux": (_OFF, "drop --enable-pdmux: prefill and decode would run at once"),
    "enable_torch_compile": (_OFF, "drop --enable-torch-compile: attention has to stay eager where a batch is narrow"),
    "dllm_algorithm": (_OFF, "drop --dllm-algorithm"),
    "radix_cache_backend": (_OFF, "drop --radix-cache-backend: only SGLang's own prefix cache was checked"),
    "prefill_only_disable_kv_cache": (_OFF, "drop --prefill-only-disable-kv-cache: there would be nothing to narrow"),
    "pp_size": ((None, 1), "set --pp-size 1: a rank must hold all layers"),
    "dcp_size": ((None, 1), "set --dcp-size 1: pages would be spread over ranks"),
    "kv_cache_dtype": (
        (None, "auto", "bfloat16", "bf16", "float16", "fp16", "half", "float32"),
        "set --kv-cache-dtype auto: quantised KV has scales beside the pool",
    ),
}


def refused_flags(server_args: Any) -> list[str]:
    """One line for each argument that tidekv cannot serve. An argument that this version lacks is off."""
    out = []
    for name, (fine, advice) in FLAGS.items():
        if hasattr(server_args, name) and not any(getattr(server_args, name) == value for value in fine):
            out.append(f"{name}={getattr(server_args, name)!r}: {advice}")
    return out


def refused_model(configurator: Any) -> list[str]:
    """One line for each property of model and pool (SGLang's KVCacheConfigurator) that tidekv cannot serve."""
    tests: list[tuple[str, Callable[[], bool], str]] = [
        ("page_size", lambda: configurator.page_size < 2, "set --page-size 16 or 64: a page of 1 token has no table"),
        ("use_mla_backend", lambda: bool(configurator.use_mla_backend), "MLA has one latent buffer, not K and V"),
        ("is_hybrid_swa", lambda: bool(configurator.is_hybrid_swa), "sliding-window layers have a pool of their own"),
        (
            "sliding_window_size",  # without a pool of their own, too
            lambda: not configurator.is_hybrid_swa and configurator.sliding_window_size is not None,
            "sliding-window layers do not see all pages",
        ),
        (
            "mambaish_config",
            lambda: getattr(configurator, "mambaish_config", None) is not None,
            "state-space layers have a pool of their own",
        ),
        ("is_draft_worker", lambda: bool(configurator.is_draft_worker), "drop --speculative-algorithm"),
        (
            "post_capture_kv_active",
            lambda: bool(getattr(configurator, "post_capture_kv_active", False)),
            "unset SGLang's post-capture KV sizing: the pool cannot grow after start",
        ),
        (
            "kv_cache_dtype",
            lambda: not (configurator.kv_cache_dtype.is_floating_point and configurator.kv_cache_dtype.itemsize >= 2),
            "set --kv-cache-dtype auto: quantised KV has scales beside the pool",
        ),
        (
            "is_encoder_decoder",
            lambda: bool(getattr(configurator.model_config, "is_encoder_decoder", False)),
            "cross attention reads pages that are not the request's own",
        ),
        (
            "num_effective_layers",
            lambda: configurator.layer_info.num_effective_layers < 2,
            "a model of one layer has nothing to give up",
        ),
    ]
    out = []
    for name, fails, advice in tests:
        if fails():
            value = getattr(configurator, name, None)
            out.append(f"{name}{'' if value is None else f'={value!r}'}: {advice}")
    return out


BACKENDS = ("triton", "flashinfer", "fa3", "torch_native")  # those of `backends.py`


def refused_backends(prefill: str, decode: str, device: object) -> list[str]:
    """SGLang's attention backends, as asked for or as it chose them. Which of ours run on this device is SGLang's to
    say."""
    advice = "torch_native" if str(device).startswith("cpu") else "triton (or flashinfer; fa3 on Hopper)"
    if prefill != decode:
        return [
            f"prefills are read by {prefill}, decodes by {decode}: drop --prefill-attention-backend and "
            f"--decode-attention-backend, and set --attention-backend {advice} for both"
        ]
    if prefill in BACKENDS:
        return []
    return [f"attention backend {prefill!r} (SGLang's choice, where none is set): set --attention-backend {advice}"]


def refused_overlap(is_on: bool, device: object, allowed: bool) -> list[str]:
    """Overlap scheduling on a GPU, where an operator has switched it off for tidekv. (On a CPU a forward is over before
    the next batch is allocated.)"""
    if not is_on or allowed or not str(device).startswith("cuda"):
        return []
    return [
        "overlap scheduling is on and TIDEKV_OVERLAP=0: add --disable-overlap-schedule, or unset TIDEKV_OVERLAP "
        "(moves of pages then wait for the forward that is running, see docs/sglang.md)"
    ]


def refuse(reasons: list[str]) -> None:
    """`ConfigError` with all reasons, if there are any."""
    if reasons:
        raise ConfigError(
            "tidekv cannot serve this configuration:\n"
            + "\n".join(f"  - {reason}" for reason in reasons)
            + "\nChange that, or start without TIDEKV_SGLANG=1 for stock SGLang."
        )
