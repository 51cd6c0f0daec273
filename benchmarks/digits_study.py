"""Trains the digits' ResNet with several optimizers, each from several seeds, and prints a table of what they reach on the test images.

    python benchmarks/digits_study.py

Needs no accelerator and no download. Every run is that of config/vision/digits.yaml with another optimizer; a run that was finished before
is not repeated.
"""

import copy
import json
import logging
import os
from dataclasses import dataclass, field
from pathlib import Path

import draccus
import numpy as np
import yaml

from levanter_mars.main.train_vision import TrainVisionConfig, train
from levanter_mars.vision.history import read_history

DIGITS = Path(__file__).parents[1] / "config" / "vision" / "digits.yaml"
MUON = {"type": "mars-shampoo", "learning_rate": 2e-2, "gamma": 0.05, "correction_clip": None, "weight_decay": 0.0}
OPTIMIZERS = {
    "AdamW": {"type": "adam", "learning_rate": 3e-3, "weight_decay": 0.01},
    "Muon, filters by AdamW": MUON | {"convolutions": "vector"},
    "Muon, filters as matrices": MUON,
    "MARS-AdamW, filters by AdamW": {"type": "mars-adamw", "learning_rate": 3e-3, "convolutions": "vector"},
    "MARS-AdamW, filters as matrices": {"type": "mars-adamw", "learning_rate": 3e-3, "convolutions": "matrix"},
    "MARS-Shampoo, filters as matrices": {"type": "mars-shampoo", "learning_rate": 2e-2},
    "MARS-M, filters as matrices": {"type": "mars-m", "learning_rate": 3e-3},
}
"""Where a type has a rate and a decay of what is no matrix, they are 3e-3 and 0 in all of them."""


@dataclass
class Study:
    optimizers: list[str] = field(default_factory=lambda: list(OPTIMIZERS))
    seeds: int = 3
    steps: int = 150
    folder: Path = Path("build/vision/study")


def run(name: str, seed: int, steps: int, folder: Path) -> dict[str, dict[int, float]]:
    """The history of one run, read if it is there and complete."""
    document = yaml.safe_load(DIGITS.read_text())
    schedule = {key: document["optimizer"][key] for key in ("warmup", "lr_schedule")}
    rest = {} if name == "AdamW" else {"learning_rate_1d": 3e-3, "weight_decay_1d": 0.0}
    document["optimizer"] = copy.deepcopy(OPTIMIZERS[name]) | rest | schedule
    run_id = f"{list(OPTIMIZERS).index(name)}-{seed}-{steps}"
    document["trainer"] |= {
        "id": run_id,
        "seed": seed,
        "num_train_steps": steps,
        "log_dir": str(folder),
        "jax_compilation_cache_dir": str(folder / "compiled"),
    }
    document["trainer"]["checkpointer"]["base_path"] = str(folder / "checkpoints")
    history = folder / run_id / "history.jsonl"
    if steps - 1 not in read_history(history)["eval/accuracy"]:
        config = draccus.decode(TrainVisionConfig, document)
        data = config.data.load()
        train(config, data, config.data.normalization(data.train))
    return read_history(history)


def main(study: Study) -> None:
    logging.disable(logging.WARNING)
    rows = {}
    for name in study.optimizers:
        histories = [run(name, seed, study.steps, study.folder) for seed in range(study.seeds)]
        last = {metric: [list(history[metric].values())[-1] for history in histories] for metric in ("eval/accuracy", "eval/loss")}
        early = [list(history["eval/accuracy"].values())[0] for history in histories]
        rows[name] = {"accuracy": last["eval/accuracy"], "loss": last["eval/loss"], "accuracy after 50 steps": early}
        print(json.dumps({name: rows[name]}), flush=True)
    print("| | test accuracy, % | test loss | accuracy after 50 steps, % |\n|---|---|---|---|")
    for name, row in rows.items():
        accuracy, loss, early = (np.array(row[key]) for key in ("accuracy", "loss", "accuracy after 50 steps"))
        spread = f"{100 * accuracy.mean():.2f} ({100 * accuracy.min():.2f} to {100 * accuracy.max():.2f})"
        print(f"| {name} | {spread} | {loss.mean():.4f} | {100 * early.mean():.2f} |")


if __name__ == "__main__":
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    draccus.wrap()(main)()
