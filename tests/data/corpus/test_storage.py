"""Object storage: `prepare` with inputs and output on it, and local copies of corpora."""

import json
import shutil
import threading
import time
from unittest.mock import Mock

import numpy as np
import pytest
from filelock import FileLock
from helpers.command_runs import load_task
from helpers.preparing import bytes_of, make_text

from bertjax.data.corpus import chunks, prepare, readers
from bertjax.data.corpus.store import MANIFEST, open_corpus
from bertjax.data.shard import SINGLE_SHARD
from bertjax.errors import BertjaxError, UsageError
from bertjax.utils.io import CACHE_DIR_VARIABLE


@pytest.fixture
def bucket(bucket, monkeypatch):
    """Returns the path of an in-memory bucket with two text files."""
    # The main process reads large files. Workers cannot, because the bucket is in the memory of this process.
    monkeypatch.setattr(chunks, "_MIN_CHUNK_BYTES", 0)
    for name, seed in (("text/a.txt", 0), ("text/more/b.txt", 1)):
        (bucket / name).parent.mkdir(parents=True, exist_ok=True)
        (bucket / name).write_text("\n\n".join("\n".join(document) for document in make_text(40, seed)))
    return bucket


def prepare_corpus(output, vocabulary, *inputs, **settings):
    return prepare.prepare(list(inputs), output, vocabulary=vocabulary, heldout_fraction=0.2, workers=1, **settings)


def test_pattern_matches_files_in_a_bucket(bucket):
    def names(rest):
        sources, _ = readers.find_sources([f"text:gs://bucket/{rest}"])
        return [source.name.removeprefix("gs://bucket/") for source in sources]

    assert names("text") == names("text/**") == names("**") == ["text/a.txt", "text/more/b.txt"]
    assert names("text/*.txt") == names("text/a.txt") == ["text/a.txt"]
    assert names("**/*.txt") == names("text/**/*.txt") == ["text/a.txt", "text/more/b.txt"]
    assert names("**/more/*") == names("*/more/b*") == ["text/more/b.txt"]
    with pytest.raises(UsageError, match="matches no file"):
        names("none/**")


@pytest.mark.ci
def test_corpus_in_a_bucket_equals_local_corpus(bucket, tmp_path, vocabulary):
    (bucket / "vocab.txt").write_bytes(vocabulary.read_bytes())
    manifest = prepare_corpus("gs://bucket/out/corpus", "gs://bucket/vocab.txt", "text:gs://bucket/text/**")
    for name in ("a.txt", "more/b.txt"):
        (tmp_path / "text" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "text" / name).write_bytes((bucket / "text" / name).read_bytes())
    assert prepare_corpus(tmp_path / "corpus", vocabulary, f"text:{tmp_path}/text/**") == manifest
    assert bytes_of(bucket / "out/corpus") == bytes_of(tmp_path / "corpus")
    # No temporary file is left.
    assert [file.name for file in (bucket / "out").iterdir()] == ["corpus"]


@pytest.mark.ci
def test_corpus_in_a_bucket_is_replaced_with_overwrite(bucket, vocabulary, monkeypatch):
    prepare_corpus("gs://bucket/corpus", vocabulary, "text:gs://bucket/text/a.txt")
    before = bytes_of(bucket / "corpus")
    with pytest.raises(UsageError, match="gs://bucket/corpus exists; use --overwrite"):
        prepare_corpus("gs://bucket/corpus", vocabulary, "text:gs://bucket/text/**")
    with pytest.raises(UsageError, match="is not a corpus"):
        prepare_corpus("gs://bucket/text", vocabulary, "text:gs://bucket/text/**", overwrite=True)
    with pytest.raises(UsageError, match="--output is a whole bucket"):
        prepare_corpus("gs://bucket", vocabulary, "text:gs://bucket/text/**", overwrite=True)

    with monkeypatch.context() as patched:
        patched.setattr(prepare, "write_array", Mock(side_effect=OSError("the network is down")))
        with pytest.raises(BertjaxError, match="cannot write the corpus gs://bucket/corpus: the network is down"):
            prepare_corpus("gs://bucket/corpus", vocabulary, "text:gs://bucket/text/**", overwrite=True)
    assert bytes_of(bucket / "corpus") == before
    assert sorted(file.name for file in bucket.iterdir()) == ["corpus", "text"]
    moved = []
    replace = type(bucket).replace
    monkeypatch.setattr(type(bucket), "replace", lambda self, to: moved.append(to.name) or replace(self, to))
    manifest = prepare_corpus("gs://bucket/corpus", vocabulary, "text:gs://bucket/text/**", overwrite=True)
    assert moved[-1] == MANIFEST and len(moved) == 8
    assert json.loads((bucket / "corpus" / MANIFEST).read_text()) == manifest


@pytest.fixture
def copied(bucket, monkeypatch, corpus, tmp_path):
    """Copies the corpus to an in-memory bucket, sets an empty cache folder, and returns the path of the copy."""
    monkeypatch.setenv(CACHE_DIR_VARIABLE, str(tmp_path / "staging"))
    place = bucket / "corpus"
    place.mkdir(parents=True)
    for file in corpus.iterdir():
        if file.is_file():
            (place / file.name).write_bytes(file.read_bytes())
    return place


def test_batches_from_a_copied_corpus_equal_those_of_the_original(copied, corpus, tmp_path):
    def batches(path):
        task = load_task(f"pretrain.py:corpus={path},seq_len=16", None)
        made = task.train_batches(0, SINGLE_SHARD)
        return task.data_hash, [next(made) for _ in range(3)]

    np.testing.assert_equal(batches(copied), batches(corpus))
    (copy,) = [path for path in (tmp_path / "staging").iterdir() if path.is_dir()]
    files = [file for file in corpus.iterdir() if file.is_file()]
    assert all((copy / file.name).read_bytes() == file.read_bytes() for file in files)


def test_copy_is_made_once_per_corpus(copied, monkeypatch):
    first = open_corpus(str(copied))
    (copied / "train.tokens.bin").unlink()
    assert open_corpus(str(copied)).path == first.path
    manifest = json.loads((copied / MANIFEST).read_text())
    (copied / MANIFEST).write_text(json.dumps(manifest | {"settings": {"another": True}}))
    with pytest.raises(BertjaxError, match="train.tokens.bin is missing"):
        open_corpus(str(copied))
    assert open_corpus(first.path).fingerprint == first.fingerprint


def test_damaged_file_is_not_copied(copied, tmp_path):
    content = bytearray((copied / "train.tokens.bin").read_bytes())
    content[len(content) // 2] ^= 1
    (copied / "train.tokens.bin").write_bytes(bytes(content))
    with pytest.raises(BertjaxError, match="train.tokens.bin does not match its checksum"):
        open_corpus(str(copied))
    assert [path for path in (tmp_path / "staging").iterdir() if path.is_dir()] == []


def test_insufficient_disk_space_for_a_copy_is_an_error(copied, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: (1 << 40, 1 << 40, 1000))
    with pytest.raises(BertjaxError, match="not enough disk space for a copy of gs://bucket/corpus"):
        open_corpus(str(copied))


def test_open_corpus_waits_while_another_process_copies_the_corpus(copied):
    copy = open_corpus(str(copied)).path
    shutil.rmtree(copy)
    is_held, is_done = threading.Event(), threading.Event()

    def hold_lock():
        with FileLock(copy.parent / f".{copy.name}.lock"):
            is_held.set()
            time.sleep(0.5)
            is_done.set()

    threading.Thread(target=hold_lock).start()
    assert is_held.wait(30)
    assert open_corpus(str(copied)).path == copy and is_done.is_set()
