"""The tables of docs/fidelity.md from fidelity.json, with what chance leaves open.

    python -m benchmarks.fidelity_tables FIDELITY.json

Means over documents come with their standard error, documents taken as independent; shares with the 95 % interval of
Wilson (J. Am. Stat. Assoc. 22, 1927).
"""

from __future__ import annotations

import json
import math
import statistics
import sys
from pathlib import Path
from typing import Any


def mean_and_error(values: list[float]) -> tuple[float, float]:
    """(mean, its standard error); the error of a single value is nan."""
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return statistics.fmean(values), error


def wilson(found: int, of: int) -> tuple[float, float]:
    """The 95 % interval of a share. Example: 0 of 10 -> (0, 0.278)."""
    z = 1.96
    share, spread = found / of, z * z / of
    middle, half = share + spread / 2, z * math.sqrt(share * (1 - share) / of + spread / of / 4)
    return max(0.0, (middle - half) / (1 + spread)), min(1.0, (middle + half) / (1 + spread))


def tables(about: dict[str, Any], done: dict[str, dict[str, Any]]) -> str:
    """Markdown: running text and answers; needles. Groups without results are left out."""
    by_kind: dict[str, dict[int, dict[str, Any]]] = {"documents": {}, "answers": {}, "needles": {}}
    for kind, length in sorted((group.split()[0], int(group.split()[1])) for group in done):
        if items := done[f"{kind} {length}"]:
            by_kind[kind][length] = items
    parts = []
    if by_kind["documents"] or by_kind["answers"]:
        parts.append(_text_table(about, by_kind["documents"], by_kind["answers"]))
    if by_kind["needles"]:
        parts.append(_needle_table(about, by_kind["needles"]))
    return "\n".join(parts)


def _rows(about: dict[str, Any], columns: list[tuple[str, list[str]]]) -> str:
    """A table with a row a way. columns: (heading, a cell for each way)."""
    lines = [
        "| width | window | " + " | ".join(heading for heading, _ in columns) + " |",
        "|---|---|" + "---|" * len(columns),
    ]
    layers = about["layers"]
    for i, (width, window) in enumerate(about["ways"]):
        names = {layers: "full", layers // 2: "L/2", layers // 4: "L/4"}
        shown = layers if width is None else width
        reads = "everything" if width is None else "everything, masked" if window is None else f"{window:,}"
        lines.append(f"| {shown} ({names[shown]}) | {reads} | " + " | ".join(cells[i] for _, cells in columns) + " |")
    return "\n".join(lines) + "\n"


def _text_table(about: dict[str, Any], documents: dict[int, dict[str, Any]], answers: dict[int, dict[str, Any]]) -> str:
    ways = range(len(about["ways"]))
    columns = []
    for length, items in documents.items():
        scored = length - 1 - about["scored_from"]
        loss = [[item[i][0] / scored for item in items.values()] for i in ways]
        cells = [f"{math.exp(statistics.fmean(loss[0])):.2f}"]
        for i in ways[1:]:
            more, error = mean_and_error([a - b for a, b in zip(loss[i], loss[0], strict=True)])
            cells.append(f"{100 * math.expm1(more):+.1f} ± {100 * math.exp(more) * error:.1f} %")
        columns.append((f"perplexity, {len(items)} x {length:,} tokens", cells))
        changed = [mean_and_error([item[i][1] / scored for item in items.values()]) for i in ways]
        columns.append(("next token changed", [f"{100 * mean:.1f} ± {100 * error:.1f} %" for mean, error in changed]))
    for items in answers.values():
        firsts = [[item[i] for item in items.values()] for i in ways]
        differ = [sum(first is not None for first in of_way) for of_way in firsts]
        columns.append(
            (f"answers changed, of {about['answer_tokens']} tokens", [f"{n} of {len(items)}" for n in differ])
        )
        # An answer that does not differ counts as the number of its tokens.
        same = [statistics.median(about["answer_tokens"] if f is None else f for f in of_way) for of_way in firsts]
        columns.append(("equal tokens at the start, median", [f"{n:g}" for n in same]))
    return _rows(about, columns)


def _needle_table(about: dict[str, Any], needles: dict[int, dict[str, Any]]) -> str:
    ways = range(len(about["ways"]))
    columns = []
    for length, items in needles.items():
        cells = [f"{sum(item[i] for item in items.values())} of {len(items)}" for i in ways]
        columns.append((f"{length:,} tokens", cells))
    for name, wanted in (("in the window", True), ("older", False)):
        cells = []
        for i, (_, window) in enumerate(about["ways"]):
            if window is None:
                cells.append("")
                continue
            found = [
                item[i]
                for length, items in needles.items()
                for number, item in items.items()
                if (length * (1 - about["depths"][int(number) % len(about["depths"])]) < window) is wanted
            ]
            low, high = wilson(sum(found), len(found)) if found else (0.0, 1.0)
            text = f"{sum(found)} of {len(found)}"
            cells.append(f"{text} ({100 * low:.0f} to {100 * high:.0f} %)" if found else "none asked")
        columns.append((name, cells))
    unstated = [f"{sum(item[-1] for item in items.values())} of {len(items)}" for items in needles.values()]
    last = [f"{about['layers']} (full)", "everything; not stated", *unstated, "", ""]
    return _rows(about, columns) + "| " + " | ".join(last) + " |\n"


if __name__ == "__main__":
    result = json.loads(Path(sys.argv[1]).read_text())
    print(tables(result["about"], result["done"]))
