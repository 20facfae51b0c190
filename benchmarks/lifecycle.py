"""One request's life under pressure, printed: the numbers of docs/lifecycle.md. No model, no GPU.

    python benchmarks/lifecycle.py            print every state
    python benchmarks/lifecycle.py --check    exit 1 unless docs/lifecycle.md shows exactly what is printed

A pool of 10 pages, 8 layers, 4 tokens a page. A is a low-priority request, B a high one. K and V are random, different
for each request, layer and position. After every block the checker runs and all of it is read back bit for bit; after
every decode step the attention output is compared with attention over the numbers themselves.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

import numpy as np
import torch

from tidekv import DeviceKVPool, DynamicPagedTokenToKVPoolAllocator, KVGeometry, ReqToTokenPool
from tidekv.attention.backend import AttentionBackend
from tidekv.attention.page_tables import build_batch
from tidekv.memory.ledger import CODE_NAMES, DYNAMIC, FREE, IntArray
from tidekv.pressure import ladder
from tidekv.pressure.repack import Work
from tidekv.streaming.schedule import Item
from tidekv.streaming.streamer import Streamer

DOC = Path(__file__).parents[1] / "docs" / "lifecycle.md"
HEADS, HEAD_DIM, MAX_TOKENS = 1, 4, 64
A, B = 0, 1  # rows of req_to_token
HIGH = (False, True)  # by row


def pattern(row: int, layer: int, positions: IntArray) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V [T, heads, dim] of a request's tokens: random numbers, the same at every call."""
    draw = torch.Generator().manual_seed(100 * row + layer)
    k, v = torch.randn(2, MAX_TOKENS, HEADS, HEAD_DIM, generator=draw)[:, torch.from_numpy(positions)]
    return k, v


class Story:
    """The pool, the two requests, and the printing."""

    def __init__(self) -> None:
        self.geometry = KVGeometry(8, 10, 4, HEADS, HEAD_DIM, torch.float32)
        self.device_pool = DeviceKVPool(self.geometry, "cpu")
        self.rows = ReqToTokenPool(2, MAX_TOKENS, "cpu")
        self.allocator = DynamicPagedTokenToKVPoolAllocator(
            40, 4, torch.float32, "cpu", self.device_pool, req_to_token_pool=self.rows, high_reserved_pages=7
        )
        self.host_pool = self.allocator.host_pool
        self.streamer = Streamer(self.device_pool, self.host_pool, before_copy=self.tell_copy)
        self.backend = AttentionBackend(self.allocator.ledger, self.device_pool, self.host_pool, self.streamer)
        self.rows.alloc(2)
        self.lens = [0, 0]
        self.parked: IntArray | None = None
        self.lines: list[str] = []
        self.sections: list[list[str]] = []
        self.allocator._apply = self.tell_work(self.allocator._apply)  # type: ignore[method-assign]
        self.allocator._try_backpressure = self.tell_rung(self.allocator._pressure_state)  # type: ignore[method-assign]

    # ---- printing ----------------------------------------------------------------------------------------------

    def say(self, line: str) -> None:
        self.lines.append(line.rstrip())

    def section(self) -> None:
        """Checks everything, then closes the section."""
        self.allocator.check()
        for row in (A, B):
            if self.lens[row] and not (row == A and self.parked is not None):
                positions = np.arange(self.lens[row])
                for layer in range(self.geometry.layer_num):
                    got = self.allocator.read_kv(layer, self.locs(row))
                    if not all(torch.equal(x, y) for x, y in zip(got, pattern(row, layer, positions), strict=True)):
                        raise SystemExit(f"request {'AB'[row]} does not read back in layer {layer}")
        self.sections.append(self.lines)
        self.lines = []

    def pages(self) -> None:
        """Every owned page, cell by cell: which layer of which logical page lies there."""
        ledger, stride = self.allocator.ledger, self.geometry.page_stride
        owner = {}
        for row in (A, B):
            firsts = self.rows.req_to_token[row, : self.lens[row] : 4].tolist()
            owner.update({loc // 4: f"{'AB'[row]}{i}" for i, loc in enumerate(firsts) if loc})
        for page in range(1, stride):
            code, level = int(ledger.page_code[page]), int(ledger.page_level[page])
            if code == FREE:
                continue
            if code == DYNAMIC:
                self.say(f"page {page:>2}  staging  4 pairs of cells")
                continue
            width = ledger.ladder[level]
            slots = []
            for combined in (page + ledger.slot_offsets[level]).tolist():
                layers = np.flatnonzero(ledger.resident_pos[level] >= 0).tolist()
                held = owner.get(combined)
                slots.append(f"{held} {' '.join(map(str, layers))}" if held else f"-- {' '.join('.' * width)}")
            self.say(f"page {page:>2}  {CODE_NAMES[code]:<4} w{width}  {' | '.join(slots)}")

    def counts(self) -> None:
        a = self.allocator
        host = a.ledger.num_host_pages - len(a.ledger.host_free)
        self.say(
            f"free {a.num_free_pages}  high {a.high_used}  low {a.low_used}  staging {a.dynamic_used}  "
            f"host pages {host}  new slots: high w{a.high_current_slot_width}, low w{a.low_current_slot_width}"
        )

    def row(self, row: int) -> None:
        self.say(f"{'AB'[row]}: {self.lens[row]} tokens, first locs of its pages {self.locs(row)[::4].tolist()}")

    def tell_copy(self, item: Item) -> None:
        src = self.streamer._src[item.begin : item.end].tolist()
        dst = self.streamer._dst[item.begin : item.end].tolist()
        self.say(f"item {item.index}  layer {item.layer}  part {item.part}  cell {item.position}  {src} -> {dst}")

    def tell_work(self, apply):  # type: ignore[no-untyped-def]
        """What the device is told to do, as it is told."""

        def told(work: Work) -> None:
            self.say(
                f"{work.name} {CODE_NAMES[work.code]}: cells to host {len(work.to_host)}, slots compacted in place "
                f"{len(work.compact_slots)}, cells moved {len(work.on_device)}, cells from host {len(work.from_host)}, "
                f"pages freed {work.freed_pages}"
            )
            if work.lookup is not None:
                moved = np.flatnonzero(work.lookup != np.arange(len(work.lookup)))
                self.say(f"lookup table: {', '.join(f'{i} -> {int(work.lookup[i])}' for i in moved.tolist())}")
            apply(work)

        return told

    def tell_rung(self, state_of):  # type: ignore[no-untyped-def]
        """Which rung the ladder chooses, before it is taken."""
        take = self.allocator._try_backpressure

        def told() -> bool:
            action = ladder.choose(state_of(self.allocator._decision))
            self.say(f"rung {'5: nothing left' if action is None else action.rung.name}")
            return take()

        return told

    # ---- what happens ------------------------------------------------------------------------------------------

    def locs(self, row: int) -> torch.Tensor:
        return self.rows.req_to_token[row, : self.lens[row]]

    def extend(self, row: int, num_tokens: int) -> None:
        """The next `num_tokens` tokens of a prompt, K and V written without a forward."""
        start, end = self.lens[row], self.lens[row] + num_tokens
        last = self.locs(row)[-1:] if start else torch.tensor([-1])
        prefix, seq = torch.tensor([start]), torch.tensor([end])
        found = self.allocator.alloc_extend(prefix, prefix, seq, seq, last, num_tokens, HIGH[row])
        if found is None:
            raise SystemExit("alloc_extend returned None")
        out, dynamic = found
        self.rows.write((row, slice(start, end)), out)
        self.lens[row] = end
        for layer in range(self.geometry.layer_num):
            self.allocator.write_kv(layer, out, *pattern(row, layer, np.arange(start, end)))
        shown = out.tolist() if num_tokens <= 12 else [*out[:2].tolist(), "...", *out[-2:].tolist()]
        self.say(
            f"{'AB'[row]} +{num_tokens} -> locs {str(shown).replace(chr(39), '')}, dynamic_indices {_list(dynamic)}"
        )

    def forward(self, row: int) -> None:
        """One decode step with the real attention backend: staging, streaming, write-back."""
        a = self.allocator
        with a.step():
            self.lens[row] += 1
            end = self.lens[row]
            seq = torch.tensor([end])
            found = a.alloc_decode(seq, seq, self.rows.req_to_token[row, end - 2 : end - 1], HIGH[row])
            if found is None:
                raise SystemExit("alloc_decode returned None")
            out, dynamic = found
            self.rows.write((row, slice(end - 1, end)), out)
            self.say(f"{'AB'[row]} +1 -> loc {out.tolist()}, dynamic_indices {_list(dynamic)}")
            slots = self.rows.req_to_token[row : row + 1, : -(-end // 4) * 4 : 4] // 4
            batch = build_batch(a.ledger, np.array([1]), np.array([end]), slots, out)
            if batch.narrow is not None:
                schedule = batch.narrow.schedule
                pairs = ", ".join(f"{s} -> {d}" for s, d in zip(schedule.slots, schedule.dynamic, strict=True))
                self.say(f"slot -> dynamic slot: {pairs}; parts {schedule.num_parts}")
            before, worst = self.streamer.bytes_in, 0.0
            self.backend.begin(batch)
            for layer in range(self.geometry.layer_num):
                k, v = pattern(row, layer, np.array([end - 1]))
                q = k.flip(-1)
                got = self.backend.forward(layer, q, k, v, 0.5)
                keys, values = pattern(row, layer, np.arange(end))
                weights = torch.softmax((q[:, 0] @ keys[:, 0].T) * 0.5, -1)
                worst = max(worst, float((weights @ values[:, 0] - got[:, 0]).abs().max()))
            self.backend.end()
        if worst > 1e-5:
            raise SystemExit(f"attention over the pool is off by {worst}")
        self.say(f"bytes from the host {self.streamer.bytes_in - before}")


def _list(dynamic: torch.Tensor | None) -> str:
    return "None" if dynamic is None else str(dynamic.tolist())


def tell() -> list[list[str]]:
    """The whole life; one list of lines for each block of the page."""
    story = Story()
    a, g = story.allocator, story.geometry

    # the pool
    story.say(
        f"L {g.layer_num}, P {g.num_pages}, page_size {g.page_size}, page_stride {g.page_stride}, widths {g.widths}"
    )
    story.say(f"cell_bytes {g.cell_bytes}, page_bytes {g.page_bytes}, host pages {story.host_pool.num_pages}")
    b = a.budgets
    story.say(f"low_max_pages {b.low_max_pages}, high_reserved_pages {b.high_reserved_pages}")
    story.say(f"dynamic_max_pages {b.dynamic_max_pages}")
    story.section()
    # arrival, prefill, growth
    story.extend(A, 10)
    story.row(A)
    story.section()
    for _ in range(3):
        story.forward(A)
    story.pages()
    story.section()
    # a high request takes the rest
    story.extend(B, 24)
    story.counts()
    story.section()
    # rung 1: low is halved and merged
    story.extend(B, 2)
    story.row(A)
    story.counts()
    story.pages()
    story.section()
    # a streamed step
    story.forward(A)
    story.section()
    # rung 3 and the merge of rung 0: low is halved again
    story.extend(B, 4)
    story.row(A)
    story.counts()
    story.pages()
    story.section()
    # a step at width 2
    story.forward(A)
    story.section()
    # rung 2: high is halved
    story.extend(B, 4)
    story.row(B)
    story.counts()
    story.pages()
    story.section()
    # a step whose narrowed slots do not all fit staging
    story.forward(B)
    story.section()
    # parked
    story.parked = a.park(story.locs(A))
    assert story.parked is not None
    story.rows.req_to_token[A, : story.lens[A]] = 0
    story.say(f"host pages of A: {story.parked.tolist()}")
    story.counts()
    story.section()
    # unparked
    locs = a.unpark(story.parked, False)
    assert locs is not None
    story.rows.write((A, slice(0, story.lens[A])), locs[: story.lens[A]])
    story.parked = None
    story.row(A)
    story.counts()
    story.section()
    # B ends, A is restored
    a.free(story.locs(B))
    story.rows.free(B)
    story.lens[B] = 0
    story.say(f"after B is freed: free {a.num_free_pages}, restore_widths() widened {a.restore_widths()} slots")
    story.row(A)
    story.counts()
    story.pages()
    story.section()
    # A ends
    story.forward(A)
    a.free(story.locs(A))
    story.rows.free(A)
    story.lens[A] = 0
    story.counts()
    moves = a.repacker.counters
    story.say(
        f"in all: {moves.to_host_bytes} bytes backed up, {moves.device_bytes} moved on the device, "
        f"{moves.from_host_bytes} brought back, {story.streamer.bytes_in} streamed, "
        f"{story.backend.host_bytes_out} of new tokens written to the host"
    )
    story.section()
    return story.sections


def main() -> int:
    parser = argparse.ArgumentParser(description="Prints the states of docs/lifecycle.md.")
    parser.add_argument("--check", action="store_true", help="compare with docs/lifecycle.md instead of printing")
    args = parser.parse_args()
    torch.set_num_threads(1)
    printed = ["\n".join(lines) for lines in tell()]
    if not args.check:
        print("\n\n".join(printed))
        return 0
    shown = [block.strip() for block in re.findall(r"^```text\n(.*?)^```", DOC.read_text(), re.M | re.S)]
    if shown == printed:
        print(f"docs/lifecycle.md agrees: {len(shown)} blocks")
        return 0
    for i, (want, have) in enumerate(zip(printed, shown, strict=False)):
        if want != have:
            print(f"block {i} of docs/lifecycle.md differs; the program prints:\n{want}", file=sys.stderr)
            return 1
    print(f"docs/lifecycle.md has {len(shown)} blocks, the program prints {len(printed)}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
