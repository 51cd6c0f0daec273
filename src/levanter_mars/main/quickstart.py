"""Trains the model of a Levanter YAML on text that Python ships, by Levanter's own command, and reports on it.

    python -m levanter_mars.main.quickstart --config config/mars_gpt2_nano.yaml

Takes what `python -m levanter.main.train_lm` takes. A run is known by what defines it: its config, its corpus and the versions of
the code. Started again, an interrupted run goes on from its newest checkpoint, a finished one only shows its report, and anything
else is a run of its own.
"""

import hashlib
import importlib.metadata
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import draccus
import levanter.config
from levanter.checkpoint import latest_checkpoint_path
from levanter.main.train_lm import TrainLmConfig

from levanter_mars.quickstart.corpus_folder import Manifest, ensure_corpus
from levanter_mars.quickstart.report import draw_loss_curve, report
from levanter_mars.quickstart.training_log import read_training_log
from levanter_mars.quickstart.untrained import untrained_loss

VOCAB_SIZE = 1024
SHOWN_LOGGERS = ("tqdm_loggable", "levanter.eval", "levanter.trainer")
DEFINING_PACKAGES = ("levanter-mars", "marin-levanter", "marin-haliax", "jax", "optax")


def quickstart(config: TrainLmConfig) -> None:
    corpus_folder = Path(config.data.tokenizer).parent
    print(f"Corpus: {corpus_folder}", flush=True)
    corpus = ensure_corpus(corpus_folder, VOCAB_SIZE)
    print(f"        {corpus.train_documents} documents, {corpus.train_tokens:,} tokens; {corpus.validation_documents} held out", flush=True)

    run = run_id(config, corpus)
    log_path = Path(config.trainer.log_dir) / f"{run}.log.log"  # Levanter appends the suffix twice.
    checkpoints = Path(config.trainer.checkpointer.base_path) / run
    results = Path(config.trainer.log_dir) / run
    afresh = f"To train it again, remove {checkpoints} and {log_path}."
    untrained = _remembered_untrained_loss(config, results)

    if read_training_log(log_path).is_complete(config.trainer.num_train_steps):
        print(f"Run {run} is finished. {afresh}")
    else:
        _train([*sys.argv[1:], "--trainer.id", run], log_path)

    log = read_training_log(log_path)
    if not log.is_complete(config.trainer.num_train_steps):
        sys.exit(f"The log of run {run} does not hold all of its steps. {afresh}")
    checkpoint = latest_checkpoint_path(str(checkpoints))
    curve = results / "loss.png"
    draw_loss_curve(
        log,
        untrained=untrained,
        unigram_entropy=corpus.unigram_entropy,
        title=f"{config.optimizer.get_choice_name(type(config.optimizer))}, run {run}",
        path=curve,
    )
    print("\n" + report(log, untrained=untrained, unigram_entropy=corpus.unigram_entropy, checkpoint=checkpoint, curve=curve))


def run_id(config: TrainLmConfig, corpus: Manifest) -> str:
    """A name that changes with anything that could change the run's numbers."""
    versions = {package: importlib.metadata.version(package) for package in DEFINING_PACKAGES}
    identity = json.dumps([draccus.encode(config), corpus.digest, versions], sort_keys=True, default=str)
    return f"nano-{hashlib.sha256(identity.encode()).hexdigest()[:8]}"


def _remembered_untrained_loss(config: TrainLmConfig, results: Path) -> float:
    remembered = results / "untrained_loss.json"
    if not remembered.exists():
        print("Held-out loss of the untrained model ...", flush=True)
        results.mkdir(parents=True, exist_ok=True)
        unfinished = remembered.with_suffix(".unfinished")
        unfinished.write_text(json.dumps(untrained_loss(config)))
        unfinished.rename(remembered)
    loss = json.loads(remembered.read_text())
    print(f"Held-out loss of the untrained model: {loss:.3f} nats a token", flush=True)
    return loss


def _train(arguments: list[str], log_path: Path) -> None:
    """Runs Levanter's training command and shows its progress, results and warnings; the rest is in its log."""
    command = ["python", "-m", "levanter.main.train_lm", *arguments]
    print(f"$ {shlex.join(command)}\n  (everything it says goes to {log_path})", flush=True)
    with subprocess.Popen([sys.executable, *command[1:]], stderr=subprocess.PIPE, text=True) as training:
        try:
            for line in training.stderr or ():
                if not _is_routine(line):
                    sys.stderr.write(line)
            status = training.wait()
        except KeyboardInterrupt:
            training.terminate()
            training.wait()
            sys.exit("Interrupted. The same command goes on from the newest checkpoint.")
    if status != 0:
        sys.exit(f"Training ended with status {status}; its log is {log_path}.")


def _is_routine(line: str) -> bool:
    """Whether a line of the log is one of the many that say all is well, rather than progress, a result, or a warning."""
    return re.match(r"I\d{8} ", line) is not None and not any(f" {name}" in line for name in SHOWN_LOGGERS)


def main() -> None:
    try:
        levanter.config.main(quickstart)()
    except OSError as error:
        sys.exit(f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    main()
