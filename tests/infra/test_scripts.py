"""Every shell script and image of the repository, by the checkers of their languages; what the images are made of."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
TOOLS = Path(sys.executable).parent
DOCKER = REPOSITORY / "infra" / "docker"


def scripts() -> list[str]:
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=REPOSITORY, text=True, capture_output=True
    )
    files = [REPOSITORY / name for name in listed.stdout.splitlines()]
    return [
        str(path.relative_to(REPOSITORY))
        for path in files
        if path.is_file() and path.read_bytes()[:60].startswith((b"#!/usr/bin/env bash", b"#!/bin/"))
    ]


def test_shellcheck_finds_nothing():
    found = scripts()
    expected = {"infra/install.sh", "infra/sky/train.sh", "infra/slurm/train.sbatch", "infra/tpu/worker.sh", ".ci/run"}
    assert expected <= set(found)
    done = subprocess.run([TOOLS / "shellcheck", *found], cwd=REPOSITORY, text=True, capture_output=True)
    assert done.returncode == 0, done.stdout


def test_hadolint_finds_nothing():
    done = subprocess.run([TOOLS / "hadolint", DOCKER / "Dockerfile"], text=True, capture_output=True)
    assert done.returncode == 0, done.stdout


def test_the_image_is_not_root_and_takes_nothing_but_what_it_names():
    text = (DOCKER / "Dockerfile").read_text()
    assert re.findall(r"^USER (.*)$", text, flags=re.MULTILINE)[-1] == "1000"
    copied = re.findall(r"^COPY (?!--from)(.*) \S+$", text, flags=re.MULTILINE)
    sources = {source.replace("${HARDWARE}", hardware) for line in copied for source in line.split() for hardware in ("gpu", "tpu")}
    ignore = (DOCKER / "Dockerfile.dockerignore").read_text().splitlines()
    assert "*" in ignore
    for source in sources:
        assert (REPOSITORY / source).exists()
        assert f"!{source.split('/')[0]}" in ignore
    assert not re.search(r"(ARG|ENV).*(KEY|TOKEN|SECRET)", text)


def test_the_images_check_passes_without_git_as_in_the_image():
    """What the last stage runs to see whether stock Levanter finds the optimizers, with what it has set by then."""
    stage = (DOCKER / "Dockerfile").read_text().rsplit("FROM", 1)[1]
    before, check = re.search(r"(.*)^RUN (JAX_PLATFORMS.*?)$", stage, flags=re.MULTILINE | re.DOTALL).groups()
    [line] = re.findall(r"^ENV (.*)$", before, flags=re.MULTILINE)
    variables = dict(pair.split("=", 1) for pair in shlex.split(line)) | {"PATH": str(TOOLS)}
    assert shutil.which("git", path=variables["PATH"]) is None
    done = subprocess.run(["/bin/sh", "-c", check], env=variables, text=True, capture_output=True)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize("argument", ["", "cpu", "$(touch executed)"])
def test_install_refuses_other_hardware(tmp_path, argument):
    done = subprocess.run(
        ["bash", REPOSITORY / "infra" / "install.sh", argument], cwd=tmp_path, env=os.environ, text=True, capture_output=True
    )
    assert (done.returncode, done.stderr) == (2, f"install.sh takes gpu or tpu; got '{argument}'\n")
    assert not list(tmp_path.iterdir())
