"""Reads runs that were made elsewhere from what Levanter's trackers left: json_logger, TensorBoard, wandb offline."""

import dataclasses
import json
import struct
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from levanter_mars.compare.records import Record, result_of
from levanter_mars.compare.study import ExistingRun
from levanter_mars.quickstart.training_log import METRICS_MARK, TrainingLog, log_from_points, read_training_log

PROGRESS = "run_progress"
"""The part of the schedule that is behind, as Levanter logs it at every step."""


class Point(NamedTuple):
    step: int
    metric: str
    value: float


def read_existing(run: ExistingRun) -> Record:
    """Raises:
    ValueError: what is at the path is no run of Levanter's, or one that did not come to the end of its schedule.
    """
    points = list(read_points(run.path))
    log = log_from_points(points)
    if not log.train_loss or not log.held_out_loss:
        raise ValueError(f"{run.path} holds no train/loss or no eval/loss, so it is no run of Levanter's with a held-out set")
    record = Record(
        id=run.path.name, optimizer=run.optimizer, learning_rate=run.learning_rate, seed=run.seed, **result_of(log, run.diverged)
    )
    last = max(log.train_loss)
    progress = next((p.value for p in reversed(points) if p.metric == PROGRESS and p.step == last), None)
    if not record.diverged:
        if progress is None or progress < 1:
            part = "an unknown part" if progress is None else f"{progress:.1%}"
            raise ValueError(
                f"{run.path} ends after {part} of its schedule, and losses are compared at the end only; "
                "finish the run, leave it out, or mark it `diverged: true`"
            )
        if last not in log.held_out_loss:
            raise ValueError(f"{run.path} has no held-out loss after its last step, {last + 1}")
    return record


def read_points(path: Path) -> Iterator[Point]:
    """All values of a run, in the order in which they were logged.

    Raises:
        ValueError: nothing at the path is known.
    """
    if path.is_file() and path.suffix == ".wandb":
        return _wandb_points(path)
    if path.is_file():
        return _json_points(path)
    if events := sorted(path.glob("events.out.tfevents.*")):
        return (point for file in events for point in _tensorboard_points(file))
    if files := sorted(path.glob("run-*.wandb")):
        return (point for file in files for point in _wandb_points(file))
    raise ValueError(f"{path} holds neither events.out.tfevents.* nor run-*.wandb, and is no log file of json_logger")
