"""Imports go down only. Catches a lower layer that reaches up, and engine and plugin growing together.

Reads source with ast and imports nothing, so it runs without the package (or torch) installed.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "tidekv"

# Top to bottom. A module may import from its own row and from rows below.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("cli", "demo", "doctor", "__init__", "__main__"),
    ("replay", "serve"),
    ("engine",),
    ("sglang_plugin",),
    ("allocator",),
    ("attention",),
    ("pressure",),
    ("streaming",),
    ("memory",),
    ("kernels",),
    ("geometry", "config", "errors"),
)
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}
STRANGERS = {("engine", "sglang_plugin"), ("sglang_plugin", "engine")}


def imported_parts(tree: ast.AST, package: tuple[str, ...], known: set[str]) -> Iterator[tuple[int, str]]:
    """(line, first-level part of tidekv) of each import, wherever it stands: also in functions and under TYPE_CHECKING.

    package: the dotted package of the file, e.g. ("tidekv", "memory"). known: first-level parts that exist.
    """
    for node in ast.walk(tree):
        targets: list[tuple[str, ...]] = []
        if isinstance(node, ast.Import):
            targets = [tuple(alias.name.split(".")) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            base += tuple(node.module.split(".")) if node.module else ()
            targets = [(*base, alias.name) for alias in node.names]
        for target in targets:
            if target[0] == "tidekv":
                # `from tidekv import Engine` and `import tidekv` read the package's own __init__.
                part = target[1] if len(target) > 1 and target[1] in known else "__init__"
                yield node.lineno, part


def climbing_imports(source: Path) -> list[str]:
    """One line for each import under `source` that goes up, or between strangers, or touches a part without a rank."""
    known = {p.stem for p in source.glob("*.py")} | {p.name for p in source.iterdir() if p.is_dir()}
    known -= {"__init__", "__pycache__"}
    faults = []
    for path in sorted(source.rglob("*.py")):
        relative = path.relative_to(source)
        part = relative.parts[0].removesuffix(".py")
        if part not in RANK:
            faults.append(f"{relative}: {part} has no place in LAYERS")
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"), filename=str(path))
        for line, target in imported_parts(tree, ("tidekv", *relative.parts[:-1]), known):
            if target not in RANK:
                faults.append(f"{relative}:{line}: {target} has no place in LAYERS")
            elif RANK[target] < RANK[part] or (part, target) in STRANGERS:
                faults.append(f"{relative}:{line}: {part} imports {target}")
    return faults


def test_imports_go_down_only() -> None:
    assert (SOURCE / "errors.py").is_file()
    assert climbing_imports(SOURCE) == []


@pytest.mark.parametrize(
    ("path", "line"),
    [
        ("memory/ledger.py", "from tidekv.allocator import Thing"),
        ("memory/ledger.py", "import tidekv.engine.model as m"),
        ("memory/ledger.py", "from tidekv import allocator"),
        ("memory/ledger.py", "from tidekv import KVGeometry"),
        ("memory/ledger.py", "from ..pressure.plan import Plan"),
        ("memory/ledger.py", "def f():\n    from .. import streaming"),
        ("errors.py", "from .kernels import move"),
        ("allocator.py", "from . import engine"),
        ("engine/engine.py", "from tidekv.sglang_plugin import platform"),
        ("sglang_plugin/platform.py", "from tidekv.engine import model"),
        ("novelty.py", "import ast"),
    ],
)
def test_a_planted_fault_is_caught(tmp_path: Path, path: str, line: str) -> None:
    source = _small_house(tmp_path)
    (source / path).write_text(line + "\n")
    assert len(climbing_imports(source)) == 1


@pytest.mark.parametrize(
    ("path", "line"),
    [
        ("memory/ledger.py", "from tidekv.memory.host_pool import HostKVPool"),
        ("memory/ledger.py", "from . import host_pool\nfrom ..geometry import KVGeometry"),
        ("memory/ledger.py", "import numpy\nfrom tidekvish import x"),
        ("engine/engine.py", "from tidekv import errors\nfrom tidekv.allocator import Thing"),
        ("cli.py", "from tidekv import __version__\nfrom tidekv import doctor"),
    ],
)
def test_a_downward_import_is_not_a_fault(tmp_path: Path, path: str, line: str) -> None:
    source = _small_house(tmp_path)
    (source / path).write_text(line + "\n")
    assert climbing_imports(source) == []


def _small_house(folder: Path) -> Path:
    source = folder / "tidekv"
    for names in LAYERS[1:]:
        for name in names:
            (source / name).mkdir(parents=True)
            (source / name / "__init__.py").touch()
    for name in ("allocator", "geometry", "config", "errors"):  # these are single files
        (source / name / "__init__.py").unlink()
        (source / name).rmdir()
        (source / f"{name}.py").touch()
    for name in ("__init__", "cli", "doctor"):
        (source / f"{name}.py").touch()
    return source
