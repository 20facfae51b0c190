"""Request traces: one JSON object a line, plain or gzip. Reads and checks them; decides nothing.

    t         arrival, seconds from the start of the trace
    in, out   prompt and output tokens; the output length is replayed as recorded
    prio      "high" or "low"
    hash_ids  optional: ids of the prompt's blocks of 512 tokens; an equal id is an equal block after an equal prefix

Other fields are left alone.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from tidekv.errors import ConfigError

HASH_BLOCK_TOKENS = 512  # as in the Mooncake traces
TOKEN_MIX = 2_654_435_761  # Knuth's multiplicative hash: 2**32 divided by the golden ratio


@dataclass(frozen=True)
class TraceRequest:
    """One line of a trace, after scaling. `index` is its number in the file, from 0."""

    index: int
    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    is_high_priority: bool
    hash_ids: tuple[int, ...] = ()

    def prompt_ids(self, vocab_size: int) -> list[int]:
        """Made-up token ids (no source carries text) that share a prefix exactly where the trace says so."""
        ids: list[int] = []
        for block, start in enumerate(range(0, self.prompt_tokens, HASH_BLOCK_TOKENS)):
            # Without hash ids a prompt shares nothing: negative seeds are never hash ids.
            seed = self.hash_ids[block] if block < len(self.hash_ids) else -1 - self.index
            count = min(HASH_BLOCK_TOKENS, self.prompt_tokens - start)
            mixed = (seed + 1) * TOKEN_MIX % vocab_size + np.arange(count, dtype=np.int64) * 40_503
            ids += (mixed % vocab_size).tolist()
        return ids


def read_trace(
    path: Path, duration_s: float | None = None, high_rate: float = 1.0, low_rate: float = 1.0
) -> list[TraceRequest]:
    """The requests of a trace in order of arrival, those after `duration_s` (of scaled time) left out.

    high_rate, low_rate   compress the time of a class: 2.0 makes its requests come twice as fast
    `ConfigError` names the file, the line and the field that is wrong.
    """
    for name, rate in (("high_rate", high_rate), ("low_rate", low_rate)):
        if not rate > 0:
            raise ConfigError(f"{name} must be above 0, got {rate}")
    if duration_s is not None and not duration_s > 0:
        raise ConfigError(f"duration must be above 0 s, got {duration_s}")
    requests: list[TraceRequest] = []
    for line_number, line in enumerate(_lines(path), start=1):
        if not line.strip():
            continue
        request = _request(f"{path}:{line_number}", len(requests), line)
        rate = high_rate if request.is_high_priority else low_rate
        requests.append(replace(request, arrival_s=request.arrival_s / rate))
    requests = [r for r in requests if duration_s is None or r.arrival_s < duration_s]
    if not requests:
        raise ConfigError(f"{path}: no requests" + ("" if duration_s is None else f" in the first {duration_s:g} s"))
    return sorted(requests, key=lambda r: (r.arrival_s, r.index))


def _lines(path: Path) -> Iterator[str]:
    try:
        if path.suffix == ".gz":
            with gzip.open(path, "rt", encoding="utf-8") as file:
                yield from file
        else:
            with path.open(encoding="utf-8") as file:
                yield from file
    except (OSError, EOFError, UnicodeDecodeError, zlib.error) as error:
        raise ConfigError(f"cannot read the trace {path}: {error}") from error


def _request(where: str, index: int, line: str) -> TraceRequest:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{where}: not JSON: {error}") from error
    if not isinstance(row, dict):
        raise ConfigError(f"{where}: must be a JSON object, got {type(row).__name__}")
    arrival = _field(where, row, "t", (int, float), "seconds >= 0")
    if not 0 <= arrival < float("inf"):
        raise ConfigError(f"{where}: field 't' must be seconds >= 0, got {arrival!r}")
    tokens = {}
    for name in ("in", "out"):
        tokens[name] = _field(where, row, name, (int,), "an integer >= 1")
        if tokens[name] < 1:
            raise ConfigError(f"{where}: field '{name}' must be an integer >= 1, got {tokens[name]}")
    priority = _field(where, row, "prio", (str,), '"high" or "low"')
    if priority not in ("high", "low"):
        raise ConfigError(f'{where}: field \'prio\' must be "high" or "low", got {priority!r}')
    hashes = row.get("hash_ids") or []
    if not isinstance(hashes, list) or any(not isinstance(h, int) or isinstance(h, bool) or h < 0 for h in hashes):
        raise ConfigError(f"{where}: field 'hash_ids' must be a list of integers >= 0")
    return TraceRequest(index, float(arrival), tokens["in"], tokens["out"], priority == "high", tuple(hashes))


def _field(where: str, row: dict[str, Any], name: str, types: tuple[type, ...], wanted: str) -> Any:
    if name not in row:
        raise ConfigError(f"{where}: field '{name}' is missing; it must be {wanted}")
    value = row[name]
    if not isinstance(value, types) or isinstance(value, bool):
        raise ConfigError(f"{where}: field '{name}' must be {wanted}, got {value!r}")
    return value
