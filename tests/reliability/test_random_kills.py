"""A run that is killed again and again at random moments ends, bit for bit, as one that is not.

Four times in the suite; as often as one likes with

    .venv/bin/python -m pytest tests/reliability/test_random_kills.py --kills 20 -s
"""

import functools
import os
import random
import signal
import time

import checkpoints
import forked
import pytest
import stock

pytestmark = pytest.mark.slow

EVERY = 10
"""Steps from one checkpoint to the next."""
STEPS_A_KILL = 40
"""More than a start ever takes before its kill, so that the run does not end before the last one."""
MOMENTS_OF_A_WRITE = [("os.mkdir", "step-{}"), ("open", "step-{}/manifest.json"), ("os.rename", "step-{}/metadata.json")]
"""Before anything of a checkpoint is written, before its list of arrays is, before it counts."""


def config(run, steps):
    config = stock.config({"type": "mars-adamw", "learning_rate": 3e-3})
    config["trainer"] |= {"num_train_steps": steps, "id": run}
    config["trainer"]["checkpointer"]["keep"] = [{"every": EVERY}]
    return config


def losses(folder, name):
    return [step["train/loss"] for step in stock.metrics(folder, name)]


def kill_at_a_random_moment(folder, config, name, how, rng):
    """After some steps and up to a tenth of a second; now and then before the first step, while the checkpoint is being restored."""
    process = forked.start(folder, config, name, module=forked.OURS)
    steps = rng.randrange(14)
    log = folder / f"{name}.err"
    while process.is_alive() and not (log.exists() and log.read_text().count('"train/loss"') >= steps):
        time.sleep(0.02)
    time.sleep(rng.uniform(0, 0.1))
    process.join(0)
    assert process.exitcode is None, f"{name} ended with {process.exitcode} before its kill"
    os.kill(process.pid, how)
    return forked.finish(process)


def kill_in_a_write(folder, config, name, how, rng, last):
    """At a random point of the write of the next checkpoint, or of the one after it."""
    event, path = rng.choice(MOMENTS_OF_A_WRITE)
    step = ((last + 1) // EVERY + rng.choice([1, 2])) * EVERY
    before = functools.partial(forked.kill_self_at, event, path.format(step), how=how)
    return forked.finish(forked.start(folder, config, name, module=forked.OURS, before=before))


def test_a_run_killed_at_random_moments_ends_as_one_that_is_not(tmp_path, request):
    kills = request.config.getoption("kills")
    rng = random.Random(0)
    stock.write_workspace(tmp_path)
    steps = kills * STEPS_A_KILL
    forked.run(tmp_path, config("straight", steps), "straight")
    expected = losses(tmp_path, "straight")
    assert len(expected) == steps

    run = tmp_path / "checkpoints" / "killed"
    killed = config("killed", steps)
    hows = [signal.SIGTERM if i % 2 else signal.SIGKILL for i in range(kills)]
    in_write = [i % 4 >= 2 for i in range(kills)]
    rng.shuffle(hows)
    newest, compared = -1, 0

    def steps_done(name):
        """Of a start, which went on from the newest complete checkpoint and computed what the straight run did."""
        nonlocal compared
        log = (tmp_path / f"{name}.err").read_text()
        if newest >= 0 and "First batch loaded" in log:
            assert f"Resuming training from step {newest + 1}" in log
        found = losses(tmp_path, name)
        assert found == expected[newest + 1 : newest + 1 + len(found)]
        compared += len(found)
        return len(found)

    for i, how in enumerate(hows):
        if in_write[i]:
            status = kill_in_a_write(tmp_path, killed, f"{i}", how, rng, newest)
        else:
            status = kill_at_a_random_moment(tmp_path, killed, f"{i}", how, rng)
        # A notice before there is anything to save ends a process as it ends any.
        assert status == -how or (how == signal.SIGTERM and status == 75), (tmp_path / f"{i}.err").read_text()[-3000:]
        before, done = newest, steps_done(f"{i}")
        newest = max(checkpoints.complete(run), default=-1)
        assert newest == before + done if status == 75 else newest >= before
    forked.run(tmp_path, killed, "last", module=forked.OURS)
    assert newest + 1 + steps_done("last") == steps

    a, b = (checkpoints.arrays(tmp_path / "checkpoints" / name / f"step-{steps - 1}") for name in ("straight", "killed"))
    assert a.keys() == b.keys()
    different = [key for key in a if a[key] != b[key]]
    print(
        f"\n{kills} kills ({hows.count(signal.SIGKILL)} SIGKILL, {hows.count(signal.SIGTERM)} SIGTERM; {sum(in_write)} at the beginning of "
        "a checkpoint's write or within it): each time on from the newest complete checkpoint, no step lost beyond it; "
        f"{compared} losses compared, equal; {len(different)} of {len(a)} stored keys differ at the end"
    )
    assert different == []
