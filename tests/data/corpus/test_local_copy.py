"""Tests of the local copy of a corpus on object storage."""

import json
import multiprocessing
import shutil
import threading

import numpy as np
import pytest
from command_runs import load_task
from filelock import FileLock

from bertjax.data.corpus.store import MANIFEST, open_corpus
from bertjax.data.shard import SINGLE_SHARD
from bertjax.errors import BertjaxError, UsageError
from bertjax.utils.io import CACHE_DIR_VARIABLE


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
    assert {path.name: path.read_bytes() for path in copy.iterdir() if path.is_file()} == {
        path.name: path.read_bytes() for path in corpus.iterdir() if path.is_file()
    }


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


def test_missing_corpus_and_insufficient_disk_space_are_errors(copied, monkeypatch):
    with pytest.raises(UsageError, match="no corpus at gs://bucket/none"):
        open_corpus("gs://bucket/none")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: (1 << 40, 1 << 40, 1000))
    with pytest.raises(BertjaxError, match="not enough disk space for a copy of gs://bucket/corpus"):
        open_corpus(str(copied))


def _hold(lock, held, done):
    with FileLock(lock):
        held.set()
        done.wait(30)


@pytest.mark.ci
def test_process_waits_while_another_process_copies_the_corpus(copied, tmp_path):
    copy = open_corpus(str(copied)).path
    shutil.rmtree(copy)
    context = multiprocessing.get_context("spawn")
    held, done = context.Event(), context.Event()
    other = context.Process(target=_hold, args=(copy.parent / f".{copy.name}.lock", held, done))
    other.start()
    assert held.wait(30)
    timer = threading.Timer(0.5, done.set)
    timer.start()
    # `open_corpus` waits until the other process releases the lock.
    assert open_corpus(str(copied)).path == copy and done.is_set()
    other.join()
