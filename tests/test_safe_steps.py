"""A gradient that is not finite changes nothing, for any type, tree and leaf; and what updates look like for any tree."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from levanter.optim.skipstep import SkipStepConfig, SkipStepState
from models import gaussian_like

from levanter_mars import MarsAdamWConfig, MarsMConfig, diagnostics, mars_adamw, mars_lion, mars_m, mars_shampoo
from levanter_mars.steps import StepState

PARAMS = {"tall": jnp.zeros((9, 5)), "wide": jnp.zeros((4, 12)), "vector": jnp.zeros(7), "filter": jnp.zeros((2, 3, 4, 4))}
FAMILY = {
    "mars-adamw": mars_adamw,
    "mars-adamw amsgrad": functools.partial(mars_adamw, amsgrad=True),
    "mars-adamw optimize_1d": functools.partial(mars_adamw, optimize_1d=True),
    "mars-adamw exact": functools.partial(mars_adamw, exact=True),
    "mars-adamw bfloat16 state": functools.partial(mars_adamw, momentum_dtype="bfloat16", last_gradient_dtype="bfloat16"),
    "mars-lion": mars_lion,
    "mars-lion lean": functools.partial(mars_lion, correction_clip=None),
    "mars-lion cautious": functools.partial(mars_lion, cautious=True),
    "mars-shampoo": mars_shampoo,
    "mars-shampoo optimize_1d": functools.partial(mars_shampoo, optimize_1d=True),
    "mars-m": mars_m,
    "mars-m lean": functools.partial(mars_m, correction_clip=None, gamma=optax.linear_schedule(0.1, 0.0, 5)),
}
every_type = pytest.mark.parametrize("function", FAMILY.values(), ids=FAMILY)


def quadratic(target):
    """A loss whose gradient is x − target."""

    def loss(params):
        return sum(jnp.sum(jnp.square(x - t)) / 2 for x, t in zip(jax.tree.leaves(params), jax.tree.leaves(target), strict=True))

    return loss


def stepper(optimizer):
    """A compiled step on a target's loss: parameters, state and updates after it."""

    @jax.jit
    def step(params, state, target):
        gradient = jax.grad(quadratic(target))(params)
        updates, state = optimizer.update(gradient, state, params, obj_fn=quadratic(target))
        return optax.apply_updates(params, updates), state, updates

    return step


def train(optimizer, params, targets):
    """Parameters, state and the last updates after a step on each target's loss."""
    step = stepper(optimizer)
    state, updates = optimizer.init(params), None
    for target in targets:
        params, state, updates = step(params, state, target)
    assert step._cache_size() == 1
    return params, state, updates


def targets(n):
    return [gaussian_like(PARAMS, seed=10 + t) for t in range(n)]


def poisoned(tree, name, value):
    return tree | {name: tree[name].at[(0,) * tree[name].ndim].set(value)}


@every_type
def test_a_bad_step_is_as_if_it_had_not_been(function):
    optimizer = function(0.01, learning_rate_1d=0.02, max_grad_norm=5.0)
    params, good = gaussian_like(PARAMS, seed=0), targets(5)
    nan, inf = (poisoned(targets(1)[0], "wide", value) for value in (np.nan, np.inf))

    expected, expected_state, _ = train(optimizer, params, good)
    found, state, _ = train(optimizer, params, [nan, *good[:2], inf, nan, *good[2:], inf])
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    assert diagnostics(state)["skipped_steps"] == 4 and diagnostics(expected_state)["skipped_steps"] == 0

    def moments(tree):
        return [np.asarray(x) for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.floating) and x.ndim > 0]

    for a, b in zip(moments(state), moments(expected_state), strict=True):
        np.testing.assert_array_equal(a, b)


def assert_unharmed(params, after, state, updates):
    """After a step with a bad number: no update, and nothing bad anywhere."""
    assert not any(np.any(u) for u in jax.tree.leaves(updates))
    jax.tree.map(np.testing.assert_array_equal, after, params)
    assert all(np.isfinite(np.asarray(x, np.float32)).all() for x in jax.tree.leaves(state) if x.ndim > 0)


@every_type
def test_a_bad_number_in_any_leaf_leaves_every_state_finite(function):
    optimizer = function(0.01, learning_rate_1d=0.02)
    step = stepper(optimizer)
    params, state, _ = step(gaussian_like(PARAMS, seed=0), optimizer.init(PARAMS), targets(1)[0])
    for name in PARAMS:
        for value in (np.nan, np.inf, -np.inf):
            after, next_state, updates = step(params, state, poisoned(targets(1)[0], name, value))
            assert_unharmed(params, after, next_state, updates)
    assert step._cache_size() == 1


@st.composite
def trees(draw):
    """A tree of arrays of up to four axes, empty ones and scalars among them, in float32 or bfloat16, and of things that are not there."""
    shapes = draw(st.lists(st.lists(st.integers(0, 4), max_size=4).map(tuple), min_size=1, max_size=4))
    dtype = draw(st.sampled_from([jnp.float32, jnp.bfloat16]))
    leaves = {f"x{i}": jnp.ones(shape, dtype) for i, shape in enumerate(shapes)}
    return {"nested": [leaves, None], "masked": optax.MaskedNode(), "tuple": (None,)}


@every_type
@settings(max_examples=20, deadline=None)
@given(params=trees())
def test_updates_have_the_form_of_their_parameters(function, params):
    optimizer = function(0.01, learning_rate_1d=0.02, diagnostics_every=1)

    def shapes(tree):
        return jax.tree.map(lambda x: (x.shape, x.dtype), tree)

    state = jax.eval_shape(optimizer.init, params)
    obj_fn = quadratic(jax.tree.map(jnp.zeros_like, params))
    updates, after = jax.eval_shape(functools.partial(optimizer.update, obj_fn=obj_fn), params, state, params)
    assert jax.tree.structure(updates) == jax.tree.structure(params)
    assert shapes(updates) == shapes(params)
    assert shapes(after) == shapes(state)


@pytest.mark.parametrize("name", ["mars-adamw", "mars-lion lean", "mars-shampoo optimize_1d", "mars-m"])
@settings(max_examples=4, deadline=None)
@given(params=trees(), data=st.data())
def test_any_tree_survives_a_bad_number_in_any_leaf(name, params, data):
    optimizer = FAMILY[name](0.01, learning_rate_1d=0.02)
    leaves, structure = jax.tree.flatten(params)
    step = stepper(optimizer)
    target = jax.tree.map(jnp.zeros_like, params)
    params, state, updates = step(params, optimizer.init(params), target)
    assert all(np.isfinite(np.asarray(u, np.float32)).all() for u in jax.tree.leaves(updates))
    sick = data.draw(st.sampled_from([i for i, x in enumerate(leaves) if x.size] or [None]))
    if sick is not None:
        bad = jax.tree.leaves(target)
        bad[sick] = jnp.full_like(bad[sick], data.draw(st.sampled_from([np.nan, np.inf, -np.inf])))
        after, state, updates = step(params, state, structure.unflatten(bad))
        assert_unharmed(params, after, state, updates)


def skip_state(state) -> SkipStepState:
    (found,) = [x for x in jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, SkipStepState)) if isinstance(x, SkipStepState)]
    return found


def uncounted(state):
    """What Levanter's `skip_bad_steps` keeps through a skipped step: all but their count."""

    def without_count(x):
        return x._replace(skipped_steps=None) if isinstance(x, StepState) else x

    return jax.tree.map(without_count, skip_state(state).inner_opt_state, is_leaf=lambda x: isinstance(x, StepState))


def test_skip_bad_steps_skips_outliers_as_levanters_adamw_does():
    config = MarsAdamWConfig(skip_bad_steps=SkipStepConfig(8, 3.0), lr_schedule="constant", warmup=0, max_grad_norm=None)
    optimizer = config.build(100)
    params = gaussian_like(PARAMS, seed=0)
    state, update = optimizer.init(params), jax.jit(optimizer.update)
    for t in range(10):
        _, state = update(gaussian_like(params, seed=t), state, params, loss=jnp.float32(3.0 + 0.01 * (t % 3)))
    for gradient, loss in [(gaussian_like(params, seed=50, scale=100.0), 3.0), (gaussian_like(params, seed=51), 30.0)]:
        updates, after = update(gradient, state, params, loss=jnp.float32(loss))
        assert not any(np.any(u) for u in jax.tree.leaves(updates))
        assert diagnostics(after)["skipped_steps"] == 1 and diagnostics(state)["skipped_steps"] == 0
        jax.tree.map(np.testing.assert_array_equal, uncounted(after), uncounted(state))
    updates, _ = update(gaussian_like(params, seed=52), state, params, loss=jnp.float32(3.0))
    assert all(np.any(u) for u in jax.tree.leaves(updates))


def test_what_is_not_finite_stays_out_of_the_history_of_skip_bad_steps():
    """It would make the thresholds NaN, and every step bad, until it had left the history."""
    config = MarsMConfig(skip_bad_steps=8, lr_schedule="constant", warmup=0)
    optimizer = config.build(100)
    params = gaussian_like(PARAMS, seed=0)
    state, update = optimizer.init(params), jax.jit(optimizer.update)
    for t in range(12):
        gradient = gaussian_like(params, seed=t)
        if t in (1, 9):
            gradient = poisoned(gradient, "tall", np.nan)
        updates, state = update(gradient, state, params, loss=jnp.float32(np.nan if t in (1, 9) else 3.0 + 0.1 * (t % 3)))
        assert np.any(updates["tall"]) == (t not in (1, 9))
    assert diagnostics(state)["skipped_steps"] == 2
    assert np.isfinite(skip_state(state).losses).all() and np.isfinite(skip_state(state).grad_norms).all()
