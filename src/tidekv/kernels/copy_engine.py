"""The driver's batched copy: one call for many runs between pinned host and device memory. No SM takes part.

`cudaMemcpyBatchAsync` of the CUDA 13 runtime, through ctypes: the list of runs is then three numpy arrays and no Python
object a run. It costs the host 0.5 us a run and cannot be captured in a graph with lists that change, so it is for
steps that are launched one kernel after another and are long enough to hide that.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tidekv.errors import InvariantError

_SOURCE_ACCESS_IN_STREAM_ORDER = 1  # cudaMemcpySrcAccessOrderStream
_PREFER_OVERLAP_WITH_COMPUTE = 1  # cudaMemcpyFlagPreferOverlapWithCompute

Words = npt.NDArray[np.uint64]


class _Attributes(ctypes.Structure):
    """cudaMemcpyAttributes: an enum, two locations (type, id) that only managed memory needs, flags."""

    _fields_ = (
        ("source_access_order", ctypes.c_int),
        ("source_hint", ctypes.c_int * 2),
        ("destination_hint", ctypes.c_int * 2),
        ("flags", ctypes.c_uint),
    )


def why_not() -> str | None:
    """What is missing for `BatchedCopy`, or None."""
    major = int((torch.version.cuda or "0").split(".", maxsplit=1)[0])
    if major < 13:  # before that the call has another signature
        return f"it needs the CUDA 13 runtime, torch was built for {torch.version.cuda}"
    try:
        _ = ctypes.CDLL(f"libcudart.so.{major}").cudaMemcpyBatchAsync
    except (OSError, AttributeError) as error:
        return str(error)
    return None


def page_addresses(flat: torch.Tensor, pages: npt.NDArray[np.int64], page_bytes: int) -> Words:
    """[n] uint64: where these pages of `flat` begin."""
    return pages.astype(np.uint64) * np.uint64(page_bytes) + np.uint64(flat.data_ptr())


class BatchedCopy:
    """Raises OSError or AttributeError where the runtime has no such call: ask `why_not` first."""

    def __init__(self) -> None:
        major = (torch.version.cuda or "0").split(".", maxsplit=1)[0]
        pointer = ctypes.c_void_p
        self._call: Any = ctypes.CDLL(f"libcudart.so.{major}").cudaMemcpyBatchAsync
        self._call.argtypes = [pointer, pointer, pointer, ctypes.c_size_t, pointer, pointer, ctypes.c_size_t, pointer]
        self._call.restype = ctypes.c_int
        self._attributes = _Attributes(_SOURCE_ACCESS_IN_STREAM_ORDER, (0, 0), (0, 0), _PREFER_OVERLAP_WITH_COMPUTE)
        self._first = ctypes.c_size_t(0)

    def copy(self, dst: Words, src: Words, sizes: Words, stream: torch.cuda.Stream) -> None:
        """`sizes[i]` bytes from address `src[i]` to address `dst[i]` ([n] each, contiguous), on `stream` (not the
        default one)."""
        if not len(dst):
            return
        status = self._call(
            dst.ctypes.data,
            src.ctypes.data,
            sizes.ctypes.data,
            len(dst),
            ctypes.addressof(self._attributes),
            ctypes.addressof(self._first),
            1,
            stream.cuda_stream,
        )
        if status:
            raise InvariantError(f"cudaMemcpyBatchAsync of {len(dst)} runs returned {status}")
