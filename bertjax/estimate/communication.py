"""Bytes that the devices of a mesh exchange in one train step, from parameter shapes and the mesh.

The counts are those of ring algorithms: in an all-gather or reduce-scatter over n devices each sends (n - 1) / n of an
array, and twice that in an all-reduce. Small arrays, such as token ids and metrics, are left out. The compiler may
choose other collectives.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from bertjax.model.config import ModelConfig


@dataclasses.dataclass(frozen=True)
class Communication:
    """One kind of exchange.

    Attributes:
      name: what is exchanged.
      collective: `all-reduce`, `all-gather` or `reduce-scatter`.
      axis: mesh axis.
      sent_bytes: bytes that each device sends per step.
      crosses_slices: whether the devices are in different slices.
    """

    name: str
    collective: str
    axis: str
    sent_bytes: float
    crosses_slices: bool = False


def step_communication(
    params: Any, mesh: Mesh, model: ModelConfig, positions: int, slices: int = 1, micro_batches: int = 1
) -> list[Communication]:
    """Returns what each device sends in one train step.

    Gradients are all-reduced over `data` in the model's dtype, except the token table's, which are float32. With
    several slices all are float32, and are summed within a slice first. Parameters sharded over `fsdp`, except the
    token table, are all-gathered in the forward and the backward pass, and their gradients are reduce-scattered. With
    `tensor`, each layer all-reduces two outputs in the forward pass, and the gradients of the inputs of query, key,
    value and feed-forward in the backward pass.

    Args:
      params: tree of `jax.ShapeDtypeStruct` with shardings.
      mesh: axes `data`, `fsdp` and `tensor`; slices follow each other along `data`.
      model: config of the model.
      positions: positions of the global batch, padding included.
      slices: number of TPU slices.
      micro_batches: `grad_accum_steps`.
    """
    data, fsdp, tensor = (mesh.shape[axis] for axis in ("data", "fsdp", "tensor"))
    itemsize = jnp.dtype(model.dtype).itemsize
    gradient_itemsize = itemsize if slices == 1 else 4
    gradients = gathered = 0.0
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        size = math.prod(leaf.sharding.shard_shape(leaf.shape))
        if jax.tree_util.keystr(path, simple=True, separator="/").endswith("embeddings/token"):
            gradients += size * 4
        else:
            gradients += size * gradient_itemsize
            gathered += size * itemsize * fsdp if "fsdp" in leaf.sharding.spec else 0
    activations = positions / (data * fsdp) * model.hidden_size * itemsize
    outputs = 6 * model.num_hidden_layers * activations
    ring = {axis: (size - 1) / size for axis, size in (("data", data // slices), ("fsdp", fsdp), ("tensor", tensor))}
    across = (slices - 1) / slices
    exchanges = [
        Communication("gradients", "all-reduce", "data", 2 * ring["data"] * gradients),
        Communication("gradients", "all-reduce", "data", 2 * across * gradients / (data // slices), True),
        Communication("parameters", "all-gather", "fsdp", 2 * ring["fsdp"] * gathered * micro_batches),
        Communication("gradients", "reduce-scatter", "fsdp", ring["fsdp"] * gathered * micro_batches),
        Communication("activations", "all-reduce", "tensor", 2 * ring["tensor"] * outputs),
    ]
    return [exchange for exchange in exchanges if exchange.sent_bytes]
