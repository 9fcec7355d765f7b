"""Tests that packed rows give the same losses, gradients and counts as their pairs in separate rows."""

import dataclasses
import functools

import flax.linen as nn
import jax
import numpy as np
import pytest
from helpers.tiny_config import tiny_config
from helpers.unpacking import unpacked

from bertjax.data.pretraining.config import Phase
from bertjax.data.schema import synthetic_batch
from bertjax.tasks.objectives import masked_lm
from bertjax.tasks.objectives.step_cost import non_padding_sums
from bertjax.tasks.pretraining.config import PretrainingData

CONFIG = tiny_config(vocab_size=60, max_position_embeddings=24, initializer_range=0.3, dropout=0.0)
PACKED = PretrainingData(packing=True)
PHASE = Phase(24, 4, max_predictions=3, start_step=0, stop_step=1)


def packed_batch() -> dict[str, np.ndarray]:
    """Returns rows of three, two, one and no pairs, with one to three predictions per pair."""
    objective = masked_lm.MaskedLm.for_model(CONFIG, PACKED)
    batch = synthetic_batch(objective.schema, objective.synthetic_sizes(PHASE) | {"sequences": 3, "predictions": 5})
    rng = np.random.default_rng(1)
    for name in ("sequence_ids", "position_ids", "segment_ids", "masked_lm_positions", "masked_lm_ids"):
        batch[name][:] = 0
    batch["masked_lm_weights"][:] = 0
    batch["next_sentence_labels"][:] = -1
    for row, lengths in enumerate(([8, 7, 9], [13, 6], [21], [])):
        start = predicted = 0
        for number, length in enumerate(lengths, 1):
            span = slice(start, start + length)
            batch["sequence_ids"][row, span] = number
            batch["position_ids"][row, span] = np.arange(length)
            batch["segment_ids"][row, span] = np.arange(length) > length // 2
            batch["next_sentence_labels"][row, number - 1] = (row + number) % 2
            count = 1 if len(lengths) == 3 else 3 - number + 1
            predictions = slice(predicted, predicted + count)
            batch["masked_lm_positions"][row, predictions] = start + np.sort(rng.permutation(length)[:count])
            batch["masked_lm_ids"][row, predictions] = rng.integers(1, 60, count)
            batch["masked_lm_weights"][row, predictions] = 1
            start, predicted = start + length, predicted + count
    return batch


def losses_and_gradients(batch, config=CONFIG):
    objective = masked_lm.MaskedLm.for_model(config, PACKED)

    def loss(params):
        sums, _ = objective.compute(params, batch, None)
        denominators = objective.denominators(batch)
        return sum(sums[name][0] / denominators[name] for name in objective.loss_weights), sums

    return jax.jit(jax.value_and_grad(loss, has_aux=True))(init_params(config))


@functools.cache
def init_params(config):
    return nn.unbox(jax.jit(masked_lm.MaskedLm.for_model(config, PACKED).init_params)(jax.random.key(0)))


@pytest.mark.ci
@pytest.mark.parametrize("direction", ["both", pytest.param("left", marks=pytest.mark.slow)])
def test_packed_rows_have_the_losses_and_gradients_of_unpacked_rows(direction):
    config = dataclasses.replace(CONFIG, attention_direction=direction)
    packed = packed_batch()
    separate = unpacked(packed)
    assert len(separate["input_ids"]) == 6
    (loss, sums), gradients = losses_and_gradients(packed, config)
    (expected, expected_sums), expected_gradients = losses_and_gradients(separate, config)
    np.testing.assert_allclose(loss, expected, rtol=1e-6)
    for name in expected_sums:
        np.testing.assert_allclose(sums[name], expected_sums[name], rtol=1e-6, err_msg=name)
    for (path, gradient), expected_gradient in zip(
        jax.tree_util.tree_leaves_with_path(gradients), jax.tree.leaves(expected_gradients), strict=True
    ):
        np.testing.assert_allclose(gradient, expected_gradient, atol=2e-6, err_msg=str(path))
        # The key bias adds the same number to all logits of a query, so its gradient is zero.
        assert np.abs(expected_gradient).max() > 1e-5 or "'key'" in str(path)


def test_token_and_attention_fractions_of_packed_rows_are_correct():
    batch = packed_batch()
    lengths = [8, 7, 9, 13, 6, 21]
    sums = non_padding_sums(batch)
    np.testing.assert_allclose(sums["token_fraction"], [sum(lengths), 4 * 24])
    np.testing.assert_allclose(sums["attention_fraction"], [sum(n * n for n in lengths) / 24, 4 * 24], rtol=1e-6)
    separate = non_padding_sums(unpacked(batch))
    np.testing.assert_allclose(separate["token_fraction"], [sum(lengths), 6 * 24])
    np.testing.assert_allclose(separate["attention_fraction"][0], sum(n * n for n in lengths) / 24, rtol=1e-6)


def test_synthetic_packed_rows_have_no_padding():
    objective = masked_lm.MaskedLm.for_model(CONFIG, PACKED)
    for total, positions in non_padding_sums(
        synthetic_batch(objective.schema, objective.synthetic_sizes(PHASE))
    ).values():
        assert total == pytest.approx(positions)
