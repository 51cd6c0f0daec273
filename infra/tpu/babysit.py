"""Keeps a run going on machines that are taken away: creates them again and goes on from the newest checkpoint."""

import contextlib
import fcntl
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from gcloud import Absent, Refused, Unreachable, is_refusal
from pod import LOST, Job, Pod, Training

FINISHED, RUNNING, WAITING = "finished", "running", "waiting"
ASKED, LAUNCHED, UNREACHABLE = "asked", "launched", "unreachable"
"""Outcomes of a look. Those of the second line were attempts, and are counted."""


class GaveUp(Exception):
    """Too many attempts."""


@dataclass(frozen=True)
class Patience:
    retries: int = 10
    """How often the same thing is done again: machines asked for, training launched, an answer awaited."""
    backoff: float = 30
    """Seconds after it was done. Doubles with each time, up to half an hour."""
    healthy: float = 1800
    """Seconds of training after which all is counted from 0 again."""

    def check(self) -> None:
        """
        Raises:
            Refused: a value that cannot be.
        """
        if self.retries < 0:
            raise Refused(f"retries is {self.retries}; it must be at least 0")
        for what, value in (("backoff", self.backoff), ("healthy", self.healthy)):
            if not (value >= 0 and math.isfinite(value)):
                raise Refused(f"{what} is {value}; it must be a number of seconds, at least 0")


def babysit(pod: Pod, job: Job, patience: Patience, *, until_running: bool = False, delete: bool = False) -> None:
    """Returns when the run has finished, or, with `until_running`, once it runs; with `delete`, once the machines are gone too.

    Raises:
        Refused: Google refuses, or the pod trains something else.
        GaveUp: the same thing was done again `patience.retries` times, and to no avail.
    """
    times: Counter[str] = Counter()
    running_since: float | None = None
    finished = False
    sentence = ""

    def allow(outcome: str) -> None:
        """Before something is done again, so that what was done last has been waited for."""
        if times[outcome] > patience.retries:
            raise GaveUp(f"given up after {patience.retries} times more; the last: {sentence}. {pod.name} may exist and cost money")

    while True:
        try:
            if finished and delete:
                pod.delete()
                print(f"{pod.name} is gone", flush=True)
                return
            outcome, sentence = _look(pod, job, allow)
            times[UNREACHABLE] = 0
        except (Unreachable, Absent) as error:  # Absent: the machines went while they were being spoken to
            outcome, sentence = UNREACHABLE, f"{pod.name} does not answer: {error}"
        print(sentence, flush=True)
        if outcome == FINISHED and delete:
            finished = True
            continue
        if outcome == FINISHED or (outcome == RUNNING and until_running):
            return
        if outcome == RUNNING:
            running_since = running_since or time.monotonic()
            if time.monotonic() - running_since >= patience.healthy:
                times.clear()
        else:
            running_since = None
        if outcome in (RUNNING, WAITING):
            time.sleep(pod.poll)
            continue
        times[outcome] += 1
        if outcome == UNREACHABLE:
            allow(outcome)
        time.sleep(min(patience.backoff * 2 ** (times[outcome] - 1), 1800))


def _look(pod: Pod, job: Job, allow: Callable[[str], None]) -> tuple[str, str]:
    """Looks, does the one thing that is due if it is allowed, and says so: the outcome and a sentence."""
    request = pod.request()
    if request is None:
        allow(ASKED)
        pod.create()
        return ASKED, f"{pod.name}: asked for"
    if is_refusal(request.failure):
        raise Refused(f"the request for {pod.name} has failed; delete it to ask again: {request.failure}")
    if request.state in LOST:
        allow(ASKED)
        pod.delete()
        pod.create()
        return ASKED, f"{pod.name} was {request.state}: deleted and asked for again{f' ({request.failure})' if request.failure else ''}"
    if request.state != "ACTIVE":
        return WAITING, f"{pod.name} is {request.state}"
    training = pod.training(pod.commit)
    refuse_other(pod, job, training)
    if training.what == RUNNING or (training.what == FINISHED and training.job == job.identity):
        return training.what, f"{pod.name}: run {job.run_id!r} {'has finished' if training.what == FINISHED else 'is running'}"
    if training.what == "installing":
        return WAITING, f"{pod.name} is being set up by somebody else"
    allow(LAUNCHED)
    if training.what == "bare":
        pod.setup()
    pod.launch(job)
    return LAUNCHED, f"{pod.name} was {training.what}: launched"


def refuse_other(pod: Pod, job: Job, training: Training) -> None:
    """
    Raises:
        Refused: it is not this job that is being trained.
    """
    if training.what == RUNNING and training.job != job.identity:
        raise Refused(f"{pod.name} trains another run, or this one with another config or arguments: stop it first")


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
