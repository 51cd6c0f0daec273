"""How infra/slurm/train.sbatch asks for containers: what it hands to srun, for which a program stands that writes its arguments down. No
enroot, pyxis or apptainer is behind these tests, and no Slurm."""

import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "infra" / "slurm" / "train.sbatch"
NAME = """it's 100% "a" $(touch executed) `touch executed` ; touch executed"""
TRAIN = ["-m", "levanter_mars.main.train_lm", "--config", f"./{NAME}.yaml", "--trainer.seed", "1"]
STAND_IN = """#!/usr/bin/env bash
printf '%s\\0' "$@" >"$ARGUMENTS"
"""


def run(folder: Path, arguments: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """The script, as the first node's shell runs it in `folder`."""
    programs = arguments.parent / "bin"
    programs.mkdir()
    (programs / "srun").write_text(STAND_IN)
    (programs / "srun").chmod(0o755)
    (folder / f"{NAME}.yaml").touch()
    variables = {"SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": "a[1-2]", "PATH": f"{programs}:/usr/bin:/bin", "ARGUMENTS": str(arguments)}
    command = ["bash", str(SCRIPT), f"{NAME}.yaml", "--trainer.seed", "1"]
    return subprocess.run(command, cwd=folder, env={**variables, **environment}, text=True, capture_output=True)


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / NAME
    path.mkdir()
    return path


@pytest.mark.parametrize(("python", "expected"), [({}, "python"), ({"PYTHON": "/opt/p y"}, "/opt/p y")])
def test_enroot(tmp_path, folder, python, expected):
    image = "registry#mars:gpu $(touch executed)"
    done = run(folder, tmp_path / "arguments", ENROOT_IMAGE=image, **python)
    assert done.returncode == 0, done.stderr
    received = (tmp_path / "arguments").read_text().split("\0")[:-1]
    assert received[:3] == ["--kill-on-bad-exit=1", "--open-mode=append", "--output=logs/slurm-1.%n.%N.log"]
    assert received[3:] == [
        *(f"--container-image={image}", f"--container-mounts={folder}:{folder}", f"--container-workdir={folder}"),
        *(expected, *TRAIN),
    ]
    assert not list(tmp_path.rglob("executed"))


def test_apptainer(tmp_path, folder):
    image = "/images/m a r s.sif"
    done = run(folder, tmp_path / "arguments", APPTAINER_IMAGE=image)
    assert done.returncode == 0, done.stderr
    received = (tmp_path / "arguments").read_text().split("\0")[:-1]
    assert received[3:] == ["apptainer", "exec", "--nv", "--bind", str(folder), "--pwd", str(folder), image, "python", *TRAIN]
    assert not list(tmp_path.rglob("executed"))


@pytest.mark.parametrize("kind", ["ENROOT_IMAGE", "APPTAINER_IMAGE"])
@pytest.mark.parametrize("name", ["a,b", "a:b"])
def test_a_folder_that_no_mount_can_name_is_refused(tmp_path, kind, name):
    (tmp_path / name).mkdir()
    done = run(tmp_path / name, tmp_path / "arguments", **{kind: "image"})
    assert done.returncode == 2 and not (tmp_path / "arguments").exists()
    assert done.stderr == f"the current folder is {tmp_path / name}; one that a container mounts may hold neither comma nor colon\n"
