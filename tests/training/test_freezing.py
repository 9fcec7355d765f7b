"""Freezing parameters: unchanged bits, no optimizer state, no gradient."""

import dataclasses
import math
import re

import jax
import numpy as np
import pytest
from flax.traverse_util import flatten_dict
from helpers.tiny_config import tiny_config

from bertjax.config.mesh import MeshConfig
from bertjax.config.optimizer import OptimizerConfig
from bertjax.data.pretraining.config import Phase
from bertjax.data.schema import synthetic_batch
from bertjax.errors import UsageError
from bertjax.model.layers import is_stacked
from bertjax.tasks.objectives import masked_lm
from bertjax.training.optimizer import bert_schedule, make_optimizer
from bertjax.training.sharding import make_mesh, put_batch
from bertjax.training.step import abstract_state, make_init_state, make_train_step

LAYERS = 3
MODEL = tiny_config(
    vocab_size=60, num_hidden_layers=LAYERS, max_position_embeddings=16, pad_vocab_to_multiple_of=8, dropout=0.0
)
OBJECTIVE = masked_lm.MaskedLm.for_model(MODEL)
PHASE = Phase(seq_len=16, batch_size=8, max_predictions=3, start_step=0, stop_step=10)
RATE = bert_schedule(1e-2, 0, 10)
FREEZE = {"freeze": ("encoder/embeddings", "encoder/layers/mlp_norm"), "freeze_layers": 2}


def train(mesh_sizes=(1, 1, 1), steps=2, grad_accum_steps=1, head_only=False, **fields):
    optimizer = make_optimizer(OptimizerConfig(**fields))
    mesh = make_mesh(MeshConfig(*mesh_sizes), jax.devices()[: math.prod(mesh_sizes)])
    state = make_init_state(OBJECTIVE, optimizer, mesh)(jax.random.key(0))
    before = jax.device_get(state.params)
    step = make_train_step(OBJECTIVE, optimizer, mesh, grad_accum_steps, head_only)
    for seed in range(steps):
        batch = synthetic_batch(OBJECTIVE.schema, OBJECTIVE.synthetic_sizes(PHASE), seed)
        state = step(state, put_batch(batch, mesh), jax.random.key(1), RATE)
    return flatten_dict(before), jax.device_get(state)


def is_frozen(path: tuple[str, ...]) -> bool:
    return path[:2] == ("encoder", "embeddings") or path[:3] == ("encoder", "layers", "mlp_norm")


@pytest.mark.ci
@pytest.mark.parametrize("name", ["bert_adam", pytest.param("lamb", marks=pytest.mark.slow)])
def test_frozen_parameters_do_not_change_and_have_no_optimizer_state(name):
    before, state = train(name=name, weight_decay=0.1, **FREEZE)
    trained = 0
    for path, after in flatten_dict(state.params).items():
        frozen = after if is_frozen(path) else after[:2] if is_stacked(path) else after[:0]
        np.testing.assert_array_equal(frozen, before[path][: len(frozen)], err_msg=str(path))
        if not is_frozen(path):
            layers = slice(2, None) if is_stacked(path) else slice(None)
            assert (after[layers] != before[path][layers]).any(), path
            trained += after[layers].size
    # The optimizer state has two moments per trained parameter; that of LAMB also has a step count.
    sizes = [leaf.size for leaf in jax.tree.leaves(state.opt_state)]
    assert sum(sizes) == 2 * trained + (name != "bert_adam")


@pytest.mark.slow
def test_trainable_parameters_get_the_same_updates_as_without_freezing():
    """Compares one Adam step without clipping, where an update depends only on the parameter's own gradient."""
    before, fully_trained = train(steps=1, clip_norm=0.0)
    _, partly_trained = train((2, 2, 2), 1, 2, clip_norm=0.0, **FREEZE)
    for path, after in flatten_dict(partly_trained.params).items():
        expected = np.array(before[path])
        if not is_frozen(path):
            layers = slice(2, None) if is_stacked(path) else slice(None)
            expected[layers] = flatten_dict(fully_trained.params)[path][layers]
        np.testing.assert_allclose(after, expected, atol=2e-6, err_msg=str(path))


@pytest.mark.ci
@pytest.mark.parametrize(
    "fields",
    [
        {"freeze_layers": LAYERS, "freeze": ("encoder/embeddings",)},
        {"freeze_layers": LAYERS, "freeze": ("encoder/embeddings",), "head_only": True},
        {"head_only": True, "weight_decay": 0.1, "grad_accum_steps": 2},
    ],
)
def test_frozen_layers_and_head_steps_change_only_the_head(fields):
    before, state = train(**fields)
    for path, after in flatten_dict(state.params).items():
        assert (after == before[path]).all() == (path[0] == "encoder"), path
    for path, moment in flatten_dict(state.opt_state[1].mu).items():
        assert (moment == 0).all() == (path[0] == "encoder"), path


@pytest.mark.ci
@pytest.mark.parametrize("scan_layers", ["true", "false"])
def test_backward_pass_skips_frozen_layers(scan_layers):
    objective = masked_lm.MaskedLm.for_model(dataclasses.replace(MODEL, scan_layers=scan_layers))
    mesh = make_mesh(MeshConfig(1), jax.devices()[:1])

    def backward_lengths(head_only=False, **fields) -> set[int]:
        optimizer = make_optimizer(OptimizerConfig(**fields))
        state = abstract_state(objective, optimizer, mesh)
        batch = jax.tree.map(jax.numpy.asarray, synthetic_batch(objective.schema, objective.synthetic_sizes(PHASE)))
        step = make_train_step(objective, optimizer, mesh, 1, head_only)
        jaxpr = str(jax.make_jaxpr(step)(state, batch, jax.random.key(0), RATE))
        return {int(length) for length in re.findall(r"\blength=(\d+)[^\[\]]* reverse=True", jaxpr)}

    assert backward_lengths() == {LAYERS}
    assert backward_lengths(**FREEZE) == {1}
    assert backward_lengths(head_only=True) == set()
    assert backward_lengths(freeze_layers=LAYERS, freeze=("encoder/embeddings",)) == set()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"freeze_layers": 4}, "freeze_layers=4 is too large"),
        ({"freeze": ("encoder/embedding",)}, "unknown parameter .* 'encoder/embedding'.*encoder/embeddings"),
        (
            {"freeze_layers": 3, "freeze": ("encoder/embeddings", "masked_lm", "next_sentence", "pooler")},
            "no parameter",
        ),
    ],
)
def test_freezing_unknown_or_all_parameters_is_an_error(fields, message):
    optimizer = make_optimizer(OptimizerConfig(**fields))
    with pytest.raises(UsageError, match=message):
        abstract_state(OBJECTIVE, optimizer, make_mesh(MeshConfig(1), jax.devices()[:1]))
