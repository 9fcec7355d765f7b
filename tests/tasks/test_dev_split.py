"""Tests of fractions of training data, and of dev splits, which keep documents together and ignore the file's order."""

import numpy as np
import pytest

from bertjax.data.finetuning.examples import make_examples
from bertjax.data.finetuning.tables import ReadStats
from bertjax.data.finetuning.tagged import TaggedText
from bertjax.tasks.finetuning.config import FinetuningData
from bertjax.tasks.finetuning.splits import divide, sample_fraction, select_dev_rows


def texts(count):
    return [f"text {index}".encode() for index in range(count)]


def test_dev_rows_depend_on_contents_and_seed_but_not_on_row_order():
    contents = texts(200)
    mask = select_dev_rows(contents, 0.1, 3)
    assert mask.sum() == 20
    order = np.random.default_rng(0).permutation(200)
    np.testing.assert_array_equal(select_dev_rows([contents[i] for i in order], 0.1, 3), mask[order])
    assert (select_dev_rows(contents, 0.1, 4) != mask).any()
    # An appended row changes the selection of at most two other rows.
    assert (select_dev_rows([*contents, b"more"], 0.1, 3)[:200] != mask).sum() <= 2


def test_equal_rows_are_all_in_training_or_all_in_dev():
    contents = texts(20) * 5
    mask = select_dev_rows(contents, 0.3, 0)
    assert mask.sum() == 30
    dev, training = ({c for c, m in zip(contents, mask, strict=True) if m == side} for side in (True, False))
    assert not dev & training


@pytest.mark.parametrize("fraction, rows", [(0.1, 3), (0.5, 15), (0.001, 1), (0.99, 30)])
def test_number_of_dev_rows_is_the_rounded_fraction_and_at_least_one(fraction, rows):
    assert select_dev_rows(texts(30), fraction, 0).sum() == rows


def test_sample_fraction_is_deterministic_and_keeps_at_least_one_row():
    assert sample_fraction(10, 1.0).tolist() == list(range(10))
    expected = np.random.default_rng(0).permutation(10)[:3]
    assert sample_fraction(10, 0.3).tolist() == sorted(expected)
    assert len(sample_fraction(10, 0.001)) == 1
    # In float64, 100 * 0.29 is less than 29.
    assert [len(sample_fraction(100, fraction)) for fraction in (0.29, 0.57, 0.58)] == [29, 57, 58]


@pytest.mark.parametrize("sequences_per_example", [1, 2])
def test_subset_has_the_requested_examples(sequences_per_example):
    sequences = [
        {"input_ids": [i] * (i + 2), "segment_ids": [0] * (i + 1) + [1]} for i in range(6 * sequences_per_example)
    ]
    examples = make_examples(sequences, {"labels": np.arange(6)}, sequences_per_example, range(2, 8))
    part = examples.subset(np.array([4, 1]))
    assert part.rows["labels"].tolist() == [4, 1] and part.lines == (6, 3)
    expected = [sequences[i * sequences_per_example + c] for i in (4, 1) for c in range(sequences_per_example)]
    assert part.tokens["input_ids"].tolist() == [token for row in expected for token in row["input_ids"]]
    assert np.diff(part.offsets).tolist() == [len(row["input_ids"]) for row in expected] and len(part) == 2
    firsts = [np.frombuffer(text, np.int32).tolist() for text in examples.texts()]
    assert firsts == [[i * sequences_per_example] * (i * sequences_per_example + 1) for i in range(6)]
    assert examples.subset(np.arange(6)).fingerprint() == examples.fingerprint()


def tagged(documents):
    return TaggedText([["a", "b"], ["c"], [], ["d"]], [["O", "O"], ["O"], [], ["B"]], documents, [1, 4, 6, 7])


@pytest.mark.parametrize(
    "documents, by_document, sizes",
    [
        # The dev set is one of two documents. If there is only one document, it consists of sentences.
        ([0, 0, 0, 2], True, {1, 3}),
        ([1, 1, 1, 1], True, {2}),
        (range(4), False, {2}),
    ],
)
def test_tagged_text_is_divided_by_document(documents, by_document, sizes):
    stats = [ReadStats("file", read=4)]
    train, dev = divide(FinetuningData(dev_share=0.5), tagged(documents), stats, by_document)
    assert {len(train), len(dev)} == sizes and [stats[0].used, stats[1].used] == [len(train), len(dev)]
    assert sorted([*train.lines, *dev.lines]) == [1, 4, 6, 7]
    for part in (train, dev):
        assert part == tagged(documents).subset([[1, 4, 6, 7].index(line) for line in part.lines])


@pytest.mark.parametrize("by_document, lines", [(True, [1, 4, 6]), (False, [1, 6])])
def test_share_of_tagged_text_consists_of_documents_or_sentences(by_document, lines):
    stats = [ReadStats("file", read=4)]
    train, dev = divide(FinetuningData(train_share=0.5), tagged([0, 0, 0, 2]), stats, by_document)
    assert train.lines == lines and dev is None and [each.used for each in stats] == [len(train)]
