"""Transformer layer and its parts: dense layers, norms, activations. Axis letters: see `encoder.py`."""

from collections.abc import Callable
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from bertjax.model.attention.dispatch import AttentionFn
from bertjax.model.attention.xla import AttentionMask
from bertjax.model.config import ModelConfig
from bertjax.model.dropout import dropout
from bertjax.model.matmul import add_bias, cast_parameter, dot
from bertjax.model.partitioning import (
    ACTIVATION_AXES,
    platform,
    resolve_layout,
    scans_layers,
    with_logical_constraint,
)

# `checkpoint_name`s of a Transformer layer's activations: [B, L, D] each, except MLP_IN, [B, L, F].
QKV, CONTEXT, RESIDUAL, MLP_IN = "qkv", "context", "residual", "mlp_in"
# Maps values of `model.remat` to the activations that a layer saves. The backward pass recomputes all other
# activations. The values `none` and `attention` are missing, because they do not wrap layers in `nn.remat`.
REMAT_SAVED_NAMES = {
    "elementwise": (QKV, CONTEXT, RESIDUAL, MLP_IN),
    "projections": (CONTEXT, RESIDUAL, MLP_IN),
    "full": (),
}


def recomputes_layers(config: ModelConfig) -> bool:
    """Returns whether `model.remat` wraps each layer in `nn.remat`."""
    return config.remat in REMAT_SAVED_NAMES


def kernel_init(config: ModelConfig, axes: tuple[str | None, ...]) -> nn.initializers.Initializer:
    """Returns a truncated normal initializer with logical axis names (google-research/bert `modeling.py`)."""
    return nn.with_logical_partitioning(nn.initializers.truncated_normal(config.initializer_range), axes)


def constant_init(value: float, axes: tuple[str | None, ...]) -> nn.initializers.Initializer:
    """Returns a constant initializer with logical axis names."""
    return nn.with_logical_partitioning(nn.initializers.constant(value), axes)


class Dense(nn.Module):
    """`x @ kernel + bias` over the trailing axes of `x`, in the config's dtype.

    `nn.DenseGeneral` fails on a mesh: it initializes a kernel of three axes as a matrix, to which three logical names
    cannot be attached. It also has no option like `flat`. Without `flat`, a train step on TPU moves 1.6 % more bytes
    (4 layers, rows of 128 tokens).

    Attributes:
      features: sizes of the kernel's output axes.
      axes: logical names of all kernel axes, input axes first. Of the output axes, only the first may be sharded,
        because `dot` on CPU merges the output axes into one.
      flat: whether to merge the output axes into one. A TPU would pad a short last axis to 128 elements.
      initializer: initializer of the kernel (default: `kernel_init` with `axes`).
    """

    config: ModelConfig
    features: tuple[int, ...]
    axes: tuple[str | None, ...]
    flat: bool = False
    initializer: nn.initializers.Initializer | None = None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        num_inputs = len(self.axes) - len(self.features)
        dtype = jnp.dtype(resolve_layout(self.config).dtype)
        shape = x.shape[x.ndim - num_inputs :] + self.features
        kernel = self.param("kernel", self.initializer or kernel_init(self.config, self.axes), shape)
        bias = self.param("bias", constant_init(0.0, self.axes[num_inputs:]), self.features)
        bias = with_logical_constraint(bias.astype(dtype), self.axes[num_inputs:])

        def project(x: jax.Array, kernel: jax.Array) -> jax.Array:
            # Cast before the constraint, so that all-gathers over `fsdp` transfer the compute dtype instead of float32.
            kernel = with_logical_constraint(cast_parameter(kernel, dtype), self.axes)
            if self.flat:
                kernel = kernel.reshape(*shape[:num_inputs], -1)
            return dot(x.astype(dtype), kernel, num_inputs)

        # Save only `x` and the float32 kernel. The backward pass casts and gathers the kernel again. It does not repeat
        # the matmul, because no gradient needs the matmul's output.
        y = save_inputs_only(project, self.config)(x, kernel)
        return add_bias(y, bias.reshape(-1) if self.flat else bias)


def save_inputs_only(function: Callable[..., jax.Array], config: ModelConfig) -> Callable[..., jax.Array]:
    """Wraps a cheap function so that the backward pass recomputes its intermediate values from its inputs.

    Without this wrapper, a GELU would save six arrays of width F, and a LayerNorm would save float32 copies of its
    input. The alternative, a remat policy for the whole layer, takes 6 % more CPU time per step (3 layers, width 768).
    """
    return jax.checkpoint(function, prevent_cse=not scans_layers(config))


def layer_norm(config: ModelConfig, name: str | None = None, recompute: bool = True) -> nn.LayerNorm:
    """Returns a LayerNorm module with float32 statistics and with outputs in the config's dtype.

    With `recompute`, the forward pass saves only the input, and the backward pass recomputes intermediate values.
    """
    layout = resolve_layout(config)
    module = nn.remat(nn.LayerNorm, prevent_cse=not scans_layers(config)) if recompute else nn.LayerNorm
    return module(
        epsilon=config.layer_norm_eps,
        dtype=layout.dtype,
        scale_init=constant_init(1.0, ("norm",)),
        bias_init=constant_init(0.0, ("norm",)),
        use_fast_variance=False,
        name=name,
    )


def activation(config: ModelConfig, recompute: bool = True) -> Callable[[jax.Array], jax.Array]:
    """Returns the activation function of the config. `recompute` has the same effect as in `layer_norm`."""
    function = {
        "gelu_tanh": partial(jax.nn.gelu, approximate=True),
        "gelu_erf": partial(jax.nn.gelu, approximate=False),
        "relu": jax.nn.relu,
    }[config.hidden_act]

    def activate(x: jax.Array) -> jax.Array:
        # On CPU, compute in float32, because XLA would round the result of each operation to bfloat16.
        return function(x.astype(jnp.float32)).astype(x.dtype) if platform() == "cpu" else function(x)

    return save_inputs_only(activate, config) if recompute else activate


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
            return checkpoint_name(y, QKV).reshape(*y.shape[:-1], *heads)

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


def feed_forward(config: ModelConfig, x: jax.Array) -> jax.Array:
    """Applies the position-wise feed-forward network inside the calling module: [B, L, D] to [B, L, D]."""
    y = Dense(config, (config.intermediate_size,), ("embed", "mlp"), name="mlp_in")(x)  # [B, L, F]
    y = activation(config, recompute=not recomputes_layers(config))(checkpoint_name(y, MLP_IN))
    return Dense(config, (config.hidden_size,), ("mlp", "embed"), name="mlp_out")(y)


def residual(
    config: ModelConfig, x: jax.Array, sublayer: Callable[[jax.Array], jax.Array], key: jax.Array | None, name: str
) -> jax.Array:
    """Returns norm(x + dropout(sublayer(x))), the post-norm residual connection. Dropout is off if `key` is None."""
    total = checkpoint_name(x + dropout(sublayer(x), config.hidden_dropout_prob, key), RESIDUAL)
    norm = layer_norm(config, name, recompute=not recomputes_layers(config))
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
