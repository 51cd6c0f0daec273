"""infra/slurm/train.sbatch on a real Slurm of two nodes, both of them this machine, whose CPUs stand for the GPUs."""

import json
import os
import secrets
import sys
from pathlib import Path

import numpy as np
import pytest
import slurm_cluster
import stock
import yaml

REPOSITORY = Path(__file__).parents[2]
SCRIPT = REPOSITORY / "infra" / "slurm" / "train.sbatch"
STEPS = 150  # JAX looks for a notice once a second: enough steps for two of them on a fast machine

if reason := slurm_cluster.missing():
    pytest.skip(f"needs Slurm: {reason}", allow_module_level=True)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    # Slurm's sockets have names of at most 108 characters.
    folder = tmp_path_factory.mktemp("s")
    with slurm_cluster.slurm(folder) as cluster:
        yield cluster


def submit(
    cluster, folder: Path, *arguments: str, python: str | Path = sys.executable, options: tuple[str, ...] = (), **environment: str
) -> str:
    """The number of the job that runs the script in `folder` on both nodes."""
    variables = {"JAX_PLATFORMS": "cpu", "HF_HUB_OFFLINE": "1", "WANDB_MODE": "disabled", "PYTHON": str(python), **environment}
    return cluster(
        *("sbatch", "--parsable", "--nodes=2", *options, str(SCRIPT), *arguments), cwd=folder, env={**cluster.environment, **variables}
    ).strip()


def has_ended(cluster, job: str) -> bool:
    return cluster.job(job)["JobState"] in ("COMPLETED", "FAILED", "CANCELLED", "NODE_FAIL", "TIMEOUT")


def trained_steps(log: Path) -> list[tuple[int, float]]:
    """The step and the loss of every line that logs one, in the order of the file."""
    records = [
        json.loads(line[line.find("{") :]) for line in log.read_text().splitlines() if '"tracker": "json_logger", "event": "log"' in line
    ]
    return [(record["step"], record["metrics"]["train/loss"]) for record in records if "train/loss" in record["metrics"]]


@pytest.mark.slow
def test_two_nodes_train_as_one_process_does_through_two_requeues(cluster, tmp_path):
    """The first notice is the one before a time limit, the second that of a Slurm which takes the nodes for another job."""
    stock.write_workspace(tmp_path)
    config = yaml.safe_load((REPOSITORY / "config" / "mars_gpt2_nano.yaml").read_text())
    config["data"] = stock.config({})["data"]
    config["model"]["tokenizer"] = "tokenizer"
    config["trainer"] |= {"num_train_steps": STEPS, "log_dir": "levanter_logs"}
    # The config's own rate makes the loss of so small a corpus spike, which amplifies rounding.
    config["optimizer"] |= {"learning_rate": 5e-4, "learning_rate_1d": 5e-4}
    # Nothing but the notices asks for a checkpoint.
    config["trainer"]["checkpointer"] |= {"base_path": "checkpoints", "save_interval": "1h"}
    reference = stock.start(tmp_path, config, "--trainer.checkpointer.base_path", "elsewhere", name="one")
    assert stock.finish(reference) == [0], (tmp_path / "one.err").read_text()[-3000:]
    expected_steps, expected_losses = zip(*trained_steps(tmp_path / "one.err"), strict=True)
    assert expected_steps == (*range(STEPS), STEPS - 1)  # Levanter logs its last step twice

    job = submit(cluster, tmp_path, "one.yaml", RUN_ID="nano")
    logs = [tmp_path / "logs" / f"nano.{index}.{slurm_cluster.HOST}.log" for index in range(2)]

    def has_trained(steps: int):
        return lambda: has_ended(cluster, job) or (logs[0].exists() and len(trained_steps(logs[0])) >= steps)

    cluster.wait_for(has_trained(5), "the first steps")
    cluster("scancel", "--signal=TERM", job)
    cluster.wait_for(lambda: cluster.job(job)["Restarts"] == "1" or has_ended(cluster, job), "the first requeue")
    first = len(trained_steps(logs[0]))
    assert 5 <= first < STEPS
    cluster.wait_for(has_trained(first + 5), "steps after the first requeue")
    cluster("scontrol", "requeue", job)
    cluster.wait_for(lambda: cluster.job(job)["JobState"] == "PENDING" or has_ended(cluster, job), "the second requeue")
    second = len(trained_steps(logs[0]))
    assert first + 5 <= second < STEPS
    cluster.wait_for(lambda: has_ended(cluster, job), "the end")

    assert (cluster.job(job)["JobState"], cluster.job(job)["Restarts"]) == ("COMPLETED", "2"), logs[0].read_text()[-3000:]
    steps, losses = zip(*trained_steps(logs[0]), strict=True)
    assert steps == expected_steps  # none lost, none repeated
    np.testing.assert_allclose(losses, expected_losses, atol=1e-4, rtol=0)
    assert '"process_index": 1' in logs[0].read_text()  # of a device of the other process
    for log in logs:
        for saved in (first - 1, second - 1):
            assert f"Preempted: saved after step {saved};" in log.read_text()


PROGRAM = """#!/usr/bin/env bash
# Stands for Python: writes its arguments down, each ended by a zero byte, and does as STAND_IN says.
printf '%s\\0' "$RUN_ID" "$@" >"arguments.$SLURM_PROCID"
eval "$STAND_IN"
"""


@pytest.fixture
def stand_in(tmp_path):
    program = tmp_path / "python"
    program.write_text(PROGRAM)
    program.chmod(0o755)
    return program


NAME = """it's 100% "a": $(touch executed) `touch executed` ; touch executed"""


def test_any_name_passes_through_and_executes_nothing(cluster, tmp_path, stand_in):
    (tmp_path / f"{NAME}.yaml").touch()
    arguments = (f"{NAME}.yaml", "--trainer.tracker.tags", NAME)
    job = submit(cluster, tmp_path, *arguments, python=stand_in, RUN_ID=NAME, LOGS=f"of {NAME}", STAND_IN="exit 0")
    cluster.wait_for(lambda: has_ended(cluster, job), "the end", 60)
    assert cluster.job(job)["JobState"] == "COMPLETED", (tmp_path / f"slurm-{job}.log").read_text()
    for process in range(2):
        received = (tmp_path / f"arguments.{process}").read_text().split("\0")
        assert received == [NAME, "-m", "levanter_mars.main.train_lm", "--config", f"./{arguments[0]}", *arguments[1:], ""]
        assert (tmp_path / f"of {NAME}" / f"{NAME}.{process}.{slurm_cluster.HOST}.log").exists()
    assert not (tmp_path / "executed").exists()


def test_a_token_reaches_the_processes_and_no_command_or_log(cluster, tmp_path, stand_in):
    token = f"key-{secrets.token_hex(12)}"
    (tmp_path / "a.yaml").touch()
    look = 'echo "${#WANDB_API_KEY}"; cat /proc/[0-9]*/cmdline >processes.$SLURM_PROCID 2>/dev/null; exit 0'
    job = submit(cluster, tmp_path, "a.yaml", python=stand_in, WANDB_API_KEY=token, STAND_IN=look)
    cluster.wait_for(lambda: has_ended(cluster, job), "the end", 60)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    told = "".join(path.read_text(errors="replace") for path in files) + str(cluster.job(job))
    assert "levanter_mars.main.train_lm" in told and f"{len(token)}\n" in told
    assert token not in told


def test_the_processes_get_the_cpus_that_the_job_asked_for(cluster, tmp_path, stand_in):
    (tmp_path / "a.yaml").touch()
    job = submit(
        cluster,
        tmp_path,
        "a.yaml",
        python=stand_in,
        options=("--cpus-per-task=2",),
        STAND_IN="echo $SRUN_CPUS_PER_TASK >cpus.$SLURM_PROCID",
    )
    cluster.wait_for(lambda: has_ended(cluster, job), "the end", 60)
    assert [(tmp_path / f"cpus.{process}").read_text() for process in range(2)] == ["2\n", "2\n"]


def test_a_canceled_job_stays_canceled(cluster, tmp_path, stand_in):
    (tmp_path / "a.yaml").touch()
    job = submit(cluster, tmp_path, "a.yaml", python=stand_in, STAND_IN="trap 'sleep 1; exit 75' TERM; sleep 60 & wait $!")
    cluster.wait_for(lambda: (tmp_path / "arguments.1").exists(), "its start", 60)
    cluster("scancel", job)
    cluster.wait_for(lambda: cluster("squeue", "-h", "-j", job) == "", "its end", 60)
    assert (cluster.job(job)["JobState"], cluster.job(job)["Restarts"]) == ("CANCELLED", "0")


def test_a_failure_ends_the_job_and_its_other_processes(cluster, tmp_path, stand_in):
    (tmp_path / "a.yaml").touch()
    job = submit(cluster, tmp_path, "a.yaml", python=stand_in, STAND_IN="[[ $SLURM_PROCID == 0 ]] && sleep 600; exit 3")
    # A process that had not yet begun when it was told to end is killed after KillWait.
    cluster.wait_for(lambda: has_ended(cluster, job), "the end", 180)
    assert (cluster.job(job)["JobState"], cluster.job(job)["Restarts"]) == ("FAILED", "0")


@pytest.mark.parametrize(
    ("arguments", "environment", "sentence"),
    [
        ([], {}, "usage: sbatch"),
        (["absent.yaml"], {}, "CONFIG is absent.yaml; there is no such file in"),
        (["a.yaml"], {"RUN_ID": "a/b"}, "RUN_ID is a/b; it names files, so it may hold no slash"),
        (["a.yaml"], {"RUN_ID": "a\\b"}, "the logs are logs/a\\b...; srun reads a backslash in a file's name as a command"),
        (["a.yaml"], {"LOGS": "a\\b"}, "the logs are a\\b/slurm-1...; srun reads a backslash in a file's name as a command"),
        (["a.yaml"], {"ENROOT_IMAGE": "a", "APPTAINER_IMAGE": "b"}, "ENROOT_IMAGE and APPTAINER_IMAGE are both set; give one"),
        (["a.yaml"], {"SLURM_GPUS_PER_NODE": "2"}, "Slurm gave GPUs but sets no CUDA_VISIBLE_DEVICES"),
    ],
)
def test_bad_input_is_refused_in_a_sentence(tmp_path, arguments, environment, sentence):
    """The script alone, as the first node's shell runs it."""
    (tmp_path / "a.yaml").touch()
    variables = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"} | {"SLURM_JOB_ID": "1"} | environment
    done = slurm_cluster.subprocess.run(["bash", SCRIPT, *arguments], cwd=tmp_path, env=variables, text=True, capture_output=True)
    assert done.returncode == 2 and done.stderr.startswith(sentence) and done.stderr.count("\n") == 1
