"""Reports side by side, as text and as a picture."""

import dataclasses

import pytest

from levanter_mars.preflight.hardware import GIB, parse_topology
from levanter_mars.preflight.presentation import memory_figure, table, verdict
from levanter_mars.preflight.report import Report, Roofline

REPORT = Report(
    optimizer="muon",
    topology=parse_topology("v5e:2x2"),
    is_estimate=False,
    parameter_count=1000,
    batch_size=32,
    per_device_parallelism=2,
    microbatches=4,
    sequence_length=128,
    vocab_size=500,
    num_train_steps=7200,
    batch_grows=False,
    state_bytes={"mu": 4000},
    memory={f"part {i}": GIB / 4 for i in range(24)},
    total=6 * GIB,
    capacity=16 * GIB,
    fits=True,
    model_flops=None,
    compile_seconds=1.0,
    roofline=Roofline(compute=0.5, memory=0.25, links=0.125),
)


def row(reports, label: str) -> list[str]:
    (found,) = (line for line in table(reports).splitlines() if line.strip().startswith(label))
    return found.strip().removeprefix(label).split()


def test_one_type_twice_is_numbered_and_has_a_bar_each():
    reports = [REPORT, dataclasses.replace(REPORT, optimizer="adam"), REPORT]
    assert table(reports).splitlines()[2].split() == ["muon", "(1)", "adam", "muon", "(2)"]
    figure = memory_figure(reports)
    (axes,) = figure.axes
    assert [label.get_text() for label in axes.get_xticklabels()] == ["muon (1)", "adam", "muon (2)"]
    # Every part has its place in every bar, however many parts there are.
    assert len(axes.patches) == 24 * 3
    tops = sorted(patch.get_y() + patch.get_height() for patch in axes.patches)
    assert tops[-3:] == pytest.approx([6, 6, 6])


def test_what_differs_from_report_to_report_is_a_row():
    reports = [REPORT, dataclasses.replace(REPORT, per_device_parallelism=8, microbatches=1)]
    assert row(reports, "sequences a device at once") == ["2", "8"]
    assert row(reports, "microbatches in a step") == ["4", "1"]


def test_hours_are_of_steps_that_are_alike():
    grows = dataclasses.replace(REPORT, batch_grows=True)
    assert row([REPORT, grows], "hours of the run at least") == ["1", "–"]
    assert (REPORT.to_json()["hours"], grows.to_json()["hours"]) == (1.0, None)


def test_a_refused_program_has_too_much_by_what_the_compiler_has():
    refused = dataclasses.replace(REPORT, fits=False, total=15.9 * GIB, capacity=15.75 * GIB)
    assert verdict(refused).endswith("does not fit, needs 15.90 GiB of 15.75, 0.15 too many")
    assert row([refused], "fits") == ["NO,", "0.15", "too", "many"]
