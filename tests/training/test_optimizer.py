"""Optimizers, compared with a NumPy version of google-research/bert's update and with optax."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.traverse_util import flatten_dict, unflatten_dict
from helpers.tiny_config import tiny_config
from jax.sharding import NamedSharding, PartitionSpec

from bertjax.config.mesh import MeshConfig
from bertjax.config.optimizer import OptimizerConfig
from bertjax.errors import UsageError
from bertjax.model.layers import is_stacked
from bertjax.model.models import ReplacedTokenModel
from bertjax.training.freezing import split_frozen
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


def as_float32(tree: dict) -> dict:
    return jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), tree)


BERT = {"b1": 0.9, "b2": 0.999, "eps": 1e-6, "clip_norm": 1.0, "weight_decay": 0.01}
OTHER = {"b1": 0.8, "b2": 0.9, "eps": 1e-2, "clip_norm": 0.5, "weight_decay": 0.1}


@pytest.mark.parametrize(
    ("config", "values"),
    [
        (OptimizerConfig(), BERT),
        *((OptimizerConfig(name=name, **OTHER), OTHER) for name in ("bert_adam", "adamw", "stable_adamw")),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_update_equals_the_reference(config, values):
    """Compares the defaults and the variants of Adam with NumPy. StableAdamW divides per array of each layer."""
    b1, b2, eps, steps, is_divided = values["b1"], values["b2"], values["eps"], 8, set()
    schedule, optimizer = bert_schedule(0.1, 3, steps), make_optimizer(config)
    params = as_float32(PARAMS)
    state, update = optimizer.tx.init(params), jax.jit(optimizer.tx.update)
    expected = flatten_dict(jax.tree.map(np.array, PARAMS))
    m, v = ({path: np.zeros_like(value) for path, value in expected.items()} for _ in range(2))
    for step in range(steps):
        grads = gradients(step)
        updates, state = update(as_float32(grads), state, params)
        params = optax.tree.add_scale(params, -schedule(jnp.asarray(step)), updates)
        norm = np.sqrt(sum((g**2).sum() for g in jax.tree.leaves(grads)))
        rate = 0.1 * step / 3 if step < 3 else 0.1 * (1 - step / steps)
        for path, gradient in flatten_dict(grads).items():
            gradient = gradient * min(1.0, values["clip_norm"] / norm)
            m[path] = b1 * m[path] + (1 - b1) * gradient
            v[path] = b2 * v[path] + (1 - b2) * gradient**2
            biases = (1, 1) if config.name == "bert_adam" else (1 - b1 ** (step + 1), 1 - b2 ** (step + 1))
            mean, square = m[path] / biases[0], v[path] / biases[1]
            change = mean / (np.sqrt(square) + eps)
            if path[-1] not in ("bias", "scale"):
                change = change + values["weight_decay"] * expected[path]
            if config.name == "stable_adamw":
                axes = tuple(range(int(path[0] == "layers"), gradient.ndim))
                rms = np.sqrt((gradient**2 / np.maximum(square, eps**2)).mean(axes, keepdims=True))
                is_divided |= set((rms > 1).ravel())
                change = change / np.maximum(1, rms)
            expected[path] = expected[path] - rate * change
    assert is_divided == ({True, False} if config.name == "stable_adamw" else set())
    for path, value in flatten_dict(params).items():
        np.testing.assert_allclose(value, expected[path], rtol=2e-5, atol=1e-6, err_msg=str(path))


@pytest.mark.ci
def test_muon_updates_the_kernel_of_each_layer_as_a_matrix_and_leaves_the_rest_to_adamw():
    """Compares kernels with optax's Muon of one matrix per layer, scaled to a root mean square of 0.2."""
    kernels = {
        ("layers", "attention", "query", "kernel"): (2, 4, 2, 3),
        ("layers", "attention", "output", "kernel"): (2, 2, 3, 4),
        ("layers", "mlp_in", "kernel"): (2, 4, 9),
    }
    num_inputs = {path: np.prod(shape[1:3]) if "output" in path else shape[1] for path, shape in kernels.items()}
    rng = np.random.default_rng(3)
    params = {path: rng.standard_normal(shape) for path, shape in kernels.items()}
    params |= {("rest", *(path[1:] or path)): value for path, value in flatten_dict(PARAMS).items()}
    params |= {("layers", "norm", "scale"): np.ones((2, 3))}

    def matrices(flat: dict) -> list:
        layers = [(flat[path][layer], size) for path, size in num_inputs.items() for layer in (0, 1)]
        return [as_float32(kernel.reshape(size, -1)) for kernel, size in layers]

    settings = {"weight_decay": 0.1, "clip_norm": 0.0, "b2": 0.98}
    muon, adamw = (make_optimizer(OptimizerConfig(name=name, **settings)).tx for name in ("muon", "adamw"))
    tree = as_float32(unflatten_dict(params))
    reference = optax.contrib.scale_by_muon(weight_dimension_numbers=[optax.contrib.MuonDimensionNumbers()] * 6)
    states = [muon.init(tree), adamw.init(tree), reference.init(matrices(params))]
    for _ in range(3):
        grads = {path: rng.standard_normal(value.shape) for path, value in params.items()}
        grad_tree = as_float32(unflatten_dict(grads))
        updates, states[0] = muon.update(grad_tree, states[0], tree)
        adam_updates, states[1] = adamw.update(grad_tree, states[1], tree)
        expected, states[2] = reference.update(matrices(grads), states[2], matrices(params))
        updates, adam_updates = flatten_dict(updates), flatten_dict(adam_updates)
        for actual, update, weights in zip(matrices(updates), expected, matrices(params), strict=True):
            change = 0.2 * np.sqrt(max(update.shape)) * update + 0.1 * weights
            np.testing.assert_allclose(actual, change, rtol=2e-3, atol=4e-4)
        for path in params.keys() - kernels.keys():
            np.testing.assert_array_equal(updates[path], adam_updates[path])


WSD = {"schedule": "warmup_stable_decay", "decay_steps": 4}


@pytest.mark.parametrize(
    ("fields", "peaks", "rates"),
    [
        ({"schedule": "cosine"}, ((12, 2.0),), [0, 1, 2, 1 + 0.5**0.5, 1, 1 - 0.5**0.5, 0]),
        (WSD, ((12, 2.0),), [0, 1, 2, 2, 2, 2 - 2 * 0.5**0.5, 0]),
        (WSD, ((6, 2.0), (9, 4.0), (12, 1.0)), [0, 1, 2, 4, 4, 1 - 0.5**0.5, 0]),
    ],
)
def test_cosine_and_stable_schedules_have_the_expected_rates(fields, peaks, rates):
    schedule = make_schedule(OptimizerConfig(**fields), 4, peaks)
    np.testing.assert_allclose([schedule(jnp.asarray(step)) for step in range(0, 13, 2)], rates, atol=1e-6)


def test_decay_takes_a_tenth_of_the_steps_by_default():
    schedule = make_schedule(OptimizerConfig(schedule="warmup_stable_decay"), 4, [(45, 1.0)])
    np.testing.assert_allclose([schedule(jnp.asarray(step)) for step in (41, 42, 45)], [1, 0.5, 0], atol=1e-6)


@pytest.mark.parametrize("head_rates", [[], [0, 0.45, 0.4, 0.35, 0.3, 0.25, 0.2, 0.15, 0.1, 0.05]])
def test_schedule_after_the_head_steps_starts_at_zero_and_drops_after_warm_up(head_rates):
    count = len(head_rates)
    config = OptimizerConfig(head_steps=count, head_learning_rate=0.5)
    schedule = make_schedule(config, 4, [(count + 10, 2.0)])
    rates = [float(schedule(jnp.asarray(step))) for step in range(count + 11)]
    np.testing.assert_allclose(rates, [*head_rates, 0, 0.5, 1.0, 1.5, 1.2, 1.0, 0.8, 0.6, 0.4, 0.2, 0.0], atol=1e-6)
    if count:
        with pytest.raises(UsageError, match="head_steps=10 must be below the number of steps, 10"):
            make_schedule(config, 4, [(10, 2.0)])


def _one_layer(seed: int, scale: float) -> dict:
    draw = np.random.default_rng(seed).standard_normal
    # Attention kernels have shape [hidden size, heads, head size].
    tree = {"attention": {"query": {"kernel": draw((16, 4, 4)), "bias": draw((4, 4))}}, "norm": {"scale": draw(16)}}
    return as_float32(jax.tree.map(lambda x: scale * x, tree))


def _stacked(layers: list[dict]) -> dict:
    token = jnp.asarray(np.random.default_rng(9).standard_normal((8, 16)), jnp.float32)
    return {"encoder": {"layers": jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers)}, "token": token}


@pytest.mark.devices
@pytest.mark.parametrize("mesh", [None, (2, 2, 2)], ids=str)
@pytest.mark.parametrize("name", ["lamb", "muon"])
def test_update_of_a_sharded_stack_equals_the_update_of_each_layer(name, mesh):
    """Compares LAMB with optax, which has one trust ratio per array, and Muon with itself on one device."""
    layers = [_one_layer(0, 1.0), _one_layer(1, 1.0), jax.tree.map(jnp.zeros_like, _one_layer(2, 1.0))]
    # The gradients of the layers differ so much that a common ratio for the stack would be wrong for all of them.
    scales = (1e-2, 1e-4, 0.0) if name == "lamb" else (1.0, 1.0, 1.0)
    tx = make_optimizer(OptimizerConfig(name=name, clip_norm=0.0)).tx
    lamb = optax.lamb(-1.0, b1=0.9, b2=0.999, eps=1e-6, weight_decay=0.01, mask=decay_mask)
    reference = lamb if name == "lamb" else tx
    params, singles = _stacked(layers), [_stacked([layer]) for layer in layers]
    if mesh:
        axes = {"kernel": (None, "fsdp", "tensor"), "bias": (None, "tensor"), "scale": (None, "fsdp")}
        devices = make_mesh(MeshConfig(*mesh))
        params["encoder"] = jax.tree_util.tree_map_with_path(
            lambda path, leaf: jax.device_put(leaf, NamedSharding(devices, PartitionSpec(*axes[path[-1].key]))),
            params["encoder"],
        )
    state, states, update = tx.init(params), [reference.init(single) for single in singles], jax.jit(tx.update)
    for step in range(3):
        grads = [_one_layer(10 + 3 * step + index, scale) for index, scale in enumerate(scales)]
        updates, state = update(_stacked(grads), state, params)
        params = optax.tree.sub(params, updates)
        for index, single in enumerate(singles):
            single_grads = _stacked([grads[index]])
            expected, states[index] = reference.update(single_grads, states[index], single)
            singles[index] = optax.tree.sub(single, expected)
            actual = {**updates, "encoder": jax.tree.map(lambda x: x[index : index + 1], updates["encoder"])}  # noqa: B023
            close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5)
            jax.tree.map(close, actual, expected)


def test_path_shows_whether_a_parameter_is_stacked_over_layers():
    """The optimizer recognizes stacked parameters by their paths."""
    model = ReplacedTokenModel(tiny_config())
    batch = {name: jnp.zeros((1, 8), jnp.int32) for name in ("input_ids", "input_mask", "segment_ids")}
    batch |= {f"masked_lm_{name}": jnp.zeros((1, 1), jnp.int32) for name in ("positions", "ids", "weights")}
    boxed = jax.eval_shape(lambda key: model.init(key, batch)["params"], jax.random.key(0))
    for path, box in flatten_dict(boxed).items():
        assert is_stacked(path) == ("layers" in box.names), path
        assert not is_stacked(path) or box.unbox().shape[0] == 2


def rate_ratios(params: dict, freeze_layers: int = 0) -> dict:
    """Returns the updates with `layer_decay=0.5`, divided by the updates without layer decay."""
    decayed, plain = (make_optimizer(OptimizerConfig(layer_decay=x, freeze_layers=freeze_layers)) for x in (0.5, 1.0))
    params = split_frozen(params, plain.config)[0]
    updates = (tx.update(params, tx.init(params), params)[0] for tx in (decayed.tx, plain.tx))
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
        ({"decay_steps": 5}, "decay_steps needs config.optimizer.schedule=warmup_stable_decay"),
        ({"freeze": ("",)}, "use a path such as encoder"),
        ({"freeze": ("encoder/layers",)}, "encoder/layers.*freeze_layers"),
        ({"freeze": ("encoder",), "freeze_layers": 1}, "freeze contains encoder; unset .* freeze_layers"),
    ],
)
def test_invalid_config_is_an_error(fields, message):
    with pytest.raises(UsageError, match=message):
        OptimizerConfig(**fields)
