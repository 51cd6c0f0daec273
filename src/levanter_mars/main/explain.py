"""Prints what a Levanter YAML's optimizer does with its model, parameter by parameter, and the bytes of its state.

    python -m levanter_mars.main.explain --config config/mars_gpt2.yaml

Works from shapes alone: no weights, no data, no accelerator. Takes what `python -m levanter.main.train_lm` takes, and `--vocab_size`
for when the tokenizer that would say it is not at hand.
"""

import sys
from dataclasses import dataclass

import levanter.config
from draccus.utils import DraccusException
from levanter.main.train_lm import TrainLmConfig

from levanter_mars.data.vocabularies import check_vocabularies
from levanter_mars.explanation import explain, trainable_shapes


@dataclass
class ExplainConfig(TrainLmConfig):
    vocab_size: int | None = None
    """Size of the vocabulary; by default the tokenizer's."""


def main(config: ExplainConfig) -> None:
    explanation = explain(
        trainable_shapes(config, vocabulary_size(config, config.vocab_size)), config.optimizer, config.trainer.num_train_steps
    )
    print(explanation.table())
    print()
    print(explanation.summary())


def vocabulary_size(config: TrainLmConfig, given: int | None) -> int:
    """The size `given`, or else the tokenizer's. Ends the process with a sentence if there is neither.

    Raises:
        ValueError: token files and the tokenizer do not go together.
    """
    if given is not None:
        return given
    try:
        size = len(config.data.the_tokenizer)
    except Exception as error:  # the hub's client, the file system and the tokenizer's parser each have their own
        sys.exit(f"The tokenizer {config.data.tokenizer} cannot be loaded ({type(error).__name__}); give the vocabulary with --vocab_size.")
    check_vocabularies(config.data)
    return size


if __name__ == "__main__":
    try:
        levanter.config.main(main)()
    except (DraccusException, ValueError, FileNotFoundError) as error:
        sys.exit(str(error))
