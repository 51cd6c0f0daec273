"""A TPU pod: a queued resource of one slice or several, and what is done on all of its workers."""

import contextlib
import functools
import hashlib
import json
import math
import os
import re
import shlex
import shutil
import subprocess
import textwrap
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from gcloud import Absent, Exists, Gcloud, Refused, Unreachable

REPOSITORY = Path(__file__).resolve().parents[2]
FOLDER = "levanter-mars"
"""On the workers, in the home folder."""

SECRETS = ("WANDB_API_KEY", "HF_TOKEN")
"""Variables that go from this environment into a file that only its owner reads, there as here, and into no command line."""

CAPACITY = {"on-demand": [], "spot": ["--spot"], "reserved": ["--reserved"]}

LOST = ("SUSPENDED", "FAILED")
"""States in which there are no machines any more, and never will be under this request."""

DELETION_LOOKS = 30


@dataclass(frozen=True)
class Request:
    """A queued resource."""

    state: str
    failure: str = ""
    """Why it has failed, in Google's words."""


@dataclass(frozen=True)
class Training:
    """What training does, over all workers."""

    what: str
    """bare, installing, idle, running, finished or exited (some process failed, or was told to end)."""
    job: str = ""
    """The identity of the job that runs or ran."""


@dataclass(frozen=True)
class Job:
    """What to train."""

    config: Path
    run_id: str
    checkpoints: str
    arguments: tuple[str, ...] = ()

    def script(self) -> str:
        """Bash that defines it."""
        arguments = ("--trainer.checkpointer.base_path", self.checkpoints, *self.arguments)
        return f"export RUN_ID={shlex.quote(self.run_id)}\nARGUMENTS=({shlex.join(arguments)})\n"

    @functools.cached_property
    def contents(self) -> bytes:
        """Of the config, read once: the same through all preemptions."""
        return self.config.read_bytes()

    @property
    def identity(self) -> str:
        """By which a worker's job is told from another; worker.sh computes it too."""
        return hashlib.sha256(self.script().encode() + self.contents).hexdigest()


@dataclass(frozen=True)
class Pod:
    name: str
    zone: str
    accelerator: str = ""
    runtime: str = ""
    capacity: str = "on-demand"
    slices: int = 1
    project: str | None = None
    poll: float = 10
    """Seconds between two looks at what goes away."""
    gcloud: Gcloud = field(default_factory=Gcloud)

    @functools.cached_property
    def commit(self) -> str:
        """That of this repository, read once: the same through all preemptions."""
        try:
            done = subprocess.run(["git", "-C", str(REPOSITORY), "rev-parse", "HEAD"], check=True, capture_output=True, text=True)
        except (OSError, subprocess.CalledProcessError):
            raise Refused(f"{REPOSITORY} is no git repository with a commit, which is what workers are given") from None
        return done.stdout.strip()

    @property
    def nodes(self) -> list[str]:
        return [self.name] if self.slices == 1 else [f"{self.name}-{index}" for index in range(self.slices)]

    @property
    def state_folder(self) -> Path:
        """On this machine: what is being copied, and the babysitter's lock."""
        return Path.home() / ".cache" / "levanter-mars" / f"{self.zone}.{self.name}"

    def _where(self) -> list[str]:
        return [f"--zone={self.zone}", "--quiet", *([f"--project={self.project}"] if self.project else [])]

    def _queued(self, verb: str, *arguments: str) -> str:
        return self.gcloud("compute", "tpus", "queued-resources", verb, self.name, *self._where(), *arguments)

    def request(self) -> Request | None:
        """
        Raises:
            Unreachable: also if the answer is none that can be understood.
        """
        try:
            answer = self._queued("describe", "--format=json")
        except Absent:
            return None
        if self.gcloud.dry_run:
            return None
        try:
            state = json.loads(answer)["state"]
            return Request(state["state"], state.get("failedData", {}).get("error", {}).get("message", ""))
        except (ValueError, LookupError, TypeError, AttributeError):
            raise Unreachable(f"describe of {self.name} answers {answer[:200]!r}, which has no state") from None

    def create(self) -> None:
        """Asks for the machines. Where there is a request already, nothing."""
        size = [f"--node-id={self.name}"] if self.slices == 1 else [f"--node-count={self.slices}", f"--node-prefix={self.name}"]
        hardware = [f"--accelerator-type={self.accelerator}", f"--runtime-version={self.runtime}"]
        with contextlib.suppress(Exists):
            self._queued("create", *hardware, *size, *CAPACITY[self.capacity])

    def delete(self) -> None:
        """Deletes the request and its machines, and returns once Google says that there is none. Where there is none, nothing.

        Raises:
            Unreachable: there still is.
        """
        request = self.request()
        if self.gcloud.dry_run or (request and request.state != "DELETING"):
            with contextlib.suppress(Absent):
                self._queued("delete", "--force")
        for _ in range(DELETION_LOOKS):
            if request is None or (request := self.request()) is None:
                return
            time.sleep(self.poll)
        raise Unreachable(f"{self.name} still exists, {request.state}")

    def ssh(self, command: str, *, nodes: list[str] | None = None, worker: str = "all", show: bool = False) -> str:
        """Runs a command, which is ours alone and holds nothing of the user's, on workers."""
        return "".join(
            self.gcloud(
                *("compute", "tpus", "tpu-vm", "ssh", node, *self._where(), f"--worker={worker}", f"--command={command}"), show=show
            )
            for node in (self.nodes if nodes is None else nodes)
        )

    def _copy(self, *names: str) -> None:
        # -p keeps modes, so that a secret is at no time readable to others there.
        files = [str(self.state_folder / "files" / name) for name in names]
        for node in self.nodes:
            self.gcloud(*("compute", "tpus", "tpu-vm", "scp", *files, f"{node}:{FOLDER}/", *self._where(), "--worker=all", "--scp-flag=-p"))

    @contextlib.contextmanager
    def _files(self) -> Iterator[Path]:
        """A folder for what is copied; file names are ours, whatever the user's are. Gone when this ends."""
        folder = self.state_folder / "files"
        if self.gcloud.dry_run:
            yield folder
            return
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(mode=0o700, parents=True)
        try:
            yield folder
        finally:
            shutil.rmtree(folder)

    def setup(self) -> None:
        """Gives every worker the committed state of this repository and its pinned environment."""
        self.ssh(f"mkdir -p -m 700 {FOLDER}")
        with self._files() as folder:
            archive = ["git", "-C", str(REPOSITORY), "archive", "--format=tar.gz", "--output", str(folder / "source.tar.gz"), self.commit]
            if self.gcloud.dry_run:
                print(shlex.join(archive))
            else:
                subprocess.run(archive, check=True)
                shutil.copy(Path(__file__).with_name("worker.sh"), folder)
            self._copy("source.tar.gz", "worker.sh")
        self.ssh(f"bash {FOLDER}/worker.sh setup {self.commit}")

    def launch(self, job: Job) -> None:
        """Starts training on every worker where none runs."""
        with self._files() as folder:
            if self.gcloud.dry_run:
                print(
                    textwrap.indent(f"job.sh, beside {job.config} and the tokens that are set:\n{job.script()}", "# ", lambda line: True),
                    end="",
                )
            else:
                (folder / "config.yaml").write_bytes(job.contents)
                (folder / "job.sh").write_text(job.script())
                secrets = {name: os.environ[name] for name in SECRETS if os.environ.get(name)}
                (folder / "secrets.sh").touch(mode=0o600)
                (folder / "secrets.sh").write_text("".join(f"export {name}={shlex.quote(value)}\n" for name, value in secrets.items()))
            self._copy("config.yaml", "job.sh", "secrets.sh")
        self.ssh(f"bash {FOLDER}/worker.sh start")

    def training(self, commit: str = "") -> Training:
        """
        A run is over when no worker runs it any more: JAX ends the others within minutes when one fails.

        Args:
            commit: what workers are to have; one with another is bare.
        """
        command = f"if test -e {FOLDER}/worker.sh; then bash {FOLDER}/worker.sh status {commit}; else echo {FOLDER}: bare; fi"
        reports = [line.split() for line in re.findall(rf"^{FOLDER}: (.+)$", self.ssh(command), flags=re.MULTILINE)]
        for what in ("running", "installing", "bare", "idle"):
            for report in reports:
                if report[0] == what:
                    return Training(what, report[1] if len(report) > 1 else "")
        same = len({tuple(report) for report in reports}) == 1
        return Training("finished", reports[0][2]) if same and reports[0][1] == "0" else Training("exited")

    def stop(self) -> None:
        """Returns once no worker trains any more."""
        self.ssh(f"if test -e {FOLDER}/worker.sh; then bash {FOLDER}/worker.sh stop; fi")

    def follow_logs(self, worker: int) -> None:
        self.ssh(f"tail -n 100 -F {FOLDER}/train.log", nodes=self.nodes[:1], worker=str(worker), show=True)


def check(pod: Pod, job: Job | None) -> None:
    """
    Raises:
        Refused: a value that cannot be.
    """
    for what, value in (("name", pod.name), ("zone", pod.zone)):
        if not re.fullmatch(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?", value):
            raise Refused(f"{what} is {value!r}; Google allows up to 63 of a-z, 0-9 and -, a letter first")
    if pod.slices < 1:
        raise Refused(f"slices is {pod.slices}; it must be at least 1")
    if not (pod.poll > 0 and math.isfinite(pod.poll)):
        raise Refused(f"poll is {pod.poll}; it must be a number of seconds above 0")
    if job is not None:
        if not job.run_id.strip():
            raise Refused(f"run_id is {job.run_id!r}; it must name the run")
        if not job.config.is_file():
            raise Refused(f"config is {str(job.config)!r}; there is no such file")
        if not job.checkpoints.startswith("gs://"):
            raise Refused(f"checkpoints is {job.checkpoints!r}; it must be a folder of a bucket, gs://..., which outlives the machines")


def wait_until_active(pod: Pod) -> None:
    """
    Raises:
        Refused: the request ended without machines.
    """
    while not ((request := pod.request()) and request.state == "ACTIVE") and not pod.gcloud.dry_run:
        if request is None or request.state in LOST:
            ended = f"{request.state} {request.failure}".strip() if request else "deleted"
            raise Refused(f"the request for {pod.name} ended without machines: {ended}")
        print(f"{pod.name} is {request.state}", flush=True)
        time.sleep(pod.poll)
