"""What a study's YAML may say, and what the studies in config/ say."""

import copy
from pathlib import Path

import draccus
import pytest
import yaml
from draccus.utils import ParsingError

from levanter_mars.compare.planning import make_plan
from levanter_mars.compare.study import StudyConfig

CONFIGS = sorted((Path(__file__).parents[2] / "config").glob("compare_*.yaml"))
DOCUMENT = {
    "results": "results",
    "baseline": "adamw",
    "optimizers": {"adamw": {"type": "adam"}, "mars": {"type": "mars-adamw"}},
    "train": {"trainer": {"tracker": {"type": "json_logger"}}},
}


def study(*path: str, value) -> StudyConfig:
    """DOCUMENT with one value changed."""
    document = copy.deepcopy(DOCUMENT)
    node = document
    for key in path[:-1]:
        node = node.setdefault(key, {})
    node[path[-1]] = value
    return draccus.decode(StudyConfig, document)


@pytest.mark.parametrize(
    ("path", "value", "sentence"),
    [
        (["baseline"], "sgd", "baseline is sgd; it must be one of adamw, mars"),
        (["learning_rate_factors"], [1, 0.5], r"learning_rate_factors is \[1.0, 0.5\]; it must be at least two increasing numbers above 0"),
        (["learning_rate_factors"], [1], "learning_rate_factors"),
        (["seeds"], [1, 1], r"seeds is \[1, 1\]; it must be at least one whole number, none twice"),
        (["seeds_of_grid"], 0, "seeds_of_grid is 0; it must be from 1 to the number of seeds, 3"),
        (["seeds_of_grid"], 4, "seeds_of_grid is 4"),
        (["max_extensions"], -1, "max_extensions is -1; it must be at least 0"),
        (["schedule", "learning_rate"], 1, "schedule.learning_rate is 1; it may have cooldown, "),
        (["optimizers", "mars", "warmup"], 5, "optimizers.mars.warmup is 5; the schedule is the same for all"),
        (["optimizers", "mars", "gamma"], -1, "optimizers.mars: .*gamma"),
        (["optimizers", "mars"], {}, "optimizers.mars has no type"),
        (["optimizers", "a/b"], {"type": "adam"}, "optimizers has the name 'a/b'; it must be letters"),
        (["train", "optimizer"], {"type": "adam"}, "train.optimizer is .*; the study sets it"),
        (["train", "trainer", "seed"], 1, "train.trainer.seed is 1; the study sets it"),
        (["train", "trainer", "tracker"], {"type": "noop"}, "train.trainer.tracker.type must be json_logger"),
        (["existing"], [{"path": "nowhere", "optimizer": "x", "learning_rate": 1}], "existing: nowhere does not exist"),
        (["existing"], [{"path": ".", "optimizer": "mars", "learning_rate": 1}], "existing: . is named mars, as an optimizer of the study"),
        (
            ["existing"],
            [{"path": ".", "optimizer": "x", "learning_rate": 1}] * 2,
            "existing: x has two runs with learning_rate 1 and seed 0",
        ),
        (
            ["existing"],
            [{"path": ".", "optimizer": "x", "learning_rate": rate, "seed": rate} for rate in (1, 2)],
            "existing: no seed is common to all learning rates of x",
        ),
        (["standard_library_vocab"], 300, "train.data.tokenizer is None; with standard_library_vocab it must be CORPUS/tokenizer"),
    ],
)
def test_a_value_that_makes_no_study(path, value, sentence):
    with pytest.raises(ParsingError, match=sentence):
        study(*path, value=value)


def test_there_are_configs():
    assert CONFIGS


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_config(path):
    config = draccus.decode(StudyConfig, yaml.safe_load(path.read_text()))
    runs = make_plan(config, []).runs
    assert len(runs) == len(config.optimizers) * len(config.grid_seeds) * len(config.learning_rate_factors)
    # Optimizers get the same schedule, and a rate in the grid's middle that is their own.
    for run in runs:
        assert {key: run.document["optimizer"][key] for key in config.schedule} == config.schedule
    assert {run.learning_rate for run in runs if run.optimizer == "adamw"} == {3e-3, 6e-3, 1.2e-2}


def test_the_ablation_is_in_the_regime_of_the_study():
    folder = CONFIGS[0].parent
    study, ablation = (yaml.safe_load((folder / name).read_text()) for name in ("compare_nano.yaml", "compare_nano_ablation.yaml"))
    differ = {key for key in study.keys() | ablation.keys() if study.get(key) != ablation.get(key)}
    assert differ == {"results", "optimizers"}
    for name in ("adamw", "mars-adamw"):
        assert ablation["optimizers"][name] == study["optimizers"][name]
