"""The objective of embedders: chunks and meshes change neither loss nor gradient."""

import flax.linen as nn
import jax
import numpy as np
import pytest
from helpers.tiny_config import tiny_config

from bertjax.config.mesh import MeshConfig
from bertjax.data.finetuning.batches import Batching
from bertjax.data.finetuning.examples import make_examples
from bertjax.data.finetuning.text_batches import TextExamples, train_batch
from bertjax.data.shard import SINGLE_SHARD
from bertjax.model.models import EmbeddingModel
from bertjax.tasks.objectives.embedding import Embedding
from bertjax.training.sharding import make_mesh, put_batch, under_mesh

BATCH_SIZE, COLUMNS, PER_ROW = 16, 3, 4


def random_examples(count: int = BATCH_SIZE, columns: int = COLUMNS) -> TextExamples:
    rng = np.random.default_rng(0)
    ids = [rng.integers(1, 20, rng.integers(2, 9)).tolist() for _ in range(count * columns)]
    texts = make_examples([{"input_ids": each, "segment_ids": [0] * len(each)} for each in ids], {})
    keys = np.arange(count * columns).reshape(count, columns)
    keys[3, 2] = -1
    return TextExamples("texts", texts, columns, keys, {})


def loss_and_grads(chunk: int, mesh, dropout: float = 0.1):
    """Returns loss and gradients of a batch of triplets."""
    objective = Embedding(EmbeddingModel(tiny_config(dropout=dropout), dense=12), chunk=chunk)
    # Scale the initial parameters, so that the vectors of different texts differ.
    params = jax.tree.map(lambda x: 3 * x, nn.unbox(objective.init_params(jax.random.key(0))))
    batch = train_batch(random_examples(), np.arange(BATCH_SIZE), Batching(BATCH_SIZE, 8, 40, PER_ROW), SINGLE_SHARD)
    assert batch["texts"].shape[1] == PER_ROW

    def loss(params, batch):
        sums, _ = objective.compute(params, batch, jax.random.key(1))
        (total, weight), *_ = sums.values()
        return total / weight

    function = jax.jit(under_mesh(jax.value_and_grad(loss), mesh))
    value, grads = function(params, put_batch(batch, mesh))
    return float(value), jax.device_get(grads)


def assert_equal(actual, expected):
    np.testing.assert_allclose(actual[0], expected[0], rtol=1e-6)
    scale = max(np.abs(reference).max() for reference in jax.tree.leaves(expected[1]))
    for value, reference in zip(*map(jax.tree.leaves, (actual[1], expected[1])), strict=True):
        np.testing.assert_allclose(value / scale, reference / scale, rtol=0, atol=2e-6)


@pytest.mark.ci
def test_chunks_change_neither_loss_nor_gradient_with_dropout():
    mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    expected = loss_and_grads(0, mesh)
    for chunk in (4, 16, 48):
        assert_equal(loss_and_grads(chunk, mesh), expected)
    assert expected[0] != loss_and_grads(0, mesh, dropout=0.0)[0]


@pytest.mark.devices
@pytest.mark.parametrize(("data", "fsdp", "tensor"), [(2, 1, 1), (1, 2, 1), (4, 1, 1), (2, 2, 1), (2, 1, 2), (1, 2, 2)])
@pytest.mark.parametrize("chunk", [0, 16])
def test_meshes_change_neither_loss_nor_gradient(data, fsdp, tensor, chunk):
    mesh = make_mesh(MeshConfig(data, fsdp, tensor), jax.devices()[: data * fsdp * tensor])
    assert_equal(loss_and_grads(chunk, mesh), loss_and_grads(0, make_mesh(MeshConfig(), jax.devices()[:1])))
