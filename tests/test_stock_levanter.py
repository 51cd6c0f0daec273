"""Stock Levanter's command trains with our type in its YAML: on one device, on eight, in two processes; its own types train as before."""

import numpy as np
import pytest
import stock

pytestmark = pytest.mark.slow

MARS = {"type": "mars-adamw", "learning_rate": 6e-3, "learning_rate_1d": 1.5e-3, "min_lr_ratio": 0.1, "warmup": 5}


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
    loss = stock.losses(one_device, "one")
    assert loss[0] == pytest.approx(np.log(304), abs=0.15)  # the vocabulary of 300 tokens is at most rounded up to 304
    assert loss[-1] < loss[0] - 0.5

    # Five steps of warm-up from 0, then a cosine from the peak to a tenth of it over the other fifteen.
    rates = np.array([(step["optim/learning_rate"], step["optim/learning_rate_1d"]) for step in steps])
    after = np.arange(stock.STEPS) - 5
    shape = np.where(after < 0, (after + 5) / 5, 0.1 + 0.9 * 0.5 * (1 + np.cos(np.pi * after / 15)))
    np.testing.assert_allclose(rates, np.outer(shape, [6e-3, 1.5e-3]), rtol=1e-5, atol=1e-9)


def test_eight_devices_train_the_same(one_device):
    assert_finished(stock.finish(stock.start(one_device, stock.config(MARS), devices=8, name="eight")), one_device, "eight")
    np.testing.assert_allclose(stock.losses(one_device, "eight"), stock.losses(one_device, "one"), atol=1e-4, rtol=0)


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
    np.testing.assert_allclose(stock.losses(one_device, "process0"), stock.losses(one_device, "one"), atol=1e-4, rtol=0)


def test_adam_trains_as_it_does_without_us(one_device):
    adam = stock.config({"type": "adam", "learning_rate": 3e-3})
    with_us = stock.start(one_device, adam, name="adam")
    without = stock.start(one_device, adam, name="adam_alone", program=WITHOUT_US)
    assert_finished(stock.finish(with_us, without), one_device, "adam")
    assert len(stock.losses(one_device, "adam")) == stock.STEPS
    assert stock.losses(one_device, "adam") == stock.losses(one_device, "adam_alone")


EXACT = {**MARS, "exact": True, "diagnostics_every": 4}


def test_without_what_is_ours_it_trains_as_levanters_adam_does(one_device):
    rate = {"learning_rate": 6e-3, "weight_decay": 0.1, "warmup": 5}
    same = {"gamma": 0, "correction_clip": None, "beta1": 0.9, "beta2": 0.95, "optimize_1d": True}
    for name, optimizer in (("levanters-adam", {"type": "adam"}), ("as-adam", {"type": "mars-adamw", **same})):
        process = stock.start(one_device, stock.config(optimizer | rate), name=name)
        assert_finished(stock.finish(process), one_device, name)
    np.testing.assert_allclose(stock.losses(one_device, "as-adam"), stock.losses(one_device, "levanters-adam"), atol=1e-5, rtol=0)


def test_the_exact_form_with_accumulation_trains_as_without(one_device):
    """Eight examples a device at a time on one device, sixteen on eight: through the stock command, which asks nothing of the user."""
    accumulating = stock.config(EXACT)
    accumulating["trainer"]["per_device_parallelism"] = 8
    for name, config, devices in (("exact", stock.config(EXACT), 8), ("exact_by_microbatches", accumulating, 1)):
        assert_finished(stock.finish(stock.start(one_device, config, devices=devices, name=name)), one_device, name)
    np.testing.assert_allclose(stock.losses(one_device, "exact_by_microbatches"), stock.losses(one_device, "exact"), atol=1e-4, rtol=0)
    # Another algorithm than the approximate form.
    assert np.abs(np.subtract(stock.losses(one_device, "exact"), stock.losses(one_device, "one"))).max() > 1e-3
    first, *_, last = stock.metrics(one_device, "exact")
    # lg_1 = 0, so the first correction is κ = 0.475 times the gradient; later ones are the change of one step.
    assert first["optim/mars/correction_ratio"] == pytest.approx(0.475, abs=1e-4)
    assert 0 < last["optim/mars/correction_ratio"] < 0.1
    assert last["optim/mars/skipped_steps"] == 0


LEAN = {
    "type": "mars-m",
    "learning_rate": 2e-2,
    "correction_clip": None,
    "gamma": {"type": "linear", "init_value": 0.04, "end_value": 0.02, "transition_steps": 10},
    "cautious": True,
    "skip_bad_steps": 8,
    "warmup": 5,
}


def test_options_of_the_family_train_and_are_logged(one_device):
    assert_finished(stock.finish(stock.start(one_device, stock.config(LEAN), name="lean")), one_device, "lean")
    loss = stock.losses(one_device, "lean")
    assert len(loss) == stock.STEPS and loss[-1] < loss[0] - 0.5
    gammas = [step["optim/mars/gamma"] for step in stock.metrics(one_device, "lean")]
    np.testing.assert_allclose(gammas, np.maximum(0.04 - 0.002 * np.arange(stock.STEPS), 0.02), rtol=1e-5)


WITHOUT_US = """
import runpy, sys, types
sys.modules["levanter.optim.levanter_mars"] = types.ModuleType("nothing")
runpy.run_module("levanter.main.train_lm", run_name="__main__", alter_sys=True)
assert not any(name.startswith("levanter_mars") for name in sys.modules)
"""
