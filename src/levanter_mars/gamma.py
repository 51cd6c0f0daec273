"""What `gamma:` may say in a YAML: a number, a schedule in optax's words, or a list of (step, value)."""

import abc
from dataclasses import dataclass

import draccus
import jax.numpy as jnp
import optax

from levanter_mars.ranges import NOT_NEGATIVE, NOT_NEGATIVE_STEPS, POSITIVE_STEPS, check_ranges


class GammaSchedule(draccus.ChoiceRegistry, abc.ABC):
    """A schedule of γ over the steps that were not skipped."""

    @abc.abstractmethod
    def build(self) -> optax.Schedule: ...

    def check(self) -> None:
        """Raises a ValueError for the first field out of range."""
        ranges = dict.fromkeys(("value", "init_value", "end_value", "alpha"), NOT_NEGATIVE)
        ranges |= {"transition_begin": NOT_NEGATIVE_STEPS, "transition_steps": POSITIVE_STEPS, "decay_steps": POSITIVE_STEPS}
        check_ranges({f"gamma.{name}": value for name, value in vars(self).items()}, {f"gamma.{name}": r for name, r in ranges.items()})


@GammaSchedule.register_subclass("constant")
@dataclass(frozen=True)
class ConstantGamma(GammaSchedule):
    value: float

    def build(self) -> optax.Schedule:
        return optax.constant_schedule(self.value)


@GammaSchedule.register_subclass("linear")
@dataclass(frozen=True)
class LinearGamma(GammaSchedule):
    init_value: float
    end_value: float
    transition_steps: int
    transition_begin: int = 0

    def build(self) -> optax.Schedule:
        return optax.linear_schedule(self.init_value, self.end_value, self.transition_steps, self.transition_begin)


@GammaSchedule.register_subclass("cosine")
@dataclass(frozen=True)
class CosineGamma(GammaSchedule):
    init_value: float
    decay_steps: int
    alpha: float = 0.0
    """The last value over the first."""

    def build(self) -> optax.Schedule:
        return optax.cosine_decay_schedule(self.init_value, self.decay_steps, self.alpha)


Gamma = float | GammaSchedule | list[tuple[int, float]]
"""A list holds each value from its step on; the first step is 0."""


def build_gamma(gamma: Gamma) -> optax.ScalarOrSchedule:
    """What the optimizers take for `gamma`.

    Raises:
        ValueError: if a value of a schedule is out of range, in a sentence that names it, the value and the range.
    """
    if isinstance(gamma, GammaSchedule):
        gamma.check()
        return gamma.build()
    if not isinstance(gamma, list):
        return gamma
    steps, values = [step for step, _ in gamma], [value for _, value in gamma]
    if not steps or steps[0] != 0 or any(later <= earlier for earlier, later in zip(steps, steps[1:], strict=False)):
        raise ValueError(f"gamma is {gamma}; as a list it must hold [step, value] with steps that start at 0 and increase")
    check_ranges({f"gamma at step {step}": value for step, value in gamma}, {f"gamma at step {step}": NOT_NEGATIVE for step in steps})
    return lambda count: jnp.array(values, jnp.float32)[jnp.searchsorted(jnp.array(steps), count, side="right") - 1]
