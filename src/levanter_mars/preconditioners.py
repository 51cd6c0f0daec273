"""From corrected gradients to update directions: Adam's preconditioner, momentum, and the orthogonalized momentum.

Each keeps its state through a bad step (`levanter_mars.steps`).
"""

import functools
from collections.abc import Callable
from typing import Literal, NamedTuple

import haliax as hax
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, DTypeLike, Int

from levanter_mars.layout import Work, map_matrices
from levanter_mars.newton_schulz import newton_schulz, newton_schulz_flops
from levanter_mars.parameters import Parameter, RolesOrFn, describe, map_parameters
from levanter_mars.steps import Step

Layout = Literal["auto", "replicated"]


class AmsgradMoments(NamedTuple):
    nu: optax.Updates
    """v"""
    nu_max: optax.Updates
    """The running maximum of v."""


class AdamState(NamedTuple):
    count: Int[Array, ""]
    """Good steps so far."""
    mu: optax.Updates
    """m"""
    nu: optax.Updates | AmsgradMoments
    """v, or v and its maximum: at other paths, so that neither is restored as the other."""


def scale_by_adam(
    beta1: float,
    beta2: float,
    epsilon: float,
    *,
    amsgrad: bool = False,
    epsilon_before_correction: bool = False,
    momentum_dtype: DTypeLike | None = None,
) -> optax.GradientTransformationExtraArgs:
    """m̂ / (√v̂ + ε), m̂ = m/(1 − β1^t), v̂ = v/(1 − β2^t) (MARS, arXiv 2411.10438, Algorithm 2).

    Args:
        beta1: decay rate of the momentum m.
        beta2: decay rate of the second moment v.
        epsilon: ε, added to √v̂.
        amsgrad: divide by the running maximum of v. As in PyTorch, and so in the release, it is over v; optax takes it over v̂.
        epsilon_before_correction: m̂ / ((√v + ε)/√(1 − β2^t)), as the release of MARS-M has it.
        momentum_dtype: of the stored m; None for the parameters'.
    """

    def init(params: optax.Params) -> AdamState:
        zeros = optax.tree.zeros_like
        mu = optax.tree.cast(zeros(params), momentum_dtype)
        nu = AmsgradMoments(zeros(params), zeros(params)) if amsgrad else zeros(params)
        return AdamState(jnp.zeros([], jnp.int32), mu, nu)

    def update(updates: optax.Updates, state: AdamState, params: optax.Params | None = None, *, step: Step, **extra_args):
        del params, extra_args
        count = step.keep(optax.safe_increment(state.count), state.count)
        new_mu = _moving_average(updates, state.mu, beta1)
        mu = step.keep(new_mu, state.mu)
        last_nu = state.nu.nu if isinstance(state.nu, AmsgradMoments) else state.nu
        nu = step.keep(_moving_average(jax.tree.map(jnp.square, updates), last_nu, beta2), last_nu)
        new_nu, divisor = nu, nu
        if isinstance(state.nu, AmsgradMoments):
            divisor = jax.tree.map(jnp.maximum, state.nu.nu_max, nu)
            new_nu = AmsgradMoments(nu, divisor)
        state = AdamState(count, mu, new_nu)
        # The direction is that of m before it is rounded for the state.
        mu_hat = optax.tree.bias_correction(mu if momentum_dtype is None else new_mu, beta1, count)
        if epsilon_before_correction:
            root = jnp.sqrt(1 - beta2**count)

            def direction(m: Array, v: Array) -> Array:
                return m / ((jnp.sqrt(v) + epsilon) / root.astype(v.dtype))

            return jax.tree.map(direction, mu_hat, divisor), state
        nu_hat = optax.tree.bias_correction(divisor, beta2, count)
        return jax.tree.map(lambda m, v: m / (jnp.sqrt(v) + epsilon), mu_hat, nu_hat), state

    return optax.GradientTransformationExtraArgs(init, update)


class MomentumState(NamedTuple):
    momentum: optax.Updates


def momentum(beta: float, *, momentum_dtype: DTypeLike | None = None) -> optax.GradientTransformationExtraArgs:
    """m_t = β·m_{t−1} + (1 − β)·c̃_t, m_0 = 0.

    Args:
        beta: decay rate.
        momentum_dtype: of the stored m; None for the parameters'.
    """

    def init(params: optax.Params) -> MomentumState:
        return MomentumState(optax.tree.cast(optax.tree.zeros_like(params), momentum_dtype))

    def update(updates: optax.Updates, state: MomentumState, params: optax.Params | None = None, *, step: Step, **extra_args):
        del params, extra_args
        new = _moving_average(updates, state.momentum, beta)
        kept = step.keep(new, state.momentum)
        return kept if momentum_dtype is None else new, MomentumState(kept)

    return optax.GradientTransformationExtraArgs(init, update)


def orthogonalize(
    scale: Callable[[Parameter], float],
    *,
    steps: int,
    coefficients: str,
    dtype: str,
    layout: Layout = "auto",
    axis_roles: RolesOrFn | None = None,
) -> optax.GradientTransformation:
    """Replaces every matrix, of each layer and each expert, by its orthogonal factor UVᵀ times `scale` of its shape.

    Args:
        scale: of the Parameter, whose `tensor_shape` is (out, in).
        steps, coefficients, dtype: see `levanter_mars.newton_schulz.newton_schulz`.
        layout: "auto" spreads whole matrices over the devices (`levanter_mars.layout`), "replicated" leaves it to the compiler, which has
            every device compute all that it holds a part of.
        axis_roles: see `levanter_mars.parameters.describe`.
    """
    factor = functools.partial(newton_schulz, steps=steps, coefficients=coefficients, dtype=dtype)

    def cost(m: int, n: int, split: int) -> Work:
        iterations = 5 if isinstance(steps, jax.Array) else steps
        return Work(newton_schulz_flops(m, -(-n // split), iterations), summed=iterations * m * m)

    def update(updates: optax.Updates, params: optax.Params | None = None) -> optax.Updates:
        del params
        arrays, structure = jax.tree.flatten(updates, is_leaf=lambda x: isinstance(x, hax.NamedArray))
        parameters = jax.tree.leaves(describe(updates, axis_roles))
        factors = None
        if layout == "auto":
            factors = map_matrices(lambda x, sum_of_parts: factor(x, sum_of_parts=sum_of_parts), cost, parameters, arrays, dtype)
        if factors is None:
            factors = [p.from_matrices(factor(p.to_matrices(x)), x) for p, x in zip(parameters, arrays, strict=True)]
        return structure.unflatten([scale(p) * y.astype(x.dtype) for p, x, y in zip(parameters, arrays, factors, strict=True)])

    return optax.stateless(update)


def cautious(axis_roles: RolesOrFn | None = None) -> optax.GradientTransformationExtraArgs:
    """Drops the entries of a direction that this step's gradient contradicts: u·φ/mean(φ), φ = [u·g > 0], tensor by tensor.

    (Liang et al., Cautious Optimizers, arXiv 2411.16085, Algorithm 1.) The mean is kept from falling under 10⁻³, as their code does.
    """

    def update(updates: optax.Updates, state: optax.EmptyState, params: optax.Params | None = None, *, step: Step, **extra_args):
        del params, extra_args

        def one(parameter: Parameter, u, g):
            agrees = jax.tree.map(lambda u, g: (u * g > 0).astype(u.dtype), u, g)
            share = jax.tree.map(lambda mean: jnp.maximum(mean, 1e-3), parameter.mean(agrees))
            return u * agrees * (1 / share).astype(u.dtype)

        gradient = step.gradient.masked_like(updates).unclipped
        return map_parameters(one, updates, gradient, axis_roles=axis_roles), state

    return optax.GradientTransformationExtraArgs(optax.init_empty_state, update)


def _moving_average(x: optax.Updates, average: optax.Updates, decay: float) -> optax.Updates:
    """In the wider of the two dtypes."""

    def combine(x: Array, average: Array) -> Array:
        wide = jnp.promote_types(x.dtype, average.dtype)
        return decay * average.astype(wide) + (1 - decay) * x.astype(wide)

    return jax.tree.map(combine, x, average)
