#!/usr/bin/env python3
"""A stand-in for gcloud, for tests: it is not Google's, and no machine is behind it.

In the folder $STAND_IN it records the arguments of every call in calls.jsonl, and answers from script.json: a list for each kind of call
(describe, create, delete, scp, ssh), one item a call, the last one again and again. An item is "ok" (do as below), {"state": S} for
describe, {"text": T} for any other answer, {"error": TEXT}, or "hang". Kinds that script.json leaves out are "ok". scp copies into the
folders of the node's workers, and ssh runs the command there, for real, so that what Google's machines would run is run.
"""

import contextlib
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

WORKERS = 2
folder = Path(os.environ["STAND_IN"])


def answer(kind: str):
    """The next item of the script for this kind of call."""
    with (folder / "position.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        script = json.loads((folder / "script.json").read_text()).get(kind, ["ok"])
        counts_file = folder / "counts.json"
        counts = json.loads(counts_file.read_text()) if counts_file.exists() else {}
        position = counts.get(kind, 0)
        counts[kind] = position + 1
        counts_file.write_text(json.dumps(counts))
    return script[min(position, len(script) - 1)]


def workers(node: str, which: str) -> list[Path]:
    homes = [folder / "workers" / f"{node}.{index}" for index in (range(WORKERS) if which == "all" else [int(which)])]
    for home in homes:
        home.mkdir(parents=True, exist_ok=True)
    return homes


def option(name: str) -> str:
    return next(argument.split("=", 1)[1] for argument in sys.argv if argument.startswith(f"--{name}="))


def main() -> int:
    with (folder / "calls.jsonl").open("a") as calls:
        calls.write(json.dumps(sys.argv[1:]) + "\n")
    group, verb, *rest = sys.argv[3:]
    item = answer(verb)
    if isinstance(item, dict) and "error" in item:
        print(item["error"], file=sys.stderr)
        return 1
    if item == "hang":
        time.sleep(600)
    if isinstance(item, dict) and "text" in item:
        print(item["text"])
    elif verb == "describe":
        print(json.dumps({"name": rest[0], "state": item}))
    elif group == "queued-resources" and verb == "delete":
        for leader in folder.glob("workers/*/levanter-mars/leader"):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(int(leader.read_text()), signal.SIGKILL)
        shutil.rmtree(folder / "workers", ignore_errors=True)  # new machines come bare
    elif verb == "scp":
        *sources, target = [argument for argument in rest if not argument.startswith("--")]
        node, path = target.split(":")
        for home in workers(node, option("worker")):
            for source in sources:
                shutil.copy2(source, home / path)
    elif verb == "ssh":
        # Like Google's, it goes on to the other workers when one fails, and fails in the end.
        statuses = []
        for home in workers(rest[0], option("worker")):
            environment = {"HOME": str(home), "PATH": f"{folder}/bin:/usr/bin:/bin"}
            statuses.append(subprocess.run(["bash", "-c", option("command")], cwd=home, env=environment).returncode)
        return max(statuses)
    return 0


sys.exit(main())
