"""Batch normalization: the statistics it uses, those of a population, and what a batch is on eight devices."""

import json

import haliax as hax
import jax.numpy as jnp
import numpy as np
from devices import run_on_eight
from haliax import Axis

from levanter_mars.vision.batch_norm import BatchNorm, Statistics, measured, population, with_statistics

CHANNELS = Axis("channels", 5)
AXES = ("batch", "height", "width", "channels")


def pixels(seed: int, n: int = 6) -> np.ndarray:
    """A batch whose mean is large beside its deviations, as that of images is before normalization."""
    rng = np.random.default_rng(seed)
    return (rng.normal(size=(n, 4, 3, 5)) * [0.1, 1, 2, 3, 4] + [100, 5, 0, -5, 9] + rng.normal(size=(n, 1, 1, 1))).astype(np.float32)


def norm() -> BatchNorm:
    weight, bias = (hax.named(jnp.arange(5, dtype=jnp.float32) + first, CHANNELS) for first in (1, -2))
    return BatchNorm(CHANNELS, weight, bias, epsilon=1e-3, over="global")


def expected(x: np.ndarray, mean: np.ndarray, variance: np.ndarray) -> np.ndarray:
    return np.arange(1, 6) * (x - mean) / np.sqrt(variance + 1e-3) + np.arange(-2, 3)


def moments(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    x = x.astype(np.float64)
    return x.mean((0, 1, 2)), x.var((0, 1, 2))


def test_training_normalizes_by_the_batch():
    x = pixels(0)
    y, used = norm()(hax.named(jnp.asarray(x), AXES))
    np.testing.assert_allclose(y.rearrange(AXES).array, expected(x, *moments(x)), atol=2e-4)
    for found, value in zip(measured(used)[0], moments(x), strict=True):
        np.testing.assert_allclose(found.array, value, rtol=1e-4, atol=1e-5)


def test_evaluation_normalizes_by_what_it_is_given():
    x, others = pixels(0), moments(pixels(1))
    statistics = Statistics(*(hax.named(jnp.asarray(value, jnp.float32), CHANNELS) for value in others))
    y, used = with_statistics(norm(), [statistics])(hax.named(jnp.asarray(x), AXES))
    np.testing.assert_allclose(y.rearrange(AXES).array, expected(x, *others), atol=2e-4)
    assert measured(used)[0] is statistics


def test_the_population_of_batches_is_that_of_their_union():
    batches = [pixels(seed) for seed in range(4)]
    (found,) = population([measured(norm()(hax.named(jnp.asarray(x), AXES))[1]) for x in batches])
    for value, wanted in zip(found, moments(np.concatenate(batches)), strict=True):
        np.testing.assert_allclose(value.array, wanted, rtol=1e-4, atol=1e-5)


def test_bfloat16_has_statistics_in_float32():
    x = hax.named(jnp.asarray(pixels(0), jnp.bfloat16), AXES)
    y, used = norm()(x)
    assert y.dtype == jnp.bfloat16 and {s.dtype for s in measured(used)[0]} == {jnp.dtype("float32")}
    np.testing.assert_allclose(measured(used)[0].mean.array, moments(np.asarray(x.array, np.float32))[0], rtol=1e-4, atol=1e-5)


ON_EIGHT = """
import dataclasses, json
import haliax as hax, jax, numpy as np
from jax.sharding import Mesh
from haliax.partitioning import named_jit
from vision.test_batch_norm import AXES, measured, norm, pixels

found = {}
mapping = {"batch": "data"}
with hax.partitioning.set_mesh(Mesh(np.array(jax.devices()), ("data",))), hax.axis_mapping(mapping):
    x = hax.shard(hax.named(jax.numpy.asarray(pixels(0, n=16)), AXES), mapping)
    for over in ("global", "per_device"):
        y, used = named_jit(lambda x: dataclasses.replace(norm(), over=over)(x), axis_resources=mapping)(x)
        compiled = jax.jit(lambda x: dataclasses.replace(norm(), over=over)(hax.named(x, AXES))[0].array).lower(x.array).compile()
        found[over] = {
            "y": np.asarray(y.rearrange(AXES).array).tolist(),
            "statistics": [np.asarray(s.array).tolist() for s in measured(used)[0]],
            "all-reduces": compiled.as_text().count(" all-reduce("),
        }
print(json.dumps(found))
"""


def test_a_batch_on_eight_devices_is_all_of_it_or_a_devices_part():
    found = json.loads(run_on_eight(ON_EIGHT))
    x = pixels(0, n=16)
    np.testing.assert_allclose(found["global"]["y"], expected(x, *moments(x)), atol=2e-4)
    parts = [expected(part, *moments(part)) for part in np.split(x, 8)]
    np.testing.assert_allclose(found["per_device"]["y"], np.concatenate(parts), atol=2e-4)
    assert np.abs(np.concatenate(parts) - expected(x, *moments(x))).max() > 0.1
    # Of all parts together, whatever training normalizes by.
    for over in found.values():
        for value, wanted in zip(over["statistics"], moments(x), strict=True):
            np.testing.assert_allclose(value, wanted, rtol=1e-4, atol=1e-5)
    assert found["global"]["all-reduces"] > 0
    assert found["per_device"]["all-reduces"] == 0
