"""Where an allocation's time goes: Triton's own launch beside ours, and the shapes of the two assignment kernels.

    python -m benchmarks.launches --out DIR

The second table is what `num_warps` and the block sizes in `tidekv.kernels.assign` were chosen by.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from benchmarks.report import Report, arguments
from benchmarks.timing import device, host_us, pin_core, queued_device_us
from tidekv.kernels import assign, cdiv, next_power_of_2
from tidekv.kernels.launch import Launcher

PAGE_SIZE = 64


def nothing() -> None:
    """Nothing to take back."""


class Case:
    """One batch of a decode (extend_tokens 1, every page_size-th request opens a page) or of an extend."""

    def __init__(self, batch: int, extend_tokens: int) -> None:
        self.batch, self.num_tokens = batch, batch * extend_tokens
        where = torch.arange(batch, device=device())
        self.prefix = 2048 + where % PAGE_SIZE if extend_tokens == 1 else torch.zeros_like(where)
        self.seq = self.prefix + extend_tokens
        self.last = (where + 1) * PAGE_SIZE + (self.prefix - 1) % PAGE_SIZE
        self.num_slots = int((-(-self.seq // PAGE_SIZE) - -(-self.prefix // PAGE_SIZE)).sum())
        self.slots = torch.arange(100, 100 + self.num_slots + 1, device=device())
        self.out = torch.empty(self.num_tokens, dtype=torch.int64, device=device())

    def decode(self, block: int, num_warps: int) -> tuple[Any, ...]:
        tensors = (self.seq, self.last, self.slots, self.out)
        ints = (self.batch, 0, self.num_slots)
        return self.last, (cdiv(self.batch, block), 1), tensors, ints, (PAGE_SIZE, block), num_warps

    def extend(self, block_tokens: int, num_warps: int) -> tuple[Any, ...]:
        tensors = (self.prefix, self.seq, self.last, self.slots, self.out)
        ints = (self.batch, 0, self.num_slots, self.num_tokens)
        grid = (self.batch, cdiv(self.num_tokens, self.batch * block_tokens))
        constants = (PAGE_SIZE, max(16, next_power_of_2(self.batch)), block_tokens)
        return self.last, grid, tensors, ints, constants, num_warps


def launches(report: Report, sizes: SimpleNamespace) -> None:
    """Host microseconds until the call returns."""
    case = Case(64, 1)
    launcher = Launcher(assign.alloc_decode_kernel)
    arguments_ = case.decode(64, 1)
    _, grid, tensors, ints, constants, num_warps = arguments_
    calls: dict[str, Callable[[], object]] = {
        "triton": lambda: assign.alloc_decode_kernel[grid](*tensors, *ints, *constants, num_warps=num_warps),
        "launcher": lambda: launcher(*arguments_),
        "torch.empty": lambda: torch.empty(64, dtype=torch.int64, device=device()),
        "a slice": lambda: case.slots[1:2],
        "alloc_decode": lambda: assign.alloc_decode(
            case.seq, case.last, case.slots, PAGE_SIZE, run=(0, case.num_slots), checked=True
        ),
    }
    for name, taken in host_us(calls, dict.fromkeys(calls, nothing), sizes.n, sizes.warm).items():
        report.row("host time", call=name, host_us=round(taken, 2))


def shapes(report: Report, sizes: SimpleNamespace) -> None:
    """Device microseconds a launch, many queued behind each other."""
    for batch, tried in sizes.decode_shapes.items():
        case = Case(batch, 1)
        ways = {shape: case.decode(*shape) for shape in tried}
        measure(report, sizes, "decode", assign.alloc_decode_kernel, batch, ways)
    for batch in sizes.extend_batches:
        case = Case(batch, sizes.extend_tokens)
        ways = {shape: case.extend(*shape) for shape in sizes.extend_shapes}
        measure(report, sizes, "extend", assign.alloc_extend_kernel, batch, ways)


def measure(
    report: Report,
    sizes: SimpleNamespace,
    name: str,
    kernel: Any,
    batch: int,
    ways: dict[tuple[int, int], tuple[Any, ...]],
) -> None:
    launcher = Launcher(kernel)
    calls: dict[str, Callable[[], object]] = {}
    for (block, num_warps), given in ways.items():
        calls[f"{block} {num_warps}"] = lambda given=given: launcher(*given)
        launcher(*given)  # compiles
    found = queued_device_us(calls, dict.fromkeys(calls, nothing), sizes.k, sizes.repeats, sleep=sizes.sleep_ms)
    for (block, num_warps), taken in zip(ways, found.values(), strict=True):
        report.row("shape", kernel=name, batch=batch, block=block, num_warps=num_warps, device_us=round(taken, 2))


def main() -> int:
    parser, make = arguments("launches", 100, __doc__)
    args = parser.parse_args()
    # (block, num_warps): few, since each is a kernel to compile, 1 to 2 s.
    sizes = SimpleNamespace(
        n=300,
        warm=20,
        k=100,
        repeats=5,
        sleep_ms=8.0,
        decode_shapes={
            64: ((64, 1), (64, 4)),
            256: ((256, 1), (256, 4), (256, 8)),
            1024: ((1024, 4), (1024, 8), (1024, 16), (256, 4), (512, 8)),
        },
        extend_batches=(1, 16, 64),
        extend_shapes=((512, 4), (1024, 4), (1024, 8), (2048, 4), (2048, 8)),
        extend_tokens=2048,
    )
    if args.smoke:
        vars(sizes).update(n=1, warm=0, k=1, repeats=1, extend_tokens=100, extend_batches=(1,))
        vars(sizes).update(decode_shapes={16: ((16, 1),)}, extend_shapes=((512, 4), (1024, 4)))
    report = make(args)
    report.data["about"]["pinned_core"] = pin_core()
    report.phase("launches", launches, report, sizes)
    report.phase("shapes", shapes, report, sizes)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
