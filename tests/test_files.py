"""Files written whole and without following links, and read only where they have an end."""

import errno
import json
import lzma
import os
import socket

import numpy as np
import pytest
from etils import epath

from bertjax.data.corpus.tokenizer import load_vocabulary
from bertjax.data.corpus.vocabulary_files import open_vocabulary
from bertjax.data.finetuning.questions import read_questions
from bertjax.data.finetuning.tables import ReadStats
from bertjax.errors import BertjaxError, UsageError
from bertjax.utils import io as files


@pytest.mark.parametrize("kind", [lambda path: path, epath.Path])
def test_a_file_is_whole_or_not_there(tmp_path, kind):
    path = kind(tmp_path / "notes.txt")
    assert files.write_atomic(path, "früher") == path
    with pytest.raises(KeyboardInterrupt), files.replacing(path) as unfinished:
        unfinished.write_text("half")
        assert path.read_text() == "früher"
        raise KeyboardInterrupt
    files.write_atomic(path, b"later")
    assert [child.name for child in tmp_path.iterdir()] == ["notes.txt"] and path.read_text() == "later"
    umask = os.umask(0o027)
    files.write_atomic(path, b"")
    os.umask(umask)
    assert os.stat(path).st_mode & 0o777 == 0o640


def test_what_is_unfinished_cannot_be_guessed_and_is_not_written_through_a_link(tmp_path, monkeypatch):
    names = {files.unfinished_name("a.json") for _ in range(100)}
    assert len(names) == 100 and all(files.is_unfinished(name, "a.json") for name in names)
    assert not any(files.is_unfinished(name, "b.json") for name in names)
    # Even to one who guesses.
    (tmp_path / "victim").write_text("precious")
    (tmp_path / "guessed").symlink_to(tmp_path / "victim")
    monkeypatch.setattr(files, "unfinished_name", lambda name: "guessed")
    with pytest.raises(BertjaxError, match="cannot write .*File exists"):
        files.write_atomic(tmp_path / "a.json", "mine")
    with pytest.raises(OSError, match="File exists"):
        files.check_writable(tmp_path)
    assert (tmp_path / "victim").read_text() == "precious"


def test_a_full_disk_is_one_error_and_leaves_the_old_file(tmp_path, monkeypatch):
    path = files.write_atomic(tmp_path / "a.json", "old")

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(type(path), "write_bytes", full)
    with pytest.raises(BertjaxError, match=r"cannot write .*a\.json: No space left on device$"):
        files.write_atomic(path, "new")
    assert path.read_text() == "old" and len(list(tmp_path.iterdir())) == 1


def test_unfinished_files_are_regular_ones_of_the_pattern(tmp_path):
    mine = tmp_path / files.unfinished_name("a.json")
    mine.write_text("")
    (tmp_path / files.unfinished_name("b.json")).symlink_to(mine)
    (tmp_path / files.unfinished_name("c.json")).mkdir()
    (tmp_path / ".notes.unfinished").write_text("")
    assert files.unfinished_files(tmp_path) == [mine]


@pytest.fixture(params=["pipe", "device", "socket", "folder"])
def endless(request, tmp_path):
    path = tmp_path / "vocab.txt"
    if request.param == "pipe":
        os.mkfifo(path)
        yield path
    elif request.param == "device":
        path.symlink_to("/dev/zero")
        yield path
    elif request.param == "socket":
        with socket.socket(socket.AF_UNIX) as opened:
            opened.bind(os.path.relpath(path))
            yield path
    else:
        path.mkdir()
        yield path


def test_what_has_no_end_is_refused_by_every_reader(endless, tmp_path):
    readers = [
        lambda: load_vocabulary(endless),
        lambda: open_vocabulary(_entry(tmp_path, endless)),
        lambda: read_questions(endless, ReadStats("a"), training=True),
    ]
    for read in readers:
        with pytest.raises(UsageError, match=r"vocab\.txt"):
            read()
    with pytest.raises((UsageError, OSError)):
        files.read_json(endless)


def _entry(folder, vocabulary):
    path = folder / "vocabulary.json"
    path.write_text(json.dumps({"file": str(vocabulary), "lower_case": True, "sha256": ""}))
    return path


def test_files_that_are_too_large_for_their_kind_are_refused(tmp_path, monkeypatch):
    (tmp_path / "a.bin").write_bytes(bytes(1001))
    assert len(files.read_whole(tmp_path / "a.bin", 1001)) == 1001
    assert len(files.read_whole(epath.Path(tmp_path / "a.bin"), 1001)) == 1001
    with pytest.raises(UsageError, match=r"a\.bin has more than 0 MB"):
        files.read_whole(tmp_path / "a.bin", 1000)
    # Small on the disk, large when unpacked.
    (tmp_path / "train.json.xz").write_bytes(lzma.compress(bytes(1 << 22)))
    monkeypatch.setattr("bertjax.data.finetuning.questions.TABLE_BYTES", 1 << 20)
    with pytest.raises(UsageError, match=r"train\.json\.xz has more than 1 MB"):
        read_questions(tmp_path / "train.json.xz", ReadStats("a"), training=True)


def test_deeply_nested_json_is_no_json(tmp_path):
    (tmp_path / "a.json").write_text("[" * 100_000)
    with pytest.raises(ValueError, match="nested too deeply"):
        files.read_json(tmp_path / "a.json")


def test_space_is_weighed_before_anything_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr(files.shutil, "disk_usage", lambda place: (200_000_000, 0, 100_000_000))
    files.check_space(tmp_path / "not" / "there", 50e6, "the corpus")
    with pytest.raises(
        BertjaxError, match=r"^no room for the corpus: about 95 MB, the disk of .* has 100 MB free; free some"
    ):
        files.check_space(tmp_path / "not" / "there", 95e6, "the corpus")
    with pytest.raises(BertjaxError, match=r"no room for .*out\.npz: about 134 MB"):
        files.write_arrays(tmp_path / "out.npz", {"x": np.zeros(1 << 24, np.float64)})
    assert not list(tmp_path.iterdir())
