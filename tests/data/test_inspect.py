"""Tests of batches formatted as text and saved as `.npz` files."""

import os
from unittest.mock import Mock

import numpy as np
import pytest

from bertjax.data.inspection import format_row, write_batches
from bertjax.errors import BertjaxError, UsageError


def test_masked_row_shows_tokens_and_originals(vocabulary):
    cls, sep, mask = vocabulary.cls_id, vocabulary.sep_id, vocabulary.mask_id
    batch = {
        "input_ids": np.array([[cls, 13, mask, sep, 17, 18, sep, 0, 0]]),
        "input_mask": np.array([[1] * 7 + [0] * 2]),
        "segment_ids": np.array([[0] * 4 + [1] * 3 + [0] * 2]),
        "masked_lm_positions": np.array([[2, 4, 5, 0]]),
        "masked_lm_ids": np.array([[20, 30, 18, 0]]),
        "masked_lm_weights": np.array([[1, 1, 1, 0.0]]),
        "next_sentence_labels": np.array([1]),
    }
    assert format_row(batch, 0, vocabulary, ("IsNext", "NotNext")).splitlines() == [
        "7 tokens + 2 padding, 3 predictions",
        "A: [CLS] p13 [MASK]←##p20 [SEP]",
        "B: p17←p30 (random) p18 (kept) [SEP]",
        "label: NotNext",
    ]
    alone = batch | {"segment_ids": np.zeros((1, 9), int), "next_sentence_labels": np.array([-1])}
    assert format_row(alone, 0, vocabulary).splitlines()[2:] == ["label: (none)"]


def test_packed_row_shows_each_pair(vocabulary):
    cls, sep = vocabulary.cls_id, vocabulary.sep_id
    batch = {
        "input_ids": np.array([[cls, 13, sep, 17, sep, cls, 22, sep, 18, 19, sep, 0]]),
        "sequence_ids": np.array([[1] * 5 + [2] * 6 + [0]]),
        "segment_ids": np.array([[0, 0, 0, 1, 1, 0, 0, 0, 1, 1, 1, 0]]),
        "next_sentence_labels": np.array([[0, 1, -1]]),
    }
    assert format_row(batch, 0, vocabulary, ("IsNext", "NotNext")).splitlines() == [
        "11 tokens + 1 padding",
        "sequence 0, 5 tokens",
        "A: [CLS] p13 [SEP]",
        "B: p17 [SEP]",
        "label: IsNext",
        "sequence 1, 6 tokens",
        "A: [CLS] p22 [SEP]",
        "B: p18 p19 [SEP]",
        "label: NotNext",
    ]


def finetuning_batch(vocabulary, **arrays) -> dict[str, np.ndarray]:
    cls, sep = vocabulary.cls_id, vocabulary.sep_id
    return {
        "input_ids": np.array([[cls, 13, sep, 17, 20, sep, 0]]),
        "input_mask": np.array([[1] * 6 + [0]]),
        "segment_ids": np.array([[0] * 3 + [1] * 3 + [0]]),
        "example": np.array([5]),
        "weights": np.array([1.0]),
        **{name: np.array([value]) for name, value in arrays.items()},
    }


ROW = ["6 tokens + 1 padding", "A: [CLS] p13 [SEP]", "B: p17 ##p20 [SEP]"]


@pytest.mark.parametrize(
    ("arrays", "names", "lines"),
    [
        ({"labels": 1}, ("no", "yes"), [*ROW, "label: yes"]),
        ({"labels": -1}, ("no", "yes"), [*ROW, "label: (unknown)"]),
        ({"labels": [1, 0, 1]}, ("a", "b", "c"), [*ROW, "label: a, c"]),
        ({"labels": 2.5}, (), [*ROW, "label: 2.5"]),
        ({"start_positions": 3, "end_positions": 4}, (), [*ROW, "answer: p17 ##p20"]),
        ({"start_positions": 0, "end_positions": 0}, (), [*ROW, "answer: (not in this row)"]),
        (
            {"token_labels": [-1, 0, -1, 1, -1, -1, -1]},
            ("O", "B-X"),
            [ROW[0], "A: [CLS] p13/O [SEP]", "B: p17/B-X ##p20 [SEP]"],
        ),
    ],
    ids=["class", "unlabeled", "labels", "number", "answer", "no answer", "tags"],
)
def test_finetuning_row_shows_labels_tags_and_answers(vocabulary, arrays, names, lines):
    batch = finetuning_batch(vocabulary, **arrays)
    assert format_row(batch, 0, vocabulary, names).splitlines() == lines


def test_multiple_choice_row_shows_every_sequence_and_the_correct_one(vocabulary):
    batch = finetuning_batch(vocabulary, labels=1)
    for name in ("input_ids", "input_mask", "segment_ids"):
        batch[name] = np.stack([batch[name], batch[name]], axis=1)
    batch["input_ids"][0, 1, 1] = 14
    assert format_row(batch, 0, vocabulary).splitlines() == [
        *("12 tokens + 2 padding", "sequence 0, 6 tokens", *ROW[1:]),
        *("sequence 1, 6 tokens", "A: [CLS] p14 [SEP]", ROW[2], "label: sequence 1"),
    ]


def example_batches(seq_len: int, count: int) -> list[dict[str, np.ndarray]]:
    return [{"input_ids": np.full((2, seq_len), step), "labels": np.array([step, 0])} for step in range(count)]


def test_npz_stacks_the_batches_of_each_phase(tmp_path):
    write_batches(iter(example_batches(4, 3)), tmp_path / "one.npz")
    write_batches(example_batches(4, 3) + example_batches(8, 2), tmp_path / "two.npz")
    with np.load(tmp_path / "one.npz") as arrays:
        assert set(arrays) == {"input_ids", "labels"}
        assert arrays["input_ids"].shape == (3, 2, 4)
        np.testing.assert_array_equal(arrays["labels"], [[0, 0], [1, 0], [2, 0]])
    with np.load(tmp_path / "two.npz") as arrays:
        assert {name: arrays[name].shape for name in arrays} == {
            "phase_0/input_ids": (3, 2, 4),
            "phase_0/labels": (3, 2),
            "phase_1/input_ids": (2, 2, 8),
            "phase_1/labels": (2, 2),
        }


def test_npz_replaces_only_files_and_only_if_it_is_complete(tmp_path, monkeypatch):
    pipe, file = tmp_path / "pipe", tmp_path / "batches.npz"
    os.mkfifo(pipe)
    with pytest.raises(UsageError, match="exists and is not a file"):
        write_batches(example_batches(4, 1), pipe)
    file.write_text("old")
    monkeypatch.setattr(np, "savez", Mock(side_effect=OSError(28, "No space left on device")))
    with pytest.raises(BertjaxError, match="batches.npz: No space left"):
        write_batches(example_batches(4, 1), file)
    assert not pipe.is_file() and file.read_text() == "old"
