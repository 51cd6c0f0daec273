"""What a classifier of images is trained on, and how it is evaluated."""

import functools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import haliax as hax
import haliax.nn as hnn
import jax
import jax.numpy as jnp
import jmp
import numpy as np
from haliax import NamedArray
from haliax.partitioning import ResourceMapping, named_jit
from jaxtyping import Float, PRNGKeyArray

from levanter_mars.vision.batch_norm import Statistics, measured, population, with_statistics
from levanter_mars.vision.images import Images, ImageSet, Normalization
from levanter_mars.vision.resnet import ResNet


def training_loss(
    model: ResNet, batch: Images, *, normalization: Normalization, key: PRNGKeyArray | None = None
) -> tuple[NamedArray | jax.Array, dict[str, NamedArray | jax.Array]]:
    """The mean cross-entropy of a batch, in nats, and its accuracy, as `levanter.trainer.Trainer` takes a loss."""
    del key
    logits, _ = model(_normalize(batch.pixels, normalization))
    logits = logits.astype(jnp.float32)
    Classes = model.Classes
    loss = hnn.cross_entropy_loss(logits, Classes, hnn.one_hot(batch.labels, Classes), reduction=hax.mean)
    accuracy = hax.mean(hax.equal(hax.argmax(logits, Classes), batch.labels).astype(jnp.float32))
    return loss, {"accuracy": accuracy}


class Evaluation(NamedTuple):
    """What a model says of a set of images, in the set's order."""

    log_probabilities: Float[np.ndarray, "n classes"]
    labels: np.ndarray

    @property
    def loss(self) -> float:
        """The mean cross-entropy, in nats."""
        return float(-self.log_probabilities[np.arange(len(self.labels)), self.labels].mean(dtype=np.float64))

    @property
    def predictions(self) -> np.ndarray:
        return self.log_probabilities.argmax(axis=1)

    @property
    def accuracy(self) -> float:
        return float((self.predictions == self.labels).mean())


class Evaluator:
    """Estimates the population statistics of a model from training batches, and evaluates it with them on other images.

    Args:
        training_batches: the batches, all of one size, always the same ones.
        test_batches: all of `test` in its order, in batches of which the last is filled up.
        mp: the policy by which the model computes; statistics are float32.
        compute_mapping, parameter_mapping: of the trainer.
    """

    def __init__(
        self,
        training_batches: Sequence[Images],
        test_batches: Iterable[Images],
        test: ImageSet,
        normalization: Normalization,
        *,
        mp: jmp.Policy,
        compute_mapping: ResourceMapping,
        parameter_mapping: ResourceMapping,
    ):
        self.training_batches, self.test_batches, self.test = training_batches, test_batches, test

        # Small, and the same on every device, so that every process can read all of it.
        replicated = functools.partial(named_jit, axis_resources=parameter_mapping, out_axis_resources={})

        @replicated
        def measure(model: ResNet, batch: Images) -> list[Statistics]:
            with hax.axis_mapping(compute_mapping):
                return measured(mp.cast_to_compute(model)(_normalize(batch.pixels, normalization))[1])

        @replicated
        def log_probabilities(model: ResNet, statistics: list[Statistics], batch: Images) -> NamedArray:
            with hax.axis_mapping(compute_mapping):
                logits, _ = with_statistics(mp.cast_to_compute(model), statistics)(_normalize(batch.pixels, normalization))
                Classes = model.Classes
                return hnn.log_softmax(logits.astype(jnp.float32), Classes).rearrange((..., Classes))

        self._measure, self._log_probabilities = measure, log_probabilities

    def statistics(self, model: ResNet) -> list[Statistics]:
        """The statistics of the population that the training batches are a sample of."""
        return population([self._measure(model, batch) for batch in self.training_batches])

    def __call__(self, model: ResNet) -> Evaluation:
        statistics = self.statistics(model)
        batches = [np.asarray(self._log_probabilities(model, statistics, batch).array) for batch in self.test_batches]
        return Evaluation(np.concatenate(batches)[: len(self.test)], self.test.labels)


def _normalize(pixels: NamedArray, normalization: Normalization) -> NamedArray:
    Color = pixels.resolve_axis("color")
    mean, std = (hax.named(jnp.asarray(x, jnp.float32), Color) for x in (normalization.mean, normalization.std))
    return (pixels.astype(jnp.float32) / normalization.scale - mean) / std
