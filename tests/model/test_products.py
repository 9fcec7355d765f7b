"""Tests of how matrix products with parameters are computed on each platform."""

import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.meshes import one_device
from helpers.tiny_config import tiny_config

from bertjax.model.heads import LmHead
from bertjax.model.layers import Dense
from bertjax.model.matmul import add_bias, dot, dot_transposed, einsum

CONFIG = tiny_config(num_hidden_layers=1, max_position_embeddings=8)


def test_kernel_gradient_flattens_rows_and_positions_into_one_axis_only_on_cpu():
    module, x = Dense(CONFIG, (2, 8), ("embed", "heads", "head")), jnp.ones((2, 3, 16))
    params = module.init(jax.random.key(0), x)

    def loss(params, x):
        return jnp.sum(module.apply(params, x) ** 2)

    def program(platform):
        with jax.sharding.use_abstract_mesh(one_device(platform)):
            return str(jax.make_jaxpr(jax.grad(loss))(params, x))

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


VOCAB_SIZE = CONFIG.padded_vocab_size
HIDDEN = jnp.ones((5, 3, 16))  # 15 rows


@pytest.mark.parametrize(
    ("module", "arguments", "argument", "expected"),
    [
        (Dense(CONFIG, (8,), ("mlp", "embed")), (HIDDEN,), 0, ("f32[8,15]{1,0}", 1, "f32[15,16]{1,0}", 0)),
        (Dense(CONFIG, (16,), ("mlp", "embed")), (HIDDEN[..., :8],), 0, ("f32[8,15]{1,0}", 1, "f32[15,16]{1,0}", 0)),
        (
            LmHead(CONFIG),
            (HIDDEN, jnp.ones((VOCAB_SIZE, 16))),
            2,
            ("f32[16,15]{1,0}", 1, f"f32[15,{VOCAB_SIZE}]{{1,0}}", 0),
        ),
    ],
    ids=["narrowing", "widening", "embeddings"],
)
def test_kernel_gradient_contracts_the_last_axis_of_the_narrower_operand_on_cpu(module, arguments, argument, expected):
    params = module.init(jax.random.key(0), *arguments)
    gradient = jax.grad(lambda params, *arguments: jnp.sum(module.apply(params, *arguments) ** 2), argnums=argument)
    assert expected in products_of(gradient, params, *arguments)


def test_forward_pass_transposes_no_kernel():
    module, x = Dense(CONFIG, (8,), ("mlp", "embed")), jnp.ones((1, 3, 16))
    params = module.init(jax.random.key(0), x)
    program = jax.jit(module.apply).lower(params, x).compile().as_text()
    assert "dot(" in program and "transpose(" not in program and "copy(" not in program


def value_and_gradients(function, dtype, *arrays):
    """Returns the value and the gradients of a function of arrays of a dtype, compiled and run."""

    def loss(*arrays):
        # Compute the operands in the program, because XLA treats operands that are arguments differently.
        result = function(*(jnp.tanh(array).astype(dtype) for array in arrays))
        return jnp.sum(jnp.sin(result.astype(jnp.float32))), result

    (_, result), gradients = jax.jit(jax.value_and_grad(loss, range(len(arrays)), has_aux=True))(*arrays)
    return [result, *gradients]


def attend(query, key, value):
    scores = einsum("BLHK,BMHK->BHLM", query, key)
    return einsum("BHLM,BMHK->BLHK", scores, value)


PRODUCTS = {
    "matrix": (lambda x, kernel, bias: add_bias(dot(x, kernel), bias), ((2, 5, 16), (16, 8), (8,))),
    "one row, one output": (lambda x, kernel, bias: add_bias(dot(x, kernel), bias), ((1, 16), (16, 1), (1,))),
    "heads": (lambda x, kernel: dot(x, kernel, 2), ((2, 5, 2, 8), (2, 8, 16))),
    "vocabulary": (lambda x, table: dot_transposed(x, table, jnp.float32), ((2, 3, 16), (32, 16))),
    "attention": (attend, ((3, 16, 2, 8),) * 3),
    "attention of several heads": (attend, ((2, 24, 4, 16),) * 3),
}


@pytest.mark.parametrize("scanned", [False, True], ids=["alone", "in a loop"])
@pytest.mark.parametrize(("function", "shapes"), PRODUCTS.values(), ids=PRODUCTS)
def test_bfloat16_products_and_gradients_run_on_cpu_and_equal_float32(function, shapes, scanned):
    rng = np.random.default_rng(0)
    arrays = [jnp.asarray(0.3 * rng.standard_normal(shape), jnp.float32) for shape in shapes]
    expected = value_and_gradients(function, jnp.float32, *arrays)
    if scanned:
        stacked = [jnp.stack([array, 2 * array]) for array in arrays]
        results = jax.lax.map(lambda arrays: value_and_gradients(function, jnp.bfloat16, *arrays), stacked)
        results = [result[0] for result in results]
    else:
        results = value_and_gradients(function, jnp.bfloat16, *arrays)
    for result, exact in zip(results, expected, strict=True):
        np.testing.assert_allclose(result, exact, atol=0.02 * float(jnp.max(jnp.abs(exact))))


def test_bfloat16_products_accumulate_in_float32():
    ones = jnp.ones((1, 4096), jnp.bfloat16)
    result = dot_transposed(ones[None], jnp.concatenate([ones, 0 * ones]), jnp.float32)
    assert result.dtype == jnp.float32 and result[0, 0].tolist() == [4096, 0]
    bias_gradient = jax.grad(lambda bias: jnp.sum(add_bias(jnp.zeros((1000, 2), jnp.bfloat16), bias) * 1.0))
    assert bias_gradient(jnp.zeros(2, jnp.bfloat16)).tolist() == [1000, 1000]


def test_gradients_of_parameters_are_not_rounded_to_bfloat16_on_cpu():
    config = tiny_config(num_hidden_layers=1, max_position_embeddings=8, dtype="bfloat16")
    rng = np.random.default_rng(0)
    hidden, table = (
        jnp.asarray(rng.normal(size=size), jnp.float32) for size in ((2, 5, 16), (config.padded_vocab_size, 16))
    )

    def is_rounded(gradient):
        return (gradient == gradient.astype(jnp.bfloat16).astype(jnp.float32)).all()

    dense, head = Dense(config, (8,), ("embed", "mlp")), LmHead(config)
    params = nn.unbox(dense.init(jax.random.key(0), hidden))
    gradient = jax.grad(lambda params: jnp.sum(jnp.sin(dense.apply(params, hidden))))(params)
    assert not is_rounded(gradient["params"]["kernel"])
    params = head.init(jax.random.key(0), hidden, table)
    assert not is_rounded(jax.grad(lambda table: jnp.sum(jnp.sin(head.apply(params, hidden, table)[..., :9])))(table))
