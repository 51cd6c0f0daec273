"""Forty steps straight are, bit for bit, seventeen, kill -9 in the middle of a later checkpoint's write, and the rest: for every type."""

import functools
import signal

import checkpoints
import forked
import pytest
import stock

pytestmark = pytest.mark.slow

STEPS = 40
SAVED = 16
"""Levanter counts steps from 0, so this checkpoint holds 17."""

OPTIMIZERS = {
    "mars-adamw": {"type": "mars-adamw", "amsgrad": True, "last_gradient_dtype": "bfloat16"},
    "mars-adamw-exact": {"type": "mars-adamw", "exact": True},
    "mars-lion": {"type": "mars-lion", "skip_bad_steps": 8},
    "mars-shampoo": {"type": "mars-shampoo", "momentum_dtype": "bfloat16", "optimize_1d": True},
    "mars-m": {"type": "mars-m"},
    "mars-m-lean": {
        "type": "mars-m",
        "correction_clip": None,
        "gamma": {"type": "linear", "init_value": 0.04, "end_value": 0.01, "transition_steps": 30},
    },
}
KILLS = {
    "mars-adamw": ("os.mkdir", "step-32"),
    "mars-adamw-exact": ("open", "step-32/manifest.json"),
    "mars-lion": ("os.rename", "step-32/metadata.json"),
    "mars-shampoo": ("os.mkdir", "step-32"),
    "mars-m": ("open", "step-32/manifest.json"),
    "mars-m-lean": ("os.rename", "step-32/metadata.json"),
}
"""The moment of the kill: before anything of the second checkpoint is written, before its list of arrays is, before it counts."""


def config(optimizer, run):
    config = stock.config({"learning_rate": 3e-3, "warmup": 5, **optimizer})
    config["trainer"] |= {"num_train_steps": STEPS, "id": run}
    config["trainer"]["checkpointer"]["keep"] = [{"every": 16}]
    return config


def losses(folder, name):
    return [step["train/loss"] for step in stock.metrics(folder, name)]


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_killed_run_goes_on_as_if_it_had_not_been(kind, folder):
    straight, killed = (config(OPTIMIZERS[kind], f"{kind}-{run}") for run in ("straight", "killed"))
    runs = folder / "checkpoints"
    forked.run(folder, straight, f"{kind}-straight")
    before = functools.partial(forked.kill_self_at, *KILLS[kind])
    assert forked.finish(forked.start(folder, killed, f"{kind}-first", before=before)) == -signal.SIGKILL
    assert checkpoints.complete(runs / f"{kind}-killed") == [SAVED]

    forked.run(folder, killed, f"{kind}-second")

    # From the newest complete checkpoint on, over whatever the kill left of the next.
    expected = losses(folder, f"{kind}-straight")
    assert len(expected) == STEPS and losses(folder, f"{kind}-second") == expected[SAVED + 1 :]
    assert checkpoints.complete(runs / f"{kind}-killed") == [SAVED, 32, STEPS - 1]
    for step in (SAVED, 32, STEPS - 1):
        a, b = (checkpoints.arrays(runs / f"{kind}-{run}" / f"step-{step}") for run in ("straight", "killed"))
        assert a.keys() == b.keys()
        assert [key for key in a if a[key] != b[key]] == []
