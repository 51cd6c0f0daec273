"""Orthogonalized filters under FSDP: Levanter's trainer takes the same steps on eight devices that share the parameters as on one."""

import functools
import json

import jax
import jax.random as jrandom
import jmp
import numpy as np
import pytest
from devices import run_on_eight
from haliax import Axis
from levanter.tracker import NoopConfig
from levanter.trainer import Trainer, TrainerConfig
from levanter.utils.mesh import MeshConfig

from levanter_mars import MarsMConfig, MarsShampooConfig
from levanter_mars.vision.classification import training_loss
from levanter_mars.vision.image_data import DigitsConfig
from levanter_mars.vision.images import TrainingImages
from levanter_mars.vision.resnet import ResNetConfig

STEPS = 4
TYPES = {"mars-m": MarsMConfig, "mars-shampoo": MarsShampooConfig}
RATES = {"mars-m": 3e-3, "mars-shampoo": 2e-2}


def trained(name: str) -> dict:
    """A ResNet after some steps on the devices that there are: losses, weights, and which part of weights and momenta a device holds."""
    optimizer = TYPES[name](learning_rate=RATES[name], warmup=0, lr_schedule="constant", newton_schulz_dtype="float32")
    assert optimizer.convolutions == "matrix"
    config = TrainerConfig(
        train_batch_size=16,
        num_train_steps=STEPS,
        mesh=MeshConfig(param_mapping={"channels": "data"}),
        require_accelerator=False,
        tracker=NoopConfig(),
        mp=jmp.get_policy("f32"),
        id="resnet",
    )
    data = DigitsConfig()
    splits = data.load()
    loss = functools.partial(training_loss, normalization=data.normalization(splits.train))
    model = functools.partial(ResNetConfig(width=8, blocks=[1, 1]).build, Axis("color", 1), Axis("classes", 10), key=jrandom.PRNGKey(0))
    with Trainer(config, optimizer.build(STEPS), loss, add_default_hooks=False) as trainer:
        state = trainer.initial_state(jrandom.PRNGKey(1), model_init=model)
        batches = trainer.data_loader(TrainingImages(splits.train, data.augmentation, seed=0)).iter_from_step(0)
        losses = []
        for _ in range(STEPS):
            info = trainer.train_step(state, next(batches))
            state = info.state
            losses.append(float(info.loss))
        batches.close()
        filters = [x for x in jax.tree.leaves((state.model, state.opt_state)) if isinstance(x, jax.Array) and x.ndim == 4]
        held = sum(x.addressable_shards[0].data.size for x in filters) / sum(x.size for x in filters)
        weights = [np.asarray(x).tolist() for x in jax.tree.leaves(state.model)]
    return {"losses": losses, "weights": weights, "held": held}


@pytest.fixture(scope="module")
def on_eight() -> dict[str, dict]:
    return json.loads(
        run_on_eight(
            "import json; from vision.test_sharded_resnet import TYPES, trained; print(json.dumps({x: trained(x) for x in TYPES}))"
        )
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", TYPES)
def test_orthogonalized_filters_that_eight_devices_share_are_those_of_one(name, on_eight):
    one, eight = trained(name), on_eight[name]
    assert (one["held"], eight["held"]) == (1, 1 / 8)
    np.testing.assert_allclose(eight["losses"], one["losses"], atol=1e-4, rtol=0)
    for a, b in zip(one["weights"], eight["weights"], strict=True):
        np.testing.assert_allclose(b, a, atol=1e-4, rtol=0)
