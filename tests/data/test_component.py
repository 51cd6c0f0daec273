"""`type: bin` in a YAML of stock Levanter."""

import json
import subprocess
import sys
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
from levanter.data.loader import DataLoader
from levanter.data.text.datasets import LmDataConfig
from levanter.main.train_lm import TrainLmConfig
from levanter.schedule import BatchSchedule
from levanter.trainer import TrainerConfig
from tokenizers import Tokenizer

MARS = {"type": "mars-adamw", "learning_rate": 6e-3, "learning_rate_1d": 3e-3, "warmup": 5}
STEPS = 200


def data(folder: Path, **component) -> LmDataConfig:
    """Parsed as the command parses it, data before optimizer."""

    def main(config: TrainLmConfig) -> TrainLmConfig:
        return config

    component = {"type": "bin", "seq_len": 8, "block_cross_document_attention": False} | component
    document = {"data": {"components": {"text": component}}, "optimizer": {"type": "mars-adamw"}}
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
        ({"train": ["a.bin"], "block_cross_document_attention": True}, "is true, for which it needs an eos_id, but has none"),
        (
            {"train": ["a.bin"], "vocab_size": 300, "eos_id": 300},
            "eos_id of a bin component is 300, but must be from 0 to below its vocab_size, 300",
        ),
    ],
)
def test_a_bad_field_is_refused_while_parsing(tmp_path, fields, sentence):
    with pytest.raises(DraccusException, match=sentence):
        data(tmp_path, **fields)


def test_whether_attention_crosses_documents_has_to_be_said():
    with pytest.raises(DraccusException, match="block_cross_document_attention"):
        draccus.decode(LmDataConfig, {"components": {"text": {"type": "bin", "train": ["a.bin"]}}})


@pytest.mark.parametrize("windows", ["consecutive", "random"])
def test_attention_stays_within_documents_where_that_is_asked_for(tmp_path, windows):
    """As in Levanter's own datasets: a document ends with the token."""
    np.tile(np.array([5, 6, 0, 7], "<u2"), 20).tofile(tmp_path / "a.bin")
    config = data(
        tmp_path, train=[f"{tmp_path}/a.bin"], vocab_size=8, eos_id=0, block_cross_document_attention=True, windows=windows
    )  # fmt: skip
    train = config.train_set(Axis("position", 8), BatchSchedule(4), key=jax.random.PRNGKey(0)).as_sync_dataset()
    for example in train.get_batch(range(10)):
        documents, _ = example.attn_mask.segment_ids
        np.testing.assert_array_equal(np.diff(documents.array), (example.tokens.array == 0)[:-1])


def test_another_length_than_the_models_is_refused_before_training(tmp_path):
    """By Levanter, at the sequence that its loader reads when it is made."""
    np.arange(800).astype("<u2").tofile(tmp_path / "a.bin")
    config = data(tmp_path, train=[f"{tmp_path}/a.bin"], vocab_size=800)
    train = config.train_set(Axis("position", 16), BatchSchedule(4), key=jax.random.PRNGKey(0))
    with TrainerConfig(require_accelerator=False).use_device_mesh(), pytest.raises(ValueError, match=r"\(8\) must match .* \(16\)"):
        DataLoader(train, 4, axis_resources={"batch": "data"})


CHECK = """
import sys
import jax
jax.distributed.initialize(f"127.0.0.1:{sys.argv[1]}", 2, int(sys.argv[2]))
from levanter_mars.data import component, token_files
token_files.PIECE_TOKENS = 300
read, read_windows = [], token_files.read_windows
token_files.read_windows = lambda windows, *rest: read.append(windows[0][1]) or read_windows(windows, *rest)
files = token_files.open_token_files([sys.argv[3]], "nanogpt")
component.check_tokens(files, 1001)
print(sorted(read))
component.check_tokens(files, 950)
"""


@pytest.mark.slow
def test_processes_share_the_check_and_all_stop(tmp_path):
    np.arange(1000).astype("<u2").tofile(tmp_path / "a.bin")
    port = str(stock.free_port())
    arguments = [[sys.executable, "-c", CHECK, port, str(i), str(tmp_path / "a.bin")] for i in range(2)]
    both = [subprocess.Popen(each, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for each in arguments]
    try:
        outputs = [process.communicate(timeout=300) for process in both]
    finally:
        for process in both:
            process.kill()
    assert [out.splitlines()[-1] for out, _ in outputs] == ["[0, 600]", "[300, 900]"]
    for process, (_, errors) in zip(both, outputs, strict=True):
        assert process.returncode != 0
        assert f"ValueError: {tmp_path}/a.bin: the token at byte 1900 is 950, but the vocabulary has 950 tokens" in errors


@pytest.mark.slow
def test_stock_train_lm_trains_from_a_bin(tmp_path):
    """200 steps, half of random windows, half in Levanter's shuffle, of the text that the other tests of the stock command read."""
    stock.write_workspace(tmp_path)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer" / "tokenizer.json"))
    texts = [json.loads(line)["text"] for line in (tmp_path / "corpus.jsonl").read_text().splitlines()]
    tokens = np.array([id for text in texts for id in [*tokenizer.encode(text).ids, tokenizer.token_to_id("<|endoftext|>")]], "<u2")
    tokens[:-1000].tofile(tmp_path / "train.bin")
    tokens[-1000:].tofile(tmp_path / "val.bin")
    config = stock.config(MARS)
    component = {"type": "bin", "train": ["train.bin"], "seq_len": 32, "vocab_size": 300, "block_cross_document_attention": False}
    config["data"]["components"] = {
        "random": component | {"windows": "random"},
        "shuffled": component | {"windows": "consecutive", "validation": ["val.bin"]},
    }
    # As in config/data/openwebtext_bin.yaml: no tokenizer, and a padded vocabulary.
    config["data"] |= {"shuffle": True, "tokenizer": "passthrough", "vocab_size": 320}
    config["trainer"] |= {"num_train_steps": STEPS, "steps_per_eval": 100, "id": "run"}
    assert stock.finish(stock.start(tmp_path, config)) == [0], (tmp_path / "run.err").read_text()[-3000:]
    loss = stock.losses(tmp_path)
    assert len(loss) == STEPS
    assert loss[0] == pytest.approx(np.log(320), abs=0.15)
    assert np.mean(loss[-10:]) < 2.5  # 13 words in patterns: far below the entropy of single tokens
    assert stock.metrics(tmp_path)[-1]["eval/shuffled/loss"] < 2.5
