"""How products with parameters are taken on each platform."""

import re

import jax
import jax.numpy as jnp
import pytest
from meshes import one_device

from bertjax.model.config import ModelConfig
from bertjax.model.heads import MaskedLmHead
from bertjax.model.layers import Dense

CONFIG = ModelConfig(
    vocab_size=20,
    hidden_size=16,
    num_hidden_layers=1,
    num_attention_heads=2,
    intermediate_size=32,
    max_position_embeddings=8,
    dtype="float32",
)


@pytest.mark.parametrize(
    ("module", "arguments"),
    [
        (Dense(CONFIG, (16, 2, 8), ("embed", "heads", "head")), ()),
        (Dense(CONFIG, (16, 2, 8), ("embed", "heads", "head"), flat=True), ()),
        (Dense(CONFIG, (16, 8), ("embed", "mlp")), ()),
        (MaskedLmHead(CONFIG), (jnp.ones((CONFIG.padded_vocab_size, 16)),)),
    ],
    ids=["heads", "heads, flat", "matrix", "vocabulary"],
)
def test_a_gradient_sums_over_rows_and_positions_as_one_axis_on_cpus_alone(module, arguments):
    x = jnp.ones((2, 3, 16))
    params = module.init(jax.random.key(0), x, *arguments)

    def loss(params, x, *arguments):
        return jnp.sum(module.apply(params, x, *arguments) ** 2)

    def program(platform):
        with jax.sharding.use_abstract_mesh(one_device(platform)):
            return str(jax.make_jaxpr(jax.grad(loss))(params, x, *arguments))

    over_both = "dimension_numbers=(([0, 1], [0, 1])"
    assert over_both not in program("cpu") and over_both in program("tpu")


def products_of(function, *arguments):
    """The factors of each product of the compiled program, as XLA writes them: shape and layout of both."""
    program = jax.jit(function).lower(*arguments).compile().as_text()
    shapes = dict(re.findall(r"(%\S+) = (\S+) ", program))
    return [
        (shapes[left], int(first), shapes[right], int(second))
        for left, right, first, second in re.findall(
            r" dot\((%\S+), (%\S+)\), lhs_contracting_dims={(\d)}, rhs_contracting_dims={(\d)}", program
        )
    ]


@pytest.mark.parametrize("shape", [(16, 8), (8, 16)], ids=["narrowing", "widening"])
def test_a_kernels_gradient_contracts_the_last_axis_of_its_narrower_factor_on_cpus(shape):
    x = jnp.ones((5, 3, shape[0]))  # 15 rows
    module = Dense(CONFIG, shape, ("mlp", "embed"))
    params = module.init(jax.random.key(0), x)
    products = products_of(jax.grad(lambda params, x: jnp.sum(module.apply(params, x) ** 2)), params, x)
    assert ("f32[8,15]{1,0}", 1, "f32[15,16]{1,0}", 0) in products


def test_the_vocabularys_gradient_is_of_transposed_states_on_cpus():
    hidden, table = jnp.ones((5, 3, 16)), jnp.ones((CONFIG.padded_vocab_size, 16))
    head = MaskedLmHead(CONFIG)
    params = head.init(jax.random.key(0), hidden, table)

    def loss(params, hidden, table):
        return jnp.sum(head.apply(params, hidden, table) ** 2)

    products = products_of(jax.grad(loss, argnums=2), params, hidden, table)
    assert ("f32[16,15]{1,0}", 1, f"f32[15,{CONFIG.padded_vocab_size}]{{1,0}}", 0) in products


def test_without_a_gradient_no_kernel_is_transposed():
    module, x = Dense(CONFIG, (16, 8), ("mlp", "embed")), jnp.ones((1, 3, 16))
    params = module.init(jax.random.key(0), x)
    program = jax.jit(module.apply).lower(params, x).compile().as_text()
    assert "dot(" in program and "transpose(" not in program and "copy(" not in program
