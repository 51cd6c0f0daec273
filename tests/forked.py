"""Stock commands in processes of their own, forked from one that has imported them, so that a run costs its compilation and its steps.

A process that a test kills, or that kills itself, is a real one: nothing of it but its files outlives it.
"""

import functools
import multiprocessing
import os
import runpy
import signal
import sys
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path

import yaml

TRAIN_LM = "levanter.main.train_lm"
OURS = "levanter_mars.main.train_lm"


@functools.cache
def _context():
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([TRAIN_LM, OURS])
    return context


def start(
    folder: Path, config: dict, name: str, *, devices: int = 1, module: str = TRAIN_LM, before: Callable[[], None] | None = None
) -> BaseProcess:
    """Starts `python -m MODULE --config NAME.yaml` in `folder` on so many CPU devices; it writes NAME.out and NAME.err.

    Compiled programs are shared by all runs of a folder. `before`, which must be picklable, is called in the process first.
    """
    config = {**config, "trainer": {"jax_compilation_cache_dir": "compiled", **config["trainer"]}}
    (folder / f"{name}.yaml").write_text(yaml.safe_dump(config))
    process = _context().Process(target=_run, args=(folder, name, devices, module, before))
    process.start()
    return process


def finish(process: BaseProcess, timeout: float = 600) -> int:
    """The exit status, negative for a signal; the process does not outlive the call."""
    try:
        process.join(timeout)
    finally:
        process.kill()
    process.join()
    assert process.exitcode is not None
    return process.exitcode


def run(folder: Path, config: dict, name: str, **kwargs) -> None:
    """Runs it to its end, which must be a good one."""
    status = finish(start(folder, config, name, **kwargs))
    assert status == 0, f"{name} ended with {status}:\n{(folder / f'{name}.err').read_text()[-3000:]}"


def kill_self_at(event: str, path_ends: str, how: signal.Signals = signal.SIGKILL) -> None:
    """From now on this process gets that signal just before it does something (a Python audit event) to such a path, the first time."""
    seen = False

    def hook(happening: str, arguments: tuple) -> None:
        nonlocal seen
        paths = [os.fspath(x) for x in arguments if isinstance(x, str | os.PathLike)]
        if happening == event and not seen and any(path.endswith(path_ends) for path in paths if isinstance(path, str)):
            seen = True
            os.kill(os.getpid(), how)

    sys.addaudithook(hook)


def _run(folder: Path, name: str, devices: int, module: str, before: Callable[[], None] | None) -> None:
    os.chdir(folder)
    os.environ |= {"XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}", "WANDB_MODE": "disabled"}
    for descriptor, suffix in ((1, "out"), (2, "err")):
        os.dup2(os.open(f"{name}.{suffix}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644), descriptor)
    sys.argv = [module, "--config", f"{name}.yaml"]
    if before is not None:
        before()
    runpy.run_module(module, run_name="__main__", alter_sys=True)
