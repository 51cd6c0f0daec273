"""On a mesh of eight devices updates and state lie where their parameters lie, and are what one device computes."""

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow

PROGRAM = """
import equinox as eqx
import haliax as hax
import jax
import numpy as np
import optax
from levanter.trainer_state import trainables_only
from models import GPT2, gaussian_like, shapes

from levanter_mars import MarsAdamWConfig, MarsLionConfig, MarsMConfig, MarsShampooConfig

assert jax.device_count() == 8
COMMON = {"learning_rate": 0.1, "learning_rate_1d": 0.05, "warmup": 0, "diagnostics_every": 1}
FLOAT32 = {"newton_schulz_dtype": "float32"}
OPTIMIZERS = {
    "mars-adamw": MarsAdamWConfig(**COMMON),
    "mars-adamw exact": MarsAdamWConfig(**COMMON, exact=True),
    "mars-lion lean": MarsLionConfig(**COMMON, correction_clip=None, cautious=True),
    "mars-shampoo": MarsShampooConfig(**COMMON, **FLOAT32, momentum_dtype="bfloat16", last_gradient_dtype="bfloat16"),
    "mars-m lean": MarsMConfig(**COMMON, **FLOAT32, correction_clip=None),
}
host_params = gaussian_like(trainables_only(shapes(GPT2), True), seed=0)
host_gradients = gaussian_like(host_params, seed=1)


def step(optimizer, params, gradients):
    def obj_fn(params):
        return sum(jax.numpy.sum(g * x) for g, x in zip(jax.tree.leaves(gradients), jax.tree.leaves(params)))

    state = optimizer.init(params)
    for _ in range(2):
        updates, state = optimizer.update(gradients, state, params, obj_fn=obj_fn)
    return updates, state


def shape_and_shard(x):
    return x.shape, x.sharding.shard_shape(x.shape)


mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
for name, config in OPTIMIZERS.items():
    optimizer = config.build(10)
    expected = jax.jit(lambda p, g: step(optimizer, p, g))(host_params, host_gradients)[0]
    with jax.set_mesh(mesh), hax.axis_mapping({"embed": "data"}):
        params, gradients = (jax.device_put(x, hax.partitioning.infer_resource_partitions(x)) for x in (host_params, host_gradients))
        updates, state = jax.jit(lambda p, g: step(optimizer, p, g))(params, gradients)

    shards = jax.tree.map(shape_and_shard, params)
    assert jax.tree.map(shape_and_shard, updates) == shards, name
    c_fc = params.transformer.blocks.stacked.mlp.c_fc.weight.array
    assert c_fc.sharding.shard_shape(c_fc.shape) == tuple(1 if n == 8 else n for n in c_fc.shape)

    copies = {shape_and_shard(x) for x in jax.tree.leaves(params) if x.ndim > 0}
    for x in jax.tree.leaves(state):
        if x.size >= 64:  # the momenta and the stored gradient; not counts, rates and norms
            assert shape_and_shard(x) in copies, (name, shape_and_shard(x))

    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5, err_msg=name), updates, expected)
print("same on eight devices")
"""


def test_updates_stay_where_their_parameters_are():
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
        "PYTHONPATH": os.path.dirname(os.path.dirname(__file__)),
    }
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip().endswith("same on eight devices")
