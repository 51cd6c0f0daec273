"""Stock Levanter's command trains with our type in its YAML: on one device, on eight, in two processes; its own types train as before."""

import numpy as np
import pytest
import stock

pytestmark = pytest.mark.slow

MARS = {"type": "mars-adamw", "learning_rate": 6e-3, "learning_rate_1d": 1.5e-3, "min_lr_ratio": 0.1, "warmup": 5}


def losses(folder, name):
    return [step["train/loss"] for step in stock.metrics(folder, name)]


def assert_finished(codes, folder, name):
    assert codes == [0] * len(codes), (folder / f"{name}.err").read_text()[-3000:]


@pytest.fixture(scope="module")
def one_device(tmp_path_factory):
    """A workspace in which one device has trained; the runs that follow find the tokens there."""
    folder = tmp_path_factory.mktemp("stock")
    stock.write_workspace(folder)
    assert_finished(stock.finish(stock.start(folder, stock.config(MARS), name="one")), folder, "one")
    return folder


def test_trains_and_logs_both_learning_rates(one_device):
    steps = stock.metrics(one_device, "one")
    assert len(steps) == stock.STEPS
    loss = losses(one_device, "one")
    assert loss[0] == pytest.approx(np.log(304), abs=0.15)  # the vocabulary of 300 tokens is at most rounded up to 304
    assert loss[-1] < loss[0] - 0.5

    # Five steps of warm-up from 0, then a cosine from the peak to a tenth of it over the other fifteen.
    rates = np.array([(step["optim/learning_rate"], step["optim/learning_rate_1d"]) for step in steps])
    after = np.arange(stock.STEPS) - 5
    shape = np.where(after < 0, (after + 5) / 5, 0.1 + 0.9 * 0.5 * (1 + np.cos(np.pi * after / 15)))
    np.testing.assert_allclose(rates, np.outer(shape, [6e-3, 1.5e-3]), rtol=1e-5, atol=1e-9)


def test_eight_devices_train_the_same(one_device):
    assert_finished(stock.finish(stock.start(one_device, stock.config(MARS), devices=8, name="eight")), one_device, "eight")
    np.testing.assert_allclose(losses(one_device, "eight"), losses(one_device, "one"), atol=1e-4, rtol=0)


def test_two_processes_of_two_devices_train_the_same(one_device):
    port = stock.free_port()
    processes = [
        stock.start(
            one_device,
            stock.config(MARS),
            *("--trainer.distributed.coordinator_address", f"127.0.0.1:{port}"),
            *("--trainer.distributed.num_processes", "2"),
            *("--trainer.distributed.process_id", str(i)),
            devices=2,
            name=f"process{i}",
        )
        for i in range(2)
    ]
    assert_finished(stock.finish(*processes), one_device, "process0")
    np.testing.assert_allclose(losses(one_device, "process0"), losses(one_device, "one"), atol=1e-4, rtol=0)


def test_adam_trains_as_it_does_without_us(one_device):
    adam = stock.config({"type": "adam", "learning_rate": 3e-3})
    with_us = stock.start(one_device, adam, name="adam")
    without = stock.start(one_device, adam, name="adam_alone", program=WITHOUT_US)
    assert_finished(stock.finish(with_us, without), one_device, "adam")
    assert len(losses(one_device, "adam")) == stock.STEPS
    assert losses(one_device, "adam") == losses(one_device, "adam_alone")


WITHOUT_US = """
import runpy, sys, types
sys.modules["levanter.optim.levanter_mars"] = types.ModuleType("nothing")
runpy.run_module("levanter.main.train_lm", run_name="__main__", alter_sys=True)
assert not any(name.startswith("levanter_mars") for name in sys.modules)
"""
