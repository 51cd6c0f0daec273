"""`optimizer: {type: mars-adamw, ...}`: that every field counts, that bad values are named at once, and which rates are set when."""

import dataclasses
import functools
import importlib
import inspect
import math

import draccus
import haliax as hax
import haliax.nn as hnn
import jax
import jax.numpy as jnp
import jax.random as jrandom
import numpy as np
import optax
import pytest
import stock
from draccus.utils import DecodingError, ParsingError
from levanter.optim.config import AdamConfig, OptimizerConfig
from levanter.optim.mars import MarsConfig as LevantersMarsConfig
from levanter.trainer_state import trainables_only
from models import LLAMA, gaussian_like, shapes

import levanter_mars.configs
from levanter_mars import MarsAdamWConfig, MarsLionConfig, MarsMConfig, MarsShampooConfig, mars_adamw, mars_lion, mars_m, mars_shampoo
from levanter_mars.configs import MarsOptimizerConfig, Rule
from levanter_mars.parameters import describe

STEPS = 12


LLAMA_PARAMS = trainables_only(shapes(LLAMA), True)

CONFIGS = {"mars-adamw": MarsAdamWConfig, "mars-lion": MarsLionConfig, "mars-shampoo": MarsShampooConfig, "mars-m": MarsMConfig}
FUNCTIONS = {"mars-adamw": mars_adamw, "mars-lion": mars_lion, "mars-shampoo": mars_shampoo, "mars-m": mars_m}


def decode(type: str = "mars-adamw", **fields) -> OptimizerConfig:
    return draccus.decode(OptimizerConfig, {"type": type, **fields})


def test_registered_beside_levanters_own():
    assert {name: type(decode(name)) for name in CONFIGS} == CONFIGS
    assert draccus.decode(OptimizerConfig, {"type": "mars"}) == LevantersMarsConfig()
    assert draccus.decode(OptimizerConfig, {"type": "adam"}) == AdamConfig()
    assert OptimizerConfig.default_choice_name() == "adam"


def test_importing_by_either_route_is_harmless():
    plugin = importlib.import_module("levanter.optim.levanter_mars")
    importlib.reload(plugin)
    OptimizerConfig.register_subclass("mars-adamw", levanter_mars.configs.MarsAdamWConfig)
    assert OptimizerConfig.get_choice_class("mars-adamw") is MarsAdamWConfig


def test_a_name_that_is_taken_is_an_error():
    with pytest.raises(ValueError, match="Cannot register .*AdamConfig.* as mars-adamw because .*MarsAdamWConfig.* is already registered"):
        OptimizerConfig.register_subclass("mars-adamw", AdamConfig)


def test_parsed_config_survives_its_own_encoding():
    config = decode(learning_rate=1e-3, correction_clip=None, max_grad_norm=None, learning_rate_1d=5e-4)
    assert draccus.decode(OptimizerConfig, draccus.encode(config, OptimizerConfig)) == config


@pytest.mark.parametrize("name", CONFIGS)
def test_the_functions_defaults_are_the_configs(name):
    parameters = inspect.signature(FUNCTIONS[name]).parameters
    defaults = {name: p.default for name, p in parameters.items() if p.default is not inspect.Parameter.empty}
    fields = {f.name: f.default for f in dataclasses.fields(CONFIGS[name])}
    differing = {name: (value, fields[name]) for name, value in defaults.items() if name in fields and fields[name] != value}
    assert differing == {"max_grad_norm": (None, 1.0)}
    assert set(defaults) - set(fields) == {"weight_decay_mask", "axis_roles"}
    # Every field is the function's, or one of the schedule, the decay mask and Levanter's skip_bad_steps.
    assert set(fields) - set(parameters) == {f.name for f in dataclasses.fields(OptimizerConfig)} - set(parameters) | {"skip_bad_steps"}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_bad_value_is_named_with_its_type(name):
    with pytest.raises(ParsingError, match=f"^{name}: gamma is -1.0; it must be a finite number of at least 0$"):
        decode(name, gamma=-1)


GAMMAS = [
    (0.1, [0.1] * 5),
    ({"type": "constant", "value": 0.2}, [0.2] * 5),
    ({"type": "linear", "init_value": 0.4, "end_value": 0.0, "transition_steps": 2, "transition_begin": 1}, [0.4, 0.4, 0.2, 0, 0]),
    ({"type": "cosine", "init_value": 0.4, "decay_steps": 4, "alpha": 0.5}, [0.4, 0.3707107, 0.3, 0.2292893, 0.2]),
    ([[0, 0.1], [2, 0.3], [3, 0.0]], [0.1, 0.1, 0.3, 0.0, 0.0]),
]


@pytest.mark.parametrize(("gamma", "values"), GAMMAS)
@pytest.mark.parametrize("name", CONFIGS)
def test_schedules_of_gamma(name, gamma, values):
    config = decode(name, gamma=gamma)
    assert draccus.decode(OptimizerConfig, draccus.encode(config, OptimizerConfig)) == config
    optimizer, params = config.build(10), {"w": jnp.ones((2, 3))}
    state, update, found = optimizer.init(params), jax.jit(optimizer.update), []
    for _ in values:
        _, state = update(params, state, params)
        found.append(state.hyperparams["mars/gamma"])
    np.testing.assert_allclose(found, values, atol=1e-6)


BAD_GAMMAS = [
    ([], r"gamma is \[\]; as a list it must hold \[step, value\] with steps that start at 0 and increase"),
    ([[1, 0.1]], r"gamma is \[\(1, 0.1\)\]; as a list it must hold .*"),
    ([[0, 0.1], [0, 0.2]], "gamma is .*; as a list it must hold .*"),
    ([[0, 0.1], [5, -0.2]], "gamma at step 5 is -0.2; it must be a finite number of at least 0"),
    ({"type": "linear", "init_value": -0.4, "end_value": 0, "transition_steps": 2}, "gamma.init_value is -0.4; it must be a finite .*"),
    ({"type": "cosine", "init_value": 0.4, "decay_steps": 0}, "gamma.decay_steps is 0; it must be a whole number above 0"),
]


@pytest.mark.parametrize(("gamma", "sentence"), BAD_GAMMAS)
def test_a_bad_schedule_of_gamma_is_named_in_one_sentence(gamma, sentence):
    with pytest.raises(ParsingError, match=f"^mars-adamw: {sentence}$"):
        decode(gamma=gamma)


BAD_FOR_SOME = [
    ("mars-m", {"newton_schulz_steps": 0}, "newton_schulz_steps is 0; it must be a whole number above 0"),
    ("mars-m", {"newton_schulz_dtype": "float16"}, 'newton_schulz_dtype is \'float16\'; it must be "bfloat16" or "float32"'),
    (
        "mars-shampoo",
        {"newton_schulz_coefficients": "cubic"},
        "newton_schulz_coefficients is 'cubic'; it must be one of aol, jordan, polar_express, quintic, simple",
    ),
    ("mars-m", {"newton_schulz_layout": "spread"}, 'newton_schulz_layout is \'spread\'; it must be "auto" or "replicated"'),
    ("mars-shampoo", {"embeddings": "none"}, 'embeddings is \'none\'; it must be "matrix" or "adamw"'),
    ("mars-lion", {"momentum_dtype": "float8"}, 'momentum_dtype is \'float8\'; it must be "bfloat16", "float32", or null .*'),
    (
        "mars-lion",
        {"last_gradient_dtype": "bfloat16", "correction_clip": None},
        "last_gradient_dtype is 'bfloat16'; it must be None where no gradient is stored, as correction_clip is None",
    ),
    (
        "mars-adamw",
        {"last_gradient_dtype": "bfloat16", "exact": True},
        "last_gradient_dtype is 'bfloat16'; it must be None where no gradient is stored, as exact is true",
    ),
    ("mars-lion", {"diagnostics_every": -1}, "diagnostics_every is -1; it must be a whole number of at least 0"),
    (
        "mars-adamw",
        {"cycles": 2, "cycle_length": 10},
        "cycle_length and cycles are set; at most one of cycle_length, cycles and haps may be",
    ),
    ("mars-adamw", {"skip_bad_steps": {"rolling_interval_length": 0}}, "skip_bad_steps is SkipStepConfig.*; it must be true, false, .*"),
    ("mars-adamw", {"skip_bad_steps": {"sigma_factor": -1}}, "skip_bad_steps is SkipStepConfig.*; it must be true, false, .*"),
    ("mars-adamw", {"skip_bad_steps": 1}, "skip_bad_steps is 1; it must be true, false, the number of steps to look back on .*"),
    ("mars-adamw", {"learning_rate_1d": None}, "learning_rate_1d is None; it must be a finite number of at least 0"),
    ("mars-m", {"learning_rate_1d": -1.0}, "learning_rate_1d is -1.0; it must be a finite number of at least 0"),
]


@pytest.mark.parametrize(("name", "fields", "sentence"), BAD_FOR_SOME)
def test_a_bad_value_that_only_some_have_is_named_in_one_sentence(name, fields, sentence):
    with pytest.raises(ParsingError, match=f"^{name}: {sentence}$"):
        decode(name, **fields)


def test_a_schedule_whose_fields_make_it_no_rate_is_named_when_it_is_built():
    config = decode(lr_schedule={"type": "inv_sqrt", "timescale": -1})
    with pytest.raises(
        ValueError, match="^the learning rate at step .* is nan; lr_schedule and its fields must keep it finite and at least 0$"
    ):
        config.build(100)
    decode(lr_schedule={"type": "inv_sqrt", "timescale": 100}).build(100)


def test_mars_m_decays_everything_as_published_unless_told_otherwise():
    def decays(config):
        return {rule.weight_decay for rule in jax.tree.leaves(config.rules(LLAMA_PARAMS), is_leaf=lambda x: isinstance(x, Rule))}

    assert decays(decode("mars-m", weight_decay=0.3)) == {0.3}
    assert decays(decode("mars-m", weight_decay=0.3, default_weight_decay_mask=True, weight_decay_1d=0.2)) == {0.3, 0.2, 0.0}
    assert decays(decode("mars-m", weight_decay=0.3, weight_decay_modules=["mlp"])) == {0.3, 0.0}


def test_who_follows_which_rule():
    def rules(config):
        found = jax.tree.leaves(config.rules(LLAMA_PARAMS), is_leaf=lambda x: isinstance(x, Rule))
        described = jax.tree.leaves(describe(LLAMA_PARAMS))
        return {(p.path.split(".")[-2], rule.name, rule.learning_rate_factor) for p, rule in zip(described, found, strict=True)}

    hidden = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    norms = ["input_layernorm", "post_attention_layernorm", "norm"]
    outer = ["token_embeddings", "lm_head"]

    def table(matrices, of_outer, factor, factor_1d=1.0):
        return {
            *((name, matrices, 1.0) for name in hidden),
            *((name, of_outer, factor) for name in outer),
            *((name, "adamw", factor_1d) for name in norms),
        }

    assert rules(decode("mars-m")) == table("mars-m", "adamw", 1.0)
    assert rules(decode("mars-m", embeddings="matrix")) == table("mars-m", "mars-m", 1.0)
    assert rules(decode("mars-m", learning_rate=0.1, learning_rate_1d=0.05)) == table("mars-m", "adamw", 0.5, 0.5)
    assert rules(decode("mars-shampoo", learning_rate=0.1, learning_rate_1d=0.05)) == table("mars-shampoo", "mars-shampoo", 1.0, 0.5)
    assert rules(decode("mars-shampoo", learning_rate=0.1, learning_rate_1d=0.05, embeddings="adamw")) == table(
        "mars-shampoo", "adamw", 0.5, 0.5
    )
    assert rules(decode("mars-lion", learning_rate=0.1, learning_rate_1d=0.05)) == table("mars-lion", "mars-lion", 1.0, 0.5)
    everything = rules(decode("mars-shampoo", learning_rate=0.1, learning_rate_1d=0.05, optimize_1d=True))
    assert {(name, rule) for name, rule, _ in everything if name in norms} == {(name, "mars-adamw") for name in norms}


DECAY_RATE = "at least 0 and below 1"
NOT_NEGATIVE = "a finite number of at least 0"
POSITIVE = "a finite number above 0"
STEPS_OR_FRACTION = "a fraction between 0 and 1 or a whole number of steps"
SCHEDULES = "one of constant, cosine, inv, inv_sqrt, inv_sqrt_decay, linear, polynomial, or one with fields"
CYCLES = "a number of cycles, an increasing list of the steps at which they end, or null"
BETAS = ["beta1", "beta2", "beta1_1d", "beta2_1d"]

# What both the function and the config refuse: (field, value, what is allowed).
BAD_VALUES = [
    *[(beta, value, DECAY_RATE) for beta in BETAS for value in (1.0, 1.5, -0.1, math.nan)],
    ("gamma", -0.025, NOT_NEGATIVE),
    ("gamma", math.inf, NOT_NEGATIVE),
    ("epsilon", 0.0, POSITIVE),
    ("epsilon", -1e-8, POSITIVE),
    ("correction_clip", "layer", '"tensor", "global", or null for off'),
    ("correction_clip_norm", 0.0, POSITIVE),
    ("learning_rate", -0.001, {"function": NOT_NEGATIVE, "config": POSITIVE}),
    ("learning_rate", math.nan, {"function": NOT_NEGATIVE, "config": POSITIVE}),
    ("learning_rate_1d", -0.001, NOT_NEGATIVE),
    ("weight_decay", -0.1, NOT_NEGATIVE),
    ("weight_decay_1d", -0.1, NOT_NEGATIVE),
    ("max_grad_norm", 0.0, "a finite number above 0, or null for off"),
    ("max_grad_norm", -1.0, "a finite number above 0, or null for off"),
]
# What only the config has.
BAD_FIELDS = [
    ("learning_rate", 0.0, POSITIVE),  # the other rate is set by its ratio to this one
    ("warmup", 1.5, STEPS_OR_FRACTION),
    ("warmup", -0.1, STEPS_OR_FRACTION),
    ("rewarmup", 2.5, STEPS_OR_FRACTION),
    ("decay", 1.5, f"{STEPS_OR_FRACTION}, or null for all steps after warm-up"),
    ("min_lr_ratio", -0.1, NOT_NEGATIVE),
    ("lr_schedule", "cosin", SCHEDULES),
    ("cooldown", -1.0, f"{STEPS_OR_FRACTION}, or null for none"),
    ("cycle_length", -3, "a fraction of all steps, a number or a list of numbers of steps, or null"),
    ("lr_schedule", "power", SCHEDULES),  # Levanter's power needs fields
    ("cycles", 0, CYCLES),
    ("cycles", [20, 10], CYCLES),
    ("cycles", [10, 10], CYCLES),
    ("haps", [], "an increasing list of the steps at which cycles end, or null"),
]


@pytest.mark.parametrize(("field", "value", "allowed"), BAD_VALUES + BAD_FIELDS)
def test_a_bad_value_in_a_config_is_named_in_one_sentence(field, value, allowed):
    allowed = allowed["config"] if isinstance(allowed, dict) else allowed
    with pytest.raises(ParsingError) as error:
        decode(**{field: value})
    assert str(error.value) == f"mars-adamw: {field} is {value!r}; it must be {allowed}"


@pytest.mark.parametrize(("name", "value", "allowed"), BAD_VALUES)
def test_a_bad_argument_of_the_function_is_named_in_one_sentence(name, value, allowed):
    allowed = allowed["function"] if isinstance(allowed, dict) else allowed
    with pytest.raises(ValueError) as error:
        mars_adamw(**{"learning_rate": 1e-3, name: value})
    assert str(error.value) == f"{name} is {value!r}; it must be {allowed}"


def test_a_bad_positional_argument_is_named_too():
    with pytest.raises(ValueError, match="^beta1 is 1; it must be at least 0 and below 1$"):
        mars_adamw(1e-3, 0.01, 1)


def test_a_misspelt_field_is_named():
    with pytest.raises(DecodingError, match="`weight_decy` are not valid for MarsAdamWConfig"):
        decode(weight_decy=0.1)
    with pytest.raises(TypeError, match="weight_decy"):
        mars_adamw(1e-3, weight_decy=0.1)


def test_values_at_the_edge_of_their_ranges_pass():
    decode(beta1=0, beta2=0.0, gamma=0, weight_decay=0, learning_rate_1d=0, warmup=1, decay=0, min_lr_ratio=0, max_grad_norm=None)
    decode(correction_clip=None, warmup=2000, decay=None, rewarmup=0.5, lr_schedule={"type": "cosine", "exponent": 2.0})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("optimizer", "sentence"),
    [
        ({"beta1": 1.0}, f"mars-adamw: beta1 is 1.0; it must be {DECAY_RATE}"),
        ({"correction_clip": "layer"}, 'mars-adamw: correction_clip is \'layer\'; it must be "tensor", "global", or null for off'),
        ({"gama": 0.1}, "The fields `gama` are not valid for MarsAdamWConfig"),
    ],
    ids=["beta1", "correction_clip", "misspelt"],
)
def test_the_stock_command_stops_before_data_and_devices(tmp_path, optimizer, sentence):
    # The corpus and the tokenizer that the config names do not exist: it never comes to them.
    process = stock.start(tmp_path, stock.config({"type": "mars-adamw", **optimizer}))
    assert stock.finish(process) != [0]
    last = (tmp_path / "run.err").read_text().strip().splitlines()[-1]
    assert last.split(": ", 1)[1].endswith(sentence), last
    assert {path.name for path in tmp_path.iterdir()} == {"run.yaml", "run.out", "run.err"}


Vocab, Embed, Mlp = hax.make_axes(vocab=7, embed=4, mlp=6)
MODEL = {
    "embedding": hnn.Embedding(hax.zeros((Vocab, Embed)), Vocab, Embed),
    "linear": dataclasses.replace(hnn.Linear.init(Embed, Mlp, key=jrandom.PRNGKey(0)), dot_general=None),
    "norm": hnn.LayerNorm.init(Embed),
}


SCALES = [0.01, 3, 1, 0.3, 0.1, 0.03, 0.01, 1, 0.3, 0.1, 0.03, 0.01]
BASE = {"learning_rate": 0.1, "learning_rate_1d": 0.05, "warmup": 2, "weight_decay": 0.1}


def trained(config: MarsOptimizerConfig):
    """The updates and the hyperparameters of twelve steps, on gradients that grow and shrink."""
    optimizer = config.build(STEPS)
    params = gaussian_like(MODEL, seed=0)
    by_step = [gaussian_like(MODEL, seed=1 + t, scale=scale) for t, scale in enumerate(SCALES)]
    gradients = jax.tree.map(lambda *xs: jnp.stack(xs), *by_step)

    @jax.jit
    def run(params, gradients):
        def step(carry, gradient):
            params, state = carry

            def obj_fn(params):
                return sum(jnp.sum(g * x) for g, x in zip(jax.tree.leaves(gradient), jax.tree.leaves(params), strict=True))

            updates, state = optimizer.update(gradient, state, params, obj_fn=obj_fn, loss=optax.global_norm(gradient))
            return (jax.tree.map(jnp.add, params, updates), state), (updates, state.hyperparams)

        return jax.lax.scan(step, (params, optimizer.init(params)), gradients)[1]

    return run(params, gradients)


@functools.cache
def baseline(name, **context):
    return trained(decode(name, **BASE, **context))[0]


# For every field a value that must change what is done, and what else must be set for it to count.
CHANGES = {
    "learning_rate": (0.2, {}),
    "weight_decay": (0.2, {}),
    "min_lr_ratio": (0.5, {}),
    "warmup": (3, {}),
    "decay": (0.5, {}),
    "rewarmup": (2, {"cycles": 2}),
    "cooldown": (0.25, {}),
    "cycle_length": (6, {}),
    "cycles": (3, {}),
    "lr_schedule": ("linear", {}),
    "haps": ([6], {}),
    "weight_decay_modules": (["norm"], {}),
    "default_weight_decay_mask": (False, {}),
    "beta1": (0.9, {}),
    "beta2": (0.95, {}),
    "epsilon": (1e-3, {}),
    "gamma": (0.05, {}),
    "amsgrad": (True, {}),
    "optimize_1d": (True, {}),
    "learning_rate_1d": (0.1, {}),
    "beta1_1d": (0.8, {}),
    "beta2_1d": (0.9, {}),
    "weight_decay_1d": (0.2, {}),
    "max_grad_norm": (None, {}),
    "correction_clip": ("global", {}),
    "correction_clip_norm": (0.1, {}),
    "exact": (True, {}),
    "momentum_dtype": ("bfloat16", {}),
    "last_gradient_dtype": ("bfloat16", {"gamma": 1.0}),
    "cautious": (True, {}),
    "skip_bad_steps": ({"rolling_interval_length": 2, "sigma_factor": 0.1}, {}),
    "newton_schulz_steps": (2, {}),
    "newton_schulz_dtype": ("float32", {}),
    "newton_schulz_coefficients": ("aol", {}),
}
# Where a type differs.
CHANGES_OF = {
    ("mars-shampoo", "beta2"): (0.95, {"optimize_1d": True}),
    ("mars-shampoo", "embeddings"): ("adamw", {}),
    ("mars-m", "embeddings"): ("matrix", {}),
    # With the embeddings by AdamW one matrix is left, and its norm is the norm of all.
    ("mars-m", "correction_clip"): ("global", {"embeddings": "matrix"}),
    ("mars-m", "default_weight_decay_mask"): (True, {}),
    # The sign does not see a clip by the same factor at every step, nor a small change of the momentum.
    ("mars-lion", "momentum_dtype"): ("bfloat16", {"beta1": 0.999}),
    ("mars-lion", "last_gradient_dtype"): (
        "bfloat16",
        {"beta1": 0.9999, "gamma": 1000.0, "correction_clip_norm": 1e9, "max_grad_norm": None},
    ),
}


# The schedule is the same code for every type. What diagnostics_every does is no update: tests/test_diagnostics.py. What
# newton_schulz_layout does shows on several devices: tests/distributed/test_layout.py. The model has no filters for convolutions:
# tests/test_convolutions.py.
OF_THE_SCHEDULE = {"min_lr_ratio", "warmup", "decay", "rewarmup", "cooldown", "cycle_length", "cycles", "haps", "lr_schedule"}
FIELDS = [
    (name, field.name)
    for name, config in CONFIGS.items()
    for field in dataclasses.fields(config)
    if field.name not in ("diagnostics_every", "newton_schulz_layout", "convolutions")
    and (name == "mars-adamw" or field.name not in OF_THE_SCHEDULE)
]


@pytest.mark.filterwarnings("ignore:cooldown is deprecated", "ignore:haps is deprecated")
@pytest.mark.parametrize(("name", "field"), FIELDS)
def test_every_field_changes_what_the_optimizer_does(name, field):
    value, context = CHANGES_OF.get((name, field)) or CHANGES[field]
    before = baseline(name, **context)
    after, _ = trained(decode(name, **{**BASE, **context, field: value}))
    changes = jax.tree.map(lambda a, b: float(jnp.max(jnp.abs(a - b))), before, after)
    assert max(jax.tree.leaves(changes)) > 1e-5


def test_rates_follow_levanters_schedule_each_from_its_own_peak():
    config = decode(**BASE, min_lr_ratio=0.2)
    _, rates = trained(config)
    assert set(rates) == {"learning_rate", "learning_rate_1d"}
    # Two steps of warm-up from 0, then a cosine from 0.1 to a fifth of it over the other ten.
    np.testing.assert_allclose(rates["learning_rate"][jnp.array([0, 1, 2, 7])], [0, 0.05, 0.1, 0.06], rtol=1e-6)
    np.testing.assert_allclose(rates["learning_rate_1d"][jnp.array([0, 1, 2, 7])], [0, 0.025, 0.05, 0.03], rtol=1e-6)


def test_with_optimize_1d_there_is_one_rate():
    _, rates = trained(decode(**BASE, optimize_1d=True))
    assert set(rates) == {"learning_rate"}


def test_default_decay_goes_to_linear_weights_and_weight_decay_1d_to_every_vector():
    decayed, _ = trained(decode(**BASE, weight_decay_1d=0.1))
    linears, _ = trained(decode(**{**BASE, "weight_decay": 0.0}, weight_decay_1d=0.1))
    vectors, _ = trained(decode(**BASE, weight_decay_1d=0.0))

    def changed(a, b):
        parameters = jax.tree.leaves(describe(MODEL))
        pairs = zip(parameters, jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
        return {parameter.path for parameter, x, y in pairs if jnp.max(jnp.abs(x - y)) > 1e-4}

    assert changed(decayed, linears) == {"linear.weight"}
    assert changed(decayed, vectors) == {"linear.bias", "norm.weight", "norm.bias"}
