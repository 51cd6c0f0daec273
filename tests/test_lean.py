"""Without the clip one buffer does what a momentum and a stored gradient do: the same updates, under a schedule of γ too."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from levanter.trainer_state import trainables_only
from models import GPT2, gaussian_like, shapes

from levanter_mars import MarsAdamWConfig, MarsLionConfig, MarsMConfig, MarsShampooConfig, mars_lion, mars_m, mars_shampoo
from levanter_mars.correction import CorrectionState, RecursiveMomentumState
from levanter_mars.explanation import explain
from levanter_mars.parameters import describe

STEPS = 50
PARAMS = {"tall": jnp.zeros((9, 5)), "wide": jnp.zeros((4, 12)), "stack": jnp.zeros(7)}
GAMMAS = {
    "constant": 0.025,
    "off": 0.0,
    "linear": optax.linear_schedule(0.1, 0.0, 40),
    "steps": optax.join_schedules([lambda _: 0.0, lambda _: 0.3, lambda _: 0.05], [10, 30]),
}
FUNCTIONS = {
    "mars-lion": mars_lion,
    "mars-shampoo": functools.partial(mars_shampoo, newton_schulz_dtype="float32"),
    "mars-m": functools.partial(mars_m, newton_schulz_dtype="float32"),
}
PARTS = {"mu", "nu", "momentum", "reduced_momentum", "last_gradient", "last_params"}
NEVER_BINDS = {"correction_clip": "tensor", "correction_clip_norm": 1e6}


def states(state, kind):
    return [x for x in jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, kind)) if isinstance(x, kind)]


def gradients():
    common = gaussian_like(PARAMS, seed=1)
    for t in range(STEPS):
        noise = gaussian_like(PARAMS, seed=100 + t)
        yield jax.tree.map(lambda c, n: 0.3 * c + n, common, noise)


def momenta_by_hand(gamma, max_grad_norm, beta=0.95):
    """m_t of every step in float64, from the formulas with a stored gradient."""
    m = last = {k: np.zeros(x.shape) for k, x in PARAMS.items()}
    for t, gradient in enumerate(gradients()):
        g = {k: np.asarray(x, np.float64) for k, x in gradient.items()}
        norm = np.sqrt(sum((x**2).sum() for x in g.values()))
        g = {k: x * min(1, max_grad_norm / norm) for k, x in g.items()}
        now = float(gamma(t)) if callable(gamma) else gamma
        c = {k: g[k] + now * beta / (1 - beta) * (g[k] - last[k]) for k in g}
        m = {k: beta * m[k] + (1 - beta) * c[k] for k in g}
        last = g
        yield m


@pytest.mark.parametrize("gamma", GAMMAS.values(), ids=GAMMAS)
@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)
def test_the_lean_form_gives_the_stored_forms_updates(function, gamma):
    optimizer = functools.partial(function, 0.01, gamma=gamma, max_grad_norm=2.0, weight_decay=0.1)
    lean, stored = optimizer(correction_clip=None), optimizer(**NEVER_BINDS)
    params = gaussian_like(PARAMS, seed=0)
    lean_state, stored_state = lean.init(params), stored.init(params)
    assert len(states(lean_state, RecursiveMomentumState)) == 1 and not states(lean_state, CorrectionState)
    assert len(states(stored_state, CorrectionState)) == 1

    lean_update, stored_update = jax.jit(lean.update), jax.jit(stored.update)
    flips = 0
    for gradient, momentum in zip(gradients(), momenta_by_hand(gamma, 2.0), strict=True):
        found, lean_state = lean_update(gradient, lean_state, params)
        expected, stored_state = stored_update(gradient, stored_state, params)
        for name in PARAMS:
            differs = ~np.isclose(found[name], expected[name], atol=1e-5, rtol=1e-5)
            if function is mars_lion and name != "stack":
                # The sign of a momentum that is zero to rounding may come out either way.
                assert np.all(np.abs(momentum[name][differs]) < 1e-7)
                flips += differs.sum()
            else:
                assert not differs.any()
        params = optax.apply_updates(params, expected)
    assert flips <= 2


def momentum_and_reduced(optimizer, gamma):
    """m_t, rebuilt from the lean state as p_t + γ_{t+1}·g_t."""
    state, update = optimizer.init(PARAMS), jax.jit(optimizer.update)
    for t, gradient in enumerate(gradients()):
        _, state = update(gradient, state, PARAMS)
        (lean,) = states(state, RecursiveMomentumState)
        following = gamma(t + 1) if callable(gamma) else gamma
        yield {k: np.asarray(lean.reduced_momentum[k]) + following * np.asarray(gradient[k]) for k in ("tall", "wide")}


@pytest.mark.parametrize("gamma", GAMMAS.values(), ids=GAMMAS)
def test_the_buffer_holds_the_momentum_less_the_next_steps_gamma_times_the_gradient(gamma):
    optimizer = mars_lion(0.01, gamma=gamma, correction_clip=None)
    for found, expected in zip(momentum_and_reduced(optimizer, gamma), momenta_by_hand(gamma, np.inf), strict=True):
        for name, m in found.items():
            np.testing.assert_allclose(m, expected[name], atol=1e-6)


def test_bytes_a_parameter():
    params = trainables_only(shapes(GPT2, vocab=1000), True)
    parameters = jax.tree.leaves(describe(params))
    size = {kind: sum(int(np.prod(p.shape)) for p in parameters if p.kind == kind) for kind in ("matrix", "vector")}
    embeddings = sum(int(np.prod(p.shape)) for p in parameters if p.embedding)

    def state_bytes(config):
        """Of all but norms, counts and rates."""
        parts = explain(params, config, 100).state_bytes
        assert sum(parts.values()) - sum(parts[part] for part in parts if part in PARTS) < 500
        return sum(parts[part] for part in parts if part in PARTS)

    adamw = 8 * size["vector"]
    assert state_bytes(MarsAdamWConfig()) == 12 * size["matrix"] + adamw
    assert state_bytes(MarsAdamWConfig(last_gradient_dtype="bfloat16")) == 10 * size["matrix"] + adamw
    assert state_bytes(MarsAdamWConfig(exact=True)) == 12 * size["matrix"] + adamw + 4 * size["vector"]
    for lean in (MarsLionConfig, MarsShampooConfig):
        assert state_bytes(lean()) == 8 * size["matrix"] + adamw
        assert state_bytes(lean(correction_clip=None)) == 4 * size["matrix"] + adamw
        assert state_bytes(lean(correction_clip=None, momentum_dtype="bfloat16")) == 2 * size["matrix"] + 6 * size["vector"]
    assert state_bytes(MarsMConfig(correction_clip=None)) == 4 * (size["matrix"] - embeddings) + 8 * embeddings + adamw


@pytest.mark.parametrize("config", [MarsAdamWConfig, MarsLionConfig, MarsShampooConfig, MarsMConfig])
def test_dtypes_of_what_is_stored(config):
    optimizer = config(momentum_dtype="bfloat16", last_gradient_dtype="bfloat16").build(10)
    state = optimizer.init(PARAMS)
    (correction,) = states(state, CorrectionState)
    assert {x.dtype for x in jax.tree.leaves(correction.last_gradient)} == {jnp.dtype("bfloat16")}
    momenta = [x for keys, x in jax.tree_util.tree_leaves_with_path(state) if {".mu", ".momentum"} & {str(key) for key in keys}]
    assert momenta and {x.dtype for x in momenta} == {jnp.dtype("bfloat16")}
    second = [x for keys, x in jax.tree_util.tree_leaves_with_path(state) if ".nu" in map(str, keys)]
    assert {x.dtype for x in second} == {jnp.dtype("float32")}
    _, after = optimizer.update(PARAMS, state, PARAMS)
    assert jax.tree.map(lambda x: x.dtype, after) == jax.tree.map(lambda x: x.dtype, state)


@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)
def test_rounded_state_trains_nearly_the_same(function):
    """bfloat16 keeps 8 bits: directions move by about that much, and lion's sign where the momentum is small."""
    params = gaussian_like(PARAMS, seed=0)
    totals = []
    for dtypes in ({}, {"momentum_dtype": "bfloat16", "last_gradient_dtype": "bfloat16"}):
        optimizer = function(0.01, max_grad_norm=2.0, **dtypes)
        state, update = optimizer.init(params), jax.jit(optimizer.update)
        total = jax.tree.map(jnp.zeros_like, params)
        for gradient in gradients():
            updates, state = update(gradient, state, params)
            total = jax.tree.map(jnp.add, total, updates)
        totals.append(total)
    for name in PARAMS:
        assert np.linalg.norm(totals[0][name] - totals[1][name]) <= 0.05 * np.linalg.norm(totals[0][name])
