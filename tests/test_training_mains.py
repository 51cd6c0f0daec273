"""mars-adamw where Levanter trains otherwise: LoRA, DPO, averaged weights, growing batches, two slices; each a small run to its end."""

import dataclasses
import inspect
import json

import checkpoints
import devices
import forked
import numpy as np
import pytest
import stock

pytestmark = pytest.mark.slow


def config(run, optimizer=None, **trainer):
    config = stock.config({"type": "mars-adamw", "learning_rate": 3e-3, "warmup": 4, **(optimizer or {})})
    config["trainer"] |= {"id": run, **trainer}
    return config


def finished(folder, name):
    """The losses of a run in which no step was skipped."""
    steps = stock.metrics(folder, name)
    assert len(steps) == stock.STEPS and steps[-1]["optim/mars/skipped_steps"] == 0
    losses = [step["train/loss"] for step in steps]
    assert losses[-1] < losses[0] and np.isfinite(losses).all()
    return losses


def stored(folder, run, part):
    """The paths of the arrays in the last checkpoint's `part`."""
    arrays = checkpoints.arrays(folder / "checkpoints" / run / f"step-{stock.STEPS - 1}")
    return {key.removesuffix("/zarr.json") for key in arrays if key.endswith("/zarr.json") and key.startswith(f"{part}/")}


def test_lora(folder):
    lora = config("lora", {"learning_rate": 3e-2}) | {"adapter": {"type": "lora", "r": 4, "alpha": 8.0}}
    forked.run(folder, lora, "lora")
    finished(folder, "lora")
    weights, state = stored(folder, "lora", "model"), stored(folder, "lora", "opt_state")
    # A and B for each of a layer's two attention and two MLP matrices are all that is trained, and all follow MARS.
    assert len(weights) == 8 and all("lora_A" in path or "lora_B" in path for path in weights)
    assert sum("/mars-adamw/" in path and "last_gradient" in path for path in state) == 8


def test_the_main_for_lora_alone_runs_with_no_optimizer():
    """Why `adapter` of train_lm is the way: this one asks its config for a field that it does not have."""
    import levanter.main.lora_lm as lora_lm

    fields = {field.name for field in dataclasses.fields(lora_lm.LoraLmConfig)}
    assert "config.max_train_length" in inspect.getsource(lora_lm.main) and "max_train_length" not in fields


def chat(*words):
    return [{"role": "user", "content": "the quick"}, {"role": "assistant", "content": " ".join(words)}]


def test_dpo(folder):
    lines = [{"chosen": chat(*stock.WORDS[i % 5 :][:4]), "rejected": chat(*stock.WORDS[i % 3 :][:4][::-1])} for i in range(64)]
    (folder / "preferences.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    template = (
        "{% for m in messages %}{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}{% endgeneration %}"
        "{% else %}{{ m['content'] }}{% endif %}{% endfor %}"
    )
    dpo = config("dpo", {"learning_rate": 3e-2}) | {
        "adapter": {"type": "lora", "r": 4, "alpha": 8.0},
        "reference": {"type": "adapter_base"},
        "validation_split_fraction": None,
    }
    dpo["data"] |= {
        "cache_dir": "cache-dpo",
        "components": {
            "preferences": {
                "source": {"type": "url", "train_urls": ["preferences.jsonl"]},
                "format": {"type": "preference_chat", "chat_template": template},
            }
        },
    }
    forked.run(folder, dpo, "dpo", module="levanter.main.train_dpo")
    # ln 2 before the policy differs from the reference.
    assert finished(folder, "dpo")[0] == pytest.approx(np.log(2), abs=1e-3)


@pytest.fixture(scope="module")
def losses_on_one_device(folder):
    """Of a run that averages its weights, which changes nothing of its training."""
    forked.run(folder, config("ema", model_averaging={"type": "ema", "beta": 0.9}), "ema")
    return finished(folder, "ema")


@pytest.mark.usefixtures("losses_on_one_device")
def test_averaged_weights(folder):
    averaged, weights = stored(folder, "ema", "model_averaging"), stored(folder, "ema", "model")
    assert {path.removeprefix("model_averaging/model/") for path in averaged} == {path.removeprefix("model/") for path in weights}
    arrays = checkpoints.arrays(folder / "checkpoints" / "ema" / f"step-{stock.STEPS - 1}")
    assert all(arrays[f"model_averaging/{path}/zarr.json"] == arrays[f"{path}/zarr.json"] for path in weights)
    chunks = [key for key in arrays if key.startswith("model/") and "/c/" in key]
    assert chunks and all(arrays[f"model_averaging/{key}"] != arrays[key] for key in chunks)


def test_growing_batches_and_the_exact_form(folder):
    growing = [{"start": 0, "value": 8}, {"start": 8, "value": 16}]
    forked.run(folder, config("growing", {"exact": True}, train_batch_size=growing), "growing")
    finished(folder, "growing")
    tokens = [step["throughput/total_tokens"] for step in stock.metrics(folder, "growing")]
    assert np.diff([0, *tokens]).tolist() == [8 * 32] * 8 + [16 * 32] * 12


def two_slices(run, optimizer=None):
    """Of four devices each. Levanter makes this mesh of two slices only, and refuses any other number of devices."""
    return config(run, optimizer, mesh={"axes": {"data": 4}, "dcn_axes": {"replica_dcn": 2}})


def test_two_slices(folder, losses_on_one_device):
    forked.run(folder, two_slices("slices"), "slices", devices=8, before=devices.simulate_two_slices)
    np.testing.assert_allclose(finished(folder, "slices"), losses_on_one_device, rtol=0, atol=1e-4)


def test_whole_matrices_on_two_slices(folder):
    """In float32: in bfloat16 the order of their sums would show."""
    mars_m = {"type": "mars-m", "newton_schulz_dtype": "float32"}
    forked.run(folder, config("mars-m", mars_m), "mars-m")
    forked.run(folder, two_slices("mars-m-slices", mars_m), "mars-m-slices", devices=8, before=devices.simulate_two_slices)
    np.testing.assert_allclose(finished(folder, "mars-m-slices"), finished(folder, "mars-m"), rtol=0, atol=1e-4)
