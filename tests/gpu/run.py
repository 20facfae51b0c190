"""The GPU tests in several processes on one GPU: most of their time is compiling kernels, on one core each.

python -m tests.gpu.run [--workers 6] [more options of pytest]
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
NOTHING_COLLECTED = 5  # pytest's exit status


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.run", description=__doc__)
    parser.add_argument("--workers", type=int, default=6, help="processes; each holds a context of about 0.5 GB")
    args, options = parser.parse_known_args()
    begin = time.monotonic()
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        logs = [Path(folder, f"{i}.log") for i in range(args.workers)]
        running = []
        for i, log in enumerate(logs):
            command = [sys.executable, "-m", "pytest", "-q", "--durations=3", f"--shard={i}/{args.workers}", *options]
            # A cache folder of one's own: they would write one file.
            command += ["-o", f"cache_dir={folder}/cache{i}", str(HERE)]
            with log.open("w") as output:
                running.append(subprocess.Popen(command, cwd=HERE.parents[1], stdout=output, stderr=subprocess.STDOUT))
        try:
            for i, (process, log) in enumerate(zip(running, logs, strict=True)):
                status = process.wait()
                text = log.read_text().splitlines()
                bad = status not in (0, NOTHING_COLLECTED)
                failed += bad
                print(f"---- process {i}: status {status}", *(text if bad else text[-6:]), sep="\n", flush=True)
        finally:
            for process in running:
                process.kill()
    print(f"{args.workers} processes, {time.monotonic() - begin:.0f} s, {failed} of them failed", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
