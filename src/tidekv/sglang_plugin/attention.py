"""SGLang's attention backends, with the core's attention wherever a batch is narrowed.

A batch whose pages are all full width under their own ids goes to the base class untouched, captured graphs included.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from tidekv.attention.backend import AttentionBackend
from tidekv.attention.page_tables import PackedBatch
from tidekv.errors import ConfigError
from tidekv.sglang_plugin.allocator import TideAllocator
from tidekv.sglang_plugin.batch_plan import plan_batch
from tidekv.streaming.streamer import Streamer

if TYPE_CHECKING:
    _Base: Any = object
else:
    _Base = object


class TideAttention(_Base):  # type: ignore[misc]  # a mixin before one of SGLang's backends
    """`init_forward_metadata` decides for the whole forward; layers then run in order, as SGLang's models do."""

    def __init__(self, model_runner: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(model_runner, *args, **kwargs)
        allocator = model_runner.token_to_kv_pool_allocator
        if not isinstance(allocator, TideAllocator):
            raise ConfigError(f"the allocator is {type(allocator).__name__}, not tidekv's: its hook did not take")
        self.tide = allocator
        self.tide_rows = model_runner.req_to_token_pool
        self.tide_core = core_attention(allocator)
        self.tide_batch: PackedBatch | None = None

    def init_forward_metadata(self, forward_batch: Any) -> None:
        self._end_tide_step()
        batch = plan_batch(self.tide, self.tide_rows.req_to_token, forward_batch)
        if batch is None:
            super().init_forward_metadata(forward_batch)
            return
        self.tide_batch = batch
        self.tide_core.begin(batch)

    def forward_extend(
        self, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, save_kv_cache: bool = True, **kwargs: Any
    ) -> Any:
        if self.tide_batch is None:
            return super().forward_extend(q, k, v, layer, forward_batch, save_kv_cache=save_kv_cache, **kwargs)
        return self._forward_tide(q, k, v, layer, save_kv_cache, kwargs)

    def forward_decode(
        self, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, save_kv_cache: bool = True, **kwargs: Any
    ) -> Any:
        if self.tide_batch is None:
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
        if layer.layer_id == self.tide.core.geometry.layer_num - 1:
            self._end_tide_step()
        return out.reshape(-1, heads * dim)

    def _end_tide_step(self) -> None:
        if self.tide_batch is not None:
            self.tide_core.end()
            self.tide_batch = None


def core_attention(allocator: TideAllocator) -> AttentionBackend:
    """The core's attention over the allocator's pools; one for each allocator."""
    made = getattr(allocator, "core_attention", None)
    if made is None:
        core = allocator.core
        streamer = Streamer(core.kvcache, core.host_pool)
        made = allocator.core_attention = AttentionBackend(core.ledger, core.kvcache, core.host_pool, streamer)
    assert isinstance(made, AttentionBackend)
    return made
