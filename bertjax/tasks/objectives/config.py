"""Config of pre-training, and pre-training objectives by name."""

import dataclasses
from typing import Any, ClassVar

from bertjax.config.run import RunConfig
from bertjax.data.pretraining.config import MAX_PAIRS_PER_ROW, MIN_ROW_TOKENS, Masking, Phase, packed_row_predictions
from bertjax.errors import UsageError
from bertjax.model.config import ModelConfig
from bertjax.tasks.objectives.language_model import LanguageModeling
from bertjax.tasks.objectives.masked_lm import MaskedLm, MaskedLmOnPairs, MaskedLmOnText, MaskedLmWithSentenceOrder
from bertjax.tasks.objectives.pretraining import PretrainingObjective
from bertjax.tasks.objectives.replaced_tokens import ReplacedTokens
from bertjax.utils.sections import Section, bounded

_UNSET_VOCABULARY: dict[str, Any] = {"vocab_size": None}
OBJECTIVES: dict[str, type[PretrainingObjective]] = {
    "nsp": MaskedLm,
    "sop": MaskedLmWithSentenceOrder,
    "pairs": MaskedLmOnPairs,
    "none": MaskedLmOnText,
    "lm": LanguageModeling,
    "rtd": ReplacedTokens,
}


@dataclasses.dataclass(frozen=True)
class PretrainingData(Section):
    """Corpus and batches of pre-training.

    Attributes:
      corpus: folder of a prepared corpus.
      seq_len: tokens per row, including special tokens.
      batch_size: rows of the global batch.
      max_predictions: maximum masked positions per row, or per sentence pair if rows are packed (default: 0,
        `masking.rate` times `seq_len`, rounded up: 20 at length 128 and 77 at length 512).
      objective: pre-training objective. `nsp` is masked LM and next-sentence prediction. `sop` is masked LM and
        sentence-order prediction, as in ALBERT. `pairs` is masked LM on the
        same rows (No NSP in Table 5). `none` is masked LM on rows of contiguous text. `lm` is unidirectional language
        modeling. It needs `model.attention_direction=left` (LTR & No NSP in Table 5) or `right`, or
        `model.encoder=lstm`, which trains both directions. `rtd` is replaced-token detection, as in ELECTRA, on rows of
        contiguous text.
      dupe_factor: number of passes over the corpus with different sentence pairs before the pairs repeat, as in
        google-research/bert.
      packing: whether to pack several sentence pairs into each training row to avoid padding. Each pair is
        [CLS] A [SEP] B [SEP] with its own positions, attention and next-sentence label. Evaluation rows are not packed.
      eval_rows: number of held-out rows per evaluation (default: 0, all).
      generator_size: number of heads, hidden size and feed-forward size of the generator of `rtd`, as a fraction of the
        model's. The number of heads is rounded, and is at least 1.
      discriminator_weight: coefficient of the discriminator's loss in `rtd`. That of the generator's loss is 1.
      masking: see `Masking`.
    """

    field_prefix: ClassVar[str] = "config.data."

    corpus: str = ""
    seq_len: int = bounded(128, at_least=MIN_ROW_TOKENS)
    batch_size: int = bounded(256, at_least=1, at_most=1 << 20)
    max_predictions: int = bounded(0, at_least=0)
    objective: str = bounded("nsp", choices=OBJECTIVES)
    dupe_factor: int = bounded(10, at_least=1, at_most=10_000)
    packing: bool = False
    eval_rows: int = bounded(0, at_least=0)
    generator_size: float = bounded(0.25, above=0, at_most=1)
    discriminator_weight: float = bounded(50.0, at_least=0)
    masking: Masking = Masking()

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.packing and not OBJECTIVES[self.objective].pairing:
            raise UsageError(
                f"config.data.packing=true needs sentence pairs, which objective={self.objective} does not have; set "
                "packing=false"
            )
        for name in ("generator_size", "discriminator_weight"):
            is_set = getattr(self, name) != getattr(PretrainingData, name)
            if is_set and not issubclass(OBJECTIVES[self.objective], ReplacedTokens):
                raise UsageError(f"config.data.{name} needs objective=rtd; objective={self.objective} has no generator")


@dataclasses.dataclass(frozen=True)
class LongPhase(Section):
    """Last training phase, on longer rows. The paper trains the last 10 % of the steps at length 512 (section A.2).

    Attributes:
      share: fraction of the training steps (default: 0, no long phase).
      seq_len: tokens per row.
      max_predictions: maximum masked positions per row of this phase (default: 0, derived like `data.max_predictions`).
      keep_tokens_per_batch: whether batches have as many tokens as in the first phase, in fewer rows (default: true).
        If false, batches have as many rows as in the first phase. The paper allows both, because it states the batch
        size as 256 sequences of 512 tokens (131,072 tokens).
    """

    field_prefix: ClassVar[str] = "config.long_phase."

    share: float = bounded(0.0, at_least=0, below=1)
    seq_len: int = bounded(512, at_least=MIN_ROW_TOKENS, at_most=1 << 20)
    max_predictions: int = bounded(0, at_least=0)
    keep_tokens_per_batch: bool = True


@dataclasses.dataclass(frozen=True)
class PretrainingConfig(RunConfig):
    """Config of a pre-training run.

    Attributes:
      data: see `PretrainingData`.
      long_phase: see `LongPhase`.
    """

    task: str = "pretraining"
    model: ModelConfig = dataclasses.replace(ModelConfig(), **_UNSET_VOCABULARY)
    data: PretrainingData = PretrainingData()
    long_phase: LongPhase = LongPhase()

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.has_model:  # Otherwise, the architecture is that of the `--init_from` checkpoint, unknown here.
            self._check_model()
        for phase in self.phases:
            self.check_batch(phase.batch_size, phase.seq_len)

    def _check_model(self) -> None:
        if self.objective_class.pairing and self.model.type_vocab_size < 2:
            raise UsageError(
                f"config.model.type_vocab_size={self.model.type_vocab_size} is too small for sentence pairs; use 2"
            )
        self.objective_class.check_model(self.model)
        is_masking_set = self.data.masking != Masking() or self.data.max_predictions or self.long_phase.max_predictions
        if is_masking_set and not self.objective_class.has_masks:
            raise UsageError(
                f"config.data.objective={self.data.objective} predicts every token without masks; leave "
                "config.data.masking and max_predictions unset"
            )
        for phase in self.phases:
            self.check_rows(phase.seq_len, self.data.packing)

    @property
    def has_data(self) -> bool:
        """True if a corpus is configured."""
        return bool(self.data.corpus)

    @property
    def objective_class(self) -> type[PretrainingObjective]:
        """Class of the configured objective."""
        return OBJECTIVES[self.data.objective]

    @property
    def phases(self) -> tuple[Phase, ...]:
        """Training phases, each with one batch shape. `long_phase` adds a second phase."""
        data, long = self.data, self.long_phase
        boundary = self.steps - round(self.steps * long.share)
        first = self._phase(data.seq_len, data.batch_size, data.max_predictions, 0, boundary)
        if boundary == self.steps:
            return (first,)
        rows = data.batch_size
        if long.keep_tokens_per_batch:
            rows = max(1, data.batch_size * data.seq_len // long.seq_len)
        second = self._phase(long.seq_len, rows, long.max_predictions, boundary, self.steps)
        # With few steps, rounding may assign all steps to the long phase.
        return (first, second) if boundary else (second,)

    def _phase(self, seq_len: int, batch_size: int, max_predictions: int, start: int, stop: int) -> Phase:
        rate = self.data.masking.rate
        predictions = self.objective_class.max_predictions(seq_len, max_predictions, rate)
        if not self.data.packing:
            return Phase(seq_len, batch_size, predictions, start, stop)
        row_predictions = packed_row_predictions(rate, seq_len, predictions)
        return Phase(seq_len, batch_size, predictions, start, stop, MAX_PAIRS_PER_ROW, row_predictions)
