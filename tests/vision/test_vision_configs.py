"""Every YAML of config/vision parses as train_vision reads it and builds; the twins of a data set differ in the optimizer alone."""

from pathlib import Path

import equinox as eqx
import jax
import jax.random as jrandom
import levanter.config
import pytest
import yaml
from haliax import Axis

from levanter_mars.main.train_vision import TrainVisionConfig

FOLDER = Path(__file__).parents[2] / "config" / "vision"
TWINS = ("mars", "adam", "muon")
NAMES = {f"{twin}_cifar{classes}" for twin in TWINS for classes in (10, 100)} | {"digits"}


def parse(name: str) -> TrainVisionConfig:
    def main(config: TrainVisionConfig) -> TrainVisionConfig:
        return config

    return levanter.config.main(main, args=["--config", str(FOLDER / f"{name}.yaml")])()


def test_the_configs():
    assert {path.stem for path in FOLDER.glob("*.yaml")} == NAMES


@pytest.mark.parametrize("name", sorted(NAMES))
def test_builds_its_model_and_optimizer(name):
    config = parse(name)
    document = yaml.safe_load((FOLDER / f"{name}.yaml").read_text())
    for block, given in document.items():
        if isinstance(given, dict):
            assert set(given) - {"type"} <= set(vars(getattr(config, block))), block
    colors, classes = (1, 10) if name == "digits" else (3, config.data.classes)
    model = eqx.filter_eval_shape(config.model.build, Axis("color", colors), Axis("classes", classes), key=jrandom.PRNGKey(0))
    params = eqx.filter(model, lambda x: isinstance(x, jax.ShapeDtypeStruct))
    state = eqx.filter_eval_shape(config.optimizer.build(config.trainer.num_train_steps).init, params)
    assert len(jax.tree.leaves(state)) > len(jax.tree.leaves(params))


@pytest.mark.parametrize("classes", [10, 100])
def test_twins_differ_in_the_optimizer_alone(classes):
    documents = [yaml.safe_load((FOLDER / f"{twin}_cifar{classes}.yaml").read_text()) for twin in TWINS]
    optimizers = [document.pop("optimizer") for document in documents]
    assert documents[0] == documents[1] == documents[2]
    assert documents[0]["trainer"]["num_train_steps"] * documents[0]["trainer"]["train_batch_size"] == 200 * 50_000
    for optimizer in optimizers:
        assert optimizer["lr_schedule"] == {"type": "milestones", "epochs": 200, "milestones": [100, 150], "factor": 0.1}
        assert optimizer["warmup"] == 0 and optimizer["max_grad_norm"] is None


@pytest.mark.parametrize("twin", ["mars", "muon"])
def test_the_head_alone_follows_mars_or_muon_as_published(twin):
    config = parse(f"{twin}_cifar10")
    model = eqx.filter_eval_shape(config.model.build, Axis("color", 3), Axis("classes", 10), key=jrandom.PRNGKey(0))
    rules = config.optimizer.rules(eqx.filter(model, lambda x: isinstance(x, jax.ShapeDtypeStruct)))
    assert rules.head.weight.name == config.optimizer.get_choice_name(type(config.optimizer))
    others = jax.tree.leaves(eqx.tree_at(lambda m: m.head.weight, rules, None), is_leaf=lambda x: hasattr(x, "learning_rate_factor"))
    assert len(others) == 61 and {rule.name for rule in others} == {"adamw"}
