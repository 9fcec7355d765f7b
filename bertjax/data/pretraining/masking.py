"""Masking of token rows, as TensorFlow graph operations.

Axes: B rows, L tokens per row, P predictions per row, V vocabulary.
"""

from typing import Any

import numpy as np
import tensorflow as tf

from bertjax.data.corpus.vocabulary import Vocabulary
from bertjax.data.pretraining.config import Masking, num_predictions

# Probability that a span of words ends after a word, which makes the number of words geometric (SpanBERT, section 3.1).
_SPAN_END_PROBABILITY = 0.2
# Maximum number of words or spans per row that masking skips because they need more predictions than remain.
_SKIPPED_WORDS = 2


def choose_positions(
    ids: tf.Tensor,
    lengths: tf.Tensor,
    uniforms: tf.Tensor,
    vocabulary: Vocabulary,
    masking: Masking,
    max_predictions: int,
) -> tf.Tensor:
    """Chooses the positions to predict, int32 [B, P], where P is `max_predictions`.

    `ids` are int32 [B, L], `lengths` (tokens per row) int32 [B], and `uniforms` float32 [B, L] in [0, 1). The positions
    of a row ascend. Unused elements are at the end and equal L, which is not a valid position.

    A row of n tokens, special tokens included, has min(max_predictions, max(1, round(n * rate))) predictions, as in
    google-research/bert `create_pretraining_data.py`. If the row has fewer non-special tokens, all of them are
    predicted. Special tokens are never masked. In contrast, google-research/bert may mask an [UNK] of the text.

    Whole-word masking chooses words (a piece and its continuations) in random order. It skips up to two words that need
    more predictions than remain, and stops at the third. google-research/bert skips all such words. A continuation
    piece at the start of segment B is a separate word. google-research/bert adds it to A's last word.
    """
    seq_len: Any = ids.shape[1]
    numbers = num_predictions(masking.rate, seq_len, max_predictions)
    number = tf.gather(tf.constant(numbers, tf.int32), lengths)  # [B]
    candidates = tf.gather(_is_ordinary(vocabulary), ids)  # [B, L]
    if not masking.whole_word and masking.max_span == 1:
        return _choose_tokens(candidates, uniforms, number, max_predictions)
    after_candidate = tf.pad(candidates[:, :-1], [[0, 0], [1, 0]])
    starts = candidates & ~(tf.gather(vocabulary.is_continuation, ids) & after_candidate)
    if masking.max_span > 1:
        starts = _span_starts(starts, starts & ~after_candidate, uniforms, masking.max_span)
    return _choose_groups(candidates, starts, uniforms, number, max_predictions)


def replace_tokens(
    ids: tf.Tensor, positions: tf.Tensor, uniforms: tf.Tensor, vocabulary: Vocabulary, masking: Masking
) -> dict[str, tf.Tensor]:
    """Replaces each token at `positions` of `choose_positions` by [MASK] or a random token, or keeps it.

    `ids` are int32 [B, L], and `uniforms` float32 [B, 2 P] in [0, 1). Special tokens are never drawn as random
    replacements. google-research/bert draws from the entire vocabulary. Returns the arrays `input_ids`, int32 [B, L],
    and `masked_lm_*`, [B, P], of `train_dataset`. The latter are 0 for unused predictions.
    """
    seq_len = ids.shape[1]
    ordinary_ids = np.flatnonzero(_is_ordinary(vocabulary)).astype(np.int32)
    action, replacement = tf.split(uniforms, 2, axis=1)
    used = positions < seq_len
    positions = tf.where(used, positions, 0)
    originals = tf.gather(ids, positions, batch_dims=1)  # [B, P]

    random_ids = tf.gather(ordinary_ids, tf.cast(replacement * float(ordinary_ids.size), tf.int32))
    new_ids = tf.where(
        action < masking.mask_prob,
        vocabulary.mask_id,
        tf.where(action < masking.mask_prob + masking.keep_prob, originals, random_ids),
    )
    # Unused predictions write the original token at position 0, which changes nothing.
    new_ids = tf.where(used, new_ids, originals)
    flat_positions = positions + seq_len * tf.range(tf.shape(ids)[0])[:, None]
    input_ids = tf.tensor_scatter_nd_update(
        tf.reshape(ids, [-1]), tf.reshape(flat_positions, [-1, 1]), tf.reshape(new_ids, [-1])
    )
    return {
        "input_ids": tf.reshape(input_ids, [-1, seq_len]),
        "masked_lm_positions": positions,
        "masked_lm_ids": tf.where(used, originals, 0),
        "masked_lm_weights": tf.cast(used, tf.float32),
    }


def _is_ordinary(vocabulary: Vocabulary) -> np.ndarray:
    """Returns a mask of the pieces that are not special, bool [V]."""
    is_ordinary = np.ones(vocabulary.size, bool)
    is_ordinary[[*vocabulary.special_ids, *vocabulary.other_special_ids]] = False
    return is_ordinary


def _choose_tokens(candidates: tf.Tensor, uniform: tf.Tensor, number: tf.Tensor, max_predictions: int) -> tf.Tensor:
    """Returns the positions of the candidates with the largest values of `uniform`, int32 [B, P].

    `number` [B] is the maximum number of positions in each row. The positions of a row ascend. Unused elements are L.
    """
    seq_len = candidates.shape[1]
    values, positions = tf.math.top_k(tf.where(candidates, uniform, -1.0), max_predictions)
    used = (values >= 0) & (tf.range(max_predictions) < number[:, None])
    return -tf.math.top_k(-tf.where(used, positions, seq_len), max_predictions).values


def _span_starts(starts: tf.Tensor, after_special: tf.Tensor, uniform: tf.Tensor, max_span: int) -> tf.Tensor:
    """Divides each row into spans of words of geometric length, at most `max_span`. Returns their starts, bool [B, L].

    `starts` marks the starts of words, and `after_special` the starts after a special token, where a span ends.
    """
    seq_len: Any = starts.shape[1]
    # `_choose_groups` orders spans by the high bits of `uniform`, so the low bits are independent of the order.
    low_bits = tf.math.floormod(uniform * 1024.0, 1.0)
    ends_before = starts & ((low_bits < _SPAN_END_PROBABILITY) | after_special)
    word, span = (tf.cumsum(tf.cast(mask, tf.int32), axis=1) for mask in (starts, ends_before))
    # Divide spans that are longer than `max_span`.
    rows = (seq_len + 1) * tf.range(tf.shape(starts)[0])[:, None]
    count = (seq_len + 1) * tf.shape(starts)[0]
    first_word = tf.math.unsorted_segment_min(tf.reshape(word, [-1]), tf.reshape(span + rows, [-1]), count)
    return starts & (tf.math.floormod(word - tf.gather(first_word, span + rows), max_span) == 0)


def _choose_groups(
    candidates: tf.Tensor, starts: tf.Tensor, uniform: tf.Tensor, number: tf.Tensor, max_predictions: int
) -> tf.Tensor:
    """Chooses candidates like `_choose_tokens`, but either all tokens of a group, such as a word, or none.

    `starts`, bool [B, L], marks the first token of each group.
    """
    batch = tf.shape(candidates)[0]
    seq_len: Any = candidates.shape[1]
    # `word` is the index of each candidate's group in its row, `sizes` the number of tokens of each group.
    word = tf.maximum(tf.cumsum(tf.cast(starts, tf.int32), axis=1) - 1, 0)
    first_index = seq_len * tf.range(batch)[:, None]
    sizes = tf.math.unsorted_segment_sum(
        tf.cast(tf.reshape(candidates, [-1]), tf.int32), tf.reshape(word + first_index, [-1]), batch * seq_len
    )
    sizes = tf.reshape(sizes, [-1, seq_len])

    ranks = min(seq_len, max_predictions + _SKIPPED_WORDS)
    order = tf.math.top_k(tf.where(sizes > 0, uniform, -1.0), ranks).indices  # [B, ranks]
    ranked_sizes = tf.gather(sizes, order, batch_dims=1)
    limit = number[:, None]
    for _ in range(_SKIPPED_WORDS):
        too_long = (tf.cumsum(ranked_sizes, axis=1) > limit) & (ranked_sizes > 0)
        first_too_long = too_long & (tf.cumsum(tf.cast(too_long, tf.int32), axis=1) == 1)
        ranked_sizes = tf.where(first_too_long, 0, ranked_sizes)
    chosen_ranks = (tf.cumsum(ranked_sizes, axis=1) <= limit) & (ranked_sizes > 0)

    chosen_words = tf.scatter_nd(
        tf.reshape(order + first_index, [-1, 1]), tf.cast(tf.reshape(chosen_ranks, [-1]), tf.int32), [batch * seq_len]
    )
    chosen = candidates & (tf.gather(tf.reshape(chosen_words, [-1, seq_len]), word, batch_dims=1) > 0)
    # Sort the chosen positions in ascending order, followed by L in unused elements.
    return seq_len - tf.math.top_k(tf.where(chosen, seq_len - tf.range(seq_len), 0), max_predictions).values
