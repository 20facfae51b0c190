"""Made once in a scheduler process: sizes, pool, allocator. Each function wraps a method of SGLang's (`original`)."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable
from typing import Any

from tidekv.errors import ConfigError
from tidekv.geometry import MIN_SLOT_WIDTH
from tidekv.memory.host_pool import HostKVPool
from tidekv.sglang_plugin import refusals
from tidekv.sglang_plugin.allocator import TideAllocator
from tidekv.sglang_plugin.capacity import Capacity, default_host_pages, machine_memory_bytes, plan_capacity
from tidekv.sglang_plugin.config import Settings
from tidekv.sglang_plugin.metrics import Reporter
from tidekv.sglang_plugin.pool import TideKVPool
from tidekv.sglang_plugin.pressed_pages import TideCore
from tidekv.sglang_plugin.window import Window

Original = Callable[..., Any]


@dataclasses.dataclass
class Installation:
    """What this process has made so far; a scheduler process makes one of each."""

    settings: Settings
    capacity: Capacity | None = None
    allocator: TideAllocator | None = None
    reporter: Reporter | None = None
    scheduler: Any = None
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


def derive_pool_sizes(original: Original, configurator: Any, *, config: Any) -> Any:
    """SGLang is told the virtual size; the physical one stays here."""
    tide, args = here(), configurator.server_args
    refusals.refuse(
        refusals.refused_flags(args)
        + refusals.refused_model(configurator)
        + refusals.refused_backends(*chosen_backends(args), configurator.device)
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


def chosen_backends(args: Any) -> tuple[str, str]:
    """(prefill, decode): the attention backends that were asked for, or that SGLang chose."""
    if hasattr(args, "get_attention_backends"):  # 0.5.17, where the arguments themselves are resolved
        prefill, decode = args.get_attention_backends()
    else:
        prefill, decode = importlib.import_module("sglang.srt.runtime_context").attention_backends()
    return prefill, decode


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
    high, staging = settings.high_reserved_pages, None
    if settings.pausing:
        # The ladder then halves high priority after everything else only, and staging is small: what narrows is hardly
        # read. 7 of 937 pages stage 112 at a time; the core's 56 would be lost to everybody else.
        high = geometry.num_pages if high is None else high
        staging = min(max(2, geometry.num_pages // 128), geometry.num_pages)
    core = TideCore(
        geometry.num_pages * geometry.page_size,
        geometry.page_size,
        geometry.dtype,
        pool.device,
        pool,
        host_pool=HostKVPool(geometry, tide.capacity.host_pages * geometry.page_bytes),
        low_max_pages=settings.low_max_pages,
        high_reserved_pages=high,
        dynamic_max_pages=staging,
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
