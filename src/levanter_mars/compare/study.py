"""What a study compares, as its YAML says it."""

import functools
import itertools
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import draccus
from draccus.utils import DraccusException, ParsingError
from levanter.main.train_lm import TrainLmConfig
from levanter.optim.config import OptimizerConfig
from levanter.tracker.json_logger import JsonLoggerConfig

RATE_FIELDS = ("learning_rate", "learning_rate_1d", "adam_lr")
"""All learning rates that an optimizer may have, so that a factor keeps their ratios."""

NAME = re.compile(r"[\w.-]+")
"""Of an optimizer, because folders are called after it."""

SCHEDULE_FIELDS = {"lr_schedule", "warmup", "decay", "min_lr_ratio", "cooldown", "rewarmup", "cycles", "cycle_length", "haps"}


@dataclass(frozen=True)
class ExistingRun:
    """A finished run that was made elsewhere."""

    path: Path
    """A log file of Levanter's json_logger, a folder of TensorBoard event files, or an offline folder of wandb."""
    optimizer: str
    learning_rate: float
    seed: int = 0
    diverged: bool = False
    """Whether the run stopped before the end of its schedule because its loss was not finite."""


@dataclass(frozen=True)
class StudyConfig:
    """Optimizers, each over the same grid of learning rates and the same seeds, on one model and one data set.

    A value that makes no study raises a ParsingError while the YAML is parsed, before data or a device is touched.
    """

    results: Path
    """Folder of what is kept: runs.jsonl, tables, plots, page. It can be copied to another machine and gone on with there."""
    baseline: str
    """The optimizer that the others are compared with."""
    work: Path = Path("build/compare")
    """Folder of logs, of compiled programs and of the checkpoints of the run in progress. It may be lost: only that run begins again."""
    optimizers: dict[str, dict[str, Any]] = field(default_factory=dict)
    """By name, in the order in which they are run: an `optimizer:` block of Levanter without a schedule. The learning rate is the grid's
    middle, factor 1."""
    schedule: dict[str, Any] = field(default_factory=dict)
    """Of the learning rate, for every optimizer."""
    train: dict[str, Any] = field(default_factory=dict)
    """What `python -m levanter.main.train_lm` takes, without an optimizer."""
    learning_rate_factors: tuple[float, ...] = (0.5, 1.0, 2.0)
    """The grid: each is multiplied with all of an optimizer's learning rates. Increasing."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """Of weights and data order."""
    seeds_of_grid: int | None = None
    """With how many of the seeds, the first ones, every rate of the grid is run and the best one chosen; the others are run at that rate
    alone. null: with all."""
    max_extensions: int = 3
    """How many rates may be added, one at a time, where the best one is at the edge of an optimizer's grid."""
    standard_library_vocab: int | None = None
    """Build the corpus of Python's standard library in data.tokenizer's folder first, with a vocabulary of this size; null for data that
    is there."""
    existing: tuple[ExistingRun, ...] = ()
    only_report: bool = False
    """Make no run; report on those that are there."""

    def __post_init__(self):
        try:
            self._check()
        except (ValueError, DraccusException) as error:
            raise ParsingError(str(error)) from None

    @property
    def grid_seeds(self) -> tuple[int, ...]:
        """The seeds with which every rate is run."""
        return self.seeds[: self.seeds_of_grid]

    @functools.cached_property
    def _known_rates(self) -> dict[str, dict[str, float]]:
        """Of `rates`, because parsing an optimizer for each of hundreds of runs takes seconds."""
        return {}

    def rates(self, optimizer: str) -> dict[str, float]:
        """All learning rates of an optimizer at factor 1, its defaults included."""
        if optimizer not in self._known_rates:
            config = draccus.decode(OptimizerConfig, {**self.schedule, **self.optimizers[optimizer]})
            values = {field: getattr(config, field, None) for field in RATE_FIELDS}
            self._known_rates[optimizer] = {field: rate for field, rate in values.items() if rate is not None}
        return self._known_rates[optimizer]

    def run_document(self, optimizer: str, factor: float, seed: int) -> dict[str, Any]:
        """What train_lm is given for one run: it differs from another's in the optimizer's block and the seed alone."""
        rates = {field: float(f"{rate * factor:.4g}") for field, rate in self.rates(optimizer).items()}
        block = {**self.schedule, **self.optimizers[optimizer], **rates}
        return {**self.train, "trainer": {**self.train["trainer"], "seed": seed}, "optimizer": block}

    def train_config(self, optimizer: str) -> TrainLmConfig:
        return draccus.decode(TrainLmConfig, self.run_document(optimizer, 1.0, self.seeds[0]))

    def _check(self) -> None:
        names = [*self.optimizers, *(run.optimizer for run in self.existing)]
        if self.baseline not in names:
            raise ValueError(
                f"baseline is {self.baseline}; it must be one of {', '.join(dict.fromkeys(names)) or 'optimizers, but there is none'}"
            )
        for run in self.existing:
            if run.optimizer in self.optimizers:
                raise ValueError(
                    f"existing: {run.path} is named {run.optimizer}, as an optimizer of the study is; it must have another name"
                )
            if not run.path.exists():
                raise ValueError(f"existing: {run.path} does not exist")
        self._check_seeds_of_existing()
        factors = self.learning_rate_factors
        if len(factors) < 2 or factors[0] <= 0 or any(a >= b for a, b in itertools.pairwise(factors)):
            raise ValueError(f"learning_rate_factors is {list(factors)}; it must be at least two increasing numbers above 0")
        if not self.seeds or len(set(self.seeds)) < len(self.seeds):
            raise ValueError(f"seeds is {list(self.seeds)}; it must be at least one whole number, none twice")
        if self.seeds_of_grid is not None and not 1 <= self.seeds_of_grid <= len(self.seeds):
            raise ValueError(f"seeds_of_grid is {self.seeds_of_grid}; it must be from 1 to the number of seeds, {len(self.seeds)}")
        if self.max_extensions < 0:
            raise ValueError(f"max_extensions is {self.max_extensions}; it must be at least 0")
        _refuse(self.schedule, set(self.schedule) - SCHEDULE_FIELDS, "schedule", f"it may have {', '.join(sorted(SCHEDULE_FIELDS))}")
        if self.optimizers:
            self._check_train()
        if self.standard_library_vocab is not None:
            tokenizer = (self.train.get("data") or {}).get("tokenizer")
            if not isinstance(tokenizer, str) or Path(tokenizer).name != "tokenizer" or not Path(tokenizer).parent.name:
                raise ValueError(
                    f"train.data.tokenizer is {tokenizer!r}; with standard_library_vocab it must be CORPUS/tokenizer, where CORPUS is the "
                    "folder that the corpus is built in"
                )
        for name, block in self.optimizers.items():
            if not NAME.fullmatch(name):
                raise ValueError(f"optimizers has the name {name!r}; it must be letters, digits, dots, dashes and underscores")
            _refuse(block, SCHEDULE_FIELDS & set(block), f"optimizers.{name}", "the schedule is the same for all and stands in schedule")
            if "type" not in block:
                raise ValueError(f"optimizers.{name} has no type")
            try:
                self.train_config(name)
            except (ValueError, DraccusException) as error:
                raise ValueError(f"optimizers.{name}: {error}") from None

    def _check_seeds_of_existing(self) -> None:
        seeds: dict[str, dict[float, set[int]]] = {}
        for run in self.existing:
            of_rate = seeds.setdefault(run.optimizer, {}).setdefault(run.learning_rate, set())
            if run.seed in of_rate:
                raise ValueError(
                    f"existing: {run.optimizer} has two runs with learning_rate {run.learning_rate:g} and seed {run.seed}; "
                    "a seed must say which weights and data order a run had"
                )
            of_rate.add(run.seed)
        for name, rates in seeds.items():
            if not set.intersection(*rates.values()):
                raise ValueError(
                    f"existing: no seed is common to all learning rates of {name}; one must be, for the best rate to be chosen"
                )

    def _check_train(self) -> None:
        trainer = self.train.get("trainer") or {}
        _refuse(self.train, {"optimizer", "data_seed"} & set(self.train), "train", "the study sets it")
        _refuse(trainer, {"seed", "id", "log_dir", "jax_compilation_cache_dir"} & set(trainer), "train.trainer", "the study sets it")
        if not isinstance(draccus.decode(TrainLmConfig, self.train).trainer.tracker, JsonLoggerConfig):
            raise ValueError("train.trainer.tracker.type must be json_logger, whose lines the study reads")


def _refuse(given: Mapping[str, Any], unwanted: set[str], where: str, why: str) -> None:
    for name in sorted(unwanted):
        raise ValueError(f"{where}.{name} is {given[name]!r}; {why}")
