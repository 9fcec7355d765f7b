"""Random bits for dropout: where they come from, how many a decision takes, and what that costs.

    python tests/benchmarks/dropout_bits.py --shape 8 12 512 512 --topology v5e:2x2
    python tests/benchmarks/dropout_bits.py --shape 2 12 128 128 --rounds 20

Forwards and, when that is done, backwards of dropout over an array, as attention's probabilities have it in plain JAX:
what is dropped is kept until then, or drawn again. `GB` are what main memory reads and writes in what the TPU compiler
makes of it, which is asked for with --topology; `ms` are of this machine, the best of some rounds in turns.
"""

import argparse
import functools
import json
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from hlo_cost import instruction_costs
from hlo_program import read_program

RATE = 0.1
# Name to the generator and the bits of a decision; ours hashes places and has 16.
KINDS = {
    "hash of places, 16 bits": ("", 16),
    **{f"{name}, {bits} bits": (name, bits) for name in ("threefry2x32", "philox4x32", "rbg") for bits in (32, 16, 8)},
}


def dropped(name: str, bits: int) -> Callable[..., jax.Array]:
    """(array, key data) to the array with a tenth of its elements gone."""
    if not name:
        from bertjax.model.dropout import dropout

        return lambda x, data: dropout(x, RATE, jax.random.wrap_key_data(data[:2]))

    def drop(x: jax.Array, data: jax.Array) -> jax.Array:
        size = jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0, impl=name))).shape[0]
        key = jax.random.wrap_key_data(data[:size], impl=name)
        drawn = jax.random.bits(key, x.shape, f"uint{bits}")
        return jnp.where(drawn >= np.array(round(RATE * 2**bits), drawn.dtype), x / (1 - RATE), 0)

    return drop


def forth_and_back(drop: Callable[..., jax.Array], x: jax.Array, y: jax.Array, data: jax.Array) -> tuple[Any, Any]:
    """What is left of x, and the gradient of x once all of that is there, as in a layer whose turn comes much later."""
    out, back = jax.vjp(lambda x: drop(x, data), x)
    out, y = jax.lax.optimization_barrier((out, y))
    return out, back(out * y)[0]


def tpu_gigabytes(step: Callable, arrays: tuple[jax.Array, ...], topology: str) -> float:
    from bertjax.estimate.topology import tpu_devices

    place = jax.sharding.SingleDeviceSharding(tpu_devices(topology, 1)[0])
    given = [jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=place) for array in arrays]
    program = read_program(jax.jit(step).lower(*given).compile().as_text())
    return sum(cost.hbm_bytes for cost in instruction_costs(program)) / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", type=int, nargs="+", required=True)
    parser.add_argument("--topology", default="", help="compile for it instead of timing")
    parser.add_argument("--rounds", type=int, default=10)
    args = parser.parse_args()
    if args.topology:
        from bertjax.estimate.topology import use_tpu_compiler

        use_tpu_compiler()
    x, y = (jnp.ones(args.shape, jnp.bfloat16 if args.topology else jnp.float32) for _ in range(2))
    arrays = x, y, jnp.arange(4, dtype=jnp.uint32)
    steps = {kind: functools.partial(forth_and_back, dropped(*how)) for kind, how in KINDS.items()}
    if args.topology:
        for kind, step in steps.items():
            told = {"kind": kind, "GB": round(tpu_gigabytes(step, arrays, args.topology), 3)}
            print(json.dumps(told), flush=True)
        return
    compiled = {kind: jax.jit(step) for kind, step in steps.items()}
    seconds: dict[str, list[float]] = {kind: [] for kind in compiled}
    for _ in range(args.rounds + 1):
        for kind, step in compiled.items():
            began = time.perf_counter()
            jax.block_until_ready(step(*arrays))
            seconds[kind].append(time.perf_counter() - began)
    for kind, times in seconds.items():
        print(json.dumps({"kind": kind, "ms": round(1000 * min(times[1:]), 2)}))


if __name__ == "__main__":
    main()
