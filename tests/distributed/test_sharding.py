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

from levanter_mars import MarsAdamWConfig

assert jax.device_count() == 8
params = gaussian_like(trainables_only(shapes(GPT2), True), seed=0)
gradients = gaussian_like(params, seed=1)
optimizer = MarsAdamWConfig(learning_rate=0.1, warmup=0).build(10)


def step(params, gradients):
    state = optimizer.init(params)
    for _ in range(2):
        updates, state = optimizer.update(gradients, state, params)
    return updates, state


expected = jax.jit(step)(params, gradients)[0]

mesh = jax.sharding.Mesh(np.array(jax.devices()), ("data",))
with mesh, hax.axis_mapping({"embed": "data"}):
    params, gradients = (jax.device_put(x, hax.partitioning.infer_resource_partitions(x)) for x in (params, gradients))
    updates, state = jax.jit(step)(params, gradients)


def shape_and_shard(x):
    return x.shape, x.sharding.shard_shape(x.shape)


shards = jax.tree.map(shape_and_shard, params)
assert jax.tree.map(shape_and_shard, updates) == shards
c_fc = params.transformer.blocks.stacked.mlp.c_fc.weight.array
assert c_fc.sharding.shard_shape(c_fc.shape) == tuple(1 if n == 8 else n for n in c_fc.shape)

copies = {shape_and_shard(x) for x in jax.tree.leaves(params) if x.ndim > 0}
for x in jax.tree.leaves(state):
    if x.size >= 64:  # the momenta and the stored gradient; not counts, rates and norms
        assert shape_and_shard(x) in copies, shape_and_shard(x)

jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), updates, expected)
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
