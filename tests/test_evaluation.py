"""What docs/reproducing.md does with a trained model: the harness, during training and after it, and the export for transformers."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import equinox as eqx
import haliax as hax
import jax
import jax.random as jrandom
import numpy as np
import pytest
import stock
import yaml
from levanter.checkpoint import latest_checkpoint_path, load_checkpoint
from levanter.eval_harness_config import TaskConfig
from levanter.layers.attention import AttentionMask
from levanter.main.train_lm import TrainLmConfig
from levanter.models.gpt2 import Gpt2Config
from levanter.tokenizers import load_tokenizer
from levanter.utils.jax_utils import is_inexact_arrayish, local_cpu_mesh

pytestmark = pytest.mark.slow

PUBLISHED = yaml.safe_load((Path(__file__).parents[1] / "config" / "eval" / "published.yaml").read_text())
STEPS = 60
QUESTIONS = 12
HAS_HARNESS = importlib.util.find_spec("lm_eval") is not None
needs_harness = pytest.mark.skipif(not HAS_HARNESS, reason="lm-eval is not installed: requirements/eval.txt")


def task(folder: Path) -> dict:
    """A multiple-choice task of the harness over a folder: the corpus's own next words against words that do not follow."""
    texts = [json.loads(line)["text"].split() for line in (folder / "corpus.jsonl").read_text().splitlines()[:QUESTIONS]]
    questions = [{"text": " ".join(words[:8]), "choices": [" ".join(words[8:12]), "zq zq xj vv"], "answer": 0} for words in texts]
    (folder / "task").mkdir()
    (folder / "task" / "test.jsonl").write_text("".join(json.dumps(question) + "\n" for question in questions))
    return {
        "task": "next_words",
        "dataset_path": str(folder / "task"),
        "output_type": "multiple_choice",
        "test_split": "test",
        "doc_to_text": "{{text}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "answer",
        "metric_list": [{"metric": "acc"}],
    }


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """A folder in which stock train_lm has trained a GPT-2 of the published form, with the harness on."""
    folder = tmp_path_factory.mktemp("evaluation")
    stock.write_workspace(folder)
    config = stock.config({"type": "mars-adamw", "learning_rate": 6e-3, "learning_rate_1d": 3e-3, "warmup": 5})
    config["model"] |= {"use_bias": False, "scale_attn_by_inverse_layer_idx": True}
    config["trainer"] |= {"id": "run", "num_train_steps": STEPS}
    harness = {"eval_harness": {"task_spec": [task(folder)]}}
    if HAS_HARNESS:
        config |= harness | {"eval_harness_steps": STEPS // 2}
    for name, document in (("model", {"model": config["model"]}), ("trainer", {"trainer": config["trainer"]}), ("eval", harness)):
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(document))
    assert stock.finish(stock.start(folder, config)) == [0], (folder / "run.err").read_text()[-3000:]
    return folder


def command(folder: Path, module: str, *arguments: str) -> None:
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([sys.executable, "-m", module, *arguments], cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]


@needs_harness
def test_the_harness_runs_during_training(trained):
    logged = [line for line in (trained / "run.err").read_text().splitlines() if '"lm_eval/next_words/acc"' in line]
    accuracies = [json.loads(line[line.index("{") :])["metrics"]["lm_eval/next_words/acc"] for line in logged if '"event": "log"' in line]
    assert accuracies[-1] == 1.0


@needs_harness
def test_the_harness_runs_on_a_finished_checkpoint(trained):
    files = ["model.yaml", "trainer.yaml", "eval.yaml"]
    command(trained, "levanter.eval_harness", "--configs", *files, "--tokenizer", "tokenizer", "--checkpoint_path", "checkpoints/run")
    results = json.loads((trained / "lm_eval_harness_results.json").read_text())
    assert results["results"]["next_words"]["acc,none"] == 1.0
    assert results["n-samples"]["next_words"] == {"original": QUESTIONS, "effective": QUESTIONS}


@needs_harness
def test_the_published_tasks_are_known_to_the_harness():
    from lm_eval.tasks import TaskManager

    known = set(TaskManager().all_tasks)
    tasks = PUBLISHED["eval_harness"]["task_spec"]
    assert len(tasks) == 9 and set(tasks) <= known
    assert list(PUBLISHED) == ["eval_harness"] and hasattr(TrainLmConfig, "eval_harness_steps") and TaskConfig(tasks[0]).num_fewshot is None


def levanter_logits(folder: Path, tokens: np.ndarray) -> np.ndarray:
    model = yaml.safe_load((folder / "model.yaml").read_text())["model"]
    config = Gpt2Config(**{key: value for key, value in model.items() if key != "type"})
    Vocab = hax.Axis("vocab", len(load_tokenizer(str(folder / "tokenizer"))))
    shapes = eqx.filter_eval_shape(config.build, Vocab, key=jrandom.PRNGKey(0))
    arrays, rest = eqx.partition(shapes, is_inexact_arrayish)
    checkpoint = latest_checkpoint_path(str(folder / "checkpoints" / "run"))
    with local_cpu_mesh():
        model = eqx.combine(load_checkpoint(arrays, checkpoint, subpath="model"), rest)
    inputs = hax.named(tokens, ("batch", "position"))
    logits = hax.dot(model.activations(inputs, attn_mask=AttentionMask.causal()), model.get_lm_head(), axis="embed")
    return np.asarray(logits.rearrange(("batch", "position", "vocab")).array)


def python_with_torch() -> str | None:
    """This Python if it has torch, or the one that LEVANTER_MARS_TORCH_PYTHON names."""
    return sys.executable if importlib.util.find_spec("torch") else os.environ.get("LEVANTER_MARS_TORCH_PYTHON")


def test_transformers_loads_the_export_and_gives_the_same_logits(trained):
    arguments = ["--tokenizer", "tokenizer", "--checkpoint_path", "checkpoints/run", "--output_dir", "hf", "--use_cpu", "true"]
    command(trained, "levanter.main.export_lm_to_hf", "--configs", "model.yaml", "trainer.yaml", *arguments)
    settings = json.loads((trained / "hf" / "config.json").read_text())
    assert (settings["model_type"], settings["scale_attn_by_inverse_layer_idx"], settings["tie_word_embeddings"]) == ("gpt2", True, True)
    python = python_with_torch()
    if python is None:
        pytest.skip("torch is not installed: its CPU wheel is on no index that requirements/ could pin without naming it; "
                    "LEVANTER_MARS_TORCH_PYTHON may name a Python that has torch and transformers")  # fmt: skip
    tokens = np.random.default_rng(0).integers(0, 300, (4, 32))
    np.save(trained / "tokens.npy", tokens)
    script = Path(__file__).parent / "torch_logits.py"
    subprocess.run([python, script, "hf", "tokens.npy", "logits.npy"], cwd=trained, check=True)
    with jax.default_matmul_precision("highest"):
        expected = levanter_logits(trained, tokens)
    assert expected.std() > 0.5
    np.testing.assert_allclose(np.load(trained / "logits.npy"), expected, atol=2e-5)
