"""The paper's pre-training: masked language model and next-sentence prediction (section 3.1)."""

import dataclasses
import math
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

import numpy as np

from bertjax.config.fields import at_least, limited, one_of
from bertjax.config.run import DEFAULT_VOCAB_SIZE, RunConfig
from bertjax.data.corpus.local_copy import open_anywhere
from bertjax.data.corpus.store import Corpus
from bertjax.data.corpus.vocabulary_files import vocabulary_files
from bertjax.data.pretraining.config import (
    PACKED_BATCH,
    PAIRS_A_ROW,
    SHORTEST_ROW,
    SPECIAL_TOKENS_OF_TILE,
    Masking,
    Phase,
    packed_predictions,
)
from bertjax.data.pretraining.formatting import format_example
from bertjax.data.shard import SINGLE_SHARD, DataShard
from bertjax.errors import UsageError
from bertjax.model.architecture import LSTM
from bertjax.model.config import ModelConfig
from bertjax.model.flops import attention_flops_per_token, flops_per_token
from bertjax.tasks.objectives import language_model, masked_lm
from bertjax.tasks.task import Cadence, NumpyBatch, StepCost, Task


def _sentence_pairs() -> Any:
    # Imported when rows are made, so that models are described and timed where TensorFlow is not installed.
    from bertjax.data.pretraining.sentence_pairs import SENTENCE_PAIRS

    return SENTENCE_PAIRS


def _packed_pairs() -> Any:
    from bertjax.data.pretraining.packed_pairs import PACKED_PAIRS

    return PACKED_PAIRS


def _tiles() -> Any:
    from bertjax.data.pretraining.tiles import TILES

    return TILES


def _whole_tiles() -> Any:
    from bertjax.data.pretraining.tiles import WHOLE_TILES

    return WHOLE_TILES


_NEXT_SENTENCE, _PAIRS, _LANGUAGE_MODEL = "nsp", "pairs", "lm"
# Of each objective, what a step computes and where its rows come from.
_OBJECTIVES = {
    _NEXT_SENTENCE: (masked_lm, _sentence_pairs),
    _PAIRS: (masked_lm, _sentence_pairs),
    "none": (masked_lm, _tiles),
    _LANGUAGE_MODEL: (language_model, _whole_tiles),
}
_OF_PAIRS = (_NEXT_SENTENCE, _PAIRS)
_BATCH_READINGS = ("tokens", "sequences")


@dataclasses.dataclass(frozen=True)
class PretrainingData:
    """What is read, and in which batches.

    Attributes:
      corpus: folder of a prepared corpus.
      seq_len: tokens a row, special tokens included.
      batch_size: rows of the global batch.
      max_predictions: masked positions at most, of a row or of each pair of a packed one; 0 is `masking.rate` of
        `seq_len`, rounded up (20 at 128, 77 at 512).
      objective: `nsp`, masked LM with next-sentence prediction; `pairs`, masked LM alone, on the same rows (No NSP of
        Table 5); `none`, masked LM on rows of running text; or `lm`, every piece from those on one side of it, for
        models that see no other: `model.attention_direction=left` (LTR & No NSP of Table 5) or `right`, or
        `model.encoder=lstm`, which does both.
      dupe_factor: different passes over the corpus that pairs are made of, 10 as google-research/bert's dupe_factor.
      packing: put several sentence pairs into a row, each [CLS] A [SEP] B [SEP] with positions, attention and a
        next-sentence label of its own, so that rows are full. A batch then holds more pairs; evaluation has one a row.
      eval_rows: held-out rows of an evaluation; 0 is all.
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
        one_of(self, "config.data", objective=tuple(_OBJECTIVES))
        at_least(self, "config.data", dupe_factor=1, eval_rows=0, max_predictions=0)
        if self.packing and self.objective not in _OF_PAIRS:
            raise UsageError(
                f"config.data.packing puts sentence pairs together, and objective={self.objective} has none: its rows "
                "are full as they are; give packing=false"
            )


@dataclasses.dataclass(frozen=True)
class LongPhase:
    """A last stretch of training on longer rows; the paper trains the last 10 % of steps at length 512 (A.2).

    Attributes:
      share: of the steps; 0 is none.
      seq_len: tokens a row.
      max_predictions: as in `data`.
      batch_reading: `tokens` keeps as many tokens a batch as before, `sequences` as many rows; the paper's batch can be
        read as 131,072 tokens at both lengths or as 256 sequences at both.
    """

    share: float = 0.0
    seq_len: int = limited(512, 1 << 20)
    max_predictions: int = 0
    batch_reading: str = "tokens"

    def __post_init__(self) -> None:
        one_of(self, "config.long_phase", batch_reading=_BATCH_READINGS)
        at_least(self, "config.long_phase", seq_len=SHORTEST_ROW, max_predictions=0)
        if not 0 <= self.share < 1:
            raise UsageError(f"config.long_phase.share is {self.share}; it must be in [0, 1)")


@dataclasses.dataclass(frozen=True)
class Config(RunConfig):
    """Settings of the task.

    Attributes:
      model: fields of `ModelConfig`, where a vocabulary of size 0 is that of the corpus.
    """

    task: str = "pretraining"
    model: dict[str, Any] = dataclasses.field(
        default_factory=lambda: {**dataclasses.asdict(ModelConfig()), "vocab_size": 0}
    )
    data: PretrainingData = PretrainingData()
    long_phase: LongPhase = LongPhase()

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.data.objective in _OF_PAIRS and self.model["type_vocab_size"] < 2:
            raise UsageError(
                f"config.model.type_vocab_size is {self.model['type_vocab_size']}; sentence pairs have 2 segments"
            )
        self.model_config(self.model["vocab_size"] or 1)
        self._check_model()
        for phase in self.phases:
            self.check_rows(phase.seq_len, self.data.packing)
            self.check_batch(phase.batch_size, phase.seq_len)

    def _check_model(self) -> None:
        """Refuses a model that sees what it is to predict, or not what it is to predict from."""
        encoder, direction = self.model["encoder"], self.model["attention_direction"]
        if self.data.objective != _LANGUAGE_MODEL:
            if encoder == LSTM:
                raise UsageError(
                    f"config.data.objective is {self.data.objective}, and model.encoder={LSTM} sees no position from "
                    f"both sides; give objective={_LANGUAGE_MODEL}"
                )
        elif encoder != LSTM and direction == "both":
            raise UsageError(
                f"config.data.objective is {_LANGUAGE_MODEL}, and the model would see what it is to predict; give "
                "model.attention_direction=left, or right, or model.encoder=lstm"
            )
        elif self.data.max_predictions or self.long_phase.max_predictions:
            raise UsageError(f"config.data.objective={_LANGUAGE_MODEL} predicts every piece; leave max_predictions out")
        elif self.data.masking != Masking():
            raise UsageError(f"config.data.objective={_LANGUAGE_MODEL} masks nothing; leave data.masking as it is")

    @property
    def has_data(self) -> bool:
        """Whether they name a corpus."""
        return bool(self.data.corpus)

    @property
    def phases(self) -> tuple[Phase, ...]:
        """The stretches of training with one batch shape each: one, or two where there is a long phase."""

        def phase(seq_len: int, batch_size: int, predictions: int, start: int, stop: int) -> Phase:
            if self.data.objective == _LANGUAGE_MODEL:
                predictions = max(seq_len - SPECIAL_TOKENS_OF_TILE, 1)
            rate = self.data.masking.rate
            predictions = predictions or math.ceil(round(rate * seq_len, 6))
            if not self.data.packing:
                return Phase(seq_len, batch_size, predictions, start, stop)
            in_row = packed_predictions(rate, seq_len, predictions, PAIRS_A_ROW)
            return Phase(seq_len, batch_size, predictions, start, stop, PAIRS_A_ROW, in_row)

        data, long = self.data, self.long_phase
        boundary = self.steps - round(self.steps * long.share)
        first = phase(data.seq_len, data.batch_size, data.max_predictions, 0, boundary)
        if boundary == self.steps:
            return (first,)
        rows = data.batch_size
        if long.batch_reading == "tokens":
            rows = max(1, data.batch_size * data.seq_len // long.seq_len)
        second = phase(long.seq_len, rows, long.max_predictions, boundary, self.steps)
        # Of so few steps a large share is all of them.
        return (first, second) if boundary else (second,)

    @property
    def source(self) -> Any:
        """Where rows come from: a `RowSource`."""
        _, source = _OBJECTIVES[self.data.objective]
        return _packed_pairs() if self.data.packing else source()


def build(settings: Config, train: bool = True) -> Task:
    """The task of settings, on their corpus; without one, a task that has synthetic batches only.

    Args:
      train: whether it is to be trained, which needs a corpus.

    Raises:
      UsageError: no corpus or no such corpus, or it does not fit the settings.
    """
    corpus = open_anywhere(settings.data.corpus) if settings.data.corpus else None
    if train:
        # Before a workdir is made: one with another corpus in its config would refuse the right command.
        _needed(corpus)
    vocabulary = corpus.vocabulary() if corpus else None
    size = vocabulary.size if vocabulary else settings.model["vocab_size"] or DEFAULT_VOCAB_SIZE
    model = settings.model_config(size)
    computed, _ = _OBJECTIVES[settings.data.objective]
    objective = computed.objective(model)
    # Tracing takes TensorFlow as long as some evaluations; a run evaluates the same rows again and again.
    held_out = cache(partial(_held_out, settings, corpus))
    return Task(
        objective=dataclasses.replace(objective, schema=PACKED_BATCH) if settings.data.packing else objective,
        schedule=Cadence(
            steps=settings.steps,
            warmup_steps=settings.optimizer.warmup_steps,
            eval_every=settings.eval_every,
            checkpoint_every=settings.checkpoint_every,
            eval_first=True,
        ),
        batch_sizes=tuple(phase.batch_size for phase in settings.phases),
        train_batches=partial(_train_batches, settings, corpus),
        eval_batches=partial(_eval_batches, settings, corpus, held_out),
        eval_steps=-(-settings.data.eval_rows // settings.phases[0].batch_size),
        work=partial(_work, settings.phases, model),
        synthetic_batch=lambda phase: computed.synthetic_rows(settings.phases[phase], model),
        phase_steps=tuple(phase.stop_step - phase.start_step for phase in settings.phases),
        show=partial(format_example, vocabulary=vocabulary),
        score=lambda means, outputs: _with_perplexity(means),
        baseline=partial(_baseline, settings, corpus, held_out),
        check_data=partial(_check_data, settings, corpus),
        notes=tuple(_note(phase, model) for phase in settings.phases),
        files=vocabulary_files(vocabulary) if vocabulary else {},
        data_hash=corpus.fingerprint if corpus else "",
    )


def _needed(corpus: Corpus | None) -> Corpus:
    if corpus is None:
        raise UsageError(
            "no corpus: give one with --config FILE:corpus=DIR or --config.data.corpus=DIR; "
            "`bertjax prepare --input docs: --output DIR` makes one"
        )
    return corpus


def _baseline(settings: Config, corpus: Corpus | None, held_out: Callable[[DataShard], Any]) -> dict[str, float]:
    from bertjax.data.pretraining.baseline import context_free_baseline

    # It counts the tokens of the whole corpus.
    _needed(corpus).verification.verify_all()
    computed, _ = _OBJECTIVES[settings.data.objective]
    model = settings.model_config(_needed(corpus).vocabulary().size)
    losses = computed.objective(model).losses
    names = [loss.removesuffix("_loss") for loss in losses if loss != "nsp_loss"]
    return context_free_baseline(_needed(corpus), _eval_batches(settings, corpus, held_out, SINGLE_SHARD), names)


def _train_batches(settings: Config, corpus: Corpus | None, start_step: int, share: DataShard) -> Iterator[NumpyBatch]:
    # Imported here, so that models are described and timed where TensorFlow is not installed.
    from bertjax.data.pretraining.batches import train_dataset
    from bertjax.data.pretraining.verified import watched

    for phase in settings.phases:
        if start_step < phase.stop_step:
            first = max(start_step, phase.start_step)
            dataset = train_dataset(
                _needed(corpus),
                phase,
                source=settings.source,
                masking=settings.data.masking,
                seed=settings.seed,
                dupe_factor=settings.data.dupe_factor,
                start_step=first,
                share=share,
            )
            batches = watched(dataset, corpus, lambda made, first=first: _check_data(settings, corpus, first + made))
            yield from _as_asked(settings, batches)


def _check_data(settings: Config, corpus: Corpus | None, steps: int | None) -> None:
    corpus = _needed(corpus)
    corpus.verification.check()
    if steps is not None:
        from bertjax.data.pretraining.verified import verify_evaluation, verify_training

        verify_evaluation(corpus, settings.phases[0].seq_len, settings.source)
        verify_training(
            corpus,
            settings.phases,
            steps,
            source=settings.source,
            seed=settings.seed,
            dupe_factor=settings.data.dupe_factor,
        )


def _held_out(settings: Config, corpus: Corpus | None, share: DataShard) -> Any:
    """A tf.data.Dataset of the evaluation's batches."""
    from bertjax.data.pretraining.batches import eval_dataset

    phase = settings.phases[0]
    return eval_dataset(
        _needed(corpus),
        seq_len=phase.seq_len,
        batch_size=phase.batch_size,
        max_predictions=phase.max_predictions,
        source=settings.source,
        masking=settings.data.masking,
        max_rows=settings.data.eval_rows or None,
        share=share,
    )


def _eval_batches(
    settings: Config, corpus: Corpus | None, held_out: Callable[[DataShard], Any], share: DataShard
) -> Iterator[NumpyBatch]:
    from bertjax.data.pretraining.verified import verify_evaluation, watched

    seq_len = settings.phases[0].seq_len
    batches = watched(held_out(share), corpus, lambda made: verify_evaluation(corpus, seq_len, settings.source))
    return _as_asked(settings, batches)


def _as_asked(settings: Config, batches: Iterator[NumpyBatch]) -> Iterator[NumpyBatch]:
    """Without what follows what, where nobody asks: of a label of -1 there is no loss."""
    if settings.data.objective != _PAIRS:
        return batches
    name = "next_sentence_labels"
    return ({**batch, name: np.full_like(batch[name], -1)} for batch in batches)


def _with_perplexity(means: dict[str, float]) -> dict[str, float]:
    """Of the pieces that are predicted, the mean over the directions where there are two."""
    losses = [means[name] for name in ("mlm_loss", "ltr_loss", "rtl_loss") if name in means]
    # Beyond e^700 a float64 overflows.
    return {**means, "perplexity": math.exp(min(sum(losses) / len(losses), 700.0))} if losses else means


def _note(phase: Phase, model: ModelConfig) -> str:
    batch = phase.batch_size * phase.seq_len
    flops = flops_per_token(model, phase.seq_len, phase.max_predictions)
    packed = f" of up to {phase.spans_a_row} sentence pairs" if phase.spans_a_row > 1 else ""
    return (
        f"steps {phase.start_step:,} to {phase.stop_step:,}: {phase.batch_size:,} rows of {phase.seq_len}{packed} = "
        f"{batch:,} positions a batch, {phase.row_predictions} predictions a row, {flops / 1e6:,.1f} MFLOPs a token, "
        f"{(phase.stop_step - phase.start_step) * batch:,} positions"
    )


def _work(phases: tuple[Phase, ...], model: ModelConfig, step: int) -> StepCost:
    rows = positions = 0
    flops = attention = 0.0
    for phase in phases:
        done = max(0, min(step, phase.stop_step) - phase.start_step) * phase.batch_size
        rows += done
        here = done * phase.seq_len
        positions += here
        flops += here * flops_per_token(model, phase.seq_len, phase.max_predictions)
        attention += here * attention_flops_per_token(model, phase.seq_len)
    return StepCost(rows, positions, flops, attention)
