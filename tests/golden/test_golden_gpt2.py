"""A GPT-2 follows the authors' release over a whole training run, its layers stacked, in a list, or as plain arrays."""

import dataclasses
import json
from pathlib import Path

import equinox as eqx
import haliax as hax
import haliax.nn as hnn
import jax
import numpy as np
import optax
import pytest
from haliax.state_dict import from_torch_compatible_state_dict, to_torch_compatible_state_dict
from levanter.layers.attention import AttentionMask
from levanter.models.gpt2 import Gpt2Block, Gpt2Config

from levanter_mars import MarsAdamWConfig, MarsLionConfig, MarsMConfig, MarsShampooConfig, mars_adamw, matrix
from levanter_mars.configs import MarsOptimizerConfig

CONFIGS = {"mars-adamw": MarsAdamWConfig, "mars-lion": MarsLionConfig, "mars-shampoo": MarsShampooConfig}


class Trajectory:
    """One file: what the release computed over 40 steps of training."""

    def __init__(self, case: str):
        self.file = np.load(Path(__file__).with_name(f"{case}.npz"))
        self.meta = json.loads(str(self.file["meta"]))
        self.tokens, self.loss, self.grad_norm = (self.file[key] for key in ("tokens", "loss", "grad_norm"))

    def torch_weights(self, prefix: str) -> dict[str, np.ndarray]:
        """The file's weights by the names and in the layout of Hugging Face's GPT-2, whose projections are in × out."""
        weights = {key.removeprefix(f"{prefix}/transformer."): self.file[key] for key in self.file if key.startswith(f"{prefix}/")}
        return {name: w.T if name.split(".")[-2] in ("c_attn", "c_proj", "c_fc") else w for name, w in weights.items()}

    def optimizer(self) -> MarsOptimizerConfig:
        meta, hyper = self.meta, self.meta["hyper"]
        common = {
            "learning_rate": meta["lr"],
            "weight_decay": meta["weight_decay"],
            "beta1": meta["betas"][0],
            "min_lr_ratio": meta["min_lr"] / meta["lr"],
            "warmup": meta["warmup_steps"],
            "max_grad_norm": meta["grad_clip_global_norm"],
            "exact": meta["exact"],
        }
        if meta["optimizer"] == "adamw":
            return MarsAdamWConfig(**common, beta2=meta["betas"][1], gamma=0.0, correction_clip=None, optimize_1d=True)
        if meta["optimizer"] == "mars_m":
            return MarsMConfig(**common, gamma=hyper["gamma"], newton_schulz_dtype=meta["newton_schulz_dtype"])
        of_the_type = {
            "mars-adamw": {"beta2": meta["betas"][1]},
            "mars-lion": {},
            "mars-shampoo": {"newton_schulz_dtype": meta["newton_schulz_dtype"]},
        }
        return CONFIGS[hyper["mars_type"]](
            **common,
            gamma=hyper["gamma"],
            learning_rate_1d=hyper["lr_1d"],
            beta1_1d=hyper["betas_1d"][0],
            beta2_1d=hyper["betas_1d"][1],
            weight_decay_1d=hyper["weight_decay_1d"],
            **of_the_type[hyper["mars_type"]],
        )


ADAMW = Trajectory("gpt2_mars_adamw")
META = ADAMW.meta
Vocab = hax.Axis("vocab", META["model"]["vocab_size"])
Pos = hax.Axis("position", META["model"]["block_size"])
Batch = hax.Axis("batch", ADAMW.tokens.shape[1])
MODEL = Gpt2Config(
    max_seq_len=Pos.size,
    hidden_dim=META["model"]["n_embd"],
    num_layers=META["model"]["n_layer"],
    num_heads=META["model"]["n_head"],
    use_bias=False,
    scale_attn_by_inverse_layer_idx=True,
    gradient_checkpointing=False,
)
# Adam's quotient of two averages amplifies rounding, which differs from CPU to CPU; a sign and an orthogonal factor do not.
LOSS_TOLERANCES = {
    "gpt2_adamw": 1e-4,
    "gpt2_mars_adamw": 1e-4,
    "gpt2_mars_adamw_exact": 1e-4,
    "gpt2_mars_lion": 2e-5,
    "gpt2_mars_m": 2e-5,
    "gpt2_mars_shampoo": 2e-5,
}
# Levanter's own AdamW is here to tell what the model and rounding alone do; its norms' weights moved by 1.3e-3 on one kind of CPU.
WEIGHT_TOLERANCES = {"gpt2_adamw": 2e-3}


def levanter_model(weights: dict[str, np.ndarray]):
    return from_torch_compatible_state_dict(MODEL.build(Vocab, key=jax.random.PRNGKey(0)), weights)


def loss_of(model, tokens):
    inputs, targets = hax.named(tokens[:, :-1], (Batch, Pos)), hax.named(tokens[:, 1:], (Batch, Pos))
    logits = hax.dot(model.activations(inputs, attn_mask=AttentionMask.causal()), model.get_lm_head(), axis="embed")
    return hax.mean(hnn.cross_entropy_loss(logits, Vocab, hnn.one_hot(targets, Vocab), reduction=None)).scalar()


def train(params, loss_fn, optimizer, tokens):
    """Trains on the file's tokens; the losses before each step, the gradients' norms, and the last parameters."""

    @jax.jit
    def step(params, state, tokens):
        loss, gradient = jax.value_and_grad(loss_fn)(params, tokens)
        updates, state = optimizer.update(gradient, state, params, obj_fn=lambda params: loss_fn(params, tokens))
        return eqx.apply_updates(params, updates), state, loss, optax.global_norm(gradient)

    state, losses, norms = optimizer.init(params), [], []
    for batch in tokens:
        params, state, loss, norm = step(params, state, batch)
        losses.append(float(loss))
        norms.append(float(norm))
    return params, np.array(losses), np.array(norms)


def assert_follows(
    trajectory: Trajectory, losses, norms, final: dict[str, np.ndarray], tolerance: float = 1e-4, weight_tolerance: float = 1e-3
):
    assert np.abs(losses - trajectory.loss).max() <= tolerance
    assert np.abs(losses - trajectory.loss)[:10].max() <= 5e-6
    assert np.abs(norms - trajectory.grad_norm)[:10].max() <= 1e-4
    initial, expected = trajectory.torch_weights("init"), trajectory.torch_weights("final")
    assert final.keys() == expected.keys()
    for name, weight in final.items():
        change = np.linalg.norm(expected[name] - initial[name])
        assert np.linalg.norm(np.asarray(weight) - expected[name]) <= weight_tolerance * change, name


@pytest.mark.parametrize("case", LOSS_TOLERANCES)
def test_stacked_layers_from_the_config(case):
    trajectory = Trajectory(case)
    params, static = eqx.partition(levanter_model(trajectory.torch_weights("init")), eqx.is_inexact_array)
    optimizer = trajectory.optimizer().build(trajectory.meta["steps"])
    params, losses, norms = train(params, lambda p, t: loss_of(eqx.combine(p, static), t), optimizer, trajectory.tokens)
    final = to_torch_compatible_state_dict(eqx.combine(params, static))
    assert_follows(trajectory, losses, norms, final, LOSS_TOLERANCES[case], WEIGHT_TOLERANCES.get(case, 1e-3))


def test_layers_in_a_list():
    model = levanter_model(ADAMW.torch_weights("init"))
    stacked = model.transformer.blocks
    blocks = hnn.BlockSeq.init(stacked.Block, Gpt2Block, gradient_checkpointing=False)(
        MODEL, key=jax.random.split(jax.random.PRNGKey(0), stacked.Block.size)
    )
    blocks = dataclasses.replace(blocks, blocks=list(stacked.unstacked()))
    model = dataclasses.replace(model, transformer=dataclasses.replace(model.transformer, blocks=blocks))
    params, static = eqx.partition(model, eqx.is_inexact_array)
    params, losses, norms = train(
        params, lambda p, t: loss_of(eqx.combine(p, static), t), ADAMW.optimizer().build(META["steps"]), ADAMW.tokens
    )
    assert_follows(ADAMW, losses, norms, to_torch_compatible_state_dict(eqx.combine(params, static)))


@pytest.mark.parametrize("layout", ["in_out", "out_in"])
def test_the_function_on_plain_arrays(layout):
    """The optimizer sees PyTorch's own parameters, one array a tensor; the model is put together from them for the loss."""
    initial = ADAMW.torch_weights("init")
    model = levanter_model(initial)

    def oriented(weights):
        return {name: w.T if layout == "out_in" and w.ndim == 2 else w for name, w in weights.items()}

    def loss_fn(params, tokens):
        return loss_of(from_torch_compatible_state_dict(model, oriented(params)), tokens)

    schedule = ADAMW.optimizer().lr_scheduler(META["steps"])
    is_linear = {name: name.startswith("h.") and w.ndim == 2 for name, w in initial.items()}
    optimizer = mars_adamw(
        schedule,
        weight_decay=META["weight_decay"],
        learning_rate_1d=lambda step: schedule(step) * META["hyper"]["lr_1d"] / META["lr"],
        max_grad_norm=1.0,
        weight_decay_mask=is_linear,
        axis_roles=None
        if layout == "in_out"
        else {name: matrix(inputs=1, outputs=0) if w.ndim == 2 else None for name, w in initial.items()},
    )
    params, losses, norms = train({name: jax.numpy.array(w) for name, w in oriented(initial).items()}, loss_fn, optimizer, ADAMW.tokens)
    assert_follows(ADAMW, losses, norms, oriented(params))
