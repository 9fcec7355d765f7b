"""Platform selection for JAX, shared by the command line and the Python API."""

import glob
import importlib.util
import os


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
