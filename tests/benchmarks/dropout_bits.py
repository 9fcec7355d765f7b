"""Compares the cost of dropout with different random generators and numbers of bits per element.

    python tests/benchmarks/dropout_bits.py --shape 2 12 128 128 --rounds 20

Each step applies dropout to an array and then computes the gradient, as for attention probabilities in plain JAX. The
compiler either stores the mask for the backward pass or draws it again. Prints the best time of several interleaved
rounds on this machine, in `ms`.
"""

import functools
import json
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from measuring import best_seconds, parser_of

RATE = 0.1
# Values: (`jax.random` implementation, bits per element). The implementation "" is the hash that bertjax uses.
SOURCES = {
    "hash of positions, 16 bits": ("", 16),
    **{f"{name}, {bits} bits": (name, bits) for name in ("threefry2x32", "philox4x32", "rbg") for bits in (32, 16, 8)},
}


def make_dropout(implementation: str, bits: int) -> Callable[..., jax.Array]:
    """Returns a function of (array, key data) that applies dropout with a source of random bits."""
    if not implementation:
        from bertjax.model.dropout import dropout

        return lambda x, key_data: dropout(x, RATE, jax.random.wrap_key_data(key_data[:2]))

    def drop(x: jax.Array, key_data: jax.Array) -> jax.Array:
        size = jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0, impl=implementation))).shape[0]
        key = jax.random.wrap_key_data(key_data[:size], impl=implementation)
        random = jax.random.bits(key, x.shape, f"uint{bits}")
        return jnp.where(random >= np.array(round(RATE * 2**bits), random.dtype), x / (1 - RATE), 0)

    return drop


def forward_and_backward(
    drop: Callable[..., jax.Array], x: jax.Array, y: jax.Array, key_data: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns the output and the gradient of x. The backward pass starts after the forward pass, as in a deep model."""
    out, vjp = jax.vjp(lambda x: drop(x, key_data), x)
    out, y = jax.lax.optimization_barrier((out, y))
    return out, vjp(out * y)[0]


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--shape", type=int, nargs="+", required=True, help="shape of the array")
    parser.add_argument("--rounds", type=int, default=10, help="timed rounds (default: 10)")
    args = parser.parse_args()
    x, y = (jnp.ones(args.shape) for _ in range(2))
    arrays = x, y, jnp.arange(4, dtype=jnp.uint32)
    step = jax.jit(forward_and_backward, static_argnums=0)
    steps = {label: functools.partial(step, make_dropout(*source), *arrays) for label, source in SOURCES.items()}
    for label, seconds in best_seconds(steps, args.rounds).items():
        print(json.dumps({"source": label, "ms": round(1000 * seconds, 2)}))


if __name__ == "__main__":
    main()
