"""Rows of a benchmark: printed and flushed to disk one by one, so that a run that is cut short keeps what it measured.

python -m benchmarks.report DIR      tables (Markdown) from the JSON files in DIR
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import shlex
import sys
import time
import traceback
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch


class Report:
    """One benchmark's result file, `DIR/NAME.json`: {"about": {...}, "ceilings": {...}, "rows": [...], "errors":
    [...]}."""

    def __init__(self, name: str, out_dir: Path, budget_s: float, smoke: bool) -> None:
        self.path = out_dir / f"{name}.json"
        self.budget_s = budget_s
        self.smoke = smoke
        self._start = time.monotonic()
        self._phase = ""
        out_dir.mkdir(parents=True, exist_ok=True)
        self.data: dict[str, Any] = {
            "about": {
                "name": name,
                "date": datetime.now(UTC).isoformat(timespec="seconds"),
                "machine": machine(),
                "command": f"python -m benchmarks.{name} {shlex.join(sys.argv[1:])}".strip(),
                "budget_s": budget_s,
                "smoke": smoke,
            },
            "ceilings": {},
            "rows": [],
            "errors": [],
        }
        print(json.dumps(self.data["about"]), flush=True)
        self.save()

    @property
    def seconds_left(self) -> float:
        return self.budget_s - (time.monotonic() - self._start)

    def phase(self, name: str, body: Callable[..., None], *args: Any, needs_s: float = 0.0) -> bool:
        """Run one part. A failure is recorded and the rest goes on; a part that does not fit the budget is skipped."""
        self._phase = name
        if self.seconds_left < needs_s or self.seconds_left <= 0:
            self._error(name, f"skipped: {self.seconds_left:.0f} s of the budget left, needs {needs_s:.0f}")
            return False
        begin = time.monotonic()
        try:
            body(*args)
            if torch.cuda.is_available():
                torch.cuda.synchronize()  # an asynchronous fault belongs to the part that caused it
        except Exception as error:  # a benchmark must hand back the parts that worked
            self._error(name, f"{type(error).__name__}: {error}", traceback.format_exc(limit=-6))
            return False
        finally:
            self.data["about"]["wall_s"] = round(time.monotonic() - self._start, 1)
            print(json.dumps({"phase": name, "wall_s": round(time.monotonic() - begin, 1)}), flush=True)
            self.save()
            with contextlib.suppress(RuntimeError):  # after a device fault every call raises
                torch.cuda.empty_cache()
        return True

    def row(self, table: str, **values: Any) -> None:
        """One measured row of one table."""
        self.data["rows"].append({"table": table, **values})
        print(json.dumps(self.data["rows"][-1]), flush=True)
        self.save()

    def ceiling(self, name: str, value: float) -> float:
        """What the hardware gives, measured in this run."""
        self.data["ceilings"][name] = round(value, 2)
        print(json.dumps({"ceiling": name, "value": round(value, 2)}), flush=True)
        self.save()
        return value

    def save(self) -> None:
        """Whole or not at all: a reader never sees half a file."""
        part = self.path.with_suffix(".part")
        part.write_text(json.dumps(self.data, indent=1))
        os.replace(part, self.path)

    def finish(self) -> int:
        """Exit status: 1 if nothing at all was measured."""
        self.save()
        errors = len(self.data["errors"])
        print(json.dumps({"done": str(self.path), "rows": len(self.data["rows"]), "errors": errors}), flush=True)
        return 0 if self.data["rows"] else 1

    def _error(self, phase: str, message: str, trace: str = "") -> None:
        self.data["errors"].append({"phase": phase, "error": message, "trace": trace})
        print(json.dumps({"phase": phase, "error": message}), flush=True)
        if trace:
            print(trace, file=sys.stderr, flush=True)


def arguments(name: str, budget_s: float, doc: str | None) -> tuple[argparse.ArgumentParser, Callable[..., Report]]:
    """The options that every benchmark has, and what makes its report from them."""
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks.{name}", description=" ".join((doc or "").split("\n\n")[0].split())
    )
    parser.add_argument("--out", type=Path, default=Path("out/benchmarks"), help="folder for NAME.json")
    parser.add_argument("--budget-s", type=float, default=budget_s, help="parts that do not fit any more are skipped")
    parser.add_argument(
        "--smoke", action="store_true", help="tiny sizes, on the CPU too: tries the code, measures nothing"
    )

    def make(args: argparse.Namespace) -> Report:
        if not args.smoke and not torch.cuda.is_available():
            parser.error("no CUDA device: use --smoke to try the code on the CPU")
        return Report(name, args.out, args.budget_s, args.smoke)

    return parser, make


def machine() -> dict[str, str]:
    """What a figure depends on."""
    facts = {"python": platform.python_version(), "torch": torch.__version__, "cpus": str(os.cpu_count())}
    try:
        import triton

        facts["triton"] = triton.__version__
    except ImportError:
        facts["triton"] = "none"
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        facts["gpu"] = f"{properties.name}, {properties.multi_processor_count} SMs"
        facts["gpu_memory_gib"] = f"{properties.total_memory / 2**30:.1f}"
    else:
        facts["gpu"] = "none"
    return facts


# ---- tables ----------------------------------------------------------------------------------------------------------


def markdown(data: dict[str, Any]) -> str:
    """One result file as Markdown: what, where, by which command, the ceilings, then a table for each kind of row."""
    about = data["about"]
    lines = [f"## {about['name']}", ""]
    lines += [
        f"{about['date']}; {_facts(about['machine'])}.",
        "",
        *(f"    {command}" for command in _list(about["command"])),
        "",
    ]
    if about.get("smoke"):
        lines += ["Smoke run: the figures mean nothing.", ""]
    if data.get("ceilings"):
        lines += [f"Ceilings, same run: {_facts(data['ceilings'])}.", ""]
    tables: dict[str, list[dict[str, Any]]] = {}
    for row in data["rows"]:
        tables.setdefault(row.get("table") or row["phase"], []).append({k: v for k, v in row.items() if k != "table"})
    for name, rows in tables.items():
        columns = list(dict.fromkeys(key for row in rows for key in row))
        lines += [f"### {name}", "", "| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
        lines += ["| " + " | ".join(_cell(row.get(c)) for c in columns) + " |" for row in rows]
        lines.append("")
    for error in data.get("errors", ()):
        lines.append(f"Not measured: {error if isinstance(error, str) else error['phase'] + ': ' + error['error']}")
    return "\n".join(lines).rstrip() + "\n"


def _facts(facts: dict[str, Any] | str) -> str:
    return facts if isinstance(facts, str) else ", ".join(f"{k} {_cell(v)}" for k, v in facts.items())


def _list(value: list[str] | str) -> list[str]:
    return [value] if isinstance(value, str) else value


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:g}" if isinstance(value, float) else str(value).replace("|", "/").replace("\n", " ")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.report", description="tables from JSON result files")
    parser.add_argument("folder", type=Path)
    args = parser.parse_args()
    files = sorted(args.folder.glob("*.json"))
    loaded = [json.loads(path.read_text()) for path in files]
    print("\n".join(markdown(data) for data in loaded if isinstance(data, dict) and "rows" in data))
    return 0


if __name__ == "__main__":
    sys.exit(main())
