"""Runs the benchmarks one after another, each in a process of its own, and writes their tables to DIR/tables.md.

python -m benchmarks.run --out DIR            on a machine with a GPU: about 12 minutes at most
python benchmarks/run.py --smoke              tiny sizes, on the CPU too: tries the code, measures nothing
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
if __name__ == "__main__":  # works from a bare checkout, as a script too
    sys.path[:0] = [str(ROOT), str(ROOT / "src")]

import torch  # noqa: E402

from benchmarks.report import markdown  # noqa: E402

NAMES = ("allocator", "repack", "streaming", "attention", "engine", "prompt_steps")


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.run", description=" ".join((__doc__ or "").split("\n\n")[0].split())
    )
    parser.add_argument("--out", type=Path, default=Path("out/benchmarks"), help="folder for the results")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes, on the CPU too")
    parser.add_argument("--only", nargs="+", choices=NAMES, default=list(NAMES), help="default: all of them")
    parser.add_argument("--budget-s", type=float, help="for each of them, in place of its own")
    args = parser.parse_args()
    smoke = args.smoke
    if not smoke and not torch.cuda.is_available():
        print("no CUDA device: a smoke run, whose figures mean nothing", file=sys.stderr, flush=True)
        smoke = True
    out = args.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    paths = [str(ROOT / "src"), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    failed = []
    for name in args.only:
        command = [sys.executable, "-m", f"benchmarks.{name}", "--out", str(out)]
        command += ["--smoke"] if smoke else []
        command += ["--budget-s", str(args.budget_s)] if args.budget_s is not None else []
        begin = time.monotonic()
        status = subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode
        print(
            json.dumps({"benchmark": name, "status": status, "wall_s": round(time.monotonic() - begin, 1)}), flush=True
        )
        if status:
            failed.append(name)
        # After each one, so that a run that is cut short has the tables of what is done.
        results = [out / f"{done}.json" for done in NAMES if (out / f"{done}.json").is_file()]
        (out / "tables.md").write_text("\n".join(markdown(json.loads(path.read_text())) for path in results))
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
