"""Bad gradients and losses in a real run: skipped, counted, of no consequence; Levanter's own response to a bad loss stays what it is."""

import math

import checkpoints
import forked
import numpy as np
import poison
import pytest
import stock

pytestmark = pytest.mark.slow


def config(run, optimizer, *, steps=poison.STEPS, seed=0, z_loss_weight=0.0, **trainer):
    config = stock.config({"learning_rate": 3e-3, "warmup": 5, **optimizer})
    config["trainer"] |= {"num_train_steps": steps, "id": run, "seed": seed, **trainer}
    return config | {"z_loss_weight": z_loss_weight}


def test_poisoned_gradients_are_skipped_and_counted(folder):
    """Of 80 steps, three each have NaN, infinities, or numbers a thousand times too large in the gradient and the loss."""
    mars = {"type": "mars-adamw", "skip_bad_steps": 16}
    for seed in (0, 1):
        forked.run(folder, config(f"seed-{seed}", mars, seed=seed), f"seed-{seed}")
    forked.run(folder, config("poisoned", {**mars, "type": "poisoned-mars-adamw"}), "poisoned", before=poison.register)

    clean, other, poisoned = (np.array(stock.losses(folder, name)) for name in ("seed-0", "seed-1", "poisoned"))
    first = min(poison.BAD)
    np.testing.assert_allclose(poisoned[: first + 1], clean[: first + 1], rtol=0, atol=1e-5)
    assert np.abs(poisoned[first + 1 :] - clean[first + 1 :]).max() > 1e-3
    # Levanter takes the first large one that it skips into its history, beside which the other two are not large: the clip shortens those.
    assert stock.metrics(folder, "poisoned")[-1]["optim/mars/skipped_steps"] == len(poison.NOT_FINITE) + 1 == 7
    # At the end as far from the run without them as that is from another seed's, up to the nine steps that it lacks.
    noise = np.abs(other - clean)[-20:].max() + (clean[-20:-10].mean() - clean[-10:].mean())
    assert clean[0] - clean[-10:].mean() > 1.5
    assert abs(poisoned[-10:].mean() - clean[-10:].mean()) < noise, (poisoned[-10:], clean[-10:], other[-10:])


def test_the_same_poison_is_the_end_of_adamw(folder):
    """So that the test above can fail; and Levanter, as it is by default, says so and stops."""
    assert forked.finish(forked.start(folder, config("adam", {"type": "poisoned-adam"}), "adam", before=poison.register)) == 1
    assert "RuntimeError: Loss is NaN" in (folder / "adam.err").read_text()
    assert len(stock.losses(folder, "adam")) <= min(poison.NOT_FINITE) + 1


@pytest.mark.parametrize(("weight", "word"), [(math.nan, "NaN"), (2e36, "Inf")])
def test_a_loss_that_is_not_finite_stops_the_run(weight, word, folder):
    """By a z-loss of that weight; the second overflows in its sum."""
    stops = config(f"{word}-stops", {"type": "mars-adamw"}, z_loss_weight=weight, steps=6)
    assert forked.finish(forked.start(folder, stops, f"{word}-stops")) == 1
    assert f"RuntimeError: Loss is {word}" in (folder / f"{word}-stops.err").read_text()


def test_without_crash_on_nan_each_bad_step_is_skipped_and_counted(folder):
    going_on = config("goes-on", {"type": "mars-adamw"}, z_loss_weight=math.nan, steps=6, crash_on_nan=False)
    going_on["trainer"]["checkpointer"]["keep"] = [{"every": 2}]
    forked.run(folder, going_on, "goes-on")
    assert stock.metrics(folder, "goes-on")[-1]["optim/mars/skipped_steps"] == 6
    early, late = (checkpoints.arrays(folder / "checkpoints" / "goes-on" / f"step-{step}") for step in (2, 5))
    unchanged = [key for key in early if "/mu/" in key or key.startswith("model/")]
    assert len(unchanged) > 20 and [key for key in unchanged if early[key] != late[key]] == []
