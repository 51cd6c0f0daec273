"""The corrected gradient c_t of MARS and its clip.

    c_t = g_t + γ · β1/(1 − β1) · (g_t − lg_t),     c̃_t = c_t / max(1, ‖c_t‖)

(Yuan et al., MARS, arXiv 2411.10438, Algorithm 1: scaled gradient correction and clipping.) g_t is the gradient of this step and
lg_t the gradient it is corrected by.
"""

from typing import Literal, NamedTuple

import haliax as hax
import jax
import jax.numpy as jnp
import optax

from levanter_mars.parameters import Parameter, RolesOrFn, map_parameters

Clip = Literal["tensor", "global"]
"""What the clip's norm is taken over: each tensor alone, or all corrected tensors together."""


class ApproximateCorrectionState(NamedTuple):
    last_gradient: optax.Updates
    """g_{t−1}, in the parameters' shapes and dtypes; zero before the first step."""


def approximate_correction(beta1: float, gamma: float) -> optax.GradientTransformation:
    """Corrects the gradient by the stored gradient of the step before: lg_t = g_{t−1}, one gradient a step.

    As in the authors' release lg_1 = 0, so that c_1 = (1 + γ·β1/(1 − β1)) · g_1. (The paper's x_0 = x_1 would make the first
    correction zero.)

    Args:
        beta1: decay rate of the momentum that follows.
        gamma: the scale γ of the correction; 0 passes gradients through.
    """
    scale = gamma * beta1 / (1 - beta1)

    def init(params: optax.Params) -> ApproximateCorrectionState:
        return ApproximateCorrectionState(optax.tree.zeros_like(params))

    def update(gradient: optax.Updates, state: ApproximateCorrectionState, params: optax.Params | None = None):
        del params
        corrected = jax.tree.map(lambda g, last: g + scale * (g - last), gradient, state.last_gradient)
        return corrected, ApproximateCorrectionState(gradient)

    return optax.GradientTransformation(init, update)


def clip_correction(clip: Clip | None, max_norm: float, axis_roles: RolesOrFn | None = None) -> optax.GradientTransformation:
    """c̃_t = c_t / max(1, ‖c_t‖/max_norm) with the norm that `clip` names; None leaves c_t as it is."""
    match clip:
        case "tensor":
            return clip_by_tensor_norm(max_norm, axis_roles)
        case "global":
            return optax.clip_by_global_norm(max_norm)
        case None:
            return optax.identity()


def clip_by_tensor_norm(max_norm: float, axis_roles: RolesOrFn | None = None) -> optax.GradientTransformation:
    """Scales every tensor down to an L2 norm of at most `max_norm`: each layer's and each expert's weight by its own norm.

    Args:
        max_norm: the largest norm a tensor keeps (1 in the paper).
        axis_roles: what the caller knows better than the modules; see `levanter_mars.parameters.describe`.
    """

    def clip(parameter: Parameter, x: hax.NamedArray | jax.Array) -> hax.NamedArray | jax.Array:
        maximum = hax.maximum if parameter.axis_names is not None else jnp.maximum
        factor = 1 / maximum(1, parameter.norm(x) / max_norm)
        return x * factor.astype(x.dtype)

    def update(updates: optax.Updates, state: optax.EmptyState, params: optax.Params | None = None):
        del params
        return map_parameters(clip, updates, axis_roles=axis_roles), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)
