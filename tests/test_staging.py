"""Directories that appear whole: what is planted beside them, and what a killed run leaves."""

import contextlib
import os
import subprocess
import sys

import pytest

from bertjax.errors import BertjaxError, UsageError
from bertjax.utils import atomic_dir as staging
from bertjax.utils import io as files
from bertjax.utils.atomic_dir import staged

# A run that is killed while it writes.
KILLED = """
import os, sys
from pathlib import Path
from bertjax.utils.atomic_dir import staged
with staged(Path(sys.argv[1]), True, "corpus", lambda path: True) as folder:
    (folder / "half").write_text("done")
    os._exit(9)
"""


def make(output, overwrite=False, content="new"):
    with staged(output, overwrite, "corpus", lambda path: (path / "file").exists()) as folder:
        (folder / "file").write_text(content)


def names(folder):
    return sorted(child.name for child in folder.iterdir())


def test_a_directory_appears_whole(tmp_path):
    output = tmp_path / "deep" / "corpus"
    make(output)
    with pytest.raises(UsageError, match="--overwrite"):
        make(output)
    with contextlib.suppress(KeyboardInterrupt), staged(output, True, "corpus", lambda path: True):
        raise KeyboardInterrupt
    assert (output / "file").read_text() == "new" and names(output.parent) == ["corpus"]
    make(output, overwrite=True, content="newer")
    assert (output / "file").read_text() == "newer" and names(output.parent) == ["corpus"]
    assert output.stat().st_mode & 0o777 == 0o777 & ~_umask()


def _umask():
    umask = os.umask(0)
    os.umask(umask)
    return umask


def test_of_two_runs_that_begin_at_once_one_gives_way(tmp_path, monkeypatch):
    with contextlib.ExitStack() as other:
        check_free = staging._check_free

        def begin_another(output, *arguments):
            # After ours has looked for others, and before it can be seen by them.
            monkeypatch.setattr(staging, "_check_free", check_free)
            other.enter_context(staged(output, *arguments))
            check_free(output, *arguments)

        monkeypatch.setattr(staging, "_check_free", begin_another)
        with pytest.raises(UsageError, match="another process is writing"):
            make(tmp_path / "corpus")
    assert names(tmp_path) == ["corpus"]


def test_a_killed_run_is_cleared_away_by_the_next(tmp_path):
    make(tmp_path / "corpus")
    command = [sys.executable, "-c", KILLED, tmp_path / "corpus"]
    assert subprocess.run(command).returncode == 9
    (left,) = tmp_path.glob(".corpus-*")
    assert (left / "new" / "half").exists() and (tmp_path / "corpus" / "file").exists()
    # And one that was killed before it wrote anything.
    (tmp_path / files.unfinished_name("corpus")).mkdir()
    make(tmp_path / "corpus", overwrite=True)
    assert names(tmp_path) == ["corpus"]


@pytest.mark.parametrize("interrupted", ["mkdir", "touch"])
def test_an_interruption_at_the_first_moment_leaves_nothing(tmp_path, monkeypatch, interrupted):
    method = getattr(type(tmp_path), interrupted)

    def then_interrupt(path, *args, **kwargs):
        method(path, *args, **kwargs)
        if path.name.startswith((".corpus-", "bertjax-unfinished")):
            raise KeyboardInterrupt

    monkeypatch.setattr(type(tmp_path), interrupted, then_interrupt)
    with pytest.raises(KeyboardInterrupt):
        make(tmp_path / "corpus")
    assert names(tmp_path) == []


@pytest.mark.parametrize(
    "name", [".corpus.partial", ".corpus.old", files.unfinished_name("corpus")], ids=["partial", "old", "unfinished"]
)
@pytest.mark.parametrize("link", [True, False])
def test_nothing_that_others_put_there_is_touched(tmp_path, name, link):
    precious = tmp_path / "home"
    precious.mkdir()
    for folder in ("", "new", "old"):
        (precious / folder).mkdir(exist_ok=True)
        (precious / folder / "letter").write_text("dear")
    if link:
        (tmp_path / name).symlink_to(precious)
    else:
        precious.rename(tmp_path / name)
    make(tmp_path / "corpus")
    make(tmp_path / "corpus", overwrite=True)
    assert len(list((tmp_path / name).glob("**/letter"))) == 3
    assert (tmp_path / name).is_symlink() == link


def test_links_in_what_a_killed_run_left_are_not_followed(tmp_path):
    precious = tmp_path / "home"
    precious.mkdir()
    (precious / "letter").write_text("dear")
    subprocess.run([sys.executable, "-c", KILLED, tmp_path / "corpus"])
    (left,) = tmp_path.glob(".corpus-*")
    (left / "new" / "link").symlink_to(precious)
    (left / "old").symlink_to(precious)
    make(tmp_path / "corpus", overwrite=True)
    assert (precious / "letter").read_text() == "dear"


def test_what_cannot_be_moved_into_place_is_put_back(tmp_path, monkeypatch):
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
