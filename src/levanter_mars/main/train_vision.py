"""Trains a ResNet on images with Levanter's trainer, and draws its curves and a sample of its predictions.

    python -m levanter_mars.main.train_vision --config config/vision/digits.yaml

Takes a YAML with `data`, `model`, `optimizer` and Levanter's `trainer`, and any of their fields as arguments. The same command with the
same `trainer.id` goes on from the newest checkpoint.
"""

import functools
import itertools
import logging
import sys
from dataclasses import dataclass, field
from pathlib import Path

import jax
import jax.random as jrandom
import levanter.config
import levanter.tracker
import levanter.trainer
from draccus.utils import DraccusException, ParsingError
from haliax import Axis
from levanter.callbacks import StepInfo
from levanter.optim.config import OptimizerConfig
from levanter.tracker import CompositeTracker
from levanter.trainer import Trainer, TrainerConfig
from levanter.utils.jax_utils import parameter_count

import levanter_mars.vision.cifar
import levanter_mars.vision.milestones
import levanter_mars.vision.parquet  # noqa: F401
from levanter_mars.configs import MarsAdamWConfig
from levanter_mars.vision.classification import Evaluation, Evaluator, training_loss
from levanter_mars.vision.figures import draw_curves, draw_predictions
from levanter_mars.vision.history import History, read_history
from levanter_mars.vision.image_data import DigitsConfig, ImageDataConfig, Splits
from levanter_mars.vision.images import Normalization, TestImages, TrainingImages
from levanter_mars.vision.resnet import ResNetConfig

logger = logging.getLogger(__name__)


@dataclass
class TrainVisionConfig:
    data: ImageDataConfig = field(default_factory=DigitsConfig)
    model: ResNetConfig = field(default_factory=ResNetConfig)
    optimizer: OptimizerConfig = field(default_factory=MarsAdamWConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    statistics_batches: int = 64
    """Training batches from which the batch normalizations' population statistics are estimated before each evaluation."""

    def __post_init__(self):
        if self.statistics_batches < 1:
            raise ParsingError(f"statistics_batches is {self.statistics_batches}; it must be at least 1")
        batch = self.trainer.train_batch_size
        if not isinstance(batch, int) or batch < 1:
            raise ParsingError(f"trainer.train_batch_size is {batch}; train_vision takes one number of at least 1")
        if self.trainer.allow_nondivisible_batch_size:
            raise ParsingError(
                "trainer.allow_nondivisible_batch_size is true; train_vision needs it false, as padding would enter the batch statistics"
            )
        if self.trainer.max_eval_batches is not None:
            raise ParsingError(
                f"trainer.max_eval_batches is {self.trainer.max_eval_batches}; it must be null: all test images are evaluated"
            )


def train(config: TrainVisionConfig, data: Splits, normalization: Normalization) -> Evaluation:
    """Trains, evaluates every `trainer.steps_per_eval` steps and at the end, and writes into LOG_DIR/RUN.

    Returns:
        The last evaluation.
    """
    levanter.trainer.initialize(config)
    assert config.trainer.id is not None
    folder = Path(config.trainer.log_dir) / config.trainer.id
    trackers = [levanter.tracker.current_tracker()]
    writes = jax.process_index() == 0
    if writes:
        trackers.append(History(folder / "history.jsonl"))
    loss = functools.partial(training_loss, normalization=normalization)
    optimizer = config.optimizer.build(config.trainer.num_train_steps)
    with levanter.tracker.current_tracker(CompositeTracker(trackers)), Trainer(config.trainer, optimizer, loss) as trainer:  # type: ignore[bad-argument-type]
        model_key, training_key = jrandom.split(jrandom.PRNGKey(config.trainer.seed))
        training_images = TrainingImages(data.train, config.data.augmentation, config.trainer.seed)
        evaluate = Evaluations(evaluator(trainer, data, training_images, normalization, config.statistics_batches))
        trainer.add_hook(evaluate, every=config.trainer.steps_per_eval)

        Colors, Classes = Axis("color", data.train.images.shape[-1]), Axis("classes", len(data.classes))
        state = trainer.initial_state(training_key, model_init=lambda: config.model.build(Colors, Classes, key=model_key))
        levanter.tracker.log_summary({"parameter_count": parameter_count(state.model)})
        if int(state.step) < config.trainer.num_train_steps:
            batches = trainer.data_loader(training_images).iter_from_step(int(state.step))
            try:
                trainer.train(state, batches)
            finally:
                batches.close()  # an endless one, whose thread would still be at work when Python ends
        else:  # a finished run, for which Levanter would log a training loss of 0
            evaluate(StepInfo(state, 0.0, 0.0))

    assert evaluate.last is not None
    if writes:
        title = f"{config.optimizer.get_choice_name(type(config.optimizer))}, run {config.trainer.id}"
        draw_curves(read_history(folder / "history.jsonl"), title=title, path=folder / "curves.png")
        draw_predictions(data.test, evaluate.last, data.classes, scale=normalization.scale, path=folder / "predictions.png")
    levanter.tracker.current_tracker().finish()
    if writes:
        print(report(evaluate.last, folder))
    return evaluate.last


def evaluator(trainer: Trainer, data: Splits, training_images: TrainingImages, normalization: Normalization, batches: int) -> Evaluator:
    # Batches as training normalizes them: with gradient accumulation, microbatches.
    size = trainer.config.microbatch_size
    assert size is not None
    sample = trainer.data_loader(training_images.take(batches * size), size)
    return Evaluator(
        list(itertools.islice(sample, batches)),
        trainer.data_loader(TestImages(data.test), trainer.config.EvalBatch),
        data.test,
        normalization,
        mp=trainer.mp,
        compute_mapping=trainer.compute_axis_mapping,
        parameter_mapping=trainer.parameter_axis_mapping,
    )


class Evaluations:
    """The hook that evaluates, and logs eval/loss and eval/accuracy."""

    def __init__(self, evaluator: Evaluator):
        self.evaluator = evaluator
        self.last: Evaluation | None = None
        self._step = -1

    def __call__(self, info: StepInfo) -> None:
        if info.step == self._step:  # the hooks run once more at the end
            return
        self.last, self._step = self.evaluator(info.eval_model), info.step
        levanter.tracker.log({"eval/loss": self.last.loss, "eval/accuracy": self.last.accuracy}, step=info.step)
        logger.info("step %d: test loss %.4f, test accuracy %.4f", info.step, self.last.loss, self.last.accuracy)


def report(evaluation: Evaluation, folder: Path) -> str:
    return "\n".join(
        [
            f"test accuracy    {100 * evaluation.accuracy:.2f} % of {len(evaluation.labels):,} images",
            f"test loss        {evaluation.loss:.4f} nats",
            f"curves           {folder / 'curves.png'}",
            f"predictions      {folder / 'predictions.png'}",
        ]
    )


def load(config: TrainVisionConfig) -> tuple[Splits, Normalization]:
    """
    Raises:
        ValueError, OSError: the images are not there or not what `config.data` says; the sentence names the file or the field.
    """
    data = config.data.load()
    return data, config.data.normalization(data.train)


def main(config: TrainVisionConfig) -> None:
    try:
        data, normalization = load(config)
    except (ValueError, OSError) as error:
        sys.exit(str(error))
    train(config, data, normalization)


if __name__ == "__main__":
    try:
        levanter.config.main(main)()
    except (DraccusException, FileNotFoundError) as error:
        sys.exit(str(error))
