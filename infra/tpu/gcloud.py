"""Calls of gcloud: arguments as a list, which no shell reads, and what a refusal means."""

import shlex
import subprocess
from dataclasses import dataclass


class Absent(Exception):
    """There is no such resource."""


class Exists(Exception):
    """There is one already."""


class Refused(Exception):
    """Google refuses, and would refuse again."""


class Unreachable(Exception):
    """It may work next time."""


# Codes of google.rpc.Code, and what gcloud says itself before it asks anybody. Not RESOURCE_EXHAUSTED, which is also said of a zone that
# has no machine free.
_REFUSALS = ("PERMISSION_DENIED", "INVALID_ARGUMENT", "UNAUTHENTICATED", "FAILED_PRECONDITION", "quota")
_LOCAL_REFUSALS = (
    *("unrecognized arguments", "invalid choice", "must be specified", "active account", "refreshing your current auth"),
    "not present in the SSH agent",
)
_RATE_LIMIT = "per minute"
"""Of a quota that refills by itself."""


@dataclass(frozen=True)
class Gcloud:
    dry_run: bool = False

    def __call__(self, *arguments: str, show: bool = False) -> str:
        """What `gcloud ARGUMENTS` prints. With `dry_run` the command is printed instead.

        Args:
            show: let the user see its output, none of which is returned.

        Raises:
            Absent, Exists, Refused, Unreachable: as its complaint says.
        """
        command = ["gcloud", *arguments]
        if self.dry_run:
            print(shlex.join(command), flush=True)
            return ""
        try:
            done = subprocess.run(
                command, stdin=subprocess.DEVNULL, stdout=None if show else subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )
        except FileNotFoundError:
            raise Refused("there is no gcloud on PATH: https://cloud.google.com/sdk/docs/install") from None
        if done.returncode == 0:
            return done.stdout or ""
        complaint = " ".join(done.stderr.split())[-1000:] or f"gcloud ended with status {done.returncode}"
        # ssh passes on what a command says on a worker, which is no word of Google's.
        own = complaint[complaint.rfind("ERROR: (gcloud") :] if "ERROR: (gcloud" in complaint else ""
        if "NOT_FOUND" in own:
            raise Absent(complaint)
        if "ALREADY_EXISTS" in own:
            raise Exists(complaint)
        if is_refusal(own):
            raise Refused(complaint)
        raise Unreachable(complaint)


def is_refusal(complaint: str) -> bool:
    lower = complaint.lower()
    return _RATE_LIMIT not in lower and any(word.lower() in lower for word in (*_REFUSALS, *_LOCAL_REFUSALS))
