"""Keeps a run going on machines that are taken away: creates them again and goes on from the newest checkpoint."""

import contextlib
import fcntl
import time
from collections.abc import Iterator
from dataclasses import dataclass

from gcloud import Absent, Refused, Unreachable
from pod import LOST, Job, Pod


class GaveUp(Exception):
    """Too many attempts in a row."""


@dataclass(frozen=True)
class Patience:
    poll: float = 60
    """Seconds between two looks."""
    retries: int = 10
    """Attempts in a row: to create, to launch, to reach Google or the workers."""
    backoff: float = 30
    """Seconds before the second attempt. Doubles with each, up to half an hour."""
    healthy: float = 1800
    """Seconds of training after which attempts are counted from 0 again."""


def babysit(pod: Pod, job: Job, patience: Patience, *, until_running: bool = False) -> None:
    """Returns when the run has finished, or, with `until_running`, once it runs.

    Raises:
        Refused: Google refuses.
        GaveUp: `patience.retries` attempts in a row came to nothing.
    """
    attempts = 0
    running_since: float | None = None
    while True:
        try:
            done = _look(pod, job)
        except (Unreachable, Absent) as error:  # Absent: the machines went while they were being spoken to
            done = f"{pod.name} does not answer: {error}"
        if done in ("finished", "running"):
            running_since = running_since or time.monotonic()
            if done == "finished" or until_running:
                print(f"Run {job.run_id!r} on {pod.name}: {done}", flush=True)
                return
            if time.monotonic() - running_since >= patience.healthy:
                attempts = 0
        elif done is not None:
            running_since = None
            attempts += 1
            if attempts > patience.retries:
                raise GaveUp(f"{patience.retries} attempts in a row came to nothing. The last: {done}. {pod.name} may still exist and cost money.")
            print(done, flush=True)
            time.sleep(min(patience.backoff * 2 ** (attempts - 1), 1800))
            continue
        time.sleep(patience.poll)


def _look(pod: Pod, job: Job) -> str | None:
    """Does the one thing that is due. "finished", "running", a sentence that says what was attempted, or None where one can but wait."""
    state = pod.state()
    if state is None:
        pod.create()
        return f"{pod.name}: asked for"
    if state in LOST:
        pod.delete()
        pod.create()
        return f"{pod.name} was {state}: deleted and asked for again"
    if state != "ACTIVE":
        print(f"{pod.name} is {state}", flush=True)
        return None
    training = pod.training()
    if training in ("finished", "running"):
        return training
    if training == "bare":
        pod.setup()
    pod.launch(job)
    return f"{pod.name} was {training}: launched"


@contextlib.contextmanager
def alone(pod: Pod) -> Iterator[None]:
    """
    Raises:
        Refused: another process of this machine starts or keeps the same pod.
    """
    pod.state_folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with (pod.state_folder / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Refused(f"another process here starts or keeps {pod.name}") from None
        yield
