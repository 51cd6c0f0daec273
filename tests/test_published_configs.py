"""The published runs: each is a model, a data, a trainer and an optimizer file, given together to Levanter's `--configs`.

Hyperparameters and schedule are those of the authors' scripts, stated here a second time.
"""

import dataclasses
import functools
import math
from pathlib import Path

import draccus
import equinox as eqx
import haliax as hax
import jax
import jax.random as jrandom
import levanter.config
import numpy as np
import pytest
import yaml
from levanter.eval_harness import EvalHarnessMainConfig, LmEvalHarnessConfig
from levanter.main.train_lm import TrainLmConfig
from levanter.trainer_state import init_optimizer_for_trainables, trainables_only

from levanter_mars.data.component import check_vocabularies  # and with it `type: bin`, as Levanter's command does before it decodes

CONFIG = Path(__file__).parents[1] / "config"

# Peak and minimum of the learning rate of matrices, peak of that of vectors if it has one of its own.
MARS_M, SMALL_MARS = (6e-3, 3e-5, None), (6e-3, 3e-5, 3e-3)
RATES = {
    "gpt2_small": {
        "adam": (6e-4, 3e-5, None),
        "muon": (2e-2, 3e-5, 3e-3),
        "moonlight": MARS_M,
        "mars-adamw": SMALL_MARS,
        "mars-adamw-exact": SMALL_MARS,
        "mars-m": MARS_M,
        "mars-lion": (6e-4, 3e-5, 3e-4),
        "mars-shampoo": (2e-2, 3e-5, 3e-3),
    },
    "gpt2_medium": {
        "adam": (3e-4, 6e-5, None),
        "muon": (1e-2, 6e-5, 1.5e-3),
        "moonlight": (5e-3, 6e-5, None),
        "mars-adamw": (3e-3, 6e-5, 1.5e-3),
        "mars-m": (5e-3, 6e-5, None),
    },
    "gpt2_large": {
        "adam": (2e-4, 1e-5, None),
        "muon": (6.67e-3, 1e-5, 1e-3),
        "moonlight": (5e-3, 1e-5, None),
        "mars-adamw": (2e-3, 1e-5, 1e-3),
        "mars-m": (5e-3, 1e-5, None),
    },
    "gpt2_xl": {
        "adam": (2e-4, 1e-5, None),
        "muon": (6.67e-3, 1e-5, 1e-3),
        "moonlight": (3e-3, 1e-5, None),
        "mars-adamw": (2e-3, 1e-5, 1e-3),
        "mars-m": (3e-3, 1e-5, None),
    },
    "llama_124m": {"mars-adamw": (3e-3, 3e-5, 1e-3)},
    "llama_720m": {"mars-adamw": (3e-3, 3e-5, 1e-3)},
}
# Parameters with a vocabulary of 50,304, in millions, and the files of each model's data and trainer.
MODELS = {
    "gpt2_small": (124, ("openwebtext", "openwebtext_bin", "fineweb_edu", "fineweb_edu_bin", "text"), "gpt2"),
    "gpt2_medium": (355, ("openwebtext", "openwebtext_bin"), "gpt2"),
    "gpt2_large": (774, ("openwebtext", "openwebtext_bin"), "gpt2"),
    "gpt2_xl": (1557, ("fineweb_edu", "fineweb_edu_bin"), "gpt2"),
    "llama_124m": (124, ("fineweb",), "llama_124m"),
    "llama_720m": (720, ("fineweb",), "llama_720m"),
}
RUNS = [(model, data, optimizer) for model, (_, datas, _) in MODELS.items() for data in datas for optimizer in RATES[model]]
OPTIMIZERS = [(model, optimizer) for model, optimizers in RATES.items() for optimizer in optimizers]


def files(model: str, data: str, optimizer: str) -> list[Path]:
    trainer = MODELS[model][2]
    return [CONFIG / f"{name}.yaml" for name in (f"model/{model}", f"data/{data}", f"trainer/{trainer}", f"optimizer/{model}/{optimizer}")]


@functools.cache
def parse(*paths: Path) -> TrainLmConfig:
    """What Levanter's command makes of the files; it joins their texts to one."""
    return draccus.decode(TrainLmConfig, yaml.safe_load("".join(path.read_text() for path in paths)))


@functools.cache
def trainable_shapes(model: str):
    config = parse(CONFIG / f"model/{model}.yaml").model
    return trainables_only(eqx.filter_eval_shape(config.build, hax.Axis("vocab", 50_304), key=jrandom.PRNGKey(0)), True)


def test_every_file_is_part_of_a_run_and_says_one_thing():
    used = {path for run in RUNS for path in files(*run)}
    # config/vision holds whole configs, of another main; tests/vision parses them.
    parts = {path for path in CONFIG.glob("*/**/*.yaml") if path.parent != CONFIG / "vision"}
    assert used | {CONFIG / "eval" / "published.yaml"} == parts
    for path in used:
        assert list(yaml.safe_load(path.read_text())) == [path.relative_to(CONFIG).parts[0]]


@pytest.mark.parametrize("model, data, optimizer", RUNS)
def test_runs_of_a_model_on_a_data_set_differ_in_the_optimizer_alone(model, data, optimizer):
    run, twin = parse(*files(model, data, optimizer)), parse(*files(model, data, "mars-adamw"))
    assert dataclasses.replace(run, optimizer=twin.optimizer) == twin
    assert (run.optimizer == twin.optimizer) == (optimizer == "mars-adamw")


@pytest.mark.parametrize("model", MODELS)
def test_levanters_command_takes_the_files(model):
    def main(config: TrainLmConfig) -> TrainLmConfig:
        return config

    run = files(model, MODELS[model][1][-1], "mars-adamw")
    assert levanter.config.main(main, args=["--configs", *map(str, run)])() == parse(*run)


@pytest.mark.parametrize("model", MODELS)
def test_parameter_counts(model):
    parameters = sum(x.size for x in jax.tree.leaves(trainable_shapes(model)))
    assert round(parameters / 1e6) == MODELS[model][0]
    config = parse(CONFIG / f"model/{model}.yaml").model
    d, layers = config.hidden_dim, config.num_layers
    if model.startswith("gpt2"):  # tied token table, positions, 12 d² a layer, norms without biases
        assert parameters == (50_304 + 1024) * d + layers * (12 * d * d + 2 * d) + d
    else:  # tied token table, 4 d² of attention and 3 d·i of the gated MLP a layer, norms
        assert parameters == 50_304 * d + layers * (4 * d * d + 3 * d * config.intermediate_dim + 2 * d) + d


@pytest.mark.parametrize("model, optimizer", OPTIMIZERS)
def test_optimizers_build_their_state_from_shapes(model, optimizer):
    config = parse(*files(model, MODELS[model][1][0], optimizer))
    built = config.optimizer.build(config.trainer.num_train_steps)
    state = eqx.filter_eval_shape(init_optimizer_for_trainables, built, trainable_shapes(model))
    parameters = sum(x.size for x in jax.tree.leaves(trainable_shapes(model)))
    size = sum(x.size for x in jax.tree.leaves(state))
    # Two moments and the last gradient, a momentum and the last gradient, or, lean, one buffer; vectors (and mars-m's tables) have two.
    least, most = {"mars-adamw": (2.99, 3.01), "mars-adamw-exact": (2.99, 4.01), "muon": (0.99, 1.01), "moonlight": (1, 1.4)}.get(
        optimizer, (1.99, 2.01)
    )
    assert least < size / parameters < most


@pytest.mark.parametrize("model, optimizer", OPTIMIZERS)
def test_learning_rates_follow_the_published_schedule(model, optimizer):
    config = parse(*files(model, MODELS[model][1][0], optimizer))
    peak, least, peak_1d = RATES[model][optimizer]
    total = config.trainer.num_train_steps

    def published(step: int) -> float:
        if step < 2000:
            return peak * step / 2000
        return least + 0.5 * (1 + math.cos(math.pi * min(1, (step - 2000) / (total - 2000)))) * (peak - least)

    steps = [0, 1_999, 2_000, total // 2, total]
    schedule = config.optimizer.lr_scheduler(total)
    np.testing.assert_allclose([schedule(step) for step in steps], list(map(published, steps)), rtol=2e-5, atol=1e-12)
    assert getattr(config.optimizer, "learning_rate_1d", None) == peak_1d


def test_hyperparameters_are_the_published_ones():
    for model, data, optimizer in RUNS:
        config = parse(*files(model, data, optimizer))
        it, trainer = config.optimizer, config.trainer
        if model.startswith("gpt2"):
            assert (trainer.num_train_steps, trainer.train_batch_size, config.model.max_seq_len) == (100_000, 480, 1024)
            assert (config.model.use_bias, config.model.scale_attn_by_inverse_layer_idx, config.model.embed_pdrop) == (False, True, 0.0)
            assert it.max_grad_norm == 1.0
            decay = {"adam": 0.1, "moonlight": 0.1, "muon": 0.0}.get(optimizer, 0.01)
        else:
            tokens = trainer.num_train_steps * trainer.train_batch_size * config.model.max_seq_len
            assert round(tokens / 1e9, 1) == {"llama_124m": 16.8, "llama_720m": 48.8}[model]
            assert it.max_grad_norm == {"llama_124m": 0.5, "llama_720m": 0.1}[model]
            assert (it.beta1_1d, it.beta2_1d) == (0.8, 0.999)
            decay = 0.1
        assert it.weight_decay == decay
        where = config.data.components["openwebtext" if "openweb" in data else "fineweb-edu"] if data.endswith("_bin") else config.data
        assert not where.block_cross_document_attention
        if optimizer == "adam":
            assert (it.beta1, it.beta2) == (0.9, 0.95)
        else:
            assert it.beta1 == 0.95 and getattr(it, "beta2", 0.99) == 0.99
            # γ = 1 − β₁ without the clip is Nesterov's momentum: tests/test_baselines.py
            assert (it.gamma, it.correction_clip) == ((0.05, None) if optimizer in ("muon", "moonlight") else (0.025, "tensor"))
            assert getattr(it, "exact", False) == (optimizer == "mars-adamw-exact")


def test_the_evaluation_file_is_one_of_both_commands():
    """Of train_lm beside the files of a run, of eval_harness beside its model and trainer."""
    tasks = ["arc_easy", "arc_challenge", "boolq", "hellaswag", "openbookqa", "piqa", "winogrande", "mmlu", "sciq"]
    evaluation = CONFIG / "eval" / "published.yaml"
    run = files("gpt2_xl", "fineweb_edu", "mars-adamw")
    training = parse(*run, evaluation)
    assert isinstance(training.eval_harness, LmEvalHarnessConfig) and training.eval_harness.to_task_spec() == tasks
    assert dataclasses.replace(training, eval_harness=None) == parse(*run)
    document = yaml.safe_load("".join(path.read_text() for path in (run[0], run[2], evaluation)))
    finished = draccus.decode(EvalHarnessMainConfig, document | {"tokenizer": "gpt2", "checkpoint_path": "checkpoints/run"})
    assert (finished.eval_harness, finished.model, finished.trainer) == (training.eval_harness, training.model, training.trainer)


def test_token_files_have_the_published_vocabulary():
    for model, data, optimizer in RUNS:
        config = parse(*files(model, data, optimizer)).data
        if data.endswith("_bin"):
            (component,) = config.components.values()
            assert (len(config.the_tokenizer), component.vocab_size) == (50_304, 50_257)
            check_vocabularies(config)
        else:
            assert config.tokenizer == "gpt2"


@pytest.mark.parametrize("single, model, data", [("mars_gpt2", "gpt2_small", "openwebtext"), ("mars_gpt2_xl", "gpt2_xl", "fineweb_edu")])
def test_single_files_are_the_composed_runs(single, model, data):
    """But for the labels of the tracker and, of XL, the batch and the mesh, which its file explains."""
    one, composed = parse(CONFIG / f"{single}.yaml"), parse(*files(model, data, "mars-adamw"))
    trainer = dataclasses.replace(composed.trainer, tracker=one.trainer.tracker)
    if model == "gpt2_xl":
        trainer = dataclasses.replace(trainer, train_batch_size=one.trainer.train_batch_size, mesh=one.trainer.mesh)
    assert dataclasses.replace(composed, trainer=trainer) == one
