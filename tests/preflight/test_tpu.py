"""A small GPT-2's train step compiled for v5e:2x2, and one that cannot fit."""

import dataclasses
import importlib.util

import jax
import jmp
import pytest
import transformers
from levanter.kernels.pallas.fused_cross_entropy_loss import fused_cross_entropy_loss_and_logsumexp_penalty as cross_entropy
from levanter.layers.attention import AttentionBackend
from levanter.main.train_lm import TrainLmConfig
from levanter.models.gpt2 import Gpt2Config
from levanter.models.llama import LlamaConfig
from levanter.optim.config import AdamConfig
from levanter.optim.muon import MuonConfig
from levanter.trainer import TrainerConfig

from levanter_mars import MarsAdamWConfig, MarsMConfig
from levanter_mars.explanation import explain, trainable_shapes
from levanter_mars.preflight.absent_devices import absent_devices
from levanter_mars.preflight.hardware import parse_topology, tpu_devices
from levanter_mars.preflight.report import Report, out_of_memory, preflight
from levanter_mars.preflight.train_step import lower_train_step

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed; make test installs it"),
    pytest.mark.slow,
]

LAYERS, WIDTH, LENGTH, VOCABULARY, BATCH = 3, 256, 256, 1024, 8
CHIPS = 4
ARGUMENTS, TEMPORARIES = 0.106701, 0.418186
"""GiB."""
MATRICES = LAYERS * 12 * WIDTH**2
PARAMETERS = MATRICES + (VOCABULARY + LENGTH) * WIDTH + (2 * LAYERS + 1) * WIDTH


def config(optimizer, **trainer) -> TrainLmConfig:
    model = Gpt2Config(
        num_layers=LAYERS, hidden_dim=WIDTH, num_heads=2, max_seq_len=LENGTH, use_bias=False, gradient_checkpointing=False, tokenizer="none"
    )
    return TrainLmConfig(model=model, optimizer=optimizer, trainer=TrainerConfig(train_batch_size=BATCH, num_train_steps=100, **trainer))


def report(config: TrainLmConfig, topology: str = "v5e:2x2", vocabulary: int = VOCABULARY) -> Report:
    named = parse_topology(topology)
    return preflight(config, named, tpu_devices(named), vocabulary)


@pytest.fixture(scope="module")
def mars() -> Report:
    return report(config(MarsAdamWConfig()))


@pytest.fixture(scope="module")
def accumulated() -> Report:
    return report(config(MuonConfig(use_kimi_scaling=True), per_device_parallelism=1))


def test_parameters_and_state_are_a_quarter_on_each_chip(mars):
    assert mars.parameter_count == PARAMETERS
    assert mars.memory["parameters"] == 4 * PARAMETERS / CHIPS
    matrices = PARAMETERS - (2 * LAYERS + 1) * WIDTH
    assert mars.memory["optimizer: mu"] == mars.memory["optimizer: nu"] == 4 * PARAMETERS / CHIPS
    assert mars.memory["optimizer: last_gradient"] == 4 * matrices / CHIPS
    # tokens, loss weights and two sets of segment ids, four bytes each
    assert mars.memory["batch"] == 4 * 4 * BATCH * LENGTH / CHIPS


@pytest.mark.parametrize("fixture", ["mars", "accumulated"])
def test_the_state_is_what_eval_shape_counts(fixture, request):
    reported = request.getfixturevalue(fixture)
    optimizer = {"mars-adamw": MarsAdamWConfig(), "muon": MuonConfig(use_kimi_scaling=True)}[reported.optimizer]
    small = config(optimizer)
    assert reported.state_bytes == explain(trainable_shapes(small, VOCABULARY), optimizer, 100).state_bytes


def test_flops_by_hand(mars):
    tokens = BATCH * LENGTH / CHIPS
    # The tied head is the only use of the token embedding as a matrix; positions and norms have no product.
    products = 6 * (MATRICES + VOCABULARY * WIDTH) * tokens
    # Splash attention: two products forward, seven backward.
    attention = 9 * 2 * LAYERS * WIDTH * LENGTH * tokens
    assert mars.flops["forward/backward"] == pytest.approx(products + attention, rel=1e-3)
    assert mars.flops["optimizer"] == 0
    assert mars.notes == [note for note in mars.notes if "trainer.watch" in note]


def test_accumulation_multiplies(accumulated, mars):
    assert (accumulated.microbatches, mars.microbatches) == (2, 1)
    assert accumulated.flops["forward/backward"] == pytest.approx(mars.flops["forward/backward"], rel=1e-3)
    # Five steps, each three products of two matrices, of every hidden matrix in the smaller of its two forms; sharded or not.
    least = (
        5
        * LAYERS
        * sum(2 * (2 * n * n * m + n**3) for n, m in ((WIDTH, 3 * WIDTH), (WIDTH, WIDTH), (WIDTH, 4 * WIDTH), (WIDTH, 4 * WIDTH)))
    )
    assert least / CHIPS * 0.9 <= accumulated.flops["optimizer"] <= least * 1.5


def test_the_mars_update_sends_only_norms(mars, accumulated):
    sent = {phase: sum(c.sent for c in mars.collectives if c.phase == phase) for phase in ("forward/backward", "optimizer")}
    assert 0 < sent["optimizer"] < 1024
    # Every chip gets the other three quarters of each bfloat16 matrix at least once.
    assert sent["forward/backward"] > 2 * MATRICES * 3 / 4
    assert sum(c.sent for c in accumulated.collectives if c.phase == "optimizer") > sum(
        c.sent for c in mars.collectives if c.phase == "optimizer"
    )


def test_bounds_follow_from_the_figures(mars):
    assert mars.roofline is not None
    assert mars.roofline.compute == pytest.approx(mars.flops["forward/backward"] / 197e12)
    assert mars.roofline.links == pytest.approx(sum(c.sent for c in mars.collectives) / 200e9)
    assert mars.tokens_per_second == pytest.approx(BATCH * LENGTH / max(mars.roofline.compute, mars.roofline.memory, mars.roofline.links))
    assert mars.hours == pytest.approx(100 * mars.roofline.step / 3600)
    assert mars.total == pytest.approx(sum(mars.memory.values()))
    assert mars.fits
    assert mars.capacity == 15.75 * 2**30


def test_rotary_embeddings_are_computed_off_the_absent_chips():
    """A Llama computes their frequencies while it is traced."""
    llama = LlamaConfig(
        num_layers=2, hidden_dim=WIDTH, intermediate_dim=512, num_heads=2, num_kv_heads=1, max_seq_len=LENGTH, tokenizer="none"
    )
    trainer = TrainerConfig(train_batch_size=BATCH, num_train_steps=100)
    reported = report(TrainLmConfig(model=llama, optimizer=MarsMConfig(), trainer=trainer))
    # Queries and outputs, keys and values for one head of two, and three matrices of the MLP; embeddings in and out, norms.
    matrices = 2 * (WIDTH * WIDTH * 3 + 3 * WIDTH * 512)
    assert reported.parameter_count == matrices + 2 * VOCABULARY * WIDTH + 5 * WIDTH
    assert reported.fits
    assert {c.kind for c in reported.collectives if c.phase == "optimizer"} == {"all-to-all", "all-reduce"}
    assert reported.flops["optimizer"] > 0


def test_a_gpt2_small_is_as_compiled_in_another_way():
    """A program of its own, for GPT-2 small with AdamW and JAX's flash attention on 16 chips, compiled to the arguments and temporaries
    that preflight's train step must have, too."""
    small = Gpt2Config(
        num_layers=12, hidden_dim=768, num_heads=12, max_seq_len=1024, use_bias=False, scale_attn_by_inverse_layer_idx=True,
        attn_backend=AttentionBackend.JAX_FLASH, tokenizer="none",
    )  # fmt: skip
    trainer = TrainerConfig(train_batch_size=32, per_device_parallelism=2, num_train_steps=100, mp=jmp.get_policy("p=f32,c=bf16"))
    reported = report(TrainLmConfig(model=small, optimizer=AdamConfig(), trainer=trainer), "v5e:4x4", 50304)
    held = sum(size for part, size in reported.memory.items() if part.startswith(("parameters", "optimizer", "batch", "padding")))
    assert held / 2**30 == pytest.approx(ARGUMENTS, rel=2e-3)
    assert reported.memory["gradients and activations"] / 2**30 == pytest.approx(TEMPORARIES, rel=0.01)


def test_blocks_that_the_run_may_choose_otherwise_are_named():
    """Levanter's Pallas kernel for the cross entropy, at a shape that its table does not have."""
    devices = tpu_devices(parse_topology("v5e:1x1"))
    shapes = [((768, 384), "float32"), ((768,), "int32"), ((384, 3000), "float32")]
    with absent_devices(devices) as notes:
        sharding = jax.sharding.SingleDeviceSharding(devices[0])
        arrays = [jax.ShapeDtypeStruct(shape, dtype, sharding=sharding) for shape, dtype in shapes]
        for _ in range(2):
            jax.jit(lambda x, y, w: cross_entropy(x, y, w, implementation="pallas_tpu")).lower(*arrays)
    assert notes == [
        "the blocks of the cross entropy's kernel pallas_tpu are the ones that Levanter infers; the run takes others if these do not "
        "compile on the device or if its autotune cache has some"
    ]


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"train_seq_len": LENGTH + 1}, f"train_seq_len is {LENGTH + 1}; it must be from 1 to the model's max_seq_len, {LENGTH}"),
        ({"train_seq_len": 0}, "train_seq_len is 0"),
        (
            {"initialize_from_hf": True, "initialize_from_checkpoint_path": "x"},
            "^initialize_from_hf and initialize_from_checkpoint_path say",
        ),
        ({"initialize_from_hf": "no/folder", "use_hf_model_config": True}, "use_hf_model_config wants the config of no/folder"),
    ],
)
def test_what_train_lm_refuses_is_refused(fields, sentence):
    with pytest.raises(ValueError, match=sentence):
        report(dataclasses.replace(config(MarsAdamWConfig()), **fields))


def test_the_model_of_a_checkpoint_is_the_one_compiled(tmp_path):
    transformers.GPT2Config(n_layer=1, n_embd=WIDTH, n_head=2, n_positions=LENGTH).save_pretrained(tmp_path)
    named = dataclasses.replace(config(AdamConfig()), initialize_from_hf=str(tmp_path), use_hf_model_config=True)
    devices = tpu_devices(parse_topology("v5e:1x1"))
    step = lower_train_step(named, devices, VOCABULARY)
    assert step.parameter_count == 12 * WIDTH**2 + (VOCABULARY + LENGTH) * WIDTH + (9 + 6) * WIDTH  # biases; scales and offsets of norms
    assert step.notes == []
    own = lower_train_step(dataclasses.replace(named, use_hf_model_config=False), devices, VOCABULARY)
    assert own.parameter_count == PARAMETERS
    assert own.notes == [
        "the model is the one that the config's model block describes; the weights that initialize_from_hf names are not read"
    ]


@pytest.mark.parametrize(
    ("message", "needed", "limit"),
    [
        (
            "the total memory required for HLO temporaries (22.64G) exceeds available HBM (15.75G). HLO module: jit__train_step.",
            22.64,
            15.75,
        ),
        ("Ran out of memory in memory space hbm. Used 15.90G of 15.75G hbm. Exceeded hbm capacity by 153.6M.", 15.9, 15.75),
        ("Used 15900M of 15.75G hbm.", 15900 / 1024, 15.75),
    ],
)
def test_the_compilers_refusal_has_what_is_needed_and_what_there_is(message, needed, limit):
    found = out_of_memory(message)
    assert found is not None
    assert found == pytest.approx((needed * 2**30, limit * 2**30))
    assert out_of_memory("Mosaic failed to compile") is None


def test_a_model_too_large_says_by_how_much():
    wide = Gpt2Config(num_layers=2, hidden_dim=8192, num_heads=64, max_seq_len=128, use_bias=False, tokenizer="none")
    trainer = TrainerConfig(train_batch_size=1, num_train_steps=100)
    reported = report(TrainLmConfig(model=wide, optimizer=MarsAdamWConfig(), trainer=trainer), "v5e:1x1")
    assert not reported.fits
    assert reported.roofline is None
    state = 16 * 2 * 12 * 8192**2
    assert state < reported.total < 3 * state
    # Not the whole chip: a program that needs 15.9 of its 16 GiB is refused.
    assert reported.capacity == 15.75 * 2**30


def test_nothing_stays_replaced():
    before = (jax.devices, jax.device_count, jax.default_backend, jax.config.jax_threefry_partitionable)
    with pytest.raises(RuntimeError, match="inside"), absent_devices(tpu_devices(parse_topology("v5e:4x4"))):
        assert jax.device_count() == 16
        assert jax.default_backend() == "tpu"
        raise RuntimeError("inside")
    assert before == (jax.devices, jax.device_count, jax.default_backend, jax.config.jax_threefry_partitionable)
    assert jax.default_backend() == "cpu"
    assert float(jax.numpy.ones(3).sum()) == 3
