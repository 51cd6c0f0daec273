"""python -m levanter_mars.main.train_lm, in one process; tests/infra/test_slurm.py has it in two."""

import signal
import time

import numpy as np
import pytest
import stock

pytestmark = pytest.mark.slow

OURS = "import runpy; runpy.run_module('levanter_mars.main.train_lm', run_name='__main__', alter_sys=True)"


def test_a_notice_saves_and_the_same_command_goes_on_from_there(tmp_path):
    stock.write_workspace(tmp_path)
    config = stock.config({"type": "mars-adamw", "learning_rate": 1e-3})
    # Long enough to be interrupted, and nothing but the notice asks for a checkpoint before the end.
    config["trainer"] |= {"num_train_steps": 150, "id": "run"}

    process = stock.start(tmp_path, config, name="first", program=OURS)
    while process.poll() is None and len(stock.losses(tmp_path, "first")) < 5:
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    assert stock.finish(process) == [75], (tmp_path / "first.err").read_text()[-3000:]
    saved = len(stock.losses(tmp_path, "first"))
    assert 5 <= saved < 150
    assert [path.name for path in (tmp_path / "checkpoints" / "run").glob("step-*")] == [f"step-{saved - 1}"]
    assert f"Preempted: saved after step {saved - 1};" in (tmp_path / "first.err").read_text()

    assert stock.finish(stock.start(tmp_path, config, name="second", program=OURS)) == [0], (tmp_path / "second.err").read_text()[-3000:]
    config["trainer"]["id"] = "stock"
    assert stock.finish(stock.start(tmp_path, config, name="stock")) == [0], (tmp_path / "stock.err").read_text()[-3000:]
    # On one machine they are the same computation.
    np.testing.assert_allclose(
        [*stock.losses(tmp_path, "first"), *stock.losses(tmp_path, "second")], stock.losses(tmp_path, "stock"), rtol=0, atol=1e-6
    )
