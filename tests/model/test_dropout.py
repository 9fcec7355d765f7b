"""Dropout's draws: their share, and that no two of them have to do with each other."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bertjax.model.dropout import dropout


def dropped(shape: tuple[int, ...], seed: int, rate: float = 0.1) -> np.ndarray:
    """Where zeroes are, less their share: mean 0."""
    found = jax.jit(lambda key: dropout(jnp.ones(shape), rate, key))(jax.random.key(seed))
    return (np.asarray(found) == 0) - round(rate * 2**16) / 2**16


def deviations(a: np.ndarray, b: np.ndarray) -> float:
    """How many standard deviations the correlation of independent arrays is off."""
    return float((a * b).sum() / np.sqrt((a * a).sum() * (b * b).sum()) * np.sqrt(a.size))


@pytest.fixture(scope="module")
def draws() -> np.ndarray:
    """Of 32 rows, 8 heads, 64 queries and 64 keys."""
    return dropped((32, 8, 64, 64), 0)


def test_neighbours_of_every_kind_are_unrelated(draws):
    pairs = {
        "rows": (draws[1:], draws[:-1]),
        "heads": (draws[:, 1:], draws[:, :-1]),
        "queries": (draws[:, :, 1:], draws[:, :, :-1]),
        "keys": (draws[..., 1:], draws[..., :-1]),
        # The halves of one word.
        "halves": (draws[..., 32:], draws[..., :32]),
        "seeds": (draws, dropped((32, 8, 64, 64), 1)),
    }
    for name, (a, b) in pairs.items():
        assert abs(deviations(a, b)) < 4, name


def test_no_distance_of_queries_and_keys_is_special(draws):
    spectrum = np.fft.rfft2(draws.reshape(-1, 64, 64))
    related = np.fft.irfft2((np.abs(spectrum) ** 2).mean(0))
    largest = np.abs(related.ravel()[1:]).max() / related[0, 0] * np.sqrt(draws.size)
    # The largest of some 2,000 independent normal numbers is about 3.9.
    assert largest < 5


@pytest.mark.parametrize("axes", [(2, 3), (3,), (2,), (0, 1)], ids=["row and head", "query", "key", "place"])
def test_as_many_are_dropped_as_by_chance_wherever_one_counts(draws, axes):
    counts = draws.sum(axes)
    trials = draws.size / counts.size
    variance = counts.var() / (trials * (draws**2).mean())
    assert variance == pytest.approx(1, abs=5 * np.sqrt(2 / counts.size))


@pytest.mark.parametrize("rate", [0.1, 0.25, 0.5])
def test_the_share_is_the_rate(rate):
    found = dropped((64, 64, 63), 3, rate)
    assert abs(found.mean()) < 4 * np.sqrt(rate * (1 - rate) / found.size)


def test_what_is_kept_of_bfloat16_is_scaled_without_a_bias():
    # The factor itself is 1.11112, in bfloat16 1.109: to single numbers no matter, in the mean one.
    x = jax.random.uniform(jax.random.key(0), (64, 512), minval=1, maxval=2).astype(jnp.bfloat16)
    found = np.asarray(jax.jit(lambda x: dropout(x, 0.1, jax.random.key(1)))(x), np.float64)
    kept = found != 0
    ratio = found[kept].sum() / np.asarray(x, np.float64)[kept].sum()
    assert ratio == pytest.approx(2**16 / (2**16 - round(0.1 * 2**16)), rel=2e-4)


def test_more_rows_leave_the_first_what_they_were():
    np.testing.assert_array_equal(dropped((4, 6, 8), 0), dropped((9, 6, 8), 0)[:4])


def test_the_backward_pass_drops_what_the_forward_pass_dropped():
    x = jax.random.normal(jax.random.key(0), (4, 6, 10))
    out, back = jax.vjp(lambda x: dropout(x, 0.3, jax.random.key(1)), x)
    (gradient,) = back(jnp.ones_like(x))
    np.testing.assert_allclose(gradient, np.where(np.asarray(out) == 0, 0, out / x), rtol=1e-6)
