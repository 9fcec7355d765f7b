"""Dense layers, norms, activations, and stacks of layers, scanned or unrolled.

Axis letters: see `encoder.py`. Parameters of all layers of a stack have a leading axis N, the lowest layer first.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from bertjax.model.config import LAYER_NORM, ModelConfig
from bertjax.model.matmul import add_bias, cast_parameter, dot
from bertjax.model.partitioning import platform, resolve_auto, scans_layers, with_logical_constraint

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
    """

    config: ModelConfig
    features: tuple[int, ...]  # sizes of the kernel's output axes
    # Logical names of all kernel axes, input axes first. Of the output axes, only the first may be sharded, because
    # `dot` on CPU merges the output axes into one.
    axes: tuple[str | None, ...]
    flat: bool = False  # whether to merge the output axes into one. A TPU would pad a short last axis to 128 elements.
    use_bias: bool = True  # whether to add a bias
    # Initializer of the kernel (default: `kernel_init` with `axes`).
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


def has_layer_remat(config: ModelConfig) -> bool:
    """Returns whether `run_layers` wraps whole layers in `nn.remat`."""
    return config.remat in REMAT_SAVED_NAMES


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


def is_stacked(path: Sequence[str]) -> bool:
    """Returns whether the parameter at a path is stacked over the layers, with a leading axis N."""
    return LAYERS in path


def run_layers(
    parent: nn.Module,
    layer_class: type[nn.Module],
    fields: Mapping[str, Any],
    x: jax.Array,
    per_layer: Any,
    shared: Any,
) -> tuple[jax.Array, jax.Array | None]:
    """Applies a stack of layers inside the calling module.

    Args:
      parent: the calling module, which owns the parameters and has a `config`.
      layer_class: Flax module. It maps (x, per_layer, shared) to (output, output) if `collect`, else to (output, None).
      fields: constructor arguments of the layer. `collect=True` also returns the outputs of all layers.
      x: [B, L, ...] input of the lowest layer.
      per_layer: arrays with a leading axis N. Each layer gets one element of each array.
      shared: arrays that are the same for every layer, such as `sequence_ids`.

    Returns:
      Output of the last layer, [B, L, ...]. If `collect`, also `x` and the outputs of all layers, [N + 1, B, L, ...].
    """
    config, is_scanned = parent.config, scans_layers(parent.config)
    outputs = [x[None]]
    # `split_frozen` in `training/freezing.py` moves the parameters of frozen layers to their own stack.
    frozen = jax.tree.leaves(parent.get_variable("params", FROZEN_LAYERS))
    num_frozen = len(frozen[0]) if frozen else 0
    if has_layer_remat(config):
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
            x, states = stack(**fields, name=name)(x, parts, shared)
            outputs.append(states)
    return x, jnp.concatenate(outputs) if fields["collect"] else None
