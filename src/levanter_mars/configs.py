"""What `optimizer:` may say in a Levanter YAML. Importing this module registers the types; importing it twice is harmless."""

import dataclasses
import inspect
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, cast

import jax
import jax.numpy as jnp
import optax
from draccus.utils import ParsingError
from jaxtyping import PyTree
from levanter.optim.config import LrSchedule, OptimizerConfig
from levanter.optim.skipstep import SkipStepConfig

from levanter_mars.diagnostics import logged
from levanter_mars.gamma import Gamma, build_gamma
from levanter_mars.optimizers import Label, assign_rules, mars_adamw, mars_lion, mars_m, mars_shampoo
from levanter_mars.ranges import NOT_NEGATIVE, POSITIVE, RANGES, Range, check_ranges
from levanter_mars.resuming import refuse_other_states
from levanter_mars.steps import skip_outliers


class Rule(NamedTuple):
    """What one parameter gets from an optimizer."""

    name: str
    learning_rate_factor: float
    """Its learning rate over the schedule's."""
    weight_decay: float


@dataclass(frozen=True)
class MarsOptimizerConfig(OptimizerConfig):
    """What the four types have in common. `weight_decay` goes to the matrices that `weight_decay_modules` or Levanter's default picks (no
    embeddings, no norms); `weight_decay_1d` goes to everything that is no matrix.

    A value out of range raises a ParsingError while the YAML is parsed, before data or devices, with a sentence that names it.
    """

    learning_rate: float = 6e-3
    weight_decay: float = 0.01
    beta1: float = 0.95
    epsilon: float = 1e-8
    gamma: Gamma = 0.025
    """Scale of the gradient correction, constant or by a schedule; 0 turns it off."""
    learning_rate_1d: float | None = 3e-3
    """Peak learning rate of what is no matrix; it follows the shape of the main schedule."""
    beta1_1d: float = 0.9
    beta2_1d: float = 0.95
    weight_decay_1d: float | None = 0.1
    """Decay of what is no matrix, norms and biases included."""
    max_grad_norm: float | None = 1.0
    """Clip the raw gradient to this global norm before anything else; null for off."""
    correction_clip: str | None = "tensor"
    """Clip the corrected gradient of each tensor by its own norm (tensor), of all that follow one rule together (global), or not (null).
    Without it mars-lion, mars-shampoo and mars-m store no gradient."""
    correction_clip_norm: float = 1.0
    convolutions: str = "vector"
    """What a convolution's filters follow: matrix, each the matrix out × (in·height·width), or vector, the rule of what is no matrix, as in
    the release."""
    exact: bool = False
    """Correct by the gradient of this step's batch at the previous parameters, which costs a second gradient."""
    momentum_dtype: str | None = None
    """bfloat16 or float32 for the stored momenta; null for the parameters' dtype."""
    last_gradient_dtype: str | None = None
    """bfloat16 or float32 for the stored gradient; null for the parameters' dtype."""
    cautious: bool = False
    """Drop the entries of a direction that the gradient contradicts (arXiv 2411.16085)."""
    skip_bad_steps: bool | int | SkipStepConfig = False
    """Skip steps whose loss or gradient norm is far above that of the steps before, as Levanter's AdamW does. A gradient that is not
    finite is skipped in any case."""
    diagnostics_every: int = 0
    """Log optim/mars/correction_ratio, clip_fraction and update_norm, measured at every so many steps; 0 for never."""

    function: ClassVar[Callable[..., optax.GradientTransformationExtraArgs]]
    """The optimizer, whose arguments are named as the fields are."""

    def __post_init__(self):
        try:
            check_ranges(self._values_with_ranges(), _CONFIG_RANGES)
            given = [name for name in ("cycle_length", "cycles", "haps") if getattr(self, name) is not None]
            if len(given) > 1:
                raise ValueError(f"{' and '.join(given)} are set; at most one of cycle_length, cycles and haps may be")
            self._optimizer(self.learning_rate, self.learning_rate_1d)
        except ValueError as error:
            # draccus replaces a ValueError raised here by one that does not say what is wrong, but lets its own through.
            raise ParsingError(f"{self.get_choice_name(type(self))}: {error}") from None

    def rules(self, params: PyTree) -> PyTree[Rule]:
        """What every parameter gets, in a tree that is a prefix of `params` (a model, or its shapes)."""
        mask = self.build_weight_decay_mask()
        given = {name: value for name, value in vars(self).items() if name in ("optimize_1d", "embeddings", "convolutions")}
        labels = assign_rules(cast(Label, self.get_choice_name(type(self))), params, **given)
        decayed = jax.tree.map(lambda _: True, labels) if mask is None else mask(params)
        factor_1d = 1.0 if self.learning_rate_1d is None else self.learning_rate_1d / self.learning_rate
        decay_1d = self.weight_decay if self.weight_decay_1d is None else self.weight_decay_1d

        def rule(label: Label, is_decayed: bool) -> Rule:
            if label == "adamw":
                return Rule("adamw", factor_1d, decay_1d)
            decay = self.weight_decay if is_decayed else 0.0
            return Rule("adamw", factor_1d, decay) if label == "adamw-embeddings" else Rule(label, 1.0, decay)

        return jax.tree.map(rule, labels, decayed)

    def build(self, num_train_steps: int) -> optax.GradientTransformationExtraArgs:
        schedule = self.lr_scheduler(num_train_steps)
        if isinstance(self.lr_schedule, LrSchedule):
            _check_schedule(schedule, num_train_steps)
        rates: dict[str, Callable] = {"learning_rate": schedule}
        if self.learning_rate_1d is not None:
            ratio = self.learning_rate_1d / self.learning_rate
            rates["learning_rate_1d"] = lambda count: schedule(count) * ratio
        # With optimize_1d the second rate is in no rule, so it is not injected and not logged.
        unlogged = ("learning_rate_1d",) if getattr(self, "optimize_1d", False) else ()

        def optimizer(learning_rate, learning_rate_1d=None):
            return self._optimizer(learning_rate, learning_rate_1d)

        return logged(optax.inject_hyperparams(optimizer, static_args=unlogged, hyperparam_dtype=jnp.float32)(**rates))

    def _values_with_ranges(self) -> dict[str, Any]:
        """All but what is null by default and still is, and schedules of γ, which have ranges of their own."""
        unset = {field.name for field in dataclasses.fields(self) if field.default is getattr(self, field.name) is None}
        if not isinstance(self.gamma, int | float):
            unset.add("gamma")
        return {name: value for name, value in vars(self).items() if name not in unset}

    def _optimizer(self, learning_rate: optax.ScalarOrSchedule, learning_rate_1d: optax.ScalarOrSchedule | None):
        arguments = {name: value for name, value in vars(self).items() if name in inspect.signature(self.function).parameters}
        arguments |= {"learning_rate": learning_rate, "learning_rate_1d": learning_rate_1d, "gamma": build_gamma(self.gamma)}
        optimizer = type(self).function(**arguments, weight_decay_mask=self.build_weight_decay_mask())
        skip = SkipStepConfig.from_bool_int_or_config(self.skip_bad_steps)
        return refuse_other_states(skip_outliers(skip, optimizer)) if skip else optimizer


@OptimizerConfig.register_subclass("mars-adamw")
@dataclass(frozen=True)
class MarsAdamWConfig(MarsOptimizerConfig):
    """MARS-AdamW (arXiv 2411.10438) as its authors' release computes it. The defaults are the published GPT-2 small run's."""

    beta2: float = 0.99
    amsgrad: bool = False
    """Divide by the running maximum of the second moment."""
    optimize_1d: bool = False
    """Give what is no matrix the matrices' rule too, with learning_rate and weight_decay."""

    function = staticmethod(mars_adamw)


@OptimizerConfig.register_subclass("mars-lion")
@dataclass(frozen=True)
class MarsLionConfig(MarsOptimizerConfig):
    """MARS-Lion (arXiv 2411.10438) as its authors' release computes it: the sign of the corrected gradients' momentum."""

    learning_rate: float = 6e-4
    learning_rate_1d: float | None = 3e-4
    optimize_1d: bool = False
    """Give what is no matrix the matrices' rule too, with learning_rate and weight_decay."""

    function = staticmethod(mars_lion)


@OptimizerConfig.register_subclass("mars-shampoo")
@dataclass(frozen=True)
class MarsShampooConfig(MarsOptimizerConfig):
    """MARS-Shampoo (arXiv 2411.10438) as its authors' release computes it: the momentum, orthogonalized."""

    learning_rate: float = 2e-2
    beta2: float = 0.99
    """Decay rate of the second moment of what is no matrix, under optimize_1d."""
    optimize_1d: bool = False
    """Give what is no matrix the update of mars-adamw, with learning_rate and weight_decay."""
    convolutions: str = "matrix"
    newton_schulz_steps: int = 5
    newton_schulz_dtype: str = "bfloat16"
    """Of the iteration; float32 agrees with the release to rounding."""
    newton_schulz_coefficients: str = "jordan"
    """jordan as published, or one of Levanter's sets: quintic, polar_express, aol (simple is jordan)."""
    newton_schulz_layout: str = "auto"
    """auto gives every device whole matrices, sent there and back once; replicated leaves it to the compiler. The result is the same."""
    embeddings: str = "matrix"
    """Rule of embedding tables and an untied head: matrix, or adamw at learning_rate_1d with weight_decay."""

    function = staticmethod(mars_shampoo)


@OptimizerConfig.register_subclass("mars-m")
@dataclass(frozen=True)
class MarsMConfig(MarsOptimizerConfig):
    """MARS-M (arXiv 2510.21800) as its authors' release computes it: Moonlight's Muon on the corrected gradients' momentum.

    As published, `weight_decay` goes to everything, unless `weight_decay_modules` or `default_weight_decay_mask` says otherwise.
    """

    learning_rate_1d: float | None = None
    """Peak learning rate of what is no matrix, and of embeddings under adamw; null for learning_rate."""
    weight_decay_1d: float | None = None
    """Decay of what is no matrix; null for weight_decay."""
    default_weight_decay_mask: bool | None = False
    convolutions: str = "matrix"
    newton_schulz_steps: int = 5
    newton_schulz_dtype: str = "bfloat16"
    """Of the iteration; float32 agrees with the release to rounding."""
    newton_schulz_coefficients: str = "jordan"
    """jordan as published, or one of Levanter's sets: quintic, polar_express, aol (simple is jordan)."""
    newton_schulz_layout: str = "auto"
    """auto gives every device whole matrices, sent there and back once; replicated leaves it to the compiler. The result is the same."""
    embeddings: str = "adamw"
    """Rule of embedding tables and an untied head: adamw, or matrix."""

    function = staticmethod(mars_m)


def _check_schedule(schedule: optax.Schedule, num_train_steps: int) -> None:
    """Schedules have fields of their own, which nothing checks: their values are looked at instead.

    Raises:
        ValueError: at the first step looked at whose rate is negative or not finite.
    """
    steps = jnp.linspace(0, num_train_steps - 1, 65).astype(jnp.int32)
    for step, rate in zip(steps.tolist(), jax.jit(jax.vmap(schedule))(steps).tolist(), strict=True):
        if not (math.isfinite(rate) and rate >= 0):
            raise ValueError(f"the learning rate at step {step} is {rate}; lr_schedule and its fields must keep it finite and at least 0")


def _is_fraction_or_steps(x: object) -> bool:
    return isinstance(x, int | float) and (0 <= x <= 1 or (x > 1 and math.isfinite(x) and x % 1 == 0))


_FRACTION_OR_STEPS = Range("a fraction between 0 and 1 or a whole number of steps", _is_fraction_or_steps)


def _is_whole_steps(x: object) -> bool:
    return isinstance(x, int | float) and not isinstance(x, bool) and math.isfinite(x) and x >= 1 and x % 1 == 0


def _are_steps(x: object, fraction: bool = False) -> bool:
    """None, one number of steps (or a fraction of them), or a list of numbers of steps."""
    if isinstance(x, list):
        return len(x) > 0 and all(map(_is_whole_steps, x))
    return x is None or _is_whole_steps(x) or (fraction and isinstance(x, int | float) and 0 < x < 1)


def _increase(x: object) -> bool:
    return not isinstance(x, list) or all(a < b for a, b in itertools.pairwise(x))


def _is_history(config: SkipStepConfig) -> bool:
    return _is_whole_steps(config.rolling_interval_length) and config.rolling_interval_length >= 2 and config.sigma_factor > 0


def _needs_no_fields(schedule: type[LrSchedule]) -> bool:
    return all(f.default is not dataclasses.MISSING or f.default_factory is not dataclasses.MISSING for f in dataclasses.fields(schedule))  # type: ignore[arg-type]


_SCHEDULES = sorted(name for name, schedule in LrSchedule.get_known_choices().items() if _needs_no_fields(schedule))
"""Those that a name alone chooses."""

_CONFIG_RANGES = {
    **RANGES,
    # The other learning rates are set by their ratio to this one.
    "learning_rate": POSITIVE,
    "min_lr_ratio": NOT_NEGATIVE,
    "warmup": _FRACTION_OR_STEPS,
    "rewarmup": _FRACTION_OR_STEPS,
    "decay": Range(f"{_FRACTION_OR_STEPS.allowed}, or null for all steps after warm-up", lambda x: x is None or _is_fraction_or_steps(x)),
    "cooldown": Range(f"{_FRACTION_OR_STEPS.allowed}, or null for none", lambda x: x is None or _is_fraction_or_steps(x)),
    "cycle_length": Range(
        "a fraction of all steps, a number or a list of numbers of steps, or null", lambda x: _are_steps(x, fraction=True)
    ),
    "cycles": Range(
        "a number of cycles, an increasing list of the steps at which they end, or null", lambda x: _are_steps(x) and _increase(x)
    ),
    "haps": Range(
        "an increasing list of the steps at which cycles end, or null",
        lambda x: x is None or (isinstance(x, list) and _are_steps(x) and _increase(x)),
    ),
    "skip_bad_steps": Range(
        "true, false, the number of steps to look back on (at least 2), or {rolling_interval_length, sigma_factor} above 0",
        lambda x: isinstance(x, bool) or (isinstance(x, int) and x >= 2) or (isinstance(x, SkipStepConfig) and _is_history(x)),
    ),
    "lr_schedule": Range(
        f"one of {', '.join(_SCHEDULES)}, or one with fields",
        lambda x: isinstance(x, LrSchedule) or x in _SCHEDULES,
    ),
}
