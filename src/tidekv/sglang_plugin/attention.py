"""What stands before each of SGLang's attention backends: SGLang's own kernels and graphs wherever a batch is full
width, the core's attention wherever it is narrowed.

    full width, pages under their own ids   SGLang's class, untouched
    full width, pages elsewhere             SGLang's class over a list of where they lie (`backends.py`), also in graphs
    narrowed                                the core's attention; decode steps replay graphs of our own (`graphs.py`)

`planned` decides once for a whole forward, before SGLang asks whether a graph can run.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from tidekv.attention.backend import AttentionBackend
from tidekv.attention.page_tables import HostBatch
from tidekv.errors import ConfigError, InvariantError
from tidekv.memory.upload import upload
from tidekv.sglang_plugin.allocator import TideAllocator
from tidekv.sglang_plugin.batch_plan import Moved, plan_batch
from tidekv.sglang_plugin.page_mirror import PageMirror
from tidekv.streaming.streamer import Streamer

if TYPE_CHECKING:
    _Base: Any = object
else:
    _Base = object


class TideAttention(_Base):  # type: ignore[misc]  # a mixin before one of SGLang's backends
    """Layers run in order, as SGLang's models do.

    lists_rows   SGLang's class lists what its kernels read, and `list_moved` rewrites that list; where it does not, the
                 core reads moved pages, too
    """

    lists_rows: ClassVar[bool] = True

    def __init__(self, model_runner: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(model_runner, *args, **kwargs)
        allocator = model_runner.token_to_kv_pool_allocator
        if not isinstance(allocator, TideAllocator):
            raise ConfigError(f"the allocator is {type(allocator).__name__}, not tidekv's: its hook did not take")
        self.tide = allocator
        self.tide_rows = model_runner.req_to_token_pool
        self.tide_core = core_attention(allocator)
        allocator.attention = self
        if allocator.mirror is None:
            allocator.mirror = PageMirror(allocator.pages, self.tide_rows.req_to_token)
        self.captures_narrow = True  # where SGLang captures decode steps, too
        self.narrow_graphs: Any = None  # NarrowGraphs, once there was a narrowed step
        self.tide_plan: HostBatch | Moved | None = None
        self._planned = False
        self.num_narrow = self.num_moved = 0  # decode steps of each kind
        self._first_locs: torch.Tensor | None = None  # [B, N] on the device while SGLang's kernels read moved pages
        self._in_core = False

    # ---- one forward ---------------------------------------------------------------------------------------------

    @contextmanager
    def planned(self, forward_batch: Any) -> Iterator[HostBatch | Moved | None]:
        """Around one forward: how its batch is read. Where pages lie elsewhere, the batch's `out_cache_loc` names the
        real rows meanwhile: SGLang copies it into its buffers; its own books keep theirs."""
        plan = plan_batch(self.tide, self.tide_rows.req_to_token, forward_batch)
        own_locs = forward_batch.out_cache_loc
        if plan is not None and forward_batch.forward_mode.is_decode():
            self.num_narrow += isinstance(plan, HostBatch)
            self.num_moved += isinstance(plan, Moved)
        if isinstance(plan, Moved):
            if self.lists_rows:
                locs, first_locs = upload(self.tide.core.device, (plan.locs, plan.first_locs))
                forward_batch.out_cache_loc = locs
                self._first_locs = first_locs.view(plan.first_locs.shape)
            else:
                plan = plan.as_batch(self.tide.pages.page_size)
        self.tide_plan, self._planned = plan, True
        try:
            yield plan
        finally:
            if self._in_core:
                self._in_core = False
                self.tide_core.end()
            self.tide_plan, self._planned, self._first_locs = None, False, None
            forward_batch.out_cache_loc = own_locs

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """SGLang's, before a forward that is launched layer by layer."""
        if not self._planned:  # a warm-up
            super().init_forward_metadata(forward_batch)
            return
        if isinstance(self.tide_plan, HostBatch):
            self.tide_core.begin(self.tide_plan.on(self.tide.core.device))
            self._in_core = True
            return
        super().init_forward_metadata(forward_batch)
        self._list_moved(forward_batch, False)

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """SGLang's, before a captured step is replayed (or captured)."""
        super().init_forward_metadata_out_graph(forward_batch, in_capture=in_capture)
        self._list_moved(forward_batch, True)

    def _list_moved(self, forward_batch: Any, captured: bool) -> None:
        moved = self.tide_plan
        if not isinstance(moved, Moved):
            return
        if self._first_locs is None:
            raise InvariantError(f"{type(self).__name__} is asked to list moved pages, but `planned` uploaded none")
        self.list_moved(moved, self._first_locs, forward_batch, captured)

    def list_moved(self, moved: Moved, first_locs: torch.Tensor, forward_batch: Any, captured: bool) -> None:
        """Rewrite SGLang's list of what this batch reads, on the current stream, without waiting for it.

        first_locs: [B, N] int64 on the device, `moved.first_locs`. captured: the list is that of a decode graph, whose
        `forward_batch` is padded to `forward_batch.batch_size`; padding reads the sink page.
        """
        raise InvariantError(f"{type(self).__name__} keeps no list of what it reads")

    def told(self) -> str:
        """How decode steps ran so far, for the log."""
        graphs = self.narrow_graphs
        counts = graphs.steps.eager if graphs is not None else {}
        why = "; ".join(f"{reason} x{count}" for reason, count in counts.items())
        replays = graphs.steps.narrow_replays if graphs is not None else 0
        return (
            f"#moved-step: {self.num_moved}, #narrow-step: {self.num_narrow}, #narrow-replay: {replays}, "
            f"#row-read-back: {self.tide.mirror.num_read_back if self.tide.mirror else 0}, launched: {why or 'none'}"
        )

    # ---- the core's attention ------------------------------------------------------------------------------------

    @property
    def reads_in_core(self) -> bool:
        """Whether the layers of this forward are read by the core; then nothing else may write K and V."""
        return self._in_core

    @contextmanager
    def in_core(self) -> Iterator[None]:
        """Layers go to the core's attention, whose step the caller begins and ends (a captured step does)."""
        self._in_core = True
        try:
            yield
        finally:
            self._in_core = False

    def forward_extend(
        self, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, save_kv_cache: bool = True, **kwargs: Any
    ) -> Any:
        if not self._in_core:
            return super().forward_extend(q, k, v, layer, forward_batch, save_kv_cache=save_kv_cache, **kwargs)
        return self._forward_tide(q, k, v, layer, save_kv_cache, kwargs)

    def forward_decode(
        self, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, save_kv_cache: bool = True, **kwargs: Any
    ) -> Any:
        if not self._in_core:
            return super().forward_decode(q, k, v, layer, forward_batch, save_kv_cache=save_kv_cache, **kwargs)
        return self._forward_tide(q, k, v, layer, save_kv_cache, kwargs)

    def _forward_tide(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: Any, save_kv_cache: bool, kwargs: dict[str, Any]
    ) -> torch.Tensor:
        """q [T, Hq * D], k and v [T, Hkv, D] -> [T, Hq * D]."""
        extras = [name for name, value in kwargs.items() if value is not None]
        if extras or not save_kv_cache or layer.logit_cap:
            raise ConfigError(
                f"layer {layer.layer_id} asks for {', '.join(extras) or 'attention without a KV write, or a cap'}, "
                "which tidekv's attention has not; start without TIDEKV_SGLANG for this model"
            )
        heads, dim = layer.tp_q_head_num, layer.qk_head_dim
        out = self.tide_core.forward(
            layer.layer_id,
            q.reshape(-1, heads, dim),
            k.reshape(-1, layer.tp_k_head_num, dim),
            v.reshape(-1, layer.tp_v_head_num, dim),
            layer.scaling,
        )
        return out.reshape(-1, heads * dim)


def core_attention(allocator: TideAllocator) -> AttentionBackend:
    """The core's attention over the allocator's pools; one for each allocator."""
    made = getattr(allocator, "core_attention", None)
    if made is None:
        core = allocator.core
        streamer = Streamer(core.kvcache, core.host_pool)
        made = allocator.core_attention = AttentionBackend(core.ledger, core.kvcache, core.host_pool, streamer)
    assert isinstance(made, AttentionBackend)
    return made
