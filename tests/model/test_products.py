"""Tests of how matrix products with parameters are computed on each platform."""

import re

import jax
import jax.numpy as jnp
import pytest
from meshes import one_device
from tiny_config import tiny_config

from bertjax.model.heads import TiedLmHead
from bertjax.model.layers import Dense

CONFIG = tiny_config(num_hidden_layers=1, max_position_embeddings=8)


@pytest.mark.parametrize(
    ("module", "arguments"),
    [
        (Dense(CONFIG, (2, 8), ("embed", "heads", "head")), ()),
        (Dense(CONFIG, (2, 8), ("embed", "heads", "head"), flat=True), ()),
        (Dense(CONFIG, (8,), ("embed", "mlp")), ()),
        (TiedLmHead(CONFIG), (jnp.ones((CONFIG.padded_vocab_size, 16)),)),
    ],
    ids=["heads", "flat heads", "matrix", "vocabulary"],
)
def test_kernel_gradient_flattens_rows_and_positions_into_one_axis_only_on_cpu(module, arguments):
    x = jnp.ones((2, 3, 16))
    params = module.init(jax.random.key(0), x, *arguments)

    def loss(params, x, *arguments):
        return jnp.sum(module.apply(params, x, *arguments) ** 2)

    def program(platform):
        with jax.sharding.use_abstract_mesh(one_device(platform)):
            return str(jax.make_jaxpr(jax.grad(loss))(params, x, *arguments))

    two_axes = "dimension_numbers=(([0, 1], [0, 1])"
    assert two_axes not in program("cpu") and two_axes in program("tpu")


def products_of(function, *arguments):
    """Returns (left shape, contracted axis, right shape, contracted axis) of each product in the compiled program."""
    program = jax.jit(function).lower(*arguments).compile().as_text()
    shapes = dict(re.findall(r"(%\S+) = (\S+) ", program))
    return [
        (shapes[left], int(first), shapes[right], int(second))
        for left, right, first, second in re.findall(
            r" dot\((%\S+), (%\S+)\), lhs_contracting_dims={(\d)}, rhs_contracting_dims={(\d)}", program
        )
    ]


@pytest.mark.parametrize("shape", [(16, 8), (8, 16)], ids=["narrowing", "widening"])
def test_kernel_gradient_contracts_the_last_axis_of_the_narrower_operand_on_cpu(shape):
    x = jnp.ones((5, 3, shape[0]))  # 15 rows
    module = Dense(CONFIG, shape[1:], ("mlp", "embed"))
    params = module.init(jax.random.key(0), x)
    products = products_of(jax.grad(lambda params, x: jnp.sum(module.apply(params, x) ** 2)), params, x)
    assert ("f32[8,15]{1,0}", 1, "f32[15,16]{1,0}", 0) in products


def test_embedding_gradient_of_the_output_layer_transposes_states_on_cpu():
    hidden, table = jnp.ones((5, 3, 16)), jnp.ones((CONFIG.padded_vocab_size, 16))
    head = TiedLmHead(CONFIG)
    params = head.init(jax.random.key(0), hidden, table)

    def loss(params, hidden, table):
        return jnp.sum(head.apply(params, hidden, table) ** 2)

    products = products_of(jax.grad(loss, argnums=2), params, hidden, table)
    assert ("f32[16,15]{1,0}", 1, f"f32[15,{CONFIG.padded_vocab_size}]{{1,0}}", 0) in products


def test_forward_pass_transposes_no_kernel():
    module, x = Dense(CONFIG, (8,), ("mlp", "embed")), jnp.ones((1, 3, 16))
    params = module.init(jax.random.key(0), x)
    program = jax.jit(module.apply).lower(params, x).compile().as_text()
    assert "dot(" in program and "transpose(" not in program and "copy(" not in program
