"""The loss reported of the untrained model is what Levanter's own command would log of the model that it starts from."""

import subprocess
import sys
from pathlib import Path

import draccus
import pytest
import yaml
from levanter.main.train_lm import TrainLmConfig

from levanter_mars.quickstart.corpus_folder import write_corpus
from levanter_mars.quickstart.standard_library import Corpus
from levanter_mars.quickstart.training_log import read_training_log
from levanter_mars.quickstart.untrained import untrained_loss

NANO = Path(__file__).parents[2] / "config" / "mars_gpt2_nano.yaml"
SENTENCE = "seven owls watch the quick brown fox while it jumps over a lazy dog. "


@pytest.mark.slow
def test_is_what_train_lm_starts_from(tmp_path):
    folder = tmp_path / "corpus"
    folder.mkdir()
    write_corpus(folder, Corpus(train={"a": 200 * SENTENCE}, validation={"b": 100 * SENTENCE[::-1]}), vocab_size=300)
    config = yaml.safe_load(NANO.read_text().replace("build/nano", str(tmp_path)))
    # With weights so large, those of another seed have a loss far from this one.
    config["model"] |= {"hidden_dim": 16, "num_heads": 2, "num_layers": 2, "max_seq_len": 32, "initializer_range": 0.5}
    config["optimizer"] |= {"learning_rate": 1e-12, "learning_rate_1d": 1e-12, "warmup": 0}
    config["trainer"] |= {"seed": 7, "num_train_steps": 1, "steps_per_eval": 1, "max_eval_batches": 2, "id": "standstill"}
    (tmp_path / "standstill.yaml").write_text(yaml.safe_dump(config))
    command = [sys.executable, "-m", "levanter.main.train_lm", "--config", str(tmp_path / "standstill.yaml")]
    subprocess.run(command, check=True, capture_output=True, timeout=300)
    [logged] = read_training_log(tmp_path / "logs" / "standstill.log.log").held_out_loss.values()
    assert untrained_loss(draccus.decode(TrainLmConfig, config)) == pytest.approx(logged, abs=1e-5)
