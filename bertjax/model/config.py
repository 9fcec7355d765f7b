"""A model as configs describe it: its architecture, its layout, and what its training adds to both."""

import dataclasses
import math

from bertjax.errors import UsageError
from bertjax.model.architecture import ARCHITECTURE_FIELDS, Architecture

DTYPES = ("float32", "bfloat16")
# Rates are taken as multiples of 2^-16 (`dropout.py`), and something has to be kept.
_MOST_DROPPED = 0.9999
REMAT_POLICIES = ("none", "attention", "elementwise", "projections", "full")


@dataclasses.dataclass(frozen=True)
class Layout:
    """How the function is computed; any checkpoint loads with any layout.

    Attributes:
      dtype: of the computation; parameters, softmax and LayerNorm statistics are float32 always.
      scan_layers: compile one layer and loop over it, or unroll all of them, faster on CPUs; the same parameters either
        way.
      remat: what the backward pass recomputes, each more than the one before: nothing of note (`none`), the scores of
        attention (`attention`), all but the large matrix products (`elementwise`), also those of queries, keys, values
        and attention's output (`projections`), or each layer (`full`).
      attention: `plain`, by XLA; `fused`, a TPU kernel that keeps scores and dropout out of memory, for rows of up to
        512; `splash`, JAX's own TPU kernel, without dropout, for rows of any multiple of 128; `cudnn`, for GPUs, of
        bfloat16 without dropout; `package.module.function`, an `AttentionFn` of your own; or `auto`, which takes the
        fastest of the first three that can compute what is asked for on the devices at hand. All but your own compute
        the same numbers, with the same dropout where they have any.

    Raises:
      UsageError: there is no such value.
    """

    dtype: str = "bfloat16"
    scan_layers: bool = True
    remat: str = "none"
    attention: str = "auto"

    def __post_init__(self) -> None:
        for name, known in (("dtype", DTYPES), ("remat", REMAT_POLICIES)):
            if getattr(self, name) not in known:
                raise UsageError(f"model.{name} is {getattr(self, name)!r}; known: {', '.join(known)}")


@dataclasses.dataclass(frozen=True)
class ModelConfig(Architecture, Layout):
    """An architecture and a layout side by side, as `config.model` has them, and how the model is trained.

    Attributes:
      hidden_dropout_prob: rate after the embeddings and each sub-layer.
      attention_probs_dropout_prob: rate on the attention probabilities.
      initializer_range: standard deviation of the truncated normal all matrices start from.

    Raises:
      UsageError: a value is out of its range.
    """

    hidden_dropout_prob: float = 0.1
    attention_probs_dropout_prob: float = 0.1
    initializer_range: float = 0.02

    def __post_init__(self) -> None:
        Architecture.__post_init__(self)
        Layout.__post_init__(self)
        for name in ("hidden_dropout_prob", "attention_probs_dropout_prob"):
            if not 0 <= getattr(self, name) <= _MOST_DROPPED:
                raise UsageError(f"model.{name} is {getattr(self, name)}; it must be in [0, {_MOST_DROPPED}]")
        if not 0 <= self.initializer_range < math.inf:
            raise UsageError(f"model.initializer_range is {self.initializer_range}; it must be a number of at least 0")

    @property
    def architecture(self) -> Architecture:
        return Architecture(**{name: getattr(self, name) for name in ARCHITECTURE_FIELDS})
