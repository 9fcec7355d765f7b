"""Transformer layer and its parts: dense layers, norms, activations. Stacks of layers, scanned or unrolled.

Axis letters: see `encoder.py`. Parameters of all layers of a stack have a leading axis N, the lowest layer first.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from bertjax.model.attention.dispatch import AttentionFn
from bertjax.model.attention.xla import AttentionMask
from bertjax.model.config import ABSOLUTE, LAYER_NORM, ROTARY, ModelConfig
from bertjax.model.dropout import dropout
from bertjax.model.matmul import add_bias, cast_parameter, dot
from bertjax.model.partitioning import ACTIVATION_AXES, platform, resolve_auto, scans_layers, with_logical_constraint

# `checkpoint_name`s of a Transformer layer's activations: [B, L, D] each, except MLP_IN, [B, L, F].
QKV, CONTEXT, RESIDUAL, MLP_IN = "qkv", "context", "residual", "mlp_in"
# Maps values of `model.remat` to the activations that a layer saves. The backward pass recomputes all other
# activations. The values `none` and `attention` are missing, because they do not wrap layers in `nn.remat`.
REMAT_SAVED_NAMES = {
    "elementwise": (QKV, CONTEXT, RESIDUAL, MLP_IN),
    "projections": (CONTEXT, RESIDUAL, MLP_IN),
    "full": (),
}
# LAYERS is the module name of the stacked layers, and the logical name of their leading axis. If the lowest layers are
# frozen, the train step passes them as a second stack, FROZEN_LAYERS.
LAYERS, FROZEN_LAYERS = "layers", "frozen_layers"


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
      use_bias: whether to add a bias.
      initializer: initializer of the kernel (default: `kernel_init` with `axes`).
    """

    config: ModelConfig
    features: tuple[int, ...]
    axes: tuple[str | None, ...]
    flat: bool = False
    use_bias: bool = True
    initializer: nn.initializers.Initializer | None = None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        num_inputs = len(self.axes) - len(self.features)
        dtype = jnp.dtype(resolve_auto(self.config).dtype)
        shape = x.shape[x.ndim - num_inputs :] + self.features
        kernel = self.param("kernel", self.initializer or kernel_init(self.config, self.axes), shape)

        def project(x: jax.Array, kernel: jax.Array) -> jax.Array:
            # Cast before the constraint, so that all-gathers over `fsdp` transfer the compute dtype instead of float32.
            kernel = with_logical_constraint(cast_parameter(kernel, dtype), self.axes)
            if self.flat:
                kernel = kernel.reshape(*shape[:num_inputs], -1)
            return dot(x.astype(dtype), kernel, num_inputs)

        # Save only `x` and the float32 kernel. The backward pass casts and gathers the kernel again. It does not repeat
        # the matmul, because no gradient needs the matmul's output.
        y = save_inputs_only(project, self.config)(x, kernel)
        if not self.use_bias:
            return y
        bias = self.param("bias", constant_init(0.0, self.axes[num_inputs:]), self.features)
        bias = with_logical_constraint(bias.astype(dtype), self.axes[num_inputs:])
        return add_bias(y, bias.reshape(-1) if self.flat else bias)


def save_inputs_only(function: Callable[..., jax.Array], config: ModelConfig) -> Callable[..., jax.Array]:
    """Wraps a cheap function so that the backward pass recomputes its intermediate values from its inputs.

    Without this wrapper, a GELU would save six arrays of width F, and a LayerNorm would save float32 copies of its
    input. The alternative, a remat policy for the whole layer, takes 6 % more CPU time per step (3 layers, width 768).
    """
    return jax.checkpoint(function, prevent_cse=not scans_layers(config))


def make_norm(config: ModelConfig, name: str | None = None, recompute: bool = True) -> nn.Module:
    """Builds the norm that `model.norm` selects, with float32 statistics, and outputs in the config's dtype.

    With `recompute`, the forward pass saves only the input, and the backward pass recomputes intermediate values.
    """
    layout = resolve_auto(config)
    norm: Any = nn.LayerNorm if config.norm == LAYER_NORM else nn.RMSNorm
    options: dict[str, Any] = {"use_fast_variance": False}
    if config.norm == LAYER_NORM:
        options |= {"use_bias": config.norm_bias, "bias_init": constant_init(0.0, ("norm",))}
    module = nn.remat(norm, prevent_cse=not scans_layers(config)) if recompute else norm
    scale_init = constant_init(1.0, ("norm",))
    return module(epsilon=config.layer_norm_eps, dtype=layout.dtype, scale_init=scale_init, name=name, **options)


def activation(config: ModelConfig, name: str = "", recompute: bool = True) -> Callable[[jax.Array], jax.Array]:
    """Returns an activation function (default: `hidden_act`). `recompute` has the same effect as in `make_norm`."""
    function = {
        "gelu_tanh": partial(jax.nn.gelu, approximate=True),
        "gelu_erf": partial(jax.nn.gelu, approximate=False),
        "relu": jax.nn.relu,
        "silu": jax.nn.silu,
        "tanh": jnp.tanh,
    }[name or config.hidden_act]

    def activate(x: jax.Array) -> jax.Array:
        # On CPU, compute in float32, because XLA would round the result of each operation to bfloat16.
        return function(x.astype(jnp.float32)).astype(x.dtype) if platform() == "cpu" else function(x)

    return save_inputs_only(activate, config) if recompute else activate


class SelfAttention(nn.Module):
    """Multi-head self-attention with its output projection: [B, L, D] to [B, L, D]."""

    config: ModelConfig
    attention: AttentionFn

    @nn.compact
    def __call__(self, x: jax.Array, layer: "LayerInputs", shared: "SharedInputs", deterministic: bool) -> jax.Array:
        config = self.config
        dropout_key = None if deterministic else self.make_rng("dropout")
        num_shared = config.num_attention_heads // (config.num_key_value_heads or config.num_attention_heads)

        def project(name: str, num_shared: int = 1) -> jax.Array:
            heads = (config.num_attention_heads // num_shared, config.head_size)
            dense = Dense(
                config, heads, ("embed", "heads", "head"), flat=True, use_bias=config.attention_bias, name=name
            )
            y = dense(x)
            y = checkpoint_name(y, QKV).reshape(*y.shape[:-1], *heads)
            return jnp.repeat(y, num_shared, axis=2) if num_shared > 1 else y

        # [B, L, H, K] each
        query, key, value = project("query"), project("key", num_shared), project("value", num_shared)
        if shared.rotations is not None:
            query, key = (rotate(config, states, shared.rotations, layer.is_local) for states in (query, key))

        def attend(window: int, query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
            mask = AttentionMask(config.attention_direction, shared.sequence_ids, window)
            rate, mesh = config.attention_probs_dropout_prob, jax.sharding.get_abstract_mesh()
            return self.attention(query, key, value, mask, dropout_rate=rate, dropout_key=dropout_key, mesh=mesh)

        def attend_by_layer(*states: jax.Array) -> jax.Array:
            if layer.is_local is None:
                return attend(0, *states)
            branches = (partial(attend, window) for window in (config.local_attention, 0))
            return jax.lax.cond(layer.is_local, *branches, *states)

        if config.remat == "attention":
            attend_by_layer = save_inputs_only(attend_by_layer, config)
        context = checkpoint_name(attend_by_layer(query, key, value), CONTEXT)
        axes = ("heads", "head", "embed")
        return Dense(config, (config.hidden_size,), axes, use_bias=config.attention_bias, name="output")(context)


def rotations(config: ModelConfig, position_ids: jax.Array) -> jax.Array | None:
    """Computes cosines and sines of the rotary angles of positions [B, L] (RoFormer, arXiv 2104.09864).

    Returns:
      float32 [2, 2, B, L, 1, K / 2], cosines and sines for the thetas of global and of local layers. None for learned
        position embeddings.
    """
    if config.position_embedding_type == ABSOLUTE:
        return None
    exponents = np.arange(0, config.head_size, 2, dtype=np.float32) / config.head_size
    frequencies = np.stack([1.0 / theta**exponents for theta in (config.global_rope_theta, config.local_rope_theta)])
    angles = position_ids[..., None].astype(jnp.float32) * frequencies.astype(np.float32)[:, None, None]
    return jnp.stack([jnp.cos(angles), jnp.sin(angles)], axis=1)[..., None, :]


def rotate(config: ModelConfig, states: jax.Array, rotations: jax.Array, is_local: jax.Array | None) -> jax.Array:
    """Rotates queries or keys [B, L, H, K] by the angles of their positions. `is_local` is a bool scalar or None."""
    cosine, sine = rotations[0 if is_local is None else is_local.astype(jnp.int32)]  # [B, L, 1, K / 2] each
    if config.position_embedding_type == ROTARY:
        first, second = jnp.split(states.astype(jnp.float32), 2, axis=-1)
    else:
        pairs = states.astype(jnp.float32).reshape(*states.shape[:-1], -1, 2)
        first, second = pairs[..., 0], pairs[..., 1]
    rotated = first * cosine - second * sine, second * cosine + first * sine
    join = jnp.concatenate if config.position_embedding_type == ROTARY else jnp.stack
    return join(rotated, axis=-1).reshape(states.shape).astype(states.dtype)


def feed_forward(config: ModelConfig, x: jax.Array) -> jax.Array:
    """Applies the position-wise feed-forward network inside the calling module: [B, L, D] to [B, L, D]."""

    def project(name: str) -> jax.Array:  # [B, L, F]
        dense = Dense(config, (config.intermediate_size,), ("embed", "mlp"), use_bias=config.mlp_bias, name=name)
        return checkpoint_name(dense(x), MLP_IN)

    y = activation(config, recompute=config.remat not in REMAT_SAVED_NAMES)(project("mlp_in"))
    if config.gated_mlp:
        y = y * project("mlp_gate")
    return Dense(config, (config.hidden_size,), ("mlp", "embed"), use_bias=config.mlp_bias, name="mlp_out")(y)


class SharedInputs(NamedTuple):
    """Inputs that all layers share.

    Attributes:
      sequence_ids: [B, L] int32, index of each token's sequence, starting at 1, or 0 for padding.
      rotations: result of the function `rotations`.
    """

    sequence_ids: jax.Array
    rotations: jax.Array | None


class LayerInputs(NamedTuple):
    """Inputs that differ between layers: arrays with a leading axis N, or None if all layers are equal.

    Attributes:
      is_local: bool [N], whether the layer has local attention.
      has_attention_norm: bool [N], whether a norm precedes the attention.
    """

    is_local: Any
    has_attention_norm: Any


def layer_inputs(
    config: ModelConfig, sequence_ids: jax.Array, position_ids: jax.Array
) -> tuple[LayerInputs, SharedInputs]:
    """Returns the inputs of all layers. `run_layers` passes each layer its elements of `LayerInputs`."""
    is_local = np.array(config.is_local_layer) if config.local_attention else None
    has_norm = None if config.first_attention_norm else np.arange(config.num_hidden_layers) > 0
    return LayerInputs(is_local, has_norm), SharedInputs(sequence_ids, rotations(config, position_ids))


def residual(
    config: ModelConfig,
    x: jax.Array,
    sublayer: Callable[[jax.Array], jax.Array],
    key: jax.Array | None,
    name: str,
    has_norm: jax.Array | None = None,
) -> jax.Array:
    """Returns norm(x + dropout(sublayer(x))) or, with `norm_first`, x + dropout(sublayer(norm(x))).

    Dropout is off if `key` is None. The norm `name` is skipped where `has_norm`, a bool scalar, is False.
    """
    norm = make_norm(config, name, recompute=config.remat not in REMAT_SAVED_NAMES)
    normed = x
    if config.norm_first:
        normed = norm(x) if has_norm is None else jnp.where(has_norm, norm(x), x)
    total = checkpoint_name(x + dropout(sublayer(normed), config.hidden_dropout_prob, key), RESIDUAL)
    return with_logical_constraint(total if config.norm_first else norm(total), ACTIVATION_AXES)


class TransformerLayer(nn.Module):
    """Transformer layer: self-attention and feed-forward network, each with a residual connection and a norm."""

    config: ModelConfig
    attention: AttentionFn
    deterministic: bool
    collect: bool

    @nn.compact
    def __call__(self, x: jax.Array, layer: LayerInputs, shared: SharedInputs) -> tuple[jax.Array, jax.Array | None]:
        def dropout_key() -> jax.Array | None:
            return None if self.deterministic else self.make_rng("dropout")

        def attend(x: jax.Array) -> jax.Array:
            attention = SelfAttention(self.config, self.attention, name="attention")
            return attention(x, layer, shared, self.deterministic)

        x = residual(self.config, x, attend, dropout_key(), "attention_norm", layer.has_attention_norm)
        x = residual(self.config, x, partial(feed_forward, self.config), dropout_key(), "mlp_norm")
        return x, x if self.collect else None


def is_stacked(path: Sequence[str]) -> bool:
    """Returns True if a path leads to a parameter that contains all layers on its leading axis."""
    return LAYERS in path


def run_layers(
    parent: nn.Module,
    layer_class: type[nn.Module],
    fields: Mapping[str, Any],
    x: jax.Array,
    per_layer: Any,
    shared: Any,
    *,
    collect: bool,
) -> tuple[jax.Array, jax.Array | None]:
    """Applies a stack of layers inside the calling module.

    Args:
      parent: the calling module, which owns the parameters and has a `config`.
      layer_class: Flax module. It maps (x, per_layer, shared) to (output, output) if `collect`, else to (output, None).
      fields: constructor arguments of the layer, except `collect`.
      x: [B, L, ...] input of the lowest layer.
      per_layer: arrays with a leading axis N. Each layer gets one element of each array.
      shared: arrays that are the same for every layer, such as `sequence_ids`.
      collect: whether to also return the outputs of all layers.

    Returns:
      Output of the last layer, [B, L, ...].
      Input `x` and the outputs of all layers in one array, [N + 1, B, L, ...], if `collect`, else None.
    """
    config, is_scanned = parent.config, scans_layers(parent.config)
    outputs = [x[None]]
    # `Freezing.split` in `training/freezing.py` moves the parameters of frozen layers to their own stack.
    frozen = jax.tree.leaves(parent.get_variable("params", FROZEN_LAYERS))
    num_frozen = len(frozen[0]) if frozen else 0
    if config.remat in REMAT_SAVED_NAMES:
        policy = jax.checkpoint_policies.save_only_these_names(*REMAT_SAVED_NAMES[config.remat])
        layer_class = nn.remat(layer_class, policy=policy, prevent_cse=not is_scanned)
    for name, first, end in ((FROZEN_LAYERS, 0, num_frozen), (LAYERS, num_frozen, config.num_hidden_layers)):
        if length := end - first:
            stack = nn.scan(
                layer_class,
                variable_axes={"params": 0},
                split_rngs={"params": True, "dropout": True},
                in_axes=(0, nn.broadcast),
                length=length,
                unroll=1 if is_scanned else length,
                metadata_params={nn.PARTITION_NAME: LAYERS},
            )
            parts = jax.tree.map(lambda array, first=first, end=end: array[first:end], per_layer)
            x, states = stack(**fields, collect=collect, name=name)(x, parts, shared)
            outputs.append(states)
    return x, jnp.concatenate(outputs) if collect else None
