"""mars-adamw where Levanter trains something else than a whole model: LoRA, in a small run to its end."""

import dataclasses
import inspect

import checkpoints
import forked
import numpy as np
import pytest
import stock

pytestmark = pytest.mark.slow


def stored(checkpoint, part):
    """The paths of the arrays in a checkpoint's `part`."""
    arrays = checkpoints.arrays(checkpoint)
    return {key.removesuffix("/zarr.json") for key in arrays if key.endswith("/zarr.json") and key.startswith(f"{part}/")}


def test_lora(tmp_path):
    stock.write_workspace(tmp_path)
    lora = stock.config({"type": "mars-adamw", "learning_rate": 3e-2, "warmup": 4}) | {"adapter": {"type": "lora", "r": 4, "alpha": 8.0}}
    lora["trainer"]["id"] = "lora"
    forked.run(tmp_path, lora, "lora")
    steps = stock.metrics(tmp_path, "lora")
    losses = [step["train/loss"] for step in steps]
    assert len(losses) == stock.STEPS and losses[-1] < losses[0] and np.isfinite(losses).all()
    assert steps[-1]["optim/mars/skipped_steps"] == 0

    checkpoint = tmp_path / "checkpoints" / "lora" / f"step-{stock.STEPS - 1}"
    weights, state = stored(checkpoint, "model"), stored(checkpoint, "opt_state")
    # A and B for each of a layer's two attention and two MLP matrices are all that is trained, and all follow MARS.
    assert len(weights) == 8 and all("lora_A" in path or "lora_B" in path for path in weights)
    assert sum("/mars-adamw/" in path and "last_gradient" in path for path in state) == 8


def test_the_main_for_lora_alone_runs_with_no_optimizer():
    """Why `adapter` of train_lm is the way: this one asks its config for a field that it does not have."""
    import levanter.main.lora_lm as lora_lm

    fields = {field.name for field in dataclasses.fields(lora_lm.LoraLmConfig)}
    assert "config.max_train_length" in inspect.getsource(lora_lm.main) and "max_train_length" not in fields
