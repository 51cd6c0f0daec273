"""Reads a run back from the log file that Levanter writes when its tracker is `json_logger`."""

import contextlib
import json
import statistics
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

METRICS_MARK = '{"tracker": "json_logger"'
"""How a line of metrics begins, after the logger's own prefix."""

FIELDS = {
    "train/loss": "train_loss",
    "eval/loss": "held_out_loss",
    "throughput/tokens_per_second": "tokens_per_second",
    "throughput/duration": "step_seconds",
}
"""Levanter's name of each field of a TrainingLog."""


@dataclass
class TrainingLog:
    """Metrics by step. Where a resumed run went over steps again, the last value of a step stands."""

    train_loss: dict[int, float] = field(default_factory=dict)
    held_out_loss: dict[int, float] = field(default_factory=dict)
    tokens_per_second: dict[int, float] = field(default_factory=dict)
    step_seconds: dict[int, float] = field(default_factory=dict)
    has_ended: bool = False
    """Whether the last thing in the log is the end of the run."""

    def add(self, step: int, metric: str, value: Any) -> None:
        """Takes a value that was logged under one of Levanter's names; others are none of these metrics."""
        # A run that is resumed after its last step takes none, and Levanter logs a loss of 0 for it.
        if metric in FIELDS and not (metric == "train/loss" and value == 0):
            getattr(self, FIELDS[metric])[step] = value

    def is_complete(self, num_train_steps: int) -> bool:
        return self.has_ended and num_train_steps - 1 in self.train_loss and num_train_steps - 1 in self.held_out_loss

    @property
    def median_tokens_per_second(self) -> float:
        """Over all steps, so that the first, which contains compilation, has no weight."""
        return statistics.median(self.tokens_per_second.values())


def read_training_log(path: Path) -> TrainingLog:
    """Reads a log file; one that does not exist is a run that has not begun."""
    return parse_training_log(path.read_text().splitlines()) if path.exists() else TrainingLog()


def parse_training_log(lines: Iterable[str]) -> TrainingLog:
    log = TrainingLog()
    for record in json_records(lines):
        log.has_ended = record["event"] == "finish"
        if record["event"] == "log" and record["step"] is not None:
            for metric, value in record["metrics"].items():
                log.add(record["step"], metric, value)
    return log


def json_records(lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    """What the tracker logged, in order."""
    for line in lines:
        _, mark, rest = line.partition(METRICS_MARK)
        if mark:
            with contextlib.suppress(json.JSONDecodeError):  # the line that a kill cut short
                yield json.loads(mark + rest)
