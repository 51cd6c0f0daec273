"""What `optimizer:` may say in a Levanter YAML. Importing this module registers the types; importing it twice is harmless."""

import math
from dataclasses import dataclass
from typing import NamedTuple, cast

import jax
import jax.numpy as jnp
import optax
from draccus.utils import ParsingError
from jaxtyping import PyTree
from levanter.optim.config import LrSchedule, OptimizerConfig

from levanter_mars.correction import Clip
from levanter_mars.optimizers import assign_rules, mars_adamw
from levanter_mars.ranges import NOT_NEGATIVE, POSITIVE, RANGES, Range, check_ranges


class Rule(NamedTuple):
    """What one parameter gets from an optimizer."""

    name: str
    learning_rate_factor: float
    """Its learning rate over the schedule's."""
    weight_decay: float


@OptimizerConfig.register_subclass("mars-adamw")
@dataclass(frozen=True)
class MarsAdamWConfig(OptimizerConfig):
    """MARS-AdamW (arXiv 2411.10438) as its authors' release computes it. The defaults are the published GPT-2 small run's.

    Matrices follow MARS, everything else follows AdamW with the `_1d` values. `weight_decay` goes to the matrices that
    `weight_decay_modules` or Levanter's default picks (no embeddings, no norms); `weight_decay_1d` goes to everything else.
    """

    learning_rate: float = 6e-3
    weight_decay: float = 0.01
    beta1: float = 0.95
    beta2: float = 0.99
    epsilon: float = 1e-8
    gamma: float = 0.025
    """Scale of the gradient correction; 0 turns it off."""
    amsgrad: bool = False
    """Divide by the running maximum of the second moment."""
    optimize_1d: bool = False
    """Give what is no matrix the matrices' rule too, with learning_rate and weight_decay."""
    learning_rate_1d: float = 3e-3
    """Peak learning rate of what is no matrix; it follows the shape of the main schedule."""
    beta1_1d: float = 0.9
    beta2_1d: float = 0.95
    weight_decay_1d: float = 0.1
    """Decay of what is no matrix, norms and biases included."""
    max_grad_norm: float | None = 1.0
    """Clip the raw gradient to this global norm before anything else; null for off."""
    correction_clip: str | None = "tensor"
    """Clip the corrected gradient of each tensor by its own norm (tensor), of all matrices together (global), or not (null)."""
    correction_clip_norm: float = 1.0

    def __post_init__(self):
        _check(self, "mars-adamw")

    def rules(self, params: PyTree) -> PyTree[Rule]:
        """What every parameter gets, in a tree that is a prefix of `params` (a model, or its shapes)."""
        mask = self.build_weight_decay_mask()
        labels = assign_rules(params, optimize_1d=self.optimize_1d)
        decayed = jax.tree.map(lambda _: True, labels) if mask is None else mask(params)

        def rule(label: str, is_decayed: bool) -> Rule:
            if label == "mars":
                return Rule("mars-adamw", 1.0, self.weight_decay if is_decayed else 0.0)
            return Rule("adamw", self.learning_rate_1d / self.learning_rate, self.weight_decay_1d)

        return jax.tree.map(rule, labels, decayed)

    def build(self, num_train_steps: int) -> optax.GradientTransformationExtraArgs:
        schedule = self.lr_scheduler(num_train_steps)

        def optimizer(learning_rate, learning_rate_1d):
            return mars_adamw(
                learning_rate,
                weight_decay=self.weight_decay,
                beta1=self.beta1,
                beta2=self.beta2,
                epsilon=self.epsilon,
                gamma=self.gamma,
                amsgrad=self.amsgrad,
                optimize_1d=self.optimize_1d,
                learning_rate_1d=learning_rate_1d,
                beta1_1d=self.beta1_1d,
                beta2_1d=self.beta2_1d,
                weight_decay_1d=self.weight_decay_1d,
                max_grad_norm=self.max_grad_norm,
                correction_clip=cast(Clip | None, self.correction_clip),
                correction_clip_norm=self.correction_clip_norm,
                weight_decay_mask=self.build_weight_decay_mask(),
            )

        # With optimize_1d the second rate is in no rule, so it is not injected and not logged.
        inject = optax.inject_hyperparams(
            optimizer, static_args=("learning_rate_1d",) if self.optimize_1d else (), hyperparam_dtype=jnp.float32
        )
        return inject(learning_rate=schedule, learning_rate_1d=lambda count: schedule(count) * (self.learning_rate_1d / self.learning_rate))


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
    "cycles": Range("a number of cycles, a list of the steps at which they end, or null", _are_steps),
    "haps": Range("a list of the steps at which cycles end, or null", lambda x: x is None or (isinstance(x, list) and _are_steps(x))),
    "lr_schedule": Range(
        f"one of {', '.join(sorted(LrSchedule.get_known_choices()))}",
        lambda x: isinstance(x, LrSchedule) or x in LrSchedule.get_known_choices(),
    ),
}


def _check(config: OptimizerConfig, type_name: str) -> None:
    """Checks the fields while the YAML is parsed, before data or devices.

    Raises:
        ParsingError: draccus replaces a ValueError raised here by one that does not say what is wrong, but lets its own through.
    """
    try:
        check_ranges(vars(config), _CONFIG_RANGES)
    except ValueError as error:
        raise ParsingError(f"{type_name}: {error}") from None
