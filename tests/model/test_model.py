"""Pre-training model against a NumPy forward pass, other layouts against the default one, kinds of models."""

import dataclasses
import functools
import math
from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.meshes import one_device
from helpers.tiny_config import tiny_config

from bertjax.data.pretraining.config import Phase
from bertjax.data.schema import synthetic_batch
from bertjax.errors import UsageError
from bertjax.model import config as model_config
from bertjax.model.config import REMAT_POLICIES, ModelConfig
from bertjax.model.encoder import Encoder
from bertjax.model.models import PretrainingModel, build_model, model_description
from bertjax.model.partitioning import resolve_auto
from bertjax.tasks.objectives.masked_lm import MaskedLm
from bertjax.utils.devices import has_bfloat16_units

CONFIG = tiny_config(vocab_size=50, max_position_embeddings=24, pad_vocab_to_multiple_of=16, initializer_range=0.3)
# Layers that differ, as in ModernBERT. Without attention dropout, local attention is computed in blocks.
LOCAL = dataclasses.replace(
    CONFIG,
    position_embedding_type="rotary",
    local_attention=4,
    norm_first=True,
    first_attention_norm=False,
    num_hidden_layers=4,
    attention_probs_dropout_prob=0.0,
)
PHASE = Phase(seq_len=24, batch_size=4, max_predictions=4, start_step=0, stop_step=1)


@pytest.fixture(scope="module")
def batch() -> dict[str, np.ndarray]:
    """Returns rows of different lengths with two segments and padding at the end."""
    objective = MaskedLm.for_model(CONFIG)
    batch = synthetic_batch(objective.schema, objective.synthetic_sizes(PHASE))
    lengths = np.array([24, 20, 11, 7])[:, None]
    batch["input_mask"] = (np.arange(24) < lengths).astype(np.int32)
    batch["masked_lm_positions"] = np.tile(np.array([1, 2, 4, 6], np.int32), (4, 1))
    return batch


def random_params(config: ModelConfig, batch: dict) -> dict:
    """Returns random parameters, including biases and scales, so that a missing term changes the output."""
    params = nn.unbox(jax.jit(PretrainingModel(config).init)(jax.random.key(0), batch)["params"])
    leaves, tree = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(1), len(leaves))
    return tree.unflatten([x + 0.1 * jax.random.normal(k, x.shape) for x, k in zip(leaves, keys, strict=True)])


@pytest.fixture(scope="module")
def params(batch) -> dict:
    return random_params(CONFIG, batch)


@functools.cache
def compiled(config: ModelConfig) -> Callable:
    return jax.jit(PretrainingModel(config).apply)


def run(config: ModelConfig, params: dict, batch: dict) -> tuple[jax.Array, jax.Array]:
    return compiled(config)({"params": params}, batch)


@pytest.fixture(scope="module")
def loss_and_gradient(batch) -> Callable[[ModelConfig], tuple[jax.Array, dict]]:
    """Returns a function that computes the pre-training loss with dropout, and its gradient, once for each config."""

    @functools.cache
    def compute(config: ModelConfig) -> tuple[jax.Array, dict]:
        def loss(params: dict) -> jax.Array:
            values = MaskedLm.for_model(config).compute(params, batch, jax.random.key(7))[0]
            return values["mlm_loss"][0] + values["nsp_loss"][0]

        return jax.jit(jax.value_and_grad(loss))(random_params(config, batch))

    return compute


# Reference forward pass in float64 NumPy, written from the paper.
def layer_norm(x: np.ndarray, p: dict) -> np.ndarray:
    mean, variance = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
    return (x - mean) / np.sqrt(variance + 1e-12) * p["scale"] + p["bias"]


def gelu(x: np.ndarray) -> np.ndarray:
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def dense(x: np.ndarray, p: dict) -> np.ndarray:
    return x @ p["kernel"] + p["bias"]


def hidden_states(params: dict, batch: dict[str, np.ndarray]) -> list[np.ndarray]:
    """Returns the hidden states [B, L, D]: output of the embeddings and of each layer."""
    tables, layers = params["encoder"]["embeddings"], params["encoder"]["layers"]
    ids, segments, mask = (batch[name] for name in ("input_ids", "segment_ids", "input_mask"))
    x = tables["token"][ids] + tables["segment"][segments] + tables["position"][: ids.shape[1]]
    states = [layer_norm(x, tables["norm"])]
    for n in range(len(layers["mlp_in"]["kernel"])):
        layer = jax.tree.map(lambda stack, n=n: stack[n], layers)
        x, attention = states[-1], layer["attention"]
        context = attention["output"]["bias"]
        for head in range(attention["query"]["kernel"].shape[1]):
            projections = (attention[name] for name in ("query", "key", "value"))
            q, k, v = (x @ p["kernel"][:, head] + p["bias"][head] for p in projections)
            scores = q @ k.swapaxes(1, 2) / math.sqrt(q.shape[-1])
            attended = softmax(np.where(mask[:, None] == 0, -1e30, scores)) @ v
            context = context + attended @ attention["output"]["kernel"][head]
        x = layer_norm(x + context, layer["attention_norm"])
        states.append(layer_norm(x + dense(gelu(dense(x, layer["mlp_in"])), layer["mlp_out"]), layer["mlp_norm"]))
    return states


def pretraining_logits(params: dict, batch: dict[str, np.ndarray], vocab_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns masked-LM logits [B, P, vocabulary] and next-sentence logits [B, 2]."""
    hidden, head = hidden_states(params, batch)[-1], params["masked_lm"]
    masked = np.take_along_axis(hidden, batch["masked_lm_positions"][..., None], axis=1)
    x = layer_norm(gelu(dense(masked, head["transform"])), head["norm"])
    masked_lm = x @ params["encoder"]["embeddings"]["token"][:vocab_size].T + head["bias"][:vocab_size]
    pooled = np.tanh(dense(hidden[:, 0], params["pooler"]["dense"]))
    return masked_lm, dense(pooled, params["next_sentence"]["dense"])


def test_logits_and_hidden_states_equal_the_numpy_reference_including_padding(params, batch):
    double = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
    logits, exact = run(CONFIG, params, batch), pretraining_logits(double, batch, CONFIG.vocab_size)
    np.testing.assert_allclose(logits[0][..., : CONFIG.vocab_size], exact[0], atol=5e-5)
    # The rows that pad the vocabulary have no probability.
    assert CONFIG.padded_vocab_size == 64 and jax.nn.softmax(logits[0])[..., CONFIG.vocab_size :].max() == 0
    np.testing.assert_allclose(logits[1], exact[1], atol=5e-5)
    apply = jax.jit(Encoder(CONFIG).apply, static_argnames="collect_layers")
    rows = (batch["input_ids"], batch["segment_ids"], batch["input_mask"])
    _, layers = apply({"params": params["encoder"]}, *rows, collect_layers=True)
    np.testing.assert_allclose(layers, np.array(hidden_states(double, batch)), atol=5e-5)


@pytest.mark.parametrize(
    ("config", "remat", "scan_layers"),
    [
        pytest.param(CONFIG, "none", "true", marks=pytest.mark.ci),
        pytest.param(CONFIG, "attention", "true", marks=pytest.mark.slow),
        pytest.param(CONFIG, "elementwise", "true", marks=pytest.mark.slow),
        pytest.param(CONFIG, "projections", "false", marks=pytest.mark.slow),
        (CONFIG, "full", "true"),
        pytest.param(LOCAL, "none", "true", marks=pytest.mark.ci),
        (LOCAL, "attention", "false"),
    ],
)
def test_scan_and_remat_do_not_change_loss_and_gradient(loss_and_gradient, config, remat, scan_layers):
    expected = loss_and_gradient(dataclasses.replace(config, scan_layers="false"))
    actual = loss_and_gradient(dataclasses.replace(config, remat=remat, scan_layers=scan_layers))
    # The tolerance is relative to the largest gradient, because the gradient of key biases is only rounding error.
    scale = max(float(jnp.max(jnp.abs(x))) for x in jax.tree.leaves(expected[1]))
    for (path, x), (_, y) in zip(*map(jax.tree_util.tree_leaves_with_path, (expected, actual)), strict=True):
        np.testing.assert_allclose(x, y, rtol=2e-5, atol=2e-6 * scale, err_msg=str(path))


@pytest.mark.ci
def test_remat_policies_are_ordered_by_number_of_recomputed_matrix_products(params, batch):
    def lowered_gradient(remat: str) -> jax.stages.Lowered:
        objective = MaskedLm.for_model(dataclasses.replace(CONFIG, remat=remat, scan_layers="true"))
        return jax.jit(jax.grad(lambda params: objective.compute(params, batch, None)[0]["mlm_loss"][0])).lower(params)

    gradients = [lowered_gradient(remat) for remat in REMAT_POLICIES]
    none, attention, elementwise, projections, full = (each.compile().as_text().count(" dot(") for each in gradients)
    # `attention` and `elementwise` recompute the attention scores, `projections` also queries, keys and values, and
    # `full` also the first feed-forward product.
    assert none < attention == elementwise < projections < full
    # All policies compute GELU equally often: in the layers and the head, in the forward and the backward pass.
    assert len({each.as_text().count("stablehlo.tanh") for each in gradients}) == 1


@pytest.mark.ci
def test_hidden_states_of_packed_sequences_equal_those_of_separate_rows_with_rotary_and_local_attention():
    encoder = Encoder(LOCAL)
    rng = np.random.default_rng(3)
    lengths = [9, 6, 5]
    ids, segments = ([rng.integers(0, high, n) for n in lengths] for high in (50, 2))
    sequence_ids = [np.full(n, i + 1) for i, n in enumerate(lengths)]
    position_ids = [np.arange(n) for n in lengths]
    params = jax.jit(encoder.init)(jax.random.key(0), *np.zeros((4, 1, 24), np.int32))
    apply = jax.jit(encoder.apply)

    def encode(*parts: list[np.ndarray]) -> np.ndarray:
        joined = map(np.concatenate, parts)
        rows = [np.pad(row, (0, 24 - len(row)))[None].astype(np.int32) for row in joined]
        return np.asarray(apply(params, *rows)[0][0])

    packed = np.split(encode(ids, segments, sequence_ids, position_ids), np.cumsum(lengths))
    for i, n in enumerate(lengths):
        row = encode(ids[i : i + 1], segments[i : i + 1], [np.ones(n)], position_ids[i : i + 1])
        np.testing.assert_allclose(packed[i], row[:n], atol=2e-5)


def test_bfloat16_model_has_float32_parameters_and_bfloat16_matrix_products(params, batch):
    config = dataclasses.replace(CONFIG, dtype="bfloat16")
    # On CPU, products of bfloat16 operands have float32 results; see test_products.py.
    with jax.sharding.use_abstract_mesh(one_device("gpu")):
        text = str(jax.make_jaxpr(PretrainingModel(config).apply)({"params": params}, batch))
    products = [line for line in text.splitlines() if "= dot_general[" in line]
    in_float32 = [line for line in products if ":f32[" in line]
    # In float32: segment embeddings, masked-LM logits, and their bias (an outer product; see `LmHead`).
    assert len(products) - len(in_float32) >= 8
    assert all(":f32[4,24,16]" in line or ":f32[4,4,64]" in line for line in in_float32)
    exponentials = [line for line in text.splitlines() if "= exp " in line or "= rsqrt " in line]
    assert len(exponentials) >= 4 and all(":f32[" in line for line in exponentials)
    initial = jax.eval_shape(PretrainingModel(config).init, jax.random.key(0), batch)["params"]
    assert {leaf.dtype for leaf in jax.tree.leaves(initial)} == {jnp.dtype("float32")}
    exact, rounded = run(CONFIG, params, batch), run(config, params, batch)
    assert rounded[0].dtype == jnp.float32
    assert float(jnp.abs(exact[1] - rounded[1]).max()) < 0.1


@pytest.mark.parametrize(
    ("platform", "dtype", "auto", "scan_layers"),
    [
        ("cpu", "float32", "auto", "false"),
        ("tpu", "bfloat16", "auto", "true"),
        ("gpu", "bfloat16", "auto", "false"),
    ],
)
def test_auto_dtype_and_scan_layers_depend_on_the_platform_of_the_mesh(
    params, batch, platform, dtype, auto, scan_layers, monkeypatch
):
    monkeypatch.setattr(model_config, "has_bfloat16_units", lambda: False)
    config = dataclasses.replace(CONFIG, dtype="auto", scan_layers=auto)
    explicit = dataclasses.replace(CONFIG, dtype=dtype, scan_layers=scan_layers)
    with jax.sharding.use_abstract_mesh(one_device(platform)):
        assert resolve_auto(config) == explicit
        programs = [
            str(jax.make_jaxpr(PretrainingModel(each).apply)({"params": params}, batch)) for each in (config, explicit)
        ]
    assert programs[0] == programs[1]
    assert ("bf16[" in programs[0]) == (dtype == "bfloat16")


@pytest.mark.parametrize(
    ("flags", "dtype"), [("avx2 amx_bf16", "bfloat16"), ("avx512_bf16", "bfloat16"), ("avx2", "float32")]
)
def test_auto_dtype_is_bfloat16_on_cpus_with_bfloat16_units(tmp_path, monkeypatch, flags, dtype):
    (tmp_path / "cpuinfo").write_text(f"model name : X\nflags\t\t: fpu {flags}\n")
    has_units = has_bfloat16_units.__wrapped__(tmp_path / "cpuinfo")
    monkeypatch.setattr(model_config, "has_bfloat16_units", lambda: has_units)
    assert dataclasses.replace(CONFIG, dtype="auto").resolve("cpu").dtype == dtype


class OwnModel(PretrainingModel):
    KIND = "own"


class LargerModel(PretrainingModel):
    pass


def test_kind_of_a_model_of_ones_own_is_its_attribute_or_that_of_its_base_class():
    kinds = [model_description(model(tiny_config()))["kind"] for model in (OwnModel, LargerModel)]
    assert kinds == ["own", "pretraining"]


def test_unknown_kind_of_model_is_rejected():
    with pytest.raises(UsageError, match="unknown kind of model: 'pairs'; use one of encoder, pretraining"):
        build_model({"kind": "pairs"}, CONFIG)
