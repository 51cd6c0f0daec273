"""Reads runs that were made elsewhere from what Levanter's trackers left: json_logger, TensorBoard, wandb offline."""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from google.protobuf.message import DecodeError
from wandb.proto.wandb_internal_pb2 import Record as WandbRecord  # pyrefly: ignore[missing-module-attribute]

from levanter_mars.compare.records import Record, result_of
from levanter_mars.compare.study import ExistingRun
from levanter_mars.quickstart.training_log import TrainingLog, json_records

PROGRESS = "run_progress"
"""The part of the schedule that is behind, as Levanter logs it at every step."""

WANDB_HEADER = 7
WANDB_BLOCK = 2**15
CHUNK_HEADER = 7
FULL, FIRST, MIDDLE, LAST = 1, 2, 3, 4
"""wandb writes LevelDB's log format, https://github.com/google/leveldb/blob/main/doc/log_format.md, after a header of its own."""


class Point(NamedTuple):
    step: int
    metric: str
    value: float


def read_existing(run: ExistingRun) -> Record:
    """
    Raises:
        ValueError: what is at the path is no run of Levanter's, or one that did not come to the end of its schedule.
    """
    log = TrainingLog()
    progress: dict[int, float] = {}
    for step, metric, value in read_points(run.path):
        log.add(step, metric, value)
        if metric == PROGRESS:
            progress[step] = value
    if not log.train_loss or not log.held_out_loss:
        raise ValueError(f"{run.path} holds no train/loss or no eval/loss, so it is no run of Levanter's with a held-out set")
    last = max(log.train_loss)
    if not run.diverged and math.isfinite(log.train_loss[last]):
        # train_lm logs (step + 1) / steps, which is 1 at the last step.
        if progress.get(last) != 1:
            part = f"{progress[last]:.1%}" if last in progress else "an unknown part"
            raise ValueError(
                f"{run.path} ends after {part} of its schedule, and losses are compared at the end only: "
                "finish the run, leave it out, or give it `diverged: true`"
            )
        if last not in log.held_out_loss:
            raise ValueError(f"{run.path} has no held-out loss after its last step, {last + 1}")
    return Record(id=str(run.path), optimizer=run.optimizer, learning_rate=run.learning_rate, seed=run.seed, **result_of(log, run.diverged))


def read_points(path: Path) -> Iterator[Point]:
    """All values of a run, in the order in which they were logged.

    Raises:
        ValueError: nothing at the path is known.
    """
    if path.is_file() and path.suffix == ".wandb":
        return _wandb_points(path)
    if path.is_file():
        return _json_points(path)
    if events := sorted(path.glob("*tfevents*")):
        return (point for file in events for point in _tensorboard_points(file))
    if files := sorted(path.glob("run-*.wandb")):
        return (point for file in files for point in _wandb_points(file))
    raise ValueError(f"{path} holds neither TensorBoard's event files nor run-*.wandb, and is no log file of json_logger")


def _json_points(path: Path) -> Iterator[Point]:
    for record in json_records(path.read_text(errors="replace").splitlines()):
        if record.get("event") == "log" and record.get("step") is not None:
            for metric, value in record["metrics"].items():
                if isinstance(value, int | float):
                    yield Point(record["step"], metric, value)


def _tensorboard_points(path: Path) -> Iterator[Point]:
    try:
        from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
        from tensorboard.util.tensor_util import make_ndarray
    except ImportError:
        raise ValueError(f"{path} is TensorBoard's, and tensorboard is not installed; pip install 'levanter-mars[compare]'") from None
    # The loader turns the scalars of every writer into tensors.
    for event in EventFileLoader(str(path)).Load():
        for value in event.summary.value:
            if value.HasField("tensor") and not value.tensor.tensor_shape.dim and value.metadata.plugin_data.plugin_name == "scalars":
                yield Point(event.step, value.tag, float(make_ndarray(value.tensor)))


def _wandb_points(path: Path) -> Iterator[Point]:
    for content in _leveldb_records(path.read_bytes()[WANDB_HEADER:]):
        try:
            record = WandbRecord.FromString(content)
        except DecodeError:
            raise ValueError(f"{path} is damaged: it holds a record that wandb did not write") from None
        for item in record.history.item:
            try:
                value = float(json.loads(item.value_json))  # wandb writes values that are not finite as strings, "NaN"
            except (ValueError, TypeError):
                continue
            yield Point(record.history.step.num, item.key or "/".join(item.nested_key), value)


def _leveldb_records(log: bytes) -> Iterator[bytes]:
    """The whole records of a log; what a kill cut short at its end is none. Blocks are counted from the file's start, before the header."""
    position = 0
    parts: list[bytes] = []
    while position + CHUNK_HEADER <= len(log):
        left = WANDB_BLOCK - (position + WANDB_HEADER) % WANDB_BLOCK
        if left < CHUNK_HEADER:
            position += left
            continue
        length, kind = int.from_bytes(log[position + 4 : position + 6], "little"), log[position + 6]
        part = log[position + CHUNK_HEADER : position + CHUNK_HEADER + length]
        position += CHUNK_HEADER + length
        if len(part) < length or kind not in (FULL, FIRST, MIDDLE, LAST):
            return
        parts = [part] if kind in (FULL, FIRST) else [*parts, part]
        if kind in (FULL, LAST):
            yield b"".join(parts)
