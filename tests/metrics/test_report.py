"""Precision, recall, F1 and confusion by class, against scikit-learn, and of entities, against their own scores."""

import random

import numpy as np
import pytest
import sklearn.metrics

from bertjax.metrics.entities import entity_scores
from bertjax.metrics.report import NO_ENTITY, of_classes, of_entities, of_labels


def assert_measures(report, theirs):
    for name, *wanted in zip(report.classes, *theirs, strict=True):
        assert list(report.measures()[name].values()) == pytest.approx(wanted)


@pytest.mark.parametrize("seed", range(5))
def test_classes(seed):
    rng = np.random.default_rng(seed)
    names = ["a", "b", "c", "d"]
    labels, predictions = rng.integers(0, 3, 50), rng.choice([0, 1, 3], 50)
    report = of_classes(names, predictions, labels)
    given = {"labels": range(4), "zero_division": 0}
    assert_measures(report, sklearn.metrics.precision_recall_fscore_support(labels, predictions, **given))
    matrix = sklearn.metrics.confusion_matrix(labels, predictions, labels=range(4))
    content = report.as_json()
    assert content["confusion"] == {
        name: {names[j]: matrix[i, j] for j in range(4) if matrix[i, j]} for i, name in enumerate(names)
    }
    assert content["per_class"]["d"]["support"] == 0
    lines = report.text().splitlines()
    assert lines[0].split() == ["precision", "recall", "f1", "support"]
    assert [line.split()[0] for line in lines[1:5]] == names
    assert [[int(cell) for cell in line.split()[1:]] for line in lines[6:]] == matrix.tolist()


def test_any_number_of_labels():
    rng = np.random.default_rng(0)
    labels, predictions = rng.integers(0, 2, (30, 3)), rng.integers(0, 2, (30, 3))
    report = of_labels(["a", "b", "c"], predictions, labels)
    assert_measures(report, sklearn.metrics.precision_recall_fscore_support(labels, predictions))
    assert report.as_json().keys() == {"per_class"} and len(report.text().splitlines()) == 4


def test_entities_are_taken_for_one_with_the_same_ends_or_for_none():
    wanted = [["B-A", "I-A", "O", "B-B"], ["B-B", "O"]]
    predicted = [["B-B", "I-B", "O", "B-B"], ["O", "B-A"]]
    report = of_entities(wanted, predicted)
    assert report.as_json()["confusion"] == {"A": {"B": 1}, "B": {"B": 1, NO_ENTITY: 1}, NO_ENTITY: {"A": 1}}
    assert report.measures()["B"] == {"precision": 50.0, "recall": 50.0, "f1": 50.0, "support": 2}


def test_entity_types_have_the_f1_of_the_metrics():
    rng = random.Random(0)
    tags = ["O", "B-A", "I-A", "B-B", "I-B", "S-C", "E-A"]
    wanted = [rng.choices(tags, k=10) for _ in range(30)]
    predicted = [[tag if rng.random() < 0.7 else rng.choice(tags) for tag in sentence] for sentence in wanted]
    scores, report = entity_scores(wanted, predicted), of_entities(wanted, predicted)
    assert report.classes == ("A", "B", "C")
    for kind, measures in report.measures().items():
        assert measures["f1"] == pytest.approx(scores[f"f1_{kind}"])
    assert sum(measures["support"] for measures in report.measures().values()) == report.support.sum()


def test_many_classes_are_shown_by_the_frequent_ones_and_confusions():
    labels = np.repeat(np.arange(100), np.arange(100) + 1)
    report = of_classes([f"class\x1b{i}" for i in range(100)], np.where(labels == 99, 98, labels), labels)
    text = report.text()
    assert "and 80 classes that are rarer" in text and len(text.splitlines()) < 40
    assert "class\\x1b99 for class\\x1b98: 100" in text and "\x1b" not in text
