"""Tests of class reports against scikit-learn, and of the confusions of entities."""

import numpy as np
import pytest
import sklearn.metrics

from bertjax.metrics.entities import entity_report
from bertjax.metrics.report import NO_ENTITY, class_report, multilabel_report


def assert_scores(report, reference):
    for name, *expected in zip(report.classes, *reference, strict=True):
        assert list(report.scores()[name].values()) == pytest.approx(expected)


@pytest.mark.parametrize("seed", range(5))
def test_class_report_matches_scikit_learn(seed):
    rng = np.random.default_rng(seed)
    names = ["a", "b", "c", "d"]
    labels, predictions = rng.integers(0, 3, 50), rng.choice([0, 1, 3], 50)
    report = class_report(names, predictions, labels)
    options = {"labels": range(4), "zero_division": 0}
    assert_scores(report, sklearn.metrics.precision_recall_fscore_support(labels, predictions, **options))
    matrix = sklearn.metrics.confusion_matrix(labels, predictions, labels=range(4))
    content = report.as_json()
    assert content["confusion"] == {
        name: {names[j]: matrix[i, j] for j in range(4) if matrix[i, j]} for i, name in enumerate(names)
    }
    assert content["per_class"]["d"]["support"] == 0
    lines = report.format().splitlines()
    assert lines[0].split() == ["precision", "recall", "f1", "support"]
    assert [line.split()[0] for line in lines[1:5]] == names
    assert [[int(cell) for cell in line.split()[1:]] for line in lines[6:]] == matrix.tolist()


def test_multilabel_report_matches_scikit_learn():
    rng = np.random.default_rng(0)
    labels, predictions = rng.integers(0, 2, (30, 3)), rng.integers(0, 2, (30, 3))
    report = multilabel_report(["a", "b", "c"], predictions, labels)
    assert_scores(report, sklearn.metrics.precision_recall_fscore_support(labels, predictions))
    assert report.as_json().keys() == {"per_class"} and len(report.format().splitlines()) == 4


def test_entity_confusion_pairs_true_and_predicted_entities_of_the_same_span():
    labels = [["B-A", "I-A", "O", "B-B"], ["B-B", "O"]]
    predictions = [["B-B", "I-B", "O", "B-B"], ["O", "B-A"]]
    report = entity_report(labels, predictions)
    assert report.as_json()["confusion"] == {"A": {"B": 1}, "B": {"B": 1, NO_ENTITY: 1}, NO_ENTITY: {"A": 1}}
    assert report.scores()["B"] == {"precision": 50.0, "recall": 50.0, "f1": 50.0, "support": 2}


def test_report_of_many_classes_shows_only_the_most_frequent_classes():
    labels = np.repeat(np.arange(100), np.arange(100) + 1)
    report = class_report([f"class\x1b{i}" for i in range(100)], np.where(labels == 99, 98, labels), labels)
    text = report.format()
    assert "80 rarer classes are not shown" in text and len(text.splitlines()) < 40
    assert "class\\x1b99 predicted as class\\x1b98: 100" in text and "\x1b" not in text
