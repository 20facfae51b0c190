"""What this machine offers tidekv, measured where a number matters. Changes nothing but a few buffers that it frees."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import platform
from collections.abc import Callable
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from tidekv.attention.backend import choose
from tidekv.config import omp_wait_policy
from tidekv.engine.model import SMOLLM2_PIP, find_smollm2_gguf, smollm2_dir
from tidekv.geometry import KVGeometry

COPY_BYTES = 1 << 30  # 1 GiB: far above any L2 (50 MB on H200), still 0.5 ms a copy there
H2D_BYTES = 256 << 20
REPEATS = 5


def collect() -> dict[str, Any]:
    """Everything that the report shows, as JSON-ready values. Sizes in bytes, speeds in GB/s (1e9), None where absent.

    Keys: python, platform, cores, ram_bytes, omp_wait_policy, packages, cuda, attention, model, verdicts.
    """
    report: dict[str, Any] = {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "ram_bytes": _ram_bytes(),
        "omp_wait_policy": omp_wait_policy(),
        "packages": {
            name: _version(name) for name in ("torch", "triton", "flashinfer-python", "transformers", "numpy")
        },
        "cuda": _cuda(),
        "attention": _attention(),
        "model": _model(),
    }
    report["verdicts"] = verdicts(report)
    return report


def verdicts(report: dict[str, Any]) -> list[dict[str, Any]]:
    """One line for each feature, from the readings alone: {"feature", "ok", "note"}."""
    cuda, packages, model = report["cuda"], report["packages"], report["model"]
    has_gpu = bool(cuda["devices"])
    lines: list[tuple[str, bool, str]] = []
    if has_gpu:
        first = cuda["devices"][0]
        lines.append(("GPU", True, f"{first['name']}, {first['memory_bytes'] / 1e9:.0f} GB"))
    else:
        built = f"torch is built for CUDA {cuda['build']}" if cuda["build"] else "torch is a CPU build"
        lines.append(("GPU", False, f"no CUDA device ({built}): everything runs on the CPU"))
    if packages["triton"] is None:
        lines.append(("Triton kernels", False, "triton is missing, plain torch is used: pip install triton"))
    else:
        lines.append(("Triton kernels", has_gpu, "compiled" if has_gpu else "no GPU: plain torch is used"))
    attention = report["attention"]
    used = attention["name"] == "flashinfer"
    lines.append(("FlashInfer attention", used, f"attention is {attention['name']}: {attention['why']}"))
    if not has_gpu:
        lines.append(("pinned host pool", False, "no GPU: the host pool is ordinary memory"))
    elif cuda["pinned_ok"]:
        speed = f"{cuda['h2d_pinned_gb_s']:.0f} GB/s to the device" if cuda["h2d_pinned_gb_s"] else "speed not measured"
        lines.append(("pinned host pool", True, speed))
    else:
        lines.append(
            ("pinned host pool", False, f"pinning failed ({cuda['error']}): raise `ulimit -l`, or free host memory")
        )
    if model["converted"]:
        lines.append(("model smollm2", True, f"ready in {model['path']}"))
    elif model["package_found"] and not model["missing"]:
        lines.append(("model smollm2", True, "will be converted at first use (once, about 40 s)"))
    elif model["package_found"]:
        lines.append(("model smollm2", False, f"cannot be converted: pip install {' '.join(model['missing'])}"))
    else:
        lines.append(("model smollm2", False, SMOLLM2_PIP))
    passive = (report["omp_wait_policy"] or "").lower() == "passive"
    lines.append(("CPU threads", passive, "OMP_WAIT_POLICY=passive" if passive else "set OMP_WAIT_POLICY=passive"))
    return [{"feature": feature, "ok": ok, "note": note} for feature, ok, note in lines]


def print_report(console: Console, as_json: bool) -> None:
    """Prints `collect()`: one JSON object, or two tables (readings, verdicts)."""
    report = collect()
    if as_json:
        # Not console.print: it would wrap long lines and colour the text.
        console.file.write(json.dumps(report, indent=2) + "\n")
        return
    readings = Table(title="tidekv doctor", show_header=False)
    for key, value in _readings(report):
        readings.add_row(key, value)
    console.print(readings)
    table = Table(show_header=False)
    for line in report["verdicts"]:
        table.add_row("[green]yes[/]" if line["ok"] else "[yellow]no[/]", line["feature"], line["note"])
    console.print(table)


def _readings(report: dict[str, Any]) -> list[tuple[str, str]]:
    cuda = report["cuda"]
    ram = report["ram_bytes"]
    rows = [
        ("python", f"{report['python']} on {report['platform']}"),
        ("cores", str(report["cores"])),
        ("RAM", f"{ram / 1e9:.1f} GB" if ram else "unknown"),
        ("OMP_WAIT_POLICY", report["omp_wait_policy"] or "not set"),
        *((name, version or "not installed") for name, version in report["packages"].items()),
    ]
    for i, device in enumerate(cuda["devices"]):
        memory = f"{device['free_bytes'] / 1e9:.1f} of {device['memory_bytes'] / 1e9:.1f} GB free"
        rows.append((f"cuda:{i}", f"{device['name']}, {memory}, capability {device['capability']}"))
    if cuda["devices"]:
        for label, key in (("device copy, read + write", "device_copy_gb_s"), ("H2D, pinned", "h2d_pinned_gb_s")):
            rows.append((label, f"{cuda[key]:.0f} GB/s" if cuda[key] else f"not measured ({cuda['error']})"))
    return rows


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _ram_bytes() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):  # a name that this system does not know
        return None


def _model() -> dict[str, Any]:
    return {
        "name": "smollm2",
        "package_found": find_smollm2_gguf() is not None,
        "missing": [name for name in ("gguf", "accelerate") if importlib.util.find_spec(name) is None],
        "converted": smollm2_dir().is_dir(),
        "path": str(smollm2_dir()),
    }


def _attention() -> dict[str, str]:
    """Which kernels an engine would read the cache with, for the common model: bfloat16, head_dim 128."""
    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    name, why = choose("auto", KVGeometry(2, 1, 16, 8, 128, torch.bfloat16), device)
    return {"name": name, "why": why}


def _cuda() -> dict[str, Any]:
    """Devices, and the two speeds of device 0. A measurement that fails leaves None and says why in `error`."""
    found: dict[str, Any] = {
        "build": torch.version.cuda,
        "devices": [],
        "pinned_ok": None,
        "device_copy_gb_s": None,
        "h2d_pinned_gb_s": None,
        "error": None,
    }
    if not torch.cuda.is_available():
        return found
    for i in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(i)
        found["devices"].append(
            {
                "name": properties.name,
                "memory_bytes": properties.total_memory,
                "free_bytes": torch.cuda.mem_get_info(i)[0],
                "capability": f"{properties.major}.{properties.minor}",
            }
        )
    for key, measure in (("device_copy_gb_s", _device_copy_gb_s), ("h2d_pinned_gb_s", _h2d_pinned_gb_s)):
        try:
            found[key] = measure()
        except RuntimeError as e:  # out of device memory, or of memory that may be pinned
            found["error"] = str(e).splitlines()[0]
    found["pinned_ok"] = found["h2d_pinned_gb_s"] is not None
    torch.cuda.empty_cache()
    return found


def _device_copy_gb_s() -> float:
    num_bytes = min(COPY_BYTES, torch.cuda.mem_get_info(0)[0] // 4)
    source = torch.empty(num_bytes, dtype=torch.uint8, device="cuda:0")
    target = torch.empty_like(source)
    return 2 * num_bytes / _best_time_s(lambda: target.copy_(source)) / 1e9  # 2: read and written


def _h2d_pinned_gb_s() -> float:
    source = torch.empty(H2D_BYTES, dtype=torch.uint8, pin_memory=True)
    target = torch.empty(H2D_BYTES, dtype=torch.uint8, device="cuda:0")
    return H2D_BYTES / _best_time_s(lambda: target.copy_(source, non_blocking=True)) / 1e9


def _best_time_s(step: Callable[[], object]) -> float:
    """Seconds of the fastest of REPEATS runs on cuda:0's current stream, after one warm-up."""
    new_event: Callable[..., Any] = torch.cuda.Event  # torch leaves it untyped
    with torch.cuda.device(0):
        step()
        times_ms: list[float] = []
        for _ in range(REPEATS):
            start, end = new_event(enable_timing=True), new_event(enable_timing=True)
            start.record()
            step()
            end.record()
            end.synchronize()
            times_ms.append(start.elapsed_time(end))
    return min(times_ms) / 1e3
