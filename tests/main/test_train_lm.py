"""python -m levanter_mars.main.train_lm, in one process and in two; tests/infra/test_slurm.py has it under Slurm."""

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
    # Its status says nothing: Python may abort when it ends under the data loader's threads. The number of losses says that it finished.
    stock.finish(stock.start(tmp_path, config, name="stock"))
    # On one machine they are the same computation.
    np.testing.assert_allclose(
        [*stock.losses(tmp_path, "first"), *stock.losses(tmp_path, "second")], stock.losses(tmp_path, "stock"), rtol=0, atol=1e-6
    )


def start_two(folder, config, name, *arguments):
    port = stock.free_port()
    return [
        stock.start(
            folder,
            config,
            *("--trainer.distributed.coordinator_address", f"127.0.0.1:{port}"),
            *("--trainer.distributed.num_processes", "2"),
            *("--trainer.distributed.process_id", str(process)),
            *arguments,
            name=f"{name}{process}",
            program=OURS,
        )
        for process in range(2)
    ]


def test_a_notice_to_one_process_of_two_ends_both_after_the_same_step(tmp_path):
    """As when one machine of a run is taken away; not the one that the others look for."""
    stock.write_workspace(tmp_path)
    config = stock.config({"type": "mars-adamw", "learning_rate": 1e-3})
    config["trainer"] |= {"num_train_steps": 10000, "id": "run"}  # JAX looks for a notice once a second

    processes = start_two(tmp_path, config, "first")
    while all(process.poll() is None for process in processes) and len(stock.losses(tmp_path, "first0")) < 5:
        time.sleep(0.1)
    processes[1].send_signal(signal.SIGTERM)
    assert stock.finish(*processes) == [75, 75], (tmp_path / "first0.err").read_text()[-3000:]
    errors = [(tmp_path / f"first{process}.err").read_text() for process in range(2)]
    assert ["SIGTERM caught" in text for text in errors] == [False, True]
    saved = len(stock.losses(tmp_path, "first0"))
    assert 5 <= saved < 10000
    assert all(f"Preempted: saved after step {saved - 1};" in text for text in errors)
    assert [path.name for path in (tmp_path / "checkpoints" / "run").glob("step-*")] == [f"step-{saved - 1}"]

    processes = start_two(tmp_path, config, "second", "--trainer.num_train_steps", str(saved + 3))
    assert stock.finish(*processes) == [0, 0], (tmp_path / "second0.err").read_text()[-3000:]
    assert len(stock.losses(tmp_path, "second0")) == 3  # none lost, none repeated
