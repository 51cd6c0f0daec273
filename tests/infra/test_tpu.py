"""infra/tpu against a stand-in gcloud (stand_in_gcloud.py): no TPU and nothing of Google's is behind these tests, but the scripts that
run on workers do run, in folders of this machine, around a stand-in for Python."""

import json
import os
import secrets
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

INFRA = Path(__file__).parents[2] / "infra"
NAME = """it's 100% "a" $(touch executed) `touch executed` ; touch executed: b"""
# Nothing else on this machine holds them.
TOKENS = {"WANDB_API_KEY": f"key'$(touch executed)-{secrets.token_hex(12)}", "HF_TOKEN": f"hf_{secrets.token_hex(12)}"}

NOT_FOUND = {"error": "ERROR: (gcloud) NOT_FOUND: Resource 'projects/p/locations/z/queuedResources/pod' was not found"}
NETWORK = {"error": "ERROR: (gcloud) There was a problem: HTTPSConnectionPool(host='tpu.googleapis.com', port=443): Max retries exceeded"}
QUOTA = {"error": "ERROR: (gcloud) RESOURCE_EXHAUSTED: Quota limit 'TPUV5sLitepodPerProjectPerZoneForTPUAPI' has been exceeded. Limit: 0"}


def state(name: str) -> dict:
    return {"state": name}


# pip installs uv, uv makes an environment, and its Python trains as $STAND_IN/train says.
PYTHON3 = """#!/usr/bin/env bash
[[ $HOME != */pod.0 || ! -e $HOME/../../broken ]] || { rm "$HOME/../../broken"; exit 1; }
mkdir -p .uv/bin && cat >.uv/bin/uv <<'UV'
#!/usr/bin/env bash
[[ $1 != venv ]] || { mkdir -p .venv/bin && cp "$HOME/../../bin/venv_python" .venv/bin/python; }
UV
chmod +x .uv/bin/uv
"""
VENV_PYTHON = """#!/usr/bin/env bash
[[ $1 == -c ]] && exit
printf '%s\\0' "$RUN_ID" "$JAX_COORDINATOR_PORT" "$WANDB_API_KEY" "$HF_TOKEN" "$@" >>arguments
source "$HOME/../../train"
"""


class StandIn:
    """A folder with a gcloud first on PATH, and what it was asked."""

    def __init__(self, folder: Path):
        self.folder = folder
        (folder / "bin").mkdir()
        for name, text in (("python3", PYTHON3), ("venv_python", VENV_PYTHON)):
            (folder / "bin" / name).write_text(text)
            (folder / "bin" / name).chmod(0o755)
        (folder / "path").mkdir()
        shutil.copy(Path(__file__).with_name("stand_in_gcloud.py"), folder / "path" / "gcloud")
        (folder / "path" / "gcloud").chmod(0o755)
        self.config = folder / f"{NAME.replace('/', '')}.yaml"
        self.config.write_text("trainer: {}\n")
        self.environment = {
            **os.environ,
            "PATH": f"{folder}/path:{Path(sys.executable).parent}:/usr/bin:/bin",
            "HOME": str(folder / "home"),
            "STAND_IN": str(folder),
            **TOKENS,
        }
        self.script()

    def script(self, train: str = "exit 0", **answers: list) -> None:
        (self.folder / "script.json").write_text(json.dumps(answers))
        (self.folder / "counts.json").unlink(missing_ok=True)
        (self.folder / "train").write_text(train)

    def command(self, command: str, *options: str, name: str = "pod") -> list[str]:
        return [sys.executable, str(INFRA / "tpu" / "tpu.py"), command, "--name", name, "--zone", "us-a1", *options]

    def job(self, command: str, *options: str, arguments: tuple[str, ...] = ()) -> list[str]:
        fast = ["--poll", "0.05", "--backoff", "0.05", "--retries", "3"] if command in ("start", "babysit") else []
        hardware = ["--accelerator", "v5litepod-8", "--runtime", "v2"] if command in ("start", "babysit") else []
        what = ["--config", str(self.config), "--run_id", NAME, "--checkpoints", "gs://bucket/runs"]
        return self.command(command, *hardware, *what, *fast, *options, "--", *arguments)

    def run(self, command: list[str], timeout: float = 120) -> subprocess.CompletedProcess[str]:
        return subprocess.run(command, cwd=self.folder, env=self.environment, text=True, capture_output=True, timeout=timeout)

    def calls(self) -> list[list[str]]:
        path = self.folder / "calls.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def verbs(self, *which: str) -> list[str]:
        """Of the calls so far; those of interest."""
        return [call[3] for call in self.calls() if not which or call[3] in which]

    def started(self, worker: str = "pod.0") -> list[list[str]]:
        """The environment and arguments of every start of training on a worker."""
        path = self.folder / "workers" / worker / "levanter-mars" / "arguments"
        if not path.exists():
            return []
        fields = path.read_text().split("\0")[:-1]
        count = len(fields) // path.read_text().count("levanter_mars.main.train_lm")
        return [fields[i : i + count] for i in range(0, len(fields), count)]


@pytest.fixture
def gcloud(tmp_path):
    stand_in = StandIn(tmp_path)
    yield stand_in
    # Training that a test left running.
    for leader in tmp_path.glob("workers/*/levanter-mars/leader"):
        try:
            os.killpg(int(leader.read_text()), signal.SIGKILL)
        except (ProcessLookupError, ValueError):
            continue


RUNS_ON = "sleep 600 & trap 'kill $!; exit 75' TERM; wait"
CREATED = [NOT_FOUND, state("WAITING_FOR_RESOURCES"), state("PROVISIONING"), state("ACTIVE")]


def test_babysit_trains_to_the_end_and_deletes(gcloud):
    gcloud.script(describe=[*CREATED, state("ACTIVE"), state("ACTIVE"), state("ACTIVE"), NOT_FOUND])
    done = gcloud.run(gcloud.job("babysit", "--delete_when_done", arguments=("--trainer.tracker.tags", NAME)))
    assert done.returncode == 0, done.stderr
    assert gcloud.verbs("create", "delete") == ["create", "delete"]
    expected = ["--config", "config.yaml", "--trainer.checkpointer.base_path", "gs://bucket/runs", "--trainer.tracker.tags", NAME]
    assert "has finished" in done.stdout and "pod is gone" in done.stdout
    gcloud.script(describe=[state("ACTIVE")], train=RUNS_ON)
    assert gcloud.run(gcloud.job("start", arguments=("--trainer.tracker.tags", NAME))).returncode == 0
    for worker in ("pod.0", "pod.1"):
        assert gcloud.started(worker) == [[NAME, "8476", *TOKENS.values(), "-m", "levanter_mars.main.train_lm", *expected]]
        folder = gcloud.folder / "workers" / worker / "levanter-mars"
        assert (folder / "config.yaml").read_text() == "trainer: {}\n"
        assert (folder / "secrets.sh").stat().st_mode & 0o777 == 0o600
        assert (folder / "requirements" / "tpu.txt").exists()  # the committed repository
    assert not list(gcloud.folder.rglob("executed"))


def test_start_is_idempotent_and_launches_nothing_twice(gcloud):
    gcloud.script(describe=CREATED, train=RUNS_ON)
    for _ in range(2):
        done = gcloud.run(gcloud.job("start"))
        assert done.returncode == 0, done.stderr
    assert gcloud.run(gcloud.job("launch")).returncode == 0  # not even when asked to
    assert gcloud.verbs("create") == ["create"]
    assert len(gcloud.started()) == 1
    assert "training running" in gcloud.run(gcloud.command("status")).stdout

    assert gcloud.run(gcloud.command("stop")).returncode == 0
    assert (gcloud.folder / "workers" / "pod.1" / "levanter-mars" / "status").read_text() == "75\n"
    assert "training exited" in gcloud.run(gcloud.command("status")).stdout


def test_a_second_babysitter_is_refused(gcloud):
    gcloud.script(describe=CREATED, train=RUNS_ON)
    first = subprocess.Popen(gcloud.job("babysit"), cwd=gcloud.folder, env=gcloud.environment, stdout=subprocess.DEVNULL)
    try:
        while not gcloud.started():
            time.sleep(0.05)
        second = gcloud.run(gcloud.job("babysit"))
        assert (second.returncode, second.stderr) == (1, "another process here starts or keeps pod\n")
        # It would ask again for what was deleted, and launch again what was stopped.
        for command in ("delete", "stop"):
            done = gcloud.run(gcloud.command(command))
            assert (done.returncode, done.stderr) == (1, "another process here starts or keeps pod\n")
        assert gcloud.verbs("create", "delete") == ["create"]
        assert "training running" in gcloud.run(gcloud.command("status")).stdout
    finally:
        first.kill()
        first.wait()


def test_another_run_on_the_same_pod_is_no_mistake(gcloud):
    """What finished or runs under another name, or from another config, is not taken for what was asked for."""
    gcloud.script(describe=[state("ACTIVE")])
    assert gcloud.run(gcloud.job("babysit")).returncode == 0
    assert gcloud.run(gcloud.job("babysit")).returncode == 0
    assert len(gcloud.started()) == 1  # the same has finished
    gcloud.config.write_text("trainer: {num_train_steps: 20}\n")
    assert gcloud.run(gcloud.job("babysit")).returncode == 0
    assert len(gcloud.started()) == 2
    gcloud.script(describe=[state("ACTIVE")], train=RUNS_ON)
    assert gcloud.run(gcloud.job("start", "--run_id", "other")).returncode == 0
    assert [start[0] for start in gcloud.started()] == [NAME, NAME, "other"]
    for command in ("babysit", "launch"):
        done = gcloud.run(gcloud.job(command))
        assert (done.returncode, done.stderr) == (
            1,
            "pod trains another run, or this one with another config or arguments: stop it first\n",
        )
    assert len(gcloud.started()) == 3


def test_another_commit_is_installed_before_the_next_launch(gcloud):
    gcloud.script(describe=[state("ACTIVE")])
    assert gcloud.run(gcloud.job("babysit")).returncode == 0
    ready = gcloud.folder / "workers" / "pod.1" / "levanter-mars" / "ready"
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=INFRA, text=True, capture_output=True).stdout
    assert ready.read_text() == commit
    ready.write_text("0123abc\n")
    (ready.parent.parent.parent / "pod.0" / "levanter-mars" / "ready").write_text("0123abc\n")
    assert gcloud.run(gcloud.job("babysit", "--run_id", "next")).returncode == 0
    assert ready.read_text() == commit


def test_a_setup_that_fails_on_one_worker_is_done_again(gcloud):
    gcloud.script(describe=[state("ACTIVE")])
    (gcloud.folder / "broken").touch()
    done = gcloud.run(gcloud.job("babysit"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("does not answer") == 1 and "was bare: launched" in done.stdout
    assert [len(gcloud.started(worker)) for worker in ("pod.0", "pod.1")] == [1, 1]


def test_a_setup_does_not_pull_the_environment_from_under_a_run(gcloud):
    gcloud.script(describe=[state("ACTIVE")], train=RUNS_ON)
    assert gcloud.run(gcloud.job("start")).returncode == 0
    done = gcloud.run(gcloud.command("setup"))
    assert done.returncode == 1 and "training runs, or another setup; stop it first" in done.stderr
    assert "training running" in gcloud.run(gcloud.command("status")).stdout
    assert (gcloud.folder / "workers" / "pod.0" / "levanter-mars" / ".venv" / "bin" / "python").exists()


def test_a_babysitter_that_is_ended_leaves_no_token_behind(gcloud):
    """In the middle of a copy, by a hangup."""
    gcloud.script(describe=[state("ACTIVE")], scp=["ok", "hang"])
    process = subprocess.Popen(gcloud.job("babysit"), cwd=gcloud.folder, env=gcloud.environment, stdout=subprocess.DEVNULL)
    while gcloud.verbs("scp") != ["scp", "scp"]:
        time.sleep(0.05)
    assert list((gcloud.folder / "home").rglob("secrets.sh"))
    process.send_signal(signal.SIGHUP)
    assert process.wait(60) == 130
    assert not list((gcloud.folder / "home").rglob("secrets.sh"))


def test_after_a_preemption_it_creates_the_pod_again_and_goes_on(gcloud):
    """The machines go while training runs; the new ones come bare, and finish."""
    lost = [
        *CREATED,
        state("ACTIVE"),
        state("ACTIVE"),
        state("SUSPENDING"),
        state("SUSPENDED"),
        state("SUSPENDED"),
        NOT_FOUND,
        state("WAITING_FOR_RESOURCES"),
        state("ACTIVE"),
    ]
    gcloud.script(
        describe=lost,
        train=f'[[ -e "$HOME/../../was_here.${{HOME##*.}}" ]] && exit 0; touch "$HOME/../../was_here.${{HOME##*.}}"; {RUNS_ON}',
    )
    done = gcloud.run(gcloud.job("babysit"))
    assert done.returncode == 0, done.stderr
    assert gcloud.verbs("create", "delete") == ["create", "delete", "create"]
    assert "pod was SUSPENDED: deleted and asked for again" in done.stdout
    [start] = gcloud.started()  # of the new machine
    assert start[0] == NAME and "gs://bucket/runs" in start  # the same run and folder, from which Levanter takes the newest checkpoint


def test_what_exits_is_launched_again_without_new_machines(gcloud):
    gcloud.script(describe=CREATED, train="[[ -e again ]] && exit 0; touch again; exit 75")
    done = gcloud.run(gcloud.job("babysit"))
    assert done.returncode == 0, done.stderr
    assert gcloud.verbs("create", "delete") == ["create"]
    assert len(gcloud.started()) == 2


def test_what_fails_again_and_again_is_given_up(gcloud):
    gcloud.script(describe=[state("ACTIVE")], train="exit 1")
    done = gcloud.run(gcloud.job("babysit"))
    assert done.returncode == 1
    assert done.stderr == "given up after 3 times more; the last: pod was exited: launched. pod may exist and cost money\n"
    assert len(gcloud.started()) == 4


def test_a_failed_request_is_made_again(gcloud):
    gcloud.script(describe=[state("FAILED"), state("FAILED"), NOT_FOUND, state("ACTIVE")])
    assert gcloud.run(gcloud.job("babysit")).returncode == 0
    assert gcloud.verbs("create", "delete") == ["delete", "create"]


def test_a_refused_quota_ends_at_once(gcloud):
    gcloud.script(describe=[NOT_FOUND], create=[QUOTA])
    done = gcloud.run(gcloud.job("babysit"))
    assert done.returncode == 1 and "Quota limit" in done.stderr and done.stderr.count("\n") == 1
    assert gcloud.verbs() == ["describe", "create"]


def test_a_request_that_failed_for_its_quota_is_not_made_again(gcloud):
    failed = {"state": "FAILED", "failedData": {"error": {"code": 8, "message": "Quota limit 'TPUS_PER_TPU_FAMILY' has been exceeded."}}}
    gcloud.script(describe=[failed])
    done = gcloud.run(gcloud.job("babysit"))
    assert done.returncode == 1 and "delete it to ask again: Quota limit" in done.stderr and done.stderr.count("\n") == 1
    assert gcloud.verbs() == ["describe"]


@pytest.mark.parametrize(
    "error",
    [
        "RESOURCE_EXHAUSTED: Quota exceeded for quota metric 'API requests' and limit 'API requests per minute' of service 'tpu'",
        'RESOURCE_EXHAUSTED: There is no more capacity in the zone "us-a1"',
    ],
)
def test_what_passes_by_itself_is_tried_again(gcloud, error):
    gcloud.script(describe=[NOT_FOUND, NOT_FOUND, state("ACTIVE")], create=[{"error": f"ERROR: (gcloud.compute) {error}"}, "ok"])
    done = gcloud.run(gcloud.job("babysit"))
    assert done.returncode == 0, done.stderr
    assert gcloud.verbs("create") == ["create", "create"]


def test_what_a_worker_says_is_not_taken_for_googles_word(gcloud):
    gcloud.script(describe=[state("ACTIVE")], ssh=[{"error": "Disk quota exceeded; PERMISSION_DENIED"}, "ok"])
    done = gcloud.run(gcloud.job("babysit"))
    assert done.returncode == 0 and done.stdout.count("does not answer") == 1


@pytest.mark.parametrize("text", ["", "<html>", "[]", "{}", '{"state": null}'])
def test_an_answer_that_is_none_is_asked_for_again(gcloud, text):
    gcloud.script(describe=[{"text": text}, state("ACTIVE")])
    done = gcloud.run(gcloud.job("babysit"))
    assert done.returncode == 0, done.stderr
    assert "which has no state" in done.stdout and gcloud.verbs("create") == []


def test_the_network_is_tried_again_and_given_up_in_the_end(gcloud):
    gcloud.script(describe=[NETWORK, NETWORK, NOT_FOUND, state("ACTIVE")])
    assert gcloud.run(gcloud.job("babysit")).returncode == 0
    assert gcloud.verbs("create", "delete") == ["create"]  # no answer is not the answer that there is none

    gcloud.script(describe=[NETWORK])
    done = gcloud.run(gcloud.job("babysit"))
    assert done.returncode == 1 and "given up after 3 times" in done.stderr and "Max retries" in done.stderr
    assert gcloud.verbs("create", "delete") == ["create"]


def test_workers_that_do_not_answer_are_tried_again(gcloud):
    gcloud.script(describe=[state("ACTIVE")], ssh=[NETWORK, "ok", NETWORK, "ok"])
    done = gcloud.run(gcloud.job("babysit"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("does not answer") == 2


def test_a_create_that_was_heard_after_all_is_no_error(gcloud):
    gcloud.script(describe=[NOT_FOUND, state("ACTIVE")], create=[{"error": "ERROR: (gcloud) ALREADY_EXISTS: Resource already exists"}])
    assert gcloud.run(gcloud.job("babysit")).returncode == 0


def test_delete_is_idempotent_and_makes_sure(gcloud):
    for _ in range(2):
        gcloud.script(describe=[NOT_FOUND], delete=[NOT_FOUND])
        done = gcloud.run(gcloud.command("delete"))
        assert (done.returncode, done.stdout) == (0, "pod is gone\n")
    assert gcloud.verbs("delete") == []
    gcloud.script(describe=[state("ACTIVE"), state("DELETING"), state("DELETING"), NOT_FOUND])
    assert gcloud.run(gcloud.command("delete", "--poll", "0.01")).stdout == "pod is gone\n"
    gcloud.script(describe=[state("DELETING"), NOT_FOUND])  # somebody else's
    assert gcloud.run(gcloud.command("delete", "--poll", "0.01")).stdout == "pod is gone\n"
    assert gcloud.verbs("delete") == ["delete"]
    gcloud.script(describe=[state("ACTIVE")])
    done = gcloud.run(gcloud.command("delete", "--poll", "0.01"))
    assert done.returncode == 1 and "pod still exists, ACTIVE" in done.stderr
    gcloud.script(describe=[state("ACTIVE")], delete=[NETWORK])
    assert gcloud.run(gcloud.command("delete")).returncode == 1


def test_a_network_error_does_not_keep_a_finished_run_from_being_deleted(gcloud):
    describe = [state("ACTIVE"), state("ACTIVE"), NETWORK, state("ACTIVE"), state("ACTIVE"), NOT_FOUND]
    gcloud.script(describe=describe, delete=[NETWORK, "ok"])
    done = gcloud.run(gcloud.job("babysit", "--delete_when_done"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("pod is gone\n") and gcloud.verbs("delete") == ["delete", "delete"]


@pytest.mark.parametrize(("capacity", "flags"), [("on-demand", []), ("spot", ["--spot"]), ("reserved", ["--reserved"])])
def test_capacity_and_slices(gcloud, capacity, flags):
    gcloud.script(describe=[NOT_FOUND, state("ACTIVE")])
    hardware = ("--accelerator", "v5p-8", "--runtime", "v2", "--capacity", capacity, "--poll", "0.05")
    assert gcloud.run(gcloud.command("create", *hardware)).returncode == 0
    assert gcloud.calls()[1][4:] == [
        *("pod", "--zone=us-a1", "--quiet", "--accelerator-type=v5p-8", "--runtime-version=v2", "--node-id=pod"),
        *flags,
    ]
    gcloud.script(describe=[NOT_FOUND, state("ACTIVE")])
    assert gcloud.run(gcloud.command("create", *hardware, "--slices", "2")).returncode == 0
    assert gcloud.calls()[4][-2 - len(flags) :] == ["--node-count=2", "--node-prefix=pod", *flags]
    assert gcloud.run(gcloud.command("setup", "--slices", "2")).returncode == 0
    ready = {path.parts[-3] for path in gcloud.folder.glob("workers/*/levanter-mars/ready")}
    assert ready == {"pod-0.0", "pod-0.1", "pod-1.0", "pod-1.1"}


def test_a_dry_run_prints_what_a_run_then_does(gcloud):
    gcloud.script(describe=[NOT_FOUND, state("ACTIVE")], train=RUNS_ON)
    dry = gcloud.run(gcloud.job("start", "--dry_run"))
    assert dry.returncode == 0 and gcloud.calls() == [] and not (gcloud.folder / "home").exists()
    printed = shlex.split(dry.stdout, comments=True)
    assert gcloud.run(gcloud.job("start")).returncode == 0
    git = printed.index("git")
    del printed[git : printed.index("gcloud", git)]
    assert printed == [word for call in gcloud.calls() for word in ("gcloud", *call)]


def test_no_token_is_in_a_command_a_log_or_a_dry_run(gcloud):
    gcloud.script(describe=CREATED, train=RUNS_ON)
    dry, real = gcloud.run(gcloud.job("start", "--dry_run")), gcloud.run(gcloud.job("start"))
    told = json.dumps(gcloud.calls()) + dry.stdout + dry.stderr + real.stdout + real.stderr
    told += "".join(path.read_text() for path in gcloud.folder.glob("workers/*/levanter-mars/train.log"))
    # Of every process that is there while training runs, as anybody on the machine may read them.
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            told += path.read_bytes().decode(errors="replace")
        except OSError:
            continue
    assert gcloud.started()[0][2:4] == list(TOKENS.values())
    for token in TOKENS.values():
        assert token[-24:] not in told
    assert not list((gcloud.folder / "home").rglob("secrets.sh"))  # nothing stays on this machine


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--name", "a b"], "name is 'a b'; Google allows up to 63 of a-z, 0-9 and -, a letter first"),
        (["--slices", "0"], "slices is 0; it must be at least 1"),
        (["--poll", "nan"], "poll is nan; it must be a number of seconds above 0"),
        (["--backoff", "-1"], "backoff is -1.0; it must be a number of seconds, at least 0"),
        (["--retries", "-1"], "retries is -1; it must be at least 0"),
        (["--run_id", " "], "run_id is ' '; it must name the run"),
        (["--config", "absent.yaml"], "config is 'absent.yaml'; there is no such file"),
        (["--checkpoints", "/tmp/x"], "checkpoints is '/tmp/x'; it must be a folder of a bucket, gs://..., which outlives the machines"),
    ],
)
def test_bad_input_is_refused_in_a_sentence(gcloud, options, sentence):
    done = gcloud.run(gcloud.job("start", *options))
    assert (done.returncode, done.stderr) == (1, sentence + "\n")
    assert gcloud.calls() == []


def test_without_gcloud_it_says_where_to_get_it(gcloud):
    (gcloud.folder / "path" / "gcloud").unlink()
    gcloud.environment["PATH"] = str(gcloud.folder / "path")
    done = gcloud.run(gcloud.command("status"))
    assert done.returncode == 1 and done.stderr.startswith("there is no gcloud on PATH")


@pytest.mark.skipif(shutil.which("gcloud") is None, reason="the real gcloud is not installed; its parser is asked where it is")
def test_the_real_gcloud_takes_our_arguments(gcloud):
    """It parses them before it finds that nobody is logged in."""
    gcloud.script(describe=[NOT_FOUND, state("ACTIVE")], train=RUNS_ON)
    for options in ((), ("--capacity", "spot"), ("--capacity", "reserved", "--slices", "2")):
        printed = gcloud.run(gcloud.job("start", "--dry_run", "--project", "p", *options)).stdout
        commands = [shlex.split(line) for line in printed.splitlines() if line.startswith("gcloud ")]
        for command in {tuple(command[3:5]): command for command in commands}.values():
            environment = {**os.environ, "CLOUDSDK_CONFIG": str(gcloud.folder / "nobody")}
            done = subprocess.run(command, env=environment, text=True, capture_output=True, cwd=gcloud.folder)
            assert "active account" in done.stderr, done.stderr
