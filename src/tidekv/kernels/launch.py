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

from tidekv.kernels import HAS_TRITON, on_device, triton

# Versions in which `CompiledKernel.run(x, y, z, stream, function, packed_metadata, launch_metadata, enter, exit,
# *arguments)` takes every argument of the kernel, constants included, and pointers as ints. Others launch as ever.
_READ_VERSIONS = ("3.6.", "3.9.")
_INT32_MAX = 2**31 - 1


class Launcher:
    """`launcher(on, grid, tensors, scalars, constants, num_warps, num_stages)` is `kernel[grid](*tensors, *scalars,
    *constants, num_warps=num_warps, num_stages=num_stages)` on the device of the tensor `on`.

    The kernel takes its arguments in that order. What the compiled kernel depends on is the key, here as in Triton:
    device, dtypes, constants, warps, stages; of each tensor that is not in `do_not_specialize`, whether it starts at a
    multiple of 16 bytes; of each such int, whether it is 1 or a multiple of 16. A float among the scalars must be in
    `do_not_specialize`.

    The first launch of each key is Triton's own. So is every launch where something is unusual: the interpreter, a
    version of Triton not read, a profiler's or another hook, an operand on another device, an int over 32 bits.
    """

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self._compiled: dict[tuple[Any, ...], tuple[Any, int, Any]] = {}
        self._usual_build: bool | None = None  # None: not yet asked
        self._specialised: tuple[list[int], list[int]] | None = None  # indices of tensors and of ints; None: not yet

    def __call__(
        self,
        on: Tensor,
        grid: tuple[int, ...],
        tensors: Sequence[Tensor],
        scalars: Sequence[int | float],
        constants: tuple[Any, ...],
        num_warps: int = 4,
        num_stages: int = 3,
    ) -> None:
        """Launches on the current stream. The caller has checked that all tensors lie on the device of `on`, or are
        pinned."""
        device = on.get_device()
        if not self._is_usual(device) or max(scalars) > _INT32_MAX:
            self._launch_by_triton(on, grid, tensors, scalars, constants, num_warps, num_stages)
            return
        if self._specialised is None:
            self._specialised = self._specialised_of(len(tensors), len(scalars))
        by_address, by_value = self._specialised
        # Pinned memory stays a tensor: Triton's launcher asks the driver for its address on the device.
        addresses = [t.data_ptr() if t.is_cuda else t for t in tensors]
        key = (
            device,
            num_warps,
            num_stages,
            constants,
            *[t.dtype for t in tensors],
            *[tensors[i].data_ptr() % 16 == 0 for i in by_address],
            *[1 if scalars[i] == 1 else scalars[i] % 16 == 0 and 16 for i in by_value],
        )
        found = self._compiled.get(key)
        if found is None:
            compiled = self._launch_by_triton(on, grid, tensors, scalars, constants, num_warps, num_stages)
            if hasattr(compiled, "packed_metadata"):  # None if a hook has refused to compile
                self._compiled[key] = (compiled.run, compiled.function, compiled.packed_metadata)
            return
        run, function, packed_metadata = found
        stream = torch._C._cuda_getCurrentRawStream(device)  # as Triton asks for it
        grid += (1,) * (3 - len(grid))
        run(*grid, stream, function, packed_metadata, None, None, None, *addresses, *scalars, *constants)

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

    def _launch_by_triton(self, on, grid, tensors, scalars, constants, num_warps, num_stages) -> Any:
        with on_device(on):
            return self.kernel[grid](*tensors, *scalars, *constants, num_warps=num_warps, num_stages=num_stages)

    def _specialised_of(self, num_tensors: int, num_scalars: int) -> tuple[list[int], list[int]]:
        """Indices of the tensors, and of the ints, for whose values Triton compiles kernels of their own."""
        params = self.kernel.params
        scalars = params[num_tensors : num_tensors + num_scalars]
        return (
            [
                i
                for i, p in enumerate(params[:num_tensors])
                if not (p.do_not_specialize or p.do_not_specialize_on_alignment)
            ],
            [i for i, p in enumerate(scalars) if not p.do_not_specialize],
        )
