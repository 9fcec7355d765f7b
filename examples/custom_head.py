"""A custom head on a pre-trained encoder, trained with optax in a custom loop.

    python examples/custom_head.py CHECKPOINT

The model learns to distinguish questions from statements and prints its probabilities for two new texts.
"""

import sys

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

import bertjax

QUESTIONS = ["who is it", "what is that", "where are you", "why is he here"]
STATEMENTS = ["it is he", "that is all", "here you are", "so be it"]
LABELS = jnp.array([1] * len(QUESTIONS) + [0] * len(STATEMENTS))


class QuestionModel(nn.Module):
    """Encoder, and a dense layer on the mean of the hidden states."""

    config: bertjax.ModelConfig

    @nn.compact
    def __call__(self, batch: dict[str, jax.Array]) -> jax.Array:
        encoder = bertjax.Encoder(self.config, name="encoder")
        states, _ = encoder(batch["input_ids"], batch["segment_ids"], batch["input_mask"])  # [B, L, D]
        mask = batch["input_mask"][..., None]
        return nn.Dense(2, name="head")((states * mask).sum(1) / mask.sum(1))  # [B, 2]


def main(checkpoint: str, steps: int = 100) -> jax.Array:
    bert = bertjax.load(checkpoint)
    model, batch, optimizer = QuestionModel(bert.config), bert.batch(QUESTIONS + STATEMENTS), optax.adam(2e-4)
    params = nn.unbox(model.init(jax.random.key(0), batch)["params"])
    params["encoder"] = bert.params["encoder"]

    def loss(params: dict) -> jax.Array:
        logits = model.apply({"params": params}, batch)
        return optax.softmax_cross_entropy_with_integer_labels(logits, LABELS).mean()

    @jax.jit
    def step(params: dict, state: optax.OptState) -> tuple[dict, optax.OptState]:
        updates, state = optimizer.update(jax.grad(loss)(params), state)
        return optax.apply_updates(params, updates), state

    state = optimizer.init(params)
    for _ in range(steps):
        params, state = step(params, state)
    print(f"loss {loss(params):.4f}")
    return nn.softmax(model.apply({"params": params}, bert.batch(["who are you", "you are it"])))[:, 1]


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    print("a question:", *(f"{share:.0%}" for share in main(sys.argv[1])))
