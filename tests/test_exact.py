"""The exact form: the gradient of the step's own batch at the previous parameters, by microbatches where the trainer takes them."""

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import jax.random as jrandom
import jmp
import numpy as np
import pytest
from levanter.models.gpt2 import Gpt2Config
from levanter.models.lm_model import LmExample
from levanter.tracker import NoopConfig
from levanter.trainer import Trainer, TrainerConfig
from models import gaussian_like

from levanter_mars import MarsAdamWConfig, MarsLionConfig, MarsMConfig, MarsShampooConfig, mars_lion
from levanter_mars.batch_gradient import NO_OBJECTIVE

PARAMS = {"a": jnp.zeros((4, 6)), "b": jnp.zeros((5, 3))}


def objective(seed):
    """A loss that is not quadratic, so that gradients at different parameters do not differ by the parameters alone."""
    shift = gaussian_like(PARAMS, seed=seed)
    return lambda params: sum(jnp.sum(jnp.cosh(x - s)) for x, s in zip(jax.tree.leaves(params), jax.tree.leaves(shift), strict=True))


def test_by_hand():
    """mars-lion in float64, from the formulas: both gradients of a batch, each clipped by its own global norm."""
    lr, beta, gamma, clip_norm, max_norm = 0.05, 0.9, 0.2, 0.8, 1.5
    optimizer = mars_lion(
        lr, 0.0, beta1=beta, gamma=gamma, correction_clip_norm=clip_norm, max_grad_norm=max_norm, exact=True, diagnostics_every=1
    )
    params = gaussian_like(PARAMS, seed=0)
    state = optimizer.init(params)

    def clipped_gradient(x, seed):
        shift = gaussian_like(PARAMS, seed=seed)
        g = {k: np.sinh(np.asarray(x[k], np.float64) - np.asarray(shift[k])) for k in x}
        norm = np.sqrt(sum((v**2).sum() for v in g.values()))
        return {k: v * min(1, max_norm / norm) for k, v in g.items()}

    x = {k: np.asarray(v, np.float64) for k, v in params.items()}
    previous, m = dict(x), {k: np.zeros_like(v) for k, v in x.items()}
    for t in range(4):
        g, lg = clipped_gradient(x, 10 + t), clipped_gradient(previous, 10 + t)
        c = {k: g[k] + gamma * beta / (1 - beta) * (g[k] - (lg[k] if t > 0 else 0)) for k in g}
        m = {k: beta * m[k] + (1 - beta) * c[k] / max(1, np.linalg.norm(c[k]) / clip_norm) for k in g}
        previous, x = x, {k: x[k] - lr * np.sign(m[k]) for k in x}

        obj_fn = objective(10 + t)
        updates, state = optimizer.update(jax.grad(obj_fn)(params), state, params, obj_fn=obj_fn)
        params = jax.tree.map(jnp.add, params, updates)
        for k in x:
            np.testing.assert_allclose(params[k], x[k], atol=1e-5)


@pytest.mark.parametrize("config", [MarsAdamWConfig, MarsLionConfig, MarsShampooConfig, MarsMConfig])
def test_without_an_objective_the_first_step_says_so(config):
    optimizer = config(exact=True).build(10)
    with pytest.raises(ValueError) as error:
        optimizer.update(PARAMS, optimizer.init(PARAMS), PARAMS)
    assert str(error.value) == NO_OBJECTIVE
    assert "obj_fn" in NO_OBJECTIVE and NO_OBJECTIVE.count(". ") == 0


GPT2 = Gpt2Config(num_layers=2, hidden_dim=32, num_heads=2, max_seq_len=64, gradient_checkpointing=False, embed_pdrop=0.1, resid_pdrop=0.1)
Vocab = hax.Axis("vocab", 64)
BATCH = 32


def trainer_of(optimizer, microbatch: int | None) -> Trainer:
    config = TrainerConfig(
        train_batch_size=BATCH,
        per_device_parallelism=-1 if microbatch is None else microbatch,
        num_train_steps=10,
        require_accelerator=False,
        tracker=NoopConfig(),
        mp=jmp.get_policy("f32"),
        id="exact",
    )
    return Trainer(
        config, optimizer, lambda model, example, *, key=None: model.compute_next_token_loss(example, key=key), add_default_hooks=False
    )


def example() -> LmExample:
    tokens = np.random.default_rng(0).integers(0, Vocab.size, (BATCH, GPT2.max_seq_len))
    Batch = hax.Axis("batch", BATCH)
    return hax.vmap(LmExample.causal, Batch)(hax.named(jnp.asarray(tokens, jnp.int32), (Batch, GPT2.max_Pos)))


def run(optimizer, microbatch: int | None, steps: int):
    """Losses of a few steps, and the bytes that the compiled step needs beside its arguments and results."""
    with trainer_of(optimizer, microbatch) as trainer:
        state = trainer.initial_state(jrandom.PRNGKey(1), model_init=lambda: GPT2.build(Vocab, key=jrandom.PRNGKey(0)))
        batch = (example(),)
        compiled = trainer._jit_train_step_fn_no_hook.lower(state, batch, {}).compile()
        temporary = compiled.memory_analysis().temp_size_in_bytes
        losses = []
        for _ in range(steps):
            info = trainer.train_step(state, *batch)
            state = info.state
            losses.append(info.loss)
    return losses, temporary, eqx.filter(state.model, eqx.is_inexact_array)


def test_accumulation_changes_neither_losses_nor_dropout_and_holds_one_microbatchs_activations():
    exact, approximate = MarsAdamWConfig(exact=True, warmup=0), MarsAdamWConfig(warmup=0)
    losses, accumulated, model = run(exact.build(10), 4, steps=4)
    _, reference, _ = run(approximate.build(10), 4, steps=1)
    whole_losses, whole, _ = run(exact.build(10), None, steps=4)
    print(f"temporaries: exact {accumulated:,}, approximate {reference:,}; exact with the whole batch at once {whole:,} bytes")
    assert accumulated <= 1.2 * reference
    assert whole > 2 * accumulated
    assert np.isfinite(losses).all() and np.isfinite(whole_losses).all()
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(model))


def test_the_second_gradient_of_an_unchanged_model_is_the_first():
    """With dropout on: same batch, same keys, microbatch by microbatch. So nothing is corrected where the parameters did not move."""
    optimizer = MarsAdamWConfig(exact=True, warmup=0, learning_rate=1e-12, learning_rate_1d=1e-12, weight_decay=0, diagnostics_every=1)
    for microbatch in (4, None):
        with trainer_of(optimizer.build(10), microbatch) as trainer:
            state = trainer.initial_state(jrandom.PRNGKey(1), model_init=lambda: GPT2.build(Vocab, key=jrandom.PRNGKey(0)))
            ratios = []
            for _ in range(3):
                state = trainer.train_step(state, example()).state
                ratios.append(state.opt_state.hyperparams["mars/correction_ratio"])
        # lg_1 = 0: the first correction is κ = 0.475 times the gradient.
        np.testing.assert_allclose(ratios, [0.475, 0, 0], atol=1e-4)
