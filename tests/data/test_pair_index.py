"""Pair index on disk: deterministic, reused, and rebuilt if damaged."""

import errno
import json
import os
import subprocess
import sys
import time
from unittest.mock import Mock

import numpy as np
import pytest
from small_corpora import random_documents

from bertjax.data.corpus.store import open_corpus
from bertjax.data.pretraining import pair_index, pairs
from bertjax.data.pretraining.pair_index import open_pair_index
from bertjax.errors import BertjaxError, UsageError
from bertjax.utils.io import CACHE_DIR_VARIABLE, temporary_name


@pytest.fixture
def corpus(make_corpus):
    return make_corpus([*random_documents(50, 3), [9], [200, 1]])


def files(corpus):
    return {file.name: file for file in (corpus.path / "pair_index").iterdir()}


@pytest.mark.parametrize("seq_len, has_small_blocks", [(16, False), (64, False), (128, True)])
def test_each_pass_uses_every_sentence_in_different_pairs(corpus, seq_len, has_small_blocks, monkeypatch):
    if has_small_blocks:
        monkeypatch.setattr(pair_index, "_BLOCK_SENTENCES", 20)
        monkeypatch.setattr(pairs, "_MAX_PAIRS", 7)
    made = open_pair_index(corpus, "train", seq_len, 0, 3)
    assert made.pass_ends[-1] == len(made.records)
    starts = np.concatenate([[0], made.pass_ends[:-1]])
    passes = [made.records[a:b] for a, b in zip(starts, made.pass_ends, strict=True)]
    before = {name: file.stat().st_ino for name, file in files(corpus).items()}
    again = open_pair_index(corpus, "train", seq_len, 0, 3)
    assert {name: file.stat().st_ino for name, file in files(corpus).items()} == before
    assert not again.records.flags.owndata and np.array_equal(again.records, made.records)
    for records in passes:
        # Each sentence is in one segment A, or in one segment B that follows its A.
        spans = [(record["a_start"], record["a_length"]) for record in records]
        spans += [(record["b_start"], record["b_length"]) for record in records if record["label"] == 0]
        starts, lengths = np.array(sorted(spans)).T
        np.testing.assert_array_equal(starts, np.cumsum([0, *lengths[:-1]]))
        assert starts[-1] + lengths[-1] == corpus.train.sentences[-1]
        assert np.isin(starts, corpus.train.sentences).all()
    assert not np.array_equal(passes[0][:50], passes[1][:50])
    other_seed = open_pair_index(corpus, "train", seq_len, 1, 3)
    assert not np.array_equal(passes[0][:50], other_seed.records[:50])


def test_damaged_index_is_rebuilt(corpus):
    made = open_pair_index(corpus, "train", 64, 0, 2)
    header, records = sorted(files(corpus).values(), key=lambda file: file.suffix, reverse=True)
    good_header, good_records = header.read_bytes(), records.read_bytes()
    # Only the checksum of the header can detect that a number of the header has changed.
    changed = json.loads(good_header)
    changed["pass_ends"][0] -= 1
    damages = [
        lambda: records.write_bytes(good_records[:-1]),
        header.unlink,
        lambda: header.write_text(json.dumps(changed)),
        lambda: header.write_text(f'{{"pass_ends": [{10**23}], "runs": [[1, 1]]}}'),
        lambda: header.write_text('{"pass_ends": ['),
    ]
    for damage in damages:
        damage()
        again = open_pair_index(open_corpus(corpus.path), "train", 64, 0, 2)
        assert (header.read_bytes(), records.read_bytes()) == (good_header, good_records)
        np.testing.assert_array_equal(again.pass_ends, made.pass_ends)


def test_index_of_a_read_only_corpus_is_stored_in_the_cache_folder(corpus, tmp_path, monkeypatch):
    # With a file in place of the folder, not even root can write the index there.
    (corpus.path / "pair_index").write_text("")
    monkeypatch.setenv(CACHE_DIR_VARIABLE, str(tmp_path))
    made = open_pair_index(corpus, "train", 64, 0, 1)
    assert list(tmp_path.glob("pair_index/*.bin")) == [made.path]
    again = open_pair_index(corpus, "train", 64, 0, 1)
    np.testing.assert_array_equal(made.records, again.records)


def test_insufficient_disk_space_is_a_one_line_error_and_leaves_no_file(corpus, tmp_path, monkeypatch):
    monkeypatch.setenv(CACHE_DIR_VARIABLE, str(tmp_path))
    with pytest.raises(BertjaxError, match="the pair index of 1,000,.* passes: .*lower config.data.dupe_factor"):
        open_pair_index(corpus, "train", 64, 0, 10**12)
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    monkeypatch.setattr("bertjax.utils.io.fsync", Mock(side_effect=full))
    with pytest.raises(BertjaxError, match="No space left on device") as error:
        open_pair_index(corpus, "train", 64, 0, 1)
    assert "\n" not in str(error.value)
    assert not files(corpus)


def test_leftovers_of_killed_processes_are_removed(corpus):
    folder = corpus.path / "pair_index"
    folder.mkdir()
    abandoned, live = (folder / temporary_name("pairs-a.bin") for _ in range(2))
    for file in (abandoned, live):
        file.write_bytes(b"0")
    day_ago = time.time() - 86_400
    os.utime(abandoned, (day_ago, day_ago))
    open_pair_index(corpus, "train", 64, 0, 1)
    assert not abandoned.exists()
    assert live.exists()


def test_processes_may_build_the_same_index_concurrently(corpus):
    code = (
        "import sys, hashlib; from bertjax.data.corpus.store import open_corpus;"
        "from bertjax.data.pretraining.pair_index import open_pair_index;"
        "corpus = open_corpus(sys.argv[1]); print('ready', flush=True); sys.stdin.readline();"
        "print(hashlib.sha256(open_pair_index(corpus, 'train', 32, 0, 8).records.tobytes()).hexdigest())"
    )
    command = [sys.executable, "-c", code, str(corpus.path)]
    processes = [subprocess.Popen(command, stdin=-1, stdout=-1, text=True) for _ in range(3)]
    for process in processes:
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        process.stdin.write("\n")
        process.stdin.flush()
    hashes = {process.communicate(timeout=60)[0] for process in processes}
    assert len(hashes) == 1 and len(hashes.pop().strip()) == 64
    assert len(files(corpus)) == 2


@pytest.mark.parametrize("documents", [[], [[3, 4, 5]]])
def test_pairs_need_two_documents(make_corpus, documents):
    corpus = make_corpus([[3, 4], [5]], documents)
    with pytest.raises(UsageError, match=f"heldout split .* has {len(documents)} document.*prepare more documents"):
        open_pair_index(corpus, "heldout", 64, 0, 1)
    if documents:
        assert len(open_pair_index(corpus, "heldout", 64, 0, 1, 8, "").records) == 1
