"""Masking of token rows, as TensorFlow graph operations.

A row contains one or several spans of tokens, such as sentence pairs, which are masked independently.

Axes: B rows, L tokens per row, P predictions per row, V vocabulary.
"""

from typing import Any

import numpy as np
import tensorflow as tf

from bertjax.data.corpus.vocabulary import Vocabulary
from bertjax.data.pretraining.config import Masking, Phase, num_predictions
from bertjax.data.pretraining.rows import TokenRows

# A group of words ends after each word with this probability, so its length is geometric (SpanBERT, section 3.1).
_SPAN_END_PROBABILITY = 0.2
# Maximum number of words, or groups of words, to skip because they need more predictions than remain.
_SKIPPED_GROUPS = 2


def choose_positions(rows: TokenRows, uniforms: tf.Tensor, vocabulary: Vocabulary, phase: Phase) -> tf.Tensor:
    """Chooses the positions to predict, int32 [B, P], where P is `phase.row_predictions`.

    A row has one span, such as a sentence pair, or several if it is packed. `uniforms` are float32 [B, L] in [0, 1).
    The positions of a row are sorted. Unused elements are at the end and equal L, which is not a valid position.

    A span of n tokens, special tokens included, has min(max_predictions, max(1, round(n * rate))) predictions, as in
    google-research/bert `create_pretraining_data.py`. If the span has fewer non-special tokens, all of them are
    predicted. Special tokens, including [UNK], are never masked.

    Whole-word masking chooses words (a piece and its continuations) in random order. It skips up to two words that need
    more predictions than remain, and stops at the third. A continuation piece at the start of segment B is a separate
    word.

    google-research/bert differs in three ways. It may mask an [UNK] in the text. It skips all words that need too many
    predictions. It adds a continuation piece at the start of B to the last word of A.
    """
    seq_len, masking, row_predictions = phase.seq_len, phase.masking, phase.row_predictions
    numbers = num_predictions(masking.rate, seq_len, phase.max_predictions)
    limit = tf.gather(tf.constant(numbers, tf.int32), rows.lengths)  # [B, L] or [B, 1]
    candidates = tf.gather(_is_ordinary(vocabulary), rows.ids)  # [B, L]
    ranks = min(seq_len, phase.max_predictions + _SKIPPED_GROUPS)
    if not masking.whole_word and masking.max_span == 1:
        is_candidate, order = _random_order(candidates, rows.starts, uniforms, ranks)
        chosen = is_candidate & (tf.range(order.shape[1]) - rows.starts < limit)
        return -tf.math.top_k(-tf.where(chosen, order, seq_len), row_predictions).values

    groups = _word_groups(rows, candidates, uniforms, vocabulary, masking.max_span)
    groups += seq_len * tf.range(tf.shape(groups)[0])[:, None]  # makes indices unique in the batch
    sizes = tf.math.unsorted_segment_sum(
        tf.reshape(tf.cast(candidates, tf.int32), [-1]), tf.reshape(groups, [-1]), tf.size(groups)
    )
    _, order = _random_order(tf.reshape(sizes > 0, [-1, seq_len]), rows.starts, uniforms, ranks)
    order += seq_len * tf.range(tf.shape(order)[0])[:, None]
    ranked_sizes = tf.gather(sizes, order)
    for _ in range(_SKIPPED_GROUPS):
        total = _cumsum_in_span(ranked_sizes, rows.starts)
        is_first_too_long = (total > limit) & (total - ranked_sizes <= limit)
        ranked_sizes = tf.where(is_first_too_long, 0, ranked_sizes)
    is_chosen = (_cumsum_in_span(ranked_sizes, rows.starts) <= limit) & (ranked_sizes > 0)
    chosen_groups = tf.scatter_nd(
        tf.reshape(order, [-1, 1]), tf.reshape(tf.cast(is_chosen, tf.int32), [-1]), tf.shape(sizes)
    )
    chosen = candidates & (tf.gather(chosen_groups, groups) > 0)
    return seq_len - tf.math.top_k(tf.where(chosen, seq_len - tf.range(seq_len), 0), row_predictions).values


def replace_tokens(
    ids: tf.Tensor, positions: tf.Tensor, uniforms: tf.Tensor, vocabulary: Vocabulary, masking: Masking
) -> dict[str, tf.Tensor]:
    """Replaces the tokens at `positions` by [MASK] or random tokens, or keeps them.

    `ids` are int32 [B, L], and `uniforms` float32 [B, 2 P] in [0, 1). Special tokens are never drawn as random
    replacements. google-research/bert draws from the entire vocabulary. Returns `input_ids`, int32 [B, L], and the
    arrays `masked_lm_*`, [B, P], as in `train_dataset`. Unused predictions are 0.
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
    is_ordinary[[*vocabulary.special_ids, *vocabulary.declared_special_ids]] = False
    return is_ordinary


def _random_order(
    is_group: tf.Tensor, starts: tf.Tensor, uniforms: tf.Tensor, ranks: int
) -> tuple[tf.Tensor, tf.Tensor]:
    """Orders the groups of each span at random. A group is a token, or several tokens such as a word.

    `is_group`, bool [B, L], marks the index of each group. Returns two arrays over ranks: whether a group has this rank
    (bool), and the group's index in the row (int32). Their shape is [B, `ranks`] for rows of one span. In packed rows,
    it is [B, L], and the ranks of a span start at the position where the span starts.
    """
    is_packed = starts.shape[1] != 1
    # Shift the keys of later spans down, so that spans stay in order. In float64, the shifted keys are exact.
    keys = tf.cast(tf.where(is_group, uniforms, -1.0), tf.float64 if is_packed else tf.float32)
    shift = 2 * tf.cast(starts, keys.dtype)
    values, order = tf.math.top_k(keys - shift, is_group.shape[1] if is_packed else ranks)
    return values + shift >= 0, order


def _cumsum_in_span(values: tf.Tensor, starts: tf.Tensor) -> tf.Tensor:
    """Returns the cumulative sums of `values`, int32 [B, L], along each row, restarting at each span."""
    total = tf.cumsum(values, axis=1)
    first_index = tf.shape(values)[1] * tf.range(tf.shape(values)[0])[:, None]
    return total - tf.gather(tf.reshape(total - values, [-1]), starts + first_index)


def _word_groups(
    rows: TokenRows, candidates: tf.Tensor, uniforms: tf.Tensor, vocabulary: Vocabulary, max_span: int
) -> tf.Tensor:
    """Returns the group index of each candidate, int32 [B, L].

    A group is one word or, if `max_span` > 1, a geometric number of words, at most `max_span`. The groups of a span are
    numbered from the index of its first token.
    """
    after_candidate = tf.pad(candidates[:, :-1], [[0, 0], [1, 0]])
    begins = candidates & ~(tf.gather(vocabulary.is_continuation, rows.ids) & after_candidate)
    if max_span > 1:
        # Draw span ends from the low bits of `uniforms`, because `_random_order` ranks the groups by the high bits.
        low_bits = tf.math.floormod(uniforms * 1024.0, 1.0)
        # A special token ends a group.
        ends_before = begins & ((low_bits < _SPAN_END_PROBABILITY) | ~after_candidate)
        word, group = (tf.cumsum(tf.cast(mask, tf.int32), axis=1) for mask in (begins, ends_before))
        # Divide groups that are longer than `max_span`.
        seq_len: Any = rows.ids.shape[1]
        group += (seq_len + 1) * tf.range(tf.shape(group)[0])[:, None]
        count = tf.reduce_max(group) + 1
        first_word = tf.math.unsorted_segment_min(tf.reshape(word, [-1]), tf.reshape(group, [-1]), count)
        begins &= tf.math.floormod(word - tf.gather(first_word, group), max_span) == 0
    return rows.starts + tf.maximum(_cumsum_in_span(tf.cast(begins, tf.int32), rows.starts) - 1, 0)
