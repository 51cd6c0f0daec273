"""Which runs a study still needs. Depends on the study and the records alone, so that an interrupted study goes on as it would have."""

import hashlib
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from levanter_mars.compare.records import Record, by_rate
from levanter_mars.compare.study import StudyConfig


class Run(NamedTuple):
    id: str
    """Changes with anything that train_lm is given and with the corpus."""
    optimizer: str
    learning_rate: float
    seed: int
    document: dict[str, Any]
    """The YAML of train_lm."""


class Plan(NamedTuple):
    runs: list[Run]
    """All that are known to be needed, in the order in which they are made."""
    pending: list[Run]
    """Those without a record."""
    least: int
    """How many runs the study has at least, those included that cannot be named yet because their rate is still being chosen."""


def make_plan(study: StudyConfig, records: Sequence[Record], data: str = "") -> Plan:
    """Every optimizer's grid for the first seed, then for the next: a study that was not finished still compares like with like. With the
    seeds that rates are not chosen by, every optimizer's best rate follows.

    Args:
        data: identifies the data where `study` only names it.
    """
    known = {record.id: record for record in records}
    factors = {optimizer: grid_of(study, optimizer, known, data) for optimizer in study.optimizers}
    runs = [run(study, name, factor, seed, data) for seed in study.grid_seeds for name in study.optimizers for factor in factors[name]]
    other_seeds = study.seeds[len(study.grid_seeds) :]
    open_grids = {r.optimizer for r in runs if r.id not in known}
    of_all_seeds = {
        name: [run(study, name, factor, seed, data) for seed in study.seeds for factor in factors[name]] for name in study.optimizers
    }
    best = {
        name: best_rate([known[r.id] for r in of_all_seeds[name] if r.id in known], study.grid_seeds)
        for name in study.optimizers
        if name not in open_grids
    }
    unnamed = 0
    for seed in other_seeds:
        for name in study.optimizers:
            # A rate that was the best until it diverged with one of these seeds stays in the study.
            of_seed = [r for r in of_all_seeds[name] if r.seed == seed and (r.id in known or r.learning_rate == best.get(name))]
            runs += of_seed
            unnamed += name in open_grids and not of_seed
    return Plan(runs, [r for r in runs if r.id not in known], len(runs) + unnamed)


def grid_of(study: StudyConfig, optimizer: str, known: Mapping[str, Record], data: str) -> list[float]:
    """The factors of an optimizer: extended whenever, with the seeds whose runs are all there, the best of them is at an edge."""
    factors = list(study.learning_rate_factors)
    most = len(factors) + study.max_extensions
    # By ever more of the seeds that choose, then by all, because the best rate may diverge with one that does not.
    for seeds in [*(study.grid_seeds[:count] for count in range(1, len(study.grid_seeds) + 1)), study.seeds]:
        while True:
            grid = [run(study, optimizer, factor, seed, data) for seed in seeds for factor in factors]
            if not all(r.id in known for r in grid if r.seed in study.grid_seeds):
                return factors
            edge = edge_of([known[r.id] for r in grid if r.id in known], study.grid_seeds)
            if edge is None or len(factors) == most:
                break
            if edge == "low":
                factors.insert(0, factors[0] ** 2 / factors[1])
            else:
                factors.append(factors[-1] ** 2 / factors[-2])
    return factors


def run(study: StudyConfig, optimizer: str, factor: float, seed: int, data: str = "") -> Run:
    document = study.run_document(optimizer, factor, seed)
    identity = hashlib.sha256(json.dumps([document, data], sort_keys=True).encode()).hexdigest()[:8]
    rate = document["optimizer"]["learning_rate"]
    return Run(f"{optimizer}-lr{rate:g}-seed{seed}-{identity}", optimizer, rate, seed, document)


def rate_losses(records: Sequence[Record], seeds: Sequence[int] | None = None) -> dict[float, float]:
    """The final loss of each learning rate of one optimizer, lowest rate first: the mean over the seeds that choose, infinite for a rate
    that diverged with any seed. Empty where no seed can choose.

    Args:
        seeds: that choose, see `choosing_seeds`.
    """
    rates = by_rate(records)
    choosing = choosing_seeds(records, seeds)
    return {
        rate: math.inf if any(r.diverged for r in runs) else statistics.fmean(r.final_loss for r in runs if r.seed in choosing)
        for rate, runs in rates.items()
        if choosing
    }


def choosing_seeds(records: Sequence[Record], seeds: Sequence[int] | None = None) -> set[int]:
    """Of one optimizer's records, the seeds that all of its rates have; only those of `seeds` where there are such."""
    shared = set.intersection(*({r.seed for r in runs} for runs in by_rate(records).values())) if records else set()
    return shared & set(seeds or ()) or shared


def best_rate(records: Sequence[Record], seeds: Sequence[int] | None = None) -> float | None:
    """Of one optimizer; None where every rate has a run that diverged."""
    losses = rate_losses(records, seeds)
    best = min(losses, key=losses.__getitem__, default=None)
    return None if best is None or math.isinf(losses[best]) else best


def edge_of(records: Sequence[Record], seeds: Sequence[int] | None = None) -> str | None:
    """Whether the best rate of one optimizer's grid is its lowest ("low") or highest ("high"). Where every rate diverged: "low"."""
    losses = list(rate_losses(records, seeds).values())
    best = losses.index(min(losses))
    return "low" if best == 0 else "high" if best == len(losses) - 1 else None
