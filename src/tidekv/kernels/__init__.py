"""Triton kernels, each beside its torch twin. This file holds the optional Triton import, the choice of backend and
the boundary checks.

Every launcher takes `backend`: "auto" runs Triton when an operand is a CUDA tensor and the twin otherwise, "torch"
forces the twin, "triton" forces the kernel (on CPU tensors that needs TRITON_INTERPRET=1 before the first import; for
tests). The package imports and the twins work with no Triton installed.
"""

from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any, Literal

import torch
from torch import Tensor

from tidekv.errors import ConfigError

try:
    import triton
    import triton.language as tl

    HAS_TRITON = True
except ImportError:

    def _jit(fn: Any = None, **_options: Any) -> Any:
        """Stands in for `triton.jit`: leaves the function alone, so that modules with kernels import and only their
        twins run."""
        return fn if fn is not None else (lambda inner: inner)

    triton = SimpleNamespace(jit=_jit)
    tl = SimpleNamespace(constexpr=object)
    HAS_TRITON = False

Backend = Literal["auto", "triton", "torch"]


def cdiv(numerator: int, denominator: int) -> int:
    """Rounds the quotient of two non-negative ints up."""
    return -(-numerator // denominator)


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is >= n, for n >= 1."""
    return 1 << (n - 1).bit_length()


def require(ok: bool, message: str | Callable[[], str]) -> None:
    """Raises `ConfigError(message)` unless `ok`; a callable message is built only on failure."""
    if not ok:
        raise ConfigError(message if isinstance(message, str) else message())


def check_tensor(name: str, tensor: Tensor, ndim: int | None, dtypes: Collection[torch.dtype] | None) -> None:
    """Checks rank and dtype; the error names what was expected and what came. Strides are checked where they matter."""
    if ndim is not None and tensor.ndim != ndim:
        raise ConfigError(f"{name} must have {ndim} dimension(s), got shape {tuple(tensor.shape)}")
    if dtypes is not None and tensor.dtype not in dtypes:
        raise ConfigError(f"{name} must be {' or '.join(str(d) for d in dtypes)}, got {tensor.dtype}")


def check_contiguous(name: str, tensor: Tensor) -> None:
    """Checks that a kernel may address the tensor as one run of memory."""
    if not tensor.is_contiguous():
        raise ConfigError(f"{name} must be contiguous, got strides {tensor.stride()}")


def check_columns(name: str, table: Tensor) -> None:
    """Checks that the entries of a row lie side by side; rows may lie anywhere."""
    if table.shape[1] > 1 and table.stride(1) != 1:
        raise ConfigError(f"{name} must have column stride 1, got strides {table.stride()}")


def check_positive(name: str, value: int) -> None:
    """Checks an int that must be at least 1."""
    if value < 1:
        raise ConfigError(f"{name} must be at least 1, got {value}")


def use_triton(
    kernel: Any, backend: Backend, operands: Mapping[str, Tensor | None], may_be_host: Collection[str] = ()
) -> bool:
    """True when `kernel` shall run, False when its twin shall.

    All operands must lie on one device. An operand named in `may_be_host` may also be a pinned host tensor beside CUDA
    operands: the GPU reads and writes it through unified addressing. Raises ConfigError for devices that do not fit,
        for an unknown backend, and for "triton" where it cannot run.
    """
    present = {name: t for name, t in operands.items() if t is not None}
    devices = {t.device for t in present.values() if t.is_cuda}
    if len(devices) > 1:
        raise ConfigError(f"operands lie on several devices: { {name: str(t.device) for name, t in present.items()} }")
    for name, t in present.items():
        if t.is_cuda or not devices:
            continue
        if name not in may_be_host:
            raise ConfigError(f"{name} is on {t.device} but other operands are on {next(iter(devices))}; move it there")
        if not t.is_pinned():
            raise ConfigError(
                f"{name} is in pageable host memory; the GPU can reach only pinned host memory (pin_memory=True)"
            )
    if backend == "torch":
        return False
    if backend == "auto":
        return bool(devices) and HAS_TRITON
    if backend != "triton":
        raise ConfigError(f'backend must be "auto", "triton" or "torch", got {backend!r}')
    if not HAS_TRITON:
        raise ConfigError('backend="triton" needs Triton, which is not installed; use "auto" or "torch"')
    if not devices and isinstance(kernel, triton.JITFunction):
        raise ConfigError(
            'backend="triton" on CPU tensors needs TRITON_INTERPRET=1 set before the first import; use "auto"'
        )
    return True


def on_device(*tensors: Tensor | None) -> AbstractContextManager[Any]:
    """Makes the device of the first CUDA tensor current: Triton launches on the current device, whatever its
    operands."""
    for t in tensors:
        if t is not None and t.is_cuda:
            # Switching costs 5 us even when nothing changes, and a step makes two launches a layer.
            return nullcontext() if t.get_device() == torch.cuda.current_device() else torch.cuda.device(t.device)
    return nullcontext()
