"""Full width is free: SGLang's PagedTokenToKVPoolAllocator against ours, interleaved in one process on one core.

    python -m benchmarks.allocator --out DIR        SGLang 0.5.17 on PYTHONPATH, else ours alone

A call of ours writes books, so each timed call really allocates. It is taken back outside the timed region: the pages
just handed out are put back at the head of the free list and their book entries cleared (`Books.take_back`), which is
what SGLang's benchmark does with `free_pages = full`; `check()` at the end of a table proves that nothing was left
behind. The table `extend and free` uses the public calls alone, both sides, nothing taken back by hand.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from benchmarks.report import Report, arguments
from benchmarks.timing import (
    copy_gbps,
    device,
    device_ms,
    host_us,
    host_us_behind,
    on_gpu,
    pin_core,
    queued_device_us,
    random_fill,
    synchronize,
)
from tidekv import DeviceKVPool, HostKVPool, KVGeometry
from tidekv.allocator import DynamicPagedTokenToKVPoolAllocator
from tidekv.errors import InvariantError
from tidekv.kernels.attention import paged_attention

LAYERS = 32
EXTEND_TOKENS = 2048
PRIORITIES = ("high", "low", "mixed")


class Books:
    """Takes back what our allocator has handed out since `mark`, without touching the device."""

    def __init__(self, allocator: DynamicPagedTokenToKVPoolAllocator) -> None:
        self.allocator = allocator
        self.mark()

    def mark(self) -> None:
        free = self.allocator.ledger.free_list
        self.pages, self.head = free.pages, free.head

    def take_back(self) -> None:
        ledger, free = self.allocator.ledger, self.allocator.ledger.free_list
        if free.pages is not self.pages:
            raise InvariantError("the free list was merged in a timed call: the pool is too small for this benchmark")
        taken = free.pages[self.head : free.head]
        if not len(taken):
            return
        for code, count in enumerate(np.bincount(ledger.page_code[taken], minlength=4).tolist()):
            ledger.used[code] -= count
        ledger.page_code[taken], ledger.page_level[taken], ledger.page_occupied[taken] = 0, -1, 0
        ledger.occupied[taken], ledger.stamp[taken] = False, 0
        free.head = self.head


def make_ours(num_pages: int, page_size: int) -> DynamicPagedTokenToKVPoolAllocator:
    """32 layers, no KV behind them: the books and the location kernels are all that is timed."""
    geometry = KVGeometry(LAYERS, num_pages, page_size, 8, 128, torch.bfloat16)
    return DynamicPagedTokenToKVPoolAllocator(
        num_pages * page_size,
        page_size,
        torch.bfloat16,
        device(),
        DeviceKVPool(geometry, "meta"),
        host_pool=HostKVPool(geometry, 0, pin=False, materialize=False),
    )


def make_sglang(num_pages: int, page_size: int) -> Any | None:
    """SGLang's own, or None where it is not installed."""
    try:
        from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator
    except ImportError as error:
        print(f"SGLang is not importable ({error}): ours alone", file=sys.stderr, flush=True)
        return None
    if not on_gpu():
        return None
    return PagedTokenToKVPoolAllocator(num_pages * page_size, page_size, torch.bfloat16, "cuda", None, False)


def priority_argument(kind: str, batch: int) -> Any:
    """What a caller passes: a bool for one class, a list for a mixed batch (every third request high)."""
    return {"high": True, "low": False, "mixed": [i % 3 == 0 for i in range(batch)]}[kind]


def nothing() -> None:
    """Nothing to take back."""


def compare(
    report: Report,
    table: str,
    calls: dict[str, Callable[[], Any]],
    between: dict[str, Callable[[], Any]],
    sizes: SimpleNamespace,
    k: int,
    **labels: Any,
) -> None:
    """One row: host and device time of SGLang ("a") and of ours ("b") and the ratios."""
    host = host_us(calls, between, sizes.n, sizes.warm)
    on_device = queued_device_us(calls, between, k, sizes.device_repeats)
    row: dict[str, Any] = dict(labels)
    for name in calls:
        row[f"{name}_host_us"] = round(host[name], 1)
        row[f"{name}_device_us"] = round(on_device[name], 2)
    if "sglang" in calls:
        row["host_ratio"] = round(host["ours"] / host["sglang"], 3)
        row["device_ratio"] = round(on_device["ours"] / on_device["sglang"], 3)
    report.row(table, **row)


# ---- alloc_decode, alloc_extend --------------------------------------------------------------------------------------


def decode(report: Report, sizes: SimpleNamespace, page_size: int) -> None:
    """Batches whose requests are spread over the positions in a page: about batch / page_size open a page in each
    step."""
    pages = sizes.tokens // page_size
    sglang, ours = make_sglang(pages, page_size), make_ours(pages, page_size)
    full = sglang.free_pages if sglang is not None else None
    books = Books(ours)
    for batch in sizes.decode_batches:
        phases = []
        for step in range(page_size):
            offset = ((torch.arange(batch) * max(1, page_size // batch)) + step) % page_size
            lens = 2048 + offset + 1
            # The page before is page i + 1: an id in range. Neither side reads the books of it.
            last = torch.arange(1, batch + 1) * page_size + offset - 1
            phases.append((lens.to(device()), lens, last.to(device())))
        for kind in PRIORITIES:
            priorities = priority_argument(kind, batch)
            turn = {"sglang": 0, "ours": 0}

            def next_phase(name: str, turn: dict[str, int] = turn, phases: Any = phases) -> Any:
                turn[name] += 1
                return phases[turn[name] % len(phases)]

            def call_sglang() -> Any:
                return sglang.alloc_decode(*next_phase("sglang"))

            def call_ours(priorities: Any = priorities) -> Any:
                if ours.alloc_decode(*next_phase("ours"), priorities) is None:
                    raise InvariantError("alloc_decode was refused")

            def reset_sglang() -> None:
                sglang.free_pages = full

            calls, between = {"ours": call_ours}, {"ours": books.take_back}
            if sglang is not None:
                calls, between = {"sglang": call_sglang, **calls}, {"sglang": reset_sglang, **between}
            if not on_gpu():  # the CPU path checks last_loc against the books: give it pages that exist
                ours.alloc(batch * page_size, True)
                books.mark()
            compare(report, "alloc_decode", calls, between, sizes, sizes.k, page_size=page_size, batch=batch, kind=kind)
            if not on_gpu():
                ours.clear()
                books.mark()
    ours.check()


def extend(report: Report, sizes: SimpleNamespace, page_size: int) -> None:
    """New requests of 2,048 tokens each."""
    pages = sizes.tokens // page_size
    sglang, ours = make_sglang(pages, page_size), make_ours(pages, page_size)
    full = sglang.free_pages if sglang is not None else None
    books = Books(ours)
    for batch in sizes.extend_batches:
        prefix, seq = torch.zeros(batch, dtype=torch.int64), torch.full((batch,), sizes.extend_tokens)
        last = torch.full((batch,), -1, dtype=torch.int64, device=device())
        prefix_dev, seq_dev, total = prefix.to(device()), seq.to(device()), batch * sizes.extend_tokens
        given = (prefix_dev, prefix, seq_dev, seq, last, total)
        for kind in PRIORITIES if batch > 1 else PRIORITIES[:2]:
            priorities = priority_argument(kind, batch)

            def call_sglang(given: Any = given) -> Any:
                return sglang.alloc_extend(*given)

            def call_ours(given: Any = given, priorities: Any = priorities) -> Any:
                if ours.alloc_extend(*given, priorities) is None:
                    raise InvariantError("alloc_extend was refused")

            def reset_sglang() -> None:
                sglang.free_pages = full

            calls, between = {"ours": call_ours}, {"ours": books.take_back}
            if sglang is not None:
                calls, between = {"sglang": call_sglang, **calls}, {"sglang": reset_sglang, **between}
            # Taking 8,192 pages back costs 0.3 ms of host time, which must stay under the sleep that hides it.
            k = min(sizes.k, max(4, 20_000 * page_size // total))
            compare(report, "alloc_extend", calls, between, sizes, k, page_size=page_size, batch=batch, kind=kind)
    ours.check()


# ---- free ------------------------------------------------------------------------------------------------------------


def free(report: Report, sizes: SimpleNamespace, page_size: int) -> None:
    """`free` of requests of 2,048 tokens: the call, what our deferred booking costs later, and both behind queued
    work."""
    pages, tokens = sizes.tokens // page_size, sizes.extend_tokens
    sglang, ours = make_sglang(pages, page_size), make_ours(pages, page_size)
    held = [ours.alloc(tokens, i % 2 == 0) for i in range(sizes.held)]
    locs = [found[0] for found in held if found is not None]
    turn = 0

    def call_ours() -> None:
        ours.free(locs[turn % len(locs)])

    def collect_and_refill() -> None:
        nonlocal turn
        ours._collect_freed()
        found = ours.alloc(tokens, turn % 2 == 0)
        if found is None:
            raise InvariantError("the pool did not get its pages back")
        locs[turn % len(locs)] = found[0]
        turn += 1

    calls: dict[str, Callable[[], Any]] = {"ours": call_ours}
    between: dict[str, Callable[[], Any]] = {"ours": collect_and_refill}
    if sglang is not None:
        count = tokens // page_size
        order = torch.randperm(sglang.num_pages)[: count * sizes.held] + 1
        rest, at = sglang.free_pages[count:], 0
        theirs = [
            (order[i * count : (i + 1) * count, None] * page_size + torch.arange(page_size)).reshape(-1).to(device())
            for i in range(sizes.held)
        ]

        def call_sglang() -> None:
            sglang.free(theirs[at % len(theirs)])

        def refill_sglang() -> None:
            nonlocal at
            sglang.free_pages = rest
            at += 1

        calls, between = {"sglang": call_sglang, **calls}, {"sglang": refill_sglang, **between}
    idle = host_us(calls, between, sizes.n, sizes.warm)
    behind = host_us_behind(calls, between, sizes.behind, 5.0)

    def prepare() -> None:
        ours.free(locs[turn % len(locs)])
        synchronize()

    # The deferred part: booked by the next call that needs the pages. It is timed alone, its wait for the device done.
    collected = []
    for _ in range(sizes.n // 4 + 1):
        prepare()
        collected.append(host_us({"c": ours._collect_freed}, {"c": nothing}, 1, 0)["c"])
        collect_and_refill()
    row: dict[str, Any] = {"page_size": page_size, "tokens": tokens}
    for name in calls:
        row[f"{name}_host_us"] = round(idle[name], 1)
        row[f"{name}_behind_5ms_us"] = round(behind[name], 1)
    row["ours_collect_later_us"] = round(float(np.median(collected)), 1)
    if "sglang" in idle:
        row["host_ratio"] = round(idle["ours"] / idle["sglang"], 3)
        row["host_ratio_with_collect"] = round((idle["ours"] + row["ours_collect_later_us"]) / idle["sglang"], 3)
    report.row("free", **row)
    ours.check()


def extend_and_free(report: Report, sizes: SimpleNamespace, page_size: int) -> None:
    """A request of 2,048 tokens comes and goes, by public calls alone: merges of the free list and mirror uploads
    included."""
    pages, tokens = sizes.tokens // page_size, sizes.extend_tokens
    prefix, seq = torch.zeros(1, dtype=torch.int64), torch.full((1,), tokens)
    last = torch.full((1,), -1, dtype=torch.int64, device=device())
    prefix_dev, seq_dev = prefix.to(device()), seq.to(device())
    calls: dict[str, Callable[[], Any]] = {}
    sglang = make_sglang(pages, page_size)
    if sglang is not None:
        calls["sglang"] = lambda: sglang.free(sglang.alloc_extend(prefix_dev, prefix, seq_dev, seq, last, tokens))
    ours = make_ours(pages, page_size)

    def pair() -> None:
        found = ours.alloc_extend(prefix_dev, prefix, seq_dev, seq, last, tokens, False)
        if found is None:
            raise InvariantError("alloc_extend was refused")
        ours.free(found[0])

    calls["ours"] = pair
    # Means of whole blocks, the final booking of our deferred frees included: a median would never see it.
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for i in range(1 + 5):
        for name, call in calls.items():
            synchronize()
            begin = time.perf_counter()
            for _ in range(sizes.n):
                call()
            if name == "ours":
                ours._collect_freed()
            if i:
                taken[name].append((time.perf_counter() - begin) * 1e6 / sizes.n)
    times = {name: float(np.median(values)) for name, values in taken.items()}
    row: dict[str, Any] = {"page_size": page_size, "tokens": tokens}
    row |= {f"{name}_mean_us": round(value, 1) for name, value in times.items()}
    if "sglang" in times:
        row["ratio"] = round(times["ours"] / times["sglang"], 3)
    report.row("extend and free", **row)
    ours.check()


# ---- no wait ---------------------------------------------------------------------------------------------------------


def no_sync(report: Report, sizes: SimpleNamespace, page_size: int) -> None:
    """A steady decode step never waits: torch's own watch on synchronising calls, and host time behind 5 ms of queued
    work.

    The second sees what the first cannot: copies from pageable memory, which torch counts as asynchronous.
    """
    ours, batch = make_ours(sizes.tokens // page_size, page_size), 64
    found = ours.alloc(batch * page_size, True)
    if found is None:
        raise InvariantError("the pool is too small for this benchmark")
    books = Books(ours)
    # Half of the batch opens a page in this step.
    lens = torch.where(torch.arange(batch) % 2 == 0, 2 * page_size + 1, 2 * page_size)
    last = found[0].view(batch, page_size)[:, -1].clone()
    last -= (torch.arange(batch) % 2).to(device())
    lens_dev = lens.to(device())
    mask = torch.arange(batch) % 3 == 0
    for kind, priorities in (
        ("high", True),
        ("low", False),
        ("mixed list", mask.tolist()),
        ("mixed tensor", mask),
    ):

        def call(priorities: Any = priorities) -> None:
            if ours.alloc_decode(lens_dev, lens, last, priorities) is None:
                raise InvariantError("alloc_decode was refused")

        call()
        books.take_back()
        verdict = "not on CUDA"
        if on_gpu():
            synchronize()
            torch.cuda.set_sync_debug_mode("error")
            try:
                call()
                verdict = "none"
            except RuntimeError as error:
                verdict = str(error).split("\n", maxsplit=1)[0]
            finally:
                torch.cuda.set_sync_debug_mode("default")
            books.take_back()
        behind = host_us_behind({"ours": call}, {"ours": books.take_back}, sizes.behind, 5.0)["ours"]
        report.row("syncs of a decode step", kind=kind, batch=batch, syncs=verdict, behind_5ms_us=round(behind, 1))


# ---- attention at full width -----------------------------------------------------------------------------------------


def attention(report: Report, sizes: SimpleNamespace) -> None:
    """The same kernel over an ordinary buffer a layer and over our one flat tensor; rotating over layers, so never
    from L2."""
    page_size, batch, tokens, layers, heads, dim = sizes.attention
    pages = batch * tokens // page_size
    geometry = KVGeometry(layers, pages, page_size, heads, dim, torch.bfloat16)
    pool = DeviceKVPool(geometry, device())
    random_fill(pool.k_flat, pool.v_flat)
    # Random bits hold NaN and infinities; the arithmetic takes the same time, but the comparison below needs numbers.
    for flat in (pool.k_flat, pool.v_flat):
        flat.view(torch.int16).bitwise_and_(~0x4000)  # without the top bit of the exponent every value is below 2
    buffers = [(pool.get_key_buffer(i).clone(), pool.get_value_buffer(i).clone()) for i in range(layers)]
    table = (torch.randperm(pages, device=device()) + 1).view(batch, -1)
    query = torch.randn(batch, heads * 4, dim, device=device(), dtype=torch.bfloat16)
    cu_q = torch.arange(batch + 1, device=device())
    lens = torch.full((batch,), tokens, device=device())

    def attend(k: torch.Tensor, v: torch.Tensor, pages_of: torch.Tensor) -> torch.Tensor:
        return paged_attention(query, k, v, pages_of, cu_q, lens, page_size, dim**-0.5, max_q=1)[0]

    turn = dict.fromkeys(("ordinary", "ours", "ours_with_table"), 0)
    tables = [table + layer * geometry.page_stride for layer in range(layers)]

    def layer_of(name: str) -> int:
        turn[name] += 1
        return turn[name] % layers

    def ordinary() -> torch.Tensor:
        layer = layer_of("ordinary")
        return attend(*buffers[layer], table)

    def ours() -> torch.Tensor:
        return attend(pool.k_flat, pool.v_flat, tables[layer_of("ours")])

    def ours_with_table() -> torch.Tensor:
        return attend(pool.k_flat, pool.v_flat, table + layer_of("ours_with_table") * geometry.page_stride)

    same = torch.equal(attend(*buffers[1], table), attend(pool.k_flat, pool.v_flat, tables[1]))
    calls = {"ordinary": ordinary, "ours": ours, "ours_with_table": ours_with_table}
    times = device_ms(calls, sizes.attention_n, warm=2 * layers)
    bytes_read = 2 * batch * tokens * heads * dim * 2
    report.row(
        "attention at full width",
        batch=batch,
        tokens=tokens,
        page_size=page_size,
        ordinary_ms=round(times["ordinary"], 4),
        ours_ms=round(times["ours"], 4),
        ratio=round(times["ours"] / times["ordinary"], 4),
        ours_with_table_ms=round(times["ours_with_table"], 4),
        ratio_with_table=round(times["ours_with_table"] / times["ordinary"], 4),
        read_gbps=round(bytes_read / times["ours"] / 1e6),
        same_bits=same,
    )


def copy_ceiling(report: Report, num_bytes: int) -> None:
    report.ceiling("device_copy_gbps", copy_gbps(num_bytes))


def main() -> int:
    parser, make = arguments("allocator", 150, __doc__)
    args = parser.parse_args()
    sizes = SimpleNamespace(
        tokens=800_000,
        n=120,
        warm=15,
        k=60,
        device_repeats=5,
        behind=7,
        held=64,
        extend_tokens=EXTEND_TOKENS,
        decode_batches=(16, 64, 256, 1024),
        extend_batches=(1, 16, 64),
        page_sizes=(64, 16),
        attention=(64, 64, 4096, 4, 8, 128),
        attention_n=60,
        copy_bytes=4 << 30,
    )
    if args.smoke:
        vars(sizes).update(
            tokens=40_000,
            n=3,
            warm=1,
            k=2,
            device_repeats=2,
            behind=2,
            held=4,
            extend_tokens=256,
            decode_batches=(16, 64),
            extend_batches=(1, 4),
            page_sizes=(16,),
            attention=(16, 2, 64, 2, 2, 16),
            attention_n=2,
            copy_bytes=1 << 20,
        )
    report = make(args)
    report.phase("device copy", copy_ceiling, report, sizes.copy_bytes)
    report.phase("attention", attention, report, sizes)
    report.data["about"]["pinned_core"] = pin_core()
    for page_size in sizes.page_sizes:
        report.phase(f"alloc_decode, page {page_size}", decode, report, sizes, page_size)
        report.phase(f"alloc_extend, page {page_size}", extend, report, sizes, page_size)
        report.phase(f"free, page {page_size}", free, report, sizes, page_size)
        report.phase(f"extend and free, page {page_size}", extend_and_free, report, sizes, page_size)
    report.phase("no sync", no_sync, report, sizes, sizes.page_sizes[0])
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
