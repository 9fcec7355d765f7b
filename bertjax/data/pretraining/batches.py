"""Pre-training batches with tf.data; each batch is a pure function of (corpus, seed, step).

Row r of step s has the position (s - start_step) * batch_size + r in its phase. The position alone determines the row's
span of the corpus and the row's random numbers. Hence rows do not depend on the number of hosts, and resuming at any
step takes constant time.

Axes: B rows of this process, L tokens per row, P predictions per row.
"""

import contextlib
from collections.abc import Callable, Iterator

import numpy as np
import tensorflow as tf

from bertjax.data.corpus.store import Corpus, Split
from bertjax.data.pretraining.config import PAIR_SPECIAL_TOKENS, Masking, Phase, max_spans_per_row
from bertjax.data.pretraining.row_sources import EVAL_SEED, MASKS, TRUNCATION, Batch, RowSource, make_batch
from bertjax.data.pretraining.rows import Spans, assemble_rows, stream_key, truncate_pairs, without_copy
from bertjax.data.schema import Schema, padding_values
from bertjax.data.shard import DataShard
from bertjax.errors import BertjaxError

# Keep TensorFlow from reserving accelerator memory. This fails if TensorFlow has already initialized the devices.
with contextlib.suppress(RuntimeError):
    tf.config.set_visible_devices([], "GPU")

_PHILOX = 1


def train_dataset(
    corpus: Corpus,
    phase: Phase,
    *,
    source: RowSource,
    masking: Masking,
    seed: int,
    dupe_factor: int,
    start_step: int,
    shard: DataShard,
) -> tf.data.Dataset:
    """Returns this process's rows of the training batches of steps `start_step` to `phase.stop_step - 1`.

    Training on sentence pairs cycles through `dupe_factor` passes. Each pass divides the corpus into pairs differently.
    Order, truncation and masks of the rows differ in every epoch, even if a pass is repeated.

    Returns:
      A dataset of dictionaries.
        `input_ids`, `input_mask`, `segment_ids`: int32 [B, L].
        `masked_lm_positions`, `masked_lm_ids`: int32 [B, P]. `masked_lm_weights`: float32 [B, P].
        `next_sentence_labels`: int32 [B], 0 IsNext, 1 NotNext, -1 no label.
      Batches without masks contain only the first three arrays. In packed batches, `sequence_ids` (pair
      number, from 1) and `position_ids`, int32 [B, L], replace `input_mask`, and `next_sentence_labels` is [B, K] for
      up to K pairs per row. In batches of documents, they are -1.
    """
    lookup = source.train(corpus, phase, seed, dupe_factor)
    assemble = _make_assembler(corpus, corpus.train, phase, source, masking, shard, seed, phase.start_step)
    rows = shard.rows(phase.batch_size)

    def batch_of_step(step: tf.Tensor) -> Batch:
        first = (step - phase.start_step) * phase.batch_size
        return assemble(lookup(first + rows), first)

    return _map_dataset(tf.data.Dataset.range(start_step, phase.stop_step), batch_of_step)


def eval_dataset(
    corpus: Corpus,
    phase: Phase,
    *,
    source: RowSource,
    masking: Masking,
    shard: DataShard,
    max_rows: int | None = None,
) -> tf.data.Dataset:
    """Returns the evaluation batches, which contain each held-out row once, as dictionaries like `train_dataset`'s.

    Rows and masks do not depend on the phase's batch size and steps. With `max_rows` (default: None, all rows), the
    batches contain at most this number of rows, spread evenly over the split. The last batch is filled with padding
    rows, which have weights 0 and label -1.
    """
    available, lookup = source.heldout(corpus, phase.seq_len)
    count = min(available, max_rows or available)
    assemble = _make_assembler(corpus, corpus.heldout, phase, source, masking, shard, EVAL_SEED)
    rows = shard.rows(phase.batch_size)

    def batch_of_index(index: tf.Tensor) -> Batch:
        first = index * phase.batch_size
        positions = first + rows
        spans = lookup(tf.minimum(positions, count - 1) * available // count)
        return _pad_rows(assemble(spans, first), positions < count, source.schema)

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


def _map_dataset(indices: tf.data.Dataset, make_batch: Callable[[tf.Tensor], Batch]) -> tf.data.Dataset:
    # Disable Autograph: it is not needed, takes a second per dataset, and leaves temporary files behind.
    make_batch = tf.autograph.experimental.do_not_convert(make_batch)
    dataset = indices.map(make_batch, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True)
    options = tf.data.Options()
    # Batches are already produced in parallel, so intra-op parallelism would only add contention.
    options.threading.max_intra_op_parallelism = 1
    # A single map gains nothing from optimization, which takes half of the time until the first batch.
    options.experimental_optimization.apply_default_optimizations = False
    return dataset.with_options(options).prefetch(tf.data.AUTOTUNE)


def _make_assembler(
    corpus: Corpus, split: Split, phase: Phase, source: RowSource, masking: Masking, shard: DataShard, *seeds: int
) -> Callable[[Spans, tf.Tensor], Batch]:
    """Returns a function `(spans, first) -> batch`.

    `spans` are the token spans of this shard's rows. `first` is the number of rows in all earlier global batches of the
    phase or evaluation. The random numbers for masking and truncation depend on `first`.
    """
    vocabulary, row_ranges = corpus.vocabulary(), shard.row_ranges(phase.batch_size)
    tokens = without_copy(split.tokens)
    mask_key, truncation_key = stream_key(*seeds, MASKS), stream_key(*seeds, TRUNCATION)
    seq_len = phase.seq_len
    spans_per_row = max_spans_per_row(seq_len, source.packed, source.has_pairs)
    predictions = phase.row_predictions if source.packed else phase.max_predictions
    num_uniforms = seq_len + 2 * predictions
    # Philox yields 4 numbers per counter value. Each row starts at a new counter value, so that rows are independent.
    counters_per_row = -(-num_uniforms // 4)

    def draw(
        operation: Callable[..., tf.Tensor],
        key: np.uint64,
        first: tf.Tensor,
        counters: int,
        numbers: int,
        **dtype: tf.DType,
    ) -> tf.Tensor:
        """Draws random numbers [B, numbers], which take `counters` values of Philox's counter per row."""
        ranges = [
            operation(
                shape=[stop - start, numbers],
                key=[key],
                counter=tf.cast(tf.stack([(first + start) * counters, 0]), tf.uint64),
                alg=_PHILOX,
                **dtype,
            )
            for start, stop in row_ranges
        ]
        return tf.concat(ranges, axis=0)

    def assemble(spans: Spans, first: tf.Tensor) -> Batch:
        uniforms = draw(tf.raw_ops.StatelessRandomUniformV2, mask_key, first, counters_per_row, 4 * counters_per_row)
        uniforms = uniforms[:, :num_uniforms]
        if source.has_pairs:
            draw_bits, size = tf.raw_ops.StatelessRandomUniformFullIntV2, spans_per_row
            bits = tf.reshape(draw(draw_bits, truncation_key, first, size, 2 * size, dtype=tf.uint64), [-1, 2])
            spans = truncate_pairs(spans, seq_len - PAIR_SPECIAL_TOKENS, tf.gather(bits, spans.slots))
        rows = assemble_rows(tokens, spans, seq_len, vocabulary, source.has_pairs, spans_per_row)
        return make_batch(source, rows, uniforms, vocabulary, masking, phase.max_predictions)

    return assemble


def _pad_rows(batch: Batch, is_real: tf.Tensor, schema: Schema) -> Batch:
    """Replaces the rows where `is_real` is False with padding."""
    padding = padding_values(schema)
    return {
        name: tf.where(
            is_real if value.shape.rank == 1 else is_real[:, None], value, tf.constant(padding[name], value.dtype)
        )
        for name, value in batch.items()
    }
