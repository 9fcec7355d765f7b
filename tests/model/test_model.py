"""Tests of the pre-training model against a NumPy forward pass, and of other layouts against the default one."""

import dataclasses
import functools
from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from meshes import one_device
from reference_bert import hidden_states, pretraining_logits
from tiny_config import tiny_config

from bertjax.data.pretraining.config import Phase
from bertjax.data.schema import synthetic_batch
from bertjax.model import config as model_config
from bertjax.model.config import REMAT_POLICIES, ModelConfig
from bertjax.model.encoder import Encoder
from bertjax.model.models import PretrainingModel
from bertjax.model.partitioning import resolve_layout
from bertjax.tasks.objectives.masked_lm import MaskedLm
from bertjax.utils.devices import has_bfloat16_units

CONFIG = tiny_config(vocab_size=50, max_position_embeddings=24, pad_vocab_to_multiple_of=16, initializer_range=0.3)
# Unrolled layers, which the default `scan_layers="auto"` selects on CPUs.
UNROLLED = dataclasses.replace(CONFIG, scan_layers="false")
PHASE = Phase(seq_len=24, batch_size=4, max_predictions=4, start_step=0, stop_step=1)


@pytest.fixture(scope="module")
def batch() -> dict[str, np.ndarray]:
    """Returns rows of different lengths with two segments and padding at the end."""
    objective = MaskedLm.for_model(CONFIG)
    batch = synthetic_batch(objective.schema, objective.axis_sizes(PHASE))
    lengths = np.array([24, 20, 11, 7])[:, None]
    batch["input_mask"] = (np.arange(24) < lengths).astype(np.int32)
    batch["masked_lm_positions"] = np.tile(np.array([1, 2, 4, 6], np.int32), (4, 1))
    return batch


@pytest.fixture(scope="module")
def params(batch) -> dict:
    """Returns random parameters, including biases and scales, so that a missing term changes the output."""
    params = nn.unbox(jax.jit(PretrainingModel(CONFIG).init)(jax.random.key(0), batch)["params"])
    leaves, tree = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(1), len(leaves))
    return tree.unflatten([x + 0.1 * jax.random.normal(k, x.shape) for x, k in zip(leaves, keys, strict=True)])


@functools.cache
def compiled(config: ModelConfig) -> Callable:
    return jax.jit(PretrainingModel(config).apply)


def run(config: ModelConfig, params: dict, batch: dict) -> tuple[jax.Array, jax.Array]:
    return compiled(config)({"params": params}, batch)


@pytest.fixture(scope="module")
def loss_and_gradient(params, batch) -> Callable[[ModelConfig], tuple[jax.Array, dict]]:
    """Returns a function that computes the pre-training loss with dropout, and its gradient, once for each config."""

    @functools.cache
    def compute(config: ModelConfig) -> tuple[jax.Array, dict]:
        def loss(params: dict) -> jax.Array:
            values = MaskedLm.for_model(config).compute(params, batch, jax.random.key(7))[0]
            return values["mlm_loss"][0] + values["nsp_loss"][0]

        return jax.jit(jax.value_and_grad(loss))(params)

    return compute


def assert_trees_close(a: dict, b: dict) -> None:
    # The tolerance is relative to the largest gradient, because the gradient of key biases is only rounding error.
    scale = max(float(jnp.max(jnp.abs(x))) for x in jax.tree.leaves(a[1]))
    for (path, x), (_, y) in zip(*map(jax.tree_util.tree_leaves_with_path, (a, b)), strict=True):
        np.testing.assert_allclose(x, y, rtol=2e-5, atol=2e-6 * scale, err_msg=str(path))


def test_logits_and_hidden_states_equal_the_numpy_reference_including_padding(params, batch):
    double = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
    logits, exact = run(CONFIG, params, batch), pretraining_logits(double, batch, CONFIG.vocab_size)
    np.testing.assert_allclose(logits[0][..., : CONFIG.vocab_size], exact[0], atol=5e-5)
    np.testing.assert_allclose(logits[1], exact[1], atol=5e-5)
    apply = jax.jit(Encoder(CONFIG).apply, static_argnames="collect_layers")
    rows = (batch["input_ids"], batch["segment_ids"], batch["input_mask"])
    _, layers = apply({"params": params["encoder"]}, *rows, collect_layers=True)
    np.testing.assert_allclose(layers, np.array(hidden_states(double, batch)), atol=5e-5)


def test_padding_tokens_do_not_affect_logits(params, batch):
    other = {**batch, "input_ids": np.where(batch["input_mask"] == 1, batch["input_ids"], 3)}
    for a, b in zip(run(CONFIG, params, batch), run(CONFIG, params, other), strict=True):
        np.testing.assert_array_equal(a, b)


def test_vocabulary_padding_does_not_change_probabilities(params, batch):
    assert CONFIG.padded_vocab_size == 64
    unpadded = dataclasses.replace(CONFIG, pad_vocab_to_multiple_of=1)
    cut = jax.tree.map(lambda x: x, params)
    cut["encoder"]["embeddings"]["token"] = params["encoder"]["embeddings"]["token"][:50]
    cut["masked_lm"]["bias"] = params["masked_lm"]["bias"][:50]
    padded = jax.nn.softmax(run(CONFIG, params, batch)[0])
    assert float(padded[..., 50:].max()) == 0.0
    np.testing.assert_allclose(padded[..., :50], jax.nn.softmax(run(unpadded, cut, batch)[0]), rtol=1e-5)


@pytest.mark.ci
def test_unrolled_and_scanned_layers_agree(loss_and_gradient):
    scanned = loss_and_gradient(dataclasses.replace(CONFIG, scan_layers="true"))
    assert_trees_close(scanned, loss_and_gradient(UNROLLED))


@pytest.mark.parametrize(
    "remat",
    [*(pytest.param(policy, marks=pytest.mark.slow) for policy in ("attention", "elementwise", "projections")), "full"],
)
def test_remat_does_not_change_loss_and_gradient(loss_and_gradient, remat):
    scan_layers = "false" if remat == "projections" else "true"
    changed = dataclasses.replace(CONFIG, remat=remat, scan_layers=scan_layers)
    assert_trees_close(loss_and_gradient(UNROLLED), loss_and_gradient(changed))


def lowered_gradient(remat: str, params: dict, batch: dict) -> jax.stages.Lowered:
    """Returns the gradient of the masked-LM loss with a remat policy, lowered but not compiled."""
    config = dataclasses.replace(CONFIG, remat=remat, scan_layers="true")

    def loss(params: dict) -> jax.Array:
        return MaskedLm.for_model(config).compute(params, batch, None)[0]["mlm_loss"][0]

    return jax.jit(jax.grad(loss)).lower(params)


@pytest.mark.ci
def test_remat_policies_are_ordered_by_number_of_recomputed_matrix_products(params, batch):
    gradients = [lowered_gradient(remat, params, batch) for remat in REMAT_POLICIES]
    none, attention, elementwise, projections, full = (each.compile().as_text().count(" dot(") for each in gradients)
    # `attention` and `elementwise` recompute the attention scores, `projections` also queries, keys and values, and
    # `full` also the first feed-forward product.
    assert none < attention == elementwise < projections < full
    # All compute gelu equally often: in the layers and in the head, in the forward and the backward pass.
    assert len({each.as_text().count("stablehlo.tanh") for each in gradients}) == 1


def test_hidden_states_of_packed_sequences_equal_those_of_separate_rows(params):
    rng = np.random.default_rng(3)
    lengths = [9, 6, 5]
    ids, segments = ([rng.integers(0, high, n) for n in lengths] for high in (50, 2))
    sequence_ids = [np.full(n, i + 1) for i, n in enumerate(lengths)]
    position_ids = [np.arange(n) for n in lengths]
    apply = jax.jit(Encoder(CONFIG).apply)

    def encode(*parts: list[np.ndarray]) -> np.ndarray:
        joined = map(np.concatenate, parts)
        rows = [np.pad(row, (0, 24 - len(row)))[None].astype(np.int32) for row in joined]
        return np.asarray(apply({"params": params["encoder"]}, *rows)[0][0])

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
        ("tpu", "bfloat16", "auto_long_run", "false"),
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
        assert resolve_layout(config) == explicit
        programs = [
            str(jax.make_jaxpr(PretrainingModel(each).apply)({"params": params}, batch)) for each in (config, explicit)
        ]
    assert programs[0] == programs[1]
    assert ("bf16[" in programs[0]) == (dtype == "bfloat16")


@pytest.mark.parametrize(
    ("flags", "dtype"), [("avx2 amx_bf16", "bfloat16"), ("avx512_bf16", "bfloat16"), ("avx2", "float32")]
)
def test_auto_dtype_is_bfloat16_on_processors_with_units_for_it(tmp_path, monkeypatch, flags, dtype):
    (tmp_path / "cpuinfo").write_text(f"model name : X\nflags\t\t: fpu {flags}\n")
    has_units = has_bfloat16_units.__wrapped__(tmp_path / "cpuinfo")
    monkeypatch.setattr(model_config, "has_bfloat16_units", lambda: has_units)
    assert dataclasses.replace(CONFIG, dtype="auto").resolve("cpu").dtype == dtype
