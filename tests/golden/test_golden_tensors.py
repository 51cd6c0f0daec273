"""Every parameter after every step agrees with the authors' release."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from levanter_mars import mars_adamw, matrix

TORCH = matrix(inputs=1, outputs=0)


@pytest.mark.parametrize("case", ["mars_adamw", "mars_adamw_amsgrad", "mars_adamw_optimize_1d", "mars_adamw_clipped"])
def test_twelve_steps(case):
    golden = np.load(Path(__file__).with_name(f"{case}.npz"))
    meta = json.loads(str(golden["meta"]))
    hyper, multiplier = meta["hyper"], jnp.array(meta["lr_multiplier"])
    names = [key.removeprefix("init/") for key in golden if key.startswith("init/")]
    assert len(names) == 7
    optimizer = mars_adamw(
        lambda step: hyper["lr"] * multiplier[step],
        weight_decay=hyper["weight_decay"],
        beta1=hyper["betas"][0],
        beta2=hyper["betas"][1],
        gamma=hyper["gamma"],
        amsgrad=hyper.get("amsgrad", False),
        optimize_1d=hyper.get("optimize_1d", False),
        learning_rate_1d=lambda step: hyper["lr_1d"] * multiplier[step],
        beta1_1d=hyper["betas_1d"][0],
        beta2_1d=hyper["betas_1d"][1],
        weight_decay_1d=hyper["weight_decay_1d"],
        axis_roles={name: TORCH if golden[f"init/{name}"].ndim == 2 else None for name in names},
    )
    params = {name: jnp.array(golden[f"init/{name}"]) for name in names}
    state = optimizer.init(params)
    update = jax.jit(optimizer.update)
    for step in range(meta["steps"]):
        updates, state = update({name: golden[f"grad/{name}"][step] for name in names}, state, params)
        params = optax.apply_updates(params, updates)
        for name in names:
            difference = np.abs(np.asarray(params[name]) - golden[f"param/{name}"][step]).max()
            assert difference <= 2e-7, f"{name} after step {step + 1}: {difference}"
