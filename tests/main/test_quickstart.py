"""The command behind `make train`: what it runs is stock Levanter, runs do not mix, and a stopped run goes on."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import draccus
import pytest
import yaml
from levanter.main.train_lm import TrainLmConfig

from levanter_mars.main.quickstart import run_id, without_routine
from levanter_mars.quickstart.corpus_folder import Manifest
from levanter_mars.quickstart.training_log import read_training_log

ROOT = Path(__file__).parents[2]
MANIFEST = Manifest("digest", "3.12.1", 1024, 10, 1, 1000, 5.0)


def config(**trainer) -> TrainLmConfig:
    document = yaml.safe_load((ROOT / "config" / "mars_gpt2_nano.yaml").read_text())
    document["trainer"] |= trainer
    return draccus.decode(TrainLmConfig, document)


def test_a_run_is_known_by_its_config_and_its_corpus():
    assert run_id(config(), MANIFEST) == run_id(config(), MANIFEST)
    assert re.fullmatch("nano-[0-9a-f]{8}", run_id(config(), MANIFEST))
    others = [run_id(config(seed=1), MANIFEST), run_id(config(num_train_steps=7), MANIFEST)]
    others.append(run_id(config(), Manifest("another", "3.12.1", 1024, 10, 1, 1000, 5.0)))
    assert len({run_id(config(), MANIFEST), *others}) == 4


def test_what_is_shown():
    said = (
        'I20260101 00:00:00 1 levanter.json_logger {"tracker": "json_logger"}\nI20260101 00:00:00 1 levanter.checkpoint Saved checkpoint\n'
    )
    progress = "I20260101 00:00:00 1 tqdm_loggable.tqdm_logging Progress on:train 1it/2it\n"
    warning = "W20260101 00:00:00 1 levanter.checkpoint Something odd\n"
    assert "".join(map(without_routine, said.splitlines(keepends=True))) == ""
    assert without_routine(progress) == "Progress on:train 1it/2it\n"
    assert without_routine(warning) == warning
    assert without_routine("RuntimeError: Loss is NaN\n") == "RuntimeError: Loss is NaN\n"


def command(folder: Path, *arguments: str) -> list[str]:
    """The quickstart on a model of two narrow layers, with all that it writes in `folder`."""
    document = yaml.safe_load((ROOT / "config" / "mars_gpt2_nano.yaml").read_text())
    text = yaml.safe_dump(document).replace("build/nano", str(folder))
    small = yaml.safe_load(text)
    small["model"] |= {"hidden_dim": 16, "num_heads": 2, "num_layers": 2, "max_seq_len": 32}
    small["trainer"] |= {"num_train_steps": 150, "steps_per_eval": 50, "max_eval_batches": 2}
    small["trainer"]["checkpointer"]["save_interval"] = "1s"
    (folder / "small.yaml").write_text(yaml.safe_dump(small))
    return [sys.executable, "-m", "levanter_mars.main.quickstart", "--config", str(folder / "small.yaml"), *arguments]


@pytest.mark.slow
def test_stopped_by_ctrl_c_then_finished_then_only_reported(tmp_path):
    started = subprocess.Popen(
        command(tmp_path), cwd=ROOT, start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    deadline = time.monotonic() + 900
    while not list(tmp_path.glob("checkpoints/*/step-*/metadata.json")) and started.poll() is None and time.monotonic() < deadline:
        time.sleep(0.2)
    os.killpg(started.pid, signal.SIGINT)  # what a terminal does
    output, _ = started.communicate(timeout=300)
    assert started.returncode == 1, output
    assert output.strip().splitlines()[-1] == "Interrupted. The same command goes on from the newest checkpoint."
    [log_path] = tmp_path.glob("logs/*.log.log")
    done_before = max(read_training_log(log_path).train_loss)
    assert 0 < done_before < 149

    finished = subprocess.run(command(tmp_path), cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert finished.returncode == 0, finished.stderr[-3000:]
    assert "$ python -m levanter.main.train_lm --config" in finished.stdout
    assert "held-out loss after" in finished.stdout
    assert "Resuming training from step" in log_path.read_text()
    log = read_training_log(log_path)
    assert sorted(log.train_loss) == list(range(150))
    before, after = (float(re.search(rf"held-out loss {word} +([\d.]+)", finished.stdout)[1]) for word in ("before", "after"))
    assert before == pytest.approx(6.93, abs=0.1)  # ln 1024: the untrained model knows nothing
    assert after < before - 0.5
    [curve] = tmp_path.glob("logs/*/loss.png")
    assert str(curve) in finished.stdout

    size = log_path.stat().st_size
    again = subprocess.run(command(tmp_path), cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert again.returncode == 0, again.stderr[-3000:]
    assert "is finished. To train it again, remove" in again.stdout
    assert again.stdout.splitlines()[-7:] == finished.stdout.splitlines()[-7:]
    assert log_path.stat().st_size == size


@pytest.mark.slow
def test_failures_are_sentences(tmp_path):
    other = subprocess.run(command(tmp_path, "--data.tokenizer", "elsewhere/tokenizer"), cwd=ROOT, capture_output=True, text=True)
    assert other.returncode == 1
    assert other.stderr.strip().splitlines()[-1].startswith("data.tokenizer is elsewhere/tokenizer; the quickstart makes FOLDER/tokenizer")
    missing = subprocess.run(
        [sys.executable, "-m", "levanter_mars.main.quickstart", "--config", str(tmp_path / "missing.yaml")],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert missing.returncode == 1
    assert str(tmp_path / "missing.yaml") in missing.stderr.strip().splitlines()[-1]
