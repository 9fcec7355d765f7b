"""Optimizers, compared with a NumPy version of google-research/bert's update and with optax."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import NamedSharding, PartitionSpec

from bertjax.config.mesh import MeshConfig
from bertjax.config.optimizer import OptimizerConfig
from bertjax.errors import UsageError
from bertjax.model.config import ModelConfig, size_fields
from bertjax.model.layer_stack import is_stacked
from bertjax.model.models import PretrainingModel, ReplacedTokenModel, SequenceModel, TokenModel
from bertjax.training.optimizer import bert_schedule, decay_mask, make_optimizer, make_schedule
from bertjax.training.sharding import make_mesh

PARAMS = {
    "layers": {
        "dense": {"kernel": np.linspace(-1, 1, 12).reshape(2, 3, 2), "bias": np.array([[0.5, -0.5], [1.0, 2.0]])},
        "norm": {"scale": np.ones((2, 3)), "bias": np.full((2, 3), 0.1)},
    },
    "token": np.array([[1.0, -2.0], [0.3, 0.7]]),
}


def gradients(step: int) -> dict:
    rng = np.random.default_rng(step)
    # Gradients of even steps exceed the clipping norm, those of odd steps do not.
    scale = 0.05 if step % 2 else 3.0
    return jax.tree.map(lambda x: scale * rng.standard_normal(x.shape), PARAMS)


@pytest.mark.parametrize(
    "config", [OptimizerConfig(), OptimizerConfig(b1=0.8, b2=0.9, eps=1e-2, clip_norm=0.5, weight_decay=0.1)]
)
def test_bert_adam_equals_the_reference_update(config):
    steps = 8
    schedule = bert_schedule(0.1, 3, steps)
    optimizer = make_optimizer(config)
    params = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), PARAMS)
    state = optimizer.tx.init(params)
    update = jax.jit(optimizer.tx.update)

    expected = flatten_dict(jax.tree.map(np.array, PARAMS))
    m, v = ({path: np.zeros_like(values) for path, values in expected.items()} for _ in range(2))
    for step in range(steps):
        grads = gradients(step)
        float32_grads = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), grads)
        updates, state = update(float32_grads, state, params, learning_rate=schedule(jnp.asarray(step)))
        params = optax.apply_updates(params, updates)

        norm = np.sqrt(sum((g**2).sum() for g in jax.tree.leaves(grads)))
        grads = jax.tree.map(lambda g: g * min(1.0, config.clip_norm / norm), grads)  # noqa: B023
        rate = 0.1 * step / 3 if step < 3 else 0.1 * (1 - step / steps)
        for path, gradient in flatten_dict(grads).items():
            m[path] = config.b1 * m[path] + (1 - config.b1) * gradient
            v[path] = config.b2 * v[path] + (1 - config.b2) * gradient**2
            change = m[path] / (np.sqrt(v[path]) + config.eps)
            if path[-1] not in ("bias", "scale"):
                change = change + config.weight_decay * expected[path]
            expected[path] = expected[path] - rate * change
    for path, values in flatten_dict(params).items():
        np.testing.assert_allclose(values, expected[path], rtol=2e-5, atol=1e-6, err_msg=str(path))


def test_defaults_are_those_of_bert():
    config = OptimizerConfig()
    assert (config.b1, config.b2, config.eps, config.weight_decay, config.clip_norm) == (0.9, 0.999, 1e-6, 0.01, 1.0)


def test_adamw_equals_optax():
    moments = {"b1": 0.8, "b2": 0.9, "eps": 1e-3}
    optimizer = make_optimizer(OptimizerConfig(name="adamw", weight_decay=0.1, clip_norm=0.5, **moments))
    reference = optax.chain(
        optax.clip_by_global_norm(0.5), optax.adamw(0.1, weight_decay=0.1, mask=decay_mask, **moments)
    )
    params = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), PARAMS)
    state, reference_state = optimizer.tx.init(params), reference.init(params)
    for step in range(3):
        grads = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), gradients(step))
        updates, state = optimizer.tx.update(grads, state, params, learning_rate=0.1)
        expected, reference_state = reference.update(grads, reference_state, params)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7), updates, expected)
        params = optax.apply_updates(params, updates)


def test_stable_adamw_divides_the_update_of_each_array_of_each_layer_by_the_rms_of_its_gradients():
    b1, b2, eps, decay = 0.8, 0.9, 1e-3, 0.1
    config = OptimizerConfig(name="stable_adamw", b1=b1, b2=b2, eps=eps, weight_decay=decay, clip_norm=0.0)
    tx = make_optimizer(config).tx
    expected = {path: np.array(values) for path, values in flatten_dict(PARAMS).items()}
    m, v = ({path: np.zeros_like(values) for path, values in expected.items()} for _ in range(2))
    params = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), PARAMS)
    state, is_divided = tx.init(params), set()
    for step in range(1, 6):
        # Gradients grow, so that the second moment lags behind in some arrays.
        grads = {path: 3.0**step * value for path, value in flatten_dict(gradients(2 * step)).items()}
        float32_grads = unflatten_dict({path: jnp.asarray(value, jnp.float32) for path, value in grads.items()})
        updates, state = tx.update(float32_grads, state, params, learning_rate=0.1)
        params = optax.apply_updates(params, updates)
        for path, gradient in grads.items():
            m[path] = b1 * m[path] + (1 - b1) * gradient
            v[path] = b2 * v[path] + (1 - b2) * gradient**2
            mean, square = m[path] / (1 - b1**step), v[path] / (1 - b2**step)
            axes = tuple(range(int(path[0] == "layers"), gradient.ndim))
            rms = np.sqrt((gradient**2 / np.maximum(square, eps**2)).mean(axes, keepdims=True))
            is_divided |= set((rms > 1).ravel())
            rate = 0.1 / np.maximum(1, rms)
            weights = 0.0 if path[-1] in ("bias", "scale") else decay * expected[path]
            expected[path] = expected[path] - rate * (mean / (np.sqrt(square) + eps) + weights)
    assert is_divided == {True, False}
    for path, values in flatten_dict(params).items():
        np.testing.assert_allclose(values, expected[path], rtol=1e-5, err_msg=str(path))


def newton_schulz(matrix: np.ndarray) -> np.ndarray:
    x = matrix / (np.linalg.norm(matrix) + 1e-8)
    x = x.T if matrix.shape[0] > matrix.shape[1] else x
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x.T if matrix.shape[0] > matrix.shape[1] else x


def test_muon_makes_the_kernel_of_each_layer_orthogonal_and_leaves_the_rest_to_adamw():
    kernels = {
        ("layers", "attention", "query", "kernel"): (2, 4, 2, 3),
        ("layers", "attention", "output", "kernel"): (2, 2, 3, 4),
        ("layers", "mlp_in", "kernel"): (2, 4, 9),
    }
    shapes = {path: (np.prod(shape[1:3]) if "output" in path else shape[1], -1) for path, shape in kernels.items()}
    rng = np.random.default_rng(3)
    params = {path: rng.standard_normal(shape) for path, shape in kernels.items()}
    others = flatten_dict(PARAMS)
    params |= {("rest", *path[1:]): value for path, value in others.items()}
    params |= {("layers", "norm", "scale"): np.ones((2, 3))}
    decay, rate, beta = 0.1, 0.05, 0.95
    as_tree = lambda flat: unflatten_dict({path: jnp.asarray(x, jnp.float32) for path, x in flat.items()})  # noqa: E731
    settings = {"weight_decay": decay, "clip_norm": 0.0, "b2": 0.98}
    muon, adamw = (make_optimizer(OptimizerConfig(name=name, **settings)).tx for name in ("muon", "adamw"))
    tree = as_tree(params)
    states = [muon.init(tree), adamw.init(tree)]
    momentum = {path: np.zeros(shape) for path, shape in kernels.items()}
    for step in range(1, 4):
        grads = {path: rng.standard_normal(value.shape) for path, value in params.items()}
        (updates, states[0]), (adam_updates, states[1]) = (
            tx.update(as_tree(grads), state, tree, learning_rate=rate)
            for tx, state in zip((muon, adamw), states, strict=True)
        )
        for path, update in flatten_dict(updates).items():
            if path not in kernels:
                np.testing.assert_array_equal(update, flatten_dict(adam_updates)[path])
                continue
            momentum[path] = beta * momentum[path] + (1 - beta) * grads[path]
            nesterov = beta * momentum[path] / (1 - beta ** (step + 1)) + (1 - beta) * grads[path] / (1 - beta**step)
            for layer in range(2):
                orthogonal = newton_schulz(nesterov[layer].reshape(shapes[path]))
                scale = 0.2 * np.sqrt(max(orthogonal.shape))
                expected = -rate * (scale * orthogonal.reshape(kernels[path][1:]) + decay * params[path][layer])
                np.testing.assert_allclose(update[layer], expected, rtol=2e-3, atol=2e-5)


@pytest.mark.parametrize(
    ("schedule", "rates"),
    [
        ("cosine", [0, 1, 2, 1 + 0.5**0.5, 1, 1 - 0.5**0.5, 0]),
        ("warmup_stable_decay", [0, 1, 2, 2, 2, 2 - 2 * 0.5**0.5, 0]),
    ],
)
def test_cosine_and_stable_schedules_have_the_expected_rates(schedule, rates):
    decay_steps = 4 if schedule == "warmup_stable_decay" else -1
    config = OptimizerConfig(learning_rate=2.0, schedule=schedule, decay_steps=decay_steps)
    schedule = make_schedule(config, warmup_steps=4, total_steps=12)
    np.testing.assert_allclose([schedule(jnp.asarray(step)) for step in range(0, 13, 2)], rates, atol=1e-6)


@pytest.mark.parametrize("head_rates", [[], [0, 0.45, 0.4, 0.35, 0.3, 0.25, 0.2, 0.15, 0.1, 0.05]])
def test_schedule_starts_at_zero_drops_after_warm_up_and_begins_with_the_head_steps(head_rates):
    count = len(head_rates)
    config = OptimizerConfig(learning_rate=2.0, head_steps=count, head_learning_rate=0.5)
    schedule = make_schedule(config, warmup_steps=4, total_steps=count + 10)
    rates = [float(schedule(jnp.asarray(step))) for step in range(count + 11)]
    np.testing.assert_allclose(rates, [*head_rates, 0, 0.5, 1.0, 1.5, 1.2, 1.0, 0.8, 0.6, 0.4, 0.2, 0.0], atol=1e-6)
    if count:
        with pytest.raises(UsageError, match="head_steps=10 must be below the number of steps, 10"):
            make_schedule(config, warmup_steps=4, total_steps=10)


def test_peak_of_each_phase_scales_the_schedule():
    config = OptimizerConfig(learning_rate=2.0, schedule="warmup_stable_decay", decay_steps=4)
    schedule = make_schedule(config, 2, 12, [(6, 2.0), (9, 4.0), (12, 1.0)])
    rates = [float(schedule(jnp.asarray(step))) for step in range(13)]
    expected = [0, 1, 2, 2, 2, 2, 4, 4, 4, 0.5, 1 - 0.5**0.5, 1 - 0.75**0.5, 0]
    np.testing.assert_allclose(rates, expected, atol=1e-6)


def _stacked(values: list[dict]) -> dict:
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *values)


def _one_layer(seed: int, scale: float) -> dict:
    rng = np.random.default_rng(seed)

    def array(*shape: int) -> jax.Array:
        return jnp.asarray(scale * rng.standard_normal(shape), jnp.float32)

    # Attention kernels have shape [hidden size, heads, head size].
    return {"attention": {"query": {"kernel": array(16, 4, 4), "bias": array(4, 4)}}, "norm": {"scale": array(16)}}


@pytest.mark.devices
@pytest.mark.parametrize("mesh", [None, (2, 2, 2), (1, 8, 1)], ids=str)
def test_lamb_has_a_trust_ratio_per_layer_and_matrix(mesh):
    weights = [_one_layer(0, 1.0), _one_layer(1, 1.0), jax.tree.map(jnp.zeros_like, _one_layer(2, 1.0))]
    # The gradients of the layers differ so much that a common ratio for the stack would be wrong for all of them.
    scales = (1e-2, 1e-4, 0.0)
    token = jnp.asarray(np.random.default_rng(9).standard_normal((8, 16)), jnp.float32)
    optimizer = make_optimizer(OptimizerConfig(name="lamb", clip_norm=0.0))
    reference = optax.lamb(1.0, b1=0.9, b2=0.999, eps=1e-6, weight_decay=0.01, mask=decay_mask)
    params = {"encoder": {"layers": _stacked(weights)}, "token": token}
    unstacked = {**{str(index): layer for index, layer in enumerate(weights)}, "token": token}
    if mesh:
        devices = make_mesh(MeshConfig(*mesh))
        axes = {"kernel": (None, "fsdp", "tensor"), "bias": (None, "tensor"), "scale": (None, "fsdp")}
        params["encoder"] = jax.tree_util.tree_map_with_path(
            lambda path, leaf: jax.device_put(leaf, NamedSharding(devices, PartitionSpec(*axes[path[-1].key]))),
            params["encoder"],
        )
    state, reference_state = optimizer.tx.init(params), reference.init(unstacked)
    update = jax.jit(optimizer.tx.update)
    for step in range(3):
        grads = [_one_layer(10 + step, scale) for scale in scales]
        stacked_grads = {"encoder": {"layers": _stacked(grads)}, "token": token}
        updates, state = update(stacked_grads, state, params, learning_rate=1.0)
        unstacked_grads = {**{str(index): layer for index, layer in enumerate(grads)}, "token": token}
        expected, reference_state = reference.update(unstacked_grads, reference_state, unstacked)
        for index in range(len(scales)):
            jax.tree.map(
                lambda a, b, index=index: np.testing.assert_allclose(a[index], b, rtol=1e-5, atol=1e-7),
                updates["encoder"]["layers"],
                expected[str(index)],
            )
        np.testing.assert_allclose(updates["token"], expected["token"], rtol=1e-5)
        params, unstacked = optax.apply_updates(params, updates), optax.apply_updates(unstacked, expected)


@pytest.mark.devices
@pytest.mark.parametrize("mesh", [(2, 2, 2), (1, 8, 1)], ids=str)
def test_muon_of_a_sharded_stack_equals_muon_of_each_layer(mesh):
    weights, grads = ([_one_layer(first + layer, 1.0) for layer in range(2)] for first in (0, 5))
    tx = make_optimizer(OptimizerConfig(name="muon", clip_norm=0.0)).tx
    params, stacked_grads = ({"layers": _stacked(layers)} for layers in (weights, grads))
    expected = []
    for layer, layer_grads in zip(weights, grads, strict=True):
        single, single_grads = ({"layers": _stacked([tree])} for tree in (layer, layer_grads))
        expected.append(tx.update(single_grads, tx.init(single), single, learning_rate=0.1)[0])
    axes = {"kernel": (None, "fsdp"), "bias": (), "scale": (None, "fsdp")}
    devices = make_mesh(MeshConfig(*mesh))
    params = jax.tree_util.tree_map_with_path(
        lambda path, leaf: jax.device_put(leaf, NamedSharding(devices, PartitionSpec(*axes[path[-1].key]))), params
    )
    updates = jax.jit(tx.update)(stacked_grads, tx.init(params), params, learning_rate=0.1)[0]
    for layer, tree in enumerate(expected):
        jax.tree.map(
            lambda a, b, layer=layer: np.testing.assert_allclose(a[layer], b[0], rtol=1e-4, atol=1e-5), updates, tree
        )


@pytest.mark.parametrize(
    "make_model",
    [
        *(PretrainingModel, ReplacedTokenModel),
        *(lambda model: TokenModel(model, 2, head_dropout=False), lambda model: SequenceModel(model, 1)),
    ],
)
def test_path_shows_whether_a_parameter_is_stacked_over_layers(make_model):
    """The optimizer recognizes stacked parameters by their paths."""
    model = make_model(ModelConfig(**{**vars(ModelConfig()), **size_fields("L2_H16"), "vocab_size": 10}))
    batch = {name: jnp.zeros((1, 8), jnp.int32) for name in ("input_ids", "input_mask", "segment_ids")}
    batch |= {f"masked_lm_{name}": jnp.zeros((1, 1), jnp.int32) for name in ("positions", "ids", "weights")}
    boxed = jax.eval_shape(lambda key: model.init(key, batch)["params"], jax.random.key(0))
    for path, box in flatten_dict(boxed).items():
        assert is_stacked(path) == ("layers" in box.names), path
        assert not is_stacked(path) or box.unbox().shape[0] == 2


def rate_ratios(params: dict, freeze_layers: int = 0) -> dict:
    """Returns the updates with `layer_decay=0.5`, divided by the updates without layer decay."""
    decayed, plain = (make_optimizer(OptimizerConfig(layer_decay=x, freeze_layers=freeze_layers)) for x in (0.5, 1.0))
    params = plain.freezing.split(params)[0]
    updates = (tx.update(params, tx.init(params), params, learning_rate=1.0)[0] for tx in (decayed.tx, plain.tx))
    return jax.tree.map(lambda a, b: np.asarray(a / b), *updates)


def test_layer_decay_lowers_the_rate_of_lower_layers():
    stack = {"embeddings": {"token": jnp.ones((3, 2))}, "layers": {"kernel": jnp.ones((4, 2, 2))}}
    other = {"pooler": {"kernel": jnp.ones((2, 2))}, "classifier": {"bias": jnp.ones(2)}}
    # Freezing two layers does not change the learning rates of the other layers.
    for frozen in (0, 2):
        # An LSTM has a stack for each direction.
        ratios = rate_ratios({"encoder": {**stack, "left": stack, "right": stack}, **other}, freeze_layers=frozen)
        assert ratios["classifier"]["bias"].tolist() == [1, 1] and (ratios["pooler"]["kernel"] == 1).all()
        for tree in (ratios["encoder"], ratios["encoder"]["left"], ratios["encoder"]["right"]):
            assert (tree["embeddings"]["token"] == 0.5**5).all()
            assert tree["layers"]["kernel"][:, 0, 0].tolist() == [0.5**4, 0.5**3, 0.5**2, 0.5][frozen:]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"decay_steps": 5}, "decay_steps does not apply to schedule=bert"),
        ({"name": "adagrad"}, "adagrad.*use one of bert_adam"),
        ({"layer_decay": 1.5}, "layer_decay is 1.5"),
        ({"freeze": ("",)}, "use paths such as encoder"),
        ({"freeze": ("encoder/layers",)}, "encoder/layers.* and config.optimizer.freeze_layers for layers"),
        ({"freeze": ("encoder",), "freeze_layers": 1}, "freeze contains encoder; unset .* freeze_layers"),
    ],
)
def test_invalid_config_is_an_error(fields, message):
    with pytest.raises(UsageError, match=message):
        OptimizerConfig(**fields)
