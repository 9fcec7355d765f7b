"""Sentence pairs and their index on disk: equal to a sequential implementation, deterministic, rebuilt if damaged."""

import dataclasses
import errno
import json
import os
import random
import subprocess
import sys
import time
from unittest.mock import Mock

import numpy as np
import pytest
from helpers.small_corpora import pretraining_batches, random_documents

from bertjax.data.corpus import store
from bertjax.data.pretraining import pair_index, pairs
from bertjax.data.pretraining.batches import verified_batches
from bertjax.data.pretraining.config import Masking, Phase, RowFormat
from bertjax.data.pretraining.pair_index import open_pair_index
from bertjax.data.pretraining.pairs import NEXT_SENTENCE, SENTENCE_ORDER, document_pairs, target_lengths
from bertjax.errors import BertjaxError, UsageError
from bertjax.utils.io import CACHE_DIR_VARIABLE, temporary_name


def offsets(documents: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    sentences = np.cumsum([0, *(length for document in documents for length in document)])
    return sentences, np.cumsum([0, *(len(document) for document in documents)])


def one_pass(
    documents: list[list[int]], max_tokens: int, seed: int, pass_index: int, pairing: str = NEXT_SENTENCE
) -> np.ndarray:
    sentences, firsts = offsets(documents)
    lengths = np.array([sum(document) for document in documents])
    targets = target_lengths(lengths, max_tokens, pass_index, np.random.default_rng(seed))
    rng = np.random.default_rng([seed, pass_index])
    return np.concatenate(list(document_pairs(sentences, firsts, 0, targets, rng, pairing)))


def expected_pairs(documents: list[list[int]], max_tokens: int, rng: random.Random) -> list[tuple[int, int, bool]]:
    """Returns, for each pair, the lengths of A and B before truncation, and whether B is random."""
    pairs = []
    for own, document in enumerate(documents):
        target = rng.randint(2, max_tokens) if rng.random() < 0.1 else max_tokens
        position = 0
        while position < len(document):
            stop = position + 1
            while stop < len(document) and sum(document[position:stop]) < target:
                stop += 1
            a_stop = position + 1 if stop == position + 1 else rng.randint(position + 1, stop - 1)
            a = sum(document[position:a_stop])
            if stop == position + 1 or rng.random() < 0.5:
                other = documents[rng.choice([d for d in range(len(documents)) if d != own])]
                start = rng.randrange(len(other))
                b = 0
                for length in other[start:]:
                    b += length
                    if b >= target - a:
                        break
                pairs.append((a, b, True))
                position = a_stop
            else:
                pairs.append((a, sum(document[a_stop:stop]), False))
                position = stop
    return pairs


@pytest.mark.parametrize("max_tokens", [61, 253])
def test_pair_distributions_match_the_sequential_implementation(max_tokens):
    documents, passes = random_documents(200, 0), 20
    rng = random.Random(5)
    expected = np.array([p for _ in range(passes) for p in expected_pairs(documents, max_tokens, rng)])
    ours = np.concatenate([one_pass(documents, max_tokens, 3, index) for index in range(passes)])
    ours = np.stack([ours["a_length"], ours["b_length"], ours["label"]], axis=1)

    assert len(ours) == pytest.approx(len(expected), rel=0.03)
    assert ours[:, 2].mean() == pytest.approx(expected[:, 2].mean(), abs=0.02)
    for random_next in (0, 1):
        ours_part, expected_part = ours[ours[:, 2] == random_next], expected[expected[:, 2] == random_next]
        for column in (0, 1):
            assert ours_part[:, column].mean() == pytest.approx(expected_part[:, column].mean(), rel=0.03)
            quantiles = np.linspace(0.05, 0.95, 10)
            found = np.quantile(ours_part[:, column], quantiles)
            assert found == pytest.approx(np.quantile(expected_part[:, column], quantiles), rel=0.1, abs=2)


def test_segment_b_is_the_next_text_or_from_another_document():
    documents = random_documents(40, 6)
    sentences, firsts = offsets(documents)
    pairs = one_pass(documents, 61, 0, 0)
    ends = pairs["a_start"] + pairs["a_length"], pairs["b_start"] + pairs["b_length"]
    places = pairs["a_start"], pairs["b_start"], ends[1] - 1
    a, b, b_last = (np.searchsorted(sentences[firsts], place, side="right") for place in places)
    np.testing.assert_array_equal(b, b_last)
    is_random = pairs["label"] == 1
    assert (a[is_random] != b[is_random]).all() and len({*b[is_random].tolist()}) > 20
    np.testing.assert_array_equal(a[~is_random], b[~is_random])
    np.testing.assert_array_equal(ends[0][~is_random], pairs["b_start"][~is_random])
    assert (pairs["b_length"] > 0).all()


def test_half_of_the_sentence_order_pairs_are_reversed():
    documents = random_documents(200, 0)
    pairs = one_pass(documents, 61, 3, 0, SENTENCE_ORDER)
    in_order = pairs["a_start"] + pairs["a_length"] == pairs["b_start"]
    is_reversed = pairs["b_start"] + pairs["b_length"] == pairs["a_start"]
    assert in_order[pairs["label"] == 0].all()
    assert is_reversed.sum() == pytest.approx(in_order.sum(), rel=0.1)
    # All other pairs have a chunk of one sentence as A, and B from another document.
    ends = np.cumsum([sum(document) for document in documents])
    others = pairs[~in_order & ~is_reversed]
    first, second = (np.searchsorted(ends, others[name], side="right") for name in ("a_start", "b_start"))
    assert (first != second).all() and 0 < len(others) < 0.3 * len(pairs)
    # Every token is in one A, or in one B of the same document.
    together = pairs[in_order | is_reversed]
    assert others["a_length"].sum() + together["a_length"].sum() + together["b_length"].sum() == ends[-1]


def test_each_document_has_a_short_target_length_in_one_of_ten_passes():
    lengths = np.random.default_rng(0).integers(5, 5000, 1000)
    targets = np.stack([target_lengths(lengths, 61, index, np.random.default_rng(1)) for index in range(10)])
    # A short target is drawn uniformly from 2 to 61, so it may equal the full length, 61.
    assert (targets < 61).sum(axis=0).max() == 1
    short = targets[targets < 61]
    assert len(short) == pytest.approx(1000 * 59 / 60, abs=2)
    counts = np.bincount(short)[2:]
    assert len(counts) == 59
    assert counts.min() >= 15 and counts.max() <= 18


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
    passes = np.split(made.records, made.pass_ends[:-1])
    before = {name: file.stat().st_ino for name, file in files(corpus).items()}
    again = open_pair_index(corpus, "train", seq_len, 0, 3)
    assert {name: file.stat().st_ino for name, file in files(corpus).items()} == before
    assert not again.records.flags.owndata and np.array_equal(again.records, made.records)
    for records in passes:
        # Each sentence is in exactly one segment: A, or B of an IsNext pair.
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
    # Only the header's checksum can detect a changed number in the header.
    changed = json.loads(good_header)
    changed["pass_ends"][0] -= 1
    damages = [
        lambda: records.write_bytes(good_records[:-1]),
        header.unlink,
        lambda: header.write_text(json.dumps(changed)),
        lambda: header.write_text("{}"),
        lambda: header.write_text('{"pass_ends": ['),
    ]
    for damage in damages:
        damage()
        again = open_pair_index(store.open_corpus(corpus.path), "train", 64, 0, 2)
        assert (header.read_bytes(), records.read_bytes()) == (good_header, good_records)
        np.testing.assert_array_equal(again.pass_ends, made.pass_ends)


def test_index_of_a_read_only_corpus_is_stored_in_the_cache_folder(corpus, tmp_path, monkeypatch):
    # With a file in place of the folder, not even root can write the index there.
    (corpus.path / "pair_index").write_text("")
    monkeypatch.setenv(CACHE_DIR_VARIABLE, str(tmp_path))
    made = open_pair_index(corpus, "train", 64, 0, 1)
    assert len(list(tmp_path.glob("pair_index/*.bin"))) == 1
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


def test_processes_may_build_the_same_index_concurrently(corpus, tmp_path, monkeypatch):
    monkeypatch.setenv(CACHE_DIR_VARIABLE, str(tmp_path))  # The machine's cache may contain this index.
    code = (
        "import sys, hashlib; from bertjax.data.corpus.store import open_corpus;"
        "from bertjax.data.pretraining.pair_index import open_pair_index;"
        "corpus = open_corpus(sys.argv[1]); print('ready', flush=True); sys.stdin.readline();"
        "print(hashlib.sha256(open_pair_index(corpus, 'train', 32, 0, 8).records.tobytes()).hexdigest())"
    )
    command = [sys.executable, "-c", code, str(corpus.path)]
    processes = [subprocess.Popen(command, stdin=-1, stdout=-1, text=True) for _ in range(3)]
    assert [process.stdout.readline() for process in processes] == ["ready\n"] * 3
    for process in processes:
        process.stdin.write("\n")
        process.stdin.flush()
    assert len({process.communicate(timeout=60)[0] for process in processes}) == 1
    assert [process.returncode for process in processes] == [0] * 3 and len(files(corpus)) == 2


def test_pairs_need_two_documents(make_corpus):
    corpus = make_corpus([[3, 4], [5]], [[3, 4, 5]])
    with pytest.raises(UsageError, match="heldout split .* has 1 document"):
        open_pair_index(corpus, "heldout", 64, 0, 1)
    assert len(open_pair_index(corpus, "heldout", 64, 0, 1, 8, "").records) == 1


PHASE = Phase(16, batch_size=4, max_predictions=3, start_step=0, stop_step=1 << 40)


def overwrite(file, start, content):
    with open(file, "r+b") as opened:
        os.pwrite(opened.fileno(), content, start)


def train_batches(corpus, **changes):
    return verified_batches(pretraining_batches(corpus, dataclasses.replace(PHASE, **changes)), corpus)


def test_corpus_is_verified_in_the_background(corpus):
    overwrite(corpus.path / "train.tokens.bin", 20, b"\x01\x01")
    corpus = store.open_corpus(corpus.path)
    assert next(train_batches(corpus))
    corpus.checksums._thread.join()
    with pytest.raises(BertjaxError, match=r"train\.tokens\.bin is damaged"):
        corpus.checksums.check()


def test_damaged_pair_index_is_found(corpus):
    open_pair_index(corpus, "train", 16, 0, 2)
    (path,) = (corpus.path / "pair_index").glob("*.bin")
    overwrite(path, 100, b"\x01\x01")
    corpus = store.open_corpus(corpus.path)
    open_pair_index(corpus, "train", 16, 0, 2)
    with pytest.raises(BertjaxError, match=rf"{path} is damaged: .*; delete it, and the next run builds it again"):
        corpus.checksums.wait()
    path.unlink()
    corpus = store.open_corpus(corpus.path)
    open_pair_index(corpus, "train", 16, 0, 2)
    corpus.checksums.wait()


@pytest.mark.parametrize("array", ["sentences", "documents"])
def test_damaged_offsets_raise_before_the_pair_index_is_written(corpus, array):
    overwrite(corpus.path / store.array_file("train", array), 80, bytes(8))
    corpus = store.open_corpus(corpus.path)
    with pytest.raises(BertjaxError, match=rf"train\.{array}\.bin is damaged"):
        train_batches(corpus, row_format=RowFormat("next_sentence"))
    assert not (corpus.path / "pair_index").exists()


def test_error_while_building_a_batch_names_the_damaged_file(corpus):
    # Ids outside the vocabulary make TensorFlow fail.
    file = corpus.path / "train.tokens.bin"
    overwrite(file, 0, b"\xff" * file.stat().st_size)
    corpus = store.open_corpus(corpus.path)
    batches = train_batches(corpus, masking=Masking(whole_word=True))
    with pytest.raises(BertjaxError, match=r"train\.tokens\.bin is damaged"):
        for _ in range(50):
            next(batches)
