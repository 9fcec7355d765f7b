"""`bertjax doctor`: the report of the machine, and its advice."""

import json
import shutil
import subprocess
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from helpers.commanding import printed

from bertjax.cli import doctor
from bertjax.utils.devices import HUGE_PAGES


def report_of(capsys) -> dict:
    return json.loads(printed(capsys, "doctor", "--json"))


@pytest.mark.ci
@pytest.mark.parametrize("pages", ["active", "off"])
def test_report_contains_versions_devices_and_free_disk_space(capsys, monkeypatch, pages):
    monkeypatch.setenv("GLIBC_TUNABLES", HUGE_PAGES if pages == "active" else "")
    report, lines = report_of(capsys), printed(capsys, "doctor").splitlines()
    assert {"bertjax", "jax", "flax"} <= {*report["versions"]}
    assert report["devices"]["platform"] == "cpu" and "GiB free" in report["folders"]["current directory"]
    assert report["machine"]["huge pages"].startswith(f"{pages}; with them, memory is allocated")
    assert any(line.startswith("no accelerator") for line in report["advice"])
    assert all(section in lines for section in report) and len(lines) <= 50
    assert f"  {'jax':<30}{report['versions']['jax']}" in lines


def test_missing_devices_are_reported(capsys, monkeypatch):
    monkeypatch.setattr("jax.devices", Mock(side_effect=RuntimeError("Unable to initialize backend 'cuda'")))
    report = report_of(capsys)
    assert "Unable to initialize backend" in report["devices"]["error"] == report["advice"][0]


def test_unusable_cache_folder_and_compilation_cache_in_a_bucket_are_reported(capsys, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("BERTJAX_STAGING", str(tmp_path / "file" / "folder"))
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "gs://bucket/compiled")
    report = report_of(capsys)
    assert "cannot create" in report["advice"][0]
    # The free space of a bucket is unknown.
    assert not {"compiled steps", "corpora and features"} & report["folders"].keys()
    assert report["environment"]["JAX_COMPILATION_CACHE_DIR"] == "gs://bucket/compiled"


def test_version_of_a_clone_contains_its_commit(capsys, monkeypatch, tmp_path):
    command = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-C", str(tmp_path)]
    subprocess.run([*command, "init", "-q"], check=True)
    subprocess.run([*command, "commit", "-q", "--allow-empty", "-m", "a"], check=True)
    commit = subprocess.run([*command, "rev-parse", "--short", "HEAD"], check=True, capture_output=True, text=True)
    monkeypatch.setattr(doctor, "__file__", str(tmp_path / "bertjax" / "cli" / "doctor.py"))
    assert report_of(capsys)["versions"]["bertjax"].endswith(f" (commit {commit.stdout.strip()})")


@pytest.mark.parametrize(("free", "is_warned"), [(2**30, True), (100 * 2**30, False)])
def test_low_disk_space_missing_extras_and_an_unset_cache_are_reported(capsys, monkeypatch, free, is_warned):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=free))
    monkeypatch.setattr(doctor, "_EXTRAS", {"tpu": "no-such-package" if is_warned else "jax"})
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "/compiled")
    if is_warned:
        monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR")
    report = report_of(capsys)
    for words in ("less than", "plan", "COMPILATION"):
        assert any(words in line for line in report["advice"]) == is_warned
