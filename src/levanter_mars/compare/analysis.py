"""From records to the table: every optimizer at its own best learning rate, at the end of the schedule."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import scipy.stats

from levanter_mars.compare.planning import best_rate, choosing_seeds, edge_of
from levanter_mars.compare.records import Record, by_rate

SAME_LOSS = 2e-5
"""Losses of one model on one batch differ by less where two compiled programs round differently in float32, nats a token. Without any
training they are close to ln(vocabulary) whatever the weights and data are, so that little more tells two starts apart."""
LIKELY_CHANCE = 0.05
"""Probability of so large a difference where there is none, above which a reader is warned."""


@dataclass(frozen=True)
class Rate:
    """One learning rate of one optimizer."""

    learning_rate: float
    losses: tuple[float, ...]
    """Held-out, at the end, of the runs that came there with the seeds that choose the rate; nats a token."""
    runs: int
    """With any seed."""
    diverged: int
    """Of them."""

    @property
    def mean(self) -> float | None:
        """Of those; None if there is none."""
        return statistics.fmean(self.losses) if self.losses else None

    @property
    def spread(self) -> float | None:
        """Their standard deviation; None if there are not two."""
        return spread_of(self.losses)


@dataclass(frozen=True)
class Row:
    """One optimizer. Losses are held-out, in nats a token; None stands for what is not known or never came."""

    optimizer: str
    learning_rate: float | None
    """The best of those tried, by the mean over the seeds that choose. None of its runs diverged, with any seed."""
    edge: str | None
    """"low" or "high" where it is the lowest or highest of those tried, so that a better one may lie beyond."""
    rates: tuple[Rate, ...]
    """All that were tried, lowest first."""
    seeds: int
    """With which the best rate was run."""
    loss: float | None
    """Mean over these seeds at the end."""
    spread: float | None
    """Standard deviation of a seed's loss."""
    difference: float | None
    """Mean over seeds of the loss minus the baseline's of the same seed, which had the same weights and data."""
    difference_spread: float | None
    paired_seeds: int
    """Of that mean."""
    steps_to_baseline: int | None
    """Steps at the first evaluation whose mean over seeds is at or below the baseline's loss at the end."""
    tokens_to_baseline: int | None
    state_bytes: int | None

    @property
    def diverged(self) -> int:
        """Runs that diverged, over all rates."""
        return sum(rate.diverged for rate in self.rates)


@dataclass(frozen=True)
class Timing:
    """One optimizer's step, over all its runs that came to the end, because the rate makes no difference; see `Record.step_seconds`."""

    optimizer: str
    step_seconds: float
    """The least of the runs."""
    highest: float


@dataclass(frozen=True)
class Timings:
    """On the kind of machine that timed the most optimizers, because times on two machines cannot be compared."""

    rows: list[Timing]
    machine: str | None
    """None where no run says what made it."""
    elsewhere: int
    """Runs whose times were left out."""


@dataclass(frozen=True)
class Curve:
    """Held-out loss, mean over seeds, at the best rate."""

    optimizer: str
    steps: tuple[int, ...]
    mean: tuple[float, ...]
    lowest: tuple[float, ...]
    highest: tuple[float, ...]


@dataclass(frozen=True)
class Analysis:
    baseline: str
    steps: int
    tokens_per_step: int
    rows: list[Row]
    timings: Timings
    curves: list[Curve]
    notes: list[str]
    """What a reader must know before believing the table."""


def analyze(records: Sequence[Record], baseline: str, order: Sequence[str], seeds: Sequence[int] | None = None) -> Analysis:
    """Compares optimizers, in the given order, each at the learning rate that is best over the seeds that choose,
    with all seeds of that rate.

    Args:
        seeds: that choose the rate; None for all that all of an optimizer's rates have.

    Raises:
        ValueError: runs differ in their number of steps or tokens, or none came to its end.
    """
    groups = {name: [r for r in records if r.optimizer == name] for name in order}
    groups = {name: runs for name, runs in groups.items() if choosing_seeds(runs)}
    records = [r for runs in groups.values() for r in runs]
    best = {name: best_runs(runs, seeds) for name, runs in groups.items()}
    finished = [r for r in records if not r.diverged]
    if not finished:
        raise ValueError(f"none of {len(records)} runs came to the end of its schedule, so there is nothing to compare")
    for record in finished:
        for what, value, wanted in (
            ("steps", record.steps, finished[0].steps),
            ("tokens a step", record.tokens_per_step, finished[0].tokens_per_step),
        ):
            if value != wanted:
                raise ValueError(
                    f"{record.id} has {value:,} {what} and {finished[0].id} has {wanted:,}; only runs with one schedule can be compared"
                )
    rows = [_row(name, runs, best[name], best.get(baseline, []), seeds) for name, runs in groups.items()]
    return Analysis(
        baseline=baseline,
        steps=finished[0].steps,
        tokens_per_step=finished[0].tokens_per_step,
        rows=rows,
        timings=_timings(finished, list(groups)),
        curves=[mean_curve(name, runs) for name, runs in best.items() if runs],
        notes=[*_common_notes(records, rows, baseline), *(note for row in rows for note in _row_notes(row, baseline))],
    )


def best_runs(records: Sequence[Record], seeds: Sequence[int] | None) -> list[Record]:
    """All runs of one optimizer's best rate; none where every rate has a run that diverged."""
    best = best_rate(records, seeds)
    return [] if best is None else by_rate(records)[best]


def mean_curve(name: str, runs: Sequence[Record]) -> Curve:
    """Over the evaluations that all runs have."""
    by_step = [{e.steps: e.held_out_loss for e in run.evaluations} for run in runs]
    steps = sorted(set.intersection(*map(set, by_step))) if by_step else []
    losses = [[losses[step] for losses in by_step] for step in steps]
    return Curve(name, tuple(steps), tuple(map(statistics.fmean, losses)), tuple(map(min, losses)), tuple(map(max, losses)))


def _row(name: str, records: Sequence[Record], best: Sequence[Record], baseline: Sequence[Record], seeds: Sequence[int] | None) -> Row:
    losses = {run.seed: run.final_loss for run in best}
    paired = [losses[run.seed] - run.final_loss for run in baseline if run.seed in losses] if best is not baseline else []
    target = statistics.fmean(run.final_loss for run in baseline) if baseline else -math.inf
    curve = mean_curve(name, best)
    reached = next((step for step, loss in zip(curve.steps, curve.mean, strict=True) if loss <= target), None)
    choosing = choosing_seeds(records, seeds)
    rates = [
        Rate(rate, tuple(r.final_loss for r in runs if r.seed in choosing and not r.diverged), len(runs), sum(r.diverged for r in runs))
        for rate, runs in by_rate(records).items()
    ]
    return Row(
        optimizer=name,
        learning_rate=best[0].learning_rate if best else None,
        edge=edge_of(records, seeds) if best and len(rates) > 1 else None,
        rates=tuple(rates),
        seeds=len(best or choosing),
        loss=statistics.fmean(losses.values()) if losses else None,
        spread=spread_of(list(losses.values())),
        difference=statistics.fmean(paired) if paired else None,
        difference_spread=spread_of(paired),
        paired_seeds=len(paired),
        steps_to_baseline=reached,
        tokens_to_baseline=None if reached is None else reached * best[0].tokens_per_step,
        state_bytes=records[0].state_bytes,
    )


def _timings(finished: Sequence[Record], order: Sequence[str]) -> Timings:
    times: dict[str | None, dict[str, list[float]]] = {}
    for run in finished:
        if run.step_seconds is not None:
            times.setdefault(run.made_by.get("machine"), {}).setdefault(run.optimizer, []).append(run.step_seconds)
    runs = {machine: sum(map(len, of_machine.values())) for machine, of_machine in times.items()}
    # Among machines with equally many optimizers, the one with the most runs.
    machine = max(times, key=lambda machine: (len(times[machine]), runs[machine], str(machine)), default=None)
    seconds = times.get(machine, {})
    rows = [Timing(name, min(seconds[name]), max(seconds[name])) for name in order if name in seconds]
    return Timings(rows, machine, sum(runs.values()) - runs.get(machine, 0))


def spread_of(values: Sequence[float]) -> float | None:
    return statistics.stdev(values) if len(values) > 1 else None


def _common_notes(records: Sequence[Record], rows: Sequence[Row], baseline: str) -> list[str]:
    notes = [*_start_notes(records), *_version_notes(records)]
    if all(row.optimizer != baseline or row.loss is None for row in rows):
        notes.append(f"Nothing is compared with {baseline}: no learning rate of it came to the end with every seed.")
    if alone := [row.optimizer for row in rows if row.seeds == 1 and row.loss is not None]:
        notes.append(f"One seed only, so nothing says how far another seed's loss would be: {', '.join(alone)}.")
    if untuned := [row.optimizer for row in rows if len(row.rates) == 1]:
        notes.append(f"One learning rate only, so nothing says whether another would be better: {', '.join(untuned)}.")
    return notes


def _start_notes(records: Sequence[Record]) -> list[str]:
    """A difference here means that runs did not get the same weights and data."""
    notes = []
    for seed in sorted({r.seed for r in records}):
        losses = [(r.first_loss, r.id) for r in records if r.seed == seed and r.first_loss is not None]
        (low, low_id), (high, high_id) = (choose(losses, default=(0.0, "")) for choose in (min, max))
        if high - low > SAME_LOSS:
            notes.append(
                f"Seed {seed}: the first batch's loss before any update is {low:.5f} in {low_id} and {high:.5f} in {high_id}. In float32 "
                "they did not start from the same weights and data; where less is computed with, rounding may do this."
            )
    return notes


def _version_notes(records: Sequence[Record]) -> list[str]:
    versions: dict[str, set[str]] = {}
    for record in records:
        for name, version in record.made_by.items():
            versions.setdefault(name, set()).add(str(version))
    mixed = {name: found for name, found in versions.items() if len(found) > 1 and name != "machine"}
    return [f"The runs were made with several versions of {name}: {', '.join(sorted(found))}." for name, found in mixed.items()]


def _row_notes(row: Row, baseline: str) -> list[str]:
    notes = []
    if row.loss is None:
        notes.append(f"{row.optimizer}: every learning rate has a run that diverged.")
    elif row.diverged:
        notes.append(f"{row.optimizer}: {row.diverged} of its runs diverged, at rates that are not the best.")
    if row.edge is not None:
        where = {"low": "lowest", "high": "highest"}[row.edge]
        notes.append(f"{row.optimizer}: its best learning rate is the {where} of those tried; a better one may lie beyond.")
    if row.difference is not None and row.difference_spread:
        t = row.difference / (row.difference_spread / math.sqrt(row.paired_seeds))
        chance = 2 * scipy.stats.t.sf(abs(t), row.paired_seeds - 1)
        if chance > LIKELY_CHANCE:
            notes.append(
                f"{row.optimizer}: its difference to {baseline} may be chance (p = {chance:.2f} in a paired t test over "
                f"{row.paired_seeds} seeds)."
            )
    return notes
