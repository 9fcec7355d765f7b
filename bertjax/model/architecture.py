"""What function a model computes: all that travels with its parameters, and the named sizes of the paper."""

import dataclasses
import math
import re

from bertjax.errors import UsageError
from bertjax.model.attention.mask import DIRECTIONS

_NAMED_SIZES = {
    "tiny": (2, 128),
    "mini": (4, 256),
    "small": (4, 512),
    "medium": (8, 512),
    "base": (12, 768),
    "large": (24, 1024),
}
_HEAD_SIZE = 64
ACTIVATIONS = ("gelu_tanh", "gelu_erf", "relu")
TRANSFORMER, LSTM = ENCODERS = ("transformer", "lstm")
# Beyond what anyone has trained by far; without limits a mistyped size ends in an error of a library, minutes later.
_MOST = {
    "vocab_size": 1 << 24,
    "hidden_size": 1 << 17,
    "num_hidden_layers": 1 << 12,
    "num_attention_heads": 1 << 12,
    "intermediate_size": 1 << 19,
    "max_position_embeddings": 1 << 20,
    "type_vocab_size": 1 << 16,
    "pad_vocab_to_multiple_of": 1 << 16,
}


@dataclasses.dataclass(frozen=True)
class Architecture:
    """What fixes the function that parameters stand for; saved whole with them and taken over whole.

    Attributes:
      encoder: `transformer`, or `lstm` for two independent stacks of LSTMs, one from the left and one from the right,
        whose states are put side by side, as ELMo's (Figure 3); it has neither positions nor segments nor heads.
      vocab_size: pieces in the vocabulary.
      hidden_size: D, width of the residual stream; of LSTMs, of both directions together.
      num_hidden_layers: Transformer layers, or LSTMs in each direction.
      num_attention_heads: H, attention heads; divides `hidden_size`.
      intermediate_size: F, width of the feed-forward layer, 4 D in the paper.
      max_position_embeddings: learned position embeddings, 512 in the paper.
      type_vocab_size: segment embeddings, 2 in the paper (`type_vocab_size` elsewhere).
      hidden_act: `gelu_tanh` is what google-research/bert computes (`modeling.py`, `gelu`); or `gelu_erf`, `relu`.
      layer_norm_eps: 1e-12 in google-research/bert.
      attention_direction: what a token attends to: `both` directions as in BERT, what is `left` of it and itself, or
        what is `right` of it and itself.
      pad_vocab_to_multiple_of: the token table is padded to a multiple of this many rows for the matrix unit; padding rows
        have probability zero.

    Raises:
      UsageError: a value is out of its range.
    """

    encoder: str = TRANSFORMER
    vocab_size: int = 30522
    hidden_size: int = 768
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    intermediate_size: int = 3072
    max_position_embeddings: int = 512
    type_vocab_size: int = 2
    hidden_act: str = "gelu_tanh"
    layer_norm_eps: float = 1e-12
    attention_direction: str = "both"
    pad_vocab_to_multiple_of: int = 128

    def __post_init__(self) -> None:
        for name, most in _MOST.items():
            if getattr(self, name) < 1:
                raise UsageError(f"model.{name} is {getattr(self, name)}; it must be at least 1")
            if getattr(self, name) > most:
                raise UsageError(f"model.{name} is {getattr(self, name):,}; it must be at most {most:,}")
        if self.hidden_size % self.num_attention_heads:
            raise UsageError(
                f"model.hidden_size {self.hidden_size} is not a multiple of num_attention_heads {self.num_attention_heads}"
            )
        if not 0 <= self.layer_norm_eps < math.inf:
            raise UsageError(f"model.layer_norm_eps is {self.layer_norm_eps}; it must be a number of at least 0")
        for name, known in (
            ("encoder", ENCODERS),
            ("hidden_act", ACTIVATIONS),
            ("attention_direction", DIRECTIONS),
        ):
            if getattr(self, name) not in known:
                raise UsageError(f"model.{name} is {getattr(self, name)!r}; known: {', '.join(known)}")
        if self.encoder == LSTM and self.hidden_size % 2:
            raise UsageError(f"model.hidden_size is {self.hidden_size}; LSTMs of two directions need an even one")
        if self.encoder == LSTM and self.attention_direction != "both":
            raise UsageError(
                f"model.attention_direction is {self.attention_direction}, and model.encoder={LSTM} has no attention"
            )

    @property
    def reads(self) -> tuple[str, ...]:
        """The directions in which a part of a hidden state knows a row, in the order of these parts."""
        return ("left", "right") if self.encoder == LSTM else (self.attention_direction,)

    @property
    def head_size(self) -> int:
        """K, width of an attention head."""
        return self.hidden_size // self.num_attention_heads

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the token table."""
        return -(-self.vocab_size // self.pad_vocab_to_multiple_of) * self.pad_vocab_to_multiple_of


ARCHITECTURE_FIELDS = tuple(field.name for field in dataclasses.fields(Architecture))


def size_fields(size: str) -> dict[str, int]:
    """Layers, width, heads and feed-forward width of a named size.

    Args:
      size: `tiny mini small medium base large`, or `L4_H512` with H/64 heads (the 24 small models of
        google-research/bert), or `L6_H768_A3` with the heads given (Table 6 of the paper).

    Raises:
      UsageError: no such size.
    """
    if size in _NAMED_SIZES:
        layers, hidden = _NAMED_SIZES[size]
        heads = hidden // _HEAD_SIZE
    else:
        match = re.fullmatch(r"L(\d+)_H(\d+)(?:_A(\d+))?", size)
        if not match:
            raise UsageError(
                f"unknown size {size!r}; known: {', '.join(_NAMED_SIZES)}, L4_H512, L6_H768_A3 and the like"
            )
        layers, hidden = int(match[1]), int(match[2])
        heads = int(match[3]) if match[3] else max(1, hidden // _HEAD_SIZE)
    return {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "intermediate_size": 4 * hidden,
    }
