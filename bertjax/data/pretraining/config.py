"""Settings of pre-training batches. This module does not import TensorFlow."""

import dataclasses
import functools
import math

from bertjax.data.schema import SEQUENCE, ArraySpec, Schema
from bertjax.errors import UsageError
from bertjax.utils.sections import Section, bounded

# Minimum tokens per row, including special tokens.
MIN_ROW_TOKENS = 8
# Minimum tokens of a pair: [CLS] A [SEP] B [SEP] with one token in each segment.
MIN_PAIR_TOKENS = 5
# Number of special tokens in [CLS] A [SEP] B [SEP] and in [CLS] A [SEP].
PAIR_SPECIAL_TOKENS, TEXT_SPECIAL_TOKENS = 3, 2
# Maximum number of sentence pairs per packed row. On Wikipedia at length 512, a limit of 4 leaves 0.7 % padding, and a
# limit of 8 leaves 0.1 %. At length 128, a limit above 2 has no effect, since most pairs are longer than half a row.
MAX_PAIRS_PER_ROW = 8
# A packed row of L tokens has at most max(8, L // 32) documents.
_TOKENS_PER_DOCUMENT = 32
# Positions that the model predicts, and their original tokens. Unused predictions have weight 0.
PREDICTIONS: Schema = (
    ArraySpec("masked_lm_positions", ("predictions",), num_values="length"),
    ArraySpec("masked_lm_ids", ("predictions",), num_values="pieces"),
    ArraySpec("masked_lm_weights", ("predictions",), "float32"),
)
MASKED_LM_BATCH: Schema = (
    *SEQUENCE,
    *PREDICTIONS,
    ArraySpec("next_sentence_labels", (), num_values="labels", padding=-1),
)
# Rows of several sentence pairs or documents. `sequence_ids` numbers them from 1, and is 0 at padding.
PACKED_BATCH: Schema = (
    ArraySpec("input_ids", ("length",), num_values="pieces"),
    ArraySpec("sequence_ids", ("length",)),
    ArraySpec("position_ids", ("length",), ascending=True),
    ArraySpec("segment_ids", ("length",), num_values="segments"),
    *PREDICTIONS,
    ArraySpec("next_sentence_labels", ("sequences",), num_values="labels", padding=-1),
)


@dataclasses.dataclass(frozen=True)
class RowFormat:
    """Row format of a pre-training objective: sentence pairs, documents, or running text.

    Sentence pairs: `pairs.document_pairs` divides the corpus into pairs, differently in each pass. Training
    cycles through the passes, one per epoch. Each pair is truncated to L - 3 tokens and masked on its own.
    Documents: `pairs.document_pieces` divides documents into pieces, which are packed and masked like pairs.
    Running text: `rows.running_text_lookup` divides the corpus into rows of L - 2 consecutive tokens, which may cross
    sentence and document boundaries. In an epoch, each token is in exactly one row.
    """

    # Kind of sentence pairs, see `document_pairs` (default: "", no pairs: documents if `packed`, else running text).
    pairing: str = ""
    packed: bool = False  # whether a row contains several pairs or documents
    masked: bool = True  # whether tokens are masked; must be True for pairs and packed rows

    @property
    def schema(self) -> Schema:
        """Schema of a batch. Without masking, a language model predicts every token, so no positions are listed."""
        return (PACKED_BATCH if self.packed else MASKED_LM_BATCH) if self.masked else SEQUENCE


@dataclasses.dataclass(frozen=True)
class Masking(Section, prefix="config.data.masking."):
    """Settings of token masking. The defaults are from section 3.1 of the paper.

    Attributes:
      rate: fraction of a row's tokens to predict. Special tokens are part of the count, as in google-research/bert.
      mask_prob: probability that a predicted token is replaced by [MASK].
      keep_prob: probability that a predicted token is left unchanged.
      random_prob: probability that a predicted token is replaced by a random token that is not special. The three
        probabilities add up to 1.
      whole_word: whether to mask entire words, that is, either all pieces of a word or none.
      max_span: maximum number of words in a masked span (default: 1, no spans). Spans are whole words. The number of
        words per span is geometric with parameter 0.2, as in SpanBERT (arXiv 1907.10529), which uses a maximum of 10.
    """

    rate: float = bounded(0.15, above=0, at_most=1)
    mask_prob: float = bounded(0.8, at_least=0, at_most=1)
    keep_prob: float = bounded(0.1, at_least=0, at_most=1)
    random_prob: float = bounded(0.1, at_least=0, at_most=1)
    whole_word: bool = False
    max_span: int = bounded(1, at_least=1, at_most=512)

    def __post_init__(self) -> None:
        super().__post_init__()
        probs = (self.mask_prob, self.keep_prob, self.random_prob)
        if not math.isclose(sum(probs), 1, abs_tol=1e-6):
            raise UsageError(
                f"probabilities of config.data.masking add up to {sum(probs):g}: {probs}; they must sum to 1"
            )


@dataclasses.dataclass(frozen=True)
class PhaseConfig(Section, prefix="config.phases[]."):
    """Config of a training phase, an item of `config.phases`. Unset fields take the run's values.

    Attributes:
      share: relative number of steps; the phase has `share` / (sum of all shares) of the run's steps.
      seq_len: tokens per row (default: `data.seq_len`).
      batch_size: rows of the global batch (default: 0, `data.batch_size * data.seq_len / seq_len`, rounded down).
      mask_rate: fraction of a row's tokens to predict (default: `data.masking.rate`).
      learning_rate: peak learning rate; scales the learning-rate schedule (default: `optimizer.learning_rate`).
      global_rope_theta: RoPE theta (default: `model.global_rope_theta`). Checkpoints of this phase store this value.
      local_rope_theta: RoPE theta of layers with local attention (default: `model.local_rope_theta`).
    """

    share: float = bounded(1.0, above=0)
    seq_len: int = bounded(128, at_least=MIN_ROW_TOKENS, at_most=1 << 20)
    batch_size: int = bounded(0, at_least=0, at_most=1 << 20)
    mask_rate: float = bounded(0.15, above=0, at_most=1)
    learning_rate: float = bounded(1e-4, at_least=0)
    global_rope_theta: float = bounded(160_000.0, above=0)
    local_rope_theta: float = bounded(10_000.0, above=0)


@dataclasses.dataclass(frozen=True)
class Phase:
    """Range of pre-training steps with one batch shape. The paper trains in two phases (section A.2)."""

    seq_len: int  # tokens per row, including special tokens and padding
    batch_size: int  # rows of the global batch
    max_predictions: int  # maximum predictions per sentence pair or document, or per row if rows are not packed
    start_step: int  # first step of the phase
    stop_step: int  # end step (exclusive)
    row_format: RowFormat = RowFormat()  # see `RowFormat` (default: running text)
    masking: Masking = Masking()  # settings of token masking
    learning_rate: float = PhaseConfig.learning_rate  # peak learning rate
    # `global_rope_theta`, `local_rope_theta`: RoPE thetas, see `PhaseConfig`.
    global_rope_theta: float = PhaseConfig.global_rope_theta
    local_rope_theta: float = PhaseConfig.local_rope_theta

    def __post_init__(self) -> None:
        if not 1 <= self.max_predictions <= self.seq_len:
            raise UsageError(f"max_predictions={self.max_predictions} is out of range; use 1 to {self.seq_len}")

    @property
    def max_sequences_per_row(self) -> int:
        """Maximum number of sentence pairs or documents per row (1 if rows are not packed)."""
        if not self.row_format.packed:
            return 1
        by_length = 0 if self.row_format.pairing else self.seq_len // _TOKENS_PER_DOCUMENT
        return max(MAX_PAIRS_PER_ROW, by_length)

    @functools.cached_property
    def row_predictions(self) -> int:
        """Maximum predictions per row. Each pair or document of a packed row has at most `max_predictions`."""
        if not self.row_format.packed:
            return self.max_predictions
        rate, spans = self.masking.rate, self.max_sequences_per_row
        numbers = num_predictions(rate, self.seq_len, self.max_predictions)
        shortest = MIN_PAIR_TOKENS if self.row_format.pairing else TEXT_SPECIAL_TOKENS + 1
        # Because of rounding and the minimum of 1, a pair of n tokens can have up to `rate` * n + `excess` predictions.
        excess = max(number - rate * length for length, number in enumerate(numbers) if length >= shortest)
        return min(self.seq_len, spans * max(numbers), math.floor(rate * self.seq_len + spans * max(excess, 0.0)))


def num_predictions(rate: float, seq_len: int, max_predictions: int) -> list[int]:
    """Returns the number of tokens to predict for each row length from 0 to `seq_len`."""
    # Use Python's `round` on a float64, as google-research/bert `create_pretraining_data.py` does.
    return [0] + [min(max_predictions, max(1, round(n * rate))) for n in range(1, seq_len + 1)]
