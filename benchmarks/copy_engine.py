"""The driver's batched copy: one call for many runs between pinned host and device memory, no SM involved.

`cudaMemcpyBatchAsync` through ctypes, because a list of runs is then four numpy arrays and no Python object a run.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

_SOURCE_ACCESS_IN_STREAM_ORDER = 1  # cudaMemcpySrcAccessOrderStream
_PREFER_OVERLAP_WITH_COMPUTE = 1  # cudaMemcpyFlagPreferOverlapWithCompute


class _Attributes(ctypes.Structure):
    """cudaMemcpyAttributes: an enum, two locations (type, id) that only managed memory needs, flags."""

    _fields_ = (
        ("source_access_order", ctypes.c_int),
        ("source_hint", ctypes.c_int * 2),
        ("destination_hint", ctypes.c_int * 2),
        ("flags", ctypes.c_uint),
    )


class BatchedCopy:
    """Raises OSError or AttributeError where the runtime has no such call."""

    def __init__(self) -> None:
        major = int((torch.version.cuda or "0").split(".", maxsplit=1)[0])
        if major < 13:
            raise OSError(f"needs the CUDA 13 runtime, torch was built for {torch.version.cuda}")
        self._call: Any = ctypes.CDLL(f"libcudart.so.{major}").cudaMemcpyBatchAsync
        pointer = ctypes.c_void_p
        # CUDA 13 dropped the index of the failed copy that 12.8 returned.
        self._call.argtypes = [pointer, pointer, pointer, ctypes.c_size_t, pointer, pointer, ctypes.c_size_t, pointer]
        self._call.restype = ctypes.c_int
        self._attributes = _Attributes(_SOURCE_ACCESS_IN_STREAM_ORDER, (0, 0), (0, 0), _PREFER_OVERLAP_WITH_COMPUTE)
        self._first = ctypes.c_size_t(0)

    def copy(
        self,
        dst: torch.Tensor,
        src: torch.Tensor,
        dst_pages: npt.NDArray[np.int64],
        src_pages: npt.NDArray[np.int64],
        page_bytes: int,
        stream: torch.cuda.Stream,
        run: int = 1,
    ) -> None:
        """Runs of `run` pages, dst[dst_pages[i]...] = src[src_pages[i]...], on `stream` (not the default one)."""
        to = dst_pages.astype(np.uint64) * np.uint64(page_bytes) + np.uint64(dst.data_ptr())
        where = src_pages.astype(np.uint64) * np.uint64(page_bytes) + np.uint64(src.data_ptr())
        sizes = np.full(len(to), run * page_bytes, dtype=np.uint64)
        status = self._call(
            to.ctypes.data,
            where.ctypes.data,
            sizes.ctypes.data,
            len(to),
            ctypes.addressof(self._attributes),
            ctypes.addressof(self._first),
            1,
            stream.cuda_stream,
        )
        if status:
            raise RuntimeError(f"cudaMemcpyBatchAsync returned {status}")
