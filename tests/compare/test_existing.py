"""Runs that Levanter's own trackers wrote, read back."""

import json
import math
from pathlib import Path

import pytest
import wandb
from comparisons import STEPS, json_log, log_run
from levanter.tracker.tensorboard import TensorboardConfig
from levanter.tracker.wandb import WandbTracker

from levanter_mars.compare.existing import read_existing
from levanter_mars.compare.records import Evaluation
from levanter_mars.compare.study import ExistingRun


def tensorboard_folder(folder: Path, **kwargs) -> Path:
    log_run(TensorboardConfig(logdir=str(folder)).init("a run"), **kwargs)
    return folder / "a run"


def wandb_folder(folder: Path, **kwargs) -> Path:
    run = wandb.init(mode="offline", project="a-project", dir=folder, settings=wandb.Settings(silent=True, x_disable_stats=True))
    run_folder = Path(run.dir).parent
    log_run(WandbTracker(run), **kwargs)
    wandb.teardown()  # returns when the process that writes the file has ended
    return run_folder


FORMS = [json_log, tensorboard_folder, wandb_folder]


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
def test_a_finished_run(tmp_path, form):
    path = form(tmp_path)
    record = read_existing(ExistingRun(path, "theirs", 0.25, seed=3))
    assert (record.optimizer, record.learning_rate, record.seed, record.diverged) == ("theirs", 0.25, 3, False)
    assert (record.steps, record.tokens_per_step, record.first_loss, record.step_seconds) == (STEPS, 16, 5.0, 0.5)
    assert record.evaluations == (Evaluation(3, 4.75, 4.0), Evaluation(6, 4.0, 3.25))


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
def test_a_run_that_stopped_early(tmp_path, form):
    path = form(tmp_path, stop_after=3)
    with pytest.raises(ValueError, match=r"ends after 50\.0% of its schedule, and losses are compared at the end only"):
        read_existing(ExistingRun(path, "theirs", 0.25))
    record = read_existing(ExistingRun(path, "theirs", 0.25, diverged=True))
    assert record.diverged
    assert math.isinf(record.final_loss)
    assert record.evaluations == (Evaluation(3, 4.75, 4.0),)


def test_a_wandb_file_in_progress_and_its_path(tmp_path):
    folder = wandb_folder(tmp_path)
    (file,) = folder.glob("run-*.wandb")
    whole = file.read_bytes()
    assert len(whole) > 2**15  # so that records lie across blocks
    assert read_existing(ExistingRun(file, "theirs", 0.25)).steps == STEPS
    file.write_bytes(whole[: len(whole) * 3 // 4])
    with pytest.raises(ValueError, match="of its schedule"):
        read_existing(ExistingRun(folder, "theirs", 0.25))


def test_what_is_no_run(tmp_path):
    with pytest.raises(ValueError, match="holds neither TensorBoard's event files nor run-"):
        read_existing(ExistingRun(tmp_path, "theirs", 0.25))
    other = tmp_path / "other.log"
    other.write_text(json.dumps({"train/loss": 5}))
    with pytest.raises(ValueError, match=r"other\.log holds no train/loss or no eval/loss"):
        read_existing(ExistingRun(other, "theirs", 0.25))
