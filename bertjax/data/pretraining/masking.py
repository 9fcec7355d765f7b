"""Masking whole batches of rows, as TensorFlow graph operations.

B rows of a batch, S tokens a row, P predictions a row, V vocabulary.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from bertjax.data.corpus.tokenizer import Vocabulary
from bertjax.data.pretraining.assembly import Assembled, one_a_row
from bertjax.data.pretraining.config import MASKED_LM_BATCH, Masking, prediction_numbers
from bertjax.data.pretraining.rows import Spans
from bertjax.data.pretraining.source import Prediction

# How many words too long for what is left of a row's predictions are passed over before choosing stops.
_SKIPPED_WORDS = 2


class Masked(NamedTuple):
    """Rows after masking; unused predictions are at the end, all zero.

    Attributes:
      input_ids: int32 [B, S].
      positions: int32 [B, P], ascending.
      ids: int32 [B, P], what stood there.
      weights: float32 [B, P], 1 for a prediction, 0 for an unused one.
    """

    input_ids: tf.Tensor
    positions: tf.Tensor
    ids: tf.Tensor
    weights: tf.Tensor


def uniforms_per_row(seq_len: int, max_predictions: int) -> int:
    """Random numbers `masker` takes for a row."""
    return seq_len + 2 * max_predictions


def masker(
    vocabulary: Vocabulary, masking: Masking, seq_len: int, max_predictions: int
) -> Callable[[tf.Tensor, tf.Tensor, tf.Tensor], Masked]:
    """Makes the function that masks a batch.

    A row of n tokens, special ones included, has min(max_predictions, max(1, round(n * rate))) predictions, as in
    google-research/bert's `create_pretraining_data.py`, or as many as it has tokens to choose from. None of the five
    special tokens is chosen, wherever it stands (the script may choose an [UNK] of the text), and none is drawn as a
    random token (the script draws from the whole vocabulary).

    Whole words (runs of a piece and its continuations) are taken in random order while they fit, never exceeding that
    number. The script passes over any number of words that do not fit, here the choice ends at the third of a row; the
    script also takes a continuation at the start of B for the end of A's last word, here it is a word of its own.

    Returns:
      A function of ids int32 [B, S], row lengths int32 [B] and uniforms float32
      [B, uniforms_per_row] in [0, 1) to `Masked`.
    """
    choose = chooser(vocabulary, masking, seq_len, max_predictions)
    replace = replacer(vocabulary, masking, seq_len)

    def mask(ids: tf.Tensor, lengths: tf.Tensor, uniforms: tf.Tensor) -> Masked:
        choice, others = tf.split(uniforms, [seq_len, 2 * max_predictions], axis=1)
        return replace(ids, choose(ids, lengths, choice), others)

    return mask


def chooser(
    vocabulary: Vocabulary, masking: Masking, seq_len: int, max_predictions: int
) -> Callable[[tf.Tensor, tf.Tensor, tf.Tensor], tf.Tensor]:
    """The first half of `masker`: ids, row lengths and uniforms [B, S] to positions int32 [B, P], S where unused."""
    numbers = prediction_numbers(masking.rate, seq_len, max_predictions)
    is_special = np.zeros(vocabulary.size, bool)
    is_special[list(vocabulary.special_ids)] = True

    def choose(ids: tf.Tensor, lengths: tf.Tensor, uniforms: tf.Tensor) -> tf.Tensor:
        candidates = ~tf.gather(is_special, ids)  # [B, S]
        number = tf.gather(tf.constant(numbers, tf.int32), lengths)  # [B]
        if masking.whole_word:
            continues = tf.gather(vocabulary.is_continuation, ids)
            return _choose_words(candidates, continues, uniforms, number, max_predictions)
        return _choose_tokens(candidates, uniforms, number, max_predictions)

    return choose


def replacer(
    vocabulary: Vocabulary, masking: Masking, seq_len: int
) -> Callable[[tf.Tensor, tf.Tensor, tf.Tensor], Masked]:
    """The second half of `masker`: ids, positions from `chooser` and uniforms [B, 2 P] to `Masked`."""
    is_ordinary = np.ones(vocabulary.size, bool)
    is_ordinary[list(vocabulary.special_ids)] = False
    ordinary_ids = np.flatnonzero(is_ordinary).astype(np.int32)

    def replace(ids: tf.Tensor, positions: tf.Tensor, uniforms: tf.Tensor) -> Masked:
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
        # Unused predictions write back what stands at position 0.
        new_ids = tf.where(used, new_ids, originals)
        flat_positions = positions + seq_len * tf.range(tf.shape(ids)[0])[:, None]
        input_ids = tf.tensor_scatter_nd_update(
            tf.reshape(ids, [-1]), tf.reshape(flat_positions, [-1, 1]), tf.reshape(new_ids, [-1])
        )
        return Masked(
            tf.reshape(input_ids, [-1, seq_len]), positions, tf.where(used, originals, 0), tf.cast(used, tf.float32)
        )

    return replace


def _choose_tokens(candidates: tf.Tensor, uniform: tf.Tensor, number: tf.Tensor, max_predictions: int) -> tf.Tensor:
    """The candidates [B, S] with the largest uniforms, `number` [B] a row; ascending int32 [B, P], S where unused."""
    seq_len = candidates.shape[1]
    values, positions = tf.math.top_k(tf.where(candidates, uniform, -1.0), max_predictions)
    used = (values >= 0) & (tf.range(max_predictions) < number[:, None])
    return -tf.math.top_k(-tf.where(used, positions, seq_len), max_predictions).values


def _choose_words(
    candidates: tf.Tensor, continues: tf.Tensor, uniform: tf.Tensor, number: tf.Tensor, max_predictions: int
) -> tf.Tensor:
    """As `_choose_tokens`, all pieces of a word together."""
    batch, seq_len = tf.shape(candidates)[0], candidates.shape[1]
    after_candidate = tf.pad(candidates[:, :-1], [[0, 0], [1, 0]])
    starts = candidates & ~(continues & after_candidate)
    # Each candidate's word, counted from 0; the words of a row are entries 0, 1, ... of its sizes.
    word = tf.maximum(tf.cumsum(tf.cast(starts, tf.int32), axis=1) - 1, 0)
    first_entry = seq_len * tf.range(batch)[:, None]
    sizes = tf.math.unsorted_segment_sum(
        tf.cast(tf.reshape(candidates, [-1]), tf.int32), tf.reshape(word + first_entry, [-1]), batch * seq_len
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
    taken = (tf.cumsum(ranked_sizes, axis=1) <= limit) & (ranked_sizes > 0)

    taken_words = tf.scatter_nd(
        tf.reshape(order + first_entry, [-1, 1]), tf.cast(tf.reshape(taken, [-1]), tf.int32), [batch * seq_len]
    )
    chosen = candidates & (tf.gather(tf.reshape(taken_words, [-1, seq_len]), word, batch_dims=1) > 0)
    # From the back: top_k of S - position puts the chosen in ascending order and the rest, 0, behind them.
    return seq_len - tf.math.top_k(tf.where(chosen, seq_len - tf.range(seq_len), 0), max_predictions).values


def _maker(
    vocabulary: Vocabulary, masking: Masking, seq_len: int, max_predictions: int
) -> Callable[[Assembled, Spans, tf.Tensor], dict[str, tf.Tensor]]:
    mask = masker(vocabulary, masking, seq_len, max_predictions)

    def make(assembled: Assembled, spans: Spans, uniforms: tf.Tensor) -> dict[str, tf.Tensor]:
        masked = mask(assembled.ids, assembled.lengths, uniforms)
        return {**one_a_row(assembled), **fields_of(masked), "next_sentence_labels": tf.cast(spans.label, tf.int32)}

    return make


def fields_of(masked: Masked) -> dict[str, tf.Tensor]:
    """The fields of a batch that masking makes."""
    return {
        "input_ids": masked.input_ids,
        "masked_lm_positions": masked.positions,
        "masked_lm_ids": masked.ids,
        "masked_lm_weights": masked.weights,
    }


MASKED_LM = Prediction(MASKED_LM_BATCH, lambda masking, *sizes: uniforms_per_row(*sizes), _maker)
