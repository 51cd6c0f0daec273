"""What is counted in compiled programs, against figures worked out by hand."""

import json
from functools import partial

import jax
import jax.numpy as jnp
import pytest
from devices import run_on_eight

from levanter_mars.preflight import hlo
from levanter_mars.trips import expected_trips

SCOPE = "the_optimizer"


def program(f, *shapes) -> hlo.Program:
    return hlo.count(jax.jit(f).lower(*(jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes)).compile().as_text(), SCOPE)


def layers(x, weights, unroll=1):
    return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, weights, unroll=unroll)[0]


def test_a_collective_that_names_no_groups_is_of_all_devices():
    text = """HloModule jit_f, is_scheduled=true, num_partitions=8

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

ENTRY %main (x: f32[1024]) -> f32[1024] {
  %x = f32[1024]{0} parameter(0)
  ROOT %all-reduce = f32[1024]{0} all-reduce(%x), channel_id=1, replica_groups={}, use_global_device_ids=true, to_apply=%add
}
"""
    assert hlo.count(text, SCOPE).total("sent") == 2 * 4 * 1024 * 7 / 8


def test_a_loops_body_counts_as_often_as_it_runs():
    counted = program(layers, (16, 32), (5, 32, 32))
    assert counted.total("flops") == 5 * 2 * 16 * 32 * 32
    assert counted.notes == []


def test_loops_in_loops_multiply():
    def accumulated(xs, weights):
        return jax.lax.scan(lambda total, x: (total + layers(x, weights), None), jnp.zeros((16, 32)), xs)[0]

    assert program(accumulated, (3, 16, 32), (5, 32, 32)).total("flops") == 3 * 5 * 2 * 16 * 32 * 32


@pytest.mark.parametrize("unroll", [2, 3])
def test_unrolled_loops_count_the_same(unroll):
    assert program(partial(layers, unroll=unroll), (16, 32), (6, 32, 32)).total("flops") == 6 * 2 * 16 * 32 * 32


def test_a_loop_without_an_end_known_beforehand_is_named():
    def until_small(x, w):
        return jax.lax.while_loop(lambda x: jnp.sum(x) > 1, lambda x: x @ w, x)

    counted = program(until_small, (16, 16), (16, 16))
    assert counted.total("flops") == 2 * 16**3
    assert len(counted.notes) == 1
    assert "counted once" in counted.notes[0]


def test_a_loop_whose_end_depends_on_data_counts_as_often_as_its_source_expects():
    def some_layers(x, weights, n):
        with expected_trips(3):
            return jax.lax.fori_loop(0, n[0].astype(int), lambda i, x: layers(x, weights), x)

    counted = program(some_layers, (16, 32), (5, 32, 32), (1,))
    assert counted.total("flops") == 3 * 5 * 2 * 16 * 32 * 32
    assert counted.notes == []


def test_gradients_of_a_scan():
    counted = program(jax.grad(lambda w, x: layers(x, w).sum()), (5, 32, 32), (16, 32))
    # forward, and backward by weight and by input; the first layer's input needs no gradient, but a loop computes it
    assert counted.total("flops") == 3 * 5 * 2 * 16 * 32 * 32


def test_batched_products():
    assert program(lambda a, b: jnp.einsum("bhqd,bhkd->bhqk", a, b), (2, 3, 16, 8), (2, 3, 24, 8)).total("flops") == 2 * 2 * 3 * 16 * 24 * 8


@pytest.mark.parametrize(("stride", "padding"), [(1, "SAME"), (2, "VALID"), (2, "SAME")])
def test_convolutions_count_what_lies_within_the_image_as_xla_does(stride, padding):
    f = partial(jax.lax.conv_general_dilated, window_strides=(stride, stride), padding=padding)
    compiled = jax.jit(f).lower(jax.ShapeDtypeStruct((2, 3, 9, 9), jnp.float32), jax.ShapeDtypeStruct((5, 3, 3, 3), jnp.float32)).compile()
    assert hlo.count(compiled.as_text(), SCOPE).total("flops") == compiled.cost_analysis()["flops"] > 0


def test_the_optimizers_scope_is_told_apart():
    def step(x, w):
        with jax.named_scope(SCOPE):
            extra = w @ w
        return x @ w, extra

    counted = program(step, (16, 32), (32, 32))
    assert counted.total("flops", "optimizer") == 2 * 32**3
    assert counted.total("flops", "forward/backward") == 2 * 16 * 32**2


def test_memory_traffic_of_one_pass():
    n = 10_000
    assert program(lambda a, b: a + b, (n,), (n,)).total("bytes") == 3 * 4 * n


def test_of_a_stack_of_layers_one_is_read_at_a_time():
    n, stack = 10_000, 50
    traffic = program(lambda x, ws: jax.lax.scan(lambda x, w: (x * w, None), x, ws)[0], (n,), (stack, n)).total("bytes")
    assert stack * 3 * 4 * n <= traffic <= stack * 5 * 4 * n + 10 * 4 * n


COLLECTIVES = """
import json, jax, jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from levanter_mars.preflight import hlo
from levanter_mars.trips import expected_trips

mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)

def count(f, times=3):
    def loop(x):
        return jax.lax.fori_loop(0, times, lambda i, y: y + f(x * y.sum() * i).sum(), x)

    g = jax.shard_map(loop, mesh=mesh, in_specs=P(("a", "b")), out_specs=P(("a", "b")), check_vma=False)
    text = jax.jit(g).lower(jax.ShapeDtypeStruct((8 * 1024, 16), jnp.float32)).compile().as_text()
    program = hlo.count(text, "the_optimizer")
    kinds = {q.kind for q in program.totals if q.what == "count"}
    return {kind: [program.total(what, kind=kind) for what in ("count", "payload", "sent")] for kind in kinds}

shift = [(i, (i + 1) % 4) for i in range(4)]
print(json.dumps({
    "all-gather": count(lambda x: jax.lax.all_gather(x, "a")),
    "all-reduce": count(lambda x: jax.lax.psum(x, "b")),
    "all-reduce of everything": count(lambda x: jax.lax.psum(x, ("a", "b"))),
    "reduce-scatter": count(lambda x: jax.lax.psum_scatter(x, "a", tiled=True)),
    "all-to-all": count(lambda x: jax.lax.all_to_all(x, "a", 0, 0, tiled=True)),
    "collective-permute": count(lambda x: jax.lax.ppermute(x, "a", shift)),
}))
"""


@pytest.fixture(scope="module")
def collectives() -> dict:
    return json.loads(run_on_eight(COLLECTIVES))


MINE = 1024 * 16 * 4
"""Bytes of one device's share."""


@pytest.mark.parametrize(
    ("what", "kind", "payload", "sent"),
    [
        ("all-gather", "all-gather", 4 * MINE, 3 * MINE),
        ("all-reduce", "all-reduce", MINE, MINE),
        ("all-reduce of everything", "all-reduce", MINE, 2 * 7 / 8 * MINE),
        ("reduce-scatter", "reduce-scatter", MINE, 3 / 4 * MINE),
        ("all-to-all", "all-to-all", MINE, 3 / 4 * MINE),
        ("collective-permute", "collective-permute", MINE, MINE),
    ],
)
def test_collectives_in_a_loop_of_three(collectives, what, kind, payload, sent):
    assert collectives[what] == {kind: [3, 3 * payload, 3 * sent]}
