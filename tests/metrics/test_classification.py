"""GLUE's metrics against scikit-learn and SciPy."""

import numpy as np
import pytest
import scipy.stats
import sklearn.metrics

from bertjax.metrics import classification as metrics


@pytest.mark.parametrize("classes", [2, 3])
@pytest.mark.parametrize("seed", range(5))
def test_classes(classes, seed):
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, classes, 200)
    predictions = np.where(rng.random(200) < 0.6, labels, rng.integers(0, classes, 200))
    assert metrics.accuracy(predictions, labels) == pytest.approx(sklearn.metrics.accuracy_score(labels, predictions))
    assert metrics.matthews(predictions, labels) == pytest.approx(
        sklearn.metrics.matthews_corrcoef(labels, predictions)
    )
    if classes == 2:
        assert metrics.f1(predictions, labels) == pytest.approx(sklearn.metrics.f1_score(labels, predictions))


def test_numbers():
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 6, 300).astype(np.float32)  # with many ties
    predictions = labels + rng.standard_normal(300).astype(np.float32)
    assert metrics.pearson(predictions, labels) == pytest.approx(np.corrcoef(predictions, labels)[0, 1])
    ranks = [scipy.stats.rankdata(values) for values in (predictions, labels)]
    assert metrics.spearman(predictions, labels) == pytest.approx(np.corrcoef(*ranks)[0, 1])


def test_one_class_or_one_number_on_a_side_is_no_correlation():
    ones, labels = np.ones(4, int), np.array([0, 1, 1, 0])
    assert metrics.matthews(ones, labels) == metrics.f1(np.zeros(4, int), np.zeros(4, int)) == 0.0
    assert metrics.pearson(ones, labels) == metrics.spearman(ones, labels) == 0.0
