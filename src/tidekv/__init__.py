"""A layer-elastic KV cache: under pressure pages give up layers instead of requests giving up their cache."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tidekv.allocator import DynamicPagedTokenToKVPoolAllocator
from tidekv.errors import CapacityError, ConfigError, DoubleFreeError, InvariantError
from tidekv.geometry import KVGeometry
from tidekv.memory.device_pool import DeviceKVPool
from tidekv.memory.host_pool import HostKVPool
from tidekv.memory.req_to_token import ReqToTokenPool

if TYPE_CHECKING:
    from tidekv.engine.engine import Engine, EngineConfig
    from tidekv.engine.request import RequestOutput
    from tidekv.engine.sampling import SamplingParams

__version__ = "0.1.0"

__all__ = [
    "CapacityError",
    "ConfigError",
    "DeviceKVPool",
    "DoubleFreeError",
    "DynamicPagedTokenToKVPoolAllocator",
    "Engine",
    "EngineConfig",
    "HostKVPool",
    "InvariantError",
    "KVGeometry",
    "ReqToTokenPool",
    "RequestOutput",
    "SamplingParams",
]

_ENGINE = {
    "Engine": "tidekv.engine.engine",
    "EngineConfig": "tidekv.engine.engine",
    "RequestOutput": "tidekv.engine.request",
    "SamplingParams": "tidekv.engine.sampling",
}


def __getattr__(name: str) -> Any:
    """The engine imports `transformers`, which takes seconds; the cache itself does not need it."""
    if name in _ENGINE:
        from importlib import import_module

        return getattr(import_module(_ENGINE[name]), name)
    raise AttributeError(f"module 'tidekv' has no attribute {name!r}")
