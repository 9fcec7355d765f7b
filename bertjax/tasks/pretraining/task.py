"""Pre-training on a prepared corpus: masked LM with next-sentence prediction, and variants (section 3.1)."""

import dataclasses
import functools
import logging
import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from bertjax.data.corpus.store import Corpus, open_corpus
from bertjax.data.corpus.vocabulary import Vocabulary, vocabulary_files
from bertjax.data.inspection import format_row
from bertjax.data.pretraining.baseline import mean_piece_bytes, mean_word_pieces
from bertjax.data.pretraining.config import Masking, Phase
from bertjax.data.pretraining.pair_index import documents_problem
from bertjax.data.pretraining.pairs import LABELS, NEXT_SENTENCE
from bertjax.data.shard import SINGLE_SHARD, DataShard
from bertjax.errors import UsageError
from bertjax.model.config import ROPE_THETAS
from bertjax.tasks.objectives.pretraining import PretrainingObjective
from bertjax.tasks.objectives.step_cost import StepCost
from bertjax.tasks.pretraining.config import PretrainingConfig
from bertjax.tasks.task import NumpyBatch, Task

logger = logging.getLogger(__name__)

_PERPLEXITY_LOSSES = ("mlm_loss", "ltr_loss", "rtl_loss")
# Maximum argument of `math.exp`, which overflows at larger ones.
_MAX_LOG_PERPLEXITY = 700.0
# Maximum mean number of tokens per word if entire words are masked. English has 5, even if each character is a token.
_MAX_WORD_PIECES = 10


class PretrainingTask(Task):
    """Pre-training on a corpus.

    Without a corpus, the task supports only `bertjax describe` and, with synthetic batches, `bench step` and `plan`.

    `phases` are ranges of steps with one batch shape (in the paper, length 128, then 512). By default, the batches of
    all phases have the same number of tokens. Each phase has its own objective, because the RoPE thetas of the model
    may differ. `objective` is the objective of the last phase.
    """

    eval_first = True
    config: PretrainingConfig
    objective: PretrainingObjective

    def __init__(self, config: PretrainingConfig, train: bool = True) -> None:
        """Opens the corpus, which is required if `train` is True."""
        super().__init__(config)
        corpus = self.corpus if train or config.data.corpus else None  # `self.corpus` raises if there is none.
        vocab_size = self._vocabulary.size if corpus else config.vocab_size
        model_config = config.model_config(vocab_size)
        self.phases = config.resolved_phases
        thetas = [{name: getattr(phase, name) for name in ROPE_THETAS} for phase in self.phases]
        models = [dataclasses.replace(model_config, **values) for values in thetas]
        self._objectives = [config.objective_class.for_model(model, config.data) for model in models]
        self.objective = self._objectives[-1]
        self.total_steps, self.warmup_steps = config.steps, config.optimizer.warmup(config.steps)
        self.eval_every, self.checkpoint_every = config.eval_every, config.checkpoint_every
        self.batch_sizes = tuple(phase.batch_size for phase in self.phases)
        # All evaluations have the batch shape of the first phase, so that they are comparable.
        self.eval_batch_size = self.batch_sizes[0]
        self.notes = tuple(_describe_phase(phase, self.objective) for phase in self.phases)
        if corpus:
            self.workdir_files = vocabulary_files(self._vocabulary)
            self.data_hash = corpus.fingerprint
            if train:
                if problem := documents_problem(corpus, "train", self.objective.pairing):
                    raise UsageError(problem)
                masks_words = config.data.masking.whole_word or config.data.masking.max_span > 1
                length = mean_word_pieces(self._vocabulary, corpus.train.tokens) if masks_words else 0.0
                if length > _MAX_WORD_PIECES:
                    raise UsageError(
                        f"the words of {config.data.corpus} have {length:.0f} tokens on average, as in languages "
                        "without spaces between words; set --config.data.masking.whole_word=false "
                        "--config.data.masking.max_span=1"
                    )
                num_single = corpus.manifest["problems"].get("single_sentence_documents", 0)
                if num_single and self.objective.pairing == NEXT_SENTENCE:
                    logger.warning(
                        f"{num_single:,} documents of {config.data.corpus}, more than half, have one sentence, so "
                        "their pairs are NotNext; prepare it again with blank lines only between documents, or set "
                        "--config.data.objective=none"
                    )
            self.evaluation_problem = documents_problem(corpus, "heldout", self.objective.pairing)
        # Cache the evaluation pipeline, because TensorFlow takes seconds to trace it.
        self._eval_dataset = functools.cache(self._make_eval_dataset)

    @property
    def phase_schedule(self) -> tuple[tuple[int, float], ...]:
        return tuple((phase.stop_step, phase.learning_rate) for phase in self.phases)

    def objective_at(self, update: int) -> PretrainingObjective:
        # Updates are counted from 1, so `stop_step` is the number of the last update of a phase.
        return self._objectives[sum(update > phase.stop_step for phase in self.phases[:-1])]

    @functools.cached_property
    def corpus(self) -> Corpus:
        """Corpus of the run. Raises a UsageError if the config has none."""
        if not self.config.data.corpus:
            raise UsageError(
                "no corpus; create one with `bertjax prepare --input text:FILE --output DIR`, and set --config "
                "NAME:corpus=DIR"
            )
        return open_corpus(self.config.data.corpus)

    @functools.cached_property
    def _vocabulary(self) -> Vocabulary:
        return self.corpus.vocabulary()

    @functools.cached_property
    def _bytes_per_token(self) -> float:
        return mean_piece_bytes(self._vocabulary, self.corpus.heldout.tokens)

    def train_batches(self, start_step: int, shard: DataShard) -> Iterator[NumpyBatch]:
        for phase in self.phases:
            if start_step < phase.stop_step:
                yield from self.phase_batches(phase, max(start_step, phase.start_step), shard)

    def phase_batches(self, phase: Phase, start_step: int, shard: DataShard) -> Iterator[NumpyBatch]:
        """Yields the training batches of a phase from step `start_step` of the run, with only the rows of `shard`."""
        # Import here, because TensorFlow is slow to import and not needed to describe or time models.
        from bertjax.data.pretraining.batches import train_dataset, verified_batches

        seed, dupe_factor = self.config.seed, self.config.data.dupe_factor
        dataset = train_dataset(
            self.corpus, phase, seed=seed, dupe_factor=dupe_factor, start_step=start_step, shard=shard
        )
        # `verified_batches` verifies the checksums of the corpus in the background.
        return self.objective.postprocess_batches(verified_batches(dataset, self.corpus))

    def eval_batches(self, shard: DataShard) -> Iterator[NumpyBatch]:
        from bertjax.data.pretraining.batches import verified_batches

        dataset = self._eval_dataset(shard)
        self.num_eval_batches = int(dataset.cardinality())
        return self.objective.postprocess_batches(verified_batches(dataset, self.corpus))

    def unfrozen_cost_before(self, step: int) -> StepCost:
        steps = (max(0, min(step, phase.stop_step) - phase.start_step) for phase in self.phases)
        return sum(map(self.objective.step_cost, self.phases, steps), StepCost())

    def synthetic_sizes(self, phase: int = 0) -> dict[str, int]:
        return self.objective.synthetic_sizes(self.phases[phase])

    def format_row(self, batch: NumpyBatch, row: int) -> str:
        return format_row(batch, row, self._vocabulary, LABELS[self.objective.pairing])

    def final_metrics(self, means: dict[str, float], outputs: list[dict[str, np.ndarray]]) -> dict[str, float]:
        """Adds `perplexity` of the predicted tokens to the metrics and, for masked LM, `bits_per_byte`.

        With both `ltr_loss` and `rtl_loss`, `perplexity` is the exponential of the mean of these losses.
        `bits_per_byte` is the masked-LM loss in bits per token, divided by the mean number of bytes per held-out token
        (`mean_piece_bytes`). Masked tokens are a random sample, so they have the same mean bytes per token.
        """
        losses = [means[name] for name in _PERPLEXITY_LOSSES if name in means]
        if not losses:
            return means
        perplexity = math.exp(min(sum(losses) / len(losses), _MAX_LOG_PERPLEXITY))
        if "mlm_loss" not in means:
            return {**means, "perplexity": perplexity}
        bits = means["mlm_loss"] / math.log(2)
        return {**means, "perplexity": perplexity, "bits_per_byte": bits / self._bytes_per_token}

    def baseline(self) -> dict[str, float]:
        return self.objective.baseline(self.corpus, self.eval_batches(SINGLE_SHARD))

    def check_data_files(self, wait: bool) -> None:
        if wait:
            self.corpus.checksums.wait()
        else:
            self.corpus.checksums.check()

    def _make_eval_dataset(self, shard: DataShard) -> Any:
        from bertjax.data.pretraining.batches import eval_dataset

        phase = self.phases[0]
        if self.objective.pairing:
            # Do not pack sentence pairs, so that metrics do not depend on packing. Documents are packed, because most
            # are shorter than a row.
            phase = dataclasses.replace(phase, row_format=dataclasses.replace(phase.row_format, packed=False))
        return eval_dataset(self.corpus, phase, max_rows=self.config.data.eval_rows or None, shard=shard)


def _describe_phase(phase: Phase, objective: PretrainingObjective) -> str:
    positions, steps = phase.batch_size * phase.seq_len, phase.stop_step - phase.start_step
    spans = "sentence pairs" if objective.pairing else "documents"
    packed = f" with up to {phase.max_sequences_per_row} {spans}" if phase.max_sequences_per_row > 1 else ""
    return (
        f"steps {phase.start_step:,} to {phase.stop_step:,}: {phase.batch_size:,} rows of {phase.seq_len} tokens"
        f"{packed}, {positions:,} positions per batch, {phase.row_predictions} predictions per row, "
        f"{objective.flops_per_position(phase) / 1e6:,.1f} MFLOPs per position, {steps * positions:,} positions"
        + (f", {phase.masking.rate:.0%} masked" if phase.masking.rate != Masking().rate else "")
    )
