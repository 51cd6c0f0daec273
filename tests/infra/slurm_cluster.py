"""A real Slurm of two nodes on this machine: its own controller, two daemons and munge, under one folder, beside any other Slurm."""

import contextlib
import getpass
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import stock

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "squeue", "sinfo")

# JAX's processes look for their coordinator at the name of the first node, by the alphabet, so it must be one that resolves.
HOST = socket.gethostname().split(".")[0]
NODES = (HOST, f"{HOST}-2")

CONFIG = """
ClusterName=levanter-mars-test
SlurmctldHost={host}(127.0.0.1)
SlurmUser={user}
SlurmdUser={user}
SlurmctldPort={ports[0]}
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SchedulerType=sched/backfill
SelectType=select/cons_tres
ReturnToService=2
# A job that is put back starts again no sooner than cred_expire after; its processes have KillWait to end.
KillWait=60
BatchStartTimeout=60
PartitionName=test Nodes=ALL Default=YES State=UP MaxTime=60
NodeName={nodes[0]} NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs={cpus} State=UNKNOWN
NodeName={nodes[1]} NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs={cpus} State=UNKNOWN
"""


def missing() -> str | None:
    """Why there can be no Slurm here, or None."""
    absent = [program for program in PROGRAMS if _find(program) is None]
    if absent:
        return f"no {', '.join(absent)}: apt-get install slurmctld slurmd slurm-client munge"
    if os.geteuid() != 0:
        return "slurmd starts jobs of any user, so this needs root"
    try:
        socket.getaddrinfo(HOST, None)
    except OSError:
        return f"this machine's name, {HOST}, does not resolve"
    return None


def _find(program: str) -> str | None:
    return shutil.which(program, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")


class Slurm:
    def __init__(self, folder: Path):
        self.folder = folder
        self.environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}

    def run(self, *command: str, **keywords) -> subprocess.CompletedProcess[str]:
        program = _find(command[0]) or command[0]
        return subprocess.run([program, *command[1:]], **{"env": self.environment, "text": True, "capture_output": True, **keywords})

    def __call__(self, *command: str, **keywords) -> str:
        """What a Slurm command that succeeds prints."""
        done = self.run(*command, **keywords)
        assert done.returncode == 0, f"{command} ended with {done.returncode}: {done.stderr}"
        return done.stdout

    def job(self, number: str) -> dict[str, str]:
        """The fields of `scontrol show job`."""
        return dict(field.split("=", 1) for field in self("scontrol", "show", "job", number).split() if "=" in field)

    def wait_for(self, what: Callable[[], bool], meaning: str, seconds: float = 600) -> None:
        end = time.monotonic() + seconds
        while not what():
            if time.monotonic() > end:
                logs = "".join(path.read_text()[-3000:] for path in sorted(self.folder.glob("*.log")))
                raise TimeoutError(f"waited {seconds} s for {meaning}\n{self.run('squeue').stdout}\n{logs}")
            time.sleep(0.5)


@contextlib.contextmanager
def slurm(folder: Path) -> Iterator[Slurm]:
    """Starts the cluster in `folder` and ends it, with whatever its jobs still run."""
    folder.chmod(0o755)
    (folder / "munge.key").write_bytes(os.urandom(64))
    (folder / "munge.key").chmod(0o400)
    (folder / "slurm.conf").write_text(
        CONFIG.format(
            host=HOST,
            user=getpass.getuser(),
            ports=[stock.free_port() for _ in range(3)],
            folder=folder,
            nodes=NODES,
            cpus=os.cpu_count(),
        )
    )
    cluster = Slurm(folder)
    daemons = [
        [
            *("munged", "--foreground", "--force", f"--key-file={folder}/munge.key", f"--socket={folder}/munge.socket"),
            *(f"--pid-file={folder}/munge.pid", f"--log-file={folder}/munge.log", f"--seed-file={folder}/munge.seed"),
        ],
        ["slurmctld", "-D", "-f", f"{folder}/slurm.conf"],
        *(["slurmd", "-D", "-f", f"{folder}/slurm.conf", "-N", node] for node in NODES),
    ]
    running: list[subprocess.Popen] = []
    try:
        for command in daemons:
            with (folder / f"daemon{len(running)}.log").open("w") as log:
                running.append(
                    subprocess.Popen([_find(command[0]), *command[1:]], env=cluster.environment, stdout=log, stderr=subprocess.STDOUT)
                )
            if command[0] == "munged":
                cluster.wait_for((folder / "munge.socket").exists, "munge's socket", 30)
        cluster.wait_for(lambda: cluster.run("sinfo", "-h", "-N", "-o", "%T").stdout.split() == ["idle"] * len(NODES), "idle nodes", 60)
        yield cluster
    finally:
        if running:
            with contextlib.suppress(Exception):
                cluster("scancel", "--state=PENDING", "--user", getpass.getuser())
                cluster("scancel", "--signal=KILL", "--full", "--user", getpass.getuser())
                cluster("scancel", "--user", getpass.getuser())
                cluster.wait_for(lambda: not cluster("squeue", "-h").strip(), "an empty queue", 30)
        for daemon in reversed(running):
            daemon.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                daemon.wait(15)
            daemon.kill()
