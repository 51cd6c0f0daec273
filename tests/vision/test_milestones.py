"""The learning rate that falls at milestones, in the optimizers' own schedules."""

import re

import pytest
from draccus.utils import ParsingError
from levanter.optim.config import AdamConfig

from levanter_mars import MarsAdamWConfig
from levanter_mars.vision.milestones import MilestonesLrSchedule


@pytest.mark.parametrize("config", [AdamConfig, MarsAdamWConfig])
def test_two_hundred_epochs(config):
    schedule = config(learning_rate=3e-3, warmup=0, lr_schedule=MilestonesLrSchedule()).lr_scheduler(1000)
    rates = {step: float(schedule(step)) for step in (0, 499, 500, 749, 750, 999)}
    assert rates == pytest.approx({0: 3e-3, 499: 3e-3, 500: 3e-4, 749: 3e-4, 750: 3e-5, 999: 3e-5}, rel=1e-5)


def test_milestones_of_one_step_multiply():
    schedule = AdamConfig(learning_rate=1.0, warmup=0, lr_schedule=MilestonesLrSchedule(milestones=[100, 101], factor=0.5))
    rates = [float(schedule.lr_scheduler(10)(step)) for step in (4, 5)]
    assert rates == pytest.approx([1.0, 0.25])


@pytest.mark.parametrize(
    "fields, sentence",
    [
        ({"epochs": 0}, "lr_schedule.epochs is 0; it must be a finite number above 0"),
        ({"milestones": [150, 100]}, "lr_schedule.milestones is [150, 100]; it must hold increasing numbers above 0 and below 200"),
        ({"milestones": [200]}, "lr_schedule.milestones is [200]; it must hold increasing numbers above 0 and below 200"),
        ({"factor": -0.1}, "lr_schedule.factor is -0.1; it must be a finite number of at least 0"),
    ],
)
def test_values_out_of_range(fields, sentence):
    with pytest.raises(ParsingError, match=re.escape(sentence)):
        MilestonesLrSchedule(**fields)
