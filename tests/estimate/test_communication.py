"""Estimated bytes of collectives, compared with counts by hand."""

import types

import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec

from bertjax.estimate.plan import step_communication
from bertjax.model.config import ModelConfig

MODEL = ModelConfig(vocab_size=100, hidden_size=8, num_attention_heads=2, num_hidden_layers=3, dtype="bfloat16")


def exchanges(sizes, shape, spec, positions=1, name="kernel", **arguments):
    """Returns the bytes sent for one parameter on a mesh of `sizes`, by (name, collective, axis, crosses_slices)."""
    mesh = types.SimpleNamespace(shape=dict(zip(("data", "fsdp", "tensor"), sizes, strict=True)))
    axes = [(spec[i] if i < len(spec) else None) for i in range(len(shape))]
    shard = tuple(size // mesh.shape.get(axis, 1) for size, axis in zip(shape, axes, strict=True))
    sharding = types.SimpleNamespace(spec=PartitionSpec(*spec), shard_shape=lambda _: shard)
    param = types.SimpleNamespace(shape=shape, sharding=sharding)
    found = step_communication({"embeddings": {name: param}}, mesh, MODEL, positions, **arguments)
    keys = ("name", "collective", "axis", "crosses_slices")
    return {tuple(each[key] for key in keys): each["sent_bytes"] for each in found}


@pytest.mark.parametrize(
    ("sizes", "spec", "arguments", "expected"),
    [
        ((4, 1, 1), (), {}, {("gradients", "all-reduce", "data", False): 2 * 3 / 4 * 2 * 16 * 8}),
        # The gradients of the token table are float32. The table stays sharded over `fsdp`.
        ((4, 1, 1), (), {"name": "token"}, {("gradients", "all-reduce", "data", False): 2 * 3 / 4 * 4 * 16 * 8}),
        ((1, 4, 1), ("fsdp",), {"name": "token"}, {}),
        # Each chip exchanges a part of the gradients, which are float32, between slices.
        (
            (8, 1, 1),
            (),
            {"slices": 2},
            {
                ("gradients", "all-reduce", "data", False): 2 * 3 / 4 * 4 * 16 * 8,
                ("gradients", "all-reduce", "data", True): 2 * 1 / 2 * 4 * 16 * 8 / 4,
            },
        ),
        # Sharded parameters are gathered for each micro-batch.
        (
            (1, 4, 1),
            ("fsdp",),
            {"micro_batches": 3},
            {
                ("parameters", "all-gather", "fsdp", False): 3 * 2 * 3 / 4 * 2 * 16 * 8,
                ("gradients", "reduce-scatter", "fsdp", False): 3 * 3 / 4 * 2 * 16 * 8,
            },
        ),
        ((1, 1, 2), (None, "tensor"), {"positions": 10, "name": "dense/kernel"}, {}),
    ],
)
def test_exchanged_bytes_of_a_parameter(sizes, spec, arguments, expected):
    assert exchanges(sizes, (16, 8), spec, **arguments) == expected


def test_tensor_parallelism_all_reduces_activations_of_each_layer():
    (size,) = exchanges((1, 1, 2), (3, 8, 16), (None, None, "tensor"), positions=10, name="layers/kernel").values()
    # The kernel is stacked over three layers. Each layer needs one all-reduce.
    assert size == pytest.approx(2 * 1 / 2 * 3 * 10 * 8 * jnp.dtype("bfloat16").itemsize)
