"""Pre-training batches with tf.data; each batch is a pure function of (corpus, seed, step).

Row r of step s has the position (s - start_step) * batch_size + r in its phase. The position alone determines the row's
span of the corpus and the row's random numbers. Hence rows do not depend on the number of hosts, and resuming at any
step takes constant time.

Axes: B rows of this process, L tokens per row, P predictions per row.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from bertjax.data.corpus.store import Corpus
from bertjax.data.pretraining.config import PAIR_SPECIAL_TOKENS, TEXT_SPECIAL_TOKENS, Phase
from bertjax.data.pretraining.masking import choose_positions, replace_tokens
from bertjax.data.pretraining.pair_index import open_pair_index
from bertjax.data.pretraining.rows import (
    Lookup,
    Spans,
    assemble_rows,
    epoch_order,
    pair_lookup,
    running_text_lookup,
    stream_key,
    truncate_pairs,
    without_copy,
)
from bertjax.data.shard import DataShard
from bertjax.errors import BertjaxError

# Keep TensorFlow from reserving accelerator memory. This fails if TensorFlow has already initialized the devices.
with contextlib.suppress(RuntimeError):
    tf.config.set_visible_devices([], "GPU")

_PHILOX = 1
# Seed of the held-out rows, which are the same for all runs.
_EVAL_SEED = 0
# Purposes of random streams, used as the last argument of `stream_key`.
_ORDER, _OFFSET, _MASKS, _TRUNCATION = range(4)
_Batch = dict[str, tf.Tensor]


def train_dataset(
    corpus: Corpus, phase: Phase, *, seed: int, dupe_factor: int, start_step: int, shard: DataShard
) -> tf.data.Dataset:
    """Returns a dataset of this process's batch rows for the steps `start_step` to `phase.stop_step - 1`.

    Training on sentence pairs cycles through `dupe_factor` passes. Each pass divides the corpus into pairs differently.
    Order, truncation and masks of the rows differ in every epoch, even if a pass is repeated.

    Returns:
      A dataset of dictionaries.
        `input_ids`, `input_mask`, `segment_ids`: int32 [B, L].
        `masked_lm_positions`, `masked_lm_ids`: int32 [B, P]. `masked_lm_weights`: float32 [B, P].
        `next_sentence_labels`: int32 [B], 0 or 1 (see `LABELS` in `pairs.py`), -1 for no label.
      Batches without masks contain only the first three arrays. In packed batches, `sequence_ids` (pair number, from
      1) and `position_ids`, int32 [B, L], replace `input_mask`. Their `next_sentence_labels` are [B, S] for up to S
      pairs per row, and all -1 for documents.
    """
    order_key, offset_key = (stream_key(seed, phase.start_step, purpose) for purpose in (_ORDER, _OFFSET))
    pass_ends, lookup = _open_split(corpus, "train", phase, seed, dupe_factor, offset_key)
    order = epoch_order(pass_ends, order_key)
    assemble = _make_assembler(corpus, corpus.train.tokens, phase, shard, seed, phase.start_step)
    rows = shard.rows(phase.batch_size)

    def batch_of_step(step: tf.Tensor) -> _Batch:
        first = (step - phase.start_step) * phase.batch_size
        return assemble(lookup(*order(first + rows)), first)

    return _map_dataset(tf.data.Dataset.range(start_step, phase.stop_step), batch_of_step)


def eval_dataset(corpus: Corpus, phase: Phase, *, shard: DataShard, max_rows: int | None = None) -> tf.data.Dataset:
    """Returns a dataset of evaluation batches in the format of `train_dataset`. Each held-out row occurs once.

    Rows and masks do not depend on the phase's batch size and steps. With `max_rows` (default: None, all rows), the
    batches contain at most this number of rows, spread evenly over the split. The last batch is filled with padding
    rows, which have weights 0 and label -1.
    """
    pass_ends, lookup = _open_split(corpus, "heldout", phase, _EVAL_SEED, 1, None)
    available = int(pass_ends[-1])
    count = min(available, max_rows or available)
    assemble = _make_assembler(corpus, corpus.heldout.tokens, phase, shard, _EVAL_SEED)
    rows = shard.rows(phase.batch_size)
    padding = {spec.name: spec.padding for spec in phase.row_format.schema}

    def batch_of_index(index: tf.Tensor) -> _Batch:
        first = index * phase.batch_size
        positions = first + rows
        indices = tf.minimum(positions, count - 1) * available // count
        is_real = (positions < count)[:, None]
        return {
            name: tf.where(is_real if value.shape.rank > 1 else is_real[:, 0], value, padding[name])
            for name, value in assemble(lookup(indices, tf.zeros_like(indices)), first).items()
        }

    return _map_dataset(tf.data.Dataset.range(-(-count // phase.batch_size)), batch_of_index)


def verified_batches(dataset: tf.data.Dataset, corpus: Corpus) -> Iterator[dict[str, np.ndarray]]:
    """Yields the batches of a dataset as NumPy arrays, while a background thread verifies the corpus's checksums."""
    corpus.checksums.verify_in_background()
    try:
        yield from dataset.as_numpy_iterator()
    except tf.errors.OpError as error:
        corpus.checksums.wait()
        reason = " ".join(str(error).split())[:200]
        raise BertjaxError(f"cannot create a batch from the corpus {corpus.path}: {reason}") from error


def _open_split(
    corpus: Corpus, split: str, phase: Phase, seed: int, dupe_factor: int, offset_key: np.uint64 | None
) -> tuple[np.ndarray, Lookup]:
    """Returns the end row of each pass over a split, int64 [passes], and the `Lookup` of the split.

    Rows of pairs or documents depend on `seed` and `dupe_factor`, rows of running text on `offset_key`.
    """
    pairing, max_sequences, seq_len = phase.row_format.pairing, phase.max_sequences_per_row, phase.seq_len
    if not pairing and not phase.row_format.packed:
        return running_text_lookup(len(getattr(corpus, split).tokens), seq_len - TEXT_SPECIAL_TOKENS, offset_key)
    index = open_pair_index(corpus, split, seq_len, seed, dupe_factor, max_sequences, pairing)
    return index.pass_ends, pair_lookup(index, max_sequences)


def _map_dataset(indices: tf.data.Dataset, make_batch: Callable[[tf.Tensor], _Batch]) -> tf.data.Dataset:
    # Disable Autograph: it is not needed, takes a second per dataset, and leaves temporary files behind.
    make_batch = tf.autograph.experimental.do_not_convert(make_batch)
    dataset = indices.map(make_batch, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True)
    options = tf.data.Options()
    # Disable intra-op parallelism, because batches are already produced in parallel.
    options.threading.max_intra_op_parallelism = 1
    # Disable optimization, because it does not speed up a single map and takes half of the time until the first batch.
    options.experimental_optimization.apply_default_optimizations = False
    # Disable tuning during iteration: its thread can delay the end of an iteration by up to a minute. Without tuning,
    # AUTOTUNE means one call per core.
    options.autotune.enabled = False
    return dataset.with_options(options).prefetch(tf.data.AUTOTUNE)


def _make_assembler(
    corpus: Corpus, tokens: np.ndarray, phase: Phase, shard: DataShard, *seeds: int
) -> Callable[[Spans, tf.Tensor], _Batch]:
    """Returns a function `(spans, first) -> batch` that builds this process's rows of a batch.

    `spans` are the rows' token ranges in `tokens`. `first` is the number of rows in all earlier global batches of the
    phase or evaluation. The random numbers for masking and truncation depend on `first`.
    """
    vocabulary, row_format, seq_len = corpus.vocabulary(), phase.row_format, phase.seq_len
    paired, max_sequences = bool(row_format.pairing), phase.max_sequences_per_row
    corpus_tokens = without_copy(tokens)
    rows_of_shard = shard.rows(phase.batch_size)
    row_ranges = np.split(rows_of_shard, np.flatnonzero(np.diff(rows_of_shard) > 1) + 1)
    mask_key, truncation_key = stream_key(*seeds, _MASKS), stream_key(*seeds, _TRUNCATION)
    num_uniforms = seq_len + 2 * phase.row_predictions
    # Philox yields 4 numbers per counter value. Each row starts at a new counter value, so that rows are independent.
    counters_per_row = -(-num_uniforms // 4)

    def draw(
        operation: Callable[..., tf.Tensor], key: np.uint64, first: tf.Tensor, counters: int, numbers: int, **dtype: Any
    ) -> tf.Tensor:
        """Draws `numbers` random numbers per row, [B, numbers]. Each row uses `counters` values of Philox's counter."""
        ranges = [
            operation(
                shape=[rows.size, numbers],
                key=[key],
                counter=tf.cast(tf.stack([(first + rows[0]) * counters, 0]), tf.uint64),
                alg=_PHILOX,
                **dtype,
            )
            for rows in row_ranges
        ]
        return tf.concat(ranges, axis=0)

    def assemble(spans: Spans, first: tf.Tensor) -> _Batch:
        if paired:
            draw_bits = tf.raw_ops.StatelessRandomUniformFullIntV2
            bits = draw(draw_bits, truncation_key, first, max_sequences, 2 * max_sequences, dtype=tf.uint64)
            bits = tf.reshape(bits, [-1, 2])
            spans = truncate_pairs(spans, seq_len - PAIR_SPECIAL_TOKENS, tf.gather(bits, spans.slots))
        rows = assemble_rows(corpus_tokens, spans, seq_len, vocabulary, paired, max_sequences)
        arrays = {
            "input_ids": rows.ids,
            "input_mask": rows.sequence_ids,
            "segment_ids": rows.segment_ids,
            "sequence_ids": rows.sequence_ids,
            "position_ids": rows.position_ids,
            "next_sentence_labels": rows.labels if row_format.packed else rows.labels[:, 0],
        }
        if row_format.masked:
            numbers = 4 * counters_per_row
            uniforms = draw(tf.raw_ops.StatelessRandomUniformV2, mask_key, first, counters_per_row, numbers)
            choice, others = tf.split(uniforms[:, :num_uniforms], [seq_len, -1], axis=1)
            positions = choose_positions(rows, choice, vocabulary, phase)
            arrays |= replace_tokens(rows.ids, positions, others, vocabulary, phase.masking)
        return {spec.name: arrays[spec.name] for spec in row_format.schema}

    return assemble
