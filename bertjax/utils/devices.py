"""Platform selection for JAX, shared by the command line and the Python API, and features of the processor."""

import functools
import glob
import importlib.util
import os
from pathlib import Path


def skip_missing_tpu() -> None:
    """Selects JAX's CPU platform if libtpu is installed, but the machine has no TPU and JAX has no GPU backend.

    Without this setting, JAX would load libtpu, which prints errors about the missing TPU. libtpu may be installed for
    `bertjax plan`. Does nothing if a platform is already selected, for example by the environment variable
    `JAX_PLATFORMS`. Call it before JAX initializes its devices.
    """
    import jax

    is_selected = jax.config.jax_platforms is not None  # pyrefly: ignore[missing-attribute]  # Defined at run time.
    has_tpu = "TPU_WORKER_HOSTNAMES" in os.environ or glob.glob("/dev/accel*") or glob.glob("/dev/vfio/*")
    # `jax_plugins` contains JAX's GPU backends.
    installed = {name: importlib.util.find_spec(name) is not None for name in ("libtpu", "jax_plugins")}
    if installed["libtpu"] and not (installed["jax_plugins"] or has_tpu or is_selected):
        jax.config.update("jax_platforms", "cpu")


@functools.cache
def has_bfloat16_units(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Returns whether this machine's processor multiplies bfloat16 matrices faster than float32 matrices.

    These are processors with AMX (Intel, from Sapphire Rapids) or AVX-512 BF16 (AMD, from Zen 4).
    """
    try:
        processor = cpuinfo.read_text()
    except OSError:
        return False
    return not {"amx_bf16", "avx512_bf16"}.isdisjoint(processor.split())
