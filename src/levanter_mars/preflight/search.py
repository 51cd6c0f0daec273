"""The largest number of examples that a device can hold at once."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from levanter.main.train_lm import TrainLmConfig

from levanter_mars.preflight.hardware import Topology
from levanter_mars.preflight.report import Report, preflight
from levanter_mars.preflight.train_step import parallelisms


def find_batch(
    config: TrainLmConfig, topology: Topology, devices: Sequence[Any], vocab_size: int, progress: Callable[[Report], None]
) -> Report:
    """The report with the largest `per_device_parallelism` that fits, or, where none does, with 1.

    Tries only those that divide the config's batch, which keeps its size. Memory grows with the number, so halving the candidates needs
    few compilations; `progress` gets the report of each.
    """
    candidates = parallelisms(config, devices)
    largest: Report | None = None
    low, high = 0, len(candidates)
    while low < high:
        middle = (low + high) // 2
        trainer = dataclasses.replace(config.trainer, per_device_parallelism=candidates[middle], per_device_eval_parallelism=-1)
        report = preflight(dataclasses.replace(config, trainer=trainer), topology, devices, vocab_size)
        progress(report)
        if report.fits:
            largest, low = report, middle + 1
        else:
            high = middle
            largest = largest or (report if middle == 0 else None)
    assert largest is not None
    return largest
