"""Topologies of TPUs, attention kernels compiled for them, and the peak memory of compiled programs."""

import pytest
from hlo_cost import instruction_costs
from hlo_program import read_program

from bertjax.estimate.topology import tpu_devices, use_tpu_compiler
from bertjax.utils.process_pool import process_pool


def compiled_attention(topology: str, rows: int, length: int, heads: int, implementation: str) -> str:
    """Returns the HLO text of attention and its gradient."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import Mesh

    from bertjax.model.attention.dispatch import select_attention
    from bertjax.model.attention.xla import AttentionMask
    from bertjax.model.config import ModelConfig
    from bertjax.model.dropout import DropoutSpec
    from bertjax.training.sharding import MESH_AXES, batch_sharding, replicated, under_mesh

    mesh = Mesh(np.array(tpu_devices(topology, 1)[:1]).reshape(1, 1, 1), MESH_AXES)
    rate = 0.1 if implementation == "fused" else 0.0
    model = ModelConfig(vocab_size=1, attention=implementation, attention_probs_dropout_prob=rate)

    def attend(query, key, value, ids, gradient, dropout_key):
        def forward(query, key, value):
            attention = select_attention(model, length, is_packed=True)
            return attention(query, key, value, AttentionMask("both", ids), DropoutSpec(rate, dropout_key))

        context, backward = jax.vjp(forward, query, key, value)
        return context, backward(gradient)

    states = jax.ShapeDtypeStruct((rows, length, heads, 64), jnp.bfloat16, sharding=batch_sharding(mesh))
    ids = jax.ShapeDtypeStruct((rows, length), jnp.int32, sharding=batch_sharding(mesh))
    key = jax.eval_shape(lambda: jax.random.key(0))
    jitted = jax.jit(under_mesh(attend, mesh), out_shardings=replicated(mesh))
    return jitted.lower(states, states, states, ids, states, key).compile().as_text()


def num_devices(topology: str) -> int:
    return len(tpu_devices(topology, 1))


@pytest.fixture(scope="module")
def process():
    with process_pool(1, AssertionError("the TPU compiler crashed"), use_tpu_compiler) as process:
        yield process


@pytest.fixture(scope="module")
def compile_attention(process):
    return lambda *arguments: read_program(process.submit(compiled_attention, *arguments).result())


@pytest.mark.parametrize(("topology", "expected"), [("v3:1x1", 2), ("v4:1x1x1", 1), ("v5e:1x1", 1), ("v6e:2x2", 4)])
def test_one_chip_and_hosts_of_four_chips_are_topologies(process, topology, expected):
    assert process.submit(num_devices, topology).result() == expected


@pytest.mark.slow
@pytest.mark.parametrize("topology", ["v3:2x2", "v4:2x2x1", "v5e:2x2", "v5p:2x2x1", "v6e:2x2"])
@pytest.mark.parametrize(("rows", "length"), [(16, 512), (64, 128)])
@pytest.mark.parametrize("heads", [12, 16])
def test_fused_attention_compiles_and_estimates_its_cost(compile_attention, topology, rows, length, heads):
    costs = {
        cost.source.rpartition("attention_")[2].partition("/")[0]: (cost.flops, cost.hbm_bytes)
        for cost in instruction_costs(compile_attention(topology, rows, length, heads, "fused"))
        if cost.source.endswith("pallas_call") and cost.flops
    }
    product, states = 2 * rows * heads * length**2 * 64, 2 * rows * length * heads * 64
    # The forward pass has two matrix products and four arrays; the backward pass has five products and seven arrays.
    assert costs == {"forward": (2 * product, 4 * states), "backward": (5 * product, 7 * states)}


@pytest.mark.slow
@pytest.mark.parametrize("topology", ["v4:2x2x1", "v5e:2x2", "v5p:2x2x1", "v6e:2x2"])
@pytest.mark.parametrize(("rows", "length"), [(8, 1024), (4, 640), (2, 1000)])
def test_splash_attention_compiles(compile_attention, topology, rows, length):
    program = compile_attention(topology, rows, length, 12, "splash")
    names = [instruction.name for _, instruction, _ in program.scheduled()]
    assert {name.split("_")[2] for name in names if name.startswith("splash")} == {"fwd", "dq", "dkv"}


def memory_of(rows: int) -> tuple[int, int]:
    """Returns the bytes of a program's arguments and its peak memory on v5e, even if the program does not fit."""
    import jax
    import jax.numpy as jnp

    from bertjax.estimate.compiled import needed_bytes, peak_bytes

    def add(states, kernel):
        # `states` and an intermediate of the same size are alive at once; the result reuses the donated input.
        return states + jnp.tanh(states @ kernel) @ kernel

    sharding = jax.sharding.SingleDeviceSharding(tpu_devices("v5e:2x2", 1)[0])
    shapes = (rows, 4096), (4096, 4096)
    arrays = [jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=sharding) for shape in shapes]
    lowered = jax.jit(add, donate_argnums=0).lower(*arrays)
    arguments = sum(2 * array.size for array in arrays)
    try:
        return arguments, peak_bytes(lowered.compile())
    except jax.errors.JaxRuntimeError as error:
        return arguments, needed_bytes(str(error))


@pytest.mark.slow
@pytest.mark.parametrize("rows", [1 << 18, 1 << 21])
def test_peak_memory_equals_the_size_of_live_arrays(process, rows):
    arguments, peak = process.submit(memory_of, rows).result()
    assert peak == pytest.approx(arguments + 2 * rows * 4096, rel=0.01)
