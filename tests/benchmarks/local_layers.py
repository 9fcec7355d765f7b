"""Times local attention layers of ModernBERT base, forward and backward, in rows of 1,024 and 8,192 tokens.

    python tests/benchmarks/local_layers.py --rounds 5

Both batches have 8,192 tokens. The stack has three layers, all of them local, in float32 and in bfloat16.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from measuring import best_seconds, parser_of

from bertjax.convert.modernbert import MODERNBERT
from bertjax.model.config import Architecture, ModelConfig
from bertjax.model.encoder import Encoder

_TOKENS, _VOCAB_SIZE = 8192, 512


def _loss(encoder: Encoder, inputs: tuple[np.ndarray, ...], params: Any) -> jax.Array:
    return jnp.sum(jnp.sin(encoder.apply(params, *inputs)[0].astype(jnp.float32)))


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="steps per row length, in turns (default: 5)")
    rounds = parser.parse_args().rounds
    Architecture.local_layers = property(lambda self: (True,) * self.num_hidden_layers)
    model = dict(MODERNBERT.values) | {"vocab_size": _VOCAB_SIZE, "num_hidden_layers": 3, "intermediate_size": 1152}
    for dtype in ("float32", "bfloat16"):
        config = ModelConfig(**{**model, "max_position_embeddings": _TOKENS}, dtype=dtype)
        encoder, steps = Encoder(config), {}
        for length in (1024, _TOKENS):
            ids = np.random.default_rng(0).integers(5, _VOCAB_SIZE, (_TOKENS // length, length), np.int32)
            inputs = ids, np.zeros_like(ids), np.ones_like(ids)
            params = jax.jit(encoder.init)(jax.random.key(0), *inputs)
            step = jax.jit(jax.grad(functools.partial(_loss, encoder, inputs)))
            steps[length] = functools.partial(step, params)
        short, long = best_seconds(steps, rounds).values()
        print(f"{dtype}: {short:.2f} s in rows of 1,024, {long:.2f} s in rows of 8,192: {long / short:.2f}", flush=True)


if __name__ == "__main__":
    main()
