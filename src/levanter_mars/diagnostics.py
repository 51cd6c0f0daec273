"""What a MARS optimizer knows of its own run, as numbers by name. They are taken inside the compiled update and kept in its state."""

from typing import NamedTuple

import jax
import numpy as np
import optax

from levanter_mars.correction import CorrectionState, RecursiveMomentumState
from levanter_mars.steps import StepState


def diagnostics(state: optax.OptState) -> dict[str, float]:
    """The numbers in the state of a MARS optimizer, or in a state around one.

    `gamma` (γ of the last good step) and `skipped_steps` are always there. With `diagnostics_every` there are, as they were last
    measured: `correction_ratio`, ‖κ(g − lg)‖/‖g‖ over all corrected parameters (not where no gradient is stored); `clip_fraction`, the
    share of corrected tensors that the correction's clip shortened; and `update_norm/KIND` for matrix, vector and other.
    """
    known = (StepState, CorrectionState, RecursiveMomentumState)
    found = [x for x in jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, known)) if isinstance(x, StepState)]
    corrections = [
        x
        for step in found
        for x in jax.tree.leaves(step.inner, is_leaf=lambda x: isinstance(x, known))
        if isinstance(x, CorrectionState | RecursiveMomentumState)
    ]
    numbers: dict[str, float] = {}
    for step in found:
        numbers["skipped_steps"] = int(step.skipped_steps)
        numbers |= {f"update_norm/{kind}": float(norm) for kind, norm in step.update_norms.items()}
    for correction in corrections:
        numbers["gamma"] = float(correction.gamma)
    measured = [x.measured for x in corrections if isinstance(x, CorrectionState)]
    if measured:
        correction, gradient, clipped, tensors = np.sum(np.array(measured, np.float64), axis=0)
        numbers["correction_ratio"] = float(np.sqrt(correction / gradient)) if gradient > 0 else float("nan")
        numbers["clip_fraction"] = float(clipped / tensors) if tensors > 0 else float("nan")
    return {name: number for name, number in numbers.items() if not np.isnan(number)}


class LoggedState(NamedTuple):
    """The state of `optax.inject_hyperparams`, with what Levanter logs of an optimizer: `hyperparams`."""

    injected: optax.OptState

    @property
    def hyperparams(self) -> dict:
        """The learning rates, and the diagnostics under `mars/`. Levanter's trackers show them under `optim/`.

        Inside a traced function, where the state has no numbers, only the learning rates.
        """
        if any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(self.injected)):
            return dict(self.injected.hyperparams)
        return {**self.injected.hyperparams, **{f"mars/{name}": number for name, number in diagnostics(self).items()}}


def logged(inner: optax.GradientTransformationExtraArgs) -> optax.GradientTransformationExtraArgs:
    """Adds `diagnostics` to what Levanter's trackers log of `inner`, a transformation by `optax.inject_hyperparams`."""

    def init(params: optax.Params) -> LoggedState:
        return LoggedState(inner.init(params))

    def update(updates: optax.Updates, state: LoggedState, params: optax.Params | None = None, **extra_args):
        updates, injected = inner.update(updates, state.injected, params, **extra_args)
        return updates, LoggedState(injected)

    return optax.GradientTransformationExtraArgs(init, update)
