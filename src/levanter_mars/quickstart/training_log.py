"""Reads a run back from the log file that Levanter writes when its tracker is `json_logger`."""

import json
import statistics
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

METRICS_MARK = '{"tracker": "json_logger"'
"""How a line of metrics begins, after the logger's own prefix."""


@dataclass
class TrainingLog:
    """Metrics by step. Where a resumed run went over steps again, the last value of a step stands."""

    train_loss: dict[int, float] = field(default_factory=dict)
    held_out_loss: dict[int, float] = field(default_factory=dict)
    tokens_per_second: dict[int, float] = field(default_factory=dict)
    step_seconds: dict[int, float] = field(default_factory=dict)
    has_ended: bool = False
    """Whether the last thing in the log is the end of the run."""

    def is_complete(self, num_train_steps: int) -> bool:
        return self.has_ended and num_train_steps - 1 in self.train_loss and num_train_steps - 1 in self.held_out_loss

    @property
    def median_tokens_per_second(self) -> float:
        """Over all steps, so that the first, which contains compilation, has no weight."""
        return statistics.median(self.tokens_per_second.values())

    @property
    def median_step_seconds(self) -> float:
        return statistics.median(self.step_seconds.values())


def read_training_log(path: Path) -> TrainingLog:
    """Reads a log file; one that does not exist is a run that has not begun."""
    return parse_training_log(path.read_text().splitlines()) if path.exists() else TrainingLog()


def parse_training_log(lines: Iterable[str]) -> TrainingLog:
    log = TrainingLog()
    by_metric = {
        "train/loss": log.train_loss,
        "eval/loss": log.held_out_loss,
        "throughput/tokens_per_second": log.tokens_per_second,
        "throughput/duration": log.step_seconds,
    }
    for line in lines:
        _, mark, rest = line.partition(METRICS_MARK)
        if not mark:
            continue
        try:
            record = json.loads(mark + rest)
        except json.JSONDecodeError:  # the line that a kill cut short
            continue
        log.has_ended = record["event"] == "finish"
        if record["event"] == "log" and record["step"] is not None:
            for metric, values in by_metric.items():
                # Resumed after its last step, a run takes none, and Levanter logs a loss of 0 for it.
                if metric in record["metrics"] and not (metric == "train/loss" and record["metrics"][metric] == 0 and record["step"] in values):
                    values[record["step"]] = record["metrics"][metric]
    return log
