"""A run that was saved on 1, 2 or 8 devices and goes on on another number of them loses what it would have lost without the move."""

import checkpoints
import forked
import numpy as np
import pytest
import stock

pytestmark = pytest.mark.slow

STEPS, SAVED = 16, 8
OPTIMIZERS = {
    "mars-adamw": {"type": "mars-adamw"},
    # Whole matrices are sent to other devices on another mesh. In bfloat16 the order of their sums would show.
    "mars-m": {"type": "mars-m", "newton_schulz_dtype": "float32"},
}
MOVES = {
    "mars-adamw": [(1, 2), (1, 8), (2, 1), (2, 8), (8, 1), (8, 2)],
    "mars-m": [(1, 8)],
}


def config(kind, run):
    config = stock.config({"learning_rate": 1e-3, "warmup": 4, **OPTIMIZERS[kind]})
    config["trainer"] |= {"num_train_steps": STEPS, "id": run}
    config["trainer"]["checkpointer"]["keep"] = [{"every": SAVED}]
    return config


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_losses_are_those_of_the_uninterrupted_run(kind, folder):
    runs = folder / "checkpoints"
    for before in {before for before, _ in MOVES[kind]}:
        forked.run(folder, config(kind, f"{kind}-{before}"), f"{kind}-{before}", devices=before)
        assert len(stock.losses(folder, f"{kind}-{before}")) == STEPS
    for before, after in MOVES[kind]:
        moved = f"{kind}-{before}-to-{after}"
        checkpoints.copy(runs / f"{kind}-{before}", SAVED, runs / moved)
        forked.run(folder, config(kind, moved), moved, devices=after)
        expected = stock.losses(folder, f"{kind}-{before}")[SAVED + 1 :]
        np.testing.assert_allclose(stock.losses(folder, moved), expected, rtol=0, atol=1e-5, err_msg=moved)
