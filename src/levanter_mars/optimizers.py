"""The MARS optimizers as optax transformations over any tree of parameters: Levanter models, named arrays, plain arrays.

Matrices (layer by layer, expert by expert) follow MARS and everything else follows AdamW. All four take

    learning_rate, learning_rate_1d   of MARS, and of AdamW: a float or an optax schedule
    weight_decay         decoupled decay of the matrices that `weight_decay_mask` picks
    beta1, gamma         decay rate of the momentum, and scale γ of the gradient correction, a float or an optax schedule; 0 turns it off
    beta1_1d, beta2_1d, epsilon       of AdamW
    weight_decay_1d      decay of what is no matrix, norms and biases included
    max_grad_norm        clip the raw gradient to this global norm before anything else (1 in the published runs); None for off
    correction_clip      "tensor" clips each corrected tensor by its own norm, "global" all that follow one rule by their common norm,
                         None none
    correction_clip_norm              the largest norm that this clip lets through
    convolutions         what a convolution's filters follow: "matrix", each the matrix out × (in·height·width), or "vector", the rule of
                         what is no matrix, as in the release. The first is the default where matrices are orthogonalized
    exact                correct by the gradient of the step's batch at the previous parameters. It costs a second gradient: `update`
                         needs `obj_fn`, the loss of the step as a function of the parameters
    momentum_dtype, last_gradient_dtype   of the stored momenta and gradient, "bfloat16" or "float32"; None for the parameters'
    cautious             drop the entries of a direction that the gradient contradicts (arXiv 2411.16085)
    diagnostics_every    measure at every so many steps, for `levanter_mars.diagnostics`; 0 for never
    weight_decay_mask    which parameters `weight_decay` applies to, as in `optax.adamw`; None for all
    axis_roles           what the caller knows better than the modules; see `levanter_mars.parameters.describe`

and `update` needs the parameters. Plain two-dimensional arrays are matrices stored (in, out); `axis_roles` says otherwise. A step
whose gradient's norm is not finite changes neither parameters nor state and is counted; schedules of learning rates go on, that of γ
waits. A ValueError names a value that is out of range, and the range.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
import optax
from jaxtyping import DTypeLike, PyTree

from levanter_mars import preconditioners
from levanter_mars.correction import Clip, approximate_correction, exact_correction, recursive_momentum
from levanter_mars.parameters import Parameter, RolesOrFn, describe
from levanter_mars.preconditioners import Layout
from levanter_mars.ranges import ranges_checked
from levanter_mars.resuming import refuse_other_states
from levanter_mars.steps import apply_clip_factor, safe_step

Label = Literal["mars-adamw", "mars-lion", "mars-shampoo", "mars-m", "adamw", "adamw-embeddings"]
Embeddings = Literal["matrix", "adamw"]
Convolutions = Literal["matrix", "vector"]
Mask = PyTree[bool] | Callable[[optax.Params], PyTree[bool]] | None
Transformation = optax.GradientTransformationExtraArgs
Rules = dict[Label, Transformation]


@ranges_checked
def mars_adamw(
    learning_rate: optax.ScalarOrSchedule,
    weight_decay: float = 0.01,
    beta1: float = 0.95,
    beta2: float = 0.99,
    epsilon: float = 1e-8,
    gamma: optax.ScalarOrSchedule = 0.025,
    amsgrad: bool = False,
    optimize_1d: bool = False,
    learning_rate_1d: optax.ScalarOrSchedule = 3e-3,
    beta1_1d: float = 0.9,
    beta2_1d: float = 0.95,
    weight_decay_1d: float = 0.1,
    max_grad_norm: float | None = None,
    correction_clip: Clip | None = "tensor",
    correction_clip_norm: float = 1.0,
    convolutions: Convolutions = "vector",
    *,
    exact: bool = False,
    momentum_dtype: DTypeLike | None = None,
    last_gradient_dtype: DTypeLike | None = None,
    cautious: bool = False,
    diagnostics_every: int = 0,
    weight_decay_mask: Mask = None,
    axis_roles: RolesOrFn | None = None,
) -> Transformation:
    """MARS-AdamW (arXiv 2411.10438, Algorithm 2), as the authors' release computes it.

        c_t = g_t + γ·β1/(1 − β1)·(g_t − g_{t−1}),   c̃_t = c_t / max(1, ‖c_t‖),   x ← x − lr·(m̂(c̃)/(√v̂(c̃) + ε) + wd·x)

    Args:
        beta2: decay rate of the second moment v of matrices.
        amsgrad: divide by the running maximum of the second moment, for matrices and the rest.
        optimize_1d: give everything the matrices' rule, with `learning_rate` and `weight_decay`.
        The others are described at the top of this module.
    """
    parts = _Parts(
        beta1=beta1,
        gamma=gamma,
        correction_clip=correction_clip,
        correction_clip_norm=correction_clip_norm,
        exact=exact,
        momentum_dtype=momentum_dtype,
        last_gradient_dtype=last_gradient_dtype,
        cautious=cautious,
        axis_roles=axis_roles,
        some_rule_needs_the_correction=True,
    )
    adam = preconditioners.scale_by_adam(beta1, beta2, epsilon, amsgrad=amsgrad, momentum_dtype=momentum_dtype)
    adam_1d = preconditioners.scale_by_adam(beta1_1d, beta2_1d, epsilon, amsgrad=amsgrad, momentum_dtype=momentum_dtype)
    rules: Rules = {
        "mars-adamw": parts.rule([parts.correction(), adam], weight_decay, weight_decay_mask, learning_rate),
        "adamw": parts.rule([apply_clip_factor(), adam_1d], weight_decay_1d, None, learning_rate_1d),
    }
    labels = functools.partial(assign_rules, "mars-adamw", optimize_1d=optimize_1d, convolutions=convolutions, axis_roles=axis_roles)
    return parts.optimizer(rules, labels, max_grad_norm, diagnostics_every)


@ranges_checked
def mars_lion(
    learning_rate: optax.ScalarOrSchedule,
    weight_decay: float = 0.01,
    beta1: float = 0.95,
    epsilon: float = 1e-8,
    gamma: optax.ScalarOrSchedule = 0.025,
    optimize_1d: bool = False,
    learning_rate_1d: optax.ScalarOrSchedule = 3e-4,
    beta1_1d: float = 0.9,
    beta2_1d: float = 0.95,
    weight_decay_1d: float = 0.1,
    max_grad_norm: float | None = None,
    correction_clip: Clip | None = "tensor",
    correction_clip_norm: float = 1.0,
    convolutions: Convolutions = "vector",
    *,
    exact: bool = False,
    momentum_dtype: DTypeLike | None = None,
    last_gradient_dtype: DTypeLike | None = None,
    cautious: bool = False,
    diagnostics_every: int = 0,
    weight_decay_mask: Mask = None,
    axis_roles: RolesOrFn | None = None,
) -> Transformation:
    """MARS-Lion (arXiv 2411.10438, Algorithm 3), as the authors' release computes it.

        m_t = β1·m_{t−1} + (1 − β1)·c̃_t,   x ← x − lr·(sign(m_t) + wd·x)

    With `correction_clip=None`, and not `exact`, the momentum is all that is stored of a matrix (`recursive_momentum`).

    Args:
        optimize_1d: give everything the matrices' rule, with `learning_rate` and `weight_decay`.
        The others are described at the top of this module.
    """
    parts = _Parts(
        beta1=beta1,
        gamma=gamma,
        correction_clip=correction_clip,
        correction_clip_norm=correction_clip_norm,
        exact=exact,
        momentum_dtype=momentum_dtype,
        last_gradient_dtype=last_gradient_dtype,
        cautious=cautious,
        axis_roles=axis_roles,
    )
    adam_1d = preconditioners.scale_by_adam(beta1_1d, beta2_1d, epsilon, momentum_dtype=momentum_dtype)
    rules: Rules = {
        "mars-lion": parts.rule([parts.momentum(), optax.scale_by_sign()], weight_decay, weight_decay_mask, learning_rate),
        "adamw": parts.rule([apply_clip_factor(), adam_1d], weight_decay_1d, None, learning_rate_1d),
    }
    labels = functools.partial(assign_rules, "mars-lion", optimize_1d=optimize_1d, convolutions=convolutions, axis_roles=axis_roles)
    return parts.optimizer(rules, labels, max_grad_norm, diagnostics_every)


@ranges_checked
def mars_shampoo(
    learning_rate: optax.ScalarOrSchedule,
    weight_decay: float = 0.01,
    beta1: float = 0.95,
    beta2: float = 0.99,
    epsilon: float = 1e-8,
    gamma: optax.ScalarOrSchedule = 0.025,
    optimize_1d: bool = False,
    learning_rate_1d: optax.ScalarOrSchedule = 3e-3,
    beta1_1d: float = 0.9,
    beta2_1d: float = 0.95,
    weight_decay_1d: float = 0.1,
    max_grad_norm: float | None = None,
    correction_clip: Clip | None = "tensor",
    correction_clip_norm: float = 1.0,
    newton_schulz_steps: int = 5,
    newton_schulz_dtype: str = "bfloat16",
    newton_schulz_coefficients: str = "jordan",
    newton_schulz_layout: Layout = "auto",
    embeddings: Embeddings = "matrix",
    convolutions: Convolutions = "matrix",
    *,
    exact: bool = False,
    momentum_dtype: DTypeLike | None = None,
    last_gradient_dtype: DTypeLike | None = None,
    cautious: bool = False,
    diagnostics_every: int = 0,
    weight_decay_mask: Mask = None,
    axis_roles: RolesOrFn | None = None,
) -> Transformation:
    """MARS-Shampoo (arXiv 2411.10438, Algorithm 4), as the authors' release computes it: the momentum of c̃, orthogonalized.

        x ← x − lr·(√max(1, out/in)·NS(m_t/(1 − β1)) + wd·x)

    With `correction_clip=None`, and not `exact`, the momentum is all that is stored of a matrix (`recursive_momentum`).

    Args:
        beta2: decay rate of the second moment of what is no matrix, under `optimize_1d`.
        optimize_1d: give what is no matrix the update of MARS-AdamW, with `learning_rate` and `weight_decay`.
        newton_schulz_steps, newton_schulz_dtype, newton_schulz_coefficients: see `levanter_mars.newton_schulz.newton_schulz`;
            "float32" agrees with the release to rounding.
        newton_schulz_layout: "auto" gives every device whole matrices (`levanter_mars.layout`), "replicated" leaves it to the compiler.
        embeddings: the rule of embedding tables and an untied head: "matrix", or "adamw" at `learning_rate_1d` with `weight_decay`.
        The others are described at the top of this module.
    """
    parts = _Parts(
        beta1=beta1,
        gamma=gamma,
        correction_clip=correction_clip,
        correction_clip_norm=correction_clip_norm,
        exact=exact,
        momentum_dtype=momentum_dtype,
        last_gradient_dtype=last_gradient_dtype,
        cautious=cautious,
        axis_roles=axis_roles,
        some_rule_needs_the_correction=optimize_1d,
    )

    def scale(parameter: Parameter) -> float:
        fan_out, fan_in = parameter.tensor_shape
        return math.sqrt(max(1, fan_out / max(1, fan_in)))

    adam = preconditioners.scale_by_adam(beta1, beta2, epsilon, momentum_dtype=momentum_dtype)
    adam_1d = preconditioners.scale_by_adam(beta1_1d, beta2_1d, epsilon, momentum_dtype=momentum_dtype)
    orthogonal = parts.orthogonalize(scale, newton_schulz_steps, newton_schulz_coefficients, newton_schulz_dtype, newton_schulz_layout)
    # A matrix's orthogonal factor does not know its scale, up to the ε beside the norm, which the release compares with m/(1 − β1).
    unscaled = optax.scale(1 / (1 - beta1))
    rules: Rules = {
        "mars-shampoo": parts.rule([parts.momentum(), unscaled, orthogonal], weight_decay, weight_decay_mask, learning_rate),
        "adamw": parts.rule([apply_clip_factor(), adam_1d], weight_decay_1d, None, learning_rate_1d),
        "adamw-embeddings": parts.rule([apply_clip_factor(), adam_1d], weight_decay, weight_decay_mask, learning_rate_1d),
    }
    if optimize_1d:
        rules["mars-adamw"] = parts.rule([parts.correction(), adam], weight_decay, weight_decay_mask, learning_rate)
    labels = functools.partial(
        assign_rules, "mars-shampoo", optimize_1d=optimize_1d, embeddings=embeddings, convolutions=convolutions, axis_roles=axis_roles
    )
    return parts.optimizer(rules, labels, max_grad_norm, diagnostics_every)


@ranges_checked
def mars_m(
    learning_rate: optax.ScalarOrSchedule,
    weight_decay: float = 0.01,
    beta1: float = 0.95,
    epsilon: float = 1e-8,
    gamma: optax.ScalarOrSchedule = 0.025,
    learning_rate_1d: optax.ScalarOrSchedule | None = None,
    beta1_1d: float = 0.9,
    beta2_1d: float = 0.95,
    weight_decay_1d: float | None = None,
    max_grad_norm: float | None = None,
    correction_clip: Clip | None = "tensor",
    correction_clip_norm: float = 1.0,
    newton_schulz_steps: int = 5,
    newton_schulz_dtype: str = "bfloat16",
    newton_schulz_coefficients: str = "jordan",
    newton_schulz_layout: Layout = "auto",
    embeddings: Embeddings = "adamw",
    convolutions: Convolutions = "matrix",
    *,
    exact: bool = False,
    momentum_dtype: DTypeLike | None = None,
    last_gradient_dtype: DTypeLike | None = None,
    cautious: bool = False,
    diagnostics_every: int = 0,
    weight_decay_mask: Mask = None,
    axis_roles: RolesOrFn | None = None,
) -> Transformation:
    """MARS-M (arXiv 2510.21800, Algorithm 1), as the authors' release computes it: Moonlight's Muon on the momentum of c̃.

        x ← x − lr·(0.2·√max(out, in)·NS(m_t) + wd·x)

    With `correction_clip=None`, and not `exact`, the momentum is all that is stored of a matrix (`recursive_momentum`).

    Args:
        learning_rate_1d: of AdamW; None for `learning_rate`.
        weight_decay_1d: of what is no matrix; None for `weight_decay`.
        newton_schulz_steps, newton_schulz_dtype, newton_schulz_coefficients: see `levanter_mars.newton_schulz.newton_schulz`;
            "float32" agrees with the release to rounding.
        newton_schulz_layout: "auto" gives every device whole matrices (`levanter_mars.layout`), "replicated" leaves it to the compiler.
        embeddings: the rule of embedding tables and an untied head: "matrix", or "adamw" with `weight_decay`.
        The others are described at the top of this module.
    """
    parts = _Parts(
        beta1=beta1,
        gamma=gamma,
        correction_clip=correction_clip,
        correction_clip_norm=correction_clip_norm,
        exact=exact,
        momentum_dtype=momentum_dtype,
        last_gradient_dtype=last_gradient_dtype,
        cautious=cautious,
        axis_roles=axis_roles,
    )
    learning_rate_1d = learning_rate if learning_rate_1d is None else learning_rate_1d
    weight_decay_1d = weight_decay if weight_decay_1d is None else weight_decay_1d

    def scale(parameter: Parameter) -> float:
        return 0.2 * math.sqrt(max(parameter.tensor_shape))

    adam = preconditioners.scale_by_adam(beta1_1d, beta2_1d, epsilon, epsilon_before_correction=True, momentum_dtype=momentum_dtype)
    orthogonal = parts.orthogonalize(scale, newton_schulz_steps, newton_schulz_coefficients, newton_schulz_dtype, newton_schulz_layout)
    rules: Rules = {
        "mars-m": parts.rule([parts.momentum(), orthogonal], weight_decay, weight_decay_mask, learning_rate),
        "adamw": parts.rule([apply_clip_factor(), adam], weight_decay_1d, None, learning_rate_1d),
        "adamw-embeddings": parts.rule([apply_clip_factor(), adam], weight_decay, weight_decay_mask, learning_rate_1d),
    }
    labels = functools.partial(assign_rules, "mars-m", embeddings=embeddings, convolutions=convolutions, axis_roles=axis_roles)
    return parts.optimizer(rules, labels, max_grad_norm, diagnostics_every)


def assign_rules(
    matrices: Label,
    params: PyTree,
    *,
    optimize_1d: bool = False,
    embeddings: Embeddings = "matrix",
    convolutions: Convolutions = "vector",
    axis_roles: RolesOrFn | None = None,
) -> PyTree[Label]:
    """Names the rule that every parameter follows, in a tree that is a prefix of `params`, as `optax.partition` takes it.

    Args:
        matrices: the rule of matrices.
        params: a model, or its shapes.
        optimize_1d, embeddings, convolutions, axis_roles: as the optimizers have them.
    """

    def rule(parameter: Parameter) -> Label:
        if parameter.kind == "matrix" or (parameter.is_filter and convolutions == "matrix"):
            return "adamw-embeddings" if parameter.embedding and embeddings == "adamw" else matrices
        if not optimize_1d:
            return "adamw"
        return "mars-adamw" if matrices == "mars-shampoo" else matrices

    return jax.tree.map(rule, describe(params, axis_roles))


@dataclass(frozen=True)
class _Parts:
    """The parts that the optimizers have in common, made from the arguments that they share."""

    beta1: float
    gamma: optax.ScalarOrSchedule
    correction_clip: Clip | None
    correction_clip_norm: float
    exact: bool
    momentum_dtype: DTypeLike | None
    last_gradient_dtype: DTypeLike | None
    cautious: bool
    axis_roles: RolesOrFn | None
    some_rule_needs_the_correction: bool = False
    """Whether some rule corrects gradients for more than a momentum, and so stores the last one even without the clip."""

    def __post_init__(self):
        stores_gradient = not self.exact and (self.some_rule_needs_the_correction or self.correction_clip is not None)
        if self.last_gradient_dtype is not None and not stores_gradient:
            reason = "exact is true" if self.exact else "correction_clip is None"
            raise ValueError(
                f"last_gradient_dtype is {self.last_gradient_dtype!r}; it must be None where no gradient is stored, as {reason}"
            )

    def correction(self) -> Transformation:
        if self.exact:
            return exact_correction(self.beta1, self.gamma, self.correction_clip, self.correction_clip_norm, axis_roles=self.axis_roles)
        return approximate_correction(
            self.beta1,
            self.gamma,
            self.correction_clip,
            self.correction_clip_norm,
            last_gradient_dtype=self.last_gradient_dtype,
            axis_roles=self.axis_roles,
        )

    def momentum(self) -> Transformation:
        """The momentum of c̃, from one buffer where that is possible."""
        if self.correction_clip is None and not self.exact:
            return recursive_momentum(self.beta1, self.gamma, momentum_dtype=self.momentum_dtype)
        return optax.chain(self.correction(), preconditioners.momentum(self.beta1, momentum_dtype=self.momentum_dtype))

    def orthogonalize(
        self, scale: Callable[[Parameter], float], steps: int, coefficients: str, dtype: str, layout: Layout
    ) -> optax.GradientTransformation:
        return preconditioners.orthogonalize(
            scale, steps=steps, coefficients=coefficients, dtype=dtype, layout=layout, axis_roles=self.axis_roles
        )

    def rule(
        self, direction: list[optax.GradientTransformation], weight_decay: float, mask: Mask, learning_rate: optax.ScalarOrSchedule
    ) -> Transformation:
        """x ← x − lr·(direction + wd·x)"""
        return optax.chain(
            *direction,
            *([preconditioners.cautious(self.axis_roles)] if self.cautious else []),
            optax.add_decayed_weights(weight_decay, mask),
            optax.scale_by_learning_rate(learning_rate),
        )

    def optimizer(
        self,
        rules: Rules,
        labels: Callable[[optax.Params], PyTree[Label]],
        max_grad_norm: float | None,
        diagnostics_every: int,
    ) -> Transformation:
        by_rule = optax.partition(rules, labels)
        step = safe_step(by_rule, max_grad_norm, exact=self.exact, diagnostics_every=diagnostics_every, axis_roles=self.axis_roles)
        return refuse_other_states(optax.chain(step, _keep_dtype()))


def _keep_dtype() -> optax.GradientTransformation:
    """Casts updates to their parameters' dtypes: a learning rate or decay in float32 must not widen bfloat16 parameters."""

    def cast(updates: optax.Updates, params: optax.Params | None) -> optax.Updates:
        return updates if params is None else jax.tree.map(lambda u, p: u.astype(jnp.asarray(p).dtype), updates, params)

    return optax.stateless(cast)
