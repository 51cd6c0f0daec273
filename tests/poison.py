"""Optimizers whose gradients and losses go bad at some steps of a run, as `type: poisoned-mars-adamw` and `poisoned-adam`."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import optax
from levanter.optim.config import AdamConfig, OptimizerConfig

from levanter_mars import MarsAdamWConfig

STEPS = 80
_RNG = np.random.default_rng(0)
BAD = {int(step): value for step, value in zip(_RNG.choice(np.arange(20, STEPS), 9, replace=False), [np.nan, np.inf, 1e3] * 3, strict=True)}
"""What gradient and loss are multiplied by, by step: random steps, once there is a history to call a loss large by."""
NOT_FINITE = [step for step, value in BAD.items() if not np.isfinite(value)]


def _poisoned(inner: optax.GradientTransformationExtraArgs) -> optax.GradientTransformationExtraArgs:
    factors = np.ones(STEPS, np.float32)
    factors[list(BAD)] = list(BAD.values())

    def update(gradient, state, params=None, *, loss, **extra_args):
        factor = jnp.asarray(factors)[getattr(state, "injected", state).count]
        return inner.update(jax.tree.map(lambda g: g * factor, gradient), state, params, loss=loss * factor, **extra_args)

    return optax.GradientTransformationExtraArgs(inner.init, update)


def register() -> None:
    @OptimizerConfig.register_subclass("poisoned-mars-adamw")
    @dataclass(frozen=True)
    class PoisonedMarsAdamWConfig(MarsAdamWConfig):
        def build(self, num_train_steps):
            return _poisoned(super().build(num_train_steps))

    @OptimizerConfig.register_subclass("poisoned-adam")
    @dataclass(frozen=True)
    class PoisonedAdamConfig(AdamConfig):
        def build(self, num_train_steps):
            return _poisoned(super().build(num_train_steps))
