#!/usr/bin/env python3
"""Trains on a TPU pod of Google's: infra/README.md says how. Needs gcloud and Python, and no environment of this repository's."""

import argparse
import contextlib
import signal
import sys
from pathlib import Path

from babysit import GaveUp, Patience, alone, babysit, refuse_other
from gcloud import Absent, Gcloud, Refused, Unreachable
from pod import CAPACITY, Job, Pod, check, wait_until_active


def main() -> int:
    options = _parse()
    pod = Pod(
        name=options.name,
        zone=options.zone,
        accelerator=getattr(options, "accelerator", ""),
        runtime=getattr(options, "runtime", ""),
        capacity=getattr(options, "capacity", "on-demand"),
        slices=options.slices,
        project=options.project,
        poll=getattr(options, "poll", Pod.poll),
        gcloud=Gcloud(dry_run=options.dry_run),
    )
    job = Job(options.config, options.run_id, options.checkpoints, tuple(options.arguments)) if "run_id" in options else None
    for ending in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(ending) != signal.SIG_IGN:
            signal.signal(ending, signal.default_int_handler)  # so that copies of secrets are cleaned up
    try:
        check(pod, job)
        # Looking is free; two who change the same pod would undo each other's work.
        with contextlib.nullcontext() if options.dry_run or options.command in ("status", "logs") else alone(pod):
            _do(options, pod, job)
    except (Refused, Absent, GaveUp) as error:
        print(error, file=sys.stderr)
        return 1
    except Unreachable as error:
        print(f"Google or the workers did not answer, the same command may be given again: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"Interrupted. {pod.name} goes on as it is, and costs money until it is deleted.", file=sys.stderr)
        return 130
    return 0


def _do(options: argparse.Namespace, pod: Pod, job: Job | None) -> None:
    match options.command:
        case "start" | "babysit" if pod.gcloud.dry_run:
            # Of a pod that does not exist yet.
            pod.request()
            pod.create()
            pod.request()
            pod.training(pod.commit)
            pod.setup()
            pod.launch(job)
            pod.request()
            pod.training(pod.commit)
        case "start":
            babysit(pod, job, _patience(options), until_running=True)
        case "babysit":
            babysit(pod, job, _patience(options), delete=options.delete_when_done)
        case "create":
            if pod.request() is None:
                pod.create()
            wait_until_active(pod)
        case "setup":
            pod.setup()
        case "launch":
            pod.launch(job)
            training = pod.training()
            refuse_other(pod, job, training)
            if not pod.gcloud.dry_run:
                print(f"{pod.name}: training {training.what}")
        case "status":
            request = pod.request()
            training = f", training {pod.training().what}" if request and request.state == "ACTIVE" else ""
            print(f"{pod.name}: {request.state if request else 'there is none'}{training}")
        case "logs":
            pod.follow_logs(options.worker)
        case "stop":
            pod.stop()
        case "delete":
            pod.delete()
            if not pod.gcloud.dry_run:
                print(f"{pod.name} is gone")


def _patience(options: argparse.Namespace) -> Patience:
    patience = Patience(options.retries, options.backoff, options.healthy)
    patience.check()
    return patience


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    where = argparse.ArgumentParser(add_help=False)
    where.add_argument("--name", required=True, help="of the queued resource; of its nodes too")
    where.add_argument("--zone", required=True)
    where.add_argument("--project", help="default: gcloud's")
    where.add_argument("--slices", type=int, default=1)
    where.add_argument("--dry_run", action="store_true", help="print what would be run")

    what = argparse.ArgumentParser(add_help=False)
    what.add_argument("--accelerator", required=True, help="type of a slice, such as v5litepod-16")
    what.add_argument("--runtime", required=True, help="the VM's image, such as v2-alpha-tpuv5-lite")
    what.add_argument("--capacity", choices=CAPACITY, default="on-demand")
    what.add_argument("--poll", type=float, default=60, help="seconds between two looks")

    job = argparse.ArgumentParser(add_help=False)
    job.add_argument("--config", type=Path, required=True, help="YAML of train_lm")
    job.add_argument("--run_id", required=True, help="the same one goes on from its newest checkpoint")
    job.add_argument("--checkpoints", required=True, help="gs:// folder")
    job.add_argument("arguments", nargs="*", metavar="-- ARGUMENT", help="of train_lm")

    patience = argparse.ArgumentParser(add_help=False)
    patience.add_argument("--retries", type=int, default=Patience.retries, help="how often the same is tried again")
    patience.add_argument("--backoff", type=float, default=Patience.backoff, help="seconds after a first attempt; doubles")
    patience.add_argument("--healthy", type=float, default=Patience.healthy, help="seconds of training that make attempts count anew")

    def command(name: str, summary: str, *parents: argparse.ArgumentParser) -> argparse.ArgumentParser:
        return commands.add_parser(name, help=summary, description=summary, parents=[where, *parents], allow_abbrev=False)

    command("start", "Create what is missing, set up, launch; returns once training runs", what, job, patience)
    keep = command("babysit", "start, and again after each preemption, until training has finished", what, job, patience)
    keep.add_argument("--delete_when_done", action="store_true")
    command("create", "Ask for the machines and wait for them", what)
    command("setup", "Install this repository's last commit on every worker")
    command("launch", "Start training on every worker where none runs", job)
    command("status", "Say what the request and training do")
    command("logs", "Follow a worker's log").add_argument("--worker", type=int, default=0, help="of the first slice")
    command("stop", "End training after a checkpoint; the machines stay, and cost money")
    command("delete", "Delete the request and its machines, and make sure").add_argument("--poll", type=float, default=Pod.poll)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
