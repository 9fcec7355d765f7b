"""Class weights and label smoothing: the loss, its sums over micro-batches, and invalid values."""

import functools

import jax
import numpy as np
import pytest
import sklearn.utils
from helpers.tiny_config import tiny_config

from bertjax.config.mesh import MeshConfig
from bertjax.config.optimizer import OptimizerConfig
from bertjax.errors import UsageError
from bertjax.model.models import TokenModel
from bertjax.tasks.finetuning.config import FinetuningData
from bertjax.tasks.finetuning.tagging import TagObjective
from bertjax.tasks.objectives.classification import UNWEIGHTED, ClassWeighting, make_class_weighting, sequence_objective
from bertjax.training.optimizer import make_optimizer
from bertjax.training.sharding import make_mesh
from bertjax.training.step import make_init_state

MODEL = tiny_config(
    num_hidden_layers=1, intermediate_size=16, max_position_embeddings=8, pad_vocab_to_multiple_of=1, dropout=0.0
)
OPTIMIZER = make_optimizer(OptimizerConfig())
MESH = make_mesh(MeshConfig(1, 1, 1), jax.devices()[:1])
LABELS = np.array([0, 0, 0, 0, 0, 1, 2, -1], np.int32)


def weighting_of(class_weights="", smoothing=0.0, names="abc", labels=LABELS):
    return make_class_weighting(FinetuningData(class_weights=class_weights).class_weight_map, smoothing, names, labels)


def make_batch():
    rng = np.random.default_rng(0)
    ids = rng.integers(0, 20, (8, 8), np.int32)
    return {
        "input_ids": ids,
        "input_mask": np.ones_like(ids),
        "segment_ids": np.zeros_like(ids),
        "labels": LABELS,
        "token_labels": rng.integers(-1, 3, (8, 8)).astype(np.int32),
        "example": np.arange(8, dtype=np.int32),
        "weights": np.ones(8, np.float32),
    }


def make_objective(is_tagger, weighting=UNWEIGHTED):
    if is_tagger:
        return TagObjective(TokenModel(MODEL, 3, head_dropout=True), weighting)
    return sequence_objective("abc", MODEL, weighting)


def reference_loss(logits, labels, weighting):
    """Returns the weighted mean loss in float64."""
    logits = logits.astype(np.float64)
    log_probabilities = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    targets = (1 - weighting.smoothing) * np.eye(3)[labels] + weighting.smoothing / 3
    weights = np.array(weighting.weights or (1, 1, 1))[labels] * (labels >= 0)
    return float((-(targets * log_probabilities).sum(axis=-1) * weights).sum() / weights.sum())


@functools.cache
def params_and_logits(is_tagger):
    objective = make_objective(is_tagger)
    params = make_init_state(objective, OPTIMIZER, MESH)(jax.random.key(0)).params
    # The initial kernel is so small that all classes have nearly the same logit.
    params["classifier"]["kernel"] = 10 * params["classifier"]["kernel"]
    return params, np.asarray(objective.model.apply({"params": params}, make_batch()))


@pytest.mark.ci
@pytest.mark.parametrize(
    "weighting", [UNWEIGHTED, ClassWeighting((0.25, 2.0, 0.1)), ClassWeighting((), 0.1), ClassWeighting((1, 5, 3), 0.3)]
)
@pytest.mark.parametrize("is_tagger", [False, True])
def test_training_loss_is_weighted_and_evaluation_loss_is_not(weighting, is_tagger):
    objective, batch = make_objective(is_tagger, weighting), make_batch()
    labels = batch["token_labels"] if is_tagger else LABELS
    params, logits = params_and_logits(is_tagger)
    for dropout_key, expected_weighting in ((jax.random.key(1), weighting), (None, UNWEIGHTED)):
        sums, _ = objective.compute(params, batch, dropout_key)
        total, weight = (float(x) for x in sums["cross_entropy"])
        assert total / weight == pytest.approx(reference_loss(logits, labels, expected_weighting), rel=1e-5)
        if dropout_key is not None:
            assert float(objective.denominators(batch)["cross_entropy"]) == pytest.approx(weight)
    known = labels >= 0
    accuracy = next(value for name, value in sums.items() if "accuracy" in name)
    assert accuracy.tolist() == [(logits.argmax(-1) == labels)[known].sum(), known.sum()]


def test_balanced_weights_match_scikit_learn():
    labels = np.array([0] * 7 + [1] * 2 + [3] + [-1] * 5)
    weights = weighting_of("balanced", names="abcd", labels=labels).weights
    known = labels[labels >= 0]
    expected = sklearn.utils.class_weight.compute_class_weight("balanced", classes=np.unique(known), y=known)
    assert [weights[0], weights[1], weights[3]] == pytest.approx(expected.tolist())
    assert weights[2] == 1.0


def test_weights_are_matched_by_class_name_and_equal_objectives_hash_equally():
    objectives = [make_objective(False, weighting_of('{"b": 5}', smoothing=0.1)) for _ in range(2)]
    assert objectives[0].weighting == ClassWeighting((1.0, 5.0, 1.0), 0.1)
    assert objectives[0] == objectives[1] and hash(objectives[0]) == hash(objectives[1])
    assert weighting_of() == UNWEIGHTED
    with pytest.raises(UsageError, match="unknown class in config.data.class_weights: 'd'; use one of a, b, c"):
        weighting_of('{"d": 5}')


@pytest.mark.parametrize(
    "class_weights", ["even", "[1]", '{"a": 0}', '{"a": -1}', '{"a": "1"}', '{"a": Infinity}', '{"a": true}']
)
def test_invalid_class_weights_are_an_error(class_weights):
    with pytest.raises(UsageError, match="use balanced, or JSON with a positive weight by class name"):
        FinetuningData(class_weights=class_weights)
