"""Atomic files, JSON, text encodings, free space and the cache folder."""

import errno
import gzip
import os
import time
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
from etils import epath

from bertjax.data.corpus.prepare import prepare
from bertjax.data.corpus.vocabulary import load_vocabulary
from bertjax.data.finetuning.tables import ReadStats, column_names, read_table
from bertjax.data.finetuning.tagged import read_conll
from bertjax.errors import BertjaxError, UsageError
from bertjax.utils import io

TABLE = "sentence\tlabel\na naïve one\tO\n"
LFS_POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"


@pytest.mark.parametrize("path_type", [lambda path: path, epath.Path])
def test_atomic_write_keeps_the_old_file_until_the_new_file_is_complete(tmp_path, path_type):
    path = path_type(tmp_path / "notes.txt")
    assert io.write_atomic(path, "früher") == path
    with pytest.raises(KeyboardInterrupt), io.atomic_file(path) as temporary:
        temporary.write_text("half")
        assert path.read_text() == "früher"
        raise KeyboardInterrupt
    io.write_atomic(path, b"later")
    assert [child.name for child in tmp_path.iterdir()] == ["notes.txt"] and path.read_text() == "later"
    umask = os.umask(0o027)
    io.write_atomic(path, b"")
    os.umask(umask)
    assert os.stat(path).st_mode & 0o777 == 0o640


def test_full_disk_keeps_the_old_file(tmp_path, monkeypatch):
    path = io.write_atomic(tmp_path / "a.json", "old")

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(type(path), "write_bytes", full)
    with pytest.raises(BertjaxError, match=r"cannot write .*a\.json: No space left on device$"):
        io.write_atomic(path, "new")
    assert path.read_text() == "old" and len(list(tmp_path.iterdir())) == 1


def test_temporary_files_are_found_by_name_and_removed_by_age(tmp_path):
    a, b = (tmp_path / io.temporary_name(name) for name in ("a[1].json", "b.json"))
    for file in (a, b):
        file.write_text("")
    os.utime(b, (0, time.time() - 100))
    (tmp_path / ".notes.unfinished").write_text("")
    assert io.temporary_paths(tmp_path, "a[1].json") == [a] and io.temporary_paths(tmp_path) == [a, b]
    io.remove_temporaries(tmp_path, min_age_seconds=50)
    assert io.temporary_paths(tmp_path) == [a]
    io.remove_temporaries(tmp_path, "b.json")
    assert a.exists()
    io.remove_temporaries(tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == [".notes.unfinished"]


def test_invalid_json_is_a_value_error(tmp_path):
    (tmp_path / "a.json").write_text("[" * 100_000)
    with pytest.raises(ValueError, match="nested too deeply"):
        io.read_json(tmp_path / "a.json")
    (tmp_path / "a.json").write_text("[1]")
    with pytest.raises(ValueError, match="not a JSON object"):
        io.read_json_object(tmp_path / "a.json")


def test_insufficient_disk_space_is_reported_before_writing(tmp_path, monkeypatch):
    monkeypatch.setattr(io.shutil, "disk_usage", lambda path: (200_000_000, 0, 100_000_000))
    io.check_free_space(tmp_path / "not" / "there", 50e6, "the corpus")
    with pytest.raises(
        BertjaxError, match=r"^not enough disk space for the corpus: 112 MB needed, 100 MB free at .*; free some space"
    ):
        io.check_free_space(tmp_path / "not" / "there", 95e6, "the corpus")
    with pytest.raises(BertjaxError, match=r"not enough disk space for .*out\.npz: 151 MB"):
        io.write_npz(tmp_path / "out.npz", {"x": np.zeros(1 << 24, np.float64)})
    assert not list(tmp_path.iterdir())


def test_cache_dir_is_private_and_set_by_environment(tmp_path, monkeypatch):
    monkeypatch.setenv(io.CACHE_DIR_VARIABLE, str(tmp_path / "deep" / "cache"))
    assert io.cache_dir() == tmp_path / "deep" / "cache"
    assert io.cache_dir().stat().st_mode & 0o777 == 0o700
    monkeypatch.delenv(io.CACHE_DIR_VARIABLE)
    monkeypatch.setattr(io.tempfile, "gettempdir", lambda: str(tmp_path))
    assert io.cache_dir() == tmp_path / f"bertjax-{os.getuid()}"
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(io.CACHE_DIR_VARIABLE, str(tmp_path / "file"))
    with pytest.raises(BertjaxError, match="set BERTJAX_STAGING"):
        io.cache_dir()


def table(path):
    return list(read_table(path, ["sentence", "label"], ReadStats(str(path))))


@pytest.mark.parametrize(
    "content",
    [
        *(f"\ufeff{TABLE}".encode(encoding) for encoding in ("utf-16-le", "utf-16-be", "utf-32-be")),
        TABLE.encode("utf-16-le"),
        gzip.compress(Path(__file__).read_bytes()),
        LFS_POINTER,
    ],
)
def test_other_encodings_are_rejected_in_tables_tagged_words_vocabularies_and_corpora(tmp_path, letters, content):
    path, tsv = tmp_path / "file.txt", tmp_path / "file.tsv"
    for file in (path, tsv):
        file.write_bytes(content)
    for read in (
        lambda: table(tsv),
        lambda: read_conll(path, ReadStats(str(path))),
        lambda: load_vocabulary(path),
        lambda: prepare([f"text:{path}"], tmp_path / "out", vocabulary=letters, workers=1),
    ):
        with pytest.raises(
            UsageError, match=r"file\.t\w+ is (encoded in UTF-16|not UTF-8 text|only a Git LFS pointer)"
        ):
            read()
    assert not (tmp_path / "out").exists()


def test_data_file_that_is_not_utf8_is_rejected(tmp_path):
    path, tsv = tmp_path / "file.txt", tmp_path / "file.tsv"
    path.write_bytes(b"caf\xc3\xa9 O\r\ncaf\xe9 O\r\n")
    tsv.write_bytes(b"sentence\tlabel\rcaf\xe9\t1\r")
    for read in (lambda: table(tsv), lambda: column_names(tsv), lambda: read_conll(path, ReadStats(str(path)))):
        with pytest.raises(UsageError, match=r"file\.t\w+ line 2 is not UTF-8; convert the file"):
            read()


def test_carriage_returns_end_lines(tmp_path):
    (tmp_path / "train.tsv").write_bytes(b"sentence\tlabel\rone\t1\rtwo\t0\r")
    assert [row.fields["sentence"] for row in table(tmp_path / "train.tsv")] == ["one", "two"]


@pytest.mark.parametrize("block_bytes", [1, 2, 3, 100])
def test_cr_and_crlf_line_ends_become_lf(block_bytes):
    text = b"a\rb\r\nc\nd\r\r\ne\n\rf \x0b\x0c\xe2\x80\xa8\r\r"
    blocks = [text[start : start + block_bytes] for start in range(0, len(text), block_bytes)]
    expected = b"a\nb\nc\nd\ne\n\nf \x0b\x0c\xe2\x80\xa8\n\n"
    assert b"".join(io.unix_newlines(blocks)) == expected


def test_full_disk_is_an_error_that_names_the_file_of_a_memory_map(tmp_path, monkeypatch):
    (tmp_path / "vectors").write_bytes(b"1234")
    io.reserve_blocks(tmp_path / "vectors")
    assert (tmp_path / "vectors").read_bytes() == b"1234"
    monkeypatch.setattr(os, "posix_fallocate", Mock(side_effect=OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))))
    with pytest.raises(OSError, match="No space left on device.*vectors"):
        io.reserve_blocks(tmp_path / "vectors")
