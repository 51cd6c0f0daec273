"""Which runs a study still needs. Depends on the study and the records alone, so that an interrupted study goes on as it would have."""

import hashlib
import json
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


def make_plan(study: StudyConfig, records: Sequence[Record], data: str = "") -> Plan:
    """Every optimizer's grid for the first seed, then for the next: a study that was not finished still compares like with like.

    Args:
        data: identifies the data where `study` only names it.
    """
    known = {record.id: record for record in records}
    factors = {optimizer: grid_of(study, optimizer, known, data) for optimizer in study.optimizers}
    runs = [run(study, name, factor, seed, data) for seed in study.seeds for name in study.optimizers for factor in factors[name]]
    return Plan(runs, [r for r in runs if r.id not in known])


def grid_of(study: StudyConfig, optimizer: str, known: Mapping[str, Record], data: str) -> list[float]:
    """The factors of an optimizer: extended whenever, with the seeds whose runs are all there, the best of them is at an edge."""
    factors = list(study.learning_rate_factors)
    most = len(factors) + study.max_extensions
    for count in range(1, len(study.seeds) + 1):
        while True:
            grid = [run(study, optimizer, factor, seed, data).id for seed in study.seeds[:count] for factor in factors]
            if not all(id in known for id in grid):
                return factors
            edge = edge_of([known[id] for id in grid])
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


def edge_of(records: Sequence[Record]) -> str | None:
    """Whether the best rate of one optimizer's grid is its lowest ("low") or highest ("high"). Where every rate diverged: "low"."""
    means = [mean_final_loss(runs) for runs in by_rate(records).values()]
    best = means.index(min(means))
    return "low" if best == 0 else "high" if best == len(means) - 1 else None


def mean_final_loss(records: Sequence[Record]) -> float:
    """Over the seeds of one rate; infinite if one of them diverged."""
    return sum(record.final_loss for record in records) / len(records)
