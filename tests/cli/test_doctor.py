"""`bertjax doctor`: the report of the machine, and its advice."""

import json
import shutil
from types import SimpleNamespace

import pytest
from commanding import printed

from bertjax.cli import doctor


def report_of(capsys) -> dict:
    return json.loads(printed(capsys, "doctor", "--json"))


def test_report_contains_versions_devices_and_free_disk_space(capsys):
    report = report_of(capsys)
    assert {"bertjax", "jax", "flax"} <= {*report["versions"]}
    assert report["devices"]["platform"] == "cpu" and "GiB" in report["machine"]["free disk, current directory"]
    assert any(line.startswith("no accelerator") for line in report["advice"])


def test_text_report_has_the_sections_of_the_json_report(capsys):
    report, lines = report_of(capsys), printed(capsys, "doctor").splitlines()
    assert all(section in lines for section in report)
    assert f"  {'jax':<30}{report['versions']['jax']}" in lines
    assert len(lines) <= 50


def test_missing_devices_are_reported(capsys, monkeypatch):
    def no_devices():
        raise RuntimeError("Unable to initialize backend 'cuda'")

    monkeypatch.setattr("jax.devices", no_devices)
    report = report_of(capsys)
    assert "Unable to initialize backend" in report["devices"]["error"] == report["advice"][0]


@pytest.mark.parametrize(("free", "is_warned"), [(2**30, True), (100 * 2**30, False)])
def test_low_disk_space_is_reported(capsys, monkeypatch, free, is_warned):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=free))
    assert any("less than" in line for line in report_of(capsys)["advice"]) == is_warned


def test_missing_extra_and_unset_compilation_cache_are_reported(capsys, monkeypatch):
    monkeypatch.setattr(doctor, "_EXTRAS", {"tpu": "no-such-package"})
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    report = report_of(capsys)
    assert report["extras"] == {"tpu": "not installed"}
    assert any("plan" in line for line in report["advice"]) and any("COMPILATION" in line for line in report["advice"])
