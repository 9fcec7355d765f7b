"""Statistics of dropout masks: rate, and independence of neighbors, rows, heads and seeds."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bertjax.model.dropout import dropout


def dropped(shape: tuple[int, ...], seed: int, rate: float = 0.1) -> np.ndarray:
    """Returns 1 for dropped elements and 0 for others, minus the rate, so that the expected mean is 0."""
    output = jax.jit(lambda key: dropout(jnp.ones(shape), rate, key))(jax.random.key(seed))
    return (np.asarray(output) == 0) - round(rate * 2**16) / 2**16


def deviations(a: np.ndarray, b: np.ndarray) -> float:
    """Returns the correlation of two arrays, divided by its standard deviation for independent arrays."""
    return float((a * b).sum() / np.sqrt((a * a).sum() * (b * b).sum()) * np.sqrt(a.size))


@pytest.fixture(scope="module")
def draws() -> np.ndarray:
    """Returns a dropout mask [32 rows, 8 heads, 64 queries, 64 keys], see `dropped`."""
    return dropped((32, 8, 64, 64), 0)


def test_masks_of_neighboring_rows_and_heads_and_of_seeds_are_uncorrelated(draws):
    pairs = {
        "rows": (draws[1:], draws[:-1]),
        "heads": (draws[:, 1:], draws[:, :-1]),
        "seeds": (draws, dropped((32, 8, 64, 64), 1)),
    }
    for name, (a, b) in pairs.items():
        assert abs(deviations(a, b)) < 4, name


def test_mask_autocorrelation_has_no_peak_at_nonzero_lags(draws):
    # The lags of queries and keys include half a row, whose elements take their bits from the same 32-bit words.
    spectrum = np.fft.rfft2(draws.reshape(-1, 64, 64))
    correlation = np.fft.irfft2((np.abs(spectrum) ** 2).mean(0))
    largest = np.abs(correlation.ravel()[1:]).max() / correlation[0, 0] * np.sqrt(draws.size)
    # The expected largest absolute value of 2,000 independent standard normal values is about 3.6.
    assert largest < 5


@pytest.mark.parametrize("axes", [(2, 3), (3,), (2,), (0, 1)], ids=["row and head", "query", "key", "position"])
def test_counts_of_dropped_elements_are_binomial(draws, axes):
    counts = draws.sum(axes)
    trials = draws.size / counts.size
    variance = counts.var() / (trials * (draws**2).mean())
    assert variance == pytest.approx(1, abs=5 * np.sqrt(2 / counts.size))


@pytest.mark.parametrize("rate", [0.1, 0.25, 0.5])
def test_dropped_fraction_equals_the_rate(rate):
    mask = dropped((64, 64, 63), 3, rate)
    assert abs(mask.mean()) < 4 * np.sqrt(rate * (1 - rate) / mask.size)
    # The row length 63 is odd, so the last 32-bit word of a row provides the bits of one element instead of two.
    assert abs(deviations(mask[..., 1:], mask[..., :-1])) < 4


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_scale_of_kept_elements_is_unbiased(dtype):
    # Dropout multiplies by 1.11112. Rounded to bfloat16, this factor is 1.109, which would bias the mean.
    x = jax.random.uniform(jax.random.key(0), (64, 512), minval=1, maxval=2).astype(dtype)
    output = np.asarray(jax.jit(lambda x: dropout(x, 0.1, jax.random.key(1)))(x), np.float64)
    kept = output != 0
    ratio = output[kept].sum() / np.asarray(x, np.float64)[kept].sum()
    assert ratio == pytest.approx(2**16 / (2**16 - round(0.1 * 2**16)), rel=2e-4)


def test_mask_of_a_row_does_not_depend_on_the_number_of_rows():
    np.testing.assert_array_equal(dropped((4, 6, 8), 0), dropped((9, 6, 8), 0)[:4])


def test_backward_pass_drops_the_same_elements():
    x = jax.random.normal(jax.random.key(0), (4, 6, 10))
    out, back = jax.vjp(lambda x: dropout(x, 0.3, jax.random.key(1)), x)
    (gradient,) = back(jnp.ones_like(x))
    np.testing.assert_allclose(gradient, np.where(np.asarray(out) == 0, 0, out / x), rtol=1e-6)
