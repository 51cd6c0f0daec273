"""A study of two optimizers, one of which always diverges, made by the command itself: twice in one go, once killed on the way."""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import levanter.config
import pytest
import stock
import yaml
from comparisons import json_log, record
from draccus.utils import ParsingError

from levanter_mars.compare.records import append_record
from levanter_mars.compare.study import ExistingRun, StudyConfig
from levanter_mars.main.compare import compare

STEPS = 40
TIMEOUT = 3600
"""Seconds; only ends what would hang."""
TABLES = ("table.md", "table.json", "loss_curves.png", "learning_rates.png")


def write_study(folder: Path) -> None:
    folder.mkdir()
    stock.write_workspace(folder)
    train = stock.config({})
    del train["optimizer"], train["trainer"]["seed"]
    train["data"]["components"]["corpus"]["source"]["validation_urls"] = ["corpus.jsonl"]
    train["trainer"] |= {"num_train_steps": STEPS, "steps_per_eval": 10, "max_eval_batches": 2}
    train["trainer"]["checkpointer"] = {"save_interval": "1s", "keep": []}
    study = {
        "results": "results",
        "work": "work",
        "baseline": "adamw",
        "optimizers": {"adamw": {"type": "adam", "learning_rate": 1e-2}, "far-too-fast": {"type": "adam", "learning_rate": 1e30}},
        "schedule": {"warmup": 0},
        "learning_rate_factors": [0.5, 1],
        "max_extensions": 0,
        "seeds": [0],
        "train": train,
    }
    (folder / "study.yaml").write_text(yaml.safe_dump(study))


def start(folder: Path) -> subprocess.Popen:
    with (folder / "said.txt").open("w") as said:
        return subprocess.Popen(
            [sys.executable, "-m", "levanter_mars.main.compare", "--config", "study.yaml"],
            cwd=folder,
            stdout=said,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def finish(folder: Path, process: subprocess.Popen) -> str:
    """Waits for a study to end well; returns what it said."""
    try:
        status = process.wait(TIMEOUT)
    finally:
        kill(process)
    said = (folder / "said.txt").read_text()
    assert status == 0, said[-3000:]
    return said


def kill(process: subprocess.Popen) -> None:
    """The study and its run."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def wait_until(process: subprocess.Popen, condition, seconds: float = TIMEOUT) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, "the study ended before"
        assert time.monotonic() < end, "it never came"
        time.sleep(0.05)


def records(folder: Path) -> list[dict]:
    path = folder / "results" / "runs.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def assert_the_same(folder: Path, other: Path) -> None:
    """Of the records all but their order and what was timed, and of the tables every byte."""
    for a, b in zip(*(sorted(records(study), key=lambda r: r["id"]) for study in (folder, other)), strict=True):
        assert {**a, "step_seconds": None} == {**b, "step_seconds": None}
    for name in TABLES:
        assert (folder / "results" / name).read_bytes() == (other / "results" / name).read_bytes(), name


@pytest.fixture(scope="module")
def straight(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("study") / "straight"
    write_study(folder)
    finish(folder, start(folder))
    return folder


@pytest.mark.slow
def test_a_study_with_an_optimizer_that_diverges_completes(straight):
    made = records(straight)
    assert [(r["optimizer"], r["learning_rate"], r["diverged"]) for r in made] == [
        ("adamw", 5e-3, False),
        ("adamw", 1e-2, False),
        ("far-too-fast", 5e29, True),
        ("far-too-fast", 1e30, True),
    ]
    for run in made[:2]:
        assert run["steps"] == STEPS
        assert [e[0] for e in run["evaluations"]] == [10, 20, 30, 40]
        assert run["evaluations"][-1][2] < run["evaluations"][0][2] < run["first_loss"]
    # Weights and data are those of the seed, whatever the optimizer.
    assert len({r["first_loss"] for r in made}) == 1
    table = (straight / "results" / "table.md").read_text()
    assert "| far-too-fast | – | 2 | 1 | diverged | – | – | – | 2 |" in table
    assert "- far-too-fast: every learning rate has a run that diverged." in table


@pytest.mark.slow
def test_made_again_it_comes_to_the_same(straight, tmp_path):
    folder = tmp_path / "again"
    write_study(folder)
    finish(folder, start(folder))
    assert_the_same(folder, straight)


@pytest.mark.slow
def test_killed_on_the_way_it_comes_to_the_same(straight, tmp_path):
    folder = tmp_path / "killed"
    write_study(folder)
    # It was begun on another machine; one of its four runs is left.
    lines = (straight / "results" / "runs.jsonl").read_text().splitlines(keepends=True)
    (folder / "results").mkdir()
    (folder / "results" / "runs.jsonl").write_text("".join([lines[0], *lines[2:]]))
    begun = records(folder)
    # The study and its run are killed once that has a checkpoint.
    process = start(folder)
    wait_until(process, lambda: list(folder.glob("work/adamw*/checkpoints/**/metadata.json")))
    kill(process)
    (output,) = folder.glob("work/adamw*/output.txt")
    output.unlink()
    # The study alone is killed while a record is written; its run goes on by itself.
    process = start(folder)
    wait_until(process, output.exists)
    process.kill()
    process.wait()
    assert records(folder) == begun
    with (folder / "results" / "runs.jsonl").open("a") as file:
        file.write(lines[1][:30])
    said = finish(folder, start(folder))
    assert "4 runs over the seeds 0." in said
    (log,) = folder.glob("work/adamw*/adamw*.log.log")
    assert "Resuming training from step" in log.read_text()
    *others, last = records(folder)
    assert others == begun
    assert_the_same(folder, straight)
    # Where all runs are there, none is repeated.
    shutil.rmtree(folder / "work")
    finish(folder, start(folder))
    assert records(folder) == [*others, last]
    assert not list((folder / "work").glob("adamw*"))


@pytest.mark.slow
def test_a_run_that_fails_is_named_and_not_taken_for_one_that_diverged(tmp_path):
    folder = tmp_path / "study"
    write_study(folder)
    (folder / "corpus.jsonl").unlink()
    study = yaml.safe_load((folder / "study.yaml").read_text())
    (folder / "study.yaml").write_text(yaml.safe_dump({**study, "optimizers": {"adamw": {"type": "adam"}}}))
    process = start(folder)
    assert process.wait(TIMEOUT) == 1
    said = (folder / "said.txt").read_text()
    assert re.search(r"Run adamw-\S+ failed, and the other runs of adamw are given up; what it said is in work/adamw-\S+/output\.txt", said)
    assert records(folder) == []


def test_bad_input_is_refused_before_anything_is_made(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_study(tmp_path / "study")
    arguments = ["--config", "study/study.yaml", "--baseline", "sgd"]
    with pytest.raises(ParsingError, match="baseline is sgd; it must be one of adamw, far-too-fast"):
        levanter.config.main(compare, args=arguments)()
    assert [p.name for p in tmp_path.iterdir()] == ["study"]


def test_a_report_without_runs(tmp_path):
    train = {"trainer": {"tracker": {"type": "json_logger"}}}
    study = StudyConfig(tmp_path / "results", "adamw", optimizers={"adamw": {"type": "adam"}}, train=train, only_report=True)
    with pytest.raises(ValueError, match=r"there is nothing to report: .*/runs\.jsonl holds no run of this study"):
        compare(study)
    assert not (tmp_path / "results").exists()
    append_record(study.results / "runs.jsonl", record("adamw", 1e-3, 0, [4.0]))
    with pytest.raises(ValueError, match=r"1 runs in runs\.jsonl belong to another config or another corpus and are left out"):
        compare(study)
    assert [path.name for path in study.results.iterdir()] == ["runs.jsonl"]


def test_runs_that_were_made_elsewhere_are_compared_without_a_study(tmp_path, capsys):
    existing = tuple(
        ExistingRun(json_log(tmp_path, f"{name}{seed}.log", lower_by=lower_by + seed / 8), name, 1e-3, seed)
        for name, lower_by in (("ours", 0.5), ("theirs", 0.0))
        for seed in (0, 1)
    )
    compare(StudyConfig(results=tmp_path / "results", baseline="theirs", existing=existing))
    table = (tmp_path / "results" / "table.md").read_text()
    assert "4 runs were made elsewhere." in table
    assert "| ours | 0.001 | 1 | 2 | 2.6875 ± 0.0884 | -0.5000 ± 0.0000 | 6 | 96 | 0 | – |" in table
    assert "| theirs | 0.001 | 1 | 2 | 3.1875 ± 0.0884 | – | 6 | 96 | 0 | – |" in table
    assert f"Page: {tmp_path / 'results' / 'index.html'}" in capsys.readouterr().out
