"""The launcher that skips Triton's own: same results, and it sees what a compiled kernel depends on. Catches: a kernel
compiled for aligned memory run on memory that is not, for int64 on int32, or behind a profiler's back."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tidekv.kernels import HAS_TRITON, tl, triton
from tidekv.kernels.launch import Launcher

pytestmark = pytest.mark.skipif(
    not (HAS_TRITON and torch.cuda.is_available()), reason="launches compiled kernels: needs Triton and a CUDA device"
)


@triton.jit(do_not_specialize=["first", "count"])
def shift_kernel(src, dst, first, count, STEP: tl.constexpr, BLOCK: tl.constexpr):
    k = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(dst + k, tl.load(src + first + k, mask=k < count) + STEP, mask=k < count)


@triton.jit
def specialised_kernel(src, dst, stride, count, BLOCK: tl.constexpr):
    k = tl.arange(0, BLOCK)
    tl.store(dst + k, tl.load(src + k * stride, mask=k < count), mask=k < count)


class Counted(Launcher):
    """Counts the launches that go by Triton."""

    by_triton = 0

    def _launch_by_triton(self, *arguments: Any) -> Any:
        self.by_triton += 1
        return super()._launch_by_triton(*arguments)


def shifted(launch: Launcher, src: torch.Tensor, first: int, count: int, step: int = 1) -> torch.Tensor:
    dst = torch.zeros(count, dtype=src.dtype, device=src.device)
    launch(src, (triton.cdiv(count, 128), 1), (src, dst), (first, count), (step, 128), num_warps=2)
    return dst


def test_each_kernel_is_asked_for_once_and_gives_the_same() -> None:
    launch = Counted(shift_kernel)
    src = torch.randint(-(2**40), 2**40, (5000,), device="cuda")
    cases = [(0, 4000, 1), (1, 1, 1), (16, 16, 1), (17, 4983, 1), (5, 100, 7)]
    for first, count, step in cases * 3:
        assert torch.equal(shifted(launch, src, first, count, step), src[first : first + count] + step)
    assert launch.by_triton == 2  # steps 1 and 7; neither 1 nor 16 nor any other int has a kernel of its own


def test_alignment_and_dtype_are_seen() -> None:
    launch = Counted(shift_kernel)
    for dtype in (torch.int64, torch.int32, torch.float32):
        src = torch.arange(3000, device="cuda").to(dtype)
        for part in (src, src[1:], src[16:], src[3:]):
            assert torch.equal(shifted(launch, part, 0, 2000), part[:2000] + 1)
    assert launch.by_triton == 6  # three dtypes, at a multiple of 16 bytes or not


def test_another_stream_and_a_captured_graph() -> None:
    launch, src = Counted(shift_kernel), torch.arange(1000, device="cuda")
    dst = torch.zeros(1000, dtype=torch.int64, device="cuda")
    arguments = (src, (8, 1), (src, dst), (0, 1000), (1, 128), 2)
    launch(*arguments)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(10_000_000)  # 5 ms: on any other stream the copy below would be read too early
        dst.zero_()
        launch(*arguments)
    torch.cuda.current_stream().wait_stream(side)
    assert torch.equal(dst, src + 1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch(*arguments)
    dst.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(dst, src + 1)
    assert launch.by_triton == 1


def test_hooks_are_not_passed_by() -> None:
    launch, src, seen = Counted(shift_kernel), torch.arange(1000, device="cuda"), []
    shifted(launch, src, 0, 1000)
    hooks = triton.knobs.runtime.launch_enter_hook
    hooks.add(seen.append)
    try:
        shifted(launch, src, 0, 1000)
    finally:
        hooks.remove(seen.append)
    assert len(seen) == 1
    shifted(launch, src, 0, 1000)
    assert (len(seen), launch.by_triton) == (1, 2)


def test_ints_that_triton_specialises_are_in_the_key() -> None:
    launch, src = Counted(specialised_kernel), torch.arange(3000, device="cuda")
    for stride in (1, 2, 16, 3, 32, 1, 17):
        dst = torch.zeros(64, dtype=torch.int64, device="cuda")
        launch(src, (1, 1), (src, dst), (stride, 64), (64,))
        assert torch.equal(dst, src[::stride][:64])
    assert launch.by_triton == 3  # stride 1, multiples of 16, others


def test_pinned_memory_on_either_side() -> None:
    launch, there = Counted(shift_kernel), torch.arange(1000, device="cuda")
    host = torch.zeros(1000, dtype=torch.int64, pin_memory=True)
    for _ in range(3):
        host.zero_()
        launch(there, (8, 1), (there, host), (0, 1000), (1, 128))
        torch.cuda.synchronize()
        assert torch.equal(host, torch.arange(1000) + 1)
        back = torch.zeros(1000, dtype=torch.int64, device="cuda")
        launch(back, (8, 1), (host, back), (0, 1000), (1, 128))
        assert torch.equal(back.cpu(), torch.arange(1000) + 2)
    assert launch.by_triton == 1
