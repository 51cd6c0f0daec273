"""The MARS optimizers as optax transformations over any tree of parameters: Levanter models, named arrays, plain arrays."""

import functools
from collections.abc import Callable
from typing import Literal

import jax
import optax
from jaxtyping import PyTree

from levanter_mars.correction import Clip, apply_clip_factor, approximate_correction, with_clip_factor
from levanter_mars.parameters import RolesOrFn, describe
from levanter_mars.preconditioners import scale_by_adam
from levanter_mars.ranges import ranges_checked

Label = Literal["mars", "adamw"]


@ranges_checked
def mars_adamw(
    learning_rate: optax.ScalarOrSchedule,
    weight_decay: float = 0.01,
    beta1: float = 0.95,
    beta2: float = 0.99,
    epsilon: float = 1e-8,
    gamma: float = 0.025,
    amsgrad: bool = False,
    optimize_1d: bool = False,
    learning_rate_1d: optax.ScalarOrSchedule = 3e-3,
    beta1_1d: float = 0.9,
    beta2_1d: float = 0.95,
    weight_decay_1d: float = 0.1,
    max_grad_norm: float | None = None,
    correction_clip: Clip | None = "tensor",
    correction_clip_norm: float = 1.0,
    *,
    weight_decay_mask: PyTree[bool] | Callable[[optax.Params], PyTree[bool]] | None = None,
    axis_roles: RolesOrFn | None = None,
) -> optax.GradientTransformationExtraArgs:
    """MARS-AdamW (arXiv 2411.10438, Algorithm 2) with the approximate correction, as the authors' release computes it.

    Matrices (layer by layer, expert by expert) follow

        c_t = g_t + γ·β1/(1 − β1)·(g_t − g_{t−1}),   c̃_t = c_t / max(1, ‖c_t‖),   x ← x − lr·(m̂(c̃)/(√v̂(c̃) + ε) + wd·x)

    and everything else follows AdamW on g_t with the `_1d` values. Plain two-dimensional arrays are matrices stored (in, out);
    `axis_roles` says otherwise. The update needs the parameters.

    Args:
        learning_rate: a float or an optax schedule.
        weight_decay: decoupled decay wd of the matrices.
        beta1: decay rate of the momentum, and β1 of the correction.
        beta2: decay rate of the second moment.
        epsilon: ε, added to √v̂.
        gamma: scale γ of the gradient correction; 0 turns it off.
        amsgrad: divide by the running maximum of the second moment, for matrices and the rest.
        optimize_1d: give everything the matrices' rule, with `learning_rate` and `weight_decay`.
        learning_rate_1d: a float or an optax schedule for what is no matrix.
        beta1_1d: decay rate of the momentum of what is no matrix.
        beta2_1d: decay rate of the second moment of what is no matrix.
        weight_decay_1d: decay of what is no matrix, norms and biases included.
        max_grad_norm: clip the raw gradient to this global norm before anything else (1 in the published runs); None for off.
        correction_clip: "tensor" clips each corrected tensor by its own norm, "global" all of them by their common norm, None none.
        correction_clip_norm: the largest norm that the clip lets through.
        weight_decay_mask: which parameters `weight_decay` applies to, as in `optax.adamw`; None for all.
        axis_roles: what the caller knows better than the modules; see `levanter_mars.parameters.describe`.

    Raises:
        ValueError: if a value is out of range, in a sentence that names it, the value and the range.
    """
    mars = optax.chain(
        approximate_correction(beta1, gamma, correction_clip, correction_clip_norm, axis_roles),
        scale_by_adam(beta1, beta2, epsilon, amsgrad=amsgrad),
        optax.add_decayed_weights(weight_decay, weight_decay_mask),
        optax.scale_by_learning_rate(learning_rate),
    )
    adamw = optax.chain(
        apply_clip_factor(),
        scale_by_adam(beta1_1d, beta2_1d, epsilon, amsgrad=amsgrad),
        optax.add_decayed_weights(weight_decay_1d),
        optax.scale_by_learning_rate(learning_rate_1d),
    )
    rules = functools.partial(assign_rules, optimize_1d=optimize_1d, axis_roles=axis_roles)
    by_rule = optax.partition({"mars": mars, "adamw": adamw}, rules)
    return optax.chain(with_clip_factor(max_grad_norm, by_rule, axis_roles), _keep_dtype())


def assign_rules(params: PyTree, *, optimize_1d: bool, axis_roles: RolesOrFn | None = None) -> PyTree[Label]:
    """Names the rule that every parameter follows, in a tree that is a prefix of `params`, as `optax.partition` takes it."""
    return jax.tree.map(lambda parameter: "mars" if optimize_1d or parameter.kind == "matrix" else "adamw", describe(params, axis_roles))


def _keep_dtype() -> optax.GradientTransformation:
    """Casts updates to their parameters' dtypes: a learning rate or decay in float32 must not widen bfloat16 parameters."""

    def cast(updates: optax.Updates, params: optax.Params | None) -> optax.Updates:
        return updates if params is None else jax.tree.map(lambda u, p: u.astype(p.dtype), updates, params)

    return optax.stateless(cast)
