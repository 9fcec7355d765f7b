"""LSTMs: an encoder of ELMo's form (Figure 3 of the paper), and layers on top of any encoder.

Axis letters: `encoder.py`; besides, G is the four gates, in the order input, forget, cell, output.
"""

from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp

from bertjax.model.config import ModelConfig
from bertjax.model.dropout import dropout
from bertjax.model.layer_stack import recomputes, run_layers
from bertjax.model.layers import Dense, LayerNorm, kernel_init
from bertjax.model.partitioning import placed

LEFT, RIGHT = BOTH = ("left", "right")
ACTIVATION_AXES = ("batch", "length", "embed")


class LstmReader(nn.Module):
    """A language model's LSTMs in one direction, of half the hidden size: embeddings, then residual layers.

    As in ELMo (Peters et al., 2018), but of pieces instead of characters, without projections, and with a LayerNorm
    after each layer. It shares nothing with the one of the other direction.
    """

    config: ModelConfig
    direction: str

    def setup(self) -> None:
        self.embeddings = TokenEmbeddings(self.config)

    @nn.compact
    def __call__(
        self, input_ids: jax.Array, sequence_ids: jax.Array, deterministic: bool, collect_layers: bool
    ) -> tuple[jax.Array, jax.Array | None]:
        """[B, L, D / 2] and None or [N + 1, B, L, D / 2]; as `Encoder` otherwise."""
        x = self.embeddings(input_ids, deterministic)
        arguments = (self.config, self.direction, deterministic, collect_layers)
        return run_layers(self, LstmLayer, arguments, x, sequence_ids)


class TokenEmbeddings(nn.Module):
    """Of half the hidden size, then LayerNorm and dropout."""

    config: ModelConfig

    def setup(self) -> None:
        config = self.config
        shape = (config.padded_vocab_size, config.hidden_size // 2)
        self.token_table = self.param("token", kernel_init(config, ("vocab", "embed")), shape)
        self.norm = LayerNorm(config)

    def __call__(self, input_ids: jax.Array, deterministic: bool) -> jax.Array:
        ids, table = placed(input_ids, ("shared_batch", "length")), placed(self.token_table, ("vocab", "embed_part"))
        x = placed(jnp.take(table, ids, axis=0), ("shared_batch", "length", "embed_part"))
        key = None if deterministic else self.make_rng("dropout")
        return dropout(self.norm(placed(x, ACTIVATION_AXES)), self.config.hidden_dropout_prob, key)


class LstmLayer(nn.Module):
    """x = norm(x + dropout(lstm(x)))."""

    config: ModelConfig
    direction: str
    deterministic: bool
    collect: bool

    @nn.compact
    def __call__(self, x: jax.Array, sequence_ids: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        key = None if self.deterministic else self.make_rng("dropout")
        y = Lstm(self.config, x.shape[-1], self.direction, name="lstm")(x, sequence_ids)
        norm = LayerNorm(self.config, not recomputes(self.config), name="norm")
        x = placed(norm(x + dropout(y, self.config.hidden_dropout_prob, key)), ACTIVATION_AXES)
        return x, x if self.collect else None


class Lstm(nn.Module):
    """One layer in one direction: [B, L, I] to [B, L, D].

    Its state begins anew with every sequence of a row, and with padding, so that no sequence sees another.

    Attributes:
      size: D.
      direction: what a position sees besides itself, what is to its `left` or to its `right`.
    """

    config: ModelConfig
    size: int
    direction: str

    @nn.compact
    def __call__(self, x: jax.Array, sequence_ids: jax.Array) -> jax.Array:
        shape, axes = (self.size, 4, self.size), ("embed", None, "pooled")
        # Of unit gain: the deviation that suits a Transformer has LSTMs of a few hundred units learn late.
        init = nn.with_logical_partitioning(nn.initializers.lecun_normal(in_axis=0, out_axis=(1, 2)), axes)
        gates = Dense(self.config, (x.shape[-1], *shape[1:]), axes, initializer=init, name="input")(x)  # [B, L, G, D]
        recurrent = placed(self.param("recurrent", init, shape), (None, None, None))
        begins = sequence_ids[:, 1:] != sequence_ids[:, :-1]
        edge = jnp.ones_like(begins[:, :1])
        begins = jnp.concatenate([edge, begins] if self.direction == LEFT else [begins, edge], axis=1)
        states = _recurrence(
            gates.swapaxes(0, 1), recurrent.astype(gates.dtype), ~begins.T[..., None], self.direction == RIGHT
        )
        return states.swapaxes(0, 1)


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def _recurrence(gates: jax.Array, recurrent: jax.Array, goes_on: jax.Array, reverse: bool) -> jax.Array:
    """States [L, B, D] from the inputs' part of the gates [L, B, G, D], [D, G, D], and bool [L, B, 1]."""
    return _scanned(recurrent, goes_on, reverse, gates)


def _scanned(recurrent: jax.Array, goes_on: jax.Array, reverse: bool, gates: jax.Array) -> jax.Array:
    def step(carry: tuple[jax.Array, jax.Array], inputs: tuple[jax.Array, jax.Array]) -> tuple[tuple, jax.Array]:
        from_input, same = inputs
        state, cell = (jnp.where(same, value, 0) for value in carry)
        at_gates = (from_input + jnp.einsum("BD,DGE->BGE", state, recurrent)).astype(jnp.float32)
        into, kept, new, out = jnp.moveaxis(at_gates, 1, 0)
        # A forget gate that is open at the start (Jozefowicz, Zaremba and Sutskever, 2015).
        cell = jax.nn.sigmoid(kept + 1) * cell + jax.nn.sigmoid(into) * jnp.tanh(new)
        state = (jax.nn.sigmoid(out) * jnp.tanh(cell)).astype(state.dtype)
        return (state, cell), state

    shape = gates.shape[1], gates.shape[3]
    first = jnp.zeros(shape, gates.dtype), jnp.zeros(shape, jnp.float32)
    return jax.lax.scan(step, first, (gates, goes_on), reverse=reverse)[1]


def _forwards(gates: jax.Array, recurrent: jax.Array, goes_on: jax.Array, reverse: bool) -> tuple:
    states, backwards = jax.vjp(partial(_scanned, recurrent, goes_on, reverse), gates)
    return states, (backwards, states, recurrent, goes_on)


def _backwards(reverse: bool, kept: tuple, gradient: jax.Array) -> tuple:
    """The gradient of the recurrent weights is one product over all positions, and not a sum in each step."""
    backwards, states, recurrent, goes_on = kept
    (at_gates,) = backwards(gradient)
    none = jnp.zeros_like(states[:1])
    before = jnp.concatenate([states[1:], none] if reverse else [none, states[:-1]])
    of_recurrent = jnp.einsum("LBD,LBGE->DGE", jnp.where(goes_on, before, 0), at_gates)
    return at_gates, of_recurrent.astype(recurrent.dtype), None


_recurrence.defvjp(_forwards, _backwards)
