"""Reading traces. Catches a schema error that passes silently, or one that does not say where it is."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from tidekv.errors import ConfigError
from tidekv.replay.command import parse_capacity
from tidekv.replay.trace import read_trace

GOOD = {"t": 1.5, "in": 600, "out": 7, "prio": "low"}


def write(folder: Path, *rows: dict[str, object]) -> Path:
    path = folder / "trace.jsonl.gz"
    path.write_bytes(gzip.compress("\n".join(json.dumps(row) for row in rows).encode()))
    return path


def test_classes_are_scaled_apart_and_sorted(tmp_path: Path) -> None:
    path = write(tmp_path, {**GOOD, "t": 8.0}, {**GOOD, "t": 6.0, "prio": "high"}, {**GOOD, "t": 50.0})
    requests = read_trace(path, duration_s=10.0, high_rate=1.0, low_rate=4.0)
    assert [(r.arrival_s, r.is_high_priority, r.index) for r in requests] == [(2.0, False, 0), (6.0, True, 1)]


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"t": -1}, "t"),
        ({"t": "soon"}, "t"),
        ({"in": 0}, "in"),
        ({"in": 2.5}, "in"),
        ({"out": True}, "out"),
        ({"prio": "medium"}, "prio"),
        ({"hash_ids": [1, -1]}, "hash_ids"),
    ],
)
def test_an_error_names_line_and_field(tmp_path: Path, change: dict[str, object], field: str) -> None:
    path = write(tmp_path, GOOD, {**GOOD, **change})
    with pytest.raises(ConfigError, match=rf":2: field '{field}'"):
        read_trace(path)


def test_missing_fields_bad_json_and_bad_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r":1: field 'out' is missing"):
        read_trace(write(tmp_path, {k: v for k, v in GOOD.items() if k != "out"}))
    plain = tmp_path / "plain.jsonl"
    plain.write_text(json.dumps(GOOD) + "\n{\n")
    with pytest.raises(ConfigError, match=r":2: not JSON"):
        read_trace(plain)
    cut = tmp_path / "cut.jsonl.gz"
    cut.write_bytes(gzip.compress(json.dumps(GOOD).encode())[:-12])
    with pytest.raises(ConfigError, match="cannot read"):
        read_trace(cut)
    with pytest.raises(ConfigError, match="no requests"):
        read_trace(write(tmp_path, GOOD), duration_s=1.0)


def test_prompts_share_exactly_what_the_hash_ids_say(tmp_path: Path) -> None:
    a, b, c, d = read_trace(
        write(
            tmp_path,
            {**GOOD, "in": 1200, "hash_ids": [7, 8, 9]},
            {**GOOD, "in": 1100, "hash_ids": [7, 8, 4294967447]},
            {**GOOD, "in": 600},
            {**GOOD, "in": 600},
        )
    )
    first, second = a.prompt_ids(2**40), b.prompt_ids(2**40)
    assert first[:1024] == second[:1024]
    assert first[1024] != second[1024]
    assert len(first) == 1200
    assert c.prompt_ids(2**40)[:64] != d.prompt_ids(2**40)[:64]  # without hash ids nothing is shared
    assert max(a.prompt_ids(1000)) < 1000


def test_capacity() -> None:
    assert parse_capacity("0.5") == 0.5
    assert parse_capacity("120000") == 120_000
    for bad in ("0", "-3", "1.5", "half", "nan"):
        with pytest.raises(ConfigError, match="capacity"):
            parse_capacity(bad)
