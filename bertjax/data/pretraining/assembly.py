"""Assembly of token rows from spans (token ranges of the corpus), one batch at a time.

Axes: B rows, S tokens per row.
"""

from typing import NamedTuple

import tensorflow as tf

from bertjax.data.corpus.vocabulary import Vocabulary
from bertjax.data.pretraining.rows import Spans

_EXACT_BITS = 64


class TokenRows(NamedTuple):
    """Token rows with special tokens and padding, one span per row.

    Attributes:
      ids: token ids, int32 [B, S].
      segment_ids: 1 for B and the [SEP] after it, else 0, int32 [B, S].
      lengths: number of tokens without padding, int32 [B].
    """

    ids: tf.Tensor
    segment_ids: tf.Tensor
    lengths: tf.Tensor


def truncate_pairs(spans: Spans, max_tokens: int, bits: tf.Tensor) -> Spans:
    """Truncates pairs as `truncate_seq_pair` of google-research/bert `create_pretraining_data.py` does.

    `truncate_seq_pair` drops one token at a time from the longer of A and B, or from B if they are equally long. Each
    token is dropped from the front or the back with probability 1/2. Hence the remaining lengths have a closed form,
    and the number of tokens dropped from the front is binomial.

    Args:
      spans: spans of B rows.
      max_tokens: maximum tokens of A and B together.
      bits: uniform random bits, uint64 [B, 2].
    """
    a_length = tf.minimum(spans.a_length, tf.maximum(max_tokens - spans.b_length, (max_tokens + 1) // 2))
    b_length = tf.minimum(spans.b_length, tf.maximum(max_tokens - spans.a_length, max_tokens // 2))
    return spans._replace(
        a_start=spans.a_start + _dropped_from_front(spans.a_length - a_length, bits[:, 0]),
        a_length=a_length,
        b_start=spans.b_start + _dropped_from_front(spans.b_length - b_length, bits[:, 1]),
        b_length=b_length,
    )


def _dropped_from_front(dropped: tf.Tensor, bits: tf.Tensor) -> tf.Tensor:
    """Draws from Binomial(dropped, 1/2), int64 [B]. Above 64 trials, uses the normal approximation."""
    used_bits = tf.bitwise.right_shift(
        bits, tf.cast(_EXACT_BITS - tf.clip_by_value(dropped, 1, _EXACT_BITS), tf.uint64)
    )
    exact = tf.where(dropped > 0, tf.cast(tf.raw_ops.PopulationCount(x=used_bits), tf.int64), 0)
    # A float64 has 53 significant bits. Adding 0.5 avoids 0.
    high_bits = tf.cast(tf.bitwise.right_shift(bits, tf.constant(11, tf.uint64)), tf.int64)
    uniform = (tf.cast(high_bits, tf.float64) + 0.5) * 2.0**-53
    number = tf.cast(dropped, tf.float64)
    normal = tf.cast(tf.round(number / 2 + tf.sqrt(number) / 2 * tf.math.ndtri(uniform)), tf.int64)
    return tf.where(dropped <= _EXACT_BITS, exact, tf.clip_by_value(normal, 0, dropped))


def assemble_rows(tokens: tf.Tensor, spans: Spans, seq_len: int, vocabulary: Vocabulary, paired: bool) -> TokenRows:
    """Assembles rows `[CLS] A [SEP] B [SEP]`, or `[CLS] A [SEP]` if not `paired`, and pads the rows with [PAD].

    Args:
      tokens: tokens of the corpus, any integer type.
      spans: spans of B rows, with room for the special tokens. If not `paired`, a span may wrap around the end of
        `tokens`.
      seq_len: S, tokens per row.
      vocabulary: vocabulary with the ids of the special tokens.
      paired: whether rows have a segment B.
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
    return TokenRows(ids, segment_ids, last[:, 0] + 1)


def mask_and_segments(rows: TokenRows) -> dict[str, tf.Tensor]:
    """Returns the batch arrays `input_mask` and `segment_ids`."""
    length = tf.shape(rows.ids)[1]
    return {
        "input_mask": tf.cast(tf.range(length) < rows.lengths[:, None], tf.int32),
        "segment_ids": rows.segment_ids,
    }
