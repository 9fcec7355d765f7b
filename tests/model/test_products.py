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
    vocab_size=20, hidden_size=16, num_layers=1, num_heads=2, mlp_size=32, max_positions=8, dtype="float32"
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


@pytest.mark.parametrize("shape", [(16, 8), (8, 16)], ids=["narrowing", "widening"])
def test_a_gradient_transposes_the_narrower_factor_on_cpus(shape):
    x = jnp.ones((5, 3, shape[0]))  # 15 rows
    module = Dense(CONFIG, shape, ("mlp", "embed"))
    params = module.init(jax.random.key(0), x)

    def loss(params, x):
        return jnp.sum(module.apply(params, x) ** 2)

    program = jax.jit(jax.grad(loss)).lower(params, x).compile().as_text()
    # Written out as [8, 16], which XLA may call [16, 8] with the first axis as the one that is contiguous.
    written = {"f32[8,16]{1,0}", "f32[16,8]{0,1}"}
    of_products = {result for result in re.findall(r"(\S+) dot\(", program) if "16" in result and "15" not in result}
    assert of_products and of_products <= written


def test_without_a_gradient_no_kernel_is_transposed():
    module, x = Dense(CONFIG, (16, 8), ("mlp", "embed")), jnp.ones((1, 3, 16))
    params = module.init(jax.random.key(0), x)
    program = jax.jit(module.apply).lower(params, x).compile().as_text()
    assert "dot(" in program and "transpose(" not in program and "copy(" not in program
