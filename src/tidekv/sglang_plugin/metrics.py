"""tidekv:... beside sglang:..., with SGLang's labels; and a line in the log when something narrowed or came back."""

from __future__ import annotations

import importlib
import logging
import time
from typing import Any

from tidekv.memory.ledger import CODE_NAMES, HIGH, LOW
from tidekv.sglang_plugin.allocator import TideAllocator

logger = logging.getLogger(__name__)

EVERY_SECONDS = 1.0
GAUGES = {
    "pages": "Pages of the device pool, by priority and slot width",
    "free_pages": "Pages of the device pool that nobody owns",
    "narrow_slots": "Logical pages that have given up layers",
    "virtual_pages_used": "Logical pages in use",
    "host_pages_used": "Pages of the host pool that hold layers",
    "host_pages": "Pages of the host pool",
    "paused_requests": "Requests that hold their KV at minimum width and do not decode now",
}
COUNTERS = {
    "halvings_total": "Times a priority's pages were halved",
    "restores_total": "Times widths came back",
    "merges_total": "Times half-empty pages were merged",
    "pages_freed_total": "Pages that narrowing and merging have freed",
    "pauses_total": "Times a low request stopped decoding because not all of them fit",
    "resumes_total": "Times a paused request went on",
    "decode_steps_total": "Decode batches that were scheduled",
    "evicted_tokens_total": "Tokens of cached prefixes that gave way to physical pressure",
    "window_pages_total": "Old pages of low requests that a window (LOSSY) let narrow",
    "bytes_to_host_total": "Bytes of K and V copied to the host",
    "bytes_from_host_total": "Bytes of K and V copied from the host, streamed ones included",
}


def snapshot(allocator: TideAllocator) -> dict[str, float]:
    """Every figure by its metric's name; those with labels as name{label values}."""
    core = allocator.core
    ledger, moves = core.ledger, core.repacker.counters
    attention = getattr(allocator, "core_attention", None)
    streamed = attention.streamer.bytes_in if attention is not None else 0
    written = attention.host_bytes_out if attention is not None else 0
    paused = allocator.paused
    out: dict[str, float] = {
        f"pages{{{name},{width}}}": count for (name, width), count in ledger.pages_by_state().items() if name != "free"
    }
    out |= {
        "free_pages": ledger.num_free_pages,
        "narrow_slots": sum(ledger.num_narrow),
        "virtual_pages_used": allocator.pages.num_live,
        "host_pages_used": ledger.num_host_pages - len(ledger.host_free),
        "host_pages": ledger.num_host_pages,
        "paused_requests": len(paused.paused) if paused is not None else 0,
        "pauses_total": paused.num_pauses if paused is not None else 0,
        "resumes_total": paused.num_resumes if paused is not None else 0,
        "decode_steps_total": paused.num_steps if paused is not None else 0,
        "restores_total": core.num_restores,
        "merges_total": core.num_merges,
        "pages_freed_total": core.num_pages_freed,
        "evicted_tokens_total": allocator.num_evictions,
        "window_pages_total": allocator.num_window_pages,
        "bytes_to_host_total": moves.to_host_bytes + written,
        "bytes_from_host_total": moves.from_host_bytes + streamed,
    }
    out |= {f"halvings_total{{{CODE_NAMES[code]}}}": core.num_halvings[code] for code in (HIGH, LOW)}
    return out


class Reporter:
    """labels: SGLang's, for its prometheus registry; None: metrics are off, only the log speaks."""

    def __init__(self, allocator: TideAllocator, labels: dict[str, Any] | None) -> None:
        self.allocator = allocator
        self.labels = {key: str(value) for key, value in (labels or {}).items() if key != "priority"}
        self._metrics: dict[str, Any] = {}
        self._last = snapshot(allocator)
        self._logged = dict(self._last)
        self._idle = dict(self._last)
        self._next = 0.0
        if labels is not None:
            # Imported late: SGLang sets the multiprocess folder first.
            prometheus = importlib.import_module("prometheus_client")
            extra = {"pages": ["priority", "width"], "halvings_total": ["priority"]}
            for name, text in GAUGES.items():
                names = [*self.labels, *extra.get(name, [])]
                self._metrics[name] = prometheus.Gauge(f"tidekv:{name}", text, names, multiprocess_mode="mostrecent")
            for name, text in COUNTERS.items():
                self._metrics[name] = prometheus.Counter(f"tidekv:{name}", text, [*self.labels, *extra.get(name, [])])
            self._write({}, self._last)

    def step(self) -> None:
        """Once a scheduler iteration: log what changed at once, publish once a second."""
        core, last = self.allocator.core, self._logged
        halvings = sum(core.num_halvings.values())
        before = last["halvings_total{high}"] + last["halvings_total{low}"]
        if halvings != before or core.num_restores != last["restores_total"]:
            self._log(last)
            self._logged = snapshot(self.allocator)
        now = time.monotonic()
        if now >= self._next:
            self._next = now + EVERY_SECONDS
            self.publish()

    def log_idle(self) -> None:
        """What the busy time that has just ended came to."""
        now, last = snapshot(self.allocator), self._idle
        since = {name: now[name] - last[name] for name in COUNTERS if name in now}
        self._idle = now
        logger.info(
            "tidekv idle. #decode-step: %d, #pause: %d, #resume: %d, to host: %.2f GB, from host: %.2f GB, "
            "#evicted-token: %d, #window-page: %d, #narrow-page: %d",
            since["decode_steps_total"],
            since["pauses_total"],
            since["resumes_total"],
            since["bytes_to_host_total"] / 1e9,
            since["bytes_from_host_total"] / 1e9,
            since["evicted_tokens_total"],
            since["window_pages_total"],
            now["narrow_slots"],
        )
        if self.allocator.attention is not None:
            logger.info("tidekv idle, since the start: %s", self.allocator.attention.told())

    def publish(self) -> None:
        """Bring the registry up to date."""
        current = snapshot(self.allocator)
        if self._metrics:
            self._write(self._last, current)
        self._last = current

    def _log(self, last: dict[str, float]) -> None:
        core, paused = self.allocator.core, self.allocator.paused
        ledger, ladder = core.ledger, core.ledger.ladder
        what = "restore" if core.num_restores != last["restores_total"] else "narrow"
        logger.info(
            "tidekv %s. width high: %d, low: %d, #narrow-page: %d, #page: %d, #free-physical-page: %d, "
            "#host-page: %d, #halving: %d, #restore: %d, #paused-req: %d, #pause: %d, #decode-step: %d",
            what,
            ladder[ledger.level[HIGH]],
            ladder[ledger.level[LOW]],
            sum(ledger.num_narrow),
            self.allocator.pages.num_live,
            ledger.num_free_pages,
            ledger.num_host_pages - len(ledger.host_free),
            sum(core.num_halvings.values()),
            core.num_restores,
            len(paused.paused) if paused is not None else 0,
            paused.num_pauses if paused is not None else 0,
            paused.num_steps if paused is not None else 0,
        )

    def _write(self, before: dict[str, float], now: dict[str, float]) -> None:
        for key, value in now.items():
            name, _, rest = key.partition("{")
            extra = rest.rstrip("}").split(",") if rest else []
            metric = self._metrics[name].labels(*self.labels.values(), *extra)
            if name in COUNTERS:
                metric.inc(value - before.get(key, 0))
            else:
                metric.set(value)
