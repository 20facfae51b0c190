"""The plugin's rules for pausing played on the two workloads of `sglang_pressure`, without SGLang: seconds a variant.

    python -m benchmarks.sglang_rules

64 requests at once, a third high, a pool of 937 pages of 64 tokens, exact reads. What is played are the rules
themselves (`tidekv.sglang_plugin.pausing`) in the order of SGLang's loop: a prefill of up to 8,192 tokens wherever one
is admitted, else a decode step. Times are of Llama-3.1-8B on one H200 with SGLang 0.5.17, fitted to decode steps of 5.1
to 12.9 ms:

    decode step    4.95 ms + 0.017 ms a request + 0.041 us a token of context
    prefill        42,000 tokens a second, 27 ms at least
    link           50 GB/s for the 15 of 16 parts of a request's KV that leave, 131,072 bytes a token, between steps
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field

from tidekv.sglang_plugin.pausing import Member, Room, Rules, admits, choose, victims

PAGE_SIZE, POOL_PAGES, SLOTS_A_PAGE, CHUNK = 64, 937, 16, 8192
LINK_S_A_TOKEN = 131_072 * 15 / 16 / 50e9
WORKLOADS = {"2k in, 512 out": (2048, 512), "512 in, 1k out": (512, 1024)}
VARIANTS = (
    ("defaults", Rules(PAGE_SIZE, SLOTS_A_PAGE), False),
    ("turns of 171, paused share 0.04", Rules(PAGE_SIZE, SLOTS_A_PAGE, turn=171, paused_share=0.04), False),
    ("turns of 128, paused share 0.05", Rules(PAGE_SIZE, SLOTS_A_PAGE, turn=128, paused_share=0.05), False),
    ("the same, copies under steps", Rules(PAGE_SIZE, SLOTS_A_PAGE, turn=128, paused_share=0.05), True),
)


def decode_s(num_requests: int, tokens: int) -> float:
    """Seconds of a decode step."""
    return 4.95e-3 + 0.017e-3 * num_requests + 0.041e-6 * tokens


def prefill_s(tokens: int) -> float:
    """Seconds of a prefill."""
    return max(0.027, tokens / 42_000)


@dataclass(eq=False)
class Played:
    """One request. away: its pages that are narrow; came: the step in which it came back; *_s: since the start."""

    order: int
    high: bool
    tokens: int = 0
    made: int = 0
    away: int = 0
    came: int = -(10**9)
    first_s: float = 0.0
    end_s: float = 0.0

    @property
    def pages(self) -> int:
        return -(-self.tokens // PAGE_SIZE)


@dataclass
class Game:
    """SGLang's loop over one workload. hidden: copies take no time of their own, as if all of them ran under steps."""

    prompt: int
    output: int
    rules: Rules
    hidden: bool
    now_s: float = 0.0
    moved_s: float = 0.0
    num_steps: int = 0
    num_pauses: int = 0
    live: list[Played] = field(default_factory=list)

    def play(self) -> list[Played]:
        """Until everybody has ended; the requests in order of arrival."""
        everybody = [Played(i, i % 3 == 0) for i in range(64)]
        queue = sorted(everybody, key=lambda r: (not r.high, r.order))
        for place, request in enumerate(queue):
            request.order = place  # as the plugin counts: in order of the first prefill
        while queue or self.live:
            if not self._prefill(queue):
                self._decode()
        return everybody

    def free(self) -> int:
        """Pages to be had without narrowing anything, beside one of staging."""
        wide = sum(r.pages - r.away for r in self.live)
        return POOL_PAGES - wide - self.rules.held(sum(r.away for r in self.live)) - 1

    def members(self) -> list[Member]:
        return [
            Member(
                r.order, r.high, r.pages, r.away, r.tokens % PAGE_SIZE == 0, r.made, self.num_steps - r.came, r.away > 0
            )
            for r in self.live
        ]

    def _prefill(self, queue: list[Played]) -> bool:
        """Whoever is admitted, up to a chunk; False: nobody is."""
        batch: list[Played] = []
        need, members = -(-self.prompt // PAGE_SIZE) + 1, self.members()
        paused = [m for m in members if m.paused]
        pausable = sum(m.pages for m in members if not m.high and not m.paused)
        while queue and len(batch) * self.prompt < CHUNK:
            room = Room(
                pages=POOL_PAGES, free=self.free(), pausable=pausable,
                paused=self.rules.held(sum(m.away for m in members)), num_running=len(members) - len(paused),
                num_paused=len(paused), added=len(batch) * need, num_added=len(batch),
            )  # fmt: skip
            if not admits(need, queue[0].high, room, self.rules):
                break
            batch.append(queue.pop(0))
        if not batch:
            return False
        short = len(batch) * (need - 1) - self.free()
        if short > 0:
            self._pause(victims(members, short, self.rules))
        self.now_s += prefill_s(len(batch) * self.prompt)
        for request in batch:
            request.tokens, request.made, request.first_s = self.prompt, 1, self.now_s
        self.live += batch
        return True

    def _decode(self) -> None:
        for _ in range(8):
            choice = choose(self.members(), self.free(), self.rules)
            self._pause(choice.pause)
            self._resume([self.live[i] for i in choice.resume])
            if not choice.pause:
                break
        running = [r for r in self.live if not r.away]
        self.now_s += decode_s(len(running), sum(r.tokens for r in running))
        self.num_steps += 1
        for request in running:
            request.tokens, request.made = request.tokens + 1, request.made + 1
            if request.made >= self.output:
                request.end_s = self.now_s
        self.live = [r for r in self.live if not r.end_s]

    def _pause(self, places: tuple[int, ...]) -> None:
        for request in (self.live[i] for i in places):
            request.away, self.num_pauses = request.pages, self.num_pauses + 1
            self._move(request.tokens)

    def _resume(self, requests: list[Played]) -> None:
        for request in requests:
            self._move(request.away * PAGE_SIZE)
            request.away, request.came = 0, self.num_steps

    def _move(self, tokens: int) -> None:
        if not self.hidden:
            self.moved_s += tokens * LINK_S_A_TOKEN
            self.now_s += tokens * LINK_S_A_TOKEN


def table() -> list[str]:
    """In Markdown, a line for each variant on each workload."""
    lines = []
    for workload, (prompt, output) in WORKLOADS.items():
        heads = (workload, "steps", "pauses", "s", "of it between steps", "first token low p50, s", "low ends, mean, s")
        lines += ["", f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
        for name, rules, hidden in VARIANTS:
            game = Game(prompt, output, rules, hidden)
            lows = [r for r in game.play() if not r.high]
            first, end = statistics.median(r.first_s for r in lows), statistics.mean(r.end_s for r in lows)
            counts = f"{game.num_steps:,} | {game.num_pauses} | {game.now_s:.1f} | {game.moved_s:.1f}"
            lines.append(f"| {name} | {counts} | {first:.1f} | {end:.1f} |")
    return lines


if __name__ == "__main__":
    print("\n".join(table()))
