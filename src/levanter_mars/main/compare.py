"""Compares optimizers on one model and one data set, each at its own best learning rate.

    python -m levanter_mars.main.compare --config config/compare_nano.yaml

Makes the runs that have no record yet, by stock `levanter.main.train_lm` in processes of their own, and writes tables, plots and a page
into the study's results folder. Interrupted, the same command goes on. With `--only_report true` it makes no run.
"""

import functools
import logging
import sys
from collections.abc import Sequence

import jax
import levanter.config
import rich
import rich.box
import rich.table
from draccus.utils import DraccusException

from levanter_mars.compare.analysis import analyze
from levanter_mars.compare.data import Data, keep_data, kept_data
from levanter_mars.compare.existing import read_existing
from levanter_mars.compare.planning import make_plan
from levanter_mars.compare.presentation import Table
from levanter_mars.compare.records import Record, read_records
from levanter_mars.compare.report import PAGE, write_report
from levanter_mars.compare.study import StudyConfig
from levanter_mars.compare.training import RECORDS, end_on_signals, run_study, study_lock
from levanter_mars.explanation import explain, trainable_shapes

SHOWN = (0, 1, 4, 5, 6)
"""Columns of the first table that are shown at the end."""


def compare(study: StudyConfig) -> None:
    # Before hours of training: what was made elsewhere must be there and be complete.
    existing = [read_existing(run) for run in study.existing]
    failures = []
    if study.optimizers and not study.only_report:
        with study_lock(study.work) as lock:
            data = keep_data(study)
            failures = run_study(study, data.digest, functools.cache(lambda optimizer: state_bytes(study, optimizer)), lock)
    report(study, existing)
    if failures:
        sys.exit("\n".join(failures))


def report(study: StudyConfig, existing: Sequence[Record]) -> None:
    """Writes tables, plots and page of the runs that there are. It needs the results folder alone."""
    data = kept_data(study) or Data("", None)
    # Once each, even if the file was merged from two that share runs.
    kept = {record.id: record for record in read_records(study.results / RECORDS)}
    plan = make_plan(study, list(kept.values()), data.digest)
    records = [kept[run.id] for run in plan.runs if run.id in kept]
    introduction = [f"{len(records)} runs over the seeds {', '.join(map(str, study.seeds))}."] if plan.runs else []
    if plan.runs and len(study.grid_seeds) < len(study.seeds):
        introduction.append(f"Learning rates were chosen with the seeds {', '.join(map(str, study.grid_seeds))} alone.")
    if plan.pending:
        introduction = [f"Unfinished: {len(records)} of at least {plan.least} runs are there, and no conclusion is drawn before the rest."]
    if existing:
        introduction.append(f"{len(existing)} runs were made elsewhere.")
    if other := len(kept) - len(records):
        introduction.append(f"{other} runs in {RECORDS} belong to another config or another corpus and are left out.")
    if not records and not existing:
        raise ValueError(f"there is nothing to report: {study.results / RECORDS} holds no run of this study. {' '.join(introduction[1:])}")
    if data.corpus is not None:
        introduction.append(f"The unigram entropy of the training text is {data.corpus.unigram_entropy:.3f}.")
    order = list(dict.fromkeys([*study.optimizers, *(r.optimizer for r in existing)]))
    analysis = analyze([*records, *existing], study.baseline, order, study.grid_seeds)
    study.results.mkdir(parents=True, exist_ok=True)
    table = write_report(study.results, analysis, f"Comparison {study.results.name}", introduction)
    rich.print(terminal_table(table))
    print(*introduction, *analysis.notes, f"Page: {study.results / PAGE}", sep="\n")


def terminal_table(table: Table) -> rich.table.Table:
    """The columns that fit into 80 characters; the page has all."""
    shown = rich.table.Table(title=table.title, box=rich.box.SIMPLE_HEAD)
    for index in SHOWN:
        shown.add_column(table.header[index], justify="left" if index == 0 else "right")
    for row in table.rows:
        shown.add_row(*(row[index] for index in SHOWN))
    return shown


def state_bytes(study: StudyConfig, optimizer: str) -> int | None:
    config = study.train_config(optimizer)
    shapes = trainable_shapes(config, len(config.data.the_tokenizer))
    try:
        return sum(explain(shapes, config.optimizer, config.trainer.num_train_steps).state_bytes.values())
    except ValueError:  # an optimizer of somebody else's that needs more than shapes
        return None


def main() -> None:
    # This process looks at shapes alone: an accelerator is for the runs, and what Levanter says of the rest would bury their progress.
    jax.config.update("jax_platforms", "cpu")
    logging.disable(logging.INFO)
    end_on_signals()
    try:
        levanter.config.main(compare)()
    except KeyboardInterrupt:
        sys.exit("\nInterrupted. The same command goes on where this one stopped.")
    except (DraccusException, ValueError) as error:
        # draccus says where a YAML is wrong in the exception that its own came from.
        sys.exit(": ".join(dict.fromkeys(str(e) for e in (error, error.__cause__) if e is not None and str(e))))
    except OSError as error:
        sys.exit(f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    main()
