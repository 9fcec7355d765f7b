"""Metrics of a predictor that ignores the context."""

import numpy as np
import pytest
from small_corpora import write_corpus

from bertjax.data.pretraining.baseline import token_frequency_baseline


def test_baseline_predicts_by_the_frequencies_of_training_tokens(tmp_path):
    splits = {"train": ([1, 1, 1, 2], [[4]]), "heldout": ([1, 2, 2, 2], [[4]])}
    corpus = write_corpus(tmp_path / "corpus", splits, vocabulary_size=12)
    values = token_frequency_baseline(corpus, [np.array([1, 2]), np.array([1])])
    assert values["accuracy"] == pytest.approx(2 / 3)
    # With add-one smoothing over 12 pieces, piece 1 has frequency (3 + 1) / (4 + 12), and piece 2 has 2 / 16.
    assert values["loss"] == pytest.approx(-(2 * np.log(4 / 16) + np.log(2 / 16)) / 3)
    assert values["heldout_entropy"] == pytest.approx(-(np.log(1 / 4) + 3 * np.log(3 / 4)) / 4)
