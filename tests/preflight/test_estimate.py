"""The estimate for GPUs, by eight virtual CPU devices: its memory is that of a run on eight such devices."""

import json

import pytest
from devices import run_on_eight

PROGRAM = """
import json, sys
import equinox as eqx, haliax as hax, jax, jax.numpy as jnp, jax.random as jrandom
from haliax.partitioning import round_axis_for_partitioning
from levanter.main.train_lm import TrainLmConfig
from levanter.models.gpt2 import Gpt2Config
from levanter.tracker import NoopConfig, NoopTracker, current_tracker
from levanter.trainer import Trainer, TrainerConfig
from levanter.data.text.examples import GrugLmExample, named_lm_example_from_grug
from levanter_mars import MarsAdamWConfig
from levanter_mars.preflight.hardware import parse_topology
from levanter_mars.preflight.report import preflight
from levanter_mars.preflight.search import find_batch
import dataclasses

model = Gpt2Config(num_layers=2, hidden_dim=64, num_heads=2, max_seq_len=64, use_bias=False, tokenizer="none")
def config():
    trainer = TrainerConfig(
        train_batch_size=32, per_device_parallelism=2, num_train_steps=10, require_accelerator=False, id="run", tracker=NoopConfig(),
        log_jaxprs=False, log_xla_hlo=False,
    )
    trainer.checkpointer.base_path = sys.argv[1]
    return TrainLmConfig(model=model, optimizer=MarsAdamWConfig(), trainer=trainer)

topology = parse_topology("h100:8")
report = preflight(config(), topology, jax.devices(), 500)

# As train_lm does it, with real arrays.
run = config()
run.trainer._initialize_jax_config()
run.trainer._validate_and_set_defaults()
def loss(model, example, *, key=None):
    return model.compute_next_token_loss(example, key=key, logsumexp_weight=0.0)
with current_tracker(NoopTracker()), Trainer(run.trainer, run.optimizer.build(10), loss, add_default_hooks=False) as trainer:
    vocab = round_axis_for_partitioning(hax.Axis("vocab", 500), trainer.parameter_axis_mapping)
    state = trainer.initial_state(jrandom.PRNGKey(0), model_init=lambda: model.build(vocab, key=jrandom.PRNGKey(1)))
    one = named_lm_example_from_grug(GrugLmExample.causal(jnp.arange(64) % 500, eos_id=0), model.max_Pos)
    Batch = hax.Axis("batch", 32)
    batch = jax.tree.map(lambda x: hax.stack(Batch, [x] * 32), one, is_leaf=lambda x: isinstance(x, hax.NamedArray))
    batch = hax.shard(batch, trainer.compute_axis_mapping)
    memory = trainer._jit_train_step_fn_no_hook.lower(state, (batch,), {}).compile().memory_analysis()
    device = jax.devices()[0]
    arrays = [x for x in jax.tree.leaves((state, batch)) if eqx.is_array(x)]
    held = sum(s.data.nbytes for x in arrays for s in x.addressable_shards if s.device == device)
    info = trainer.train_step(state, batch)

# A device with memory for 2 examples at once but not for 4.
tight = dataclasses.replace(topology, chip=dataclasses.replace(topology.chip, memory=report.total * 1.1 / 0.75))
tried = []
found = find_batch(config(), tight, jax.devices(), 500, tried.append)
print(json.dumps({
    "report": report.to_json(), "arguments": memory.argument_size_in_bytes, "temporaries": memory.temp_size_in_bytes, "held": held,
    "loss": float(info.loss), "found": [found.per_device_parallelism, found.fits],
    "tried": [[r.per_device_parallelism, r.fits] for r in tried],
}))
"""


@pytest.fixture(scope="module")
def measured(tmp_path_factory) -> dict:
    return json.loads(run_on_eight(PROGRAM, str(tmp_path_factory.mktemp("checkpoints"))))


@pytest.mark.slow
def test_memory_is_that_of_a_run(measured):
    memory = measured["report"]["memory"]
    temporaries = memory.pop("gradients and activations")
    # The scalars that are the same on every device, step, key and counts, are in both.
    assert temporaries == pytest.approx(measured["temporaries"], rel=0.01)
    outputs = memory.pop("outputs beside the state")
    assert sum(memory.values()) == measured["arguments"]
    assert measured["held"] == pytest.approx(measured["arguments"], abs=64)
    assert 0 < outputs < 1024
    assert 5 < measured["loss"] < 8  # log 500 is 6.2


@pytest.mark.slow
def test_it_is_marked_an_estimate(measured):
    report = measured["report"]
    assert report["is_estimate"]
    assert report["chip"]["name"] == "h100"
    assert report["notes"][0].startswith("an estimate")
    # Of the 81,559 MiB that the driver reports JAX takes three quarters.
    assert report["capacity"] == 0.75 * 81559 * 2**20
    assert any("capacity is 75% of the GPU's memory" in note for note in report["notes"])
    assert report["microbatches"] == 2


@pytest.mark.slow
def test_flops_by_hand(measured):
    tokens, width, length = 32 * 64 / 8, 64, 64
    matrices = 2 * 12 * width**2
    # Layers are computed again in the backward pass, but for their last product.
    again = 2 * (matrices - 2 * 4 * width**2) * tokens
    attention = 2 * 2 * width * length * tokens * (2 + 2 + 5)
    head = 6 * 500 * width * tokens
    least = 6 * matrices * tokens + again + head + attention
    assert least * 0.95 < measured["report"]["flops"]["forward/backward"] < least * 1.05 + 2 * 500 * width * tokens


@pytest.mark.slow
def test_find_batch_halves_to_the_largest_that_fits(measured):
    assert measured["tried"] == [[2, True], [4, False]]
    assert measured["found"] == [2, True]
