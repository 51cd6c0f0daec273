"""`type: bin` in a YAML of stock Levanter."""

import json
from pathlib import Path

import draccus
import jax
import levanter.config
import numpy as np
import pytest
import stock
import yaml
from draccus.utils import DraccusException
from haliax import Axis
from levanter.data.text.datasets import LmDataConfig
from levanter.main.train_lm import TrainLmConfig
from levanter.schedule import BatchSchedule
from tokenizers import Tokenizer

MARS = {"type": "mars-adamw", "learning_rate": 6e-3, "learning_rate_1d": 3e-3, "warmup": 5}
STEPS = 200


def data(folder: Path, **component) -> LmDataConfig:
    """Parsed as the command parses it, data before optimizer."""

    def main(config: TrainLmConfig) -> TrainLmConfig:
        return config

    document = {"data": {"components": {"text": {"type": "bin", "seq_len": 8, **component}}}, "optimizer": {"type": "mars-adamw"}}
    (folder / "config.yaml").write_text(yaml.safe_dump(document))
    return levanter.config.main(main, args=["--config", str(folder / "config.yaml")])().data


def test_the_config_is_dumped_and_read_again(tmp_path):
    config = data(tmp_path, train=["a.bin"], windows="random")
    assert draccus.decode(LmDataConfig, draccus.encode(config)) == config


def test_levanter_splits_shuffles_and_names_the_windows(tmp_path):
    np.arange(800).astype("<u2").tofile(tmp_path / "a.bin")
    config = data(tmp_path, train=[f"{tmp_path}/a.bin"], vocab_size=800)
    config = LmDataConfig(components=config.components, num_validation_sequences={"text": 20}, shuffle=True)
    Pos = Axis("position", 8)
    train = config.train_sets(Pos, key=jax.random.PRNGKey(0))["text"].as_sync_dataset()
    held_out = config.validation_sets(Pos)["text"].as_sync_dataset()
    assert (len(train), len(held_out)) == (80, 20)
    begins = [int(example.tokens[0]) for example in train.get_batch(range(80))]
    begins += [int(example.tokens.array[0]) for example in held_out.get_batch(range(20))]
    assert begins != sorted(begins) and sorted(begins) == list(range(0, 800, 8))
    (example,) = config.train_set(Pos, BatchSchedule(4), key=jax.random.PRNGKey(0)).as_sync_dataset().get_batch([0])
    assert example.tokens.axes == (Pos,)
    # No loss where there is no next token, and attention crosses documents.
    np.testing.assert_array_equal(example.loss_weight.array, [1] * 7 + [0])
    assert example.attn_mask.segment_ids is None


def test_files_are_opened_when_a_split_is_asked_for(tmp_path):
    """So that explain and preflight can read the config where the data is not."""
    np.array([1, 2, 300] * 10, "<u2").tofile(tmp_path / "a.bin")
    config = data(tmp_path, train=["missing.bin"], validation=[f"{tmp_path}/a.bin"], vocab_size=300)
    Pos = Axis("position", 8)
    with pytest.raises(FileNotFoundError, match=r"missing\.bin does not exist"):
        config.train_set(Pos, BatchSchedule(4), key=jax.random.PRNGKey(0))
    with pytest.raises(ValueError, match=r"a\.bin: the token at byte 4 is 300, but the vocabulary has 300 tokens"):
        config.validation_sets(Pos)
    unchecked = data(tmp_path, validation=[f"{tmp_path}/a.bin"], vocab_size=300, check_tokens=False)
    assert len(unchecked.validation_sets(Pos)["text"].as_sync_dataset()) == 3


@pytest.mark.parametrize(
    "fields, sentence",
    [
        ({}, "a bin component names no files: give train, validation or both"),
        ({"train": ["a.bin"], "seq_len": 0}, "seq_len of a bin component is 0, but must be at least 1"),
        ({"train": ["a.bin"], "vocab_size": 70000}, "vocab_size of a bin component is 70000, but its tokens are uint16: at most 65536"),
        ({"train": ["a.bin"], "format": "parquet"}, "parquet"),
    ],
)
def test_a_bad_field_is_refused_while_parsing(tmp_path, fields, sentence):
    with pytest.raises(DraccusException, match=sentence):
        data(tmp_path, **fields)


@pytest.mark.slow
def test_stock_train_lm_trains_from_a_bin(tmp_path):
    """200 steps of random windows, on the text that the other tests of the stock command read from JSON lines."""
    stock.write_workspace(tmp_path)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer" / "tokenizer.json"))
    texts = [json.loads(line)["text"] for line in (tmp_path / "corpus.jsonl").read_text().splitlines()]
    tokens = np.array([id for text in texts for id in [*tokenizer.encode(text).ids, tokenizer.token_to_id("<|endoftext|>")]], "<u2")
    tokens[:-1000].tofile(tmp_path / "train.bin")
    tokens[-1000:].tofile(tmp_path / "val.bin")
    config = stock.config(MARS)
    config["data"]["components"] = {
        "text": {"type": "bin", "train": ["train.bin"], "validation": ["val.bin"], "seq_len": 32, "vocab_size": 300, "windows": "random"}
    }
    config["data"]["shuffle"] = True
    config["trainer"] |= {"num_train_steps": STEPS, "steps_per_eval": 100}
    assert stock.finish(stock.start(tmp_path, config)) == [0], (tmp_path / "run.err").read_text()[-3000:]
    loss = stock.losses(tmp_path)
    assert len(loss) == STEPS
    assert loss[0] == pytest.approx(np.log(300), abs=0.15)
    assert np.mean(loss[-10:]) < 2.5  # 13 words in patterns: far below the entropy of single tokens
    assert stock.metrics(tmp_path)[-1]["eval/text/loss"] < 2.5
