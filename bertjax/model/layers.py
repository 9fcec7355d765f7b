"""Transformer layer and its parts: matmuls, dense layers, norms, activations. Axis letters: see `encoder.py`."""

import math
from collections.abc import Callable
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from bertjax.model.attention.dispatch import AttentionFn
from bertjax.model.attention.mask import AttentionMask
from bertjax.model.config import ModelConfig
from bertjax.model.dropout import dropout
from bertjax.model.partitioning import ACTIVATION_AXES, platform, resolve_layout, scans_layers, with_logical_constraint


def dot(x: jax.Array, kernel: jax.Array, num_inputs: int = 1, dtype: jnp.dtype | None = None) -> jax.Array:
    """Multiplies `x` [..., I...] by a kernel [I..., O...] to [..., O...].

    On CPU this is one product of two matrices. On TPU merging the leading axes would move 7 % more bytes per step (BASE
    at 512 tokens).

    Args:
      num_inputs: number of leading kernel axes, contracted with the trailing axes of `x`.
      dtype: dtype of sums and result (default: that of `x` and the kernel).
    """
    if platform() != "cpu":
        return jnp.tensordot(x, kernel, num_inputs, preferred_element_type=dtype)
    leading, trailing = x.shape[: x.ndim - num_inputs], kernel.shape[num_inputs:]
    contracted = math.prod(kernel.shape[:num_inputs])
    rows, matrix = x.reshape(math.prod(leading), contracted), kernel.reshape(contracted, math.prod(trailing))
    dtype = dtype or jnp.result_type(x, kernel)
    return _matmul(rows.astype(dtype), matrix.astype(dtype)).reshape(*leading, *trailing)


@jax.custom_vjp
def _matmul(rows: jax.Array, kernel: jax.Array) -> jax.Array:
    """Multiplies [N, I] by [I, O]; computes the kernel's gradient by a product that contracts the last axis.

    XLA's CPU backend has a fast kernel for that layout and a slow one for operands that share their first axis.
    """
    return rows @ kernel


def _matmul_fwd(rows: jax.Array, kernel: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return rows @ kernel, (rows, kernel)


def _matmul_bwd(residuals: tuple[jax.Array, jax.Array], gradient: jax.Array) -> tuple[jax.Array, jax.Array]:
    rows, kernel = residuals
    # Without the barriers XLA would fuse the transposes into the products again.
    barrier = jax.lax.optimization_barrier
    if kernel.shape[0] <= kernel.shape[1]:
        kernel_gradient = barrier(barrier(rows.T) @ gradient)
    else:
        kernel_gradient = barrier(barrier(gradient.T) @ rows).T
    return gradient @ kernel.T, kernel_gradient


_matmul.defvjp(_matmul_fwd, _matmul_bwd)


# `checkpoint_name`s of a Transformer layer's activations: [B, L, D] each but for MLP_IN, [B, L, F].
PROJECTIONS, CONTEXT, RESIDUAL, MLP_IN = "projections", "context", "residual", "mlp_in"
# Remat policy of whole layers to the activations that it keeps for the backward pass.
SAVED_NAMES = {
    "elementwise": (PROJECTIONS, CONTEXT, RESIDUAL, MLP_IN),
    "projections": (CONTEXT, RESIDUAL, MLP_IN),
    "full": (),
}


def kernel_init(config: ModelConfig, axes: tuple[str | None, ...]) -> nn.initializers.Initializer:
    """Returns a truncated normal initializer with logical axis names (google-research/bert `modeling.py`)."""
    return nn.with_logical_partitioning(nn.initializers.truncated_normal(config.initializer_range), axes)


def constant_init(value: float, axes: tuple[str | None, ...]) -> nn.initializers.Initializer:
    """Returns a constant initializer with logical axis names."""
    return nn.with_logical_partitioning(nn.initializers.constant(value), axes)


class Dense(nn.Module):
    """`x @ kernel + bias` over the trailing axes of `x`, in the config's dtype from float32 parameters.

    `nn.DenseGeneral` fails to initialize such a kernel on a mesh: it makes a matrix, to which one logical name per axis
    does not fit. It also has no `flat`, without which the four-layer step at 128 tokens moves 1.6 % more bytes.

    Attributes:
      features: output axes of the kernel.
      axes: logical names of all kernel axes, input axes first.
      flat: merges the output axes into one; a TPU pads a short last axis such as K to its 128 lanes.
      kernel_init: initializer of the kernel (default: `kernel_init` with `axes`).
    """

    config: ModelConfig
    features: tuple[int, ...]
    axes: tuple[str | None, ...]
    flat: bool = False
    kernel_init: nn.initializers.Initializer | None = None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        num_inputs = len(self.axes) - len(self.features)
        dtype = jnp.dtype(resolve_layout(self.config).dtype)
        shape = x.shape[x.ndim - num_inputs :] + self.features
        kernel = self.param("kernel", self.kernel_init or kernel_init(self.config, self.axes), shape)
        bias = self.param("bias", constant_init(0.0, self.axes[num_inputs:]), self.features)
        bias = with_logical_constraint(bias.astype(dtype), self.axes[num_inputs:])

        def project(x: jax.Array, kernel: jax.Array) -> jax.Array:
            # Cast before the constraint, so that all-gathers over `fsdp` move the smaller dtype.
            kernel = with_logical_constraint(kernel.astype(dtype), self.axes)
            if self.flat:
                kernel = kernel.reshape(*shape[:num_inputs], -1)
            return dot(x.astype(dtype), kernel, num_inputs)

        # Saves `x` and the float32 kernel; the backward pass casts and gathers the kernel again. The matmul is not
        # repeated, since no gradient needs its output.
        return save_inputs_only(project, self.config)(x, kernel) + (bias.reshape(-1) if self.flat else bias)


def save_inputs_only(function: Callable[..., jax.Array], config: ModelConfig) -> Callable[..., jax.Array]:
    """Saves only the inputs of a cheap function for the backward pass, which recomputes its intermediate values.

    It applies under every `model.remat`, which is about whole layers and attention. Without it a GELU saves six arrays
    of width F and a LayerNorm float32 copies of its input. One policy over the layer (`nn.remat` with saved names for
    `remat=none`) takes 6 % more CPU time per step (3 layers of width 768).
    """
    return jax.checkpoint(function, prevent_cse=not scans_layers(config))


def layer_norm(config: ModelConfig, name: str | None = None, keep_input: bool = True) -> nn.LayerNorm:
    """Returns a LayerNorm module with float32 statistics and the config's dtype as output.

    Args:
      config: model config.
      name: module name.
      keep_input: saves only the input for the backward pass, see `save_inputs_only`. False inside a layer that is
        recomputed anyway, which would otherwise compute the norm twice more.
    """
    layout = resolve_layout(config)
    module = nn.remat(nn.LayerNorm, prevent_cse=not scans_layers(config)) if keep_input else nn.LayerNorm
    return module(
        epsilon=config.layer_norm_eps,
        dtype=layout.dtype,
        scale_init=constant_init(1.0, ("norm",)),
        bias_init=constant_init(0.0, ("norm",)),
        use_fast_variance=False,
        name=name,
    )


def activation(config: ModelConfig, keep_input: bool = True) -> Callable[[jax.Array], jax.Array]:
    """Returns the activation function that the config names; `keep_input` as in `layer_norm`."""
    function = {
        "gelu_tanh": partial(jax.nn.gelu, approximate=True),
        "gelu_erf": partial(jax.nn.gelu, approximate=False),
        "relu": jax.nn.relu,
    }[config.hidden_act]
    return save_inputs_only(function, config) if keep_input else function


class SelfAttention(nn.Module):
    """Multi-head self-attention with its output projection: [B, L, D] to [B, L, D]."""

    config: ModelConfig
    attention: AttentionFn

    @nn.compact
    def __call__(self, x: jax.Array, sequence_ids: jax.Array, deterministic: bool) -> jax.Array:
        config = self.config
        heads = (config.num_attention_heads, config.head_size)

        def project(name: str) -> jax.Array:
            y = Dense(config, heads, ("embed", "heads", "head"), flat=True, name=name)(x)
            return checkpoint_name(y, PROJECTIONS).reshape(*y.shape[:-1], *heads)

        query, key, value = map(project, ("query", "key", "value"))  # [B, L, H, K] each
        attend = partial(
            self.attention,
            mask=AttentionMask(config.attention_direction, sequence_ids),
            dropout_rate=config.attention_probs_dropout_prob,
            dropout_key=None if deterministic else self.make_rng("dropout"),
            mesh=jax.sharding.get_abstract_mesh(),
        )
        if config.remat == "attention":
            attend = save_inputs_only(attend, config)
        context = checkpoint_name(attend(query, key, value), CONTEXT)
        return Dense(config, (config.hidden_size,), ("heads", "head", "embed"), name="output")(context)


def attention_flops(config: ModelConfig) -> int:
    """Returns forward FLOPs per token of the four projections of `SelfAttention`."""
    return 2 * 4 * config.hidden_size**2


def attention_score_flops(config: ModelConfig, context: float) -> float:
    """Returns forward FLOPs per token of the attention itself, if a token attends to `context` tokens."""
    return 2 * 2 * config.hidden_size * context


def feed_forward(config: ModelConfig, x: jax.Array) -> jax.Array:
    """Applies the position-wise feed-forward network inside the calling module: [B, L, D] to [B, L, D]."""
    y = Dense(config, (config.intermediate_size,), ("embed", "mlp"), name="mlp_in")(x)  # [B, L, F]
    y = activation(config, keep_input=config.remat not in SAVED_NAMES)(checkpoint_name(y, MLP_IN))
    return Dense(config, (config.hidden_size,), ("mlp", "embed"), name="mlp_out")(y)


def feed_forward_flops(config: ModelConfig) -> int:
    """Returns forward FLOPs per token of `feed_forward`."""
    return 2 * 2 * config.hidden_size * config.intermediate_size


def residual(
    config: ModelConfig, x: jax.Array, sublayer: Callable[[jax.Array], jax.Array], key: jax.Array | None, name: str
) -> jax.Array:
    """Returns norm(x + dropout(sublayer(x))), the post-norm residual connection; `key` is None without dropout."""
    total = checkpoint_name(x + dropout(sublayer(x), config.hidden_dropout_prob, key), RESIDUAL)
    norm = layer_norm(config, name, keep_input=config.remat not in SAVED_NAMES)
    return with_logical_constraint(norm(total), ACTIVATION_AXES)


class TransformerLayer(nn.Module):
    """Post-norm Transformer layer: self-attention and feed-forward network, each with residual and LayerNorm."""

    config: ModelConfig
    attention: AttentionFn
    deterministic: bool
    collect: bool

    @nn.compact
    def __call__(self, x: jax.Array, sequence_ids: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        def dropout_key() -> jax.Array | None:
            return None if self.deterministic else self.make_rng("dropout")

        def attend(x: jax.Array) -> jax.Array:
            attention = SelfAttention(self.config, self.attention, name="attention")
            return attention(x, sequence_ids, self.deterministic)

        x = residual(self.config, x, attend, dropout_key(), "attention_norm")
        x = residual(self.config, x, partial(feed_forward, self.config), dropout_key(), "mlp_norm")
        return x, x if self.collect else None
