"""`explain` says what the optimizer really does, and needs no weights for it."""

import re
import subprocess
import sys
from pathlib import Path

import draccus
import jax
import jax.numpy as jnp
import pytest
from levanter.main.train_lm import TrainLmConfig
from levanter.optim.config import AdamConfig

from levanter_mars import MarsAdamWConfig
from levanter_mars.explanation import explain
from levanter_mars.main.explain import vocabulary_size

ROOT = Path(__file__).parents[2]


def run_explain(*arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "levanter_mars.main.explain", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900)


def rows(output: str) -> dict[str, list[str]]:
    lines = [re.split(r"\s{2,}", line.strip()) for line in output.split("\n\n")[0].splitlines()]
    return {line[0]: line[1:] for line in lines}


@pytest.mark.slow
def test_gpt2_small():
    result = run_explain("--config", "config/mars_gpt2.yaml", "--vocab_size", "50257")
    assert result.returncode == 0, result.stderr[-2000:]
    table = rows(result.stdout)
    assert len(table) == 10  # the header and 9 arrays
    assert table["transformer.blocks.stacked.attn.c_attn.weight"] == ["matrix", "layers 12", "2304 × 768", "mars-adamw", "× 1", "0.01"]
    assert table["transformer.blocks.stacked.ln_1.weight"] == ["vector", "layers 12", "768", "adamw", "× 0.5", "0.1"]
    assert table["embeddings.token_embeddings.weight"] == ["matrix", "–", "50257 × 768", "mars-adamw", "× 1", "0"]
    # 12·(12·768²) + (50257 + 1024)·768 in matrices, (2·12 + 1)·768 in norms
    assert "124,337,664 trainable parameters in 9 arrays" in result.stdout
    assert re.search(r"last_gradient +497,273,856 bytes", result.stdout)  # 4 bytes for every matrix entry
    assert re.search(r"total .* 12.00 a parameter", result.stdout)


@pytest.mark.slow
def test_xl():
    xl = ["--model.num_layers", "48", "--model.hidden_dim", "1600", "--model.num_heads", "25"]
    result = run_explain("--config", "config/mars_gpt2.yaml", "--vocab_size", "50257", *xl)
    assert result.returncode == 0, result.stderr[-2000:]
    assert "1,556,764,800 trainable parameters" in result.stdout


def test_state_bytes_are_what_init_allocates():
    params = {"w": jnp.zeros((6, 4)), "b": jnp.zeros(4), "frozen": None}
    config = MarsAdamWConfig()
    explanation = explain(params, config, num_train_steps=10)
    allocated = sum(x.nbytes for x in jax.tree.leaves(config.build(10).init(params)))
    assert sum(explanation.state_bytes.values()) == allocated
    assert explanation.state_bytes["last_gradient"] == 6 * 4 * 4
    assert explanation.state_bytes["mu"] == (6 * 4 + 4) * 4
    assert [(p.path, rule.name, rule.weight_decay) for p, rule in explanation.rows] == [("b", "adamw", 0.1), ("w", "mars-adamw", 0.01)]


def test_amsgrad_and_optimize_1d_show():
    explanation = explain({"b": jnp.zeros(4)}, MarsAdamWConfig(amsgrad=True, optimize_1d=True), num_train_steps=10)
    assert [rule.name for _, rule in explanation.rows] == ["mars-adamw"]
    assert explanation.state_bytes["nu_max"] == 16


def test_levanters_own_optimizers_have_a_state_but_no_rule():
    explanation = explain({"w": jnp.zeros((6, 4))}, AdamConfig(), num_train_steps=10)
    assert [rule for _, rule in explanation.rows] == [None]
    assert explanation.state_bytes["mu"] == 96
    assert "–" in explanation.table()


def test_token_files_of_another_vocabulary_than_the_models_are_refused():
    component = {"type": "bin", "train": ["a.bin"], "vocab_size": 300, "block_cross_document_attention": False}
    data = {"tokenizer": "passthrough", "vocab_size": 299, "components": {"text": component}}
    config = draccus.decode(TrainLmConfig, {"data": data})
    with pytest.raises(ValueError, match="vocab_size of the bin component text is 300, but data.vocab_size, .*, is 299"):
        vocabulary_size(config, None)
    assert vocabulary_size(config, 320) == 320


@pytest.mark.slow
def test_a_tokenizer_that_cannot_be_loaded_is_one_sentence(tmp_path):
    result = run_explain("--config", "config/mars_gpt2_nano.yaml", "--data.tokenizer", str(tmp_path / "none"))
    assert result.returncode == 1
    assert result.stderr.strip().splitlines()[-1].endswith("give the vocabulary with --vocab_size.")
