"""Optimizers against google-research/bert's update rule, written out in NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.traverse_util import flatten_dict
from jax.sharding import NamedSharding, PartitionSpec

from bertjax.config.mesh import MeshConfig
from bertjax.config.optimizer import NAMES, OptimizerConfig
from bertjax.errors import UsageError
from bertjax.model.config import ModelConfig, size_fields
from bertjax.model.heads import PretrainingModel, SequenceModel, TokenModel
from bertjax.training.freezing import is_stacked, trainable
from bertjax.training.optimizer import bert_schedule, decay_mask, make_optimizer
from bertjax.training.sharding import make_mesh

PARAMS = {
    "layers": {
        "dense": {"kernel": np.linspace(-1, 1, 12).reshape(2, 3, 2), "bias": np.array([[0.5, -0.5], [1.0, 2.0]])},
        "norm": {"scale": np.ones((2, 3)), "bias": np.full((2, 3), 0.1)},
    },
    "token": np.array([[1.0, -2.0], [0.3, 0.7]]),
}


def initial_state(optimizer, params):
    """Returns the optimizer's first state, with a learning rate of 1."""
    return optax.tree.set(optimizer.tx.init(params), learning_rate=jnp.float32(1.0))


def gradients(step: int) -> dict:
    rng = np.random.default_rng(step)
    # The scale makes some steps clipped and others not.
    scale = 0.05 if step % 2 else 3.0
    return jax.tree.map(lambda x: scale * rng.standard_normal(x.shape), PARAMS)


def test_bert_adam_is_the_reference_update():
    steps = 8
    schedule = bert_schedule(0.1, 3, steps)
    optimizer = make_optimizer(OptimizerConfig(weight_decay=0.01))
    params = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), PARAMS)
    state = optimizer.tx.init(params)
    update = jax.jit(optimizer.tx.update)

    exact = jax.tree.map(np.array, PARAMS)
    m, v = (jax.tree.map(np.zeros_like, PARAMS) for _ in range(2))
    for step in range(steps):
        grads = gradients(step)
        state = optax.tree.set(state, learning_rate=schedule(jnp.asarray(step)))
        updates, state = update(jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), grads), state, params)
        params = optax.apply_updates(params, updates)

        norm = np.sqrt(sum((g**2).sum() for g in jax.tree.leaves(grads)))
        grads = jax.tree.map(lambda g: g * min(1.0, 1.0 / norm), grads)  # noqa: B023
        rate = 0.1 * step / 3 if step < 3 else 0.1 * (1 - step / steps)
        for path in (
            ("layers", "dense", "kernel"),
            ("layers", "dense", "bias"),
            ("layers", "norm", "scale"),
            ("layers", "norm", "bias"),
            ("token",),
        ):
            nodes = [exact, m, v, grads]
            for name in path[:-1]:
                nodes = [node[name] for node in nodes]
            p_, m_, v_, g_ = nodes
            last = path[-1]
            m_[last] = 0.9 * m_[last] + 0.1 * g_[last]
            v_[last] = 0.999 * v_[last] + 0.001 * g_[last] ** 2
            change = m_[last] / (np.sqrt(v_[last]) + 1e-6)
            if last not in ("bias", "scale"):
                change = change + 0.01 * p_[last]
            p_[last] = p_[last] - rate * change
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6), params, exact)


def test_the_first_update_has_rate_zero_and_the_rate_steps_down_after_warm_up():
    schedule = bert_schedule(2.0, 4, 10)
    rates = [float(schedule(jnp.asarray(step))) for step in range(11)]
    np.testing.assert_allclose(rates, [0, 0.5, 1.0, 1.5, 1.2, 1.0, 0.8, 0.6, 0.4, 0.2, 0.0], atol=1e-6)


def test_decay_goes_by_name_and_not_by_number_of_dimensions():
    assert decay_mask(PARAMS) == {
        "layers": {"dense": {"kernel": True, "bias": False}, "norm": {"scale": False, "bias": False}},
        "token": True,
    }


@pytest.mark.parametrize("name", NAMES)
def test_every_optimizer_descends_and_decays_only_what_it_should(name):
    optimizer = make_optimizer(OptimizerConfig(name=name, weight_decay=0.5))
    params = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), PARAMS)
    zero = jax.tree.map(jnp.zeros_like, params)
    updates, _ = jax.jit(optimizer.tx.update)(zero, initial_state(optimizer, params), params)
    assert float(jnp.abs(updates["token"]).min()) > 0
    assert float(jnp.abs(updates["layers"]["dense"]["bias"]).max()) == 0
    assert float(jnp.abs(updates["layers"]["norm"]["scale"]).max()) == 0
    updates, _ = jax.jit(optimizer.tx.update)(params, initial_state(optimizer, params), params)
    assert float((updates["token"] * params["token"]).max()) < 0


def test_unknown_optimizer_is_refused_by_name():
    with pytest.raises(UsageError, match="adagrad.*known: bert_adam"):
        OptimizerConfig(name="adagrad")


def _stacked(values: list[dict]) -> dict:
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *values)


def _one_layer(seed: int, scale: float) -> dict:
    rng = np.random.default_rng(seed)

    def array(*shape: int) -> jax.Array:
        return jnp.asarray(scale * rng.standard_normal(shape), jnp.float32)

    # The kernel as the encoder has it: [D, H, K].
    return {"attention": {"query": {"kernel": array(16, 4, 4), "bias": array(4, 4)}}, "norm": {"scale": array(16)}}


@pytest.mark.devices
@pytest.mark.parametrize("mesh", [None, (2, 2, 2), (1, 8, 1)], ids=str)
def test_lamb_has_one_ratio_a_layer_and_matrix_as_without_a_stack(mesh):
    weights = [_one_layer(0, 1.0), _one_layer(1, 1.0), jax.tree.map(jnp.zeros_like, _one_layer(2, 1.0))]
    # Far apart, and one without any gradient: a ratio over all of them is none of theirs.
    scales = (1e-2, 1e-4, 0.0)
    token = jnp.asarray(np.random.default_rng(9).standard_normal((8, 16)), jnp.float32)
    ours = make_optimizer(OptimizerConfig(name="lamb", clip_norm=0.0))
    theirs = optax.lamb(1.0, b1=0.9, b2=0.999, eps=1e-6, weight_decay=0.01, mask=decay_mask)
    params = {"encoder": {"layers": _stacked(weights)}, "token": token}
    apart = {**{str(index): layer for index, layer in enumerate(weights)}, "token": token}
    if mesh:
        devices = make_mesh(MeshConfig(*mesh))
        place = {"kernel": (None, "fsdp", "tensor"), "bias": (None, "tensor"), "scale": (None, "fsdp")}
        params["encoder"] = jax.tree_util.tree_map_with_path(
            lambda path, leaf: jax.device_put(leaf, NamedSharding(devices, PartitionSpec(*place[path[-1].key]))),
            params["encoder"],
        )
    state, reference = initial_state(ours, params), theirs.init(apart)
    update = jax.jit(ours.tx.update)
    for step in range(3):
        grads = [_one_layer(10 + step, scale) for scale in scales]
        got, state = update({"encoder": {"layers": _stacked(grads)}, "token": token}, state, params)
        given = {**{str(index): layer for index, layer in enumerate(grads)}, "token": token}
        wanted, reference = theirs.update(given, reference, apart)
        for index in range(len(scales)):
            jax.tree.map(
                lambda a, b, index=index: np.testing.assert_allclose(a[index], b, rtol=1e-5, atol=1e-7),
                got["encoder"]["layers"],
                wanted[str(index)],
            )
        np.testing.assert_allclose(got["token"], wanted["token"], rtol=1e-5)
        params, apart = optax.apply_updates(params, got), optax.apply_updates(apart, wanted)


@pytest.mark.parametrize(
    "make_model",
    [PretrainingModel, lambda model: TokenModel(model, 2, head_dropout=False), lambda model: SequenceModel(model, 1)],
)
def test_layers_in_a_path_is_the_stacked_axis_of_the_model(make_model):
    """The optimizer identifies stacks by their path, the model by the logical name of their axis."""
    model = make_model(ModelConfig(**{**vars(ModelConfig()), **size_fields("L2_H16"), "vocab_size": 10}))
    batch = {name: jnp.zeros((1, 8), jnp.int32) for name in ("input_ids", "input_mask", "segment_ids")}
    batch["masked_lm_positions"] = jnp.zeros((1, 1), jnp.int32)
    boxed = jax.eval_shape(lambda key: model.init(key, batch)["params"], jax.random.key(0))
    for path, box in flatten_dict(boxed).items():
        assert is_stacked(path) == ("layers" in box.names), path
        assert not is_stacked(path) or box.unbox().shape[0] == 2


def test_layers_learn_more_slowly_the_lower_they_are():
    params = {
        "encoder": {"embeddings": {"token": jnp.ones((3, 2))}, "layers": {"kernel": jnp.ones((4, 2, 2))}},
        "pooler": {"kernel": jnp.ones((2, 2))},
        "classifier": {"bias": jnp.ones(2)},
    }
    plain, decayed = (make_optimizer(OptimizerConfig(layer_decay=decay)) for decay in (1.0, 0.5))
    one, other = (
        optimizer.tx.update(params, initial_state(optimizer, params), params)[0] for optimizer in (plain, decayed)
    )
    ratios = jax.tree.map(lambda a, b: np.unique(np.asarray(b / a)), one, other)
    assert ratios["classifier"]["bias"] == ratios["pooler"]["kernel"] == 1
    assert ratios["encoder"]["embeddings"]["token"] == 0.5**5
    layers = other["encoder"]["layers"]["kernel"] / one["encoder"]["layers"]["kernel"]
    np.testing.assert_array_equal(layers[:, 0, 0], [0.5**4, 0.5**3, 0.5**2, 0.5])
    # The two lowest frozen: the others keep their rates.
    frozen = make_optimizer(OptimizerConfig(layer_decay=0.5, freeze_layers=2))
    trained = trainable(params, frozen.frozen)
    updates, _ = frozen.tx.update(trained, initial_state(frozen, trained), trained)
    plain_updates, _ = plain.tx.update(trained, initial_state(plain, trained), trained)
    layers = updates["encoder"]["layers"]["kernel"] / plain_updates["encoder"]["layers"]["kernel"]
    np.testing.assert_array_equal(layers[:, 0, 0], [0.5**2, 0.5])
    assert np.unique(updates["encoder"]["embeddings"]["token"] / plain_updates["encoder"]["embeddings"]["token"]) == (
        0.5**5
    )


def test_embeddings_of_each_direction_learn_most_slowly():
    stack = {"embeddings": {"token": jnp.ones((3, 2))}, "layers": {"kernel": jnp.ones((2, 2, 2))}}
    params = {"encoder": {"left": stack, "right": stack}}
    plain, decayed = (make_optimizer(OptimizerConfig(layer_decay=decay)) for decay in (1.0, 0.5))
    one, other = (
        optimizer.tx.update(params, initial_state(optimizer, params), params)[0] for optimizer in (plain, decayed)
    )
    for side in ("left", "right"):
        layers = other["encoder"][side]["layers"]["kernel"] / one["encoder"][side]["layers"]["kernel"]
        np.testing.assert_array_equal(layers[:, 0, 0], [0.5**2, 0.5])
        token = other["encoder"][side]["embeddings"]["token"] / one["encoder"][side]["embeddings"]["token"]
        assert np.unique(token) == 0.5**3


@pytest.mark.parametrize(
    ("field", "value", "named"),
    [
        ("layer_decay", 0.0, "layer_decay is 0.0"),
        ("layer_decay", 1.5, "layer_decay is 1.5"),
        ("freeze_layers", -1, "freeze_layers is -1"),
        ("freeze", ("",), "must be names"),
        ("freeze", ("encoder/layers",), "say how many: optimizer.freeze_layers"),
    ],
)
def test_what_cannot_be_frozen_or_decayed_is_refused(field, value, named):
    with pytest.raises(UsageError, match=named):
        OptimizerConfig(**{field: value})


def test_the_encoder_is_frozen_whole_or_in_part():
    with pytest.raises(UsageError, match="the whole encoder, and freeze_layers=1 some of its layers; leave one"):
        OptimizerConfig(freeze=("encoder",), freeze_layers=1)
