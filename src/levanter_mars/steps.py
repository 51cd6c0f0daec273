"""A step as a whole, whatever the optimizer: the clip of the gradient's global norm, and steps that are skipped because it is not finite.

The clip is one factor for the whole gradient. It is handed down in a `Step` and multiplied in where a gradient is used. So a gradient
can be stored as the backward pass left it, beside its factor, and no clipped copy of it is ever written. A transformation that keeps a
state keeps its old one through a bad step: `step.keep(new, old)`.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int, PyTree
from levanter.optim.skipstep import SkipStepConfig, SkipStepState

from levanter_mars.batch_gradient import batch_gradient
from levanter_mars.parameters import KINDS, Kind, RolesOrFn, describe, map_parameters


class Gradient(NamedTuple):
    """A gradient as the backward pass left it, and the factor min(1, max_norm/‖g‖) of its clip."""

    unclipped: optax.Updates
    clip_factor: Float[Array, ""]

    def clipped(self) -> optax.Updates:
        return scaled(self.clip_factor, self.unclipped)

    def masked_like(self, updates: optax.Updates) -> "Gradient":
        """The part of it that a masked transformation sees: where `updates` has a `MaskedNode`, so has the result."""

        def mask(update, subtree):
            return update if isinstance(update, optax.MaskedNode) else subtree

        return self._replace(unclipped=jax.tree.map(mask, updates, self.unclipped, is_leaf=lambda x: isinstance(x, optax.MaskedNode)))


class Step(NamedTuple):
    """What every part of an optimizer learns of a step, as the extra argument `step`."""

    gradient: Gradient
    good: Bool[Array, ""]
    """Whether the gradient's norm is finite. If not, nothing but counts may change."""
    previous: Gradient | None = None
    """In the exact form, this batch's gradient at the previous parameters."""
    measure: Bool[Array, ""] | None = None
    """Whether diagnostics are to be taken at this step; None if never."""

    def keep(self, new: PyTree, old: PyTree) -> PyTree:
        """`new` after a good step and `old` after a bad one, in the dtypes of `old`."""
        return jax.tree.map(lambda n, o: jnp.where(self.good, n.astype(o.dtype), o), new, old)


class StepState(NamedTuple):
    inner: optax.OptState
    count: Int[Array, ""]
    """Steps so far, skipped ones included but for those that `skip_outliers` skips."""
    skipped_steps: Int[Array, ""]
    update_norms: dict[Kind, Float[Array, ""]]
    """The last measured norm of the update by kind of parameter; NaN before the first."""
    last_params: optax.Params | tuple[()] = ()
    """x_{t−1}, in the exact form."""


def safe_step(
    inner: optax.GradientTransformationExtraArgs,
    max_grad_norm: float | None,
    *,
    exact: bool = False,
    diagnostics_every: int = 0,
    axis_roles: RolesOrFn | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Hands `inner` the gradient unclipped with a `Step`, and skips, and counts, the steps whose gradient's norm is not finite.

    Args:
        inner: a transformation that takes the extra argument `step`.
        max_grad_norm: the largest global norm of the gradient; None for no clip.
        exact: hand down the gradient of the same batch at the previous parameters too, clipped by its own norm. `update` then needs the
            extra argument `obj_fn`, and at the first step the previous parameters are the present ones.
        diagnostics_every: measure the norms of updates, and have `inner` measure, at every so many steps; 0 for never.
        axis_roles: see `levanter_mars.parameters.describe`.
    """

    def init(params: optax.Params) -> StepState:
        params = jax.tree.map(jnp.asarray, params)
        unknown = {kind: jnp.full([], jnp.nan, jnp.float32) for kind in KINDS}
        last = jax.tree.map(jnp.array, params) if exact else ()  # copies, so that both can be donated
        return StepState(inner.init(params), jnp.zeros([], jnp.int32), jnp.zeros([], jnp.int32), unknown, last)

    def update(
        gradient: optax.Updates,
        state: StepState,
        params: optax.Params | None = None,
        *,
        obj_fn: Callable[[PyTree], Any] | None = None,
        **extra_args,
    ):
        gradient, params = jax.tree.map(jnp.asarray, (gradient, params))  # numbers are parameters too
        this, good = _with_clip_factor(gradient, max_grad_norm, axis_roles)
        previous, last_params = None, ()
        if exact:
            # One after the other, so that the two backward passes never hold their activations at the same time.
            at, _ = jax.lax.optimization_barrier((state.last_params, gradient))
            previous, finite = _with_clip_factor(batch_gradient(obj_fn, at), max_grad_norm, axis_roles)
            good = good & finite
            last_params = jax.tree.map(lambda new, old: jnp.where(good, new, old), params, state.last_params)
        measure = _is_due(state.count, diagnostics_every)

        step = Step(this, good, previous, measure)
        updates, inner_state = inner.update(gradient, state.inner, params, step=step, **extra_args)
        updates = jax.tree.map(lambda u: jnp.where(good, u, jnp.zeros_like(u)), updates)

        norms = state.update_norms
        if measure is not None:
            norms = jax.lax.cond(measure & good, lambda: _norms_by_kind(updates, axis_roles), lambda: norms)
        skipped = jnp.where(good, state.skipped_steps, optax.safe_increment(state.skipped_steps))
        return updates, StepState(inner_state, optax.safe_increment(state.count), skipped, norms, last_params)

    return optax.GradientTransformationExtraArgs(init, update)


def skip_outliers(config: SkipStepConfig, inner: optax.GradientTransformationExtraArgs) -> optax.GradientTransformationExtraArgs:
    """Levanter's `skip_bad_steps` around `inner`, which skips what is not finite: losses and norms that are not stay out of its history.

    One of them in it would make every mean NaN, and every step look bad, until it has left the history again. A step that Levanter skips
    is counted in `skipped_steps` as one that `inner` skips is.
    """
    wrapped = config.wrap(inner)

    def update(updates: optax.Updates, state: SkipStepState, params: optax.Params | None = None, *, loss: Array, **extra_args):
        new_updates, new = wrapped.update(updates, state, params, loss=loss, **extra_args)
        finite = jnp.isfinite(loss) & jnp.isfinite(optax.global_norm(updates))
        history = ("losses", "grad_norms", "valid_mask", "current_idx", "count")
        return new_updates, dataclasses.replace(
            new,
            inner_opt_state=_count_skipped(new.inner_opt_state, state.inner_opt_state),
            **{name: jnp.where(finite, getattr(new, name), getattr(state, name)) for name in history},
        )

    return optax.GradientTransformationExtraArgs(wrapped.init, update)


def _count_skipped(new: PyTree, old: PyTree) -> PyTree:
    """Counts a step whose state Levanter has put back to the old one, the count of steps included."""

    def count(new, old):
        if not isinstance(new, StepState):
            return new
        skipped = jnp.where(new.count == old.count, optax.safe_increment(old.skipped_steps), new.skipped_steps)
        return new._replace(skipped_steps=skipped)

    return jax.tree.map(count, new, old, is_leaf=lambda x: isinstance(x, StepState))


def apply_clip_factor() -> optax.GradientTransformationExtraArgs:
    """The gradient after the clip of its global norm."""

    def update(gradient: optax.Updates, state: optax.EmptyState, params: optax.Params | None = None, *, step: Step, **extra_args):
        del params, extra_args
        return scaled(step.gradient.clip_factor, gradient), state

    return optax.GradientTransformationExtraArgs(optax.init_empty_state, update)


def scaled(factor: Float[Array, ""] | float, tree: PyTree) -> PyTree:
    return jax.tree.map(lambda x: jnp.asarray(factor, x.dtype) * x, tree)


def sum_of_squares(tree: PyTree, axis_roles: RolesOrFn | None = None) -> Float[Array, ""]:
    # Summed tensor by tensor, so that the compiler finds the same sums here and in the tensors' own norms.
    norms = map_parameters(lambda parameter, x: parameter.norm(x), tree, axis_roles=axis_roles)
    return sum((jnp.sum(jnp.square(norm)) for norm in jax.tree.leaves(norms)), start=jnp.zeros([], jnp.float32))


def _is_due(count: Int[Array, ""], every: int | Int[Array, ""]) -> Bool[Array, ""] | None:
    if isinstance(every, jax.Array):  # as optax.inject_hyperparams makes it
        return (every > 0) & (count % jnp.maximum(every, 1) == 0)
    return count % every == 0 if every else None


def _with_clip_factor(gradient: PyTree, max_norm: float | None, axis_roles: RolesOrFn | None) -> tuple[Gradient, Bool[Array, ""]]:
    norm = jnp.sqrt(sum_of_squares(gradient, axis_roles))
    factor = jnp.ones([], jnp.float32) if max_norm is None else jnp.minimum(1, max_norm / norm).astype(jnp.float32)
    return Gradient(gradient, factor), jnp.isfinite(norm)


def _norms_by_kind(updates: PyTree, axis_roles: RolesOrFn | None) -> dict[Kind, Float[Array, ""]]:
    described = jax.tree.leaves(describe(updates, axis_roles))
    of_kind = {kind: [parameter.kind == kind for parameter in described] for kind in KINDS}
    norms = map_parameters(lambda parameter, u: parameter.norm(u), updates, axis_roles=axis_roles)
    squares = [jnp.sum(jnp.square(norm)).astype(jnp.float32) for norm in jax.tree.leaves(norms)]
    zero = jnp.zeros([], jnp.float32)
    return {kind: jnp.sqrt(sum((x for x, is_it in zip(squares, of_kind[kind], strict=True) if is_it), start=zero)) for kind in KINDS}
