"""Shares of training data: whole units, the same ones whatever the order of the file."""

import numpy as np
import pytest

from bertjax.data.finetuning.dev_split import (
    first_texts,
    held_out,
    share_of,
    subset,
    subset_of_tagged,
    unit_texts,
    units,
)
from bertjax.data.finetuning.examples import make_examples
from bertjax.data.finetuning.tagged import Tagged


def texts(count):
    return [f"text {index}".encode() for index in range(count)]


def test_what_is_held_out_depends_on_contents_and_seed_and_not_on_their_order():
    contents = texts(200)
    held = held_out(contents, 0.1, 3)
    assert held.sum() == 20
    order = np.random.default_rng(0).permutation(200)
    np.testing.assert_array_equal(held_out([contents[i] for i in order], 0.1, 3), held[order])
    assert (held_out(contents, 0.1, 4) != held).any()
    # More rows at the end change what is taken of the others by little: it is not drawn anew.
    assert (held_out([*contents, b"more"], 0.1, 3)[:200] != held).sum() <= 2


def test_rows_of_equal_content_are_on_one_side():
    contents = texts(20) * 5
    held = held_out(contents, 0.3, 0)
    assert held.sum() == 30
    assert not {c for c, h in zip(contents, held, strict=True) if h} & {
        c for c, h in zip(contents, held, strict=True) if not h
    }


@pytest.mark.parametrize("share, rows", [(0.1, 3), (0.5, 15), (0.001, 1), (0.99, 30)])
def test_the_share_is_reached_and_no_more(share, rows):
    assert held_out(texts(30), share, 0).sum() == rows


def test_a_share_to_train_on_is_the_same_for_every_run_and_at_least_one():
    assert share_of(10, 1.0).tolist() == list(range(10))
    chosen = np.random.default_rng(0).permutation(10)[:3]
    assert share_of(10, 0.3).tolist() == sorted(chosen)
    assert len(share_of(10, 0.001)) == 1
    # Products that no float64 has.
    assert [len(share_of(100, share)) for share in (0.29, 0.57, 0.58)] == [29, 57, 58]


@pytest.mark.parametrize("choices", [1, 2])
def test_a_subset_has_the_examples_it_was_asked_for(choices):
    sequences = [{"input_ids": [i] * (i + 2), "segment_ids": [0] * (i + 1) + [1]} for i in range(6 * choices)]
    examples = make_examples(sequences, {"labels": np.arange(6)}, choices, range(2, 8))
    part = subset(examples, np.array([4, 1]))
    assert part.rows["labels"].tolist() == [4, 1] and part.choices == choices and part.lines == (6, 3)
    wanted = [sequences[i * choices + c] for i in (4, 1) for c in range(choices)]
    assert part.tokens["input_ids"].tolist() == [token for row in wanted for token in row["input_ids"]]
    assert np.diff(part.offsets).tolist() == [len(row["input_ids"]) for row in wanted]
    firsts = [np.frombuffer(text, np.int32).tolist() for text in first_texts(examples)]
    assert firsts == [[i * choices] * (i * choices + 1) for i in range(6)]
    whole = subset(examples, np.arange(6))
    assert whole.fingerprint() == examples.fingerprint()


WORDS = list("abcdefgh")
DOCUMENTS = Tagged(WORDS, ["O"] * 8, [2, 3, 5, 8], [3, 8], (1, 4, 7, 10))


def test_documents_stay_whole_and_without_any_sentences_do():
    ends = units(DOCUMENTS, documents=True)
    assert unit_texts(DOCUMENTS, ends) == [b"a\nb\nc", b"d\ne\nf\ng\nh"]
    second = subset_of_tagged(DOCUMENTS, ends, np.array([False, True]))
    assert second == Tagged(list("defgh"), ["O"] * 5, [2, 5], [5], (7, 10))
    # Sentences where rows are sentences, or where all are in one document.
    ends = units(DOCUMENTS, documents=False)
    some = subset_of_tagged(DOCUMENTS, ends, np.array([True, False, False, True]))
    assert some == Tagged(list("abfgh"), ["O"] * 5, [2, 5], [2, 5], (1, 10))
    alone = Tagged(WORDS, ["O"] * 8, [2, 8], [8])
    assert units(alone, documents=True) == [2, 8]


def test_rows_without_words_stay_rows():
    ends = [1, 1, 3]
    part = subset_of_tagged(Tagged(["a", "b", "c"], [""] * 3, ends, ends), ends, np.array([False, True, True]))
    assert part == Tagged(["b", "c"], [""] * 2, [0, 2], [0, 2])
