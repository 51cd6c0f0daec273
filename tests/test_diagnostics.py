"""What an optimizer reports of itself, against the formulas; and Cautious Optimizers' mask."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from models import gaussian_like

from levanter_mars import (
    MarsAdamWConfig,
    MarsLionConfig,
    MarsMConfig,
    MarsShampooConfig,
    diagnostics,
    mars_adamw,
    mars_lion,
    mars_m,
    matrix,
)

PARAMS = {"small": jnp.zeros((4, 6)), "large": jnp.zeros((5, 8)), "stack": jnp.zeros((3, 4, 4)), "vector": jnp.zeros(7)}
ROLES = {"small": None, "large": None, "stack": matrix(inputs=1, outputs=2), "vector": None}
BETA, GAMMA = 0.9, 0.2
KAPPA = GAMMA * BETA / (1 - BETA)
SCALES = {"small": 0.02, "large": 1.0, "stack": np.array([0.01, 1.0, 0.01], np.float32)[:, None, None], "vector": 1.0}


def gradient(t):
    return {k: SCALES[k] * g for k, g in gaussian_like(PARAMS, seed=t).items()}


def reports(optimizer, steps):
    params, update = gaussian_like(PARAMS, seed=9), jax.jit(optimizer.update)
    state = optimizer.init(params)
    for t in range(steps):
        updates, state = update(gradient(t), state, params)
        yield diagnostics(state), updates
    assert update._cache_size() == 1


def test_ratio_clip_fraction_and_norms_by_hand():
    optimizer = mars_adamw(0.1, beta1=BETA, gamma=GAMMA, diagnostics_every=1, axis_roles=ROLES)
    last = {k: np.zeros(x.shape) for k, x in PARAMS.items()}
    for t, (found, updates) in enumerate(reports(optimizer, 3)):
        g = {k: np.asarray(x, np.float64) for k, x in gradient(t).items()}
        matrices = [k for k in g if k != "vector"]
        correction = {k: KAPPA * (g[k] - last[k]) for k in matrices}

        def norm(tree, names=matrices):
            return np.sqrt(sum((np.asarray(tree[k], np.float64) ** 2).sum() for k in names))

        assert found["correction_ratio"] == pytest.approx(norm(correction) / norm(g), rel=1e-5)
        # Of the five tensors, "large" and one of the stack are longer than 1.
        assert found["clip_fraction"] == pytest.approx(2 / 5)
        assert found["update_norm/matrix"] == pytest.approx(norm(updates), rel=1e-5)
        assert found["update_norm/vector"] == pytest.approx(norm(updates, ["vector"]), rel=1e-5)
        assert found["update_norm/other"] == 0
        assert found["gamma"] == pytest.approx(GAMMA) and found["skipped_steps"] == 0
        last = g


def test_measured_at_every_so_many_steps_and_held_in_between():
    optimizer = mars_adamw(0.1, diagnostics_every=3, axis_roles=ROLES)
    norms = [
        (float(np.sqrt(sum((u[k] ** 2).sum() for k in u if k != "vector"))), d["update_norm/matrix"]) for d, u in reports(optimizer, 7)
    ]
    for t, (_, reported) in enumerate(norms):
        assert reported == pytest.approx(norms[t - t % 3][0], rel=1e-5)


def test_off_by_default_and_then_nothing_is_computed_for_it():
    for found, _ in reports(mars_adamw(0.1, axis_roles=ROLES), 2):
        assert set(found) == {"gamma", "skipped_steps"}

    def operations(every):
        optimizer = mars_adamw(0.1, diagnostics_every=every, axis_roles=ROLES)
        state = optimizer.init(PARAMS)
        return str(jax.make_jaxpr(optimizer.update)(PARAMS, state, PARAMS)).count("\n")

    assert operations(0) < operations(10)
    assert "cond" not in str(
        jax.make_jaxpr(lambda p: mars_m(0.1, correction_clip=None).update(p, mars_m(0.1, correction_clip=None).init(p), p))(PARAMS)
    )


def test_without_a_stored_gradient_there_is_no_ratio():
    for found, _ in reports(mars_lion(0.1, correction_clip=None, diagnostics_every=1, axis_roles=ROLES), 2):
        assert set(found) == {"gamma", "skipped_steps", "update_norm/matrix", "update_norm/vector", "update_norm/other"}


def test_gamma_in_use_is_the_schedules():
    schedule = optax.linear_schedule(0.1, 0.0, 4)
    for function in (mars_adamw, mars_lion, functools.partial(mars_lion, correction_clip=None)):
        found = [d["gamma"] for d, _ in reports(function(0.1, gamma=schedule, axis_roles=ROLES), 4)]
        np.testing.assert_allclose(found, [0.1, 0.075, 0.05, 0.025], rtol=1e-6)


@pytest.mark.parametrize("config", [MarsAdamWConfig, MarsLionConfig, MarsShampooConfig, MarsMConfig])
def test_levanters_trackers_see_it(config):
    """Levanter logs an optimizer state's `hyperparams` under optim/."""
    optimizer = config(diagnostics_every=1, warmup=0, lr_schedule="constant").build(10)
    state = optimizer.init(PARAMS)
    _, state = optimizer.update(gradient(0), state, PARAMS)
    logged = state.hyperparams
    assert float(logged["learning_rate"]) == pytest.approx(config().learning_rate)
    assert ("learning_rate_1d" in logged) == (config().learning_rate_1d is not None)
    names = {"gamma", "skipped_steps", "correction_ratio", "clip_fraction", *(f"update_norm/{k}" for k in ("matrix", "vector", "other"))}
    assert {name for name in logged if name.startswith("mars/")} == {f"mars/{name}" for name in names}


@pytest.mark.parametrize("function", [mars_adamw, mars_lion, functools.partial(mars_m, newton_schulz_dtype="float32")])
def test_cautious_by_hand(function):
    optimizer = functools.partial(function, 0.1, learning_rate_1d=0.1, weight_decay=0.0, weight_decay_1d=0.0, axis_roles=ROLES)
    dropped = 0
    plain, cautious = reports(optimizer(), 3), reports(optimizer(cautious=True), 3)
    for t, ((_, u), (_, found)) in enumerate(zip(plain, cautious, strict=True)):
        for name in PARAMS:
            # Updates go against the gradient where they agree with it.
            agrees = np.asarray(u[name]) * np.asarray(gradient(t)[name]) < 0
            axes = (1, 2) if name == "stack" else tuple(range(agrees.ndim))
            expected = u[name] * agrees / np.maximum(agrees.mean(axes, keepdims=True), 1e-3)
            np.testing.assert_allclose(found[name], expected, rtol=1e-5, atol=1e-7)
            dropped += (~agrees).sum()
    assert dropped > 10
