"""The baselines' YAMLs compute what the published scripts compute: Muon, Moonlight's Muon, AdamW. What Levanter's own muon does instead."""

import dataclasses
from pathlib import Path

import draccus
import jax
import numpy as np
import optax
import pytest
import yaml
from levanter.optim.config import OptimizerConfig
from levanter.optim.muon import MuonConfig
from levanter.trainer_state import trainables_only
from models import GPT2, gaussian_like, shapes, weights_like

from levanter_mars.parameters import Parameter, describe

OPTIMIZERS = Path(__file__).parents[1] / "config" / "optimizer" / "gpt2_small"
STEPS = 5
SHAPES = shapes(dataclasses.replace(GPT2, use_bias=False))
PARAMS = trainables_only(weights_like(SHAPES, seed=0), True)
ROLES: list[Parameter] = jax.tree.leaves(describe(PARAMS))
NORMS = [0.4, 3.0, 0.7, 20.0, 1.5]
"""Of the whole gradient: some are clipped to 1, some are not."""


def published(name: str, **changes) -> OptimizerConfig:
    """The YAML's optimizer at its peak rate from the first step."""
    block = yaml.safe_load((OPTIMIZERS / f"{name}.yaml").read_text())["optimizer"]
    return draccus.decode(OptimizerConfig, block | {"warmup": 0, "lr_schedule": "constant"} | changes)


def gradients(norms: list[float]):
    for t, norm in enumerate(norms):
        gradient = gaussian_like(PARAMS, seed=10 + t)
        yield optax.tree.scale(norm / optax.global_norm(gradient), gradient)


def trained(optimizer: optax.GradientTransformation, norms: list[float] = NORMS) -> list[np.ndarray]:
    params, state = PARAMS, optimizer.init(PARAMS)
    for gradient in gradients(norms):
        updates, state = jax.jit(optimizer.update)(gradient, state, params)
        params = optax.apply_updates(params, updates)
    return [np.asarray(x) for x in jax.tree.leaves(params)]


def arrays(tree) -> list[np.ndarray]:
    return [np.asarray(x, np.float64) for x in jax.tree.leaves(tree)]


def clipped(gradient) -> list[np.ndarray]:
    """As torch.nn.utils.clip_grad_norm_ with 1.0, over all parameters."""
    g = arrays(gradient)
    norm = np.sqrt(sum((x**2).sum() for x in g))
    return [x * min(1, 1 / norm) for x in g]


def newton_schulz(x: np.ndarray) -> np.ndarray:
    a, b, c = 3.4445, -4.7750, 2.0315
    x = x / (np.linalg.norm(x) + 1e-7)
    transposed = x.shape[0] > x.shape[1]
    x = x.T if transposed else x
    for _ in range(5):
        s = x @ x.T
        x = a * x + (b * s + c * s @ s) @ x
    return x.T if transposed else x


def orthogonalized(parameter: Parameter, x: np.ndarray, scale) -> np.ndarray:
    """Every layer's matrix by itself, out × in as PyTorch stores it."""
    matrices = np.asarray(parameter.to_matrices(x))
    flat = matrices.reshape(-1, *parameter.tensor_shape)
    done = np.stack([scale(*m.shape) * newton_schulz(m) for m in flat]).reshape(matrices.shape)
    return np.asarray(parameter.from_matrices(done, like=x))


def by_hand(matrix_rule, other_rule, is_matrix, norms: list[float] = NORMS) -> list[np.ndarray]:
    """Five steps of a script: one rule with Nesterov's momentum 0.95, orthogonalized, one of Adam with β 0.9, 0.95."""
    x = arrays(PARAMS)
    buffer, m, v = ([np.zeros_like(p) for p in x] for _ in range(3))
    for t, gradient in enumerate(gradients(norms), start=1):
        for i, (parameter, g) in enumerate(zip(ROLES, clipped(gradient), strict=True)):
            if is_matrix(parameter):
                buffer[i] = 0.95 * buffer[i] + g
                x[i] = matrix_rule(parameter, x[i], g + 0.95 * buffer[i])
            else:
                m[i] = 0.9 * m[i] + 0.1 * g
                v[i] = 0.95 * v[i] + 0.05 * g**2
                x[i] = other_rule(x[i], m[i] / (1 - 0.9**t), v[i] / (1 - 0.95**t), t)
    return x


def assert_same(results, expected, tolerance):
    """The tolerance is a part of each array's change."""
    for parameter, result, right, start in zip(ROLES, results, expected, arrays(PARAMS), strict=True):
        assert np.linalg.norm(result - right) <= tolerance * np.linalg.norm(right - start), parameter.path


def test_muon_is_the_published_scripts():
    """All matrices, embeddings among them, √max(1, out/in)·NS without decay; AdamW with decay 0.1 on the norms."""
    expected = by_hand(
        lambda parameter, x, u: x - 2e-2 * orthogonalized(parameter, u, lambda out, into: max(1, out / into) ** 0.5),
        lambda x, m, v, t: x - 3e-3 * (m / (np.sqrt(v) + 1e-8) + 0.1 * x),
        lambda parameter: parameter.kind == "matrix",
    )
    assert_same(trained(published("muon", newton_schulz_dtype="float32").build(100)), expected, 1e-3)


def moonlight(norms: list[float] = NORMS) -> list[np.ndarray]:
    """Hidden matrices 0.2·√max(out, in)·NS; embeddings and norms AdamW with ε before the bias correction; decay 0.1 on everything."""
    lr = 6e-3
    return by_hand(
        lambda parameter, x, u: x * (1 - lr * 0.1) - lr * orthogonalized(parameter, u, lambda *sides: 0.2 * max(sides) ** 0.5),
        lambda x, m, v, t: x * (1 - lr * 0.1) - lr * m / (np.sqrt(v) + 1e-8 / np.sqrt(1 - 0.95**t)),
        lambda parameter: parameter.kind == "matrix" and not parameter.embedding,
        norms,
    )


def test_moonlight_is_the_published_scripts():
    assert_same(trained(published("moonlight", newton_schulz_dtype="float32").build(100)), moonlight(), 1e-3)


def test_adam_is_the_published_scripts():
    """torch.optim.AdamW on the clipped gradient, decay on the weights of linear layers alone."""
    linear = [parameter.kind == "matrix" and not parameter.embedding for parameter in ROLES]
    x = arrays(PARAMS)
    m, v = ([np.zeros_like(p) for p in x] for _ in range(2))
    for t, gradient in enumerate(gradients(NORMS), start=1):
        for i, g in enumerate(clipped(gradient)):
            m[i] = 0.9 * m[i] + 0.1 * g
            v[i] = 0.95 * v[i] + 0.05 * g**2
            update = m[i] / (1 - 0.9**t) / (np.sqrt(v[i] / (1 - 0.95**t)) + 1e-8)
            x[i] = x[i] - 6e-4 * (update + 0.1 * linear[i] * x[i])
    assert_same(trained(published("adam").build(100)), x, 1e-3)


def test_levanters_muon_is_moonlights_but_for_the_clip():
    """It refuses GPT-2 without Kimi's scaling. With it, it clips only what Adam follows, and that by its own norm."""
    with pytest.raises(AssertionError):
        MuonConfig(learning_rate=2e-2).build(100).init(PARAMS)
    kimi = MuonConfig(
        learning_rate=6e-3,
        adam_lr=6e-3,
        weight_decay=0.1,
        default_weight_decay_mask=False,
        weight_decay_modules=".*",
        use_kimi_scaling=True,
        coefficient_type="simple",
        warmup=0.0,
        lr_schedule="constant",
    )
    for parameter, result, right, start in zip(ROLES, trained(kimi.build(100)), moonlight(), arrays(PARAMS), strict=True):
        assert np.linalg.norm(result - right) >= 0.1 * np.linalg.norm(right - start), parameter.path
    unclipped = [0.4, 0.9, 0.7, 0.8, 0.3]
    assert_same(trained(kimi.build(100), unclipped), moonlight(unclipped), 1e-3)
