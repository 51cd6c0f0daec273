"""Every parameter after every step agrees with the authors' release."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from levanter_mars import mars_adamw, mars_lion, mars_m, mars_shampoo, matrix

FUNCTIONS = {"mars-adamw": mars_adamw, "mars-lion": mars_lion, "mars-shampoo": mars_shampoo}
CASES = [
    "mars_adamw",
    "mars_adamw_amsgrad",
    "mars_adamw_clipped",
    "mars_adamw_optimize_1d",
    "mars_lion",
    "mars_lion_optimize_1d",
    "mars_m",
    "mars_m_efficient",
    "mars_shampoo",
    "mars_shampoo_optimize_1d",
]


def load(case):
    golden = np.load(Path(__file__).with_name(f"{case}.npz"))
    names = [key.removeprefix("init/") for key in golden if key.startswith("init/")]
    assert len(names) == 7
    return golden, json.loads(str(golden["meta"])), names


def optimizer_of(case) -> optax.GradientTransformation:
    golden, meta, names = load(case)
    hyper, multiplier = meta["hyper"], jnp.array(meta["lr_multiplier"])
    roles = {
        name: matrix(inputs=1, outputs=0, embedding=name == "embedding") if golden[f"init/{name}"].ndim == 2 else None for name in names
    }

    def times(rate):
        return lambda step: rate * multiplier[step]

    if meta["optimizer"].startswith("mars_m"):
        return mars_m(
            times(hyper["lr"]),
            weight_decay=hyper["wd"],
            beta1=hyper["momentum"],
            gamma=hyper["gamma"],
            beta1_1d=hyper["adamw_betas"][0],
            beta2_1d=hyper["adamw_betas"][1],
            # The authors' efficient form has no clip and stores no gradient, and so it is here.
            correction_clip=None if meta["optimizer"] == "mars_m_efficient" else "tensor",
            newton_schulz_dtype=meta["newton_schulz_dtype"],
            axis_roles=roles,
        )
    of_the_type = {
        "mars-adamw": {"beta2": hyper["betas"][1], "amsgrad": hyper.get("amsgrad", False)},
        "mars-lion": {},
        "mars-shampoo": {"beta2": hyper["betas"][1], "newton_schulz_dtype": meta["newton_schulz_dtype"]},
    }
    return FUNCTIONS[hyper["mars_type"]](
        times(hyper["lr"]),
        weight_decay=hyper["weight_decay"],
        beta1=hyper["betas"][0],
        gamma=hyper["gamma"],
        optimize_1d=hyper.get("optimize_1d", False),
        learning_rate_1d=times(hyper["lr_1d"]),
        beta1_1d=hyper["betas_1d"][0],
        beta2_1d=hyper["betas_1d"][1],
        weight_decay_1d=hyper["weight_decay_1d"],
        axis_roles=roles,
        **of_the_type[hyper["mars_type"]],
    )


def parameters_after_every_step(case):
    golden, meta, names = load(case)
    optimizer = optimizer_of(case)
    params = {name: jnp.array(golden[f"init/{name}"]) for name in names}
    state = optimizer.init(params)
    update = jax.jit(optimizer.update)
    for step in range(meta["steps"]):
        updates, state = update({name: golden[f"grad/{name}"][step] for name in names}, state, params)
        params = optax.apply_updates(params, updates)
        yield step, params
    assert update._cache_size() == 1


@pytest.mark.parametrize("case", CASES)
def test_twelve_steps(case):
    golden, _, names = load(case)
    for step, params in parameters_after_every_step(case):
        for name in names:
            difference = np.abs(np.asarray(params[name]) - golden[f"param/{name}"][step]).max()
            assert difference <= 2e-7, f"{name} after step {step + 1}: {difference}"


@pytest.mark.parametrize("case", ["mars_m_bf16", "mars_shampoo_bf16"])
def test_orthogonalization_in_bfloat16(case):
    """Two machines' bfloat16 products differ in rounding, so the bound is on the distance beside the whole way."""
    golden, _, names = load(case)
    *_, (last, params) = parameters_after_every_step(case)
    for name in names:
        expected = golden[f"param/{name}"][last]
        distance = np.linalg.norm(np.asarray(params[name]) - expected) / np.linalg.norm(expected - golden[f"init/{name}"])
        assert distance <= 0.08, f"{name}: {distance}"
