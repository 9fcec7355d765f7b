"""What decides a pre-training batch, besides corpus, seed and step. Free of TensorFlow."""

import dataclasses
import math

from bertjax.data.schema import SEQUENCE, ArraySpec, Schema
from bertjax.errors import UsageError

# Tokens, special ones included.
SHORTEST_ROW = 8
# [CLS], [SEP] and [SEP] with a token in front of each of the last two.
SHORTEST_PAIR = 5
# [CLS] A [SEP] B [SEP], and [CLS] A [SEP].
SPECIAL_TOKENS_OF_PAIR, SPECIAL_TOKENS_OF_TILE = 3, 2
# Sentence pairs a packed row has at most. Measured on Wikipedia: at length 512 four fill 99.3 % of the positions and
# eight 99.9 %; at 128 two do what any number does, since most pairs are longer than half a row.
PAIRS_A_ROW = 8
# What the model sees of a row, and what it is to predict of it.
PREDICTIONS: Schema = (
    ArraySpec("masked_lm_positions", ("predictions",), below="length"),
    ArraySpec("masked_lm_ids", ("predictions",), below="pieces"),
    ArraySpec("masked_lm_weights", ("predictions",), "float32"),
)
MASKED_LM_BATCH: Schema = (*SEQUENCE, *PREDICTIONS, ArraySpec("next_sentence_labels", (), below="labels", padding=-1))
# Of rows of several sentence pairs, which are counted from 1; 0 is padding.
PACKED_BATCH: Schema = (
    ArraySpec("input_ids", ("length",), below="pieces"),
    ArraySpec("sequence_ids", ("length",)),
    ArraySpec("position_ids", ("length",), counted=True),
    ArraySpec("segment_ids", ("length",), below="segments"),
    *PREDICTIONS,
    ArraySpec("next_sentence_labels", ("pairs",), below="labels", padding=-1),
)
# Of a language model, which predicts all of what it sees, each piece from those before.
LANGUAGE_MODEL_BATCH: Schema = SEQUENCE


@dataclasses.dataclass(frozen=True)
class Phase:
    """A stretch of pre-training with one batch shape; the paper's run has two (section A.2).

    Attributes:
      seq_len: tokens a row, special tokens and padding included; at least 8.
      batch_size: rows of the global batch.
      max_predictions: positions that are predicted at most, of a row, or of each span of a packed one.
      start_step, stop_step: steps `start_step <= step < stop_step` belong to the phase.
      spans_a_row: at most; more than 1 are packed.
      packed_row_predictions: positions that are predicted at most, of a packed row.

    Raises:
      UsageError: a value is out of its range.
    """

    seq_len: int
    batch_size: int
    max_predictions: int
    start_step: int
    stop_step: int
    spans_a_row: int = 1
    packed_row_predictions: int = 0

    def __post_init__(self) -> None:
        check_shape(self.seq_len, self.batch_size, self.max_predictions)
        if not 0 <= self.start_step <= self.stop_step:
            raise UsageError(
                f"a phase of steps {self.start_step} to {self.stop_step}: its start must be 0 or more and not after "
                "its stop"
            )

    @property
    def row_predictions(self) -> int:
        """Positions of a row that are predicted at most."""
        return self.packed_row_predictions if self.spans_a_row > 1 else self.max_predictions


@dataclasses.dataclass(frozen=True)
class Masking:
    """Which tokens are masked, and how; the defaults are the paper's (section 3.1, Table 8 for other shares).

    Attributes:
      rate: share of a row's tokens to predict, special tokens counted in, as in google-research/bert.
      mask_prob, keep_prob, random_prob: shares of the predicted positions that become [MASK], stay as they are and
        become a random token that is not special; they add up to 1.
      whole_word: choose all pieces of a word or none of them.

    Raises:
      UsageError: a share or the rate is out of its range, or the shares do not add up to 1.
    """

    rate: float = 0.15
    mask_prob: float = 0.8
    keep_prob: float = 0.1
    random_prob: float = 0.1
    whole_word: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.rate <= 1:
            raise UsageError(f"masking rate is {self.rate}; it must be above 0 and at most 1")
        shares = {name: getattr(self, name) for name in ("mask_prob", "keep_prob", "random_prob")}
        for name, share in shares.items():
            if not 0 <= share <= 1:
                raise UsageError(f"masking {name} is {share}; it must be between 0 and 1")
        if not math.isclose(sum(shares.values()), 1, abs_tol=1e-6):
            values = " + ".join(f"{share:g}" for share in shares.values())
            raise UsageError(f"masking shares {values} add up to {sum(shares.values()):g}; they must add up to 1")


def prediction_numbers(rate: float, seq_len: int, max_predictions: int) -> list[int]:
    """How many predictions spans of 0 to `seq_len` tokens have, where there are as many tokens to choose from."""
    # Python's rounding of its 64-bit product decides in google-research/bert's `create_pretraining_data.py`.
    return [0] + [min(max_predictions, max(1, round(n * rate))) for n in range(1, seq_len + 1)]


def packed_predictions(rate: float, seq_len: int, max_predictions: int, pairs_a_row: int) -> int:
    """The most predictions that a row of several pairs can have, with those of each pair as if it were alone."""
    numbers = prediction_numbers(rate, seq_len, max_predictions)
    # Each pair has at most so many more than its share of a row's.
    beyond = max(number - rate * length for length, number in enumerate(numbers) if length >= SHORTEST_PAIR)
    return min(pairs_a_row * max(numbers), math.floor(rate * seq_len + pairs_a_row * max(beyond, 0.0)))


def check_shape(seq_len: int, batch_size: int, max_predictions: int) -> None:
    """Raises a UsageError if no batch can have this shape."""
    if seq_len < SHORTEST_ROW:
        raise UsageError(f"seq_len is {seq_len}; a row needs at least {SHORTEST_ROW} tokens")
    if batch_size < 1:
        raise UsageError(f"batch_size is {batch_size}; it must be at least 1")
    if not 1 <= max_predictions <= seq_len:
        raise UsageError(f"max_predictions is {max_predictions}; it must be between 1 and seq_len, which is {seq_len}")
