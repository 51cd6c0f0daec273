"""Every whole YAML in config/ parses as in Levanter's own command, builds a model and an optimizer, and has no key that does nothing."""

import copy
from pathlib import Path

import draccus
import equinox as eqx
import haliax as hax
import jax
import jax.random as jrandom
import levanter.config
import pytest
import yaml
from draccus.utils import DraccusException
from levanter.main.train_lm import TrainLmConfig
from levanter.optim.config import OptimizerConfig
from levanter.trainer_state import init_optimizer_for_trainables, trainables_only

CONFIGS = [
    path
    for path in sorted((Path(__file__).parents[1] / "config").glob("*.yaml"))
    if not path.name.startswith("compare_")  # of another command; tests/compare/test_study.py reads them
]


def parse(path: Path) -> TrainLmConfig:
    def main(config: TrainLmConfig) -> TrainLmConfig:
        return config

    return levanter.config.main(main, args=["--config", str(path)])()


def paths(node, prefix=()):
    """The position of every value in a YAML's mappings; a list counts as one value."""
    if isinstance(node, dict) and node:
        for key, value in node.items():
            yield from paths(value, (*prefix, key))
    else:
        yield prefix


def changed(value):
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value / 2 if isinstance(value, float) else value + 1
    if isinstance(value, list):
        return [*value, "another"]
    return f"{value}0"  # a number too: YAML takes 6e-3 for a string


def test_there_are_configs():
    assert CONFIGS


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_builds_its_model_and_optimizer(path):
    config = parse(path)
    # The tokenizer may be on the hub, or not made yet. 50,257 is GPT-2's.
    model = eqx.filter_eval_shape(config.model.build, hax.Axis("vocab", 50_257), key=jrandom.PRNGKey(0))
    trainable = trainables_only(model, True)
    optimizer = config.optimizer.build(config.trainer.num_train_steps)
    state = eqx.filter_eval_shape(init_optimizer_for_trainables, optimizer, trainable)
    parameters = sum(x.size for x in jax.tree.leaves(trainable))
    assert sum(x.size for x in jax.tree.leaves(state)) >= 2 * parameters


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_every_key_counts(path):
    document = yaml.safe_load(path.read_text())
    config = draccus.decode(TrainLmConfig, document)
    assert config == parse(path)
    ignored = []
    for *parents, key in paths(document):
        other = copy.deepcopy(document)
        node = other
        for parent in parents:
            node = node[parent]
        node[key] = changed(node[key])
        try:
            if draccus.decode(TrainLmConfig, other) == config:
                ignored.append(".".join([*parents, key]))
        except (DraccusException, ValueError):
            continue  # a value that is refused was read
    assert ignored == []


# What another value of a key could be, where adding to it makes none.
ANOTHER = {"lr_schedule": "linear"}


def inert_keys(path: Path) -> list[str]:
    """The optimizer's keys that could as well have another value: the update for the config's own model compiles from the same program."""
    document = yaml.safe_load(path.read_text())
    config = parse(path)
    model = eqx.filter_eval_shape(config.model.build, hax.Axis("vocab", 1_000), key=jrandom.PRNGKey(0))
    trainable = trainables_only(model, True)

    def program(optimizer: dict) -> str:
        built = draccus.decode(OptimizerConfig, optimizer).build(config.trainer.num_train_steps)
        state = eqx.filter_eval_shape(init_optimizer_for_trainables, built, trainable)
        return jax.jit(built.update).lower(trainable, state, trainable).as_text()

    given = document["optimizer"]
    expected = program(given)
    others = {key: {**given, key: ANOTHER.get(key, changed(value))} for key, value in given.items() if key != "type"}
    return [key for key, other in others.items() if program(other) == expected]


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_every_key_of_the_optimizer_changes_what_it_does(path):
    assert inert_keys(path) == []


def test_a_key_that_does_nothing_is_found(tmp_path):
    """With optimize_1d there is no second rate, and without cycles nothing warms up again."""
    document = yaml.safe_load((CONFIGS[0].parent / "mars_gpt2_nano.yaml").read_text())
    document["optimizer"] |= {"optimize_1d": True, "rewarmup": 0.3}
    (tmp_path / "inert.yaml").write_text(yaml.safe_dump(document))
    assert inert_keys(tmp_path / "inert.yaml") == ["learning_rate_1d", "rewarmup"]
