"""A learning rate that falls at milestones, as Levanter's `lr_schedule: {type: milestones, …}`. Importing this module registers it."""

import itertools
import math
from dataclasses import dataclass, field

import optax
from draccus.utils import ParsingError
from levanter.optim.config import LrSchedule, LrScheduleContext


@LrSchedule.register_subclass("milestones")
@dataclass(frozen=True)
class MilestonesLrSchedule(LrSchedule):
    """Multiplies the learning rate by `factor` after every milestone, counted in epochs of which the decay of the schedule has `epochs`.

    With `warmup: 0` and `decay: null` that is the whole run: milestone m of E epochs is after step m/E · `num_train_steps`.
    `min_lr_ratio` has no part in it.
    """

    epochs: float = 200
    milestones: list[float] = field(default_factory=lambda: [100, 150])
    factor: float = 0.1

    def __post_init__(self):
        if not 0 < self.epochs < math.inf:
            raise ParsingError(f"lr_schedule.epochs is {self.epochs}; it must be a finite number above 0")
        increase = all(a < b for a, b in itertools.pairwise(self.milestones))
        if not self.milestones or not increase or not 0 < self.milestones[0] <= self.milestones[-1] < self.epochs:
            raise ParsingError(
                f"lr_schedule.milestones is {self.milestones}; it must hold increasing numbers above 0 and below {self.epochs}"
            )
        if not 0 <= self.factor < math.inf:
            raise ParsingError(f"lr_schedule.factor is {self.factor}; it must be a finite number of at least 0")

    def build(self, ctx: LrScheduleContext) -> optax.Schedule:
        steps = [round(milestone / self.epochs * ctx.decay_steps) for milestone in self.milestones]
        # Milestones may fall on one step in a short run.
        factors = {step: self.factor ** steps.count(step) for step in steps}
        return optax.piecewise_constant_schedule(ctx.learning_rate, factors)
