"""The pieces every module is built from: dense layers with logical axes, LayerNorm, activation."""

from collections.abc import Callable
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp

from bertjax.model.config import ModelConfig
from bertjax.model.dot import product
from bertjax.model.partitioning import placed


def kernel_init(config: ModelConfig, axes: tuple[str | None, ...]) -> Callable:
    """Truncated normal at two deviations (google-research/bert `modeling.py`), with logical axis names."""
    return nn.with_logical_partitioning(nn.initializers.truncated_normal(config.initializer_range), axes)


def constant_init(value: float, axes: tuple[str | None, ...]) -> Callable:
    """A constant, with logical axis names."""
    return nn.with_logical_partitioning(nn.initializers.constant(value), axes)


class Dense(nn.Module):
    """`x @ kernel + bias` over the trailing axes, in the config's dtype from float32 parameters.

    Attributes:
      shape: of the kernel, input axes first.
      axes: logical axis names of the kernel.
      inputs: how many leading kernel axes are contracted with the trailing axes of `x`.
      flat: give the output's axes as one, so that a TPU, which fills up short last axes, moves no more than there is.
      initializer: of the kernel, boxed with the axes; None is `kernel_init`.
    """

    config: ModelConfig
    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    inputs: int = 1
    flat: bool = False
    initializer: Callable | None = None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        dtype = jnp.dtype(self.config.dtype)
        kernel = self.param("kernel", self.initializer or kernel_init(self.config, self.axes), self.shape)
        bias = self.param("bias", constant_init(0.0, self.axes[self.inputs :]), self.shape[self.inputs :])

        def projected(x: jax.Array, kernel: jax.Array) -> jax.Array:
            kernel = placed(kernel.astype(dtype), self.axes)
            if self.flat:
                kernel = kernel.reshape(*self.shape[: self.inputs], -1)
            return product(x.astype(dtype), kernel, self.inputs)

        bias = placed(bias.astype(dtype), self.axes[self.inputs :])
        # The kernel of a device's own, and not what it gathers from others.
        return keeping_inputs(projected, self.config)(x, kernel) + (bias.reshape(-1) if self.flat else bias)


class LayerNorm(nn.Module):
    """Layer normalisation over the last axis; statistics and scaling in float32, output in the config's dtype.

    Attributes:
      keeps_input: for the backward pass, and nothing else (`keeping_inputs`); otherwise all that its gradient is made
        of, unless what this is a part of is computed again.
    """

    config: ModelConfig
    keeps_input: bool = True

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        scale = self.param("scale", constant_init(1.0, ("norm",)), (x.shape[-1],))
        bias = self.param("bias", constant_init(0.0, ("norm",)), (x.shape[-1],))

        def normalise(x: jax.Array, scale: jax.Array, bias: jax.Array) -> jax.Array:
            x = x.astype(jnp.float32)
            mean = jnp.mean(x, axis=-1, keepdims=True)
            variance = jnp.mean(jnp.square(x - mean), axis=-1, keepdims=True)
            y = (x - mean) * jax.lax.rsqrt(variance + self.config.layer_norm_eps) * scale + bias
            return y.astype(self.config.dtype)

        return (keeping_inputs(normalise, self.config) if self.keeps_input else normalise)(x, scale, bias)


def keeping_inputs(function: Callable[..., jax.Array], config: ModelConfig) -> Callable[..., jax.Array]:
    """Has the backward pass keep a cheap function's inputs alone, and compute its intermediate values again.

    Left to itself, a gelu keeps six arrays of the feed-forward width, and a LayerNorm float32 copies of its input. Not
    inside what is computed again as a whole, where the backward pass would compute it twice, each time from memory.
    """
    return jax.checkpoint(function, prevent_cse=not config.scan_layers)


def activation(config: ModelConfig, keeps_input: bool = True) -> Callable[[jax.Array], jax.Array]:
    """The feed-forward non-linearity that the config names; `keeps_input` as of `LayerNorm`."""
    function = {
        "gelu_tanh": partial(jax.nn.gelu, approximate=True),
        "gelu_erf": partial(jax.nn.gelu, approximate=False),
        "relu": jax.nn.relu,
    }[config.hidden_act]
    return keeping_inputs(function, config) if keeps_input else function
