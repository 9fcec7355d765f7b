"""Config of pre-training, and its objectives by name."""

import dataclasses
from typing import Any

from bertjax.config.fields import at_least, limited, one_of
from bertjax.config.run import RunConfig
from bertjax.data.pretraining.config import MAX_PAIRS_PER_ROW, MIN_ROW_TOKENS, Masking, Phase, max_packed_predictions
from bertjax.errors import UsageError
from bertjax.model.config import ModelConfig
from bertjax.tasks.objectives.language_model import LanguageModeling
from bertjax.tasks.objectives.masked_lm import MaskedLm, MaskedLmOnPairs, MaskedLmOnText
from bertjax.tasks.objectives.pretraining import PretrainingObjective

OBJECTIVES: dict[str, type[PretrainingObjective]] = {
    "nsp": MaskedLm,
    "pairs": MaskedLmOnPairs,
    "none": MaskedLmOnText,
    "lm": LanguageModeling,
}


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
        """Phases of training, each with one batch shape; `long_phase` adds a second one."""
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
