"""What is between an encoder and a task's own layer: nothing, features of the frozen encoder, a BiLSTM."""

import dataclasses
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from bertjax.errors import UsageError
from bertjax.model.config import ModelConfig
from bertjax.model.dropout import dropout
from bertjax.model.encoder import Encoder
from bertjax.model.layers import constant_init
from bertjax.model.lstm import BOTH, Lstm

NONE, EMBEDDINGS, SECOND_TO_LAST, LAST, SUM_LAST_FOUR, CONCAT_LAST_FOUR, SUM_ALL = FEATURES = (
    *("", "embeddings", "second_to_last", "last", "sum_last_four", "concat_last_four", "sum_all"),
)
_SUMS = (SUM_LAST_FOUR, SUM_ALL)
ENCODER, _MIX = "encoder", "mix"
# Of a batch: what a frozen encoder gave for it, where that is known; see `Upper`.
CACHED_FEATURES = "features"


@dataclasses.dataclass(frozen=True)
class FeatureHead:
    """What is between an encoder and a task's own layer.

    Attributes:
      features: "" trains the encoder; else it is frozen, and these of its layers are taken (section 5.3, Table 7):
        `embeddings`, `second_to_last`, `last`, the weighted sum or the concatenation of the last four (of all where
        there are fewer), or the weighted sum of all, without the embeddings. Weights are a softmax, times a factor.
      lstm_layers: of a BiLSTM on top, randomly initialised; 2 in Table 7. 0 is none.
      lstm_size: its units in each direction.

    Raises:
      UsageError: a value is out of its range.
    """

    features: str = NONE
    lstm_layers: int = 0
    lstm_size: int = 768

    def __post_init__(self) -> None:
        if self.features not in FEATURES:
            raise UsageError(f"feature_head.features is {self.features!r}; known: {', '.join(FEATURES[1:])}, or empty")
        if not 0 <= self.lstm_layers <= 64 or not 1 <= self.lstm_size <= 1 << 16:
            raise UsageError(
                f"feature_head.lstm_layers is {self.lstm_layers}, lstm_size {self.lstm_size}; give 0 to 64 layers of 1 to "
                f"{1 << 16:,} units"
            )

    @property
    def modules(self) -> tuple[str, ...]:
        """Top-level parameters."""
        lstms = [f"lstm_{layer}_{side}" for layer in range(self.lstm_layers) for side in BOTH]
        return (*((_MIX,) if self.features in _SUMS else ()), *lstms)

    @property
    def is_there(self) -> bool:
        """Whether there is anything between encoder and output."""
        return self != FeatureHead(lstm_size=self.lstm_size)

    def layers(self, num_hidden_layers: int) -> tuple[int, ...]:
        """Which states are taken, C of them: 0 is the embeddings, 1 to N the layers."""
        last = num_hidden_layers
        first = {EMBEDDINGS: 0, SECOND_TO_LAST: last - 1, LAST: last, SUM_ALL: 1}.get(self.features, max(1, last - 3))
        return tuple(range(first, first + 1 if self.features in (EMBEDDINGS, SECOND_TO_LAST, LAST) else last + 1))

    def width(self, config: ModelConfig) -> int:
        """Of what the task's own layer gets."""
        if self.lstm_layers:
            return 2 * self.lstm_size
        joined = len(self.layers(config.num_hidden_layers)) if self.features == CONCAT_LAST_FOUR else 1
        return joined * config.hidden_size

    def reads(self, config: ModelConfig) -> tuple[str, ...]:
        """The directions in which the parts of that know a row; see `Architecture.reads`."""
        if self.lstm_layers:
            return BOTH
        return config.reads * (len(self.layers(config.num_hidden_layers)) if self.features == CONCAT_LAST_FOUR else 1)


def token_representations(
    config: ModelConfig, feature_head: FeatureHead, batch: dict[str, Any], deterministic: bool, key: Any
) -> jax.Array:
    """What a task's own layer gets of each token; call it in a module, whose parameters those of the modules here are.

    Args:
      config: of the encoder.
      feature_head: of what is above it.
      batch: `input_ids`, `input_mask`, `segment_ids` [B, L] int32; and with features perhaps CACHED_FEATURES, float32
        [B, L, C, D], the states of `feature_head.layers`, by which the encoder is not computed. Rows of several sequences have
        `sequence_ids` and `position_ids` for the mask, and nothing is above the encoder.
      deterministic: no dropout.
      key: makes a key for each dropout.

    Returns:
      [B, L, `feature_head.width`], in the config's dtype.
    """
    if "sequence_ids" in batch:
        given = (batch[name] for name in ("input_ids", "segment_ids", "sequence_ids", "position_ids"))
        return Encoder(config, name=ENCODER)(*given, deterministic=deterministic)[0]
    ids, mask, segments = (batch[name] for name in ("input_ids", "input_mask", "segment_ids"))
    if not feature_head.features:
        hidden, _ = Encoder(config, name=ENCODER)(ids, segments, mask, deterministic=deterministic)
    elif CACHED_FEATURES in batch:
        hidden = _Mix(config, feature_head, name=_MIX)(batch[CACHED_FEATURES])
    else:
        encoder = Encoder(config, name=ENCODER)
        _, states = encoder(ids, segments, mask, deterministic=True, collect_layers=True)
        chosen = states[jnp.array(feature_head.layers(config.num_hidden_layers))]
        hidden = _Mix(config, feature_head, name=_MIX)(jax.lax.stop_gradient(jnp.moveaxis(chosen, 0, 2)))
    for layer in range(feature_head.lstm_layers):
        hidden = dropout(hidden, config.hidden_dropout_prob, None if deterministic else key())
        hidden = jnp.concatenate(
            [Lstm(config, feature_head.lstm_size, side, name=f"lstm_{layer}_{side}")(hidden, mask) for side in BOTH],
            axis=-1,
        )
    return hidden


class _Mix(nn.Module):
    """Chosen states [B, L, C, D] as one vector a token: the one there is, a weighted sum, or all side by side."""

    config: ModelConfig
    feature_head: FeatureHead

    @nn.compact
    def __call__(self, states: jax.Array) -> jax.Array:
        states = states.astype(self.config.dtype)
        if self.feature_head.features not in _SUMS:
            return states.reshape(*states.shape[:2], -1)
        weights = jax.nn.softmax(self.param("weights", constant_init(0.0, (None,)), states.shape[2:3]))
        scale = self.param("scale", constant_init(1.0, ()), ())
        return jnp.einsum("BLCD,C->BLD", states, (scale * weights).astype(states.dtype))
