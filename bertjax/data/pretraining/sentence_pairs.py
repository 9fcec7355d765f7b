"""Rows of sentence pairs, for masked LM with next-sentence prediction.

An epoch is one pass of `pairs.document_pairs` over the training documents. Each sentence is part of A or of an IsNext B
in exactly one row, before the pair is truncated to S - 3 tokens, and may also be part of random Bs. Training cycles
through several independent passes.
"""

from collections.abc import Callable

import tensorflow as tf

from bertjax.data.corpus.store import Corpus
from bertjax.data.pretraining.config import Phase
from bertjax.data.pretraining.masking import MASKED_LM
from bertjax.data.pretraining.pair_index import open_pair_index
from bertjax.data.pretraining.rows import Spans, epoch_order, pair_lookup, stream_key
from bertjax.data.pretraining.source import EVAL_SEED, ORDER, Lookup, RowSource


def _train(corpus: Corpus, phase: Phase, seed: int, passes: int, shuffle: bool) -> Lookup:
    index = open_pair_index(corpus, "train", phase.seq_len, seed, passes)
    order = epoch_order(index.pass_ends, stream_key(seed, phase.start_step, ORDER), shuffle)
    pairs = pair_lookup(index)

    def lookup(positions: tf.Tensor) -> tuple[tf.Tensor, Spans]:
        row = order(positions)[0]
        return row, pairs(row)

    return lookup


def _heldout(corpus: Corpus, seq_len: int) -> tuple[int, Callable[[tf.Tensor], Spans]]:
    index = open_pair_index(corpus, "heldout", seq_len, EVAL_SEED, 1)
    return len(index.records), pair_lookup(index)


SENTENCE_PAIRS = RowSource(MASKED_LM, 1, True, _train, _heldout)
