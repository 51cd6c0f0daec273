"""Levanter's fp8 layers: the trainer overwrites their scales, and the optimizers train the weights beside them."""

import haliax as hax
import jax
import jax.numpy as jnp
import jax.random as jrandom
import jmp
import numpy as np
import pytest
from haliax.quantization import QuantizationConfig, partition_for_grad_overwrite
from levanter.models.gpt2 import Gpt2Config
from levanter.models.lm_model import LmExample
from levanter.tracker import NoopConfig
from levanter.trainer import Trainer, TrainerConfig
from levanter.trainer_state import trainables_only

from levanter_mars import MarsAdamWConfig, MarsLionConfig, MarsMConfig, MarsShampooConfig

pytestmark = pytest.mark.slow

GPT2 = Gpt2Config(num_layers=2, hidden_dim=16, num_heads=2, max_seq_len=16, gradient_checkpointing=False)
Vocab, Batch = hax.Axis("vocab", 32), hax.Axis("batch", 4)
OPTIMIZERS = {
    "mars-adamw exact": MarsAdamWConfig(exact=True, warmup=0),
    "mars-lion": MarsLionConfig(warmup=0),
    "mars-shampoo": MarsShampooConfig(warmup=0),
    "mars-m lean": MarsMConfig(warmup=0, correction_clip=None),
}


@pytest.mark.parametrize("config", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_weights_are_trained_and_scales_overwritten(config):
    trainer_config = TrainerConfig(
        train_batch_size=Batch.size,
        num_train_steps=10,
        require_accelerator=False,
        tracker=NoopConfig(),
        mp=jmp.get_policy("f32"),
        quantization=QuantizationConfig(fp8=True),
        id="fp8",
    )

    def loss_fn(model, example, *, key=None):
        return model.compute_next_token_loss(example, key=key)

    tokens = hax.named(jnp.asarray(np.random.default_rng(0).integers(0, Vocab.size, (4, 16)), jnp.int32), (Batch, GPT2.max_Pos))
    with Trainer(trainer_config, config.build(10), loss_fn, add_default_hooks=False) as trainer:
        state = trainer.initial_state(jrandom.PRNGKey(1), model_init=lambda: GPT2.build(Vocab, key=jrandom.PRNGKey(0)))
        before = jax.tree.map(np.array, partition_for_grad_overwrite(trainables_only(state.model, True)))
        for _ in range(2):
            state = trainer.train_step(state, hax.vmap(LmExample.causal, Batch)(tokens)).state
        scales, weights = jax.tree.map(np.array, partition_for_grad_overwrite(trainables_only(state.model, True)))
    assert jax.tree.leaves(scales) and all(np.isfinite(x).all() for x in jax.tree.leaves((scales, weights)))
    assert any(np.any(a != b) for a, b in zip(jax.tree.leaves(scales), jax.tree.leaves(before[0]), strict=True))
    for a, b in zip(jax.tree.leaves(weights), jax.tree.leaves(before[1]), strict=True):
        assert np.any(a != b)
