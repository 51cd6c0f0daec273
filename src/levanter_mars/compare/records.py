"""What is kept of a run, and the file that keeps it: a line of JSON a run, so that results can be copied, merged and read by anything."""

import dataclasses
import json
import math
import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from levanter_mars.quickstart.training_log import TrainingLog


class Evaluation(NamedTuple):
    """The model after so many steps."""

    steps: int
    train_loss: float
    """Mean of the batches since the evaluation before, nats a token."""
    held_out_loss: float
    """Nats a token."""


@dataclass(frozen=True)
class Record:
    """A run that is over: finished, or diverged."""

    id: str
    optimizer: str
    learning_rate: float
    seed: int
    diverged: bool
    """Whether a loss that is not finite ended the run or its schedule."""
    steps: int
    """Steps with a finite loss."""
    tokens_per_step: int
    first_loss: float | None
    """Training loss of the first batch before any update, the same for all optimizers of a seed; None if it is not finite or not known."""
    evaluations: tuple[Evaluation, ...]
    step_seconds: float | None
    """That a tenth of the run's steps stay below, as the trainer measured them: what else a machine does at times has no weight."""
    state_bytes: int | None = None
    """Of the optimizer's state; None where only the log is known."""
    made_by: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Machine and versions."""

    @property
    def final_loss(self) -> float:
        """Held-out loss at the end of the schedule, nats a token; infinite if the run diverged."""
        return math.inf if self.diverged else self.evaluations[-1].held_out_loss


def result_of(log: TrainingLog, has_diverged: bool) -> dict[str, Any]:
    """The fields of a Record that come from the run's log.

    Args:
        has_diverged: whether it is known to have; a loss in the log that is not finite says so too.
    """
    # Not every Levanter logs every step.
    not_finite = min((step for step, loss in log.train_loss.items() if not math.isfinite(loss)), default=None)
    first_loss = log.train_loss.get(0, math.nan)
    last_held_out = log.held_out_loss.get(max(log.held_out_loss, default=-1), math.nan)
    tokens = [log.tokens_per_second[step] * log.step_seconds[step] for step in log.tokens_per_second]
    return {
        "diverged": has_diverged or not_finite is not None or not math.isfinite(last_held_out),
        "steps": max(log.train_loss, default=-1) + 1 if not_finite is None else not_finite,
        "tokens_per_step": round(statistics.median(tokens)) if tokens else 0,
        "first_loss": first_loss if math.isfinite(first_loss) else None,
        "evaluations": evaluations_of(log),
        "step_seconds": round(float(np.quantile(list(log.step_seconds.values()), 0.1)), 6) if log.step_seconds else None,
    }


def evaluations_of(log: TrainingLog) -> tuple[Evaluation, ...]:
    """The finite evaluations of a run. What Levanter logs at step i is of the model after i + 1 steps if it is a held-out loss."""
    evaluations = []
    since = 0
    for step, held_out in sorted(log.held_out_loss.items()):
        losses = [log.train_loss[i] for i in range(since, step + 1) if math.isfinite(log.train_loss.get(i, math.nan))]
        since = step + 1
        if losses and math.isfinite(held_out):
            evaluations.append(Evaluation(step + 1, round(math.fsum(losses) / len(losses), 6), held_out))
    return tuple(evaluations)


def read_records(path: Path) -> list[Record]:
    """The records in a file, in order; none if it does not exist. What a kill left of a last line is no record.

    Raises:
        ValueError: a whole line is no record.
    """
    if not path.exists():
        return []
    *lines, _ = path.read_text().split("\n")
    records = []
    for number, line in enumerate(lines, start=1):
        try:
            fields = json.loads(line)
            fields["evaluations"] = tuple(Evaluation(*e) for e in fields["evaluations"])
            records.append(Record(**fields))
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(
                f"line {number} of {path} is no record of a run ({error}); remove the line, and the run is made again or read from its log"
            ) from None
    return records


def append_record(path: Path, record: Record) -> None:
    """Adds a record, on the disk when this returns. A kill in between leaves the records before it as they are."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+b") as file:
        file.truncate(_whole_lines(file.name))
        file.write(json.dumps(dataclasses.asdict(record)).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())


def write_whole(path: Path, content: str | bytes) -> None:
    """Writes a file that is at no moment seen in part."""
    unfinished = path.with_name(path.name + ".unfinished")
    unfinished.write_bytes(content.encode() if isinstance(content, str) else content)
    unfinished.replace(path)


def by_rate(records: Sequence[Record]) -> dict[float, list[Record]]:
    """Records of one optimizer by learning rate, lowest first; those of a rate by seed."""
    rates = sorted({record.learning_rate for record in records})
    return {rate: sorted((r for r in records if r.learning_rate == rate), key=lambda r: r.seed) for rate in rates}


def _whole_lines(path: str) -> int:
    """Bytes up to the end of the last line that is whole."""
    return Path(path).read_bytes().rfind(b"\n") + 1
