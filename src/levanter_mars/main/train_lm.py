"""Levanter's train_lm, which saves a checkpoint and ends when its machine is about to be taken away.

    python -m levanter_mars.main.train_lm --config config/mars_gpt2.yaml

Takes what `python -m levanter.main.train_lm` takes and is that command, until a process of the run receives SIGTERM, the notice that
Slurm and clouds give. Then all processes save after the same step and exit with status 75 (EX_TEMPFAIL: try again); the same command,
given the same run id, goes on from that step.

Refuses before it starts what the stock command finds out late or never: token files of another vocabulary than the tokenizer's, and the
harness without a tokenizer.
"""

import logging
import os
import signal
import sys

import jax
import levanter.checkpoint
import levanter.config
import levanter.main.train_lm
import levanter.tracker
from jax.experimental import multihost_utils
from levanter.callbacks import StepInfo
from levanter.main.train_lm import TrainLmConfig
from levanter.trainer import Trainer

from levanter_mars.data.vocabularies import check_vocabularies

PREEMPTED = 75


class Preempted(Exception):
    """The run has saved what it has and ends before its last step."""


class PreemptibleTrainer(Trainer):
    """Raises Preempted, in all processes after the same step, once that step is saved."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self._calls = 0
        self._signalled = False
        self._ending = False
        # Where there are several processes, JAX listens itself, and tells the others.
        if not jax.distributed.is_initialized():
            signal.signal(signal.SIGTERM, self._on_signal)

    def _on_signal(self, *_) -> None:
        self._signalled = True
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a second one ends the process at once

    def _has_notice(self) -> bool:
        """Whether the run ends after this step. To be called once a step, in every process."""
        # Counted from this start, not by the run's steps: a notice from before the first call names call 1.
        self._calls += 1
        if jax.distributed.is_initialized():
            return multihost_utils.reached_preemption_sync_point(self._calls)
        return self._signalled

    def run_hooks(self, info: StepInfo, force: bool = False) -> None:
        # The checkpoint is one of the hooks.
        if not force and self._has_notice():
            self._ending = True
            self.request_checkpoint(levanter.checkpoint.CheckpointRetention.TEMPORARY)
        super().run_hooks(info, force)

    def train_step(self, *args, **kwargs) -> StepInfo:
        info = super().train_step(*args, **kwargs)
        if self._ending:
            raise Preempted(f"Preempted: saved after step {info.step}; the same command goes on from there.")
        return info


def train(config: TrainLmConfig) -> None:
    """Levanter's main. Ends the process with a sentence if token files, tokenizer and harness do not go together."""
    try:
        check_vocabularies(config.data)
    except ValueError as error:
        sys.exit(str(error))
    if config.eval_harness is not None and config.data.tokenizer == "passthrough":
        sys.exit("eval_harness needs a tokenizer to read its tasks, but data.tokenizer is passthrough: name one, or leave eval_harness out")
    levanter.main.train_lm.main(config)


def main() -> None:
    # A Levanter from before it could be asked for a checkpoint has its own trainer: there a notice ends the run as it always did.
    if hasattr(levanter.checkpoint, "CheckpointRetention"):
        # Stock main has no place for a trainer of another class.
        levanter.main.train_lm.Trainer = PreemptibleTrainer
    status = 0
    try:
        levanter.config.main(train)()
    except Preempted as notice:
        levanter.tracker.current_tracker().finish()
        print(notice, file=sys.stderr)
        status = PREEMPTED
    # Waits for all processes: a scheduler that ends a job with its first process must not end one that still saves.
    if jax.distributed.is_initialized():
        jax.distributed.shutdown()
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    # Not sys.exit: in the middle of an epoch the data loader's threads are at work, and Python may abort when it ends under them, so that
    # a run which has finished would look like one that failed.
    os._exit(status)


if __name__ == "__main__":
    main()
