"""Tests of GLUE's metrics against scikit-learn and SciPy."""

import numpy as np
import pytest
import scipy.stats
import sklearn.metrics

from bertjax.metrics import classification as metrics


@pytest.mark.parametrize("seed", range(20))
def test_class_metrics_match_scikit_learn_for_any_set_of_classes(seed):
    rng = np.random.default_rng(seed)
    # Some of the 8 classes occur only as labels, only as predictions, or not at all.
    labels, predictions = (rng.choice(rng.choice(8, rng.integers(1, 5)), 12) for _ in range(2))
    scores = metrics.scores(["accuracy", "matthews", "f1", "macro_f1"], predictions, labels)
    assert [*scores.values()] == pytest.approx(
        [
            sklearn.metrics.accuracy_score(labels, predictions),
            sklearn.metrics.matthews_corrcoef(labels, predictions),
            sklearn.metrics.f1_score(labels == 1, predictions == 1, zero_division=0),
            sklearn.metrics.f1_score(labels, predictions, average="macro", zero_division=0),
        ],
        abs=1e-12,
    )


@pytest.mark.parametrize("seed", range(10))
def test_multilabel_scores_match_scikit_learn(seed):
    rng = np.random.default_rng(seed)
    # A class may be absent from the labels, the predictions, or both.
    labels, predictions = (((rng.random((30, 6)) < 0.3) & (rng.random(6) < 0.6)).astype(np.int64) for _ in range(2))
    scores = metrics.scores(["micro_f1", "macro_f1", "subset_accuracy"], predictions, labels)
    for name, average in (("micro_f1", "micro"), ("macro_f1", "macro")):
        expected = sklearn.metrics.f1_score(labels, predictions, average=average, zero_division=0)
        assert scores[name] == pytest.approx(expected, abs=1e-12)
    assert scores["subset_accuracy"] == pytest.approx(sklearn.metrics.accuracy_score(labels, predictions))


def test_cross_entropy_matches_log_loss():
    rng = np.random.default_rng(0)
    logits, labels = rng.normal(size=(40, 3)).astype(np.float32), rng.integers(0, 3, 40)
    probs = np.exp(logits.astype(np.float64))
    probs /= probs.sum(axis=1, keepdims=True)
    assert metrics.cross_entropy(logits, labels) == pytest.approx(sklearn.metrics.log_loss(labels, probs))


def test_correlations_match_numpy_and_scipy():
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 6, 300).astype(np.float32)  # few different values, so that there are ties
    predictions = labels + rng.standard_normal(300).astype(np.float32)
    assert metrics.pearson(predictions, labels) == pytest.approx(np.corrcoef(predictions, labels)[0, 1])
    ranks = [scipy.stats.rankdata(values) for values in (predictions, labels)]
    assert metrics.spearman(predictions, labels) == pytest.approx(np.corrcoef(*ranks)[0, 1])


def test_constant_predictions_have_zero_correlation():
    ones, labels = np.ones(4, int), np.array([0, 1, 1, 0])
    assert metrics.matthews(ones, labels) == metrics.f1(np.zeros(4, int), np.zeros(4, int)) == 0.0
    assert metrics.pearson(ones, labels) == metrics.spearman(ones, labels) == 0.0
