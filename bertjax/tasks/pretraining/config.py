"""Config for pre-training, and pre-training objectives by name."""

import dataclasses
import itertools
import math
from typing import Any

from bertjax.config.fields import from_config_dict
from bertjax.config.run import RunConfig
from bertjax.data.pretraining.config import MIN_ROW_TOKENS, TEXT_SPECIAL_TOKENS, Masking, Phase, PhaseConfig
from bertjax.errors import UsageError
from bertjax.model.config import LSTM, ROPE_THETAS, ModelConfig
from bertjax.tasks.objectives.language_model import LanguageModeling
from bertjax.tasks.objectives.masked_lm import MaskedLm, MaskedLmOnPairs, MaskedLmOnText, MaskedLmWithSentenceOrder
from bertjax.tasks.objectives.pretraining import PretrainingObjective
from bertjax.tasks.objectives.replaced_tokens import ReplacedTokens
from bertjax.utils.sections import Section, bounded

_UNSET_VOCABULARY: dict[str, Any] = {"vocab_size": None}
# Fields of `PretrainingData` that have no effect on objectives without masks.
_MASK_OPTIONS = ("packing", "max_predictions", "masking")
OBJECTIVES: dict[str, type[PretrainingObjective]] = {
    "nsp": MaskedLm,
    "sop": MaskedLmWithSentenceOrder,
    "pairs": MaskedLmOnPairs,
    "none": MaskedLmOnText,
    "lm": LanguageModeling,
    "rtd": ReplacedTokens,
}


@dataclasses.dataclass(frozen=True)
class PretrainingData(Section, prefix="config.data."):
    """Corpus and batches of pre-training.

    Attributes:
      corpus: folder of a prepared corpus.
      seq_len: tokens per row, including special tokens.
      batch_size: rows of the global batch.
      max_predictions: maximum masked positions per row of `seq_len` tokens or, in packed rows, per sentence pair or
        document (default: 0, `masking.rate` times `seq_len`, rounded up: 20 at length 128 and 77 at length 512).
      objective: pre-training objective. `nsp` is masked LM and next-sentence prediction. `sop` is masked LM and
        sentence-order prediction, as in ALBERT. `pairs` is masked LM on the rows of `nsp` (No NSP in Table 5). `none`
        is masked LM on rows of contiguous text or, with `packing`, of documents. `lm` is unidirectional language
        modeling. It needs `model.attention_direction=left` (LTR & No NSP in Table 5) or `right`, or
        `model.encoder=lstm`, which trains both directions. `rtd` is replaced-token detection, as in ELECTRA, on the
        rows of `none`.
      dupe_factor: number of passes over the corpus with different sentence pairs before the pairs repeat, as in
        google-research/bert.
      packing: whether to pack several sentence pairs into each training row to avoid padding. Each pair is
        [CLS] A [SEP] B [SEP] with its own positions, attention and next-sentence label. Evaluation rows are not packed.
        With `objective=none`, rows of training and evaluation are packed with documents, each [CLS] A [SEP]. Documents
        that are longer than a row are divided into pieces.
      eval_rows: number of held-out rows per evaluation (default: 0, all).
      generator_size: number of heads, hidden size and feed-forward size of the generator of `rtd`, as a fraction of the
        model's. The number of heads is rounded, and is at least 1.
      discriminator_weight: coefficient of the discriminator's loss in `rtd`. The generator's loss has coefficient 1.
      masking: see `Masking`.
    """

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

    @property
    def has_files(self) -> bool:
        """True if a corpus is configured."""
        return bool(self.corpus)

    def __post_init__(self) -> None:
        super().__post_init__()
        options = {
            name: (*(_MASK_OPTIONS if objective.has_masks else ()), *objective.options)
            for name, objective in OBJECTIVES.items()
        }
        for option in dict.fromkeys(itertools.chain(*options.values())):
            users = [name for name in options if option in options[name]]
            if self.objective not in users and getattr(self, option) != getattr(PretrainingData, option):
                problem = f"config.data.{option} needs objective={' or '.join(users)}"
                raise UsageError(f"{problem}; objective={self.objective} ignores it, so leave {option} unset")


@dataclasses.dataclass(frozen=True)
class PretrainingConfig(RunConfig):
    """Config for a pre-training run.

    Attributes:
      data: see `PretrainingData`.
      phases: training phases, such as `({'share': 0.9}, {'share': 0.1, 'seq_len': 512})` (default: one phase). See
        `PhaseConfig`.
    """

    task: str = "pretraining"
    model: ModelConfig = dataclasses.replace(ModelConfig(), **_UNSET_VOCABULARY)
    data: PretrainingData = PretrainingData()
    phases: tuple[dict[str, Any], ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        model, objective = self.model, self.objective_class
        for phase in self.resolved_phases:
            self.check_micro_batches(phase.batch_size)
            if self.has_model:
                self.check_rows(phase.seq_len, self.data.packing)
        if not objective.has_masks and any(phase.masking.rate != Masking.rate for phase in self.resolved_phases):
            raise UsageError(f"mask_rate in config.phases has no effect on objective={self.data.objective}; omit it")
        if not self.has_model:  # The architecture comes from `--init_from` and is unknown here.
            return
        if objective.pairing and model.type_vocab_size < 2:
            raise UsageError(
                f"config.model.type_vocab_size={model.type_vocab_size} is too small for sentence pairs; use "
                "--config.data.objective=none, or a model with two segments"
            )
        if issubclass(objective, MaskedLm) and model.encoder == LSTM:
            raise UsageError(
                f"masked LM needs context from both sides, which model.encoder={LSTM} does not provide; set "
                "config.data.objective=lm"
            )
        if issubclass(objective, LanguageModeling) and model.encoder != LSTM and model.attention_direction == "both":
            raise UsageError(
                f"config.data.objective={self.data.objective} would let the model see the tokens that it predicts; set "
                "model.attention_direction=left or right, or model.encoder=lstm"
            )

    @property
    def objective_class(self) -> type[PretrainingObjective]:
        return OBJECTIVES[self.data.objective]

    @property
    def resolved_phases(self) -> tuple[Phase, ...]:
        """Training phases, each with one batch shape. Phases whose share rounds to 0 steps are omitted."""
        rates = {"mask_rate": self.data.masking.rate, "learning_rate": self.optimizer.learning_rate}
        thetas = {name: getattr(self.model, name) for name in ROPE_THETAS}
        run = PhaseConfig(seq_len=self.data.seq_len, **rates, **thetas)
        configs = [from_config_dict(run, item, f"config.phases[{i}]") for i, item in enumerate(self.phases or ({},))]
        shares, start, phases = [config.share for config in configs], 0, []
        for index, config in enumerate(configs):
            # Round the number of steps that remain after each phase, so that the last phase gets exactly its share.
            stop = self.steps - round(self.steps * sum(shares[index + 1 :]) / sum(shares))
            if stop > start:
                phases.append(self._phase(config, start, stop))
                start = stop
        return tuple(phases)

    def _phase(self, config: PhaseConfig, start: int, stop: int) -> Phase:
        data, seq_len = self.data, config.seq_len
        rows = config.batch_size or max(1, data.batch_size * data.seq_len // seq_len)
        predictions = data.max_predictions if seq_len == data.seq_len else 0
        if not self.objective_class.has_masks:
            predictions = seq_len - TEXT_SPECIAL_TOKENS
        elif not predictions:
            # Round first, because 0.07 * 100 is 7.000000000000001 in floating point.
            predictions = math.ceil(round(config.mask_rate * seq_len, 6))
        row_format = self.objective_class.row_format(data.packing)
        masking = dataclasses.replace(data.masking, rate=config.mask_rate)
        thetas = {name: getattr(config, name) for name in ROPE_THETAS}
        return Phase(seq_len, rows, predictions, start, stop, row_format, masking, config.learning_rate, **thetas)
