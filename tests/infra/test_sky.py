"""infra/sky: SkyPilot's own parser reads the tasks, from an environment of its own (requirements/sky.txt); what they run on the nodes runs
here, around a stand-in for Python. No cloud is asked."""

import json
import os
import subprocess
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
SKY = REPOSITORY / "infra" / "sky"
PARSER = REPOSITORY / ".sky" / "bin" / "python"
NAME = """it's 100% "a" $(touch executed) `touch executed` ; touch executed"""

PROGRAM = """
import json, sys
import sky
from sky.utils import yaml_utils

tasks = {}
for path in sys.argv[2:]:
    values = {"RUN_ID": sys.argv[1], "CHECKPOINTS": "gs://bucket/runs", "CONFIG": sys.argv[1]}
    task = sky.Task.from_yaml_config(yaml_utils.read_yaml(path), values, {"WANDB_API_KEY": "key-5fb1"})
    [resources] = task.resources
    tasks[path.rsplit("/", 1)[1]] = {
        "nodes": task.num_nodes, "accelerators": resources.accelerators, "spot": resources.use_spot, "recovery": resources.job_recovery,
        "down": resources.autostop_config and resources.autostop_config.down,
        "run_id": task.envs["RUN_ID"], "secrets": sorted(task.secrets),
        "shown": repr([task, task.secrets, task.envs]),
    }
print(json.dumps(tasks))
"""


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    if not PARSER.exists():
        pytest.skip("SkyPilot is not installed: make .sky/.installed")
    environment = {**os.environ, "HOME": str(tmp_path_factory.mktemp("home")), "SKYPILOT_DISABLE_USAGE_COLLECTION": "1"}
    done = subprocess.run(
        [PARSER, "-c", PROGRAM, NAME, *sorted(map(str, SKY.glob("*.yaml")))],
        env=environment,
        cwd=REPOSITORY,
        text=True,
        capture_output=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_the_parser_reads_what_was_meant(tasks):
    meant = {name: (task["nodes"], task["accelerators"], task["spot"], task["down"]) for name, task in tasks.items()}
    assert meant == {
        "gpu.yaml": (1, {"H100": 8}, False, True),
        "gpu_cluster.yaml": (4, {"H100": 8}, False, True),
        "spot.yaml": (1, {"H100": 8}, True, None),
        "tpu.yaml": (1, {"tpu-v5litepod-16": 1}, False, True),
    }
    assert tasks["spot.yaml"]["recovery"] == {
        "strategy": "EAGER_NEXT_REGION",
        "max_restarts_on_errors": 3,
        "recover_on_exit_codes": [75],
    }


def test_names_stay_as_they_are_and_tokens_are_secrets(tasks):
    for task in tasks.values():
        assert task["run_id"] == NAME
        assert task["secrets"] == ["HF_TOKEN", "WANDB_API_KEY"]
        assert "5fb1" not in task["shown"]


def train(folder: Path, *arguments: str, **environment: str) -> list[str]:
    """What infra/sky/train.sh, in a repository of its own, hands to Python; the first is RUN_ID, the second JAX's port."""
    (folder / "infra" / "sky").mkdir(parents=True)
    script = folder / "infra" / "sky" / "train.sh"
    script.write_text((SKY / "train.sh").read_text())
    python = folder / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text("""#!/usr/bin/env bash\nprintf '%s\\0' "$RUN_ID" "${JAX_COORDINATOR_PORT:-}" "$@"\n""")
    python.chmod(0o755)
    variables = {"CONFIG": f"{NAME}.yaml", "RUN_ID": NAME, "CHECKPOINTS": "gs://bucket/runs", "HF_TOKEN": "", **environment}
    done = subprocess.run(
        ["bash", str(script), *arguments], env={**os.environ, **variables}, text=True, capture_output=True, check=True, cwd=folder
    )
    assert not list(folder.rglob("executed"))
    return done.stdout.split("\0")[:-1]


COMMAND = ["-m", "levanter_mars.main.train_lm", "--config", f"{NAME}.yaml", "--trainer.checkpointer.base_path", "gs://bucket/runs"]


def test_one_node_trains_alone(tmp_path):
    received = train(tmp_path, SKYPILOT_NUM_NODES="1", SKYPILOT_NODE_IPS="10.0.0.1", SKYPILOT_NODE_RANK="0")
    assert received == [NAME, "", *COMMAND]


def test_several_nodes_find_the_first(tmp_path):
    received = train(tmp_path, SKYPILOT_NUM_NODES="2", SKYPILOT_NODE_IPS="10.0.0.1\n10.0.0.2", SKYPILOT_NODE_RANK="1")
    distributed = ["coordinator_address", "10.0.0.1:8476", "num_processes", "2", "process_id", "1"]
    assert received == [
        NAME,
        "",
        *COMMAND,
        *(f"--trainer.distributed.{word}" if i % 2 == 0 else word for i, word in enumerate(distributed)),
    ]


def test_a_tpu_finds_its_workers_itself_on_the_open_port(tmp_path):
    received = train(tmp_path, "tpu", SKYPILOT_NUM_NODES="4", SKYPILOT_NODE_IPS="10.0.0.1\n10.0.0.2", SKYPILOT_NODE_RANK="1")
    assert received == [NAME, "8476", *COMMAND]
