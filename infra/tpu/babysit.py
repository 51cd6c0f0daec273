"""Keeps a run going on machines that are taken away: creates them again and goes on from the newest checkpoint."""

import contextlib
import fcntl
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from gcloud import Absent, Refused, Unreachable
from pod import LOST, Job, Pod

FINISHED, RUNNING, WAITING = "finished", "running", "waiting"
ASKED, LAUNCHED, UNREACHABLE = "asked", "launched", "unreachable"
"""Outcomes of a look. Those of the second line were attempts, and are counted."""


class GaveUp(Exception):
    """Too many attempts."""


@dataclass(frozen=True)
class Patience:
    poll: float = 60
    """Seconds between two looks."""
    retries: int = 10
    """How often the same thing is done again: machines asked for, training launched, an answer awaited."""
    backoff: float = 30
    """Seconds after it was done. Doubles with each time, up to half an hour."""
    healthy: float = 1800
    """Seconds of training after which all is counted from 0 again."""


def babysit(pod: Pod, job: Job, patience: Patience, *, until_running: bool = False) -> None:
    """Returns when the run has finished, or, with `until_running`, once it runs.

    Raises:
        Refused: Google refuses.
        GaveUp: the same thing was done again `patience.retries` times, and to no avail.
    """
    times: Counter[str] = Counter()
    running_since: float | None = None
    while True:
        try:
            outcome, sentence = _look(pod, job)
            times[UNREACHABLE] = 0
        except (Unreachable, Absent) as error:  # Absent: the machines went while they were being spoken to
            outcome, sentence = UNREACHABLE, f"{pod.name} does not answer: {error}"
        print(sentence, flush=True)
        if outcome == FINISHED or (outcome == RUNNING and until_running):
            return
        if outcome == RUNNING:
            running_since = running_since or time.monotonic()
            if time.monotonic() - running_since >= patience.healthy:
                times.clear()
        else:
            running_since = None
        if outcome in (RUNNING, WAITING):
            time.sleep(patience.poll)
            continue
        times[outcome] += 1
        if times[outcome] > patience.retries:
            raise GaveUp(f"given up after {patience.retries} times more; the last: {sentence}. {pod.name} may exist and cost money")
        time.sleep(min(patience.backoff * 2 ** (times[outcome] - 1), 1800))


def _look(pod: Pod, job: Job) -> tuple[str, str]:
    """Looks, does the one thing that is due, and says so: the outcome and a sentence."""
    state = pod.state()
    if state is None:
        pod.create()
        return ASKED, f"{pod.name}: asked for"
    if state in LOST:
        pod.delete()
        pod.create()
        return ASKED, f"{pod.name} was {state}: deleted and asked for again"
    if state != "ACTIVE":
        return WAITING, f"{pod.name} is {state}"
    training = pod.training()
    if training in (FINISHED, RUNNING):
        return training, f"{pod.name}: run {job.run_id!r} {'has finished' if training == FINISHED else 'is running'}"
    if training == "bare":
        pod.setup()
    pod.launch(job)
    return LAUNCHED, f"{pod.name} was {training}: launched"


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
