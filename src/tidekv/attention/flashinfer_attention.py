"""Whole contexts read by FlashInfer's FA2 kernels: one plan a step from lengths alone, one list of pages a layer.

    begin(batch)   nothing yet
    run(layer 0)   plan: how the batch's keys are split over the GPU. Only lengths, known to the host: nothing waits
    run(layer l)   the layer's pages as one flat int32 list (a launch), unless they are the last layer's; attention

Decode batches go to FlashInfer's decode wrapper, others to its prefill wrapper. Both run the same compiled module: the
decode wrapper always uses tensor cores, also for groups of fewer than 4 query heads a KV head, since its other kernel
is a second module to compile and decode waits for memory either way.

A context in several parts and one that leaves pages out stay with our Triton kernel, which masks pages: FlashInfer's
lists could leave pages out only if every query saw the rest, and its causal mask counts listed pages. So no log-sum-exp
is asked for here (FlashInfer's is base 2).

Offsets: FlashInfer widens the page id to size_t before it multiplies (`paged_kv_t::get_elem_offset` in its page.cuh),
so only the ids themselves have to fit int32. Keys and values past a request's end are not loaded, as in our kernel.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from tidekv.attention.page_tables import PackedBatch
from tidekv.errors import InvariantError
from tidekv.geometry import KVGeometry
from tidekv.kernels.page_lists import page_lists
from tidekv.memory.ledger import IntArray

HEAD_DIMS = (64, 128, 256)
DTYPES = (torch.float16, torch.bfloat16)
CAPTURED_INT_BYTES = 1 << 20  # a plan of 256 decodes takes 7 KB; FlashInfer's default is 8 MB for each wrapper
_new_event: Callable[..., Any] = torch.cuda.Event  # torch does not type its constructor


def why_not(geometry: KVGeometry, device: torch.device, *, compile_missing: bool = False) -> str | None:
    """Why FlashInfer cannot read this pool, or None if it can. Any page size and any group of query heads will do.

    compile_missing: have its kernels compiled if they are not (nvcc, about a minute, kept in its cache); otherwise
    that is a reason, since a first request should not wait for a compiler.
    """
    if geometry.dtype not in DTYPES:
        return f"it reads float16 and bfloat16, the cache is {_short(geometry.dtype)}"
    if geometry.head_dim not in HEAD_DIMS:
        return f"it has head_dim {', '.join(map(str, HEAD_DIMS))}, the model has {geometry.head_dim}"
    flat_pages = geometry.layer_num * geometry.page_stride
    if flat_pages >= 2**31:
        return f"its page ids are int32, the pool has {flat_pages} flat pages"
    if device.type != "cuda":
        return f"it needs a CUDA device, the pool is on {device}"
    capability = torch.cuda.get_device_capability(device)
    if capability < (8, 0):
        return f"it needs compute capability 8.0, {device} has {capability[0]}.{capability[1]}"
    if importlib.util.find_spec("flashinfer") is None:
        return "it is not installed: pip install flashinfer-python"
    try:
        spec = _module_spec(geometry)
    except (ImportError, OSError, RuntimeError) as error:  # its parts disagree in version, a library is missing
        return f"it does not load here: {_first_line(error)}"
    if spec.is_compiled:
        return None
    kernels = f"its kernels for {_short(geometry.dtype)}, head_dim {geometry.head_dim}"
    if not compile_missing:
        return (
            f"{kernels} are not compiled: pip install flashinfer-jit-cache, or ask for 'flashinfer' by name to have "
            "them compiled (needs nvcc)"
        )
    try:
        spec.build(verbose=False)
    except (OSError, RuntimeError) as error:
        return f"{kernels} could not be compiled: {_first_line(error)}"
    return None


def _module_spec(geometry: KVGeometry) -> Any:
    """FlashInfer's description of the one module that everything here runs."""
    from flashinfer.jit import gen_batch_prefill_module

    dtype, head_dim = geometry.dtype, geometry.head_dim
    no_position_encoding = 0
    return gen_batch_prefill_module(
        "fa2", dtype, dtype, dtype, torch.int32, head_dim, head_dim, no_position_encoding, False, False, False
    )


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


class PageLists:
    """What a wrapper reads in place of a page table. Tensors int32 on the device: indices [capacity], indptr [B + 1],
    last_page_len [B]."""

    def __init__(self, capacity: int, num_requests: int, device: torch.device) -> None:
        def empty(n: int) -> torch.Tensor:
            return torch.empty(n, dtype=torch.int32, device=device)

        self.indices, self.indptr, self.last_page_len = empty(capacity), empty(num_requests + 1), empty(num_requests)


class _Planner:
    """Makes plans of one wrapper. FlashInfer stages a plan in a pinned buffer of the wrapper and copies it from there
    asynchronously: the next plan must not overtake that copy when the host runs ahead of the device."""

    def __init__(self, wrapper: Any) -> None:
        self.wrapper = wrapper
        self._copied = _new_event()

    def __call__(self, plan: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        self._copied.synchronize()  # the step before last is over by then: no wait is seen
        plan(*args, **kwargs)
        self._copied.record()


class CapturedDecode:
    """Plan and buffers of one captured decode step, which its CUDA graph reads at fixed addresses.

    The step's first forward, outside the capture, makes the wrapper. Then `plan(kv_lens)` before each replay: the grid
    of a captured plan is fixed by the batch size, what each block does is in the buffers.
    """

    def __init__(self, attention: FlashInferAttention, num_requests: int, num_columns: int) -> None:
        self.attention = attention
        self.num_requests = num_requests
        self.lists = PageLists(num_requests * num_columns, num_requests, attention.device)
        self._none = torch.empty(0, dtype=torch.int32, device=attention.device)
        self._planner: _Planner | None = None
        self._num_q_heads = 0

    def plan(self, kv_lens: IntArray) -> None:
        """kv_lens: [B] on the host, 1 for rows that are padding."""
        if self._planner is None:
            raise InvariantError("a captured step is planned again before its first forward")
        wrapper = self._planner.wrapper
        self._planner(
            self.attention.flashinfer.fast_decode_plan, wrapper, *self._plan_arguments(kv_lens), **self._plan_options()
        )

    def first_plan(self, kv_lens: IntArray, num_q_heads: int) -> Any:
        """The wrapper, planned; made by the first call, the same in later ones."""
        if self._planner is None:
            attention, lists = self.attention, self.lists
            self._num_q_heads = num_q_heads
            workspace = attention.workspace(num_q_heads, self.num_requests)
            wrapper = attention.flashinfer.BatchDecodeWithPagedKVCacheWrapper(
                workspace,
                "NHD",
                use_cuda_graph=True,
                use_tensor_cores=True,
                paged_kv_indptr_buffer=lists.indptr,
                paged_kv_indices_buffer=lists.indices,
                paged_kv_last_page_len_buffer=lists.last_page_len,
                backend="fa2",
            )
            wrapper.reset_workspace_buffer(workspace, attention.captured_int_workspace)
            self._planner = _Planner(wrapper)
            self._planner(wrapper.plan, *self._plan_arguments(kv_lens), **self._plan_options())
        return self._planner.wrapper

    def _plan_arguments(self, kv_lens: IntArray) -> tuple[Any, ...]:
        """The pages themselves are listed on the device, by the step's own launch."""
        indptr, last_page_len = self.attention.host_lists(kv_lens)
        geometry = self.attention.geometry
        heads = (self._num_q_heads, geometry.num_kv_heads, geometry.head_dim)
        return indptr, self._none, last_page_len, *heads, geometry.page_size

    def _plan_options(self) -> dict[str, Any]:
        dtype = self.attention.geometry.dtype
        return {"q_data_type": dtype, "kv_data_type": dtype, "sm_scale": 1.0}


class FlashInferAttention:
    """Reads whole contexts from a pool that `why_not` has no objection to. One for each `AttentionBackend`."""

    def __init__(self, geometry: KVGeometry, device: torch.device) -> None:
        import flashinfer

        self.flashinfer: Any = flashinfer
        self.geometry = geometry
        self.device = device
        self._workspace: torch.Tensor | None = None
        self._int_workspace: torch.Tensor | None = None
        self._planners: dict[bool, _Planner] = {}  # by "is a decode batch"
        self._indices = torch.empty(0, dtype=torch.int32, device=device)
        self._batch: PackedBatch | None = None
        self._captured: CapturedDecode | None = None
        self._planned: tuple[Any, PageLists] | None = None
        self._listed: torch.Tensor | None = None  # the table whose pages the lists hold

    def begin(self, batch: PackedBatch, captured: CapturedDecode | None = None) -> None:
        """Start a step. `captured`: the step is, or is about to be, captured; it keeps plan and lists there."""
        self._batch, self._captured, self._planned, self._listed = batch, captured, None, None

    def end(self) -> None:
        self._batch = self._captured = self._planned = self._listed = None

    def run(
        self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, table: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """Causal attention of the step's batch over one layer.

        q: [T, Hq, D], any token and head strides. keys, values: [rows, Hkv, D] contiguous, what `table` [B, N] int64
        indexes in pages; a later layer may bring another table, of the same lengths. Returns [T, Hq, D], contiguous.
        """
        batch, geometry = self._batch, self.geometry
        if batch is None:
            raise RuntimeError("run before begin")
        if self._planned is None:
            self._planned = self._plan(batch, q.shape[1])
        wrapper, lists = self._planned
        if table is not self._listed:
            page_lists(table, batch.kv_lens_dev, geometry.page_size, lists.indices, lists.indptr, lists.last_page_len)
            self._listed = table
        shape = (-1, geometry.page_size, geometry.num_kv_heads, geometry.head_dim)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        # Planned with a scale of 1: it is no part of a plan, and layers may differ in it.
        wrapper.run(q, (keys.view(shape), values.view(shape)), q_scale=scale, out=out)
        return out

    def captured_decode(self, num_requests: int, num_columns: int) -> CapturedDecode:
        """For a decode step of so many requests, with page tables of so many columns, that is to be captured."""
        return CapturedDecode(self, num_requests, num_columns)

    def _plan(self, batch: PackedBatch, num_q_heads: int) -> tuple[Any, PageLists]:
        if self._captured is not None:
            return self._captured.first_plan(batch.kv_lens, num_q_heads), self._captured.lists
        geometry, num_requests = self.geometry, len(batch.kv_lens)
        indptr, last_page_len = self.host_lists(batch.kv_lens)
        total = int(indptr[-1])
        if total > self._indices.numel():
            self._indices = torch.empty(1 << (total - 1).bit_length(), dtype=torch.int32, device=self.device)
        lists = PageLists(0, num_requests, self.device)
        lists.indices = self._indices[:total]  # on the device: the wrapper keeps it as it is, and it is filled later
        is_decode = bool((batch.q_lens == 1).all())
        planner = self._planners.get(is_decode) or self._make_planner(is_decode, num_q_heads)
        options: dict[str, Any] = {
            "q_data_type": geometry.dtype,
            "kv_data_type": geometry.dtype,
            "sm_scale": 1.0,
            "seq_lens": torch.from_numpy(batch.kv_lens.astype(np.int32)),
        }
        places: tuple[Any, ...] = (indptr, lists.indices, last_page_len)
        if not is_decode:
            cu_q = np.zeros(num_requests + 1, dtype=np.int32)
            np.cumsum(batch.q_lens, out=cu_q[1:])
            places = (torch.from_numpy(cu_q), *places)
            options |= {"causal": True, "max_token_per_sequence": batch.max_q}
        heads = (num_q_heads, geometry.num_kv_heads, geometry.head_dim)
        planner(planner.wrapper.plan, *places, *heads, geometry.page_size, **options)
        return planner.wrapper, lists

    def _make_planner(self, is_decode: bool, num_q_heads: int) -> _Planner:
        workspace = self.workspace(num_q_heads, 0)
        if is_decode:
            wrapper = self.flashinfer.BatchDecodeWithPagedKVCacheWrapper(
                workspace, "NHD", use_tensor_cores=True, backend="fa2"
            )
        else:
            wrapper = self.flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend="fa2")
        self._planners[is_decode] = planner = _Planner(wrapper)
        return planner

    def host_lists(self, kv_lens: IntArray) -> tuple[torch.Tensor, torch.Tensor]:
        """(indptr [B + 1], last_page_len [B]) int32 on the host: plans are made there."""
        page_size = self.geometry.page_size
        pages = -(-kv_lens // page_size)
        indptr = np.zeros(len(pages) + 1, dtype=np.int32)
        np.cumsum(pages, out=indptr[1:])
        return torch.from_numpy(indptr), torch.from_numpy((kv_lens - (pages - 1) * page_size).astype(np.int32))

    def workspace(self, num_q_heads: int, num_captured: int) -> torch.Tensor:
        """Scratch for the partial results of split keys, shared by all wrappers: their steps follow each other on one
        stream. num_captured: requests of a captured step, 0 for steps that are not."""
        sms = torch.cuda.get_device_properties(self.device).multi_processor_count
        num_bytes = workspace_bytes(num_q_heads, self.geometry.num_kv_heads, self.geometry.head_dim, sms, num_captured)
        if self._workspace is None or self._workspace.numel() < num_bytes:
            self._workspace = torch.zeros(num_bytes, dtype=torch.uint8, device=self.device)
        return self._workspace

    @property
    def captured_int_workspace(self) -> torch.Tensor:
        """Where plans of captured steps lie on the device, one at a time."""
        if self._int_workspace is None:
            self._int_workspace = torch.zeros(CAPTURED_INT_BYTES, dtype=torch.uint8, device=self.device)
        return self._int_workspace


def workspace_bytes(num_q_heads: int, num_kv_heads: int, head_dim: int, sms: int, num_captured: int) -> int:
    """Bytes that FlashInfer's FA2 planner takes at most: blocks x rows of a block x query heads x (D + 1) fp32.

    It splits keys only while that makes at most two blocks an SM; a captured step always counts as split, with a block
    for each tile of each request. Example: 32 query heads, 8 KV heads of 128 on 132 SMs: 33 blocks of 128 rows, 67
    MiB; 64 query heads would not fit the usual 128 MiB.
    """
    group = num_q_heads // num_kv_heads
    blocks, rows = 2 * sms // num_kv_heads, 128
    need = blocks * rows
    if num_captured:
        rows = 16 if group <= 16 else 64 if group <= 64 else 128
        need = max(need, (-(-num_captured * group // rows) + num_captured - 1) * rows, blocks * rows)
    return need * num_q_heads * (head_dim + 1) * 4 + (1 << 16)  # and alignment
