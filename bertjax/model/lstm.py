"""LSTM layers: an encoder like ELMo's (Figure 3 of the BERT paper), and BiLSTM layers on top of any encoder.

Axis letters: see `encoder.py`. G is the axis of the four gates: input, forget, cell, output.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from bertjax.model.config import LEFT, RIGHT, ModelConfig
from bertjax.model.dropout import dropout
from bertjax.model.embeddings import Embeddings
from bertjax.model.layers import Dense, has_layer_remat, make_norm, run_layers
from bertjax.model.partitioning import ACTIVATION_AXES, with_logical_constraint


class LstmReader(nn.Module):
    """Token embeddings and residual LSTM layers that read in one direction, with half the hidden size.

    This is one direction of ELMo (Peters et al., 2018) with word pieces instead of characters, without projections, and
    with a LayerNorm after each layer. The two directions share no parameters.
    """

    config: ModelConfig
    direction: str

    def setup(self) -> None:
        self.embeddings = Embeddings(self.config)

    @nn.compact
    def __call__(
        self,
        ids: tuple[jax.Array, jax.Array, jax.Array],
        sequence_ids: jax.Array,
        deterministic: bool,
        collect_layers: bool,
    ) -> tuple[jax.Array, jax.Array | None]:
        """Returns the same as `Encoder`, with D / 2 instead of D. `ids` are the arguments of `Embeddings`."""
        x = self.embeddings(*ids, deterministic)
        fields = {"config": self.config, "direction": self.direction, "deterministic": deterministic}
        return run_layers(self, LstmLayer, {**fields, "collect": collect_layers}, x, None, sequence_ids)


class LstmLayer(nn.Module):
    """Residual LSTM layer: norm(x + dropout(lstm(x)))."""

    config: ModelConfig
    direction: str
    deterministic: bool
    collect: bool

    @nn.compact
    def __call__(self, x: jax.Array, layer_inputs: None, sequence_ids: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        key = None if self.deterministic else self.make_rng("dropout")
        y = Lstm(self.config, x.shape[-1], self.direction, name="lstm")(x, sequence_ids)
        # Do not give the sum a `checkpoint_name` as in `TransformerLayer`, because remat policies would save it and so
        # change the rounding of gradients.
        norm = make_norm(self.config, "norm", recompute=not has_layer_remat(self.config))
        x = norm(x + dropout(y, self.config.hidden_dropout_prob, key))
        x = with_logical_constraint(x, ACTIVATION_AXES)
        return x, x if self.collect else None


class Lstm(nn.Module):
    """LSTM layer in one direction, from [B, L, I] to [B, L, D].

    The state is reset at the start of each sequence in a row and at the start of the padding.
    """

    config: ModelConfig
    size: int  # number of units, D
    direction: str  # context of each position, besides itself: `left` (earlier positions) or `right` (later positions)

    @nn.compact
    def __call__(self, x: jax.Array, sequence_ids: jax.Array) -> jax.Array:
        shape, axes = (self.size, 4, self.size), ("embed", None, "pooled")
        # Initialize with unit gain, because LSTMs of a few hundred units learn slowly with `initializer_range`.
        init: Any = nn.with_logical_partitioning(nn.initializers.lecun_normal(in_axis=0, out_axis=(1, 2)), axes)
        gates = Dense(self.config, shape[1:], axes, initializer=init, name="input")(x)  # [B, L, G, D]
        recurrent = with_logical_constraint(self.param("recurrent", init, shape), (None, None, None))
        changes = sequence_ids[:, 1:] != sequence_ids[:, :-1]
        edge = jnp.ones_like(changes[:, :1])
        starts = jnp.concatenate([edge, changes] if self.direction == LEFT else [changes, edge], axis=1)
        run = jax.custom_gradient(partial(_recurrence, self.direction == RIGHT))
        return run(gates.swapaxes(0, 1), recurrent.astype(gates.dtype), ~starts.T[..., None]).swapaxes(0, 1)


def _recurrence(
    reverse: bool, gates: jax.Array, recurrent: jax.Array, continues: jax.Array
) -> tuple[jax.Array, Callable]:
    """Returns the states [L, B, D] and their gradient function, for `jax.custom_gradient`.

    The gradient of the recurrent weights is one matmul, not a sum over steps. `gates` [L, B, G, D] is the contribution
    of the inputs to the gates, and `recurrent` [D, G, D] the weights from the previous state. `continues`, bool
    [L, B, 1], is False where the state is reset.
    """
    states, scan_vjp = jax.vjp(partial(_scan, recurrent, continues, reverse), gates)

    def gradients(gradient: jax.Array) -> tuple[jax.Array, jax.Array, None]:
        (gates_gradient,) = scan_vjp(gradient)
        zero = jnp.zeros_like(states[:1])
        previous = jnp.concatenate([states[1:], zero] if reverse else [zero, states[:-1]])
        recurrent_gradient = jnp.einsum("LBD,LBGE->DGE", jnp.where(continues, previous, 0), gates_gradient)
        return gates_gradient, recurrent_gradient.astype(recurrent.dtype), None

    return states, gradients


def _scan(recurrent: jax.Array, continues: jax.Array, reverse: bool, gates: jax.Array) -> jax.Array:
    def step(carry: tuple[jax.Array, jax.Array], inputs: tuple[jax.Array, jax.Array]) -> tuple[tuple, jax.Array]:
        input_gates, same_sequence = inputs
        state, cell = (jnp.where(same_sequence, value, 0) for value in carry)
        logits = (input_gates + jnp.einsum("BD,DGE->BGE", state, recurrent)).astype(jnp.float32)
        input_gate, forget_gate, candidate, output_gate = jnp.moveaxis(logits, 1, 0)
        # The bias of 1 opens the forget gate initially (Jozefowicz, Zaremba and Sutskever, 2015).
        cell = jax.nn.sigmoid(forget_gate + 1) * cell + jax.nn.sigmoid(input_gate) * jnp.tanh(candidate)
        state = (jax.nn.sigmoid(output_gate) * jnp.tanh(cell)).astype(state.dtype)
        return (state, cell), state

    shape = gates.shape[1], gates.shape[3]
    initial = jnp.zeros(shape, gates.dtype), jnp.zeros(shape, jnp.float32)
    return jax.lax.scan(step, initial, (gates, continues), reverse=reverse)[1]
