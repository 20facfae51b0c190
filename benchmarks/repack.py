"""Moves at memory speed: in-page halving, cross-page merge, remap, and a whole `_halve_and_repack`, beside a device
copy.

    python -m benchmarks.repack --out DIR

Bytes a second are read + write. "KiB a layer" is one page's K and V of one layer; the kernels move K and V as runs of
half of that. Pages are scattered: a random half of the pool, in random order.
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from benchmarks.report import Report, arguments
from benchmarks.timing import copy_gbps, device, device_ms, on_gpu, random_fill, synchronize
from tidekv import DeviceKVPool, HostKVPool, KVGeometry, ReqToTokenPool
from tidekv.allocator import DynamicPagedTokenToKVPoolAllocator
from tidekv.errors import InvariantError
from tidekv.kernels.move import compact_cells, copy_cells
from tidekv.kernels.remap import remap_rows_
from tidekv.memory.ledger import HIGH, LOW
from tidekv.pressure.plan import Refusal, plan_repack
from tidekv.pressure.repack import work_of_repack

TOKEN_BYTES = 4096  # K and V of one token in one layer: 8 heads of 128, bf16


def geometry_of(layers: int, cell_bytes: int, pool_bytes: int) -> KVGeometry:
    """A pool of about `pool_bytes` whose cells (K and V) have `cell_bytes`."""
    pages = pool_bytes // (layers * cell_bytes) - 1
    return KVGeometry(layers, pages, cell_bytes // TOKEN_BYTES, 8, 128, torch.bfloat16)


def ceilings(report: Report, sizes: SimpleNamespace) -> None:
    report.ceiling("device_copy_gbps", copy_gbps(sizes.copy_bytes))


# ---- the two primitives ----------------------------------------------------------------------------------------------


def moves(report: Report, sizes: SimpleNamespace, layers: int, kib: int) -> None:
    """In-page halving and merge of scattered pages."""
    geometry = geometry_of(layers, kib * 1024, sizes.pool_bytes)
    pool = DeviceKVPool(geometry, device())
    random_fill(pool.k_flat, pool.v_flat)
    width, stride = layers // 2, geometry.page_stride
    pages = torch.randperm(geometry.num_pages)[: geometry.num_pages // 2 // 2 * 2] + 1
    slots = pages.to(device())
    factor = torch.full((len(pages),), 2, dtype=torch.int32, device=device())
    donors, receivers = slots[::2], slots[1::2]
    cells = torch.arange(width, device=device())[:, None] * stride
    # As in a repack: a donor's resident cells, every second one of the old layout, into the receiver's second half.
    src = (donors + 2 * cells).reshape(-1)
    dst = (receivers + cells + width * stride).reshape(-1)
    flats = (pool.k_flat, pool.v_flat)

    def halve() -> None:
        compact_cells(*flats, slots, factor, width, stride, geometry.page_size)

    def merge(max_programs: int | None) -> Callable[[], None]:
        return lambda: copy_cells(*flats, *flats, dst, src, geometry.page_size, max_programs=max_programs)

    calls: dict[str, Callable[[], None]] = {"halve in page": halve, "merge across pages": merge(None)}
    calls |= {f"merge, {n} programs": merge(n) for n in sizes.programs}
    times = device_ms(calls, sizes.n)
    halve_bytes = 2 * len(pages) * (width - 1) * geometry.cell_bytes
    ceiling = report.data["ceilings"].get("device_copy_gbps", float("nan"))
    for name, ms in times.items():
        moved = halve_bytes if name == "halve in page" else 2 * len(src) * geometry.cell_bytes
        rate = moved / ms / 1e6
        report.row(
            "moves",
            what=name,
            layers=layers,
            kib_a_layer=kib,
            pages=len(pages),
            gb_moved=round(moved / 1e9, 2),
            ms=round(ms, 3),
            gbps=round(rate),
            share_of_copy=round(rate / ceiling, 3),
        )


# ---- remap -----------------------------------------------------------------------------------------------------------


def remap(report: Report, sizes: SimpleNamespace) -> None:
    """Every row live, every column written. Values are runs of a page, as in a real table."""
    rows, columns, page_size = sizes.remap_rows, sizes.remap_columns, sizes.remap_page
    num_combined = 32 * (rows * columns // page_size // 8 + 1)
    lookup = torch.randperm(num_combined, device=device())
    live = torch.arange(rows, device=device())
    slots = torch.randint(1, num_combined, (rows, columns // page_size, 1), device=device())
    table64 = (slots * page_size + torch.arange(page_size, device=device())).view(rows, columns)
    del slots
    tables = {"int64": table64}
    if num_combined * page_size < 2**31:
        tables["int32"] = table64.to(torch.int32)
    calls = {
        name: (lambda table=table: remap_rows_(table, live, columns, lookup, page_size))
        for name, table in tables.items()
    }
    times = device_ms(calls, sizes.n)
    ceiling = report.data["ceilings"].get("device_copy_gbps", float("nan"))
    for name, ms in times.items():
        moved = 2 * tables[name].nbytes
        report.row(
            "remap",
            rows=rows,
            columns=columns,
            dtype=name,
            page_size=page_size,
            lookup_mb=round(lookup.nbytes / 1e6, 1),
            ms=round(ms, 3),
            gbps=round(moved / ms / 1e6),
            share_of_copy=round(moved / ms / 1e6 / ceiling, 3),
        )


# ---- the whole thing -------------------------------------------------------------------------------------------------


class Pool:
    """An allocator whose pool is full, so that the next allocation has to halve low priority and free `freed` bytes."""

    def __init__(self, page_size: int, most_freed: int, layers: int) -> None:
        page_bytes = layers * page_size * TOKEN_BYTES
        self.page_bytes = page_bytes
        low = 2 * most_freed // page_bytes
        pages = low + max(8, low // 16)  # the rest: high-priority filler, and staging once something is narrow
        self.geometry = KVGeometry(layers, pages, page_size, 8, 128, torch.bfloat16)
        self.kv = DeviceKVPool(self.geometry, device())
        random_fill(self.kv.k_flat, self.kv.v_flat)
        # One host page for each slot that narrows. Pinned memory is rounded up to a power of two by torch: keep K
        # (half of this) just under one.
        self.host = HostKVPool(self.geometry, (low + 1) * page_bytes)
        self.rows = ReqToTokenPool(64, (low // 64 + 2) * page_size, device())

    def allocator(self, freed: int, write_through: bool) -> tuple[DynamicPagedTokenToKVPoolAllocator, list[Any]]:
        """A fresh allocator over the same memory: `2 * freed` bytes of low priority in 64 rows, high priority in the
        rest."""
        size = self.geometry.page_size
        if len(self.rows.live_rows()):
            self.rows.free(self.rows.live_rows().tolist())
        allocator = DynamicPagedTokenToKVPoolAllocator(
            self.geometry.num_pages * size,
            size,
            torch.bfloat16,
            device(),
            self.kv,
            req_to_token_pool=self.rows,
            host_pool=self.host,
            low_max_pages=0,
            high_reserved_pages=self.geometry.num_pages,
            write_through=write_through,
        )
        # Scattered, as after hours of traffic.
        free = allocator.ledger.free_list
        free.pages = np.random.default_rng(0).permutation(free.pages)
        free.version += 1
        low = 2 * freed // self.page_bytes
        kept = []
        for pages in np.array_split(np.arange(low), min(64, low // 2)):
            (row,) = self.rows.alloc(1) or (-1,)
            found = allocator.alloc(len(pages) * size, False)
            if row < 0 or found is None:
                raise InvariantError("the pool is too small for its own low-priority pages")
            self.rows.write((row, slice(0, len(pages) * size)), found[0])
            kept.append((row, found[0]))
        filler = allocator.alloc(allocator.num_free_pages * size, True)
        if filler is None or allocator.num_free_pages:
            raise InvariantError("the filler did not fill the pool")
        synchronize()
        return allocator, kept


def whole(report: Report, sizes: SimpleNamespace, pool: Pool, freed: int, write_through: bool) -> None:
    """Wall time that the allocation which triggers it sees, its parts on the host, device time, launches."""
    page_size = pool.geometry.page_size
    rows = []
    for repeat in range(sizes.whole_n):
        allocator, kept = pool.allocator(freed, write_through)
        ledger = allocator.ledger
        begin = time.perf_counter()
        plan = plan_repack(ledger, LOW, 0)
        planned = time.perf_counter()
        saved = ledger.clone()
        cloned = time.perf_counter()
        if isinstance(plan, Refusal):
            raise InvariantError(f"the plan was refused: {plan.reason}")
        work_of_repack(plan, saved)
        booked = time.perf_counter()
        del saved, plan
        row, probe = kept[0][0], kept[0][1][: 2 * page_size]
        layers = (0, 1, pool.geometry.layer_num - 1)
        # A written-through slot's host copy is whatever the model wrote; here nobody did, so only resident layers
        # compare.
        layers = layers[:1] if write_through else layers
        before = [allocator.read_kv(layer, probe) for layer in layers]
        launches = allocator.repacker.counters.launches
        free_before = allocator.num_free_pages
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if on_gpu() else None
        gc.disable()
        synchronize()
        start = time.perf_counter()
        if events is not None:
            events[0].record()
        found = allocator.alloc(page_size, True)
        if events is not None:
            events[1].record()
        returned = time.perf_counter()
        synchronize()
        done = time.perf_counter()
        gc.enable()
        if found is None or allocator.num_halvings[LOW] != 1 or allocator.num_halvings[HIGH]:
            raise InvariantError(
                f"expected one halving of low priority: {allocator.num_halvings}, {allocator.refusals[-1:]}"
            )
        counters = allocator.repacker.counters
        moved = pool.rows.req_to_token[row, : 2 * page_size]
        after = [allocator.read_kv(layer, moved) for layer in layers]
        same = all(
            torch.equal(a.view(torch.int16), b.view(torch.int16))
            for x, y in zip(before, after, strict=True)
            for a, b in zip(x, y, strict=True)
        )
        rows.append(
            {
                "wall_until_return_ms": (returned - start) * 1e3,
                "wall_until_done_ms": (done - start) * 1e3,
                "device_ms": events[0].elapsed_time(events[1]) if events is not None else float("nan"),
                "plan_ms": (planned - begin) * 1e3,
                "clone_ms": (cloned - planned) * 1e3,
                "book_ms": (booked - cloned) * 1e3,
                "launches": counters.launches - launches + 1,  # and one remap of req_to_token
                "to_host_gb": counters.to_host_bytes / 1e9,
                "device_gb": counters.device_bytes / 1e9,
                "freed_pages": allocator.num_free_pages - free_before + 1,
                "same_bits": same,
            }
        )
        if repeat == 0:
            allocator.check()
    best = {}
    for key, first in rows[0].items():
        values = [row[key] for row in rows]
        best[key] = round(float(np.median(values)), 2) if isinstance(first, float) else values[0]
    best["same_bits"] = all(row["same_bits"] for row in rows)
    report.row(
        "halve and repack",
        freed_gb=freed / 1e9,
        kib_a_layer=page_size * TOKEN_BYTES // 1024,
        layers=pool.geometry.layer_num,
        write_through=write_through,
        # Staging pages come out of what is freed.
        net_freed_gb=round(best["freed_pages"] * pool.page_bytes / 1e9, 2),
        host_plan_share=round((best["plan_ms"] + best["clone_ms"] + best["book_ms"]) / best["wall_until_done_ms"], 3),
        **best,
    )


def kernels_of_a_repack(report: Report, pool: Pool, freed: int) -> None:
    """The launches that the device really saw, by the profiler, so that "constant" is not only our own counting."""
    from torch.profiler import ProfilerActivity, profile

    allocator, _ = pool.allocator(freed, False)
    with profile(activities=[ProfilerActivity.CUDA if on_gpu() else ProfilerActivity.CPU]) as seen:
        allocator.alloc(pool.geometry.page_size, True)
        synchronize()
    names: dict[str, int] = {}
    for event in seen.events():
        if not on_gpu() or event.device_type == torch.autograd.DeviceType.CUDA:
            names[event.name[:40]] = names.get(event.name[:40], 0) + 1
    top = ", ".join(f"{name} x{count}" for name, count in sorted(names.items(), key=lambda item: -item[1])[:8])
    report.row("launches seen by the profiler", freed_gb=freed / 1e9, kernels_and_copies=sum(names.values()), which=top)


def pinned_d2h(report: Report, pool: Pool) -> None:
    """The rate that backing up to the host is held against."""
    size = min(pool.host.k_flat.nbytes, pool.kv.k_flat.nbytes, 1 << 30) // 4096 * 4096
    host, there = (t.view(-1).view(torch.uint8)[:size] for t in (pool.host.k_flat, pool.kv.k_flat))
    ms = device_ms({"d2h": lambda: host.copy_(there, non_blocking=True)}, 4)["d2h"]
    report.ceiling("pinned_d2h_gbps", size / ms / 1e6)


def whole_repacks(report: Report, sizes: SimpleNamespace, page_size: int, freed: tuple[int, ...]) -> None:
    begin = time.perf_counter()
    pool = Pool(page_size, max(freed), 32 if not report.smoke else 8)
    synchronize()
    pages = pool.geometry.num_pages
    report.row(
        "pools",
        kib_a_layer=page_size * TOKEN_BYTES // 1024,
        pages=pages,
        device_gb=round(pool.geometry.pool_bytes / 1e9, 1),
        host_gb=round(pool.host.capacity_bytes / 1e9, 1),
        seconds_to_make=round(time.perf_counter() - begin, 1),
    )
    report.phase("pinned rate", pinned_d2h, report, pool)
    for bytes_freed in freed:
        for write_through in (False, True):
            report.phase(
                f"free {bytes_freed / 1e9:g} GB, write-through {write_through}",
                whole,
                report,
                sizes,
                pool,
                bytes_freed,
                write_through,
            )
    for bytes_freed in freed:
        report.phase(f"launches, {bytes_freed / 1e9:g} GB", kernels_of_a_repack, report, pool, bytes_freed)
    del pool
    gc.collect()
    if on_gpu():
        torch._C._host_emptyCache()


def main() -> int:
    parser, make = arguments("repack", 120, __doc__)
    args = parser.parse_args()
    sizes = SimpleNamespace(
        copy_bytes=4 << 30,
        pool_bytes=12 << 30,
        n=8,
        programs=(132 * 8, 132 * 16),
        kib=(16, 32, 64, 256),
        layers=(32, 80),
        remap_rows=4096,
        remap_columns=32768,
        remap_page=64,
        whole_n=3,
        wholes=((64, (1_000_000_000, 4_000_000_000, 16_000_000_000)), (16, (1_000_000_000, 4_000_000_000))),
    )
    if args.smoke:
        vars(sizes).update(
            copy_bytes=1 << 20,
            pool_bytes=8 << 20,
            n=2,
            programs=(4,),
            kib=(16,),
            layers=(8,),
            remap_rows=8,
            remap_columns=256,
            remap_page=16,
            whole_n=2,
            wholes=((4, (1 << 20, 2 << 20)),),
        )
    report = make(args)
    report.phase("device copy", ceilings, report, sizes)
    for layers in sizes.layers:
        for kib in sizes.kib:
            report.phase(f"moves, L={layers}, {kib} KiB", moves, report, sizes, layers, kib)
    report.phase("remap", remap, report, sizes)
    for i, (page_size, freed) in enumerate(sizes.wholes):
        name = f"halve and repack, page {page_size}"
        report.phase(name, whole_repacks, report, sizes, page_size, freed, needs_s=0 if i == 0 else 35)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
