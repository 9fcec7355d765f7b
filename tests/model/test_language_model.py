"""Left-to-right, right-to-left and LSTM language models: visible context, loss and gradients."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.tiny_config import tiny_config

from bertjax.model import lstm
from bertjax.model.encoder import Encoder
from bertjax.model.models import LanguageModel, SequenceModel
from bertjax.tasks.objectives import language_model

BOTH_WAYS = tiny_config(
    hidden_size=8,
    intermediate_size=16,
    max_position_embeddings=8,
    pad_vocab_to_multiple_of=1,
    initializer_range=0.5,
    dropout=0.0,
)
LEFT, RIGHT = (dataclasses.replace(BOTH_WAYS, attention_direction=direction) for direction in ("left", "right"))
LSTMS = dataclasses.replace(BOTH_WAYS, encoder="lstm")
# Two rows of six tokens and two padding positions; they differ at position 3.
IDS = np.array([[1, 5, 9, 6, 7, 2, 0, 0], [1, 5, 9, 8, 7, 2, 0, 0]], np.int32)
BATCH = {"input_ids": IDS, "input_mask": (IDS > 0).astype(np.int32), "segment_ids": np.zeros_like(IDS)}


def outputs(model, batch=BATCH):
    return jax.jit(model.apply)(jax.jit(model.init)(jax.random.key(0), batch), batch)


def differing_positions(states) -> set[int]:
    """Returns the token positions at which the outputs of the two rows differ."""
    return set(np.flatnonzero(np.any(np.asarray(states[0] != states[1]), axis=-1))) & {*range(6)}


@pytest.mark.parametrize("config", [LEFT, RIGHT, LSTMS])
def test_language_model_logits_do_not_depend_on_the_predicted_token(config):
    logits = outputs(LanguageModel(config))
    expected = {"left": {3, 4, 5}, "right": {0, 1, 2, 3}}
    assert {direction: differing_positions(values) for direction, values in logits.items()} == {
        direction: expected[direction] for direction in config.context_sides
    }
    # [CLS], [SEP] and padding are not predicted, so their weights are 0.
    weights = np.asarray(language_model.text_weights(BATCH["input_mask"]))
    np.testing.assert_array_equal(weights[0], [0, 1, 1, 1, 1, 0, 0, 0])


@pytest.mark.parametrize("config", [LEFT, RIGHT, LSTMS, BOTH_WAYS])
def test_sequence_model_logits_depend_on_every_token(config):
    model = SequenceModel(config, 2)
    params, apply = jax.jit(model.init)(jax.random.key(0), BATCH), jax.jit(model.apply)
    logits = apply(params, BATCH)
    for position in range(6):
        changed = BATCH | {"input_ids": np.where(np.arange(8) == position, 11, IDS)}
        assert (apply(params, changed) != logits).any(), position


@pytest.mark.ci
def test_lstm_state_is_reset_between_sequences():
    ids = np.array([[1, 5, 9, 2, 1, 7, 2, 0]], np.int32)
    sequence_ids = np.array([[1, 1, 1, 1, 2, 2, 2, 0]], np.int32)
    encoder = Encoder(LSTMS)
    params, apply = jax.jit(encoder.init)(jax.random.key(0), ids, 0 * ids, sequence_ids), jax.jit(encoder.apply)
    packed = apply(params, ids, 0 * ids, sequence_ids)[0][0]
    for span in (slice(0, 4), slice(4, 7)):
        row = ids[:, span]
        states = apply(params, row, 0 * row, np.ones_like(row))[0][0]
        np.testing.assert_allclose(packed[span], states, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("config", [LEFT, RIGHT, LSTMS])
def test_loss_is_the_cross_entropy_of_the_next_or_previous_token(config):
    objective = language_model.LanguageModeling.for_model(config)
    params = jax.jit(objective.model.init)(jax.random.key(0), BATCH)["params"]
    sums = jax.jit(lambda params: objective.compute(params, BATCH, None)[0])(params)
    logits = jax.jit(objective.model.apply)({"params": params}, BATCH)
    for direction, (name, step) in {"left": ("ltr", -1), "right": ("rtl", 1)}.items():
        if direction in config.context_sides:
            scores = np.asarray(logits[direction], np.float64)[:, 1 + step : 5 + step]
            tokens = IDS[:, 1:5]
            token_scores = np.take_along_axis(scores, tokens[..., None], axis=-1)[..., 0]
            loss = np.sum(np.log(np.exp(scores).sum(-1)) - token_scores)
            np.testing.assert_allclose(sums[f"{name}_loss"], [loss, 8], rtol=1e-5)
            np.testing.assert_allclose(sums[f"{name}_accuracy"], [np.sum(scores.argmax(-1) == tokens), 8])
            assert objective.denominators(BATCH)[f"{name}_loss"] == 8
    assert {*sums} == {metric.name for metric in objective.metrics}


@pytest.mark.ci
def test_lstm_directions_share_no_parameters():
    objective = language_model.LanguageModeling.for_model(LSTMS)
    params = jax.jit(objective.model.init)(jax.random.key(0), BATCH)["params"]

    def left_loss(params):
        return objective.compute(params, BATCH, None)[0]["ltr_loss"][0]

    gradient = jax.jit(jax.grad(left_loss))(params)
    parts = gradient.pop("encoder") | gradient
    reached = {name: {bool((leaf != 0).any()) for leaf in jax.tree.leaves(part)} for name, part in parts.items()}
    assert reached == {"left": {True}, "right": {False}, "left_lm": {True}, "right_lm": {False}}


@pytest.mark.parametrize("reverse", [False, True])
def test_recurrence_gradient_equals_autodiff_of_the_scan(reverse):
    keys = jax.random.split(jax.random.key(0), 4)
    gates, recurrent = jax.random.normal(keys[0], (7, 3, 4, 5)), jax.random.normal(keys[1], (5, 4, 5))
    continues, weights = jax.random.uniform(keys[2], (7, 3, 1)) > 0.2, jax.random.normal(keys[3], (7, 3, 5))

    def gradients(function):
        return jax.grad(lambda gates, recurrent: jnp.sum(weights * function(gates, recurrent)), (0, 1))

    run = jax.custom_gradient(partial(lstm._recurrence, reverse))
    actual = gradients(lambda gates, recurrent: run(gates, recurrent, continues))(gates, recurrent)
    expected = gradients(lambda gates, recurrent: lstm._scan(recurrent, continues, reverse, gates))(gates, recurrent)
    for gradient, expected_gradient in zip(actual, expected, strict=True):
        np.testing.assert_allclose(gradient, expected_gradient, rtol=1e-5, atol=1e-6)


def test_lstm_states_match_the_lstm_equations_in_numpy():
    """Compares each step with the equations of Hochreiter and Schmidhuber (1997), with a forget gate."""
    rng = np.random.default_rng(0)
    gates, weights = rng.standard_normal((5, 4, 3)), rng.standard_normal((3, 4, 3))
    arrays = jnp.asarray(gates[:, None], jnp.float32), jnp.asarray(weights, jnp.float32), jnp.ones((5, 1, 1), bool)
    states, _ = lstm._recurrence(False, *arrays)
    state, cell = np.zeros(3), np.zeros(3)

    def sigmoid(x):
        return 1 / (1 + np.exp(-x))

    for step in range(5):
        input_gate, forget_gate, candidate, output_gate = gates[step] + np.einsum("d,dge->ge", state, weights)
        cell = sigmoid(forget_gate + 1) * cell + sigmoid(input_gate) * np.tanh(candidate)
        state = sigmoid(output_gate) * np.tanh(cell)
        np.testing.assert_allclose(states[step, 0], state, rtol=1e-5)
