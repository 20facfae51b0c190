"""Streaming leaves the SMs alone: ways to bring narrowed layers in and to write new tokens back, beside running
compute.

    python -m benchmarks.streaming --out DIR

One *item* is what a step copies for one layer: the K and V pages of many slots. Rates are shares of one large pinned
copy measured in the same run. Slow-down: a CUDA graph of matmuls (or of decode attention) alone, then with copies
that outlast it on another stream. The first row of a table is the ceiling: plain large pinned copies, no list and no
kernel. What they slow the compute down by is the machine's, and `over plain` is what a way adds to that.
"""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from benchmarks.report import Report, arguments
from benchmarks.timing import device, on_gpu, random_fill, sleep_ms, synchronize
from tidekv import DeviceKVPool, HostKVPool, KVGeometry
from tidekv.errors import InvariantError
from tidekv.kernels.attention import paged_attention
from tidekv.kernels.copy_engine import BatchedCopy, page_addresses
from tidekv.kernels.move import copy_cells, copy_rows

Issue = Callable[[int], None]  # issues item i on the current stream
PLAIN = "plain copy"


class Setup:
    """Pinned host pages, a device pool whose last pages are staging, and the lists of one item."""

    def __init__(self, sizes: SimpleNamespace, page_size: int) -> None:
        self.page_size = page_size
        page_bytes = sizes.layers * page_size * sizes.heads * sizes.dim * 4
        self.slots = sizes.item_bytes // (page_bytes // sizes.layers)  # of one item
        host_pages = 2 * self.slots
        pairs = sizes.layers // 2
        staging_pages = -(-self.slots // pairs)
        self.geometry = KVGeometry(sizes.layers, 2 * staging_pages, page_size, sizes.heads, sizes.dim, torch.bfloat16)
        self.pool = DeviceKVPool(self.geometry, device())
        self.host = HostKVPool(self.geometry, host_pages * page_bytes)
        random_fill(self.host.k_flat[: 1 << 16], self.host.v_flat[: 1 << 16])
        self.cell_bytes = self.geometry.cell_bytes
        self.half_bytes = self.cell_bytes // 2  # one page of K
        rng = np.random.default_rng(0)
        stride = self.geometry.page_stride
        # Dynamic slots: neighbouring staging pages of one pair are neighbouring flat pages, so a run can be as long
        # as there are staging pages; the host side is as long as its host pages are neighbours.
        pages = np.arange(1, staging_pages + 1)
        self.dynamic = (pages[None, :] + (np.arange(pairs) * 2 * stride)[:, None]).ravel()[: self.slots]
        self.longest_run = staging_pages
        self.neighbours = np.arange(self.slots)
        self.scattered = rng.permutation(host_pages)[: self.slots]

    def lists(self, layer: int, hosts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(host flat pages, device flat pages) of the item of this layer."""
        position = layer % 2
        return layer * self.host.num_pages + hosts, self.dynamic + position * self.geometry.page_stride

    @property
    def item_bytes(self) -> int:
        return self.slots * self.cell_bytes


def by_kernel(setup: Setup, hosts: np.ndarray, max_programs: int | None) -> Issue:
    """One Triton launch an item; its lists are on the device already, as in a step."""
    layers = setup.geometry.layer_num
    lists = [tuple(torch.from_numpy(x).to(device()) for x in setup.lists(layer, hosts)) for layer in range(layers)]
    pool, host = setup.pool, setup.host

    def issue(item: int) -> None:
        src, dst = lists[item % layers]
        copy_cells(
            pool.k_flat, pool.v_flat, host.k_flat, host.v_flat, dst, src, setup.page_size, max_programs=max_programs
        )

    return issue


def runs_of(pages: np.ndarray, others: np.ndarray, most: int) -> tuple[np.ndarray, np.ndarray]:
    """(begins, ends) of runs in which both lists go up by one, cut at `most` pages."""
    breaks = np.flatnonzero((np.diff(pages) != 1) | (np.diff(others) != 1)) + 1
    begins = np.concatenate([[0], breaks])
    ends = np.concatenate([breaks, [len(pages)]])
    cut = [np.arange(b, e, most) for b, e in zip(begins.tolist(), ends.tolist(), strict=True)]
    starts = np.concatenate(cut)
    return starts, np.concatenate([np.append(c[1:], e) for c, e in zip(cut, ends.tolist(), strict=True)])


def by_copy(setup: Setup, hosts: np.ndarray, most: int) -> Issue:
    """torch's copy_ for each run: the copy engine, one Python call a run and tensor."""
    layers, page_size = setup.geometry.layer_num, setup.page_size

    def issue(item: int) -> None:
        src, dst = setup.lists(item % layers, hosts)
        begins, ends = runs_of(src, dst, most)
        for b, e in zip(begins.tolist(), ends.tolist(), strict=True):
            s, d, n = int(src[b]) * page_size, int(dst[b]) * page_size, (e - b) * page_size
            setup.pool.k_flat[d : d + n].copy_(setup.host.k_flat[s : s + n], non_blocking=True)
            setup.pool.v_flat[d : d + n].copy_(setup.host.v_flat[s : s + n], non_blocking=True)

    return issue


def by_driver(setup: Setup, hosts: np.ndarray) -> Issue:
    """cudaMemcpyBatchAsync: one call an item and tensor, a run a page."""
    batched, layers = BatchedCopy(), setup.geometry.layer_num

    def issue(item: int) -> None:
        src, dst = setup.lists(item % layers, hosts)
        stream, size = torch.cuda.current_stream(), setup.half_bytes
        sizes = np.full(len(dst), size, dtype=np.uint64)
        for there, here in ((setup.pool.k_flat, setup.host.k_flat), (setup.pool.v_flat, setup.host.v_flat)):
            batched.copy(page_addresses(there, dst, size), page_addresses(here, src, size), sizes, stream)

    return issue


def plainly(dst: torch.Tensor, src: torch.Tensor) -> Issue:
    """One copy of the whole: what the machine allows."""

    def issue(_: int) -> None:
        dst.copy_(src, non_blocking=True)

    return issue


def candidates(report: Report, setup: Setup, sizes: SimpleNamespace) -> dict[str, tuple[Issue, int]]:
    """Name -> (how to issue an item, items to time). One by one from Python is slow: fewer items show that."""
    there = torch.empty(setup.item_bytes, dtype=torch.uint8, device=device())
    made: dict[str, tuple[Issue, int]] = {
        PLAIN: (plainly(there, torch.empty_like(there, device="cpu", pin_memory=on_gpu())), sizes.items)
    }
    for limit in (*sizes.programs, None):
        name = f"kernel, {limit} programs" if limit else "kernel, full grid"
        made[name] = (by_kernel(setup, setup.scattered, limit), sizes.items)
    made["kernel, full grid, host neighbours"] = (by_kernel(setup, setup.neighbours, None), sizes.items)
    for most in sizes.runs:
        made[f"copy_, runs of {min(most, setup.longest_run)}"] = (
            by_copy(setup, setup.neighbours, most),
            max(2, sizes.items // (1 if most > 8 else 4)),
        )
    made["copy_, page by page, scattered"] = (by_copy(setup, setup.scattered, 1), 2)
    if on_gpu():
        for name, hosts in (("scattered", setup.scattered), ("host neighbours", setup.neighbours)):

            def add(name: str = name, hosts: np.ndarray = hosts) -> None:
                issue = by_driver(setup, hosts)
                stream = torch.cuda.Stream()
                with torch.cuda.stream(stream):
                    issue(1)
                stream.synchronize()
                made[f"cudaMemcpyBatchAsync, {name}"] = (issue, sizes.items)

            report.phase(f"batched copies, {name}", add)
    return made


def verify(setup: Setup, issue: Issue, hosts: np.ndarray) -> bool:
    """The staging cells hold what the host holds."""
    src, dst = setup.lists(1, hosts)
    setup.pool.k_flat.zero_()
    setup.pool.v_flat.zero_()
    synchronize()
    run_on_stream(issue, [1])
    synchronize()
    page = (-1, setup.page_size * setup.geometry.num_kv_heads * setup.geometry.head_dim)
    at = [0, len(src) // 2, len(src) - 1]
    for there, here in ((setup.pool.k_flat, setup.host.k_flat), (setup.pool.v_flat, setup.host.v_flat)):
        got = there.view(torch.int16).view(page)[torch.from_numpy(dst[at]).to(there.device)].cpu()
        if not torch.equal(got, here.view(torch.int16).view(page)[torch.from_numpy(src[at])]):
            return False
    return True


def run_on_stream(issue: Issue, items: list[int], stream: Any = None, ahead_ms: float = 0.0) -> tuple[float, float]:
    """(ms on the copying stream, ms of the host to issue). `ahead_ms`: the host may run so far ahead of the copies."""
    if not on_gpu():
        begin = time.perf_counter()
        for item in items:
            issue(item)
        spent = (time.perf_counter() - begin) * 1e3
        return spent, spent
    stream = stream or torch.cuda.Stream()
    begin_event, end_event = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin = time.perf_counter()
    with torch.cuda.stream(stream):
        sleep_ms(ahead_ms)
        begin_event.record(stream)
        for item in items:
            issue(item)
        end_event.record(stream)
    host_ms = (time.perf_counter() - begin) * 1e3
    end_event.synchronize()
    return begin_event.elapsed_time(end_event), host_ms


# ---- compute to run beside -------------------------------------------------------------------------------------------


class Compute:
    """A block of work of some tens of milliseconds, as one CUDA graph, so that its launches need no host."""

    def __init__(self, name: str, body: Callable[[], object], count: int) -> None:
        self.name, self.body, self.count = name, body, count
        self.graph: Any = None
        body()
        synchronize()
        if on_gpu():
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                body()
            side.synchronize()
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                for _ in range(count):
                    body()
        self.alone_ms = statistics.median(self.run() for _ in range(4))

    def start(self) -> tuple[Any, Any]:
        """Queue it; the events around it."""
        events = (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
        events[0].record()
        self.graph.replay()
        events[1].record()
        return events

    def run(self) -> float:
        if self.graph is None:
            begin = time.perf_counter()
            for _ in range(self.count):
                self.body()
            return (time.perf_counter() - begin) * 1e3
        events = self.start()
        synchronize()
        return float(events[0].elapsed_time(events[1]))


def matmul(sizes: SimpleNamespace) -> Compute:
    n = sizes.matmul
    a, b = (torch.randn(n, n, device=device(), dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)
    return Compute("matmul", lambda: torch.mm(a, b, out=out), sizes.matmuls)


def attention(sizes: SimpleNamespace) -> Compute:
    """Decode of 64 requests of 4,096 tokens, two layers in turn."""
    batch, tokens, page_size = sizes.attention
    heads, dim, pages = sizes.heads, sizes.dim, batch * tokens // page_size
    geometry = KVGeometry(2, pages, page_size, heads, dim, torch.bfloat16)
    pool = DeviceKVPool(geometry, device())
    pool.k_flat.normal_()
    pool.v_flat.normal_()
    table = (torch.randperm(pages, device=device()) + 1).view(batch, -1)
    tables = [table, table + geometry.page_stride]
    query = torch.randn(batch, heads * 4, dim, device=device(), dtype=torch.bfloat16)
    cu_q, lens = torch.arange(batch + 1, device=device()), torch.full((batch,), tokens, device=device())

    def body() -> None:
        for pages_of in tables:
            paged_attention(query, pool.k_flat, pool.v_flat, pages_of, cu_q, lens, page_size, dim**-0.5, max_q=1)

    return Compute("decode attention", body, sizes.attentions)


def beside(compute: Compute, issue: Issue, item_ms: float) -> tuple[float, float, bool]:
    """(slow-down of the compute, ms an item beside it, the copies outlasted the compute).

    The time alone is taken in turn with the other: clocks change over a run, by 6 % for a matmul.
    """
    if compute.graph is None:
        return float("nan"), float("nan"), False
    items = list(range(max(2, math.ceil(1.6 * compute.alone_ms / item_ms))))
    slow, each, outlasted = [], [], True
    for _ in range(5):
        alone_ms = compute.run()
        stream = torch.cuda.Stream()
        synchronize()
        copy_begin = torch.cuda.Event(enable_timing=True)
        copy_begin.record(stream)
        events = compute.start()
        ms, _ = run_on_stream(issue, items, stream)
        copy_end = torch.cuda.Event(enable_timing=True)
        copy_end.record(stream)
        synchronize()
        slow.append(events[0].elapsed_time(events[1]) / alone_ms)
        each.append(ms / len(items))
        outlasted = outlasted and copy_begin.elapsed_time(copy_end) > copy_begin.elapsed_time(events[1])
    return statistics.median(slow), statistics.median(each), outlasted


# ---- the tables ------------------------------------------------------------------------------------------------------


def ceilings(report: Report, sizes: SimpleNamespace) -> None:
    """One large pinned copy each way."""
    host = torch.empty(sizes.ceiling_bytes, dtype=torch.uint8, pin_memory=on_gpu()).fill_(7)
    there = torch.empty_like(host, device=device())
    for name, call in (
        ("pinned_h2d_gbps", lambda _: there.copy_(host, non_blocking=True)),
        ("pinned_d2h_gbps", lambda _: host.copy_(there, non_blocking=True)),
    ):
        run_on_stream(call, [0])
        ms = statistics.median(run_on_stream(call, [0])[0] for _ in range(4))
        report.ceiling(name, host.nbytes / ms / 1e6)


def stream_in(report: Report, sizes: SimpleNamespace, page_size: int, works: list[Compute]) -> None:
    begin = time.perf_counter()
    setup = Setup(sizes, page_size)
    print(f"set up in {time.perf_counter() - begin:.1f} s", file=sys.stderr, flush=True)
    link = report.data["ceilings"].get("pinned_h2d_gbps", float("nan"))

    plain: dict[str, float] = {}

    def one(name: str, issue: Issue, count: int) -> None:
        hosts = setup.neighbours if ("runs of" in name or "neighbours" in name) else setup.scattered
        right = name == PLAIN or verify(setup, issue, hosts)
        run_on_stream(issue, [0])
        ms, host_ms = run_on_stream(issue, list(range(count)))
        each = ms / count
        rate = setup.item_bytes / each / 1e6
        row: dict[str, Any] = {
            "way": name,
            "k_kib_a_page": setup.half_bytes // 1024,
            "slots": setup.slots,
            "ms_an_item": round(each, 3),
            "gbps": round(rate, 1),
            "share_of_link": round(rate / link, 3),
            "host_ms_an_item": round(host_ms / count, 3),
            "right": right,
        }
        for compute in works:
            slow, item_ms, outlasted = beside(compute, issue, each)
            row[f"{compute.name} slowdown"] = round(slow, 3)
            row[f"{compute.name} over plain"] = round(slow / plain.setdefault(compute.name, slow), 3)
            row[f"gbps beside {compute.name}"] = round(setup.item_bytes / item_ms / 1e6, 1)
            if not outlasted:
                row["note"] = "copies ended before the compute"
        report.row("host to device", **row)

    for name, (issue, count) in candidates(report, setup, sizes).items():
        report.phase(f"{name}, page {page_size}", one, name, issue, count)


def write_back(report: Report, sizes: SimpleNamespace, works: list[Compute]) -> None:
    """New tokens of one layer, K and V from the projection, to scattered rows of the pinned pool: one launch a layer,
    by so many programs."""
    heads, dim = sizes.heads, sizes.dim
    rows_on_host = sizes.write_back_rows
    host = [torch.empty(rows_on_host, heads, dim, dtype=torch.bfloat16, pin_memory=on_gpu()) for _ in range(2)]
    link = report.data["ceilings"].get("pinned_d2h_gbps", float("nan"))
    for tokens in sizes.write_back_tokens:
        new = [torch.randn(tokens, heads, dim, device=device(), dtype=torch.bfloat16) for _ in range(2)]
        # Decode: each token in a page of its own. Prefill: runs of a page.
        run = 1 if tokens <= 512 else 64
        starts = torch.randperm(rows_on_host // run)[: -(-tokens // run)] * run
        rows = (starts[:, None] + torch.arange(run)).reshape(-1)[:tokens].to(device())
        plain: dict[str, float] = {}

        def by_rows(programs: int, new: list[torch.Tensor] = new, rows: torch.Tensor = rows) -> Issue:
            return lambda _: copy_rows(*host, *new, rows, max_programs=programs)

        ways: dict[str, Issue] = {PLAIN: plainly(host[0][: 2 * tokens], torch.cat(new))}
        ways |= {f"{programs} programs": by_rows(programs) for programs in sizes.write_back_programs}
        ways |= {"a program for 4 rows": by_rows(tokens)}

        def one(
            name: str,
            issue: Issue,
            plain: dict[str, float] = plain,
            tokens: int = tokens,
            run: int = run,
            new: list[torch.Tensor] = new,
            rows: torch.Tensor = rows,
        ) -> None:
            run_on_stream(issue, [0])
            ms, host_ms = run_on_stream(issue, list(range(sizes.items * 4)), ahead_ms=10.0)
            each, moved = ms / (sizes.items * 4), 2 * tokens * heads * dim * 2
            if name != PLAIN and not torch.equal(host[0][rows.cpu()], new[0].cpu()):
                raise InvariantError("the rows on the host are not what was written")
            row = {
                "tokens": tokens,
                "rows_a_run": run,
                "way": name,
                "us_a_layer": round(each * 1e3, 1),
                "gbps": round(moved / each / 1e6, 1),
                "share_of_link": round(moved / each / 1e6 / link, 3),
                "host_us": round(host_ms / (sizes.items * 4) * 1e3, 1),
            }
            for compute in works:
                if each * 2000 > compute.alone_ms:  # else the host cannot issue fast enough to stay beside it
                    slow = beside(compute, issue, max(each, 0.02))[0]
                    row[f"{compute.name} slowdown"] = round(slow, 3)
                    row[f"{compute.name} over plain"] = round(slow / plain.setdefault(compute.name, slow), 3)
            report.row("write-back", **row)

        for name, issue in ways.items():
            report.phase(f"write-back of {tokens} tokens, {name}", one, name, issue)


def main() -> int:
    parser, make = arguments("streaming", 120, __doc__)
    args = parser.parse_args()
    sizes = SimpleNamespace(
        layers=32,
        heads=8,
        dim=128,
        item_bytes=64 << 20,
        page_sizes=(16, 64),
        programs=(2, 4, 8, 16),
        runs=(1, 8, 1 << 20),
        items=16,
        ceiling_bytes=1 << 30,
        matmul=8192,
        matmuls=24,
        attention=(64, 4096, 64),
        attentions=60,
        write_back_tokens=(32, 128, 2048),
        write_back_programs=(2, 4, 8, 16),
        write_back_rows=1 << 18,
    )
    if args.smoke:
        vars(sizes).update(
            layers=8,
            heads=2,
            dim=16,
            item_bytes=1 << 16,
            page_sizes=(16,),
            items=4,
            ceiling_bytes=1 << 16,
            matmul=32,
            matmuls=2,
            attention=(2, 64, 16),
            attentions=1,
            write_back_tokens=(4,),
            write_back_rows=1 << 10,
        )
    report = make(args)
    report.phase("pinned copies", ceilings, report, sizes)
    works: list[Compute] = []
    for build in (matmul, attention):
        report.phase(build.__name__, lambda build=build: works.append(build(sizes)))
    for compute in works:
        report.ceiling(f"{compute.name} alone, ms", compute.alone_ms)
    for page_size in sizes.page_sizes:
        report.phase(f"stream in, page {page_size}", stream_in, report, sizes, page_size, works)
    report.phase("write-back", write_back, report, sizes, works)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
