"""From records to the table: every optimizer at its own best learning rate, at the end of the schedule."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from levanter_mars.compare.planning import edge_of, mean_final_loss
from levanter_mars.compare.records import Record, by_rate

SAME_LOSS = 1e-3
"""Losses of one model on one batch differ by less where two compiled programs round differently, nats a token."""


@dataclass(frozen=True)
class Row:
    """One optimizer. Losses are held-out, in nats a token; None stands for what is not known or never came."""

    optimizer: str
    learning_rate: float | None
    """The best of those tried, by the mean over seeds."""
    edge: str | None
    """"low" or "high" where it is the lowest or highest of those tried, so that a better one may lie beyond."""
    rates_tried: int
    seeds: int
    loss: float | None
    """Mean over seeds at the end."""
    spread: float | None
    """Standard deviation of a seed's loss."""
    difference: float | None
    """Mean over seeds of the loss minus the baseline's of the same seed, which had the same weights and data."""
    difference_spread: float | None
    steps_to_baseline: int | None
    """Steps at the first evaluation whose mean over seeds is at or below the baseline's loss at the end."""
    tokens_to_baseline: int | None
    diverged: int
    """Runs that diverged, over all rates."""
    state_bytes: int | None


@dataclass(frozen=True)
class Timing:
    """One optimizer's step, at its best rate."""

    optimizer: str
    step_seconds: float
    """Median over runs of the run's median step."""
    lowest: float
    highest: float
    machines: int


@dataclass(frozen=True)
class Curve:
    """Mean over seeds, at the best rate."""

    optimizer: str
    steps: list[int]
    held_out_loss: list[float]
    lowest: list[float]
    highest: list[float]


@dataclass(frozen=True)
class Analysis:
    baseline: str
    steps: int
    tokens_per_step: int
    rows: list[Row]
    timings: list[Timing]
    curves: list[Curve]
    notes: list[str]
    """What a reader must know before believing the table."""


def analyze(records: Sequence[Record], baseline: str, order: Sequence[str]) -> Analysis:
    """Compares optimizers, in the given order; a rate that lacks seeds is left out.

    Raises:
        ValueError: runs differ in their number of steps or tokens, or the baseline has no run that ended.
    """
    groups = {name: with_all_seeds([r for r in records if r.optimizer == name]) for name in order}
    groups = {name: runs for name, runs in groups.items() if runs}
    left_out = len(records) - sum(map(len, groups.values()))
    records = [r for runs in groups.values() for r in runs]
    finished = [r for r in records if not r.diverged]
    _require_one([r.steps for r in finished], "steps", finished)
    _require_one([r.tokens_per_step for r in finished], "tokens a step", finished)
    best = {name: best_runs(runs) for name, runs in groups.items()}
    if not best.get(baseline):
        raise ValueError(f"no learning rate of the baseline {baseline} has ended, so there is nothing to compare with")
    rows = [_row(name, runs, best[name], best[baseline]) for name, runs in groups.items()]
    notes = [f"{left_out} runs are left out, because their learning rate lacks runs with other seeds."] if left_out else []
    notes += [*_start_notes(records), *(note for row in rows for note in _row_notes(row, baseline))]
    return Analysis(
        baseline=baseline,
        steps=finished[0].steps,
        tokens_per_step=finished[0].tokens_per_step,
        rows=rows,
        timings=[_timing(name, runs) for name, runs in best.items() if any(run.step_seconds is not None for run in runs)],
        curves=[mean_curve(name, runs) for name, runs in best.items() if runs],
        notes=notes,
    )


def with_all_seeds(records: Sequence[Record]) -> list[Record]:
    """Those of one optimizer at the rates that have every seed that any of its rates has."""
    seeds = {record.seed for record in records}
    return [r for runs in by_rate(records).values() if {r.seed for r in runs} == seeds for r in runs]


def best_runs(records: Sequence[Record]) -> list[Record]:
    """The runs of the rate whose mean final loss is lowest; none where every rate has a run that diverged."""
    best = min(by_rate(records).values(), key=mean_final_loss)
    return best if math.isfinite(mean_final_loss(best)) else []


def mean_curve(name: str, runs: Sequence[Record]) -> Curve:
    """Over the evaluations that all runs have."""
    by_step = [{e.steps: e.held_out_loss for e in run.evaluations} for run in runs]
    steps = sorted(set.intersection(*map(set, by_step)))
    losses = [[losses[step] for losses in by_step] for step in steps]
    return Curve(name, steps, [statistics.fmean(x) for x in losses], [min(x) for x in losses], [max(x) for x in losses])


def _row(name: str, records: Sequence[Record], best: Sequence[Record], baseline: Sequence[Record]) -> Row:
    losses = {run.seed: run.final_loss for run in best}
    paired = [losses[run.seed] - run.final_loss for run in baseline if run.seed in losses]
    target = statistics.fmean(run.final_loss for run in baseline)
    curve = mean_curve(name, best) if best else Curve(name, [], [], [], [])
    reached = next((step for step, loss in zip(curve.steps, curve.held_out_loss, strict=True) if loss <= target), None)
    return Row(
        optimizer=name,
        learning_rate=best[0].learning_rate if best else None,
        edge=edge_of(records) if len(by_rate(records)) > 1 else None,
        rates_tried=len(by_rate(records)),
        seeds=len(losses),
        loss=statistics.fmean(losses.values()) if losses else None,
        spread=_spread(list(losses.values())),
        difference=statistics.fmean(paired) if paired and best is not baseline else None,
        difference_spread=_spread(paired) if best is not baseline else None,
        steps_to_baseline=reached,
        tokens_to_baseline=None if reached is None else reached * best[0].tokens_per_step,
        diverged=sum(record.diverged for record in records),
        state_bytes=records[0].state_bytes,
    )


def _timing(name: str, runs: Sequence[Record]) -> Timing:
    seconds = [run.step_seconds for run in runs if run.step_seconds is not None]
    machines = {str(run.made_by.get("machine")) for run in runs}
    return Timing(name, statistics.median(seconds), min(seconds), max(seconds), len(machines))


def _spread(values: Sequence[float]) -> float | None:
    return statistics.stdev(values) if len(values) > 1 else None


def _require_one(values: Sequence[int], what: str, records: Sequence[Record]) -> None:
    for value, record in zip(values, records, strict=True):
        if value != values[0]:
            raise ValueError(
                f"{record.id} has {value:,} {what} and {records[0].id} has {values[0]:,}; only runs with the same schedule can be compared"
            )


def _start_notes(records: Sequence[Record]) -> list[str]:
    """A difference here means that optimizers did not get the same weights and data."""
    notes = []
    for seed in sorted({r.seed for r in records}):
        losses = {r.optimizer: r.first_loss for r in records if r.seed == seed and r.first_loss is not None}
        if losses and max(losses.values()) - min(losses.values()) > SAME_LOSS:
            low, high = min(losses, key=losses.__getitem__), max(losses, key=losses.__getitem__)
            notes.append(
                f"Seed {seed}: the first batch's loss before any update is {losses[low]:.4f} with {low} and {losses[high]:.4f} with {high}, "
                "so their runs did not start from the same weights and data."
            )
    return notes


def _row_notes(row: Row, baseline: str) -> list[str]:
    notes = []
    if row.loss is None:
        notes.append(f"{row.optimizer}: every learning rate has a run that diverged.")
    elif row.edge is not None:
        where = {"low": "lowest", "high": "highest"}[row.edge]
        notes.append(f"{row.optimizer}: its best learning rate is the {where} of those tried; a better one may lie beyond.")
    if row.loss is not None and row.diverged:
        notes.append(f"{row.optimizer}: {row.diverged} of its runs diverged, at rates that are not the best.")
    if row.seeds == 1:
        notes.append(f"{row.optimizer}: one seed only, so that nothing says how far its loss is from another seed's.")
    elif row.difference is not None and row.difference_spread is not None:
        error = row.difference_spread / math.sqrt(row.seeds)
        if abs(row.difference) < 2 * error:
            notes.append(f"{row.optimizer}: its difference to {baseline} is less than twice its standard error over {row.seeds} seeds.")
    return notes
