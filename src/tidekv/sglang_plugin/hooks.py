"""What SGLang calls while it runs: each function wraps one method of its scheduler process (`original`)."""

from __future__ import annotations

import logging
import pkgutil
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from sglang.srt.managers.schedule_policy import AddReqResult
from sglang.srt.mem_cache.base_prefix_cache import EvictParams

from tidekv.errors import ConfigError
from tidekv.memory.ledger import NO_SLOTS, IntArray
from tidekv.sglang_plugin import forward_hooks, refusals
from tidekv.sglang_plugin.allocator import TideAllocator
from tidekv.sglang_plugin.attention import TideAttention
from tidekv.sglang_plugin.build import Original, build_allocator, build_mha_kv_pool, derive_pool_sizes, here
from tidekv.sglang_plugin.metrics import Reporter
from tidekv.sglang_plugin.paused_batch import PausedRequests
from tidekv.sglang_plugin.pausing import Rules
from tidekv.sglang_plugin.pool import TideKVPool
from tidekv.sglang_plugin.pressed_pages import BatchView
from tidekv.sglang_plugin.request_pages import committed_len
from tidekv.sglang_plugin.seams import SEAMS, Seam

logger = logging.getLogger(__name__)

# Scheduler iterations without a halving before widths come back. A halving frees many pages at once; widening in the
# next iteration would copy them twice for nothing. Counted, not timed, so that all ranks do it alike.
CALM_STEPS = 16


def prepare_for_extend(original: Original, batch: Any) -> Any:
    """Say whose batch it is; afterwards prefixes that a high request shares count as high."""
    allocator = _announce(batch, batch.reqs)
    for req in batch.reqs:
        if getattr(req, "tidekv_lossy", False):  # retracted: what is computed again is exact, and may be shared
            req.tidekv_lossy = req.skip_radix_cache_insert = False
    if allocator.paused is not None:
        allocator.paused.forget(batch.reqs)
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
    return allocator.make_room((committed % page_size == 0).astype(np.int64), high, committed, touched)


def process_input_requests(original: Original, scheduler: Any, recv_reqs: Any) -> Any:
    """Whatever SGLang is asked (to abort, to flush, to tell its load), it finds everybody in the running batch."""
    paused = _paused()
    if recv_reqs and paused is not None and paused.batch is not None:
        scheduler.running_batch = paused.join(scheduler.running_batch)
    return original(scheduler, recv_reqs)


def self_check_during_busy(original: Original, checker: Any) -> Any:
    """SGLang's strict check between two steps (off unless asked for) counts what the requests of its batches hold."""
    paused, scheduler = _paused(), here().scheduler
    if paused is not None and paused.batch is not None and scheduler is not None:
        scheduler.running_batch = paused.join(scheduler.running_batch)
    return original(checker)


def get_next_batch_to_run(original: Original, scheduler: Any, running_batch: Any, last_batch: Any) -> Any:
    """Between two forwards: staging goes back, and widths, if memory is plentiful."""
    tide = here()
    if tide.allocator is not None:
        tide.allocator.end_step()
        tide.allocator.core.repacker.behind.join()
        paused = tide.allocator.paused
        if paused is not None and paused.is_due(running_batch):
            scheduler.running_batch = running_batch = paused.join(running_batch)
        halvings = sum(tide.allocator.core.num_halvings.values())
        tide.calm_steps = tide.calm_steps + 1 if halvings == tide.seen_halvings else 0
        tide.seen_halvings = halvings
        idle = scheduler.is_fully_idle()
        if paused is not None and paused.paused:
            if tide.calm_steps % CALM_STEPS == CALM_STEPS - 1:
                paused.widen_running(running_batch)
        elif tide.calm_steps >= CALM_STEPS or idle:
            tide.allocator.restore(tide.settings.restore_free)
        if tide.reporter is not None:
            tide.reporter.step()
    return original(scheduler, running_batch=running_batch, last_batch=last_batch)


def get_new_batch_prefill(original: Original, scheduler: Any, running_batch: Any) -> Any:
    """Whose pages a prefill may take."""
    paused = _paused()
    if paused is not None:
        paused.running = running_batch
    return original(scheduler, running_batch)


def add_one_req(original: Original, adder: Any, req: Any, *args: Any, **kwargs: Any) -> Any:
    """SGLang admits by virtual pages; here by physical ones: who would only be paused waits in the queue instead."""
    paused = _paused()
    if paused is None:
        return original(adder, req, *args, **kwargs)
    added, num_added = getattr(adder, "tidekv_added", (0, 0))
    prefix = len(req.prefix_indices) if hasattr(req, "prefix_indices") else req.prefix_len
    need = -(-(len(req.full_untruncated_fill_ids) - prefix) // paused.rules.page_size) + 1
    if not paused.admits(need, is_high(req), added, num_added):
        return AddReqResult.NO_TOKEN
    result = original(adder, req, *args, **kwargs)
    if adder.can_run_list and adder.can_run_list[-1] is req:
        adder.tidekv_added = (added + need, num_added + 1)
        paused.order_of(req)
    return result


def update_running_batch(original: Original, scheduler: Any, batch: Any) -> Any:
    """Before a decode: who does not fit pauses, and who fits again goes on."""
    paused = _paused()
    if paused is not None:
        before = len(batch.reqs)
        if any(req.finished() for req in batch.reqs):
            batch.filter_batch()
        if not batch.is_empty():
            _announce(batch, batch.reqs)
            resumed = paused.num_resumes
            paused.before_decode(batch)
            if len(batch.reqs) < before or paused.num_resumes > resumed:
                batch.batch_is_full = False
    return original(scheduler, batch)


def on_idle(original: Original, scheduler: Any) -> Any:
    """The books are recounted once after each busy time, beside SGLang's own leak check."""
    tide = here()
    allocator = tide.allocator
    if allocator is not None and allocator.num_changes != tide.checked_changes and scheduler.is_fully_idle():
        allocator.check()
        tide.checked_changes = allocator.num_changes
        if tide.reporter is not None:
            tide.reporter.log_idle()
            tide.reporter.publish()
    return original(scheduler)


def old_pages(scheduler: Any) -> IntArray:
    """Virtual pages of running low requests that no window reaches, oldest request first. Reads rows back."""
    tide = here()
    allocator = tide.allocator
    batch = scheduler.running_batch if allocator is None or allocator.paused is None else allocator.paused.running
    if allocator is None or allocator.window is None or batch is None:
        return NO_SLOTS
    page_size, rows = int(allocator.page_size), scheduler.req_to_token_pool.req_to_token
    found = [NO_SLOTS]
    for index, req in enumerate(batch.reqs):
        end = int(allocator.window.old_pages(np.array([committed_len(req)]))[0])
        if not is_high(req) and end > 1 and not req.finished():
            locs = rows[batch.req_pool_indices[index], page_size : end * page_size : page_size]
            found.append(locs.cpu().numpy().astype(np.int64) // page_size)
    return np.concatenate(found)


def is_high(req: Any) -> bool:
    """By the request's `priority`; one that has none is low."""
    tide = here()
    priority, threshold = req.priority, tide.settings.priority_threshold
    if priority is None:
        return False
    return bool(priority <= threshold if tide.low_values_first else priority >= threshold)


def _paused() -> PausedRequests | None:
    allocator = here().allocator
    return None if allocator is None else allocator.paused


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
            allocator.known[req.rid] = req
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
            reasons.append(f"the {name} is {type(made).__name__}, not tidekv's: its hook did not take")
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
    tide.scheduler = scheduler
    tide.allocator.old_pages = lambda: old_pages(scheduler)
    ladder, settings = tide.allocator.core.ledger.ladder, tide.settings
    if settings.pausing and len(ladder) > 1 and capacity.host_pages:
        rules = Rules(
            int(tide.allocator.page_size), 1 << (len(ladder) - 1), settings.quantum, settings.turn_tokens,
            settings.paused_share,
        )  # fmt: skip
        rows = scheduler.req_to_token_pool.req_to_token
        tide.allocator.paused = PausedRequests(tide.allocator, rows, rules, is_high)
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
    "Scheduler.process_input_requests": process_input_requests,
    "Scheduler.get_new_batch_prefill": get_new_batch_prefill,
    "Scheduler.update_running_batch": update_running_batch,
    "PrefillAdder.add_one_req": add_one_req,
    "SchedulerInvariantChecker.self_check_during_busy": self_check_during_busy,
    "Scheduler.on_idle": on_idle,
    "Scheduler.__init__": scheduler_init,
    "ModelRunner._forward_raw": forward_hooks.forward_raw,
    "DecodeCudaGraphRunner.can_run_graph": forward_hooks.decode_can_run_graph,
    "PrefillCudaGraphRunner.can_run_graph": forward_hooks.prefill_can_run_graph,
    "enable_fused_set_kv_buffer": forward_hooks.enable_fused_set_kv_buffer,
}


def hooks() -> dict[Seam, Callable[..., Any]]:
    """The hook of each hooked seam that this machine has."""
    cuda = torch.cuda.is_available()
    return {seam: _HOOKS[seam.name] for seam in SEAMS if seam.how == "hook" and (cuda or not seam.cuda_only)}


def is_hooked(seam: Seam) -> bool:
    """SGLang's wrappers keep what they wrap."""
    return hasattr(pkgutil.resolve_name(seam.path), "__wrapped__")
