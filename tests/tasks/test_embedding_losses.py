"""Losses of embedders: equal to sentence-transformers, and independent of chunks, meshes and padding."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bertjax.tasks.objectives import embedding_losses
from bertjax.tasks.objectives.embedding_losses import LOSSES, EmbeddedBatch, LossOptions, in_blocks

ROWS, WIDTH = 6, 8


def random_batch(documents: int = 1, classes: int = 3) -> EmbeddedBatch:
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(rng.normal(size=shape), jnp.float32)

    return EmbeddedBatch(
        normal(ROWS, WIDTH),
        normal(ROWS, documents, WIDTH),
        jnp.ones(ROWS),
        jnp.ones((ROWS, documents)),
        jnp.asarray(rng.integers(0, classes, (ROWS, documents)), jnp.float32),
        guide=normal(ROWS, 1 + documents, WIDTH),
    )


def torch_loss(name: str, batch: EmbeddedBatch, options: LossOptions, dims: tuple[int, ...]):
    """Returns the loss of sentence-transformers, and its gradients for queries and documents."""
    torch = pytest.importorskip("torch")
    losses = pytest.importorskip("sentence_transformers.sentence_transformer.losses")

    class Model(torch.nn.Module):
        """Stand-in for a model. Returns its inputs as vectors."""

        device = torch.device("cpu")

        def forward(self, features):
            return {"sentence_embedding": features["sentence_embedding"]}

        def get_embedding_dimension(self):
            return WIDTH

    def tensors(array):
        return torch.tensor(np.asarray(array))

    queries = tensors(batch.queries).requires_grad_()
    documents = tensors(batch.documents).requires_grad_()
    columns = [{"sentence_embedding": x} for x in (queries, *documents.unbind(1))]
    model, scale = Model(), 1 / options.temperature
    labels, guide = tensors(batch.labels), tensors(batch.guide)
    if name == "info_nce":
        loss = losses.MultipleNegativesRankingLoss(
            model,
            scale=scale,
            directions=("query_to_doc", *(["doc_to_query"] if options.both_directions else [])),
            partition_mode="per_direction",
            hardness_mode="all_negatives" if options.hardness else None,
            hardness_strength=options.hardness,
        )
    elif name == "gist":
        loss = losses.GISTEmbedLoss.__new__(losses.GISTEmbedLoss)  # The constructor needs two complete models.
        torch.nn.Module.__init__(loss)
        loss.similarity_fct, loss.cross_entropy_loss = torch.nn.CosineSimilarity(dim=-1), torch.nn.CrossEntropyLoss()
        loss.model, loss.temperature, loss.must_retokenize = model, options.temperature, False
        loss.margin_strategy, loss.margin, loss.gather_across_devices = "absolute", 0.0, False
        loss.contrast_anchors = loss.contrast_positives = True
        guides = itertools.cycle(guide.unbind(1))
        loss.guide = lambda features: {"sentence_embedding": next(guides)}
    elif name == "cosent":
        loss = losses.CoSENTLoss(model, scale=scale)
    else:
        classes = {"cosine": "CosineSimilarityLoss", "margin_mse": "MarginMSELoss", "distill_vectors": "MSELoss"}
        loss = getattr(losses, classes[name])(model)
        labels = guide if name == "distill_vectors" else labels
    if len(dims) > 1:
        loss = losses.MatryoshkaLoss(model, loss, [*dims])
    value = loss(columns, labels if labels.ndim == 3 or name == "margin_mse" else labels[:, 0])
    value.backward()
    return value.item(), queries.grad.numpy(), documents.grad.numpy()


def value_and_grads(function, batch):
    def loss(queries, documents):
        return function(batch._replace(queries=queries, documents=documents))

    value, grads = jax.value_and_grad(loss, argnums=(0, 1))(batch.queries, batch.documents)
    return float(value), *map(np.asarray, grads)


@pytest.mark.parametrize(
    ("name", "documents", "options", "dims"),
    [
        ("info_nce", 3, LossOptions(temperature=0.1), (WIDTH,)),
        ("info_nce", 2, LossOptions(both_directions=True), (WIDTH,)),
        ("info_nce", 2, LossOptions(hardness=5.0), (WIDTH,)),
        ("gist", 2, LossOptions(temperature=0.1), (WIDTH,)),
        ("cosent", 1, LossOptions(temperature=1.0), (WIDTH,)),
        ("cosine", 1, LossOptions(), (WIDTH,)),
        ("margin_mse", 3, LossOptions(), (WIDTH,)),
        ("distill_vectors", 2, LossOptions(), (WIDTH,)),
        *((name, 1, LossOptions(), (WIDTH, 4, 2)) for name in ("info_nce", "gist")),
    ],
)
def test_losses_and_gradients_equal_those_of_sentence_transformers(name, documents, options, dims):
    batch, function = random_batch(documents), LOSSES[name].function
    expected = torch_loss(name, batch, options, dims)
    actual = value_and_grads(lambda batch: sum(function(batch.truncate(dim), options) for dim in dims), batch)
    for value, reference in zip(actual, expected, strict=True):
        np.testing.assert_allclose(value, reference, rtol=1e-5, atol=1e-6)


def test_softmax_equals_the_classifier_of_sentence_transformers():
    torch = pytest.importorskip("torch")
    batch = random_batch()
    logits = np.random.default_rng(1).normal(size=(ROWS, 3)).astype(np.float32)
    labels = torch.tensor(np.asarray(batch.labels[:, 0], np.int64))
    expected = torch.nn.functional.cross_entropy(torch.tensor(logits), labels).item()
    value = LOSSES["softmax"].function(batch._replace(class_logits=jnp.asarray(logits)), LossOptions())
    np.testing.assert_allclose(value, expected, rtol=1e-6)


@pytest.mark.ci
@pytest.mark.parametrize("name", [name for name in LOSSES if name != "softmax"])
def test_padding_rows_and_missing_documents_change_nothing(name):
    documents = 1 if LOSSES[name].max_documents else 2
    batch = random_batch(documents)

    def pad(array, axis=0):
        width = [(0, 0)] * array.ndim
        width[axis] = (0, 1)
        return jnp.pad(array, width)

    padded = EmbeddedBatch(*(None if array is None else pad(array) for array in batch))
    if documents > 1:
        columns = {name: pad(getattr(padded, name), 1) for name in ("documents", "document_weights", "labels", "guide")}
        padded = padded._replace(**columns)
    function, options = LOSSES[name].function, LossOptions()
    value, queries, texts = value_and_grads(lambda batch: function(batch, options), padded)
    expected, expected_queries, expected_texts = value_and_grads(lambda batch: function(batch, options), batch)
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    np.testing.assert_allclose(queries[:ROWS], expected_queries, atol=1e-6)
    np.testing.assert_allclose(texts[:ROWS, :documents], expected_texts, atol=1e-6)
    assert not queries[ROWS:].any() and not texts[ROWS:].any() and not texts[:, documents:].any()


@pytest.mark.ci
@pytest.mark.parametrize("name", ["info_nce", "gist"])
def test_logits_in_blocks_change_neither_loss_nor_gradient(name, monkeypatch):
    batch, options = random_batch(2), LossOptions(both_directions=name == "info_nce")
    function = LOSSES[name].function
    expected = value_and_grads(lambda batch: function(batch, options), batch)
    monkeypatch.setattr(embedding_losses, "_MAX_LOGITS", 2 * ROWS)
    text = str(jax.make_jaxpr(lambda batch: function(batch, options))(batch))
    assert "scan" in text
    for value, reference in zip(value_and_grads(lambda batch: function(batch, options), batch), expected, strict=True):
        np.testing.assert_allclose(value, reference, atol=1e-6)


def test_blocks_contain_every_nth_row_and_keep_the_order():
    rows = jnp.arange(6)
    result = in_blocks(lambda rows, block: jnp.stack([rows, jnp.full_like(rows, block)], axis=1), rows, 3)
    assert result.tolist() == [[0, 0], [1, 1], [2, 2], [3, 0], [4, 1], [5, 2]]
