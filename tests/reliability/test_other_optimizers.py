"""A checkpoint under another optimizer, or another form of the same: what can mean the same is kept, all else is refused."""

import functools

import checkpoints
import equinox as eqx
import forked
import haliax as hax
import jax
import jax.numpy as jnp
import jax.random as jrandom
import numpy as np
import pytest
import stock
from levanter.checkpoint import load_checkpoint, save_checkpoint
from levanter.optim.config import AdamConfig
from levanter.optim.mars import MarsConfig
from levanter.trainer_state import TrainerState
from models import GPT2, gaussian_like

from levanter_mars import MarsAdamWConfig, MarsLionConfig, MarsMConfig, MarsShampooConfig, mars_adamw

CONFIGS = {
    "adam": AdamConfig(),
    "Levanter's mars": MarsConfig(),
    "mars-adamw": MarsAdamWConfig(),
    "exact": MarsAdamWConfig(exact=True),
    "amsgrad": MarsAdamWConfig(amsgrad=True),
    "optimize_1d": MarsAdamWConfig(optimize_1d=True),
    "bfloat16 momentum": MarsAdamWConfig(momentum_dtype="bfloat16"),
    "bfloat16 gradient": MarsAdamWConfig(last_gradient_dtype="bfloat16"),
    "global clip": MarsAdamWConfig(correction_clip="global"),
    "no clip": MarsAdamWConfig(correction_clip=None),
    "other numbers": MarsAdamWConfig(learning_rate=1e-3, beta1=0.9, beta2=0.95, gamma=0.05, weight_decay=0.3, max_grad_norm=None),
    "history of 8": MarsAdamWConfig(skip_bad_steps=8),
    "history of 16": MarsAdamWConfig(skip_bad_steps=16),
    "mars-lion": MarsLionConfig(),
    "lean mars-lion": MarsLionConfig(correction_clip=None),
    "mars-shampoo": MarsShampooConfig(),
    "mars-m": MarsMConfig(),
    "lean mars-m": MarsMConfig(correction_clip=None),
    "exact mars-m": MarsMConfig(exact=True),
}
MISSING = [
    ("adam", "mars-adamw"),
    ("Levanter's mars", "mars-adamw"),
    ("mars-adamw", "adam"),
    *[pair for a, b in [("mars-adamw", "exact"), ("mars-lion", "lean mars-lion"), ("mars-m", "lean mars-m")] for pair in ((a, b), (b, a))],
    *[pair for other in ("amsgrad", "optimize_1d", "mars-lion", "mars-shampoo") for pair in (("mars-adamw", other), (other, "mars-adamw"))],
    ("lean mars-m", "exact mars-m"),
    ("lean mars-lion", "lean mars-m"),
    ("mars-adamw", "history of 8"),
    ("global clip", "mars-adamw"),
]
DIFFERENT = [
    ("mars-adamw", "bfloat16 momentum", "mu"),
    ("bfloat16 momentum", "mars-adamw", "mu"),
    ("mars-adamw", "bfloat16 gradient", "last_gradient"),
    ("bfloat16 gradient", "mars-adamw", "last_gradient"),
    ("history of 8", "history of 16", "losses"),
]
KEPT = [("mars-adamw", other) for other in ("mars-adamw", "global clip", "no clip", "other numbers")] + [("history of 8", "mars-adamw")]


@functools.cache
def shapes(name):
    """Of the trainer's state, as the trainer takes them before it restores a checkpoint."""

    def init(key):
        return TrainerState.init(CONFIGS[name].build(10), GPT2.build(hax.Axis("vocab", 11), key=key), key=key)

    return eqx.filter_eval_shape(init, jrandom.PRNGKey(0))


@pytest.fixture(scope="module")
def mesh():
    return jax.sharding.Mesh(jax.devices()[:1], ("data",))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A function that saves a state of random numbers under a config, once, and says what and where."""

    @functools.cache
    def save(name):
        arrays, rest = eqx.partition(shapes(name), lambda x: isinstance(x, jax.ShapeDtypeStruct))
        state = eqx.combine(gaussian_like(arrays, seed=0, scale=100), rest)
        folder = tmp_path_factory.mktemp("checkpoint")
        save_checkpoint(state, 10, str(folder))
        return state, str(folder)

    return save


def restore(name, checkpoint, mesh):
    return load_checkpoint(shapes(name), checkpoint, axis_mapping={}, mesh=mesh)


def trace_step(state):
    gradient = jax.tree.map(jnp.zeros_like, state.trainable_model)
    eqx.filter_eval_shape(lambda: state.take_step(gradient, loss=jnp.float32(1.0), key=jrandom.PRNGKey(0))[0])


@pytest.mark.parametrize(("before", "after"), MISSING)
def test_another_optimizer_is_refused_while_the_checkpoint_is_read(before, after, saved, mesh):
    _, checkpoint = saved(before)
    with pytest.raises(FileNotFoundError, match=r"Missing \d+ arrays in OCDBT checkpoint .*opt_state"):
        restore(after, checkpoint, mesh)


@pytest.mark.parametrize(("before", "after", "what"), DIFFERENT)
def test_another_dtype_or_shape_is_refused_before_the_first_step(before, after, what, saved, mesh):
    _, checkpoint = saved(before)
    state = restore(after, checkpoint, mesh)
    with pytest.raises(
        ValueError, match=rf"the optimizer's state is not one of this configuration: \S*{what}\S* is \S+\[.*\] and would be"
    ):
        trace_step(state)


@pytest.mark.parametrize(("before", "after"), KEPT)
def test_what_means_the_same_is_kept(before, after, saved, mesh):
    written, checkpoint = saved(before)
    state = restore(after, checkpoint, mesh)
    trace_step(state)

    def by_path(tree):
        return {jax.tree_util.keystr(path): np.asarray(x, np.float32) for path, x in jax.tree_util.tree_leaves_with_path(tree)}

    kept, originals = by_path((state.model, state.opt_state)), by_path((written.model, written.opt_state))
    assert sum("last_gradient" in path for path in kept) == 6  # two embeddings, and two matrices each of attention and the MLP
    for path, x in kept.items():
        np.testing.assert_array_equal(x, originals[path], err_msg=path)


def test_states_of_the_optax_functions_are_compared_too():
    params = {"w": jnp.ones((4, 2)), "b": jnp.ones(2)}
    state = mars_adamw(1e-3, momentum_dtype="bfloat16").init(params)
    with pytest.raises(ValueError, match=r"mu/b is bfloat16\[2\] and would be float32\[2\] \(2 of \d+ arrays differ\)"):
        mars_adamw(1e-3).update(params, state, params)
    with pytest.raises(ValueError, match=r"last_params/b is absent and would be float32\[2\] .*differ"):
        mars_adamw(1e-3, exact=True).update(params, mars_adamw(1e-3).init(params), params, obj_fn=lambda p: 0.0)


def config(run, optimizer, **train_lm):
    config = stock.config({"learning_rate": 3e-3, "warmup": 2, **optimizer})
    config["trainer"] |= {"num_train_steps": 4, "id": run}
    return config | train_lm


@pytest.mark.slow
def test_through_stock_train_lm(tmp_path):
    """A refusal ends the command and leaves the run as it was; the weights can be taken along, and are all that is."""
    stock.write_workspace(tmp_path)
    runs = tmp_path / "checkpoints"
    forked.run(tmp_path, config("run", {"type": "adam"}), "adam")
    before = checkpoints.arrays(runs / "run" / "step-3")

    longer = config("run", {"type": "mars-adamw"})
    longer["trainer"]["num_train_steps"] = 8
    assert forked.finish(forked.start(tmp_path, longer, "refused")) == 1
    assert "FileNotFoundError: Missing" in (tmp_path / "refused.err").read_text()
    assert checkpoints.complete(runs / "run") == [3] and checkpoints.arrays(runs / "run" / "step-3") == before

    # At such a rate the weights stay what was read.
    at_rest = {"type": "mars-adamw", "learning_rate": 1e-30, "learning_rate_1d": 1e-30}
    from_weights = config("weights", at_rest, initialize_model_from_checkpoint_path="checkpoints/run/step-3")
    forked.run(tmp_path, from_weights, "weights")
    assert len(stock.losses(tmp_path, "weights")) == 4
    after = checkpoints.arrays(runs / "weights" / "step-3")
    weights = {path: x for path, x in before.items() if path.startswith("model/")}
    assert weights and {path: after[path] for path in weights} == weights

    longer = config("weights", at_rest | {"momentum_dtype": "bfloat16"})
    longer["trainer"]["num_train_steps"] = 8
    assert forked.finish(forked.start(tmp_path, longer, "other_dtype")) == 1
    assert "ValueError: the optimizer's state is not one of this configuration: " in (tmp_path / "other_dtype.err").read_text()
    assert checkpoints.complete(runs / "weights") == [3]
