"""The corrected gradient c_t of MARS and its clip.

    c_t = g_t + κ · (g_t − lg_t),   κ = γ · β1/(1 − β1),        c̃_t = c_t / max(1, ‖c_t‖)

(Yuan et al., MARS, arXiv 2411.10438, Algorithm 1: scaled gradient correction and clipping.) g_t is the gradient of this step, after
the clip of its global norm, and lg_t the gradient it is corrected by.

The clip of the global norm is one factor for the whole gradient. It is handed down as an extra argument, `clip_factor`, and
multiplied in where a gradient is used. So the gradient can be stored as the backward pass left it, beside the factor, and no
clipped copy of it is ever written.
"""

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, PyTree

from levanter_mars.parameters import Parameter, RolesOrFn, map_parameters

Clip = Literal["tensor", "global"]
"""What the clip's norm is taken over: each tensor alone, or all corrected tensors together."""

ClipFactor = Float[Array, ""] | float


def with_clip_factor(max_norm: float | None, inner: optax.GradientTransformationExtraArgs, axis_roles: RolesOrFn | None = None):
    """Hands `inner` the gradient unclipped, and the extra argument `clip_factor` = min(1, max_norm/‖g‖) over all parameters.

    Args:
        max_norm: the largest global norm of the gradient; None for a factor of 1.
        inner: a transformation whose parts multiply the factor in: `approximate_correction` or `apply_clip_factor`.
        axis_roles: see `levanter_mars.parameters.describe`.
    """

    def update(gradient: optax.Updates, state: optax.OptState, params: optax.Params | None = None, **extra_args):
        factor = 1.0 if max_norm is None else jnp.minimum(1, max_norm / _global_norm(gradient, axis_roles))
        return inner.update(gradient, state, params, clip_factor=factor, **extra_args)

    return optax.GradientTransformationExtraArgs(inner.init, update)


def apply_clip_factor() -> optax.GradientTransformationExtraArgs:
    """Multiplies the gradient by the `clip_factor` that `with_clip_factor` hands down."""

    def update(
        gradient: optax.Updates, state: optax.EmptyState, params: optax.Params | None = None, *, clip_factor: ClipFactor, **extra_args
    ):
        del params, extra_args
        return _scaled(clip_factor, gradient), state

    return optax.GradientTransformationExtraArgs(optax.init_empty_state, update)


class ApproximateCorrectionState(NamedTuple):
    last_gradient: optax.Updates
    """g_{t−1} before its clip, in the parameters' shapes and dtypes; zero before the first step."""
    last_clip_factor: Float[Array, ""]
    last_norms: PyTree
    """‖g_{t−1}‖ after its clip, one number for every tensor; empty where tensors are not clipped."""


def approximate_correction(
    beta1: float, gamma: float, clip: Clip | None, clip_norm: float, axis_roles: RolesOrFn | None = None
) -> optax.GradientTransformationExtraArgs:
    """Corrects the gradient by the stored gradient of the step before, lg_t = g_{t−1}, and clips the result: one gradient a step.

    As in the authors' release lg_1 = 0, so that c_1 = (1 + κ) · g_1. (The paper's x_0 = x_1 would make the first correction zero.)

    Args:
        beta1: decay rate of the momentum that follows.
        gamma: the scale γ of the correction; 0 passes the gradient on to the clip.
        clip: "tensor" for each layer's and each expert's tensor by its own norm, "global" for all together, None for no clip.
        clip_norm: the largest norm that the clip lets through (1 in the paper).
        axis_roles: see `levanter_mars.parameters.describe`.
    """
    scale = gamma * beta1 / (1 - beta1)

    def tensor_norms(tree: PyTree) -> PyTree:
        return map_parameters(lambda parameter, x: parameter.norm(x), tree, axis_roles=axis_roles)

    def init(params: optax.Params) -> ApproximateCorrectionState:
        norms = optax.tree.zeros_like(tensor_norms(params)) if clip == "tensor" else ()
        return ApproximateCorrectionState(optax.tree.zeros_like(params), jnp.ones([], jnp.float32), norms)

    def update(
        gradient: optax.Updates,
        state: ApproximateCorrectionState,
        params: optax.Params | None = None,
        *,
        clip_factor: ClipFactor = 1.0,
        **extra_args,
    ):
        del params, extra_args

        def correct(g: PyTree, last_g: PyTree) -> PyTree:
            g, last_g = _scaled(clip_factor, g), _scaled(state.last_clip_factor, last_g)
            return jax.tree.map(lambda g, lg: g + scale * (g - lg), g, last_g)

        def clip_tensors(parameter: Parameter, corrected: PyTree, g: PyTree, last_g: PyTree, norm: PyTree, last_norm: PyTree) -> PyTree:
            """Divides every tensor of a parameter by max(1, ‖c‖/clip_norm).

            A pass over c for its norms is only made if a bound on one of them, ‖c‖ ≤ (1 + κ)·‖g‖ + κ·‖lg‖, leaves room for a clip
            at all; the norms in it are known already, and those of most parameters are small. The margin covers their rounding. The
            branch computes c again, because handing it over would have c written to memory where it otherwise never is.
            """
            bound = jax.tree.map(lambda g, lg: (1 + scale) * g + scale * lg, norm, last_norm)
            divisor = jax.lax.cond(
                jnp.any(~(optax.tree.max(bound) * (1 + 1e-3) <= clip_norm)),
                lambda: jax.tree.map(lambda norm: jnp.maximum(1, norm / clip_norm), parameter.norm(correct(g, last_g))),
                lambda: optax.tree.ones_like(bound),
            )
            return corrected * (1 / divisor).astype(corrected.dtype)

        corrected, norms = correct(gradient, state.last_gradient), ()
        if clip == "tensor":
            norms = _scaled(clip_factor, tensor_norms(gradient))
            trees = (corrected, gradient, state.last_gradient, norms, state.last_norms)
            corrected = map_parameters(clip_tensors, *trees, axis_roles=axis_roles)
        elif clip == "global":
            corrected, _ = optax.clip_by_global_norm(clip_norm).update(corrected, optax.EmptyState())
        return corrected, ApproximateCorrectionState(gradient, jnp.asarray(clip_factor, jnp.float32), norms)

    return optax.GradientTransformationExtraArgs(init, update)


def _global_norm(gradient: PyTree, axis_roles: RolesOrFn | None) -> Float[Array, ""]:
    # Summed tensor by tensor, so that the compiler finds the same sums here and in the bounds of the tensors' clip.
    norms = map_parameters(lambda parameter, g: parameter.norm(g), gradient, axis_roles=axis_roles)
    return jnp.sqrt(sum(jnp.sum(jnp.square(norm)) for norm in jax.tree.leaves(norms)))


def _scaled(factor: ClipFactor, tree: PyTree) -> PyTree:
    return jax.tree.map(lambda x: jnp.asarray(factor, x.dtype) * x, tree)
