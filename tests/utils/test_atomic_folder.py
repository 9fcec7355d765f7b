"""Atomic folders: creation, replacement, kills and concurrent writers."""

import contextlib
import subprocess
import sys

import pytest

from bertjax.errors import BertjaxError, UsageError
from bertjax.utils.io import atomic_folder, recover_folder

# The process exits while it writes, or after the first of two renames.
KILLED_WRITER = """
import os, sys
from pathlib import Path
from bertjax.utils.io import atomic_folder
rename = Path.rename
Path.rename = lambda self, target: (rename(self, target), os._exit(9))
with atomic_folder(Path(sys.argv[1]), True, "corpus", {"file": ("*",)}) as folder:
    (folder / "half").write_text("done")
    if sys.argv[2:]:
        os._exit(9)
"""


def make(output, overwrite=False, content="new"):
    with atomic_folder(output, overwrite, "corpus", {"file": ("*",)}) as folder:
        (folder / "file").write_text(content)


def names(folder):
    return sorted(child.name for child in folder.iterdir())


def test_folder_appears_complete_and_replaces_the_old_one(tmp_path):
    output = tmp_path / "deep" / "corpus"
    make(output)
    with pytest.raises(UsageError, match="--overwrite"):
        make(output)
    with contextlib.suppress(KeyboardInterrupt), atomic_folder(output, True, "corpus", {"file": ("*",)}):
        raise KeyboardInterrupt
    assert (output / "file").read_text() == "new" and names(output.parent) == ["corpus"]
    make(output, overwrite=True, content="newer")
    assert (output / "file").read_text() == "newer" and names(output.parent) == ["corpus"]
    (tmp_path / "plain").mkdir()
    assert output.stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_another_kind_of_directory_is_not_replaced(tmp_path):
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus" / "letter").write_text("dear")
    with pytest.raises(UsageError, match="exists and is not a corpus"):
        make(tmp_path / "corpus", overwrite=True)
    with pytest.raises(BertjaxError, match="cannot write the corpus"):
        make(tmp_path / "corpus" / "letter" / "corpus")


def test_second_writer_is_rejected(tmp_path):
    with (
        atomic_folder(tmp_path / "corpus", False, "corpus", {}),
        pytest.raises(UsageError, match="another process is writing"),
    ):
        make(tmp_path / "corpus")
    assert names(tmp_path) == ["corpus"]


def kill_writer(output, *options):
    assert subprocess.run([sys.executable, "-c", KILLED_WRITER, output, *options]).returncode == 9


def test_temporary_directories_of_a_killed_writer_are_removed(tmp_path):
    make(tmp_path / "corpus")
    kill_writer(tmp_path / "corpus", "early")
    (temporary,) = tmp_path.glob(".corpus-*")
    assert (temporary / "new" / "half").exists() and (tmp_path / "corpus" / "file").exists()
    make(tmp_path / "corpus", overwrite=True)
    assert names(tmp_path) == ["corpus"]


@pytest.mark.parametrize("recover", [recover_folder, make])
def test_old_directory_is_restored_after_kill_between_renames(tmp_path, recover):
    make(tmp_path / "corpus", content="old")
    kill_writer(tmp_path / "corpus")
    assert not (tmp_path / "corpus").exists()
    with pytest.raises(UsageError, match="--overwrite") if recover is make else contextlib.nullcontext():
        recover(tmp_path / "corpus")
    assert (tmp_path / "corpus" / "file").read_text() == "old" and names(tmp_path) == ["corpus"]


def test_failed_rename_restores_old_directory(tmp_path, monkeypatch):
    make(tmp_path / "corpus", content="old")
    rename = type(tmp_path).rename

    def fail_second(self, target):
        if target == tmp_path / "corpus" and self.name == "new":
            raise OSError(5, "Input/output error")
        return rename(self, target)

    monkeypatch.setattr(type(tmp_path), "rename", fail_second)
    with pytest.raises(BertjaxError, match="cannot write the corpus .*Input/output error"):
        make(tmp_path / "corpus", overwrite=True)
    assert (tmp_path / "corpus" / "file").read_text() == "old" and names(tmp_path) == ["corpus"]
