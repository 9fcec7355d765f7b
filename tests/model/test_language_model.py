"""Models that see one side of a position, or each side by itself: what they see, what they predict, what they learn."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bertjax.data.pretraining.config import Phase
from bertjax.model import lstm as recurrent
from bertjax.model.config import ModelConfig
from bertjax.model.encoder import Encoder
from bertjax.model.heads import LanguageModel, SequenceModel, TokenModel
from bertjax.model.lstm import BOTH
from bertjax.tasks.objectives import language_model

BOTH_WAYS = ModelConfig(
    **{
        "vocab_size": 20,
        "hidden_size": 8,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 16,
        "max_position_embeddings": 8,
    },
    **{
        "pad_vocab_to_multiple_of": 1,
        "dtype": "float32",
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
    },
    initializer_range=0.5,
)
LEFT, RIGHT = (dataclasses.replace(BOTH_WAYS, attention_direction=direction) for direction in ("left", "right"))
LSTMS = dataclasses.replace(BOTH_WAYS, encoder="lstm")
# A row of six tokens and two of padding; in the second, another piece is at position 3.
IDS = np.array([[1, 5, 9, 6, 7, 2, 0, 0], [1, 5, 9, 8, 7, 2, 0, 0]], np.int32)
BATCH = {"input_ids": IDS, "input_mask": (IDS > 0).astype(np.int32), "segment_ids": np.zeros_like(IDS)}


def outputs(model, batch=BATCH):
    return jax.jit(model.apply)(jax.jit(model.init)(jax.random.key(0), batch), batch)


def moved(states) -> set[int]:
    """Positions of the real tokens at which the two rows differ."""
    return set(np.flatnonzero(np.any(np.asarray(states[0] != states[1]), axis=-1))) & {*range(6)}


@pytest.mark.parametrize("config", [LEFT, RIGHT, LSTMS])
def test_what_is_predicted_is_not_seen(config):
    logits = outputs(LanguageModel(config))
    expected = {"left": {3, 4, 5}, "right": {0, 1, 2, 3}}
    assert {direction: moved(values) for direction, values in logits.items()} == {
        direction: expected[direction] for direction in config.reads
    }
    # Before [CLS] and after [SEP] there is nothing: the first and the last position predict no piece of text.
    weights = np.asarray(language_model.text_weights(BATCH["input_mask"]))
    np.testing.assert_array_equal(weights[0], [0, 1, 1, 1, 1, 0, 0, 0])


def test_lstms_may_be_of_any_width_that_has_two_halves():
    config = dataclasses.replace(LSTMS, hidden_size=6)
    logits = jax.eval_shape(LanguageModel(config).init_with_output, jax.random.key(0), BATCH)[0]
    assert {direction: values.shape for direction, values in logits.items()} == dict.fromkeys(BOTH, (2, 8, 20))


@pytest.mark.parametrize(("config", "positions"), [(LEFT, {3, 4, 5}), (RIGHT, {0, 1, 2, 3}), (LSTMS, {*range(6)})])
def test_a_tagger_on_top_sees_no_more_than_its_encoder(config, positions):
    assert moved(outputs(TokenModel(config, 3, head_dropout=False))) == positions


@pytest.mark.parametrize("config", [LEFT, RIGHT, LSTMS, BOTH_WAYS])
def test_a_classifier_on_top_sees_the_whole_row(config):
    model = SequenceModel(config, 2)
    params, apply = jax.jit(model.init)(jax.random.key(0), BATCH), jax.jit(model.apply)
    found = apply(params, BATCH)
    for position in range(6):
        changed = BATCH | {"input_ids": np.where(np.arange(8) == position, 11, IDS)}
        assert (apply(params, changed) != found).any(), position


def test_states_of_padding_and_of_other_sequences_reach_nothing():
    ids = np.array([[1, 5, 9, 2, 1, 7, 2, 0]], np.int32)
    both = np.array([[1, 1, 1, 1, 2, 2, 2, 0]], np.int32)
    encoder = Encoder(LSTMS)
    params, apply = jax.jit(encoder.init)(jax.random.key(0), ids, 0 * ids, both), jax.jit(encoder.apply)
    together = apply(params, ids, 0 * ids, both)[0][0]
    for where in (slice(0, 4), slice(4, 7)):
        alone = ids[:, where]
        states = apply(params, alone, 0 * alone, np.ones_like(alone))[0][0]
        np.testing.assert_allclose(together[where], states, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("config", [LEFT, RIGHT, LSTMS])
def test_the_loss_is_that_of_the_neighbour_on_the_other_side(config):
    phase = Phase(seq_len=8, batch_size=2, max_predictions=6, start_step=0, stop_step=1)
    objective = language_model.LanguageModeling.for_model(config)
    assert {*objective.synthetic_batch(phase)} == {*BATCH}
    params = jax.jit(objective.model.init)(jax.random.key(0), BATCH)["params"]
    sums = jax.jit(lambda params: objective.compute(params, BATCH, None)[0])(params)
    logits = jax.jit(objective.model.apply)({"params": params}, BATCH)
    for direction, (name, step) in {"left": ("ltr", -1), "right": ("rtl", 1)}.items():
        if direction in config.reads:
            losses, right = [], []
            for row in range(2):
                for position in range(1, 5):
                    scores = np.asarray(logits[direction][row, position + step], np.float64)
                    losses.append(np.log(np.exp(scores).sum()) - scores[IDS[row, position]])
                    right.append(scores.argmax() == IDS[row, position])
            loss, accuracy = sums[f"{name}_loss"], sums[f"{name}_accuracy"]
            np.testing.assert_allclose(loss, [sum(losses), 8], rtol=1e-5)
            np.testing.assert_allclose(accuracy, [sum(right), 8])
            assert objective.denominators(BATCH)[f"{name}_loss"] == 8
    assert {*sums} == {*objective.metrics}


def test_the_two_language_models_share_nothing():
    objective = language_model.LanguageModeling.for_model(LSTMS)
    params = jax.jit(objective.model.init)(jax.random.key(0), BATCH)["params"]

    def of_left(params):
        return objective.compute(params, BATCH, None)[0]["ltr_loss"][0]

    gradient = jax.jit(jax.grad(of_left))(params)
    reached = {
        name: all(np.any(leaf != 0) for leaf in jax.tree.leaves(part))
        for name, part in {**gradient["encoder"], **{k: v for k, v in gradient.items() if k != "encoder"}}.items()
    }
    assert reached == {"left": True, "right": False, "left_lm": True, "right_lm": False}
    for part in (gradient["encoder"]["right"], gradient["right_lm"]):
        assert not any(np.any(leaf != 0) for leaf in jax.tree.leaves(part))


@pytest.mark.parametrize("reverse", [False, True])
def test_the_gradient_of_a_recurrence_is_that_of_its_steps(reverse):
    keys = jax.random.split(jax.random.key(0), 4)
    gates, recurrent = jax.random.normal(keys[0], (7, 3, 4, 5)), jax.random.normal(keys[1], (5, 4, 5))
    goes_on, weights = jax.random.uniform(keys[2], (7, 3, 1)) > 0.2, jax.random.normal(keys[3], (7, 3, 5))

    def through(function):
        return jax.grad(lambda gates, recurrent: jnp.sum(weights * function(gates, recurrent)), (0, 1))

    found = through(lambda gates, recurrent: recurrent_of(gates, recurrent, goes_on, reverse))(gates, recurrent)
    expected = through(lambda gates, recurrent: recurrent_steps(recurrent, goes_on, reverse, gates))(gates, recurrent)
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


recurrent_of, recurrent_steps = recurrent._recurrence, recurrent._scanned


def test_an_lstm_is_the_usual_one():
    """Against the equations of Hochreiter and Schmidhuber (1997) with a forget gate, step by step."""
    rng = np.random.default_rng(0)
    gates, weights = rng.standard_normal((5, 4, 3)), rng.standard_normal((3, 4, 3))
    found = recurrent_of(
        jnp.asarray(gates[:, None], jnp.float32), jnp.asarray(weights, jnp.float32), jnp.ones((5, 1, 1), bool), False
    )
    state, cell = np.zeros(3), np.zeros(3)

    def sigmoid(x):
        return 1 / (1 + np.exp(-x))

    for step in range(5):
        into, kept, new, out = gates[step] + np.einsum("d,dge->ge", state, weights)
        cell = sigmoid(kept + 1) * cell + sigmoid(into) * np.tanh(new)
        state = sigmoid(out) * np.tanh(cell)
        np.testing.assert_allclose(found[step, 0], state, rtol=1e-5)
