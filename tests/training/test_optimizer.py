"""Optimizers against google-research/bert's update rule, written out in NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bertjax.errors import UsageError
from bertjax.training.optimizer import NAMES, LearningRate, OptimizerConfig, decay_mask, make_optimizer

PARAMS = {
    "layers": {
        "dense": {"kernel": np.linspace(-1, 1, 12).reshape(2, 3, 2), "bias": np.array([[0.5, -0.5], [1.0, 2.0]])},
        "norm": {"scale": np.ones((2, 3)), "bias": np.full((2, 3), 0.1)},
    },
    "token": np.array([[1.0, -2.0], [0.3, 0.7]]),
}


def gradients(step: int) -> dict:
    rng = np.random.default_rng(step)
    # The scale makes some steps clipped and others not.
    scale = 0.05 if step % 2 else 3.0
    return jax.tree.map(lambda x: scale * rng.standard_normal(x.shape), PARAMS)


def test_bert_adam_is_the_reference_update():
    steps = 8
    schedule = LearningRate(peak=0.1, warmup_steps=3, steps=steps)
    optimizer = make_optimizer(OptimizerConfig(weight_decay=0.01))
    params = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), PARAMS)
    state = optimizer.init(params)
    update = jax.jit(optimizer.update)

    exact = jax.tree.map(np.array, PARAMS)
    m, v = (jax.tree.map(np.zeros_like, PARAMS) for _ in range(2))
    for step in range(steps):
        grads = gradients(step)
        updates, state = update(jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), grads), state, params)
        params = jax.tree.map(lambda p, u, step=step: p + schedule.at(jnp.asarray(step)) * u, params, updates)

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
    schedule = LearningRate(peak=2.0, warmup_steps=4, steps=10)
    rates = [float(schedule.at(jnp.asarray(step))) for step in range(11)]
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
    updates, _ = jax.jit(optimizer.update)(zero, optimizer.init(params), params)
    assert float(jnp.abs(updates["token"]).min()) > 0
    assert float(jnp.abs(updates["layers"]["dense"]["bias"]).max()) == 0
    assert float(jnp.abs(updates["layers"]["norm"]["scale"]).max()) == 0
    updates, _ = jax.jit(optimizer.update)(params, optimizer.init(params), params)
    assert float((updates["token"] * params["token"]).max()) < 0


def test_unknown_optimizer_is_refused_by_name():
    with pytest.raises(UsageError, match="adagrad.*known: bert_adam"):
        OptimizerConfig(name="adagrad")
