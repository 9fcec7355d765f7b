"""From spans of the corpus to rows of tokens, a whole batch at a time.

B rows of a batch, S tokens a row.
"""

from typing import NamedTuple

import tensorflow as tf

from bertjax.data.corpus.tokenizer import Vocabulary
from bertjax.data.pretraining.rows import Spans

_EXACT_BITS = 64


class Assembled(NamedTuple):
    """Rows of one span each, with their special tokens and padding.

    Attributes:
      ids: int32 [B, S].
      segment_ids: int32 [B, S], 1 for B and the [SEP] after it.
      lengths: int32 [B].
    """

    ids: tf.Tensor
    segment_ids: tf.Tensor
    lengths: tf.Tensor


def truncated(spans: Spans, room: int, bits: tf.Tensor) -> Spans:
    """Cuts pairs to `room` tokens as `truncate_seq_pair` of google-research/bert's script does; others stay.

    The script drops one token at a time from the longer of A and B, from B where they are equal, and from the front or
    the back with probability 1/2 each. So the lengths left have a closed form, and the number of tokens lost in front
    is binomial.

    Args:
      spans: of B rows.
      room: tokens A and B may have together.
      bits: uint64 [B, 2], uniform.
    """
    a_kept = tf.minimum(spans.a_length, tf.maximum(room - spans.b_length, (room + 1) // 2))
    b_kept = tf.minimum(spans.b_length, tf.maximum(room - spans.a_length, room // 2))
    return spans._replace(
        a_start=spans.a_start + _lost_in_front(spans.a_length - a_kept, bits[:, 0]),
        a_length=a_kept,
        b_start=spans.b_start + _lost_in_front(spans.b_length - b_kept, bits[:, 1]),
        b_length=b_kept,
    )


def _lost_in_front(lost: tf.Tensor, bits: tf.Tensor) -> tf.Tensor:
    """Binomial(lost, 1/2), int64 [B]: the ones among `lost` random bits; the rounded normal where 64 are too few."""
    used_bits = tf.bitwise.right_shift(bits, tf.cast(_EXACT_BITS - tf.clip_by_value(lost, 1, _EXACT_BITS), tf.uint64))
    exact = tf.where(lost > 0, tf.cast(tf.raw_ops.PopulationCount(x=used_bits), tf.int64), 0)
    # The 53 bits that a float64 holds, and a half so that it is never 0.
    high_bits = tf.cast(tf.bitwise.right_shift(bits, tf.constant(11, tf.uint64)), tf.int64)
    uniform = (tf.cast(high_bits, tf.float64) + 0.5) * 2.0**-53
    number = tf.cast(lost, tf.float64)
    normal = tf.cast(tf.round(number / 2 + tf.sqrt(number) / 2 * tf.math.ndtri(uniform)), tf.int64)
    return tf.where(lost <= _EXACT_BITS, exact, tf.clip_by_value(normal, 0, lost))


def assembled(tokens: tf.Tensor, spans: Spans, seq_len: int, vocabulary: Vocabulary, paired: bool) -> Assembled:
    """Rows of [CLS] A [SEP] B [SEP] and [PAD] if paired, of [CLS] A [SEP] and [PAD] else.

    Args:
      tokens: [tokens], any integer type.
      spans: of B rows, with room for the special tokens. Without pairs they may run over the end of `tokens` and go on
        at its start.
      seq_len: S.
      vocabulary: has the ids of the special tokens.
      paired: whether rows have a B.
    """
    position = tf.range(seq_len)
    a_length = tf.cast(spans.a_length, tf.int32)[:, None]  # [B, 1]
    a_end = a_length + 1
    last = a_end + tf.cast(spans.b_length, tf.int32)[:, None] + 1 if paired else a_end

    is_text = (position > 0) & (position != a_end) & (position < last)  # [B, S]
    a_first, b_first = spans.a_start - 1, spans.b_start - spans.a_length - 2
    index = tf.where(position <= a_length, a_first[:, None], b_first[:, None]) + tf.range(seq_len, dtype=tf.int64)
    index = tf.where(is_text, index, 0)
    if not paired:
        size = tf.shape(tokens, tf.int64)[0]
        index = tf.where(index < size, index, index - size)
    special = tf.where(position == 0, vocabulary.cls_id, vocabulary.pad_id)
    special = tf.where((position == a_end) | (position == last), vocabulary.sep_id, special)
    ids = tf.where(is_text, tf.cast(tf.gather(tokens, index), tf.int32), special)
    segment_ids = tf.cast((position > a_end) & (position <= last), tf.int32)
    return Assembled(ids, segment_ids, last[:, 0] + 1)


def one_a_row(rows: Assembled) -> dict[str, tf.Tensor]:
    """What a batch has besides its tokens where each span is a row."""
    length = tf.shape(rows.ids)[1]
    return {
        "input_mask": tf.cast(tf.range(length) < rows.lengths[:, None], tf.int32),
        "segment_ids": rows.segment_ids,
    }
