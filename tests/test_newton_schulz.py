"""The Newton–Schulz iteration against the singular value decomposition."""

import jax.numpy as jnp
import numpy as np
import pytest
from levanter.optim.util import NEWTON_SCHULZ_COEFFICIENTS, zeropower_via_newtonschulz5

from levanter_mars.newton_schulz import COEFFICIENTS, newton_schulz


def gaussian(*shape):
    return jnp.asarray(np.random.default_rng(0).standard_normal(shape), jnp.float32)


@pytest.mark.parametrize("shape", [(12, 30), (30, 12), (16, 16)])
def test_a_converging_set_finds_the_orthogonal_factor(shape):
    x = gaussian(*shape)
    u, _, vt = np.linalg.svd(x, full_matrices=False)
    found = newton_schulz(x, steps=8, coefficients="polar_express", dtype="float32")
    np.testing.assert_allclose(np.linalg.svd(found, compute_uv=False), 1, atol=2e-3)
    np.testing.assert_allclose(found, u @ vt, atol=2e-3)


def test_jordans_set_puts_singular_values_near_one():
    values = np.linalg.svd(newton_schulz(gaussian(24, 40), dtype="float32"), compute_uv=False)
    assert 0.6 < values.min() < 0.9 and 1.0 < values.max() < 1.3


@pytest.mark.parametrize("coefficients", NEWTON_SCHULZ_COEFFICIENTS)
@pytest.mark.parametrize("steps", [3, 5, 9])
def test_agrees_with_levanters_own(coefficients, steps):
    x = gaussian(10, 24)
    expected = zeropower_via_newtonschulz5(x, steps=steps, coefficient_type=coefficients)
    np.testing.assert_allclose(newton_schulz(x, steps=steps, coefficients=coefficients, dtype="float32"), expected, atol=2e-5)


def test_jordan_is_what_levanter_calls_simple():
    assert COEFFICIENTS["jordan"] == COEFFICIENTS["simple"]


def test_a_batch_is_its_matrices():
    x = gaussian(2, 3, 20, 8) * jnp.array([1e-4, 1.0, 1e4])[:, None, None]
    found = newton_schulz(x, dtype="float32")
    for i in range(2):
        for j in range(3):
            np.testing.assert_allclose(found[i, j], newton_schulz(x[i, j], dtype="float32"), atol=1e-5)


def test_zero_stays_zero_and_bfloat16_is_close():
    assert not np.any(newton_schulz(jnp.zeros((4, 6)), dtype="float32"))
    assert newton_schulz(jnp.zeros((0, 4, 6))).shape == (0, 4, 6)
    x = gaussian(16, 48)
    half = newton_schulz(x)
    assert half.dtype == jnp.bfloat16
    difference = np.linalg.norm(half.astype(jnp.float32) - newton_schulz(x, dtype="float32"))
    assert difference < 0.05 * np.sqrt(16)


def of_condition(number, size=64):
    """A matrix whose singular values go evenly, by their logarithms, from 1 down to 1/number."""
    left, _ = np.linalg.qr(gaussian(size, size))
    right, _ = np.linalg.qr(gaussian(2 * size, size))
    return jnp.asarray(left * np.geomspace(1, 1 / number, size) @ right.T, jnp.float32)


HARD = {
    "condition 1e6": of_condition(1e6),
    "rank one": jnp.outer(jnp.arange(1.0, 33.0), jnp.arange(-40.0, 40.0)),
    "one entry": jnp.zeros((32, 80)).at[3, 7].set(2.0),
    "small": 1e-15 * gaussian(32, 80),
    "large": 1e15 * gaussian(32, 80),
    "smallest numbers": jnp.full((32, 80), 1e-38),
    "zero": jnp.zeros((32, 80)),
}


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("case", HARD)
def test_hard_matrices_keep_their_singular_values_bounded(case, dtype):
    """And so finite, step after step, also where bfloat16 rounds small singular values to nothing."""
    for steps in (5, 20):
        values = np.linalg.svd(np.asarray(newton_schulz(HARD[case], steps=steps, dtype=dtype), np.float32), compute_uv=False)
        assert np.isfinite(values).all()
        assert values.max() < 1.3


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("case", ["rank one", "one entry"])
def test_a_single_direction_is_kept(case, dtype):
    u, _, vt = np.linalg.svd(HARD[case])
    found = np.asarray(newton_schulz(HARD[case], dtype=dtype), np.float32)
    along = u[:, 0] @ found @ vt[0]
    assert 0.6 < along < 1.3
    if dtype == "float32":  # what bfloat16 rounds off are directions of their own, which grow as small singular values do
        np.testing.assert_allclose(found, along * np.outer(u[:, 0], vt[0]), atol=1e-3)
