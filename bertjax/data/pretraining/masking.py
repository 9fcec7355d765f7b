"""Masking of token rows, as TensorFlow graph operations.

Axes: B rows, S tokens per row, P predictions per row, V vocabulary.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from bertjax.data.corpus.vocabulary import Vocabulary
from bertjax.data.pretraining.config import Masking, predictions_by_length

# Maximum number of words per row that whole-word masking skips because they need more predictions than remain.
_SKIPPED_WORDS = 2


class Masked(NamedTuple):
    """Rows after masking. Unused predictions are zero and come last.

    Attributes:
      input_ids: token ids after masking, int32 [B, S].
      positions: predicted positions, int32 [B, P], ascending.
      ids: original token ids at `positions`, int32 [B, P].
      weights: 1 for predictions, 0 for unused predictions, float32 [B, P].
    """

    input_ids: tf.Tensor
    positions: tf.Tensor
    ids: tf.Tensor
    weights: tf.Tensor


def num_uniforms(seq_len: int, max_predictions: int) -> int:
    """Returns the number of random numbers that `make_masker` needs per row."""
    return seq_len + 2 * max_predictions


def make_masker(
    vocabulary: Vocabulary, masking: Masking, seq_len: int, max_predictions: int
) -> Callable[[tf.Tensor, tf.Tensor, tf.Tensor], Masked]:
    """Returns a function that masks a batch.

    A row of n tokens, special tokens included, has min(max_predictions, max(1, round(n * rate))) predictions, as in
    google-research/bert `create_pretraining_data.py`. A row with fewer ordinary tokens has fewer predictions. Special
    tokens are never masked and never drawn as random replacements. In contrast, google-research/bert may mask an [UNK]
    of the text and draws replacements from the entire vocabulary.

    Whole-word masking chooses words (a piece and its continuations) in random order. It skips up to two words that need
    more predictions than remain, and stops at the third. google-research/bert skips all such words. A continuation
    piece at the start of segment B is a separate word. google-research/bert adds it to A's last word.

    Returns:
      A function (ids int32 [B, S], row lengths int32 [B], uniforms in [0, 1) float32 [B, num_uniforms]) -> `Masked`.
    """
    choose = make_chooser(vocabulary, masking, seq_len, max_predictions)
    replace = make_replacer(vocabulary, masking, seq_len)

    def mask(ids: tf.Tensor, lengths: tf.Tensor, uniforms: tf.Tensor) -> Masked:
        choice, others = tf.split(uniforms, [seq_len, 2 * max_predictions], axis=1)
        return replace(ids, choose(ids, lengths, choice), others)

    return mask


def make_chooser(
    vocabulary: Vocabulary, masking: Masking, seq_len: int, max_predictions: int
) -> Callable[[tf.Tensor, tf.Tensor, tf.Tensor], tf.Tensor]:
    """Returns a function from (ids, row lengths, uniforms [B, S]) to the positions to mask, int32 [B, P].

    The positions of a row ascend. Unused elements are at the end and equal S, which is not a valid position.
    """
    numbers = predictions_by_length(masking.rate, seq_len, max_predictions)
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


def make_replacer(
    vocabulary: Vocabulary, masking: Masking, seq_len: int
) -> Callable[[tf.Tensor, tf.Tensor, tf.Tensor], Masked]:
    """Returns a function from (ids, positions to mask, uniforms [B, 2 P]) to `Masked`."""
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
        # Unused predictions write the original token at position 0, which changes nothing.
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
    """Returns the positions of the `number` [B] candidates with the largest uniforms, ascending, int32 [B, P].

    Unused elements are S.
    """
    seq_len = candidates.shape[1]
    values, positions = tf.math.top_k(tf.where(candidates, uniform, -1.0), max_predictions)
    used = (values >= 0) & (tf.range(max_predictions) < number[:, None])
    return -tf.math.top_k(-tf.where(used, positions, seq_len), max_predictions).values


def _choose_words(
    candidates: tf.Tensor, continues: tf.Tensor, uniform: tf.Tensor, number: tf.Tensor, max_predictions: int
) -> tf.Tensor:
    """Chooses candidates like `_choose_tokens`, but either all pieces of a word or none."""
    batch = tf.shape(candidates)[0]
    seq_len: Any = candidates.shape[1]
    after_candidate = tf.pad(candidates[:, :-1], [[0, 0], [1, 0]])
    starts = candidates & ~(continues & after_candidate)
    # `word` is the index of each candidate's word in its row, `sizes` the number of pieces of each word.
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
    # `top_k` of S - position puts the chosen positions in ascending order and unused elements last.
    return seq_len - tf.math.top_k(tf.where(chosen, seq_len - tf.range(seq_len), 0), max_predictions).values
