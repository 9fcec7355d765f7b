"""`bertjax doctor`: report on the installation and this machine, with advice on problems."""

import argparse
import importlib.metadata
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from bertjax.cli.parser import JSON, command
from bertjax.errors import BertjaxError, UsageError
from bertjax.utils.devices import HUGE_PAGES, has_bfloat16_units
from bertjax.utils.process_pool import available_cores
from bertjax.utils.terminal import show

_PACKAGES = (
    *("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "tensorflow", "tensorflow-cpu", "tokenizers", "numpy"),
)
# Extras of pyproject.toml, each with a package that it installs.
_EXTRAS = {"tpu": "libtpu", "cuda": "jax-cuda13-plugin", "beam": "apache-beam"} | {
    name: name for name in ("datasets", "wandb", "trackio")
}
_MISSING, _INSTALL = "not installed", "pip install -c constraints.txt -e"
_COMPILE_CACHE = "JAX_COMPILATION_CACHE_DIR"
_VARIABLES = (
    *("JAX_PLATFORMS", "XLA_FLAGS", _COMPILE_CACHE, "JAX_COORDINATOR_ADDRESS", "LIBTPU_INIT_ARGS"),
    *("HF_HOME", "HF_ENDPOINT", "HF_HUB_OFFLINE", "BERTJAX_STAGING", "TMPDIR"),
)
# Program that prints the seconds to allocate, write and free 128 MiB four times.
_ALLOCATION = """import ctypes, time
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
start = time.perf_counter()
for _ in range(4):
    block = ctypes.c_void_p(libc.malloc(1 << 27))
    libc.memset(block, 1, 1 << 27)
    libc.free(block)
print(time.perf_counter() - start)
"""
# Minimum free disk space without a warning. A BASE checkpoint with optimizer state takes 1.3 GB; a run keeps several.
_MIN_FREE_BYTES = 10 * 2**30


@command("bertjax doctor", JSON)
def doctor(args: argparse.Namespace) -> None:
    """Prints versions, devices, memory, free disk space and caches, and advice on what is slow or missing."""
    report = examine()
    if args.json:
        print(json.dumps(report, indent=1))
        return
    for section, values in report.items():
        show(section)
        lines = values if isinstance(values, list) else [f"{name:<30}{value}" for name, value in values.items()]
        for line in lines or ["none"]:
            show(f"  {line}")


def examine() -> dict[str, Any]:
    """Returns the report as JSON values, keyed by section."""
    from huggingface_hub.constants import HF_HUB_CACHE

    from bertjax.utils.io import cache_dir, is_remote

    problems = []
    folders = {"current directory": Path(), "Hugging Face Hub": Path(HF_HUB_CACHE)}
    try:
        folders["corpora and features"] = cache_dir()
    except BertjaxError as error:
        problems.append(str(error))
    if (compile_cache := os.environ.get(_COMPILE_CACHE, "")) and not is_remote(compile_cache):
        folders["compiled steps"] = Path(compile_cache)
    free_bytes = {name: _free_bytes(path) for name, path in folders.items()}
    report: dict[str, Any] = {
        "versions": {
            "bertjax": installed_version("bertjax") + _commit(),
            "python": f"{platform.python_version()} on {platform.platform()}",
            **{name: version for name in _PACKAGES if (version := installed_version(name))},
        },
        "extras": {name: installed_version(package) or _MISSING for name, package in _EXTRAS.items()},
        "devices": _devices(),
        "machine": {
            "cpu": f"{available_cores()} cores, {_cpu()}{', bfloat16 units' if has_bfloat16_units() else ''}",
            "memory": _gib(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")),
            "huge pages": _huge_pages(),
        },
        "folders": {name: f"{path} ({_gib(free_bytes[name])} free)" for name, path in folders.items()},
        "environment": {name: os.environ[name] for name in _VARIABLES if name in os.environ},
    }
    return {**report, "advice": [*problems, *_advice(report, min(free_bytes.values()))]}


def installed_version(package: str) -> str:
    """Returns the version of an installed package ("": it is not installed)."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _commit() -> str:
    """Returns ` (commit HASH)` in a Git clone, or "" elsewhere. HASH ends in `-dirty` if tracked files were changed."""
    clone = Path(__file__).parents[2]
    command = ["git", "-C", str(clone), "describe", "--always", "--dirty", "--exclude=*"]
    if not (clone / ".git").exists() or not shutil.which("git"):
        return ""
    commit = subprocess.run(command, capture_output=True, text=True).stdout.strip()
    return f" (commit {commit})" if commit else ""


def _devices() -> dict[str, str]:
    import jax

    from bertjax.model.flops import peak_flops_per_second
    from bertjax.training.sharding import list_devices

    try:
        devices = list_devices()
    except UsageError as error:
        return {"error": str(error)}
    stats = devices[0].memory_stats() or {}
    peak, source = peak_flops_per_second(devices)
    return {
        "platform": jax.default_backend(),
        "devices": f"{len(devices)} x {devices[0].device_kind}",
        "memory per device": _gib(stats["bytes_limit"]) if "bytes_limit" in stats else "host memory",
        "peak": f"{peak / 1e12:.3g} TFLOP/s ({source})" if peak else f"unknown ({source})",
    }


def _cpu() -> str:
    """Returns the name of the processor and its widest vector instructions."""
    file = Path("/proc/cpuinfo")
    if not file.exists():
        return platform.processor() or platform.machine()
    info = file.read_text()
    name = re.search(r"^model name\s*: (.*)$", info, re.MULTILINE)
    widest = next((flag for flag in ("amx_tile", "avx512f", "avx2") if f" {flag} " in info), "no AVX2")
    return f"{name[1] if name else platform.machine()}, {widest}"


def _huge_pages() -> str:
    """Describes whether malloc uses huge pages, and their measured speedup."""
    if sys.platform != "linux":
        return "not supported"
    is_active = HUGE_PAGES in os.environ.get("GLIBC_TUNABLES", "")
    seconds = []
    for tunables in ("", HUGE_PAGES):
        command, environment = [sys.executable, "-c", _ALLOCATION], os.environ | {"GLIBC_TUNABLES": tunables}
        seconds.append(float(subprocess.run(command, env=environment, capture_output=True, text=True).stdout))
    return f"{'active' if is_active else 'off'}; with them, memory is allocated {seconds[0] / seconds[1]:.1f} x as fast"


def _free_bytes(path: Path) -> int:
    """Returns the number of free bytes on the disk that contains a path. The path need not exist."""
    return shutil.disk_usage(next(parent for parent in (path, *path.absolute().parents) if parent.exists())).free


def _gib(number: float) -> str:
    return f"{number / 2**30:,.1f} GiB"


def _advice(report: dict[str, Any], free_bytes: int) -> list[str]:
    """Returns one line of advice for each problem in the report. `free_bytes` is the minimum over all listed disks."""
    devices = report["devices"]
    is_cpu = devices.get("platform") == "cpu"
    possible = "fine-tuning of small models is possible, pre-training of BASE is not"
    little_disk = f"a disk listed above has less than {_gib(_MIN_FREE_BYTES)} free"
    checks = (
        ("error" in devices, devices.get("error")),
        (is_cpu, f"no accelerator: {possible}; for a GPU, run {_INSTALL} '.[cuda]', for a TPU '.[tpu]'"),
        (report["extras"]["tpu"] == _MISSING, f"`bertjax plan` needs the TPU compiler: {_INSTALL} '.[tpu]'"),
        (_COMPILE_CACHE not in os.environ, f"compiled steps are not cached on disk; set {_COMPILE_CACHE} to a folder"),
        (free_bytes < _MIN_FREE_BYTES, f"{little_disk}; checkpoints of BASE take 1.3 GB each"),
    )
    return [advice for applies, advice in checks if applies]
