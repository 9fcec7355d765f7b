"""Tests that damaged corpora and pair indices are detected before a run finishes."""

import os

import pytest
from small_corpora import pretraining_batches, random_documents

from bertjax.data.corpus import store
from bertjax.data.pretraining.batches import RowSource, eval_dataset, verified_batches
from bertjax.data.pretraining.config import Masking, Phase
from bertjax.data.pretraining.pair_index import open_pair_index
from bertjax.data.shard import SINGLE_SHARD
from bertjax.errors import BertjaxError

PHASE = Phase(seq_len=16, batch_size=4, max_predictions=3, start_step=0, stop_step=1 << 40)


@pytest.fixture
def corpus(make_corpus):
    return make_corpus(random_documents(60, 1), random_documents(25, 2), unique=True)


def overwrite(file, start, content):
    with open(file, "r+b") as opened:
        os.pwrite(opened.fileno(), content, start)


def train_batches(corpus, source, whole_word=False):
    return verified_batches(pretraining_batches(corpus, PHASE, source, Masking(whole_word=whole_word)), corpus)


@pytest.mark.parametrize("split", store.SPLITS)
def test_training_and_evaluation_verify_the_corpus_in_the_background(corpus, split):
    overwrite(corpus.path / f"{split}.tokens.bin", 100, b"\x01\x01")
    corpus = store.open_corpus(corpus.path)
    dataset = eval_dataset(corpus, PHASE, source=RowSource(), shard=SINGLE_SHARD)
    assert next(train_batches(corpus, RowSource()) if split == "train" else verified_batches(dataset, corpus))
    corpus.checksums._thread.join()
    with pytest.raises(BertjaxError, match=rf"{split}\.tokens\.bin is damaged"):
        corpus.checksums.check()


def test_damaged_pair_index_is_found(corpus):
    path = open_pair_index(corpus, "train", 16, 0, 2).path
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
        train_batches(corpus, RowSource("next_sentence"))
    assert not (corpus.path / "pair_index").exists()


def test_error_while_building_a_batch_names_the_damaged_file(corpus):
    # Ids outside the vocabulary make TensorFlow fail.
    file = corpus.path / "train.tokens.bin"
    overwrite(file, 0, b"\xff" * file.stat().st_size)
    corpus = store.open_corpus(corpus.path)
    batches = train_batches(corpus, RowSource(), whole_word=True)
    with pytest.raises(BertjaxError, match=r"train\.tokens\.bin is damaged"):
        for _ in range(50):
            next(batches)
