"""Compares optimizers on images: each at the best of its own learning rates, then from further seeds.

    python -m benchmarks.vision_study --of digits
    python -m benchmarks.vision_study --of cifar10 --overrides '{data: {archive: cifar-10-python.tar.gz}}'

The first seed chooses the learning rate and has no other part in the table; the grid is extended where its best rate is at an edge. The
test images choose it, as they did in the publication. Finished runs are kept in RESULTS/runs.jsonl and are not made again; one that was
interrupted goes on from its newest checkpoint.
"""

import functools
import hashlib
import itertools
import json
import logging
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import draccus
import numpy as np
import yaml
from draccus.utils import DraccusException, ParsingError
from matplotlib.figure import Figure
from matplotlib.ticker import StrMethodFormatter

from levanter_mars.main.train_vision import TrainVisionConfig, load, train
from levanter_mars.vision.history import read_history

ROOT = Path(__file__).parents[1]
CONFIGS = ROOT / "config" / "vision"

OF_VECTORS = {"learning_rate_1d": 3e-3, "weight_decay_1d": 0.0}
MUON = {"type": "mars-shampoo", "learning_rate": 2e-2, "gamma": 0.05, "correction_clip": None} | OF_VECTORS
MARS_ADAMW = {"type": "mars-adamw", "learning_rate": 3e-3} | OF_VECTORS
DIGITS = {
    "AdamW": {"type": "adam", "learning_rate": 3e-3},
    "Muon, filters by AdamW": MUON | {"convolutions": "vector"},
    "Muon": MUON | {"convolutions": "matrix"},
    "MARS-AdamW, filters by AdamW": MARS_ADAMW | {"convolutions": "vector"},
    "MARS-AdamW": MARS_ADAMW | {"convolutions": "matrix"},
    "MARS-Shampoo": {"type": "mars-shampoo", "learning_rate": 2e-2, "convolutions": "matrix"} | OF_VECTORS,
    "MARS-M": {"type": "mars-m", "learning_rate": 3e-3, "convolutions": "matrix"} | OF_VECTORS,
}
"""Muon is MARS-Shampoo with γ = 1 − β₁ and no clip of the correction. Nothing is decayed."""
CIFAR = {"AdamW": "adam", "Muon": "muon", "MARS-AdamW": "mars"}
"""The published comparison, by the beginning of the config's name."""
PUBLISHED = {
    "cifar10": {"AdamW": 94.81, "Muon": 95.08, "MARS-AdamW": 95.29},
    "cifar100": {"AdamW": 73.7, "Muon": 74.64, "MARS-AdamW": 76.97},
}
"""Per cent of the test images, from the authors' README."""


@dataclass
class Study:
    of: str = "digits"
    """digits, cifar10 or cifar100."""
    optimizers: list[str] = field(default_factory=list)
    """Of the table; all if there are none."""
    factors: list[float] = field(default_factory=lambda: [0.3, 1.0, 3.0])
    """Of the learning rates in the optimizers' blocks. Increasing."""
    extensions: int = 3
    """Rates that may be added, one at a time, where the best one is at the edge of an optimizer's grid."""
    seeds: int = 3
    """Beside the one that chooses the rate."""
    overrides: dict[str, Any] = field(default_factory=dict)
    """Fields of train_vision's config, of every run."""
    results: Path | None = None
    """Folder of runs.jsonl, table.md and study.png; null for docs/results/vision_OF."""
    work: Path = Path("build/vision/study")
    """Folder of logs and checkpoints."""

    def __post_init__(self):
        if self.of not in ("digits", *PUBLISHED):
            raise ParsingError(f"of is {self.of!r}; it must be digits, cifar10 or cifar100")
        names = DIGITS if self.of == "digits" else CIFAR
        for name in self.optimizers:
            if name not in names:
                raise ParsingError(f"optimizers names {name!r}; it may name {'; '.join(names)}")
        self.optimizers = self.optimizers or list(names)
        if len(self.factors) < 2 or self.factors[0] <= 0 or any(a >= b for a, b in itertools.pairwise(self.factors)):
            raise ParsingError(f"factors is {self.factors}; it must be at least two increasing numbers above 0")
        for name, least in (("extensions", 0), ("seeds", 1)):
            if getattr(self, name) < least:
                raise ParsingError(f"{name} is {getattr(self, name)}; it must be at least {least}")
        for block, name in (("optimizer", "learning_rate"), ("trainer", "seed")):
            if name in self.overrides.get(block, {}):
                raise ParsingError(f"overrides.{block}.{name} is {self.overrides[block][name]}; the study sets it")
        self.results = self.results or ROOT / "docs" / "results" / f"vision_{self.of}"

    def document(self, optimizer: str, factor: float, seed: int) -> dict[str, Any]:
        """The YAML of one run. It differs from another's in the optimizer's block and the seed alone."""
        if self.of == "digits":
            document = yaml.safe_load((CONFIGS / "digits.yaml").read_text())
            rule = {name: document["optimizer"][name] for name in ("warmup", "lr_schedule")}
            document["optimizer"] = DIGITS[optimizer] | {"weight_decay": 0.0} | rule
            document["trainer"] |= {"num_train_steps": 100, "steps_per_eval": 20}
            scaled = ("learning_rate", "learning_rate_1d")
        else:
            document = yaml.safe_load((CONFIGS / f"{CIFAR[optimizer]}_{self.of}.yaml").read_text())
            scaled = ("learning_rate",)  # the authors left the rate of the AdamW part as it is
        for name in set(scaled) & set(document["optimizer"]):
            document["optimizer"][name] = float(f"{factor * float(document['optimizer'][name]):.3g}")
        document["trainer"]["seed"] = seed
        return _merged(document, self.overrides)


class Run(NamedTuple):
    optimizer: str
    rate: float
    seed: int
    accuracy: dict[int, float]
    """Of the test images, by the step before the evaluation. Empty if the run diverged."""
    loss: dict[int, float]

    @property
    def merit(self) -> tuple[float, float]:
        """What is compared: the accuracy at the end, and, where it is the same, the loss."""
        return (list(self.accuracy.values())[-1], -list(self.loss.values())[-1]) if self.accuracy else (-1.0, 0.0)


class Row(NamedTuple):
    optimizer: str
    tried: list[Run]
    """One for each rate, lowest first."""
    runs: list[Run]
    """One for each further seed, at the best of them."""


def rows(study: Study) -> Iterator[Row]:
    """Makes the runs that are not there yet."""
    for optimizer in study.optimizers:
        make = functools.partial(run, study, optimizer)
        factors = list(study.factors)
        tried = [make(factor, seed=0) for factor in factors]
        for _ in range(study.extensions):
            best = max(range(len(tried)), key=lambda i: tried[i].merit)
            if best == 0:
                factors.insert(0, factors[0] ** 2 / factors[1])
                tried.insert(0, make(factors[0], seed=0))
            elif best == len(tried) - 1:
                factors.append(factors[-1] ** 2 / factors[-2])
                tried.append(make(factors[-1], seed=0))
            else:
                break
        best = max(range(len(tried)), key=lambda i: tried[i].merit)
        yield Row(optimizer, tried, [make(factors[best], seed=seed) for seed in range(1, study.seeds + 1)])


def run(study: Study, optimizer: str, factor: float, seed: int) -> Run:
    """One run, read if it is there."""
    assert study.results is not None
    document = study.document(optimizer, factor, seed)
    identity = hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()[:10]
    kept = study.results / "runs.jsonl"
    for line in kept.read_text().splitlines() if kept.exists() else []:
        record = json.loads(line)
        if record.pop("id") == identity:
            curves = {name: {int(step): value for step, value in record[name].items()} for name in ("accuracy", "loss")}
            return Run(**record | curves)
    folder = study.work / identity
    document["trainer"] |= {"id": "run", "log_dir": str(folder), "jax_compilation_cache_dir": str(study.work / "compiled")}
    document["trainer"]["checkpointer"]["base_path"] = str(folder / "checkpoints")
    config = draccus.decode(TrainVisionConfig, document)
    try:
        train(config, *load(config))
        history: Mapping[str, dict[int, float]] = read_history(folder / "run" / "history.jsonl")
    except RuntimeError as error:
        if not re.fullmatch("Loss is (NaN|Inf)", str(error)):  # how Levanter's trainer ends a run that diverged
            raise
        history = {"eval/accuracy": {}, "eval/loss": {}}
    curves = {name: {step: round(value, 6) for step, value in history[f"eval/{name}"].items()} for name in ("accuracy", "loss")}
    result = Run(optimizer, document["optimizer"]["learning_rate"], seed, **curves)
    study.results.mkdir(parents=True, exist_ok=True)
    with kept.open("a") as file:
        file.write(json.dumps({"id": identity, **result._asdict()}) + "\n")
    return result


def table(study: Study, found: Sequence[Row]) -> str:
    published = PUBLISHED.get(study.of, {})
    header = ["", "learning rate", "of those tried", "test accuracy, %", "lowest to highest", "best of a run, %", "test loss, nats"]
    lines = [header + ["published, %"] * bool(published)]
    for row in found:
        ends = [(run.merit[0], -run.merit[1], max(run.accuracy.values())) for run in row.runs if run.accuracy]
        if len(ends) < len(row.runs):
            cells = [f"{len(row.runs) - len(ends)} of {len(row.runs)} diverged", "", "", ""]
        else:
            last, loss, best = map(np.array, zip(*ends, strict=True))
            cells = [f"{100 * last.mean():.2f}", f"{100 * last.min():.2f} to {100 * last.max():.2f}", f"{100 * best.mean():.2f}"]
            cells.append(f"{loss.mean():.4f}")
        tried = f"{row.tried[0].rate:g} to {row.tried[-1].rate:g}"
        lines.append([row.optimizer, f"{row.runs[0].rate:g}", tried, *cells, *([str(published[row.optimizer])] if published else [])])
    lines.insert(1, ["---"] * len(lines[0]))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def draw(found: Sequence[Row], path: Path) -> None:
    """Draws the mistakes over steps, mean of the further seeds, and those at the end by learning rate, of the seed that chose it."""
    figure = Figure(figsize=(12, 5), layout="constrained")
    curves, rates = figure.subplots(1, 2, sharey=True)
    for i, row in enumerate(found):
        style = {"color": f"C{i}", "marker": "osv^D<>"[i % 7], "markersize": 5, "label": row.optimizer}
        if all(run.accuracy for run in row.runs):
            mistakes = np.array([[100 - 100 * value for value in run.accuracy.values()] for run in row.runs])
            steps = [step + 1 for step in row.runs[0].accuracy]
            curves.plot(steps, mistakes.mean(axis=0), **style)
            curves.fill_between(steps, mistakes.min(axis=0), mistakes.max(axis=0), color=f"C{i}", alpha=0.12, linewidth=0)
        ended = [(run.rate, 100 - 100 * run.merit[0]) for run in row.tried if run.accuracy]
        rates.plot(*zip(*ended, strict=True), **style)
    curves.set(xlabel="step", ylabel="mistakes, % of the test images", yscale="log")
    rates.set(xlabel="learning rate", xscale="log")
    for axes in (curves, rates):
        axes.grid(alpha=0.3, which="both")
        for axis in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
            axis(StrMethodFormatter("{x:g}"))
    curves.legend(fontsize="small")
    figure.savefig(path, dpi=110)


def main(study: Study) -> None:
    assert study.results is not None
    found = list(rows(study))
    text = table(study, found)
    (study.results / "table.md").write_text(text + "\n")
    draw(found, study.results / "study.png")
    print(text)


def _merged(document: dict[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    both = {name: _merged(document[name], value) for name, value in overrides.items() if isinstance(document.get(name), dict)}
    return {**document, **overrides, **both}


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    try:
        draccus.wrap()(main)()
    except (DraccusException, ValueError, OSError) as error:
        sys.exit(str(error))
