"""What a run logs, in a file of its own beside the trackers that it has, for the curves that are drawn at its end."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
from levanter.tracker import Tracker

METRICS = ("train/loss", "train/accuracy", "eval/loss", "eval/accuracy")


class History(Tracker):
    """Appends METRICS to a file as lines of JSON."""

    name = "history"

    def __init__(self, path: Path):
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)

    def log(self, metrics: Mapping[str, Any], *, step: int | None, commit: bool | None = None) -> None:
        del commit
        kept = {name: float(jax.device_get(metrics[name])) for name in METRICS if name in metrics}
        if kept and step is not None:
            with self.path.open("a") as file:
                file.write(json.dumps({"step": step, **kept}) + "\n")

    def log_hyperparameters(self, hparams: dict[str, Any]) -> None:
        pass

    def log_summary(self, metrics: dict[str, Any]) -> None:
        pass

    def log_artifact(self, artifact_path: Any, *, name: str | None = None, type: str | None = None) -> None:
        pass

    def finish(self) -> None:
        pass


def read_history(path: Path) -> dict[str, dict[int, float]]:
    """Each metric by step. Where a resumed run went over steps again, the last value of a step stands."""
    history: dict[str, dict[int, float]] = {name: {} for name in METRICS}
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            record = json.loads(line)
        except json.JSONDecodeError:  # the line that a kill cut short
            continue
        for name, values in history.items():
            if name in record:
                values[record["step"]] = record[name]
    return history
