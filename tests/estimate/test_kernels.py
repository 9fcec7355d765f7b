"""The attention kernel and memory, as the compiler has them for TPUs that are not here."""

import functools

import pytest

from bertjax.estimate.topology import tpu_devices, use_tpu_compiler
from bertjax.utils.process_pool import process_pool


def kernels_of(
    topology: str, rows: int, length: int, heads: int, implementation: str = "fused"
) -> dict[str, tuple[float, float]]:
    """Name of each kernel of attention and its gradient to FLOPs and bytes, as planning has them."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import Mesh

    from bertjax.estimate.cost import work_of
    from bertjax.estimate.program import read_program
    from bertjax.model.attention.dispatch import select_attention
    from bertjax.model.attention.mask import AttentionMask
    from bertjax.model.config import ModelConfig
    from bertjax.training.sharding import MESH_AXES, batch_sharding, replicated
    from bertjax.training.step import in_mesh

    mesh = Mesh(np.array(tpu_devices(topology, 1)[:1]).reshape(1, 1, 1), MESH_AXES)

    rate = 0.1 if implementation == "fused" else 0.0
    model = ModelConfig(vocab_size=1, attention=implementation, attention_probs_dropout_prob=rate)

    def attend(query, key, value, ids, gradient, dropout_key):
        def forward(query, key, value):
            mask, mesh = AttentionMask("both", ids), jax.sharding.get_abstract_mesh()
            attention = select_attention(model, length, several_sequences=True)
            return attention(query, key, value, mask, dropout_rate=rate, dropout_key=dropout_key, mesh=mesh)

        context, back = jax.vjp(forward, query, key, value)
        return context, back(gradient)

    states = jax.ShapeDtypeStruct((rows, length, heads, 64), jnp.bfloat16, sharding=batch_sharding(mesh))
    ids = jax.ShapeDtypeStruct((rows, length), jnp.int32, sharding=batch_sharding(mesh))
    key = jax.eval_shape(lambda: jax.random.key(0))
    jitted = jax.jit(in_mesh(attend, mesh), out_shardings=replicated(mesh))
    program = read_program(jitted.lower(states, states, states, ids, states, key).compile().as_text())
    if implementation == "splash":
        work = {one.name: one for one in work_of(program) if one.name.startswith("splash")}
        return {name.split("_")[2]: (one.flops, one.hbm_bytes) for name, one in work.items()}
    return {
        one.source.rpartition("attention_")[2].partition("/")[0]: (one.flops, one.hbm_bytes)
        for one in work_of(program)
        if one.source.endswith("pallas_call") and one.flops
    }


@pytest.fixture(scope="module")
def process():
    with process_pool(1, functools.partial(AssertionError, "the TPU compiler crashed"), use_tpu_compiler) as process:
        yield process


@pytest.fixture(scope="module")
def compiler(process):
    return lambda *arguments: process.submit(kernels_of, *arguments).result()


@pytest.mark.slow
@pytest.mark.parametrize("topology", ["v3:2x2", "v4:2x2x1", "v5e:2x2", "v5p:2x2x1", "v6e:2x2"])
@pytest.mark.parametrize(("rows", "length"), [(16, 512), (64, 128)])
@pytest.mark.parametrize("heads", [12, 16])
def test_the_kernels_compile_and_say_what_they_cost(compiler, topology, rows, length, heads):
    found = compiler(topology, rows, length, heads)
    product, states = 2 * rows * heads * length**2 * 64, 2 * rows * length * heads * 64
    # Forwards two products and four arrays, backwards five and seven.
    assert found == {"forward": (2 * product, 4 * states), "backward": (5 * product, 7 * states)}


@pytest.mark.slow
@pytest.mark.parametrize("topology", ["v4:2x2x1", "v5e:2x2", "v5p:2x2x1", "v6e:2x2"])
@pytest.mark.parametrize(("rows", "length"), [(8, 1024), (4, 640)])
def test_the_kernels_of_splash_attention_compile_and_what_they_compute_is_counted(compiler, topology, rows, length):
    found = compiler(topology, rows, length, 12, "splash")
    product = 2 * rows * 12 * length**2 * 64
    assert {name: flops / product for name, (flops, _) in found.items()} == {"fwd": 2, "dq": 3, "dkv": 4}


def memory_of(rows: int) -> tuple[int, int]:
    """Bytes that a program starts with, and that it has at its peak, whether it fits or not; on v5e."""
    import jax
    import jax.numpy as jnp

    from bertjax.estimate.compiled import needed_bytes, peak_bytes

    def double(states, kernel):
        # The given states are there beside those in between, and give their place to the result.
        return states + jnp.tanh(states @ kernel) @ kernel

    place = jax.sharding.SingleDeviceSharding(tpu_devices("v5e:2x2", 1)[0])
    shapes = (rows, 4096), (4096, 4096)
    given = [jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=place) for shape in shapes]
    lowered = jax.jit(double, donate_argnums=0).lower(*given)
    held = sum(2 * array.size for array in given)
    try:
        return held, peak_bytes(lowered.compile())
    except jax.errors.JaxRuntimeError as error:
        return held, needed_bytes(str(error))


@pytest.mark.slow
@pytest.mark.parametrize("rows", [1 << 18, 1 << 21])
def test_memory_is_what_lies_there_at_once_whether_it_fits_or_not(process, rows):
    held, peak = process.submit(memory_of, rows).result()
    assert peak == pytest.approx(held + 2 * rows * 4096, rel=0.01)
