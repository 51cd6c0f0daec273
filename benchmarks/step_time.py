"""Time of a whole training step of every optimizer of a study, by Levanter's trainer, each in turn within one process.

    python -m benchmarks.step_time --study config/compare_nano.yaml --rounds 20

Prints the median milliseconds of each and the median, over rounds, of its time over the baseline's in the same round. The study's own
times are of runs that were made one after another, so what else the machine did is in them. Data loading is not a part of the step here.
"""

import dataclasses
import logging
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import draccus
import haliax as hax
import jax
import jax.random as jrandom
from levanter.data.text.examples import GrugLmExample, named_lm_example_from_grug
from levanter.main.train_lm import TrainLmConfig
from levanter.tracker import NoopConfig
from levanter.trainer import Trainer, TrainerConfig

from benchmarks.rounds import median_milliseconds, median_ratio, timed_in_turn
from levanter_mars.compare.data import present_data
from levanter_mars.compare.study import StudyConfig


@dataclass
class BenchmarkConfig:
    study: Path = Path("config/compare_nano.yaml")
    """Of which the model, the batch and the optimizers are taken, each optimizer at the middle of its grid."""
    rounds: int = 20
    """How often every optimizer is timed, after two rounds of warm-up."""


def loss_function(model, example, *, key=None):
    return model.compute_next_token_loss(example, key=key)


class Contender:
    """A model in training by one optimizer."""

    def __init__(self, config: TrainLmConfig, trainer_config: TrainerConfig):
        Vocab, Pos = hax.Axis("vocab", len(config.data.the_tokenizer)), config.model.max_Pos
        Batch = hax.Axis("batch", trainer_config.train_batch_size)
        key = jrandom.PRNGKey(0)
        optimizer = config.optimizer.build(trainer_config.num_train_steps)
        self._trainer = Trainer(trainer_config, optimizer, loss_function, add_default_hooks=False)
        with self._trainer as trainer:
            self._state = trainer.initial_state(key, model_init=lambda: config.model.build(Vocab, key=key))
            tokens = hax.random.randint(key, (Batch, Pos), 0, Vocab.size)
            self._batch = hax.vmap(lambda tokens: named_lm_example_from_grug(GrugLmExample.causal(tokens.array), Pos), Batch)(tokens)

    def seconds(self) -> float:
        with self._trainer as trainer:
            start = time.perf_counter()
            info = trainer.train_step(self._state, self._batch)
            self._state = jax.block_until_ready(info.state)
            return time.perf_counter() - start


@draccus.wrap()
def main(config: BenchmarkConfig):
    study = draccus.parse(StudyConfig, config_path=config.study, args=[])
    present_data(study)
    logging.disable(logging.INFO)
    configs = {name: study.train_config(name) for name in study.optimizers}
    with tempfile.TemporaryDirectory() as folder:
        # The trainer is the same for all.
        trainer_config = dataclasses.replace(configs[study.baseline].trainer, id="step_time", tracker=NoopConfig(), log_dir=Path(folder))
        trainer_config.initialize()
        contenders = {name: Contender(config, trainer_config) for name, config in configs.items()}
    rounds = timed_in_turn({name: contender.seconds for name, contender in contenders.items()}, config.rounds)
    print(f"{config.rounds} rounds, {jax.devices()[0].device_kind}")
    for name in contenders:
        ratio = median_ratio(rounds, name, study.baseline)
        print(f"{name:20} {median_milliseconds(rounds, name):8.1f} ms   {ratio:5.2f} x {study.baseline}")


if __name__ == "__main__":
    main()
