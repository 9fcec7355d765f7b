"""Rows of sentence pairs, for masked LM with next-sentence prediction.

An epoch is one pass of `pairs.document_pairs` over the training documents: each sentence is in exactly one row as part
of A or of a B that is next, before the pair is truncated to S - 3 tokens, and may be in others as part of a random B.
Several independent passes are used in turn.
"""

from collections.abc import Callable
from pathlib import Path

import tensorflow as tf

from bertjax.data.corpus.store import Corpus
from bertjax.data.pretraining.config import Phase
from bertjax.data.pretraining.masking import MASKED_LM
from bertjax.data.pretraining.pair_index import pair_plan, verify_read_plan
from bertjax.data.pretraining.rows import Spans, epoch_order, pair_lookup, stream_key
from bertjax.data.pretraining.source import EVAL_SEED, ORDER, Lookup, RowSource


def _train(corpus: Corpus, phase: Phase, seed: int, passes: int, shuffle: bool) -> Lookup:
    plan = pair_plan(corpus, "train", phase.seq_len, seed, passes)
    order = epoch_order(plan.pass_ends, stream_key(seed, phase.start_step, ORDER), shuffle)
    pairs = pair_lookup(plan)

    def lookup(positions: tf.Tensor) -> tuple[tf.Tensor, Spans]:
        row = order(positions)[0]
        return row, pairs(row)

    return lookup


def _heldout(corpus: Corpus, seq_len: int) -> tuple[int, Callable[[tf.Tensor], Spans]]:
    plan = pair_plan(corpus, "heldout", seq_len, EVAL_SEED, 1)
    return len(plan.records), pair_lookup(plan)


def _train_plan(corpus: Corpus, seq_len: int, seed: int, passes: int) -> Path:
    return pair_plan(corpus, "train", seq_len, seed, passes).path


def _verify_heldout(corpus: Corpus, seq_len: int) -> None:
    verify_read_plan(corpus, "heldout", seq_len, EVAL_SEED, 1)


SENTENCE_PAIRS = RowSource(MASKED_LM, 1, True, _train, _heldout, _train_plan, _verify_heldout)
