"""What SGLang calls: each function wraps one method of its scheduler process (`original` is the method)."""

from __future__ import annotations

import dataclasses
import importlib
import logging
import pkgutil
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from sglang.srt.mem_cache.base_prefix_cache import EvictParams

from tidekv.errors import ConfigError
from tidekv.geometry import MIN_SLOT_WIDTH
from tidekv.memory.host_pool import HostKVPool
from tidekv.memory.ledger import NO_SLOTS, IntArray
from tidekv.sglang_plugin import refusals
from tidekv.sglang_plugin.allocator import BatchView, TideAllocator, TideCore
from tidekv.sglang_plugin.attention import TideAttention
from tidekv.sglang_plugin.batch_plan import any_narrow
from tidekv.sglang_plugin.capacity import Capacity, default_host_pages, machine_memory_bytes, plan_capacity
from tidekv.sglang_plugin.config import Settings
from tidekv.sglang_plugin.metrics import Reporter
from tidekv.sglang_plugin.pool import TideKVPool
from tidekv.sglang_plugin.seams import SEAMS, Seam
from tidekv.sglang_plugin.window import Window

logger = logging.getLogger(__name__)

# Scheduler iterations without a halving before widths come back. A halving frees many pages at once; widening in the
# next iteration would copy them twice for nothing. Counted, not timed, so that all ranks do it alike.
CALM_STEPS = 16

Original = Callable[..., Any]


@dataclasses.dataclass
class Installation:
    """What this process has made so far; a scheduler process makes one of each."""

    settings: Settings
    capacity: Capacity | None = None
    allocator: TideAllocator | None = None
    reporter: Reporter | None = None
    low_values_first: bool = False
    checked_changes: int = 0
    seen_halvings: int = 0
    calm_steps: int = 0  # scheduler iterations since something narrowed


_installation: Installation | None = None


def begin(settings: Settings) -> None:
    """A fresh installation in this process."""
    global _installation  # noqa: PLW0603  # SGLang gives hooks no place for state
    _installation = Installation(settings)


def here() -> Installation:
    """The installation of this process."""
    if _installation is None:
        raise ConfigError("tidekv's hooks run, but its plugin was not installed in this process")
    return _installation


# ---- making sizes, pool, allocator, attention ------------------------------------------------------------------------


def derive_pool_sizes(original: Original, configurator: Any, *, config: Any) -> Any:
    """SGLang is told the virtual size; the physical one stays here."""
    tide, args = here(), configurator.server_args
    refusals.refuse(
        refusals.refused_flags(args)
        + refusals.refused_model(configurator)
        + refusals.refused_overlap(not args.disable_overlap_schedule, configurator.device, tide.settings.overlap)
    )
    sizes = original(configurator, config=config)
    page_size = int(configurator.page_size)
    layer_num = int(configurator.layer_info.num_effective_layers)
    chunk = args.chunked_prefill_size or 0
    step_tokens = chunk if chunk > 0 else args.max_prefill_tokens
    step_tokens = min(step_tokens, sizes.max_total_num_tokens)
    host = tide.settings.host_tokens
    host_pages = None if host is None else host // page_size
    if host is None and str(configurator.device).startswith("cuda"):
        model = configurator.model_config
        head_bytes = 2 * model.get_num_kv_heads(args.tp_size) * model.head_dim * configurator.kv_cache_dtype.itemsize
        page_bytes = page_size * layer_num * head_bytes
        host_pages = default_host_pages(page_bytes, args.tp_size, machine_memory_bytes())
    num_widths = 1
    while layer_num >> num_widths >= MIN_SLOT_WIDTH:
        num_widths += 1
    tide.capacity = plan_capacity(
        sizes.max_total_num_tokens // page_size,
        layer_num,
        num_widths,
        # A request's tokens of one step touch a page more than they fill.
        -(-step_tokens // page_size) + 2 * sizes.max_running_requests,
        tide.settings.overcommit,
        host_pages,
    )
    tide.low_values_first = bool(args.schedule_low_priority_values_first)
    return _replace(sizes, max_total_num_tokens=tide.capacity.virtual_pages * page_size)


def _replace(record: Any, **changes: Any) -> Any:
    if dataclasses.is_dataclass(record):
        return dataclasses.replace(record, **changes)  # type: ignore[type-var]
    return importlib.import_module("msgspec").structs.replace(record, **changes)


def build_mha_kv_pool(
    original: Original, configurator: Any, *, max_total_num_tokens: int, mha_pool_class: type, **kwargs: Any
) -> Any:
    """SGLang's own call with our class and the physical size."""
    capacity = here().capacity
    if capacity is None:
        raise ConfigError("SGLang builds a pool before its sizes are known: the hook on its sizes did not take")
    tokens = capacity.physical_pages * int(configurator.page_size)
    return original(configurator, max_total_num_tokens=tokens, mha_pool_class=TideKVPool, **kwargs)


def build_allocator(
    original: Original, configurator: Any, *, sizes: Any, token_to_kv_pool: Any, req_to_token_pool: Any, **kwargs: Any
) -> Any:
    """Ours, over the pool that was just built."""
    tide = here()
    if not isinstance(token_to_kv_pool, TideKVPool) or tide.capacity is None:
        raise ConfigError(
            f"SGLang chose the pool {type(token_to_kv_pool).__name__} for this model, which tidekv cannot narrow; "
            "start without TIDEKV_SGLANG=1"
        )
    pool, settings = token_to_kv_pool.device_pool, tide.settings
    geometry = pool.geometry
    core = TideCore(
        geometry.num_pages * geometry.page_size,
        geometry.page_size,
        geometry.dtype,
        pool.device,
        pool,
        host_pool=HostKVPool(geometry, tide.capacity.host_pages * geometry.page_bytes),
        low_max_pages=settings.low_max_pages,
        high_reserved_pages=settings.high_reserved_pages,
    )
    tide.allocator = allocator = TideAllocator(
        sizes.max_total_num_tokens,
        geometry.page_size,
        geometry.dtype,
        configurator.device,
        token_to_kv_pool,
        False,
        core,
    )
    if settings.low_reads == "window":
        allocator.window = Window(settings.window_tokens, geometry.page_size)
    return allocator


def register_attention_backends() -> None:
    """Ours over the names that SGLang knows, so that everything that goes by name goes on working."""
    from sglang.srt.layers.attention.attention_registry import register_attention_backend

    def torch_native(runner: Any) -> Any:
        from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

        return type("TideTorchNative", (TideAttention, TorchNativeAttnBackend), {})(runner)

    def triton(runner: Any) -> Any:
        from sglang.srt.layers.attention.triton_backend import TritonAttnBackend

        return type("TideTriton", (TideAttention, TritonAttnBackend), {})(runner)

    register_attention_backend("torch_native")(torch_native)
    register_attention_backend("triton")(triton)


# ---- while it runs ---------------------------------------------------------------------------------------------------


def prepare_for_extend(original: Original, batch: Any) -> Any:
    """Say whose batch it is; afterwards prefixes that a high request shares count as high."""
    allocator = _announce(batch, batch.reqs)
    for req in batch.reqs:
        if getattr(req, "tidekv_lossy", False):  # retracted: what is computed again is exact, and may be shared
            req.tidekv_lossy = req.skip_radix_cache_insert = False
    result = original(batch)
    view = allocator.batch
    if view is not None and any(view.high) and allocator.core.low_used:
        page_size = int(allocator.page_size)
        rows = batch.req_to_token_pool.req_to_token
        for index, (is_high, length) in enumerate(zip(view.high, batch.prefix_lens, strict=False)):
            if is_high and length:
                locs = rows[batch.req_pool_indices[index], :length:page_size]
                allocator.promote(locs.cpu().numpy().astype(np.int64) // page_size)
    return result


def prepare_for_decode(original: Original, batch: Any) -> Any:
    """Say whose batch it is."""
    _announce(batch, batch.reqs)
    return original(batch)


def check_decode_mem(original: Original, batch: Any, selected_indices: list[int] | None = None) -> bool:
    """Whether the next decode step fits: virtual pages by SGLang's own count, physical ones by narrowing."""
    indices = range(len(batch.reqs)) if selected_indices is None else selected_indices
    reqs = [batch.reqs[i] for i in indices]
    allocator = _announce(batch, reqs)
    if not original(batch, selected_indices):
        return False
    if allocator.has_plenty(len(reqs)):  # the steady state costs no list of lengths
        return True
    committed = np.array([committed_len(req) for req in reqs], dtype=np.int64)
    page_size = int(allocator.page_size)

    def touched() -> IntArray:
        goes_on = committed % page_size != 0
        rows = batch.req_pool_indices[torch.tensor(list(indices), device=batch.req_pool_indices.device)]
        columns = torch.from_numpy(committed - 1).clamp_min(0).to(rows.device)
        locs = batch.req_to_token_pool.req_to_token[rows, columns].cpu().numpy().astype(np.int64)
        ids: IntArray = np.unique(locs[goes_on] // page_size)
        return ids

    high = list(allocator.batch.high) if allocator.batch else []
    return allocator.make_room((committed % page_size == 0).astype(np.int64), high, touched)


def get_next_batch_to_run(original: Original, scheduler: Any, *args: Any, **kwargs: Any) -> Any:
    """Between two forwards: staging goes back, and widths, if memory is plentiful."""
    tide = here()
    if tide.allocator is not None:
        tide.allocator.end_step()
        halvings = sum(tide.allocator.core.num_halvings.values())
        tide.calm_steps = tide.calm_steps + 1 if halvings == tide.seen_halvings else 0
        tide.seen_halvings = halvings
        if tide.calm_steps >= CALM_STEPS or scheduler.is_fully_idle():
            tide.allocator.restore(tide.settings.restore_free)
        if tide.reporter is not None:
            tide.reporter.step()
    return original(scheduler, *args, **kwargs)


def on_idle(original: Original, scheduler: Any) -> Any:
    """The books are recounted once after each busy time, beside SGLang's own leak check."""
    tide = here()
    allocator = tide.allocator
    if allocator is not None and allocator.num_changes != tide.checked_changes and scheduler.is_fully_idle():
        allocator.check()
        tide.checked_changes = allocator.num_changes
        if tide.reporter is not None:
            tide.reporter.publish()
    return original(scheduler)


def can_run_graph(original: Original, runner: Any, forward_batch: Any) -> bool:
    """No captured graph knows where narrowed pages are."""
    allocator = here().allocator
    if allocator is not None and any_narrow(allocator):
        return False
    return bool(original(runner, forward_batch))


def enable_fused_set_kv_buffer(original: Original, forward_batch: Any) -> bool:
    """Models that store K and V inside their RoPE kernel know full-width places only."""
    allocator = here().allocator
    if allocator is not None and any_narrow(allocator):
        return False
    return bool(original(forward_batch))


def old_pages(scheduler: Any) -> IntArray:
    """Virtual pages of running low requests that no window reaches, oldest request first. Reads rows back."""
    tide = here()
    allocator, batch = tide.allocator, scheduler.running_batch
    if allocator is None or allocator.window is None or batch is None:
        return NO_SLOTS
    page_size, rows = int(allocator.page_size), scheduler.req_to_token_pool.req_to_token
    found = [NO_SLOTS]
    for index, req in enumerate(batch.reqs):
        end = int(allocator.window.old_pages(np.array([committed_len(req)]))[0])
        if not is_high(req) and end > 1:
            locs = rows[batch.req_pool_indices[index], page_size : end * page_size : page_size]
            found.append(locs.cpu().numpy().astype(np.int64) // page_size)
    return np.concatenate(found)


def committed_len(req: Any) -> int:
    """Tokens whose KV is written: on the request in 0.5.17, on its KV record later."""
    own = getattr(req, "kv_committed_len", None)
    return int(req.kv.kv_committed_len if own is None else own)


def is_high(req: Any) -> bool:
    """By the request's `priority`; one that has none is low."""
    tide = here()
    priority, threshold = req.priority, tide.settings.priority_threshold
    if priority is None:
        return False
    return bool(priority <= threshold if tide.low_values_first else priority >= threshold)


def _announce(batch: Any, reqs: list[Any]) -> TideAllocator:
    allocator = batch.token_to_kv_pool_allocator
    if not isinstance(allocator, TideAllocator):
        raise ConfigError(f"SGLang's allocator is {type(allocator).__name__}, not tidekv's: its hook did not take")
    tree = batch.tree_cache
    try:
        high = [req.tidekv_high for req in reqs]
    except AttributeError:  # a newcomer among them
        for req in reqs:
            req.tidekv_high = is_high(req)
        high = [req.tidekv_high for req in reqs]
    allocator.batch = BatchView(
        tuple(high),
        reqs,
        lambda: int(tree.evictable_size()) if tree is not None else 0,
        lambda tokens: tree.evict(EvictParams(num_tokens=tokens)),
    )
    return allocator


# ---- the check from inside -------------------------------------------------------------------------------------------


def scheduler_init(original: Original, scheduler: Any, *args: Any, **kwargs: Any) -> None:
    """After the scheduler is built: what it serves with is ours, or it does not serve."""
    original(scheduler, *args, **kwargs)
    tide = here()
    runner = scheduler.tp_worker.model_runner
    reasons = refusals.refused_flags(scheduler.server_args)
    for name, made, wanted in (
        ("allocator", scheduler.token_to_kv_pool_allocator, TideAllocator),
        ("KV pool", runner.token_to_kv_pool, TideKVPool),
        ("attention backend", runner.attn_backend, TideAttention),
    ):
        if not isinstance(made, wanted):
            advice = "set --attention-backend triton (or torch_native on a CPU)" if wanted is TideAttention else ""
            reasons.append(f"the {name} is {type(made).__name__}, not tidekv's. {advice}".rstrip())
    reasons += refusals.refused_overlap(scheduler.enable_overlap, scheduler.device, tide.settings.overlap)
    refusals.refuse(reasons)
    capacity = tide.capacity
    if capacity is None or tide.allocator is None or scheduler.max_total_num_tokens != tide.allocator.size:
        raise ConfigError(
            f"SGLang counts {scheduler.max_total_num_tokens} tokens, tidekv "
            f"{tide.allocator.size if tide.allocator else 'none'}: a hook on the sizes did not take"
        )
    if str(scheduler.device).startswith("cuda"):
        forward_stream = scheduler.forward_stream
        tide.allocator.core.fence = lambda: torch.cuda.current_stream().wait_stream(forward_stream)
    tide.allocator.old_pages = lambda: old_pages(scheduler)
    collector = getattr(scheduler, "metrics_collector", None)
    tide.reporter = Reporter(tide.allocator, dict(collector.labels) if collector is not None else None)
    page_size = int(tide.allocator.page_size)
    logger.info(
        "tidekv on. #physical-token: %d, #token: %d, #host-token: %d, widths: %s, high: priority %s %d, low reads: %s",
        capacity.physical_pages * page_size,
        capacity.virtual_pages * page_size,
        capacity.host_pages * page_size,
        tide.allocator.core.ledger.ladder,
        "<=" if tide.low_values_first else ">=",
        tide.settings.priority_threshold,
        "exact" if tide.allocator.window is None else f"window of {tide.allocator.window.tokens} tokens (LOSSY)",
    )


_HOOKS: dict[str, Callable[..., Any]] = {
    "KVCacheConfigurator._derive_pool_sizes": derive_pool_sizes,
    "KVCacheConfigurator._build_mha_kv_pool": build_mha_kv_pool,
    "KVCacheConfigurator._build_token_to_kv_pool_allocator": build_allocator,
    "ScheduleBatch.prepare_for_extend": prepare_for_extend,
    "ScheduleBatch.prepare_for_decode": prepare_for_decode,
    "ScheduleBatch.check_decode_mem": check_decode_mem,
    "Scheduler.get_next_batch_to_run": get_next_batch_to_run,
    "Scheduler.on_idle": on_idle,
    "Scheduler.__init__": scheduler_init,
    "DecodeCudaGraphRunner.can_run_graph": can_run_graph,
    "PrefillCudaGraphRunner.can_run_graph": can_run_graph,
    "enable_fused_set_kv_buffer": enable_fused_set_kv_buffer,
}


def hooks() -> dict[Seam, Callable[..., Any]]:
    """The hook of each hooked seam that this machine has."""
    cuda = torch.cuda.is_available()
    return {seam: _HOOKS[seam.name] for seam in SEAMS if seam.how == "hook" and (cuda or not seam.cuda_only)}


def is_hooked(seam: Seam) -> bool:
    """SGLang's wrappers keep what they wrap."""
    return hasattr(pkgutil.resolve_name(seam.path), "__wrapped__")
