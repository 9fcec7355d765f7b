"""Pre-training batches with tf.data: each a pure function of (corpus, seed, step), made by whole-batch operations.

Position p counts the rows of a phase: row r of step s is p = (s - start_step) * batch_size + r. A position decides
its span of the corpus and its random numbers with a fixed number of operations, so the rows do not depend on the
number of hosts and a jump to any step costs what the first step costs.

B rows of a batch on this process, S tokens a row, P predictions a row.
"""

import contextlib
from collections.abc import Callable

import tensorflow as tf

from bertjax.data.corpus.store import Corpus, Split
from bertjax.data.pretraining.assembly import assembled, truncated
from bertjax.data.pretraining.config import SPECIAL_TOKENS_OF_PAIR, Masking, Phase, check_shape
from bertjax.data.pretraining.rows import (
    Spans,
    stream_key,
    without_copy,
)
from bertjax.data.pretraining.source import CUTS, EVAL_SEED, MASKS, RowSource
from bertjax.data.schema import Schema, padding_of
from bertjax.data.shard import DataShard
from bertjax.errors import UsageError

# TensorFlow only feeds; it must not take the accelerator's memory. Too late if something else already started it.
with contextlib.suppress(RuntimeError):
    tf.config.set_visible_devices([], "GPU")

Batch = dict[str, tf.Tensor]

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
    share: DataShard,
    parallel_calls: int | None = None,
    shuffle: bool = True,
) -> tf.data.Dataset:
    """This process's rows of the batches of steps `start_step` to `phase.stop_step`, in order.

    Rows of an epoch come in an order of its own, and truncated ends and masks are drawn anew in every epoch, also where
    a pass is used again.

    Args:
      corpus: an opened corpus.
      phase: shape of the batch and its steps.
      source: of the rows: `SENTENCE_PAIRS`, `PACKED_PAIRS`, `TILES` or `WHOLE_TILES`.
      masking: what is masked, and how.
      seed: 0 or more.
      dupe_factor: different passes to make before the first is used again.
      start_step: first step of the dataset, within the phase.
      share: the rows of the global batch that are made.
      parallel_calls: batches made at the same time; chosen by tf.data if None.
      shuffle: False takes each epoch's rows in the order of the corpus, to see what random access costs.

    Returns:
      A dataset of dictionaries: input_ids, input_mask, segment_ids int32 [B, S]; and of masked rows also
      masked_lm_positions, masked_lm_ids int32 [B, P]; masked_lm_weights float32 [B, P]; next_sentence_labels int32 [B],
      0 IsNext, 1 NotNext, -1 none. Packed rows of up to K pairs have sequence_ids, counted from 1, and position_ids
      int32 [B, S] in place of input_mask, and next_sentence_labels [B, K].

    Raises:
      UsageError: an argument is out of its range, or the corpus is too small.
      BertjaxError: the pair plan cannot be made or stored.
    """
    runs = share.runs(phase.batch_size)
    if seed < 0:
        raise UsageError(f"seed is {seed}; it must be 0 or more")
    if dupe_factor < 1:
        raise UsageError(f"dupe_factor is {dupe_factor}; it must be at least 1")
    if not phase.start_step <= start_step <= phase.stop_step:
        raise UsageError(f"step {start_step} is outside its phase, steps {phase.start_step} to {phase.stop_step}")

    lookup = source.train(corpus, phase, seed, dupe_factor, shuffle)
    assemble = _assembler(
        corpus,
        corpus.train,
        masking,
        phase.seq_len,
        phase.max_predictions,
        source,
        runs,
        seed,
        phase.start_step,
    )
    rows = share.rows(phase.batch_size)

    def batch_of_step(step: tf.Tensor) -> Batch:
        first = (step - phase.start_step) * phase.batch_size
        return assemble(lookup(first + rows)[1], first)

    return _mapped(tf.data.Dataset.range(start_step, phase.stop_step), batch_of_step, parallel_calls)


def eval_dataset(
    corpus: Corpus,
    *,
    seq_len: int,
    batch_size: int,
    max_predictions: int,
    source: RowSource,
    masking: Masking,
    share: DataShard,
    max_rows: int | None = None,
    parallel_calls: int | None = None,
) -> tf.data.Dataset:
    """This process's rows of one pass over the held-out documents, each row exactly once, in order.

    Rows and masks depend on the corpus, `seq_len`, `max_predictions`, `source`, `masking` and `max_rows` alone:
    not on the training seed, the step, `batch_size` or the number of processes. The last batch is filled up with rows
    of padding, whose weights are 0 and whose label is -1. As `train_dataset` otherwise.

    Args:
      max_rows: takes so many rows, spread evenly over the split; all rows if None.

    Raises:
      UsageError: an argument is out of its range, or the held-out split is too small.
      BertjaxError: the pair plan cannot be made or stored.
    """
    check_shape(seq_len, batch_size, max_predictions)
    source = source.heldout_like or source
    runs = share.runs(batch_size)
    if max_rows is not None and max_rows < 1:
        raise UsageError(f"max_rows of the evaluation is {max_rows}; it must be at least 1")
    available, lookup = source.heldout(corpus, seq_len)
    count = min(available, max_rows or available)
    assemble = _assembler(corpus, corpus.heldout, masking, seq_len, max_predictions, source, runs, EVAL_SEED)
    rows = share.rows(batch_size)

    def batch_of_index(index: tf.Tensor) -> Batch:
        first = index * batch_size
        positions = first + rows
        spans = lookup(tf.minimum(positions, count - 1) * available // count)
        return _only_real(assemble(spans, first), positions < count, source.prediction.schema)

    return _mapped(tf.data.Dataset.range(-(-count // batch_size)), batch_of_index, parallel_calls)


def _mapped(
    indices: tf.data.Dataset, make_batch: Callable[[tf.Tensor], Batch], parallel_calls: int | None
) -> tf.data.Dataset:
    calls = tf.data.AUTOTUNE if parallel_calls is None else parallel_calls
    # There is no Python in it to be converted, which would take a second a dataset and leave files.
    make_batch = tf.autograph.experimental.do_not_convert(make_batch)
    dataset = indices.map(make_batch, num_parallel_calls=calls, deterministic=True)
    options = tf.data.Options()
    # Batches are made in parallel; operations within one that also spread over the cores only get in their way.
    options.threading.max_intra_op_parallelism = 1
    return dataset.with_options(options).prefetch(tf.data.AUTOTUNE)


def _assembler(
    corpus: Corpus,
    split: Split,
    masking: Masking,
    seq_len: int,
    max_predictions: int,
    source: RowSource,
    runs: list[tuple[int, int]],
    *seeds: int,
) -> Callable[[Spans, tf.Tensor], Batch]:
    """Makes the function of (spans of the `runs` of rows, position of the global batch's first row) to a batch."""
    vocabulary = corpus.vocabulary()
    tokens = without_copy(split.tokens)
    predict = source.prediction.maker(vocabulary, masking, seq_len, max_predictions)
    mask_key, cut_key = stream_key(*seeds, MASKS), stream_key(*seeds, CUTS)
    row_uniforms = source.prediction.uniforms(masking, seq_len, max_predictions)
    # Philox makes 128 bits a count of its counter; whole counts a row let any row's numbers be made alone.
    row_counts = -(-row_uniforms // 4)

    def by_run(draw: Callable[[int, int], tf.Tensor]) -> tf.Tensor:
        """What `draw` gives for the first row and the number of rows of each run."""
        return tf.concat([draw(start, stop - start) for start, stop in runs], axis=0)

    def assemble(spans: Spans, first: tf.Tensor) -> Batch:
        uniforms = by_run(
            lambda start, rows: tf.raw_ops.StatelessRandomUniformV2(
                shape=[rows, 4 * row_counts],
                key=[mask_key],
                counter=tf.cast(tf.stack([(first + start) * row_counts, 0]), tf.uint64),
                alg=_PHILOX,
            )
        )[:, :row_uniforms]
        if source.is_paired:
            places = source.spans_a_row
            bits = by_run(
                lambda start, rows: tf.raw_ops.StatelessRandomUniformFullIntV2(
                    shape=[rows * places, 2],
                    key=[cut_key],
                    counter=tf.cast(tf.stack([(first + start) * places, 0]), tf.uint64),
                    alg=_PHILOX,
                    dtype=tf.uint64,
                )
            )
            bits = bits if spans.place is None else tf.gather(bits, spans.place)
            spans = truncated(spans, seq_len - SPECIAL_TOKENS_OF_PAIR, bits)
        return predict(assembled(tokens, spans, seq_len, vocabulary, source.is_paired), spans, uniforms)

    return assemble


def _only_real(batch: Batch, real: tf.Tensor, schema: Schema) -> Batch:
    """The batch with padding in the rows that are not real."""
    padding = padding_of(schema)
    return {
        name: tf.where(real if value.shape.rank == 1 else real[:, None], value, tf.constant(padding[name], value.dtype))
        for name, value in batch.items()
    }
