# mypy: ignore-errors
"""Launches a Triton kernel that is compiled already, without asking Triton once more which one it is.

`kernel[grid](...)` binds the arguments, derives their types and alignments, makes a key of them as text, looks the
compiled kernel up and walks the profilers' hooks, in Python, for every launch: more than all the rest of an allocation.
A `Launcher` remembers the compiled kernel and calls its C launcher as Triton would (`CompiledKernel.run`).
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tidekv.errors import ConfigError
from tidekv.kernels import HAS_TRITON, on_device, triton

# Versions in which `CompiledKernel.run(x, y, z, stream, function, packed_metadata, launch_metadata, enter, exit,
# *arguments)` takes every argument of the kernel, constants included, and pointers as ints. Others launch as ever.
_READ_VERSIONS = ("3.6.", "3.9.")
_INT32_MAX = 2**31 - 1


class Launcher:
    """`launcher(grid, tensors, ints, constants, num_warps)` is `kernel[grid](*tensors, *ints, *constants,
    num_warps=num_warps)`.

    The kernel takes its arguments in that order, and its ints are in `do_not_specialize`: else Triton compiles one
    kernel for 1, one for multiples of 16 and one for the rest. What the compiled kernel depends on is then the key
    here: device, dtypes, constants, warps, and which of the tensors that Triton specialises start at a multiple of 16.

    The first launch of each key is Triton's own. So is every launch where something is unusual: the interpreter, a
    version of Triton not read, a profiler's or another hook, an operand on another device, an int over 32 bits.
    """

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self._compiled: dict[tuple[Any, ...], tuple[Any, int, Any]] = {}
        self._usual_build: bool | None = None  # None: not yet asked
        self._aligned: tuple[int, ...] | None = None  # tensors whose alignment is in the key; None: not yet asked

    def __call__(
        self,
        grid: tuple[int, int],
        tensors: Sequence[Tensor],
        ints: Sequence[int],
        constants: tuple[Any, ...],
        num_warps: int,
    ) -> None:
        """Launches on the current stream of the first tensor's device; the caller has checked that all lie there.

        `ConfigError` for a kernel with specialised ints.
        """
        device = tensors[0].get_device()
        if not self._is_usual(device) or max(ints) > _INT32_MAX:
            self._launch_by_triton(grid, tensors, ints, constants, num_warps)
            return
        if self._aligned is None:
            self._aligned = self._specialised(len(tensors), len(ints))
        addresses = [t.data_ptr() for t in tensors]
        aligned = [addresses[i] % 16 == 0 for i in self._aligned]
        key = (device, num_warps, constants, *[t.dtype for t in tensors], *aligned)
        found = self._compiled.get(key)
        if found is None:
            compiled = self._launch_by_triton(grid, tensors, ints, constants, num_warps)
            if hasattr(compiled, "packed_metadata"):  # None if a hook has refused to compile
                self._compiled[key] = (compiled.run, compiled.function, compiled.packed_metadata)
            return
        run, function, packed_metadata = found
        stream = torch._C._cuda_getCurrentRawStream(device)  # as Triton asks for it
        run(*grid, 1, stream, function, packed_metadata, None, None, None, *addresses, *ints, *constants)

    def _is_usual(self, device: int) -> bool:
        if device < 0 or device != torch.cuda.current_device():
            return False
        if self._usual_build is None:
            read = HAS_TRITON and triton.__version__.startswith(_READ_VERSIONS)
            self._usual_build = bool(read and torch.version.cuda and isinstance(self.kernel, triton.JITFunction))
        if not self._usual_build or self.kernel.pre_run_hooks:
            return False
        runtime = triton.knobs.runtime  # a profiler adds itself to these
        return not (runtime.launch_enter_hook.calls or runtime.launch_exit_hook.calls)

    def _launch_by_triton(self, grid, tensors, ints, constants, num_warps) -> Any:
        with on_device(*tensors):
            return self.kernel[grid](*tensors, *ints, *constants, num_warps=num_warps)

    def _specialised(self, num_tensors: int, num_ints: int) -> tuple[int, ...]:
        """Indices of the tensors for whose alignment Triton compiles a kernel of its own."""
        params = self.kernel.params
        for param in params[num_tensors : num_tensors + num_ints]:
            if not param.do_not_specialize:
                raise ConfigError(f"{self.kernel.__name__}: the int {param.name} must be in do_not_specialize")
        return tuple(
            i
            for i, param in enumerate(params[:num_tensors])
            if not (param.do_not_specialize or param.do_not_specialize_on_alignment)
        )
