"""Reads the signatures of the plugin's seams from SGLang's source, without importing it.

python tests/sglang/signatures.py VERSION=FOLDER ...     (FOLDER holds sglang/) rewrites seam_signatures.json
"""

from __future__ import annotations

import ast
import json
import sys
from pathlib import Path

from tidekv.sglang_plugin.seams import SEAMS

STORED = Path(__file__).with_name("seam_signatures.json")


def read_signatures(folder: Path) -> dict[str, tuple[str, ...] | None]:
    """{dotted path: parameter names, `*` before keyword-only ones}; None for what is not there.

    folder: the one that holds sglang/. A class stands for its fields.
    """
    return {seam.path: _signature(folder / "sglang" / "srt", seam.module, seam.name) for seam in SEAMS}


def _signature(root: Path, module: str, name: str) -> tuple[str, ...] | None:
    base = root.joinpath(*module.split("."))
    file = base.with_suffix(".py") if base.with_suffix(".py").is_file() else base / "__init__.py"
    if not file.is_file():
        return None
    node: ast.AST = ast.parse(file.read_text(encoding="utf-8"))
    for part in name.split("."):
        found = [
            child
            for child in getattr(node, "body", [])
            if isinstance(child, ast.ClassDef | ast.FunctionDef) and child.name == part
        ]
        if not found:
            return None
        node = found[-1]
    if isinstance(node, ast.ClassDef):
        return tuple(n.target.id for n in node.body if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name))
    assert isinstance(node, ast.FunctionDef)
    arguments = node.args
    names = [a.arg for a in (*arguments.posonlyargs, *arguments.args)]
    if arguments.vararg or arguments.kwonlyargs:
        names.append(f"*{arguments.vararg.arg}" if arguments.vararg else "*")
    names += [a.arg for a in arguments.kwonlyargs]
    return tuple(names)


def stored() -> dict[str, dict[str, tuple[str, ...] | None]]:
    """{version: signatures}, as they were read from the wheels."""
    text = json.loads(STORED.read_text(encoding="utf-8"))
    return {v: {path: None if s is None else tuple(s) for path, s in found.items()} for v, found in text.items()}


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    pairs = [argument.split("=", 1) for argument in sys.argv[1:]]
    STORED.write_text(json.dumps({v: read_signatures(Path(f)) for v, f in pairs}, indent=1) + "\n", encoding="utf-8")
