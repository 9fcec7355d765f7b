"""Truncation of pairs and assembly of rows."""

from collections import Counter

import numpy as np
import tensorflow as tf
from small_corpora import write_pieces

from bertjax.data.corpus.vocabulary import load_vocabulary
from bertjax.data.pretraining.rows import Spans, assemble_rows, truncate_pairs


def spans(a_start, a_length, b_start, b_length, label=0) -> Spans:
    columns = np.broadcast_arrays(a_start, a_length, b_start, b_length, label)
    return Spans(*(tf.constant(np.ravel(column), tf.int64) for column in columns))


def random_bits(rows: int) -> tf.Tensor:
    return tf.constant(np.random.default_rng(0).integers(0, 2**64, (rows, 2), np.uint64))


def test_truncated_lengths_equal_dropping_one_token_at_a_time():
    room = 21
    a, b = np.meshgrid(np.arange(1, 60), np.arange(1, 60))
    cut = truncate_pairs(spans(1000, a, 2000, b), room, random_bits(a.size))
    for a_length, b_length, a_kept, b_kept in zip(
        a.flat, b.flat, cut.a_length.numpy(), cut.b_length.numpy(), strict=True
    ):
        while a_length + b_length > room:
            if a_length > b_length:
                a_length -= 1
            else:
                b_length -= 1
        assert (a_kept, b_kept) == (a_length, b_length)
    # A truncated span lies inside the original span.
    for start, first, length, kept in ((cut.a_start, 1000, a, cut.a_length), (cut.b_start, 2000, b, cut.b_length)):
        front = start.numpy() - first
        assert front.min() == 0
        assert (front + kept.numpy() <= length.ravel()).all()


def test_number_of_tokens_dropped_from_the_front_is_binomial():
    rows, room = 20_000, 21
    for lost in (3, 64, 65, 400):
        cut = truncate_pairs(spans(0, 20 + lost, 10_000, 1), room, random_bits(rows))
        front = cut.a_start.numpy()
        assert abs(front.mean() - lost / 2) < 5 * np.sqrt(lost / 4 / rows)
        assert abs(front.var() / (lost / 4) - 1) < 0.06
        if lost == 3:
            counts = Counter(front.tolist())
            np.testing.assert_allclose([counts[n] / rows for n in range(4)], [1 / 8, 3 / 8, 3 / 8, 1 / 8], atol=0.015)
    # Segments A and B are truncated independently.
    cut = truncate_pairs(spans(0, 50, 1000, 50), 20, random_bits(rows))
    assert abs(np.corrcoef(cut.a_start, cut.b_start)[0, 1]) < 0.03


def test_rows_have_special_tokens_segments_and_padding(tmp_path):
    vocabulary = load_vocabulary(write_pieces(tmp_path / "vocab.txt", 200))
    tokens = tf.range(100, 130)
    pad, cls, sep = vocabulary.pad_id, vocabulary.cls_id, vocabulary.sep_id
    rows = spans([2, 0], [3, 4], [20, 10], [2, 3])
    made = assemble_rows(tokens, rows, 10, vocabulary, paired=True)
    assert made.ids.numpy().tolist() == [
        [cls, 102, 103, 104, sep, 120, 121, sep, pad, pad],
        [cls, 100, 101, 102, 103, sep, 110, 111, 112, sep],
    ]
    assert made.segment_ids.numpy().tolist() == [[0, 0, 0, 0, 0, 1, 1, 1, 0, 0], [0, 0, 0, 0, 0, 0, 1, 1, 1, 1]]
    assert made.lengths.numpy().tolist() == [[8], [10]]

    made = assemble_rows(tokens, spans([27, 5], [8, 2], 0, 0, -1), 10, vocabulary, paired=False)
    assert made.ids.numpy().tolist() == [
        [cls, 127, 128, 129, 100, 101, 102, 103, 104, sep],
        [cls, 105, 106, sep, pad, pad, pad, pad, pad, pad],
    ]
    assert not made.segment_ids.numpy().any()
    assert made.lengths.numpy().tolist() == [[10], [4]]


def test_packed_rows_have_one_span_after_the_other(tmp_path):
    vocabulary = load_vocabulary(write_pieces(tmp_path / "vocab.txt", 200))
    pad, cls, sep = vocabulary.pad_id, vocabulary.cls_id, vocabulary.sep_id
    packed = spans([2, 20, 7], [3, 1, 2], 0, 0, [-1, 1, 0])._replace(slots=tf.constant([0, 1, 3], tf.int64))
    made = assemble_rows(tf.range(100, 130), packed, 9, vocabulary, paired=False, spans_per_row=3)
    assert {name: tensor.numpy().tolist() for name, tensor in made._asdict().items()} == {
        "ids": [[cls, 102, 103, 104, sep, cls, 120, sep, pad], [cls, 107, 108, sep, pad, pad, pad, pad, pad]],
        "segment_ids": [[0] * 9, [0] * 9],
        "sequence_ids": [[1, 1, 1, 1, 1, 2, 2, 2, 0], [1, 1, 1, 1, 0, 0, 0, 0, 0]],
        "position_ids": [[0, 1, 2, 3, 4, 0, 1, 2, 0], [0, 1, 2, 3, 0, 0, 0, 0, 0]],
        "starts": [[0, 0, 0, 0, 0, 5, 5, 5, 5], [0] * 9],
        "lengths": [[5, 5, 5, 5, 5, 3, 3, 3, 3], [4] * 9],
        "labels": [[-1, 1, -1], [0, -1, -1]],
    }
