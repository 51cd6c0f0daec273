"""The corrected gradient c_t of MARS and its clip, and the momentum that needs no corrected gradient.

    c_t = g_t + κ_t · (g_t − lg_t),   κ_t = γ_t · β1/(1 − β1),        c̃_t = c_t / max(1, ‖c_t‖)

(Yuan et al., MARS, arXiv 2411.10438, Algorithm 1: scaled gradient correction and clipping.) g_t is the gradient of this step and lg_t the
gradient it is corrected by, each after the clip of its global norm:

    approximate   lg_t = g_{t−1}, stored
    exact         lg_t = the gradient of this step's batch at x_{t−1}; `Step.previous` holds it
    recursive     as approximate without the clip of c, and nothing is stored beside the momentum

As in the authors' release lg_1 = 0, so that c_1 = (1 + κ)·g_1. (The paper's x_0 = x_1 would make the first correction zero.)
"""

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, DTypeLike, Float, Int, PyTree

from levanter_mars.parameters import Parameter, RolesOrFn, map_parameters
from levanter_mars.steps import Gradient, Step, scaled, sum_of_squares

Clip = Literal["tensor", "global"]
"""What the clip's norm is taken over: each tensor alone, or all corrected tensors together."""


class Measured(NamedTuple):
    """What a correction measured when it was last asked to; NaN before. Sums, so that those of several corrections add up."""

    correction: Float[Array, ""]
    """Σ‖κ·(g − lg)‖² over tensors."""
    gradient: Float[Array, ""]
    """Σ‖g‖² over tensors."""
    clipped_tensors: Float[Array, ""]
    tensors: Float[Array, ""]


class CorrectionState(NamedTuple):
    count: Int[Array, ""]
    """Good steps so far: γ_t is the schedule's value here."""
    gamma: Float[Array, ""]
    """γ of the last good step."""
    measured: Measured
    last_clip_factor: Float[Array, ""]
    """Of g_{t−1}; 1 in the exact form."""
    last_gradient: optax.Updates | tuple[()] = ()
    """g_{t−1} before its clip, zero before the first step; empty in the exact form."""
    last_norms: PyTree = ()
    """‖g_{t−1}‖ after its clip, one number for every tensor; empty where they are not needed."""


def approximate_correction(
    beta1: float,
    gamma: optax.ScalarOrSchedule,
    clip: Clip | None,
    clip_norm: float,
    *,
    last_gradient_dtype: DTypeLike | None = None,
    axis_roles: RolesOrFn | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Corrects the gradient by the stored gradient of the step before and clips the result: one gradient a step.

    Args:
        beta1: decay rate of the momentum that follows.
        gamma: the scale γ of the correction, or its schedule; 0 passes the gradient on to the clip.
        clip: "tensor" for each layer's and each expert's tensor by its own norm, "global" for all together, None for no clip.
        clip_norm: the largest norm that the clip lets through (1 in the paper).
        last_gradient_dtype: of the stored gradient; None for the parameters'.
        axis_roles: see `levanter_mars.parameters.describe`.
    """

    def init(params: optax.Params) -> CorrectionState:
        last = optax.tree.cast(optax.tree.zeros_like(params), last_gradient_dtype)
        norms = optax.tree.zeros_like(_tensor_norms(params, axis_roles)) if clip == "tensor" else ()
        return _initial_state(gamma)._replace(last_gradient=last, last_norms=norms)

    def update(gradient: optax.Updates, state: CorrectionState, params: optax.Params | None = None, *, step: Step, **extra_args):
        del params, extra_args
        last = Gradient(optax.tree.cast_like(state.last_gradient, gradient), state.last_clip_factor)
        unclipped, stored = _good_gradient(step, gradient, last.unclipped)
        this = Gradient(unclipped, step.gradient.clip_factor)
        kappa = _kappa(beta1, _value(gamma, state.count))
        norms, bounds = (), None
        if clip == "tensor":
            # Of the gradient as it came, whose norms the clip of the global norm has taken already.
            norms = step.keep(scaled(step.gradient.clip_factor, _tensor_norms(gradient, axis_roles)), state.last_norms)
            bounds = jax.tree.map(lambda g, lg: (1 + kappa) * g + kappa * lg, norms, state.last_norms)
        corrected, divisors = _correct_and_clip(this, last, kappa, clip, clip_norm, axis_roles, bounds)
        new = _advanced(state, step, gamma, _measure(step, state, this, last, kappa, divisors, axis_roles))
        factor = step.keep(this.clip_factor, state.last_clip_factor)
        stored = optax.tree.cast_like(stored, state.last_gradient)
        return corrected, new._replace(last_gradient=stored, last_clip_factor=factor, last_norms=norms)

    return optax.GradientTransformationExtraArgs(init, update)


def exact_correction(
    beta1: float,
    gamma: optax.ScalarOrSchedule,
    clip: Clip | None,
    clip_norm: float,
    *,
    axis_roles: RolesOrFn | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Corrects the gradient by that of the same batch at the previous parameters, `Step.previous`, and clips the result.

    The arguments are those of `approximate_correction`.
    """

    def init(params: optax.Params) -> CorrectionState:
        del params
        return _initial_state(gamma)

    def update(gradient: optax.Updates, state: CorrectionState, params: optax.Params | None = None, *, step: Step, **extra_args):
        del params, extra_args
        assert step.previous is not None
        previous = step.previous.masked_like(gradient)
        previous = previous._replace(clip_factor=jnp.where(state.count == 0, 0, previous.clip_factor))
        this = step.gradient.masked_like(gradient)
        kappa = _kappa(beta1, _value(gamma, state.count))
        corrected, divisors = _correct_and_clip(this, previous, kappa, clip, clip_norm, axis_roles)
        return corrected, _advanced(state, step, gamma, _measure(step, state, this, previous, kappa, divisors, axis_roles))

    return optax.GradientTransformationExtraArgs(init, update)


class RecursiveMomentumState(NamedTuple):
    count: Int[Array, ""]
    """Good steps so far: γ_t is the schedule's value here."""
    gamma: Float[Array, ""]
    """γ of the last good step."""
    reduced_momentum: optax.Updates
    """p_t = m_t − γ_{t+1}·g_t."""


def recursive_momentum(
    beta1: float, gamma: optax.ScalarOrSchedule, *, momentum_dtype: DTypeLike | None = None
) -> optax.GradientTransformationExtraArgs:
    """The momentum of the approximate correction without a clip, from one buffer: no gradient is stored.

    Put c_t = g_t + γ_t·β/(1 − β)·(g_t − g_{t−1}) into m_t = β·m_{t−1} + (1 − β)·c_t and write m_{t−1} = p_{t−1} + γ_t·g_{t−1}. Then
    g_{t−1} cancels:

        m_t = β·p_{t−1} + (1 − β + β·γ_t)·g_t
        p_t = m_t − γ_{t+1}·g_t = β·p_{t−1} + (1 − β + β·γ_t − γ_{t+1})·g_t,   p_0 = 0

    For a constant γ the last factor is (1 − β)·(1 − γ), the recursion of the authors' efficient MARS-M up to scale
    (arXiv 2510.21800).

    Args:
        beta1: decay rate β of the momentum.
        gamma: the scale γ of the correction, or its schedule.
        momentum_dtype: of the buffer; None for the parameters'.
    """

    def init(params: optax.Params) -> RecursiveMomentumState:
        buffer = optax.tree.cast(optax.tree.zeros_like(params), momentum_dtype)
        return RecursiveMomentumState(jnp.zeros([], jnp.int32), jnp.asarray(_value(gamma, 0), jnp.float32), buffer)

    def update(gradient: optax.Updates, state: RecursiveMomentumState, params: optax.Params | None = None, *, step: Step, **extra_args):
        del params, extra_args
        now, following = _value(gamma, state.count), _value(gamma, state.count + 1)
        clipped = step.gradient.masked_like(gradient).clipped()
        last = optax.tree.cast_like(state.reduced_momentum, gradient)

        def combined(factor):
            return jax.tree.map(lambda p, g: beta1 * p + jnp.asarray(factor, g.dtype) * g, last, clipped)

        momentum = combined(1 - beta1 + beta1 * now)
        reduced = step.keep(combined(1 - beta1 + beta1 * now - following), state.reduced_momentum)
        count = jnp.where(step.good, optax.safe_increment(state.count), state.count)
        return momentum, RecursiveMomentumState(count, step.keep(jnp.asarray(now, jnp.float32), state.gamma), reduced)

    return optax.GradientTransformationExtraArgs(init, update)


def _good_gradient(step: Step, gradient: optax.Updates, last: optax.Updates) -> tuple[optax.Updates, optax.Updates]:
    """The gradient to correct, of no matter after a bad step, and the one to store: after a bad step the last good one again."""

    def at_once(gradient: optax.Updates, last: optax.Updates) -> tuple[optax.Updates, optax.Updates]:
        chosen = step.keep(gradient, last)
        return chosen, chosen

    def later(gradient: optax.Updates, last: optax.Updates) -> tuple[optax.Updates, optax.Updates]:
        return gradient, step.keep(gradient, last)

    # The CPU would make a pass over memory of its own for the choice, so there both share it. A TPU would hold both gradients for
    # that, a sixth of the state, where it can write over the stored one when that is no longer needed.
    return jax.lax.platform_dependent(gradient, last, cpu=at_once, default=later)


def _correct_and_clip(
    gradient: Gradient,
    last: Gradient,
    kappa: Float[Array, ""] | float,
    clip: Clip | None,
    clip_norm: float,
    axis_roles: RolesOrFn | None,
    bounds: PyTree | None = None,
) -> tuple[optax.Updates, PyTree]:
    """c̃ and what c was divided by: max(1, ‖c‖/clip_norm) of every tensor, of all, or nothing.

    A pass over the c of a parameter for its norms is only made if `bounds`, one for every tensor with ‖c‖ ≤ (1 + κ)·‖g‖ + κ·‖lg‖, leaves
    room for a clip at all; the norms in it are known already, and those of most parameters are small. The margin covers rounding.
    The branch computes c again, because handing it over would have c written to memory where it otherwise never is.
    """

    def correct(g: PyTree, lg: PyTree) -> PyTree:
        def leaf(g: Array, lg: Array) -> Array:
            return g + jnp.asarray(kappa, g.dtype) * (g - lg)

        return jax.tree.map(leaf, scaled(gradient.clip_factor, g), scaled(last.clip_factor, lg))

    def divisor(parameter: Parameter, g: PyTree, lg: PyTree, *bound: PyTree) -> PyTree:
        def exactly():
            return jax.tree.map(lambda norm: jnp.maximum(1, norm / clip_norm), parameter.norm(correct(g, lg)))

        if not bound:
            return exactly()
        may_bind = ~(optax.tree.max(bound[0]) * (1 + 1e-3) <= clip_norm)
        return jax.lax.cond(may_bind, exactly, lambda: optax.tree.ones_like(bound[0]))

    corrected = correct(gradient.unclipped, last.unclipped)
    if clip is None:
        return corrected, ()
    if clip == "global":
        common = jnp.maximum(1, jnp.sqrt(sum_of_squares(corrected, axis_roles)) / clip_norm)
        return scaled(1 / common, corrected), common
    trees = (gradient.unclipped, last.unclipped) if bounds is None else (gradient.unclipped, last.unclipped, bounds)
    divisors = map_parameters(divisor, *trees, axis_roles=axis_roles)
    clipped = map_parameters(lambda _, c, d: c * (1 / d).astype(c.dtype), corrected, divisors, axis_roles=axis_roles)
    return clipped, divisors


def _measure(
    step: Step, state: CorrectionState, gradient: Gradient, last: Gradient, kappa, divisors: PyTree, axis_roles: RolesOrFn | None
) -> Measured:
    if step.measure is None:
        return state.measured

    def measure() -> Measured:
        g, lg = gradient.clipped(), last.clipped()
        correction = jax.tree.map(lambda g, lg: jnp.asarray(kappa, g.dtype) * (g - lg), g, lg)
        counted = [jnp.asarray(d).ravel() for d in jax.tree.leaves(divisors)]
        return Measured(
            sum_of_squares(correction, axis_roles).astype(jnp.float32),
            sum_of_squares(g, axis_roles).astype(jnp.float32),
            sum((jnp.sum(d > 1).astype(jnp.float32) for d in counted), start=jnp.zeros([], jnp.float32)),
            jnp.asarray(sum(d.size for d in counted), jnp.float32),
        )

    return jax.lax.cond(step.measure & step.good, measure, lambda: state.measured)


def _initial_state(gamma: optax.ScalarOrSchedule) -> CorrectionState:
    unknown = Measured(*(jnp.full([], jnp.nan, jnp.float32) for _ in Measured._fields))
    return CorrectionState(jnp.zeros([], jnp.int32), jnp.asarray(_value(gamma, 0), jnp.float32), unknown, jnp.ones([], jnp.float32))


def _advanced(state: CorrectionState, step: Step, gamma: optax.ScalarOrSchedule, measured: Measured) -> CorrectionState:
    count, now = step.keep(
        (optax.safe_increment(state.count), jnp.asarray(_value(gamma, state.count), jnp.float32)), (state.count, state.gamma)
    )
    return state._replace(count=count, gamma=now, measured=measured)


def _value(gamma: optax.ScalarOrSchedule, count: Int[Array, ""] | int) -> Float[Array, ""] | float:
    return gamma(count) if callable(gamma) else gamma


def _kappa(beta1: float, gamma: Float[Array, ""] | float) -> Float[Array, ""] | float:
    return gamma * beta1 / (1 - beta1)


def _tensor_norms(tree: PyTree, axis_roles: RolesOrFn | None) -> PyTree:
    return map_parameters(lambda parameter, x: parameter.norm(x), tree, axis_roles=axis_roles)
