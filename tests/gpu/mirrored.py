"""The oracle's cache model (plain numpy on the CPU) driving an allocator whose KV and locations live on the GPU.

`MirroredAllocator` stands between them. The model sees CPU copies of K, V and `req_to_token`; before each call they
go to the device (the model may have written K and V), after it they come back. So every kernel, remap and deferred
free runs as on a real machine, and every bit is compared by code that knows nothing of CUDA.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

import oracle
from oracle import CacheModel
from tidekv import DeviceKVPool, HostKVPool, KVGeometry, ReqToTokenPool
from tidekv.allocator import DynamicPagedTokenToKVPoolAllocator


class MirroredRows:
    """`ReqToTokenPool` whose `req_to_token` is the CPU copy."""

    def __init__(self, pool: ReqToTokenPool) -> None:
        self._pool = pool
        self.req_to_token = pool.req_to_token.cpu().clone()

    def pull(self) -> None:
        self.req_to_token.copy_(self._pool.req_to_token)

    def alloc(self, n: int) -> Any:
        rows = self._pool.alloc(n)
        self.pull()
        return rows

    def free(self, rows: Any) -> None:
        self._pool.free(rows)
        self.pull()

    def write(self, indices: Any, locs: Any) -> None:
        self._pool.write(indices, locs.to(self._pool.device) if isinstance(locs, torch.Tensor) else locs)
        self.pull()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pool, name)


class MirroredAllocator:
    """Forwards everything; tensors go over as CUDA tensors and come back as CPU tensors."""

    _OWN = ("_inner", "kvcache", "req_to_token_pool", "_turn")

    def __init__(self, inner: DynamicPagedTokenToKVPoolAllocator) -> None:
        self._inner = inner
        self._turn = 0
        self.kvcache = SimpleNamespace(
            k_flat=inner.kvcache.k_flat.cpu().clone(), v_flat=inner.kvcache.v_flat.cpu().clone()
        )
        self.req_to_token_pool = MirroredRows(inner.req_to_token_pool)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self._OWN:
            object.__setattr__(self, name, value)
        else:
            setattr(self._inner, name, value)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._inner, name)
        if not callable(value) or name in ("register_loc_holder", "step", "evictor"):
            return value

        def call(*args: Any, **kwargs: Any) -> Any:
            self._push()
            try:
                return self._home(value(*map(self._over, args), **kwargs))
            finally:
                self._pull()

        return call

    def alloc_extend(
        self, prefix: Any, prefix_cpu: Any, seq: Any, seq_cpu: Any, last: Any, tokens: int, high: Any
    ) -> Any:
        return self._allocate("alloc_extend", prefix, prefix_cpu, seq, seq_cpu, last, tokens, high, stay=(1, 3, 6))

    def alloc_decode(self, seq: Any, seq_cpu: Any, last: Any, high: Any = None) -> Any:
        return self._allocate("alloc_decode", seq, seq_cpu, last, high, stay=(1, 3))

    def free(self, locs: torch.Tensor) -> None:
        """Every second good free stays in flight until somebody needs its pages; a bad one has to be reported at
        once."""
        ledger, size = self._inner.ledger, self._inner.page_size
        slots = locs.numpy().astype(np.int64) // size
        pending = self._inner._frees_in_flight
        self._turn += 1
        good = bool(ledger.is_slot(slots).all()) and not pending
        self._inner.free(self._over(locs))
        if not good or self._turn % 2:
            self._inner._collect_freed()

    def _allocate(self, name: str, *args: Any, stay: tuple[int, ...]) -> Any:
        self._push()
        try:
            moved = [arg if i in stay else self._over(arg) for i, arg in enumerate(args)]
            return self._home(getattr(self._inner, name)(*moved))
        finally:
            self._pull()

    def _over(self, value: Any) -> Any:
        return value.to(self._inner.device) if isinstance(value, torch.Tensor) else value

    def _home(self, value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(self._home(item) for item in value)
        return value.cpu() if isinstance(value, torch.Tensor) else value

    def _push(self) -> None:
        self._inner.kvcache.k_flat.copy_(self.kvcache.k_flat)
        self._inner.kvcache.v_flat.copy_(self.kvcache.v_flat)

    def _pull(self) -> None:
        if self._inner.device.type == "cuda":
            torch.cuda.synchronize()  # the host pool is pinned: kernels write it behind our back
        self.kvcache.k_flat.copy_(self._inner.kvcache.k_flat)
        self.kvcache.v_flat.copy_(self._inner.kvcache.v_flat)
        self.req_to_token_pool.pull()


def make_mirrored(
    device: str,
    layer_num: int,
    num_pages: int,
    page_size: int,
    *,
    host_pages: int,
    rows: int,
    max_context_len: int,
    index_dtype: torch.dtype,
    **options: Any,
) -> MirroredAllocator:
    """As `oracle.make_allocator`, on `device`."""
    geometry = KVGeometry(layer_num, num_pages, page_size, 1, 1, torch.float32)
    inner = DynamicPagedTokenToKVPoolAllocator(
        num_pages * page_size,
        page_size,
        torch.float32,
        device,
        DeviceKVPool(geometry, device),
        host_pool=HostKVPool(geometry, host_pages * geometry.page_bytes),
        req_to_token_pool=ReqToTokenPool(rows, max_context_len, device, index_dtype),
        **options,
    )
    return MirroredAllocator(inner)


class MirroredModel(CacheModel):
    """`CacheModel` over a mirrored allocator. What it leaves out, the CPU's own soak covers."""

    def __init__(self, config: dict[str, Any], *, device: str) -> None:
        original = oracle.make_allocator
        oracle.make_allocator = lambda *args, **options: make_mirrored(device, *args, **options)
        try:
            super().__init__(config)
        finally:
            oracle.make_allocator = original

    def _snapshot(self) -> dict[str, Any]:
        self.allocator._collect_freed()  # frees in flight are booked by whoever needs pages: no change of state
        return super()._snapshot()

    def misuse(self, pick: int, kind: int) -> None:
        """A `last_loc` that does not fit is only noticed where reading it costs no wait: on the CPU."""
        if kind < 4:
            super().misuse(pick, kind)
