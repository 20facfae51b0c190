"""SGLang's MHA pool over the core's flat tensors: `k_buffer[l]` is the run of rows that layer l has at full width."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

from tidekv.errors import ConfigError
from tidekv.geometry import KVGeometry
from tidekv.memory.device_pool import DeviceKVPool


class TideKVPool(MHATokenToKVPool):  # type: ignore[misc]  # sglang is untyped here
    """`size` is the physical pool in tokens, without the sink page, as in SGLang.

    At full width every method of the base class works unchanged. What copies pages as if a location said where all
    layers are is refused: nothing that tidekv serves calls it.
    """

    device_pool: DeviceKVPool

    def _create_buffers_normal(self) -> None:
        if self.kv_cache_layout != "nhd" or self.head_dim != self.v_head_dim:
            raise ConfigError(
                f"tidekv needs the NHD layout and K and V of one width, got layout {self.kv_cache_layout!r}, "
                f"head_dim {self.head_dim}, v_head_dim {self.v_head_dim}; unset SGLANG_USE_HND_KVCACHE, or switch "
                "tidekv off for this model"
            )
        geometry = KVGeometry(
            self.layer_num, self.size // self.page_size, self.page_size, self.head_num, self.head_dim, self.store_dtype
        )
        self.device_pool = DeviceKVPool(geometry, self.device)
        layers = range(self.layer_num)
        self.k_buffer = [self.device_pool.get_key_buffer(layer) for layer in layers]
        self.v_buffer = [self.device_pool.get_value_buffer(layer) for layer in layers]

    def get_cpu_copy(self, *args: Any, **kwargs: Any) -> Any:
        raise ConfigError("tidekv's pool cannot be copied page by page; switch off what offloads KV to the CPU")

    def load_cpu_copy(self, *args: Any, **kwargs: Any) -> Any:
        raise ConfigError("tidekv's pool cannot be loaded page by page; switch off what offloads KV to the CPU")

    def move_kv_cache(self, tgt_loc: torch.Tensor, src_loc: torch.Tensor) -> None:
        raise ConfigError("tidekv's pool moves no single tokens; switch speculative decoding off")
