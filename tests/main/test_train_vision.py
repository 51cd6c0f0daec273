"""`train_vision` in processes of its own: the digits, several devices, a run that goes on, and what it refuses."""

import hashlib
import os
import re
import subprocess
import sys
from pathlib import Path

import checkpoints
import cifar_archives
import forked
import numpy as np
import parquet_files
import pytest
import yaml
from draccus.utils import ParsingError
from levanter.trainer import TrainerConfig
from matplotlib.image import imread

from levanter_mars.main.train_vision import TrainVisionConfig
from levanter_mars.vision.history import read_history

pytestmark = pytest.mark.slow

MODULE = "levanter_mars.main.train_vision"
DIGITS = Path(__file__).parents[2] / "config" / "vision" / "digits.yaml"
STEPS, SAVED = 12, 5
"""Levanter counts steps from 0."""


def command(folder: Path, *arguments: str) -> subprocess.CompletedProcess:
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    return subprocess.run([sys.executable, "-m", MODULE, *arguments], cwd=folder, env=environment, capture_output=True, text=True)


def small(run: str, **trainer) -> dict:
    """A run of twelve steps, evaluated twice, whose channels divide by 8."""
    config = yaml.safe_load(DIGITS.read_text())
    config["model"] = {"width": 8, "blocks": [1, 1]}
    config["statistics_batches"] = 4
    config["trainer"] |= {"id": run, "num_train_steps": STEPS, "train_batch_size": 16, "steps_per_eval": 6, "mp": "f32"}
    config["trainer"] |= {"log_dir": "logs", "per_device_eval_parallelism": 32} | trainer
    config["trainer"]["checkpointer"] = {"base_path": "checkpoints", "save_interval": "1h", "keep": [{"every": SAVED}]}
    return config


def history(folder: Path, run: str) -> dict[str, dict[int, float]]:
    return read_history(folder / "logs" / run / "history.jsonl")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A folder with the small run, from beginning to end on one device."""
    folder = tmp_path_factory.mktemp("vision")
    forked.run(folder, small("straight"), "straight", module=MODULE)
    return folder


def test_digits(tmp_path):
    done = command(tmp_path, "--config", str(DIGITS), "--trainer.id", "run")
    assert done.returncode == 0, done.stderr[-3000:]
    logged = history(tmp_path / "build" / "vision", "run")
    assert list(logged["train/loss"]) == list(logged["train/accuracy"]) == list(range(400))
    assert list(logged["eval/loss"]) == list(logged["eval/accuracy"]) == list(range(49, 400, 50))
    assert logged["eval/accuracy"][399] >= 0.97
    assert f"test accuracy    {100 * logged['eval/accuracy'][399]:.2f} % of 899 images" in done.stdout
    for picture in ("curves.png", "predictions.png"):
        drawn = imread(tmp_path / "build" / "vision" / "logs" / "run" / picture)[..., :3]
        assert (drawn < 0.5).any(axis=-1).mean() > 0.01  # more ink than that of titles


def test_a_resumed_run_is_the_run(folder):
    assert checkpoints.complete(folder / "checkpoints" / "straight") == [SAVED, 2 * SAVED, STEPS - 1]
    checkpoints.copy(folder / "checkpoints" / "straight", SAVED, to=folder / "checkpoints" / "resumed")
    forked.run(folder, small("resumed"), "resumed", module=MODULE)

    straight, resumed = history(folder, "straight"), history(folder, "resumed")
    assert list(resumed["train/loss"]) == list(range(SAVED + 1, STEPS))
    for metric, values in resumed.items():
        assert values == {step: straight[metric][step] for step in values}
    a, b = (checkpoints.arrays(folder / "checkpoints" / run / f"step-{STEPS - 1}") for run in ("straight", "resumed"))
    assert a.keys() == b.keys()
    assert [key for key in a if a[key] != b[key]] == []


def test_a_finished_run_is_evaluated_again(folder):
    before, files = history(folder, "straight"), checkpoints.complete(folder / "checkpoints" / "straight")
    forked.run(folder, small("straight"), "again", module=MODULE)
    assert history(folder, "straight") == before
    assert checkpoints.complete(folder / "checkpoints" / "straight") == files
    assert f"test accuracy    {100 * before['eval/accuracy'][STEPS - 1]:.2f} % of 899 images" in (folder / "again.out").read_text()


def test_eight_devices_that_share_the_parameters_agree_with_one(folder):
    sharded = small("eight", mesh={"param_mapping": {"channels": "data"}}, per_device_eval_parallelism=4)
    forked.run(folder, sharded, "eight", module=MODULE, devices=8)
    one, eight = history(folder, "straight"), history(folder, "eight")
    for metric, tolerance in (("train/loss", 1e-4), ("eval/loss", 1e-4), ("train/accuracy", 0), ("eval/accuracy", 2 / 899)):
        assert one[metric].keys() == eight[metric].keys()
        np.testing.assert_allclose(list(eight[metric].values()), list(one[metric].values()), atol=tolerance, rtol=0)


def test_statistics_of_each_device_are_those_of_microbatches_of_its_images(folder):
    """Eight devices normalize two images each, in training and for the population, as one device does in eight parts of a batch."""
    eight = small("per-device", per_device_eval_parallelism=4)
    eight["model"]["batch_statistics"] = "per_device"
    one = small("microbatches", per_device_parallelism=2) | {"statistics_batches": 8 * eight["statistics_batches"]}
    forked.run(folder, eight, "per-device", module=MODULE, devices=8)
    forked.run(folder, one, "microbatches", module=MODULE)
    a, b, whole = (history(folder, run) for run in ("per-device", "microbatches", "straight"))
    for metric, tolerance in (("train/loss", 1e-4), ("eval/loss", 1e-4), ("train/accuracy", 1e-6), ("eval/accuracy", 2 / 899)):
        assert len(a[metric]) == len(b[metric]) > 0
        np.testing.assert_allclose(list(a[metric].values()), list(b[metric].values()), atol=tolerance, rtol=0)
    # Not those of all sixteen.
    assert max(abs(a["train/loss"][step] - whole["train/loss"][step]) for step in range(STEPS)) > 1e-2


def of_cifar(name: str, data: dict) -> dict:
    """A committed config with a small model and few steps, for stand-ins of a few random images."""
    config = yaml.safe_load((DIGITS.parent / f"{name}.yaml").read_text())
    config["data"] = data
    config["model"] = {"width": 8, "blocks": [1]}
    config["statistics_batches"] = 2
    config["trainer"] |= {"id": name, "num_train_steps": 4, "train_batch_size": 8, "steps_per_eval": 2, "require_accelerator": False}
    config["trainer"] |= {"per_device_eval_parallelism": 4, "log_dir": "logs"}
    config["trainer"]["checkpointer"]["base_path"] = "checkpoints"
    return config


@pytest.mark.parametrize("name, kind", [("adam_cifar100", "archive"), ("mars_cifar10", "parquet")])
def test_cifar_from_an_archive_and_from_parquet(name, kind, tmp_path):
    classes = int(name.partition("cifar")[2])
    members = cifar_archives.content(classes)
    if kind == "archive":
        path = cifar_archives.write(tmp_path / "cifar.tar.gz", members)
        data = {"type": "cifar", "classes": classes, "archive": path.name, "checksum": f"md5:{hashlib.md5(path.read_bytes()).hexdigest()}"}
    else:
        for split, member in (("train-0", "data_batch_1"), ("train-1", "data_batch_2"), ("test-0", "test_batch")):
            part = members[f"cifar-10-batches-py/{member}"]
            images = part["data"].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
            parquet_files.write(tmp_path / f"{split}.parquet", images, part["labels"], [f"class {i}" for i in range(classes)])
        data = {"type": "parquet", "train": ["train-*.parquet"], "test": ["test-*.parquet"]}
    forked.run(tmp_path, of_cifar(name, data), name, module=MODULE)
    logged = history(tmp_path, name)
    assert list(logged["train/loss"]) == [0, 1, 2, 3] and list(logged["eval/loss"]) == [1, 3]
    # Before any update every class is about as probable as every other.
    assert logged["train/loss"][0] == pytest.approx(np.log(classes), rel=0.2)
    assert f"{100 * logged['eval/accuracy'][3]:.2f} % of 4 images" in (tmp_path / f"{name}.out").read_text()


@pytest.mark.parametrize(
    "change, sentence",
    [
        ("truncated", ".*/cifar.tar.gz is no archive of the form .tar.gz, or a corrupt one: "),
        ("another checksum", f"cifar.tar.gz: its md5 is .*, but must be {'0' * 32}; the file is corrupt or another one"),
        ("no server", "http://127.0.0.1:1/cifar.tar.gz cannot be read: .*"),
    ],
)
def test_a_wrong_archive_ends_the_command_with_its_name(change, sentence, tmp_path):
    path = cifar_archives.write(tmp_path / "cifar.tar.gz", cifar_archives.content(10))
    data = {"type": "cifar", "archive": path.name, "checksum": None, "cache_dir": "cache"}
    if change == "truncated":
        path.write_bytes(path.read_bytes()[:-3000])
    elif change == "another checksum":
        data["checksum"] = f"md5:{'0' * 32}"
    else:
        data["archive"] = "http://127.0.0.1:1/cifar.tar.gz"
    process = forked.start(tmp_path, of_cifar("mars_cifar10", data), "run", module=MODULE)
    assert forked.finish(process) == 1
    assert re.match(sentence, (tmp_path / "run.err").read_text().strip().splitlines()[-1])
    assert {file.name for file in tmp_path.rglob("*") if file.is_file()} == {"cifar.tar.gz", "run.yaml", "run.out", "run.err"}


def test_a_missing_archive_ends_the_command_with_its_name(tmp_path):
    done = command(tmp_path, "--config", str(DIGITS), "--data.type", "cifar", "--data.archive", "nowhere.tar.gz")
    assert done.returncode != 0
    assert done.stderr.strip().splitlines()[-1] == "nowhere.tar.gz does not exist"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "fields, trainer, sentence",
    [
        ({"statistics_batches": 0}, {}, "statistics_batches is 0; it must be at least 1"),
        ({}, {"max_eval_batches": 3}, "trainer.max_eval_batches is 3; it must be null: all test images are evaluated"),
        ({}, {"allow_nondivisible_batch_size": True}, "trainer.allow_nondivisible_batch_size is true; train_vision needs it false"),
        ({}, {"train_batch_size": []}, "trainer.train_batch_size is []; train_vision takes one number"),
        ({}, {"train_batch_size": 0}, "trainer.train_batch_size is 0; train_vision takes one number of at least 1"),
    ],
)
def test_what_it_refuses(fields, trainer, sentence):
    with pytest.raises(ParsingError, match=re.escape(sentence)):
        TrainVisionConfig(trainer=TrainerConfig(**trainer), **fields)
