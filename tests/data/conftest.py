"""Corpora and tokenizers for the tests in this folder."""

from collections.abc import Callable

import numpy as np
import pytest
from helpers.small_corpora import SPECIAL_PIECES, random_documents, write_corpus, write_pieces

from bertjax.data.corpus import store
from bertjax.data.corpus.tokenizer import Tokenizer
from bertjax.data.corpus.vocabulary import Vocabulary, load_vocabulary


@pytest.fixture(scope="session")
def make_corpus(tmp_path_factory) -> Callable[..., store.Corpus]:
    """Returns a function that creates a corpus in a new folder.

    With `unique`, all tokens of a split have different ids, so that tests can locate a row in the split.
    """

    def make(train: list[list[int]], heldout: list[list[int]] | None = None, unique: bool = False) -> store.Corpus:
        path = tmp_path_factory.mktemp("corpora") / "corpus"
        heldout = heldout if heldout is not None else [[5, 6, 7], [8, 9]]
        counts = [sum(map(sum, documents)) for documents in (train, heldout)]
        size = max(counts) + 50 if unique else 500
        ordinary = np.array([i for i in range(size) if i not in SPECIAL_PIECES])
        rng = np.random.default_rng(0)
        tokens = [rng.permutation(ordinary)[:count] if unique else rng.choice(ordinary, count) for count in counts]
        return write_corpus(path, {"train": (tokens[0], train), "heldout": (tokens[1], heldout)}, size)

    return make


@pytest.fixture(scope="session")
def traced(make_corpus) -> store.Corpus:
    """Returns a corpus in which all tokens of a split have different ids; tests must not change it."""
    return make_corpus(random_documents(60, 1), random_documents(25, 2), unique=True)


@pytest.fixture(scope="session")
def vocabulary(tmp_path_factory) -> Vocabulary:
    """Returns the vocabulary of 64 pieces that `write_pieces` describes."""
    return load_vocabulary(write_pieces(tmp_path_factory.mktemp("vocabulary") / "vocab.txt", 64))


@pytest.fixture(scope="session")
def tokenizer(letters) -> Tokenizer:
    return Tokenizer(load_vocabulary(letters))
