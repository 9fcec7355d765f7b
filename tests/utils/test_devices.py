"""Choice of JAX's platform on machines without TPU."""

import importlib.util

import jax
import pytest

from bertjax.utils.devices import skip_missing_tpu


@pytest.mark.parametrize(
    ("installed", "variables", "is_skipped"),
    [
        ({"libtpu"}, {}, True),
        (set(), {}, False),
        ({"libtpu", "jax_plugins"}, {}, False),
        ({"libtpu"}, {"TPU_WORKER_HOSTNAMES": "localhost"}, False),
        ({"libtpu"}, {"JAX_PLATFORMS": "tpu"}, False),
    ],
)
def test_cpu_is_selected_if_libtpu_is_installed_without_a_tpu(monkeypatch, installed, variables, is_skipped):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name if name in installed else None)
    monkeypatch.setattr("glob.glob", lambda pattern: [])
    for name in ("TPU_WORKER_HOSTNAMES", "JAX_PLATFORMS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    updates = {}
    monkeypatch.setattr(jax.config, "update", updates.__setitem__)
    skip_missing_tpu()
    assert updates == ({"jax_platforms": "cpu"} if is_skipped else {})
