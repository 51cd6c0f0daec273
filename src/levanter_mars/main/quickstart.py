"""Trains the model of a Levanter YAML on text that Python ships, by Levanter's own command, and reports on it.

    python -m levanter_mars.main.quickstart --config config/mars_gpt2_nano.yaml

Takes what `python -m levanter.main.train_lm` takes. A run is known by what defines it: its config, its corpus and the versions of
the code. Started again, an interrupted run goes on from its newest checkpoint, a finished one only shows its report, and anything
else is a run of its own.
"""

import hashlib
import importlib.metadata
import io
import json
import logging
import re
import shlex
import subprocess
import sys
from pathlib import Path

import draccus
import levanter.config
from draccus.utils import DraccusException
from levanter.checkpoint import latest_checkpoint_path
from levanter.data.text.datasets import UrlDatasetSourceConfig
from levanter.main.train_lm import TrainLmConfig
from levanter.tracker.json_logger import JsonLoggerConfig

import levanter_mars
from levanter_mars.quickstart.corpus_folder import TOKENIZER, TRAIN, VALIDATION, Manifest, ensure_corpus
from levanter_mars.quickstart.report import draw_loss_curve, report
from levanter_mars.quickstart.training_log import read_training_log
from levanter_mars.quickstart.untrained import untrained_loss

VOCAB_SIZE = 1024
SHOWN_LOGGERS = ("tqdm_loggable.tqdm_logging", "levanter.eval", "levanter.trainer")
DEFINING_PACKAGES = ("levanter-mars", "marin-levanter", "marin-haliax", "jax", "optax")
INFORMATION = re.compile(r"I\d{8} [\d:]+ \d+ (\S+) ([^\r\n]*\r?\n)")
"""A line by which Levanter's log says that all is well. It may stand behind a progress bar, which ends without a new line."""


def quickstart(config: TrainLmConfig) -> None:
    folder = corpus_folder(config)
    print(f"Corpus: {folder}", flush=True)
    corpus = ensure_corpus(folder, VOCAB_SIZE)
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


def corpus_folder(config: TrainLmConfig) -> Path:
    """The folder that the config reads its tokenizer and all of its data from.

    Raises:
        ValueError: the config reads something else, which this command does not make, or logs where it cannot read.
    """
    folder = Path(config.data.tokenizer).parent
    sources = [getattr(component, "source", None) for component in config.data.components.values()]
    wanted = [UrlDatasetSourceConfig(train_urls=[str(folder / TRAIN)], validation_urls=[str(folder / VALIDATION)])]
    if Path(config.data.tokenizer).name != TOKENIZER or sources != wanted:
        raise ValueError(
            f"data.tokenizer is {config.data.tokenizer}; the quickstart makes FOLDER/{TOKENIZER}, "
            f"beside FOLDER/{TRAIN} and FOLDER/{VALIDATION}, and needs data that names these three"
        )
    if not isinstance(config.trainer.tracker, JsonLoggerConfig):
        raise ValueError("trainer.tracker.type must be json_logger, whose lines the quickstart reads")
    return folder


def run_id(config: TrainLmConfig, corpus: Manifest) -> str:
    """A name that changes with anything that could change the run's numbers."""
    versions = {package: importlib.metadata.version(package) for package in DEFINING_PACKAGES}
    # An editable install changes without its version.
    package = Path(levanter_mars.__file__).parent
    code = hashlib.sha256(b"".join(path.read_bytes() for path in sorted(package.glob("*.py")))).hexdigest()
    identity = json.dumps([draccus.encode(config), corpus.digest, versions, code], sort_keys=True, default=str)
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
    with subprocess.Popen([sys.executable, *command[1:]], stderr=subprocess.PIPE) as training:
        assert training.stderr is not None
        try:
            # Without translation of line ends, because a progress bar returns to the start of its line.
            for chunk in io.TextIOWrapper(training.stderr, errors="replace", newline=""):
                sys.stderr.write(without_routine(chunk))
                sys.stderr.flush()
            status = training.wait()
        except KeyboardInterrupt:
            training.terminate()
            raise
    if status != 0:
        print(f"Training ended with status {status}; its log is {log_path}.", file=sys.stderr)
        sys.exit(status if status > 0 else 128 - status)


def without_routine(chunk: str) -> str:
    """What is left of Levanter's output without the many lines that only say all is well: progress, results, warnings."""

    def shown(line: re.Match[str]) -> str:
        return "\n" * (line.start() > 0) + line[2] if line[1] in SHOWN_LOGGERS else ""

    return INFORMATION.sub(shown, chunk)


def main() -> None:
    # This process evaluates one model and looks for checkpoints; what Levanter says of that would bury what matters.
    logging.disable(logging.INFO)
    try:
        levanter.config.main(quickstart)()
    except KeyboardInterrupt:
        sys.exit("\nInterrupted. The same command goes on from the newest checkpoint.")
    except (DraccusException, ValueError) as error:
        sys.exit(str(error))
    except OSError as error:
        sys.exit(f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    main()
