"""Optional layers between the encoder and the output layer: frozen encoder features and a BiLSTM."""

import dataclasses
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from bertjax.model.config import SIDES, ModelConfig
from bertjax.model.dropout import dropout
from bertjax.model.encoder import ENCODER, Encoder, encoder_inputs
from bertjax.model.layers import constant_init
from bertjax.model.lstm import Lstm
from bertjax.model.partitioning import resolve_auto
from bertjax.utils.sections import Section, bounded

NONE, EMBEDDINGS, SECOND_TO_LAST, LAST, SUM_LAST_FOUR, CONCAT_LAST_FOUR, SUM_ALL = FEATURES = (
    *("", "embeddings", "second_to_last", "last", "sum_last_four", "concat_last_four", "sum_all"),
)
_SUMS = (SUM_LAST_FOUR, SUM_ALL)
# Name of the Flax module `_Mix`.
_MIX = "mix"
# Name of the batch array with precomputed states of a frozen encoder; see `encode_with_head`.
CACHED_FEATURES = "features"


@dataclasses.dataclass(frozen=True)
class FeatureHead(Section, prefix="config.feature_head."):
    """Layers between the encoder and the output layer.

    Attributes:
      features: states of a frozen encoder to use as input, as in Table 7 of the paper: `embeddings`, `second_to_last`,
        `last`, `sum_last_four`, `concat_last_four` or `sum_all` (default: empty, the encoder is fine-tuned). `sum_all`
        sums all layers without the embeddings. Sums have learned softmax weights and a learned factor.
      lstm_layers: number of randomly initialized BiLSTM layers on top (default: 0; Table 7 uses 2).
      lstm_size: number of BiLSTM units per direction.
    """

    features: str = bounded(NONE, choices=FEATURES)
    lstm_layers: int = bounded(0, at_least=0, at_most=64)
    lstm_size: int = bounded(768, at_least=1, at_most=1 << 16)

    @property
    def is_used(self) -> bool:
        """True if `features` or `lstm_layers` is set."""
        return bool(self.features or self.lstm_layers)

    @property
    def modules(self) -> tuple[str, ...]:
        """Names of the head's Flax modules that have parameters."""
        lstms = [f"lstm_{layer}_{side}" for layer in range(self.lstm_layers) for side in SIDES]
        return (*((_MIX,) if self.features in _SUMS else ()), *lstms)

    def layers(self, num_hidden_layers: int) -> tuple[int, ...]:
        """Returns the indices of the C selected states: 0 for the output of the embeddings, 1 to N for the layers."""
        last = num_hidden_layers
        first = {EMBEDDINGS: 0, SECOND_TO_LAST: last - 1, LAST: last, SUM_ALL: 1}.get(self.features, max(1, last - 3))
        return tuple(range(first, first + 1 if self.features in (EMBEDDINGS, SECOND_TO_LAST, LAST) else last + 1))

    def width(self, config: ModelConfig) -> int:
        """Returns the width of the output layer's input."""
        return 2 * self.lstm_size if self.lstm_layers else self._num_concatenated(config) * config.hidden_size

    def context_sides(self, config: ModelConfig) -> tuple[str, ...]:
        """Returns the context direction of each part of the head's output, see `Architecture.context_sides`."""
        return SIDES if self.lstm_layers else config.context_sides * self._num_concatenated(config)

    def _num_concatenated(self, config: ModelConfig) -> int:
        return len(self.layers(config.num_hidden_layers)) if self.features == CONCAT_LAST_FOUR else 1


def encode_with_head(
    config: ModelConfig,
    feature_head: FeatureHead,
    batch: dict[str, jax.Array],
    deterministic: bool,
    make_rng: Callable[[], jax.Array],
) -> jax.Array:
    """Applies the encoder and the feature head inside the calling module.

    `models.py` describes the arrays of `batch`. If `batch` contains `CACHED_FEATURES`, float32 [B, L, C, D], these
    precomputed states of `feature_head.layers` replace the encoder's output. Feature heads do not support packed rows.
    Each call of `make_rng` returns a new random key.

    Returns token states [B, L, W] in the config's dtype. W is `feature_head.width`.
    """
    if not feature_head.features:
        tokens, _ = Encoder(config, name=ENCODER)(*encoder_inputs(batch), deterministic=deterministic)
    elif CACHED_FEATURES in batch:
        tokens = _Mix(config, feature_head, name=_MIX)(batch[CACHED_FEATURES])
    else:
        states: Any = Encoder(config, name=ENCODER)(*encoder_inputs(batch), collect_layers=True)[1]
        selected = states[jnp.array(feature_head.layers(config.num_hidden_layers))]
        tokens = _Mix(config, feature_head, name=_MIX)(jax.lax.stop_gradient(jnp.moveaxis(selected, 0, 2)))
    for layer in range(feature_head.lstm_layers):
        tokens = dropout(tokens, config.hidden_dropout_prob, None if deterministic else make_rng())
        lstms = [Lstm(config, feature_head.lstm_size, side, name=f"lstm_{layer}_{side}") for side in SIDES]
        tokens = jnp.concatenate([lstm(tokens, batch["input_mask"]) for lstm in lstms], axis=-1)
    return tokens


class _Mix(nn.Module):
    """Layer that combines the C states of each token, by a learned weighted sum or by concatenation."""

    config: ModelConfig
    feature_head: FeatureHead

    @nn.compact
    def __call__(self, states: jax.Array) -> jax.Array:
        states = states.astype(resolve_auto(self.config).dtype)
        if self.feature_head.features not in _SUMS:
            return states.reshape(*states.shape[:2], -1)
        weights = jax.nn.softmax(self.param("weights", constant_init(0.0, (None,)), states.shape[2:3]))
        scale = self.param("scale", constant_init(1.0, ()), ())
        return jnp.einsum("BLCD,C->BLD", states, (scale * weights).astype(states.dtype))
