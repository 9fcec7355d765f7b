"""Tests of class weights and label smoothing: the loss, its mean over micro-batches, and invalid settings."""

import functools

import jax
import numpy as np
import pytest
import sklearn.utils

from bertjax.config.mesh import MeshConfig
from bertjax.config.optimizer import OptimizerConfig
from bertjax.errors import UsageError
from bertjax.model.config import ModelConfig
from bertjax.tasks.finetuning import tagging
from bertjax.tasks.finetuning.config import FinetuningConfig, FinetuningData
from bertjax.tasks.objectives import classification as objectives
from bertjax.tasks.objectives.class_weighting import UNWEIGHTED, ClassWeighting, weighting_of
from bertjax.training.optimizer import bert_schedule, make_optimizer
from bertjax.training.sharding import make_mesh, put_batch
from bertjax.training.step import init_state, make_train_step

MODEL = ModelConfig(
    vocab_size=20,
    hidden_size=16,
    num_hidden_layers=1,
    num_attention_heads=2,
    intermediate_size=16,
    max_position_embeddings=8,
    pad_vocab_to_multiple_of=1,
    dtype="float32",
    hidden_dropout_prob=0.0,
    attention_probs_dropout_prob=0.0,
)
OPTIMIZER = make_optimizer(OptimizerConfig())
MESH = make_mesh(MeshConfig(1, 1, 1), jax.devices()[:1])
LABELS = np.array([0, 0, 0, 0, 0, 1, 2, -1], np.int32)


def settings(weights="", smoothing=0.0):
    return FinetuningConfig(label_smoothing=smoothing, data=FinetuningData(class_weights=weights))


def batch(labels=LABELS):
    rng = np.random.default_rng(0)
    ids = rng.integers(0, 20, (8, 8), np.int32)
    return {
        "input_ids": ids,
        "input_mask": np.ones_like(ids),
        "segment_ids": np.zeros_like(ids),
        "labels": labels,
        "token_labels": rng.integers(-1, 3, (8, 8)).astype(np.int32),
        "example": np.arange(8, dtype=np.int32),
        "weights": np.ones(8, np.float32),
    }


def by_hand(logits, labels, weights, smoothing):
    """Returns the weighted mean loss in float64."""
    logits, keep = logits.astype(np.float64), labels >= 0
    logarithms = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    target = (1 - smoothing) * np.eye(3)[labels] + smoothing / 3
    each = np.array(weights or (1, 1, 1))[labels] * keep
    return float((-(target * logarithms).sum(axis=-1) * each).sum() / each.sum())


@pytest.mark.parametrize(
    "weighting", [UNWEIGHTED, ClassWeighting((0.25, 2.0, 0.1)), ClassWeighting((), 0.1), ClassWeighting((1, 5, 3), 0.3)]
)
@pytest.mark.parametrize("words", [False, True])
def test_training_loss_is_weighted_and_evaluation_loss_is_not(weighting, words):
    if words:
        objective, labels = tagging.objective(MODEL, 3, weighting), batch()["token_labels"]
    else:
        objective, labels = objectives.sequence_objective("abc", MODEL, weighting), LABELS
    params, logits = params_and_logits(words)
    for key, used in ((jax.random.key(1), weighting), (None, UNWEIGHTED)):
        sums, _ = objective.compute(params, batch(), key)
        total, weight = (float(x) for x in sums["cross_entropy"])
        assert total / weight == pytest.approx(by_hand(logits, labels, used.weights, used.smoothing), rel=1e-5)
        if key is not None:
            assert float(objective.denominators(batch())["cross_entropy"]) == pytest.approx(weight)
    known = labels >= 0
    accuracy = next(value for name, value in sums.items() if "accuracy" in name)
    assert accuracy.tolist() == [(logits.argmax(-1) == labels)[known].sum(), known.sum()]


@functools.cache
def params_and_logits(words):
    objective = tagging.objective(MODEL, 3) if words else objectives.sequence_objective("abc", MODEL)
    params = init_state(objective, OPTIMIZER, MESH, jax.random.key(0)).params
    # Narrow and fresh, it tells no class from another.
    params["classifier"]["kernel"] = 10 * params["classifier"]["kernel"]
    return params, np.asarray(objective.model.apply({"params": params}, batch()))


def test_gradient_does_not_depend_on_micro_batches():
    # Strided micro-batches of two: one has the rare classes, others not.
    objective = objectives.sequence_objective("abc", MODEL, ClassWeighting((0.01, 4.0, 7.0), 0.1))
    found = []
    for grad_accum_steps in (1, 4):
        state = init_state(objective, OPTIMIZER, MESH, jax.random.key(0))
        step = make_train_step(objective, OPTIMIZER, MESH, grad_accum_steps)
        for _ in range(2):
            state = step(state, put_batch(batch(), MESH), jax.random.key(1), bert_schedule(1e-2, 0, 10))
        found.append(jax.device_get((state.params, state.sums)))
    for a, b in zip(*map(jax.tree.leaves, found), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-6, rtol=1e-5)


def test_balanced_weights_match_scikit_learn():
    labels = np.array([0] * 7 + [1] * 2 + [3] + [-1] * 5)
    found = weighting_of(settings("balanced"), "abcd", labels).weights
    known = labels[labels >= 0]
    wanted = sklearn.utils.class_weight.compute_class_weight("balanced", classes=np.unique(known), y=known)
    assert [found[0], found[1], found[3]] == pytest.approx(wanted.tolist())
    assert found[2] == 1.0


def test_weights_are_matched_by_class_name_and_compare_equal():
    one, same = (weighting_of(settings('{"b": 5}', 0.1), "abc", LABELS) for _ in range(2))
    assert one == ClassWeighting((1.0, 5.0, 1.0), 0.1)
    both = [objectives.sequence_objective("abc", MODEL, weighting) for weighting in (one, same)]
    assert both[0] == both[1] and hash(both[0]) == hash(both[1])
    assert weighting_of(settings(), "abc", LABELS) == UNWEIGHTED
    with pytest.raises(UsageError, match="class_weights names 'd'; the classes are a, b, c"):
        weighting_of(settings('{"d": 5}'), "abc", LABELS)


@pytest.mark.parametrize(
    "weights", ["even", "[1]", '{"a": 0}', '{"a": -1}', '{"a": "1"}', '{"a": Infinity}', '{"a": true}']
)
def test_invalid_class_weights_are_an_error(weights):
    with pytest.raises(UsageError, match="give balanced, or a weight above 0"):
        settings(weights)


def test_label_smoothing_is_a_fraction():
    for smoothing in (-0.1, 1.0, float("nan")):
        with pytest.raises(UsageError, match="label_smoothing is"):
            settings(smoothing=smoothing)
