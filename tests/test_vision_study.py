"""The study of docs/vision.md: its table is that of the committed runs, and the comparison on CIFAR runs to its end."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from cifar_archives import content, write

ROOT = Path(__file__).parents[1]
COMMITTED = ROOT / "docs" / "results" / "vision_digits"

pytestmark = pytest.mark.slow


def study(folder: Path, *arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "benchmarks.vision_study", *arguments]
    command += ["--results", str(folder / "results"), "--work", str(folder / "work")]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900)


def test_the_documented_table_follows_from_the_committed_runs(tmp_path):
    (tmp_path / "results").mkdir()
    shutil.copy(COMMITTED / "runs.jsonl", tmp_path / "results")
    done = study(tmp_path, "--of", "digits")
    assert done.returncode == 0, done.stderr[-3000:]
    page = (ROOT / "docs" / "vision.md").read_text()
    start, end = "<!-- docs/results/vision_digits/table.md -->\n", "<!-- end -->"
    assert page.count(start) == page.count(end) == 1
    assert page[page.index(start) + len(start) : page.index(end)] == done.stdout == (COMMITTED / "table.md").read_text()
    assert (tmp_path / "results" / "study.png").read_bytes().startswith(b"\x89PNG")
    # No run was made.
    assert (tmp_path / "results" / "runs.jsonl").read_bytes() == (COMMITTED / "runs.jsonl").read_bytes()
    assert not (tmp_path / "work").exists()


def test_the_comparison_on_an_archive_of_cifar(tmp_path):
    """On a stand-in of 20 training and 4 test images, by the committed config of one twin and a small model."""
    archive = write(tmp_path / "cifar.tar.gz", content(10))
    overrides = {
        "data": {"archive": str(archive), "checksum": None},
        "model": {"width": 8, "blocks": [1]},
        "statistics_batches": 2,
        "trainer": {"require_accelerator": False, "num_train_steps": 4, "train_batch_size": 8, "steps_per_eval": 2},
    }
    overrides["trainer"]["per_device_eval_parallelism"] = 4
    arguments = ["--of", "cifar10", "--optimizers", "[Muon]", "--factors", "[0.5, 1]", "--extensions", "0", "--seeds", "1"]
    done = study(tmp_path, *arguments, "--overrides", json.dumps(overrides))
    assert done.returncode == 0, done.stderr[-3000:]
    runs = [json.loads(line) for line in (tmp_path / "results" / "runs.jsonl").read_text().splitlines()]
    assert [(run["rate"], run["seed"]) for run in runs[:2]] == [(0.01, 0), (0.02, 0)]
    accuracy, loss = ([run[name]["3"] for run in runs] for name in ("accuracy", "loss"))
    best = max((0, 1), key=lambda i: (accuracy[i], -loss[i]))
    assert len(runs) == 3 and (runs[2]["rate"], runs[2]["seed"]) == (runs[best]["rate"], 1)
    assert [list(run["accuracy"]) for run in runs] == [["1", "3"]] * 3
    last = done.stdout.strip().splitlines()[-1]
    assert last.startswith(f"| Muon | {runs[2]['rate']:g} | 0.01 to 0.02 | {100 * accuracy[2]:.2f} |") and last.endswith(
        f"| {loss[2]:.4f} | 95.08 |"
    )


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--of", "imagenet"], "of is 'imagenet'; it must be digits, cifar10 or cifar100"),
        (["--overrides", '{"trainer": {"seed": 7}}'], "overrides.trainer.seed is 7; the study sets it"),
    ],
)
def test_what_it_refuses(tmp_path, arguments, sentence):
    done = study(tmp_path, *arguments)
    assert done.returncode == 1
    assert done.stderr.strip().splitlines()[-1] == sentence
    assert list(tmp_path.iterdir()) == []
