"""Lets SGLang's wheel run on a machine without a GPU: two files, written into the environment that runs this script.

There is no CPU build of SGLang's kernel package on the registry, and the registry's torchvision is a CUDA build that
registers operators which a CPU torch lacks. The Llama-shaped models of the tests use neither: SGLang takes its native
torch paths, so a module whose attributes refuse to be called is enough, and so is a torchvision without its fake
operators.

    .venv-sglang/bin/python tests/sglang/cpu_shims.py
"""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path

STAND_IN = '''\
"""Stand-in for the kernel package of SGLang on a machine without a GPU: everything imports, nothing runs."""


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)

    def refuse(*args, **kwargs):
        raise NotImplementedError(f"sgl_kernel.{name} has no CPU build here")

    refuse.__name__ = name
    return refuse
'''


def main() -> int:
    """Writes both files; refuses to touch a base interpreter, or an environment that has the real kernels."""
    if sys.prefix == sys.base_prefix:
        print("error: run this with the python of the virtual environment that it shall change", file=sys.stderr)
        return 1
    site = Path(sysconfig.get_paths()["purelib"])
    package = site / "sgl_kernel"
    init = package / "__init__.py"
    if init.is_file() and not init.read_text(encoding="utf-8").startswith('"""Stand-in'):
        print(f"error: {package} is a real kernel package; this script is for machines without a GPU", file=sys.stderr)
        return 1
    package.mkdir(exist_ok=True)
    init.write_text(STAND_IN, encoding="utf-8")
    registrations = site / "torchvision" / "_meta_registrations.py"
    if registrations.is_file():
        registrations.write_text("# emptied: the CPU torch has no operators to register fakes for\n", encoding="utf-8")
    print(f"wrote {init} and emptied {registrations}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
