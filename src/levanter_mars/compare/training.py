"""Makes the runs of a study, each by stock `levanter.main.train_lm` in a process of its own, and records each as it ends.

A run that was killed goes on from its newest checkpoint, or from its start. If only the study was killed, its run goes on by itself and
is waited for, because it holds the study's lock.
"""

import contextlib
import fcntl
import importlib.metadata
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import yaml
from tqdm import tqdm

from levanter_mars.compare.planning import Run, make_plan
from levanter_mars.compare.records import Record, append_record, read_records, result_of
from levanter_mars.compare.study import StudyConfig
from levanter_mars.quickstart.training_log import TrainingLog, read_training_log

RECORDS = "runs.jsonl"
DIVERGED = re.compile(r"^RuntimeError: Loss is (NaN|Inf)$", re.MULTILINE)
"""How Levanter's trainer ends a run whose loss is not finite."""
PACKAGES = ("levanter-mars", "marin-levanter", "marin-haliax", "jax", "optax")
GLOBAL_STEP = re.compile(rb'"global_step": (\d+)')
SECONDS_BETWEEN_LOOKS = 2


class RunFailed(Exception):
    """A run ended without a result that could be recorded."""


def run_study(study: StudyConfig, data: str, state_bytes: Callable[[str], int | None], lock: int) -> list[str]:
    """Makes all runs that have no record yet, and those that the results then ask for.

    Args:
        data: identifies the data, see `make_plan`.
        state_bytes: of an optimizer, by name; None if it is not known.
        lock: of `study_lock`.

    Returns:
        A sentence for each optimizer whose runs were given up because one of them failed.
    """
    path = study.results / RECORDS
    failures: dict[str, str] = {}
    steps = study.train_config(next(iter(study.optimizers))).trainer.num_train_steps
    with progress_bar() as bar:
        plan = make_plan(study, read_records(path), data)
        bar.initial = steps * (len(plan.runs) - len(plan.pending))
        while pending := [run for run in plan.pending if run.optimizer not in failures]:
            bar.n = steps * (len(plan.runs) - len(plan.pending))
            bar.total = bar.n + steps * (len(pending) + plan.least - len(plan.runs))
            run = pending[0]
            bar.set_description(run.id)
            try:
                append_record(path, train(run, study.work, lock, steps, state_bytes(run.optimizer), bar))
            except RunFailed as failure:
                failures[run.optimizer] = str(failure)
                tqdm.write(str(failure), file=sys.stderr)
            else:
                shutil.rmtree(study.work / run.id / "checkpoints", ignore_errors=True)
            plan = make_plan(study, read_records(path), data)
    return list(failures.values())


def train(run: Run, work: Path, lock: int, steps: int, state_bytes: int | None, bar: tqdm) -> Record:
    """Makes one run, or what is missing of it.

    Raises:
        RunFailed: it ended neither with all of its steps nor with a loss that is not finite.
        ValueError: it ended without a held-out loss, as every run of the study would.
    """
    folder = work / run.id
    log_path = folder / f"{run.id}.log.log"  # Levanter appends the suffix twice.
    output = folder / "output.txt"
    folder.mkdir(parents=True, exist_ok=True)
    before = bar.n
    if not read_training_log(log_path).is_complete(steps):
        (folder / "run.yaml").write_text(yaml.safe_dump(complete_document(run, folder), sort_keys=False))
        command = [sys.executable, "-m", "levanter.main.train_lm", "--config", str(folder / "run.yaml")]
        # The output is a file, because a pipe would break when the study is killed.
        with output.open("w") as out, subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, pass_fds=[lock]) as process:
            try:
                while process.poll() is None:
                    time.sleep(SECONDS_BETWEEN_LOOKS)
                    bar.n = before + steps_taken(log_path)
                    bar.refresh()
            except BaseException:
                process.terminate()
                raise
    log = read_training_log(log_path)
    has_diverged = output.exists() and DIVERGED.search(output.read_text(errors="replace")) is not None
    if log.has_ended and steps - 1 in log.train_loss and steps - 1 not in log.held_out_loss:
        raise ValueError(f"Run {run.id} came to its end without a held-out loss; train.data must have a validation set")
    if not (has_diverged or log.is_complete(steps)):
        raise RunFailed(f"Run {run.id} failed, and the other runs of {run.optimizer} are given up; what it said is in {output}")
    return record_of(run, log, has_diverged, state_bytes)


def steps_taken(log_path: Path) -> int:
    """By the end of a run's log; 0 if it does not say."""
    if not log_path.exists():
        return 0
    with log_path.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - 10_000))
        steps = GLOBAL_STEP.findall(file.read())
    return int(steps[-1]) + 1 if steps else 0


def complete_document(run: Run, folder: Path) -> dict[str, Any]:
    """The run's YAML with what depends on where it is made."""
    trainer = run.document["trainer"]
    here = {
        "id": run.id,
        "log_dir": str(folder),
        "checkpointer": {**trainer.get("checkpointer", {}), "base_path": str(folder / "checkpoints")},
        "jax_compilation_cache_dir": str(folder.parent / "compiled"),
    }
    return {**run.document, "trainer": {**trainer, **here}}


def record_of(run: Run, log: TrainingLog, has_diverged: bool, state_bytes: int | None) -> Record:
    result = result_of(log, has_diverged)
    return Record(run.id, run.optimizer, run.learning_rate, run.seed, **result, state_bytes=state_bytes, made_by=environment())


def environment() -> dict[str, Any]:
    """What may change a run's numbers in their last digits, or its time."""
    versions = {package: importlib.metadata.version(package) for package in PACKAGES}
    return {"machine": f"{platform.machine()}, {usable_cpus()} CPUs, {processor()}", "python": platform.python_version(), **versions}


def usable_cpus() -> int:
    """By this process, where the system can tell: a run that is pinned to one CPU takes longer."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def processor() -> str:
    with contextlib.suppress(OSError, StopIteration):
        return next(line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name"))
    return platform.processor() or "unknown processor"


@contextlib.contextmanager
def study_lock(work: Path) -> Generator[int]:
    """Yields a descriptor whose lock is held until every process that inherited it has ended."""
    work.mkdir(parents=True, exist_ok=True)
    with (work / "lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"Another process makes a run of the study in {work}; waiting for its end.", file=sys.stderr, flush=True)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield file.fileno()


def progress_bar() -> tqdm:
    """Counts steps; its estimate of the time left is by the steps that this process has seen."""
    form = "{desc}{percentage:3.0f}%|{bar}| {n:.0f}/{total:.0f} steps, {elapsed} elapsed, {remaining} left"
    return tqdm(total=1, smoothing=0, bar_format=form, dynamic_ncols=True, file=sys.stderr)


def end_on_signals() -> None:
    """Lets the notice that a scheduler gives end the study as Ctrl-C does: with its run."""

    def interrupt(*_):
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)
