"""Choice of JAX's platform on machines without TPU."""

import glob
import importlib.util

import jax
import pytest

from bertjax.utils.devices import skip_missing_tpu


@pytest.mark.parametrize(
    ("installed", "files", "hostnames", "platforms", "is_skipped"),
    [
        ({"libtpu"}, [], None, None, True),
        (set(), [], None, None, False),
        ({"libtpu", "jax_plugins"}, [], None, None, False),
        ({"libtpu"}, ["/dev/accel0"], None, None, False),
        ({"libtpu"}, ["/dev/vfio/0"], None, None, False),
        ({"libtpu"}, [], "localhost", None, False),
        ({"libtpu"}, [], None, "tpu", False),
    ],
)
def test_cpu_is_selected_if_libtpu_is_installed_without_a_tpu(
    monkeypatch, installed, files, hostnames, platforms, is_skipped
):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name if name in installed else None)
    monkeypatch.setattr(glob, "glob", lambda pattern: [file for file in files if file.startswith(pattern[:-1])])
    monkeypatch.delenv("TPU_WORKER_HOSTNAMES", raising=False)
    if hostnames:
        monkeypatch.setenv("TPU_WORKER_HOSTNAMES", hostnames)
    selected = jax.config.jax_platforms
    jax.config.update("jax_platforms", platforms)
    try:
        skip_missing_tpu()
        assert jax.config.jax_platforms == ("cpu" if is_skipped else platforms)
    finally:
        jax.config.update("jax_platforms", selected)
