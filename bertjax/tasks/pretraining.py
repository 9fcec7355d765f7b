"""Pre-training on a prepared corpus: masked LM with next-sentence prediction, and variants (section 3.1)."""

import dataclasses
import functools
import math
from collections.abc import Iterator
from typing import Any

from bertjax.config.fields import at_least, limited, one_of
from bertjax.config.run import DEFAULT_VOCAB_SIZE, RunConfig
from bertjax.data.corpus.local_copy import open_anywhere
from bertjax.data.corpus.vocabulary import vocabulary_files
from bertjax.data.pretraining.config import MAX_PAIRS_PER_ROW, MIN_ROW_TOKENS, Masking, Phase, max_packed_predictions
from bertjax.data.shard import SINGLE_SHARD, DataShard
from bertjax.errors import UsageError
from bertjax.model.config import ModelConfig
from bertjax.model.flops import flops_per_token
from bertjax.tasks import task
from bertjax.tasks.objectives.language_model import LanguageModeling
from bertjax.tasks.objectives.masked_lm import MaskedLm, MaskedLmOnPairs, MaskedLmOnText
from bertjax.tasks.objectives.pretraining import PretrainingObjective
from bertjax.tasks.task import NumpyBatch, StepCost

OBJECTIVES: dict[str, type[PretrainingObjective]] = {
    "nsp": MaskedLm,
    "pairs": MaskedLmOnPairs,
    "none": MaskedLmOnText,
    "lm": LanguageModeling,
}
_PERPLEXITY_LOSSES = ("mlm_loss", "ltr_loss", "rtl_loss")
# exp of more overflows float64.
_MAX_LOG_PERPLEXITY = 700.0


@dataclasses.dataclass(frozen=True)
class PretrainingData:
    """Corpus and batches.

    Attributes:
      corpus: folder of a prepared corpus.
      seq_len: tokens per row, special tokens included.
      batch_size: rows of the global batch.
      max_predictions: most masked positions of a row, or of each pair of a packed row (default: 0, `masking.rate` times
        `seq_len`, rounded up: 20 at 128, 77 at 512).
      objective: `nsp`, masked LM and next-sentence prediction; `pairs`, masked LM alone on the same rows (No NSP of
        Table 5); `none`, masked LM on rows of running text; `lm`, language modeling for models that see one side of a
        token: `model.attention_direction=left` (LTR & No NSP of Table 5) or `right`, or `model.encoder=lstm`, which
        does both.
      dupe_factor: number of different passes over the corpus from which sentence pairs are made, as in
        google-research/bert.
      packing: put several sentence pairs into a training row, each [CLS] A [SEP] B [SEP] with its own positions,
        attention and next-sentence label, so that rows are full; evaluation rows hold one pair.
      eval_rows: held-out rows of an evaluation (default: 0, all).
      masking: see `Masking`.
    """

    corpus: str = ""
    seq_len: int = 128
    batch_size: int = limited(256, 1 << 20)
    max_predictions: int = 0
    objective: str = "nsp"
    dupe_factor: int = limited(10, 10_000)
    packing: bool = False
    eval_rows: int = 0
    masking: Masking = Masking()

    def __post_init__(self) -> None:
        one_of(self, "config.data", objective=tuple(OBJECTIVES))
        at_least(self, "config.data", dupe_factor=1, eval_rows=0, max_predictions=0)
        if self.packing and not OBJECTIVES[self.objective].has_pairs:
            raise UsageError(
                f"config.data.packing=true needs sentence pairs, which objective={self.objective} does not have; set "
                "packing=false"
            )


@dataclasses.dataclass(frozen=True)
class LongPhase:
    """Last phase of training on longer rows; the paper trains the last 10 % of the steps at length 512 (A.2).

    Attributes:
      share: fraction of the steps (default: 0, no such phase).
      seq_len: tokens per row.
      max_predictions: as in `data`.
      keep_tokens_per_batch: keep the tokens of a batch, with fewer rows, instead of the rows; the paper's batch can be
        read as 131,072 tokens at both lengths or as 256 sequences at both.
    """

    share: float = 0.0
    seq_len: int = limited(512, 1 << 20)
    max_predictions: int = 0
    keep_tokens_per_batch: bool = True

    def __post_init__(self) -> None:
        at_least(self, "config.long_phase", seq_len=MIN_ROW_TOKENS, max_predictions=0)
        if not 0 <= self.share < 1:
            raise UsageError(f"config.long_phase.share={self.share} is out of range; use a value in [0, 1)")


@dataclasses.dataclass(frozen=True)
class Config(RunConfig):
    """Config of a pre-training.

    Attributes:
      model: fields of `ModelConfig`; `vocab_size` 0 takes that of the corpus.
      data: see `PretrainingData`.
      long_phase: see `LongPhase`.
    """

    task: str = "pretraining"
    model: dict[str, Any] = dataclasses.field(
        default_factory=lambda: {**dataclasses.asdict(ModelConfig()), "vocab_size": 0}
    )
    data: PretrainingData = PretrainingData()
    long_phase: LongPhase = LongPhase()

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.objective_class.has_pairs and self.model["type_vocab_size"] < 2:
            raise UsageError(
                f"config.model.type_vocab_size={self.model['type_vocab_size']} is too small for sentence pairs; use 2"
            )
        self.model_config(self.model["vocab_size"] or 1)
        self.objective_class.check_config(self)
        for phase in self.phases:
            self.check_rows(phase.seq_len, self.data.packing)
            self.check_batch(phase.batch_size, phase.seq_len)

    @property
    def has_data(self) -> bool:
        """True if the config names a corpus."""
        return bool(self.data.corpus)

    @property
    def objective_class(self) -> type[PretrainingObjective]:
        """Class of the objective."""
        return OBJECTIVES[self.data.objective]

    @property
    def phases(self) -> tuple[Phase, ...]:
        """Stretches of training with one batch shape each: one, or two with a long phase."""
        data, long = self.data, self.long_phase
        boundary = self.steps - round(self.steps * long.share)
        first = self._phase(data.seq_len, data.batch_size, data.max_predictions, 0, boundary)
        if boundary == self.steps:
            return (first,)
        rows = data.batch_size
        if long.keep_tokens_per_batch:
            rows = max(1, data.batch_size * data.seq_len // long.seq_len)
        second = self._phase(long.seq_len, rows, long.max_predictions, boundary, self.steps)
        # With few steps, `round` may give all of them to the long phase.
        return (first, second) if boundary else (second,)

    def _phase(self, seq_len: int, batch_size: int, max_predictions: int, start: int, stop: int) -> Phase:
        rate = self.data.masking.rate
        predictions = self.objective_class.max_predictions(seq_len, max_predictions, rate)
        if not self.data.packing:
            return Phase(seq_len, batch_size, predictions, start, stop)
        row_predictions = max_packed_predictions(rate, seq_len, predictions, MAX_PAIRS_PER_ROW)
        return Phase(seq_len, batch_size, predictions, start, stop, MAX_PAIRS_PER_ROW, row_predictions)


class Task(task.Task):
    """Pre-training on a corpus; without one, synthetic batches only."""

    eval_first = True
    objective: PretrainingObjective

    def __init__(self, config: Config, train: bool = True) -> None:
        """Opens the corpus.

        Args:
          config: config of the run.
          train: require a corpus.
        """
        super().__init__(config)
        self.config: Config
        self._corpus = open_anywhere(config.data.corpus) if config.data.corpus else None
        if train and self._corpus is None:
            # Before the workdir is created: its config would then refuse the corrected command.
            raise _no_corpus()
        self._vocabulary = self._corpus.vocabulary() if self._corpus else None
        vocab_size = self._vocabulary.size if self._vocabulary else config.model["vocab_size"] or DEFAULT_VOCAB_SIZE
        model = config.model_config(vocab_size)
        self.objective = config.objective_class.for_model(model, config.data.packing)
        self.total_steps, self.warmup_steps = config.steps, config.optimizer.warmup_steps
        self.eval_every, self.checkpoint_every = config.eval_every, config.checkpoint_every
        self.batch_sizes = tuple(phase.batch_size for phase in config.phases)
        self.phase_steps = tuple(phase.stop_step - phase.start_step for phase in config.phases)
        self.num_eval_batches = -(-config.data.eval_rows // config.phases[0].batch_size)
        self.notes = tuple(_describe_phase(phase, model) for phase in config.phases)
        if self._corpus:
            self.workdir_files = vocabulary_files(self._vocabulary)
            self.data_hash = self._corpus.fingerprint
        # A run evaluates the same rows many times, and TensorFlow takes seconds to trace them.
        self._eval_dataset = functools.cache(self._make_eval_dataset)

    @functools.cached_property
    def _row_source(self) -> Any:
        return self.objective.row_source()

    def train_batches(self, start_step: int, shard: DataShard) -> Iterator[NumpyBatch]:
        # TensorFlow is imported here, so that models can be described and timed without it.
        from bertjax.data.pretraining.batches import numpy_batches, train_dataset

        for phase in self.config.phases:
            if start_step < phase.stop_step:
                first = max(start_step, phase.start_step)
                dataset = train_dataset(
                    self._open_corpus(),
                    phase,
                    source=self._row_source,
                    masking=self.config.data.masking,
                    seed=self.config.seed,
                    dupe_factor=self.config.data.dupe_factor,
                    start_step=first,
                    shard=shard,
                )
                yield from self.objective.prepare(numpy_batches(dataset, self._open_corpus()))

    def eval_batches(self, shard: DataShard) -> Iterator[NumpyBatch]:
        from bertjax.data.pretraining.batches import numpy_batches

        return self.objective.prepare(numpy_batches(self._eval_dataset(shard), self._open_corpus()))

    def cost_before(self, step: int) -> StepCost:
        total = StepCost()
        for phase in self.config.phases:
            total += self.objective.step_cost(phase, max(0, min(step, phase.stop_step) - phase.start_step))
        return total

    def synthetic_batch(self, phase: int = 0) -> NumpyBatch:
        return self.objective.synthetic_batch(self.config.phases[phase])

    def format_row(self, batch: NumpyBatch, row: int) -> str:
        return self._row_source.prediction.format_row(batch, row, self._vocabulary)

    def evaluate(self, means: dict[str, float], outputs: list[Any]) -> dict[str, float]:
        """Adds the perplexity of the predicted tokens, over the mean of the directions if there are two."""
        losses = [means[name] for name in _PERPLEXITY_LOSSES if name in means]
        if not losses:
            return means
        return {**means, "perplexity": math.exp(min(sum(losses) / len(losses), _MAX_LOG_PERPLEXITY))}

    def baseline(self) -> dict[str, float]:
        from bertjax.data.pretraining.baseline import context_free_baseline

        # The baseline counts the tokens of the whole corpus.
        self._open_corpus().checksums.wait()
        names = [loss.removesuffix("_loss") for loss in self.objective.losses if loss != "nsp_loss"]
        source = self._row_source
        prediction = (source.heldout_like or source).prediction
        return context_free_baseline(self._corpus, self.eval_batches(SINGLE_SHARD), names, prediction)

    def check_data(self, steps: int | None) -> None:
        checksums = self._open_corpus().checksums
        if steps is None:
            checksums.check()
        else:
            checksums.wait()

    def _make_eval_dataset(self, shard: DataShard) -> Any:
        from bertjax.data.pretraining.batches import eval_dataset

        data, phase = self.config.data, self.config.phases[0]
        return eval_dataset(
            self._open_corpus(),
            seq_len=phase.seq_len,
            batch_size=phase.batch_size,
            max_predictions=phase.max_predictions,
            source=self._row_source,
            masking=data.masking,
            max_rows=data.eval_rows or None,
            shard=shard,
        )

    def _open_corpus(self) -> Any:
        if self._corpus is None:
            raise _no_corpus()
        return self._corpus


def _no_corpus() -> UsageError:
    return UsageError(
        "no corpus; name one with --config FILE:corpus=DIR (`bertjax prepare --input docs: --output DIR` makes one)"
    )


def _describe_phase(phase: Phase, model: ModelConfig) -> str:
    positions = phase.batch_size * phase.seq_len
    flops = flops_per_token(model, phase.seq_len, phase.max_predictions)
    packed = f" with up to {phase.spans_per_row} sentence pairs" if phase.spans_per_row > 1 else ""
    return (
        f"steps {phase.start_step:,} to {phase.stop_step:,}: {phase.batch_size:,} rows of {phase.seq_len} tokens"
        f"{packed}, {positions:,} positions per batch, {phase.row_predictions} predictions per row, "
        f"{flops / 1e6:,.1f} MFLOPs per token, {(phase.stop_step - phase.start_step) * positions:,} positions"
    )
