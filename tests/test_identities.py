"""What must hold of MARS-AdamW whatever the model: it is AdamW where it should be, per tensor, and blind to how tensors are stored."""

import functools

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import jax.random as jrandom
import numpy as np
import optax
import pytest
from haliax.nn.scan import BlockSeq
from haliax.quantization import partition_for_grad_overwrite
from levanter.adaptor.lora import LoraConfig, lora_trainable_params_filter, loraize
from levanter.trainer_state import init_optimizer_for_trainables, take_train_step, trainables_only
from models import GPT2, LLAMA, MIXTRAL, gaussian_like, shapes, weights_like

from levanter_mars import (
    MarsAdamWConfig,
    MarsLionConfig,
    MarsMConfig,
    MarsShampooConfig,
    mars_adamw,
    mars_lion,
    mars_m,
    mars_shampoo,
    matrix,
    vector,
)
from levanter_mars.parameters import describe

MATRICES = {"a": jnp.zeros((4, 6)), "b": jnp.zeros((5, 3))}
TREE = {**MATRICES, "filter": jnp.zeros((3, 3, 2, 2)), "number": jnp.zeros(()), "vector": jnp.zeros(5)}
FLOAT32 = {"newton_schulz_dtype": "float32"}
FAMILY = {
    "mars-adamw": mars_adamw,
    "mars-lion": mars_lion,
    "mars-lion lean": functools.partial(mars_lion, correction_clip=None),
    "mars-shampoo": functools.partial(mars_shampoo, **FLOAT32),
    "mars-shampoo adamw embeddings": functools.partial(mars_shampoo, **FLOAT32, embeddings="adamw"),
    "mars-m": functools.partial(mars_m, **FLOAT32),
    "mars-m lean": functools.partial(mars_m, **FLOAT32, correction_clip=None),
}
CONFIGS = [MarsAdamWConfig, MarsLionConfig, MarsShampooConfig, MarsMConfig]
# Adam's direction does not see a clip by the same factor at every step, so the gradient's size changes from step to step.
SCALES = [1.0, 0.05, 3.0, 0.2, 0.5]


def gradients_of(params, scales=SCALES):
    return [gaussian_like(params, seed=10 + t, scale=scale) for t, scale in enumerate(scales)]


def updates_of(optimizer, params, gradients):
    """The updates of every step, each applied before the next."""

    @jax.jit
    def step(params, state, gradient):
        updates, state = optimizer.update(gradient, state, params)
        return updates, optax.apply_updates(params, updates), state

    state, found = optimizer.init(params), []
    for gradient in gradients:
        updates, params, state = step(params, state, gradient)
        found.append(updates)
    return found


def assert_close(a, b, rtol=1e-5, atol=1e-6):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=rtol, atol=atol), a, b)


@pytest.mark.parametrize("optimize_1d", [False, True])
def test_without_correction_and_clip_it_is_adamw(optimize_1d):
    params = gaussian_like(TREE if optimize_1d else MATRICES, seed=0)
    mars = mars_adamw(0.1, 0.02, 0.9, 0.98, 1e-6, gamma=0, optimize_1d=optimize_1d, correction_clip=None)
    adamw = optax.adamw(0.1, 0.9, 0.98, 1e-6, weight_decay=0.02)
    gradients = gradients_of(params)
    assert_close(updates_of(mars, params, gradients), updates_of(adamw, params, gradients))


def test_what_is_no_matrix_follows_adamw_on_the_raw_gradient():
    params = gaussian_like(TREE, seed=0)
    mars = mars_adamw(0.1, learning_rate_1d=0.03, beta1_1d=0.8, beta2_1d=0.9, weight_decay_1d=0.2, epsilon=1e-6)
    adamw = optax.adamw(0.03, 0.8, 0.9, 1e-6, weight_decay=0.2)
    gradients = gradients_of(params)
    found, expected = updates_of(mars, params, gradients), updates_of(adamw, params, gradients)
    for name in ("filter", "number", "vector"):
        assert_close([u[name] for u in found], [u[name] for u in expected])
    assert np.abs(found[-1]["a"] - expected[-1]["a"]).max() > 0.01


def by_hand(params, gradients, *, clip, clip_norm, max_grad_norm, lr=0.1, wd=0.02, b1=0.9, b2=0.98, eps=1e-6, gamma=0.04):
    """MARS-AdamW on a dict of matrices in float64 NumPy, written from the formulas."""
    x = {k: np.asarray(v, np.float64) for k, v in params.items()}
    m, v, last = ({k: np.zeros_like(a) for k, a in x.items()} for _ in range(3))
    steps = []
    for t, gradient in enumerate(gradients, start=1):
        g = {k: np.asarray(a, np.float64) for k, a in gradient.items()}
        g_norm = np.sqrt(sum((a**2).sum() for a in g.values()))
        g = {k: a * min(1, max_grad_norm / g_norm) for k, a in g.items()}
        kappa = (gamma(t - 1) if callable(gamma) else gamma) * b1 / (1 - b1)
        c = {k: g[k] + kappa * (g[k] - last[k]) for k in g}
        norms = {k: np.linalg.norm(a) for k, a in c.items()}
        if clip == "global":
            norms = dict.fromkeys(c, np.sqrt(sum(n**2 for n in norms.values())))
        if clip is not None:
            c = {k: a / max(1, norms[k] / clip_norm) for k, a in c.items()}
        m = {k: b1 * m[k] + (1 - b1) * c[k] for k in c}
        v = {k: b2 * v[k] + (1 - b2) * c[k] ** 2 for k in c}
        u = {k: -lr * (m[k] / (1 - b1**t) / (np.sqrt(v[k] / (1 - b2**t)) + eps) + wd * x[k]) for k in c}
        x = {k: x[k] + u[k] for k in x}
        last = g
        steps.append(u)
    return steps


@pytest.mark.parametrize("clip_norm", [1.0, 0.3])
@pytest.mark.parametrize("clip", ["tensor", "global", None])
def test_clips_by_hand(clip, clip_norm):
    params = gaussian_like(MATRICES, seed=0)
    gradients = gradients_of(params)
    optimizer = mars_adamw(0.1, 0.02, 0.9, 0.98, 1e-6, gamma=0.04, max_grad_norm=2.0, correction_clip=clip, correction_clip_norm=clip_norm)
    expected = by_hand(params, gradients, clip=clip, clip_norm=clip_norm, max_grad_norm=2.0)
    assert_close(updates_of(optimizer, params, gradients), expected)


def test_a_schedule_of_gamma_by_hand():
    params = gaussian_like(MATRICES, seed=0)
    gradients = gradients_of(params)

    def gamma(count):
        return 0.01 + 0.02 * count

    optimizer = mars_adamw(0.1, 0.02, 0.9, 0.98, 1e-6, gamma=gamma, max_grad_norm=2.0)
    assert_close(
        updates_of(optimizer, params, gradients), by_hand(params, gradients, clip="tensor", clip_norm=1, max_grad_norm=2, gamma=gamma)
    )


def trained(model):
    return partition_for_grad_overwrite(trainables_only(model, True))[1]


def tensors(tree, like):
    """Every layer's and every expert's tensor of a model as a plain array of its own, named by the path in the model."""
    found = {}
    for parameter, x in zip(jax.tree.leaves(describe(like)), jax.tree.leaves(tree), strict=True):
        order = (*parameter.stack, *parameter.outputs, *parameter.inputs)
        shape = parameter.tensor_shape
        found[parameter.path] = list(jnp.transpose(x, order).reshape(-1, *shape))
    return found


# Some layers' corrected gradients are longer than the clip's norm at a step and others' shorter.
LAYER_SCALES = [0.02, 3.0, 0.3]


def layered_gradients(params):
    Layers = params.transformer.blocks.Block if hasattr(params.transformer, "blocks") else params.transformer.layers.Block
    scales = hax.named(jnp.array(LAYER_SCALES[: Layers.size]), Layers)

    def scaled(x):
        return (x * scales).rearrange(x.axes) if Layers.name in {axis.name for axis in x.axes} else x

    return [hax.tree_util.tree_map(scaled, g) for g in gradients_of(params, [1.0, 0.05, 1.0])]


def plain_roles(like):
    """What `tensors` are, for optimizers that see plain arrays: (out, in) as PyTorch stores them, and which belong to embeddings."""

    def roles(parameter):
        if parameter.kind == "matrix":
            return matrix(inputs=1, outputs=0, embedding=parameter.embedding)
        return None

    return {p.path: [roles(p)] * int(np.prod(p.stack_shape)) for p in jax.tree.leaves(describe(like))}


# Mixtral has layers, experts, grouped queries and an untied head; GPT-2 has biases, projections of three axes and a tied head.
STACKS = [(MIXTRAL, name) for name in FAMILY] + [(GPT2, name) for name in ("mars-adamw", "mars-shampoo", "mars-m lean")]


@pytest.mark.parametrize(("config", "name"), STACKS, ids=[f"{type(config).__name__} {name}" for config, name in STACKS])
def test_a_stack_of_layers_and_experts_is_updated_as_its_tensors_are(config, name):
    optimizer = FAMILY[name]
    params = gaussian_like(trained(shapes(config)), seed=0, scale=0.1)
    gradients = layered_gradients(params)
    plain = functools.partial(tensors, like=params)
    optimizer = functools.partial(optimizer, 0.1, gamma=0.1, max_grad_norm=50.0, learning_rate_1d=0.05)

    lengths = [float(jnp.linalg.norm(g)) for path, gs in plain(gradients[0]).items() if "stacked" in path for g in gs if g.ndim == 2]
    assert min(lengths) < 0.5 and max(lengths) > 2

    found = [plain(u) for u in updates_of(optimizer(), params, gradients)]
    expected = updates_of(optimizer(axis_roles=plain_roles(params)), plain(params), [plain(g) for g in gradients])
    assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_the_clip_of_one_layer_leaves_the_others_alone():
    stack = {"w": jnp.zeros((2, 4, 6))}
    optimizer = functools.partial(mars_adamw, 0.1, axis_roles={"w": matrix(inputs=1, outputs=2)})
    layers = jnp.array([0.01, 1.0])[:, None, None]
    gradients = [{"w": layers * g["w"]} for g in gradients_of(stack, [1.0, 5.0, 0.1])]
    clipped = updates_of(optimizer(correction_clip="tensor"), stack, gradients)[-1]["w"]
    free = updates_of(optimizer(correction_clip=None), stack, gradients)[-1]["w"]
    np.testing.assert_allclose(clipped[0], free[0], rtol=1e-6)
    assert np.abs(clipped[1] - free[1]).max() > 0.01


@pytest.mark.parametrize("as_function", [False, True], ids=["tree", "function"])
def test_roles_from_a_map_over_named_parameters(as_function):
    In, Out = hax.make_axes(In=4, Out=6)
    params = gaussian_like({"v": hax.zeros(Out), "w": hax.zeros((In, Out))}, seed=0)

    def roles(tree):
        return jax.tree.map(lambda x: matrix(inputs=0, outputs=1) if x.ndim == 2 else vector(0), tree)

    (found,) = updates_of(mars_adamw(0.1, axis_roles=roles if as_function else roles(params)), params, [params])
    plain = {name: x.array for name, x in params.items()}
    (expected,) = updates_of(mars_adamw(0.1), plain, [plain])
    assert_close({name: x.array for name, x in found.items()}, expected)


def test_stacked_and_sequential_layers_of_a_levanter_model_get_the_same_updates():
    stacked = gaussian_like(trained(shapes(LLAMA)), seed=0, scale=0.1)

    def sequential(model):
        layers = model.transformer.layers
        blocks = [
            jax.tree.map(lambda x, i=i: x[layers.Block, i], layers.stacked, is_leaf=hax.is_named_array) for i in range(layers.Block.size)
        ]
        seq = BlockSeq(blocks, layers.Block, layers.gradient_checkpointing)
        return eqx.tree_at(lambda m: m.transformer.layers, model, seq)

    optimizer = MarsAdamWConfig(learning_rate=0.1, learning_rate_1d=0.05, max_grad_norm=50.0, warmup=0).build(10)
    gradients = layered_gradients(stacked)
    found = [sequential(u) for u in updates_of(optimizer, stacked, gradients)]
    expected = updates_of(optimizer, sequential(stacked), [sequential(g) for g in gradients])
    assert_close(found, expected)


@pytest.mark.parametrize("amsgrad", [False, True])
def test_bfloat16_parameters_get_bfloat16_updates(amsgrad):
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), gaussian_like(TREE, seed=0))
    optimizer = MarsAdamWConfig(learning_rate=0.1, learning_rate_1d=0.05, warmup=0, amsgrad=amsgrad).build(10)
    gradients = gradients_of(params, [1.0, 1.0])
    found = updates_of(optimizer, params, gradients)
    assert {u.dtype for u in jax.tree.leaves(found)} == {jnp.dtype(jnp.bfloat16)}
    full = updates_of(
        optimizer, jax.tree.map(lambda x: x.astype(jnp.float32), params), jax.tree.map(lambda x: x.astype(jnp.float32), gradients)
    )
    assert_close(jax.tree.map(lambda u: u.astype(jnp.float32), found), full, rtol=0.05, atol=5e-3)


def test_what_is_not_there_stays_what_it_is():
    params = {
        "a": jnp.ones((4, 6)),
        "none": None,
        "masked": optax.MaskedNode(),
        "named": hax.NamedArray(None, (hax.Axis("x", 2),)),
        "v": jnp.ones(3),
    }
    (updates,) = updates_of(mars_adamw(0.1), params, [params])
    assert jax.tree.structure(updates) == jax.tree.structure(params)
    (alone,) = updates_of(mars_adamw(0.1), {"a": params["a"], "v": params["v"]}, [{"a": params["a"], "v": params["v"]}])
    assert_close({"a": updates["a"], "v": updates["v"]}, alone)


def test_inside_optax_masked():
    params = gaussian_like(MATRICES, seed=0)
    optimizer = optax.masked(mars_adamw(0.1), {"a": True, "b": False})
    (updates,) = updates_of(optimizer, params, [params])
    (alone,) = updates_of(mars_adamw(0.1), {"a": params["a"]}, [{"a": params["a"]}])
    assert_close(updates, {"a": alone["a"], "b": params["b"]})


@pytest.mark.parametrize("correction_clip", ["tensor", "global", None])
def test_arrays_without_elements(correction_clip):
    params = {**gaussian_like(MATRICES, seed=0), "empty": jnp.zeros((0, 4)), "nothing": jnp.zeros(0)}
    optimizer = mars_adamw(0.1, correction_clip=correction_clip, max_grad_norm=1.0)
    updates = updates_of(optimizer, params, gradients_of(params, [1.0, 1.0]))[-1]
    assert updates["empty"].shape == (0, 4) and updates["nothing"].shape == (0,)
    assert np.isfinite(updates["a"]).all() and np.abs(updates["a"]).min() > 0


def test_gradients_of_zero():
    params = gaussian_like(TREE, seed=0)
    zeros = jax.tree.map(jnp.zeros_like, params)
    found = updates_of(mars_adamw(0.1, 0.5, learning_rate_1d=0.2, weight_decay_1d=0.25, max_grad_norm=1.0), params, [zeros])
    # Nothing but the decays: 0.1 * 0.5 and 0.2 * 0.25.
    assert_close(found[0], jax.tree.map(lambda x: -0.05 * x, params))


def test_schedules_scale_each_rules_direction():
    params = gaussian_like(TREE, seed=0)
    gradients = gradients_of(params)
    fixed = functools.partial(mars_adamw, weight_decay=0, weight_decay_1d=0)
    unit = updates_of(fixed(1.0, learning_rate_1d=1.0), params, gradients)
    found = updates_of(fixed(optax.linear_schedule(0.5, 0.1, 4), learning_rate_1d=lambda count: 0.01 * (count + 1)), params, gradients)
    for t, rate in enumerate([0.5, 0.4, 0.3, 0.2, 0.1]):
        expected = {k: (rate if k in MATRICES else 0.01 * (t + 1)) * u for k, u in unit[t].items()}
        assert_close(found[t], expected)


def test_state_is_known_from_shapes_alone():
    params = trained(shapes(MIXTRAL))
    optimizer = MarsAdamWConfig().build(10)
    from_shapes = jax.eval_shape(optimizer.init, params)
    real = optimizer.init(gaussian_like(params, seed=0))
    assert jax.tree.map(lambda x: (x.shape, x.dtype), from_shapes) == jax.tree.map(lambda x: (x.shape, x.dtype), real)


@pytest.mark.parametrize("config", CONFIGS)
def test_lora_trains_the_adapters_and_nothing_else(config):
    adapted = eqx.filter_eval_shape(lambda m: loraize(m, LoraConfig(r=2), key=jrandom.PRNGKey(0)), shapes(GPT2))
    model = weights_like(adapted, seed=0)
    is_trainable = lora_trainable_params_filter(model)
    optimizer = config(learning_rate=0.1, learning_rate_1d=0.05, warmup=0).build(10)
    state = init_optimizer_for_trainables(optimizer, trainables_only(model, is_trainable))
    step = eqx.filter_jit(functools.partial(take_train_step, optimizer, is_trainable=is_trainable))
    after, _, _ = step(model, state, weights_like(adapted, seed=1))

    moved = {
        parameter.path: float(np.abs(x - y).max())
        for parameter, x, y in zip(
            jax.tree.leaves(describe(trainables_only(model, True))),
            jax.tree.leaves(trainables_only(model, True)),
            jax.tree.leaves(trainables_only(after, True)),
            strict=True,
        )
    }
    assert {path for path, d in moved.items() if d > 0} == {path for path in moved if ".lora." in path}
    assert min(d for path, d in moved.items() if ".lora." in path) > 0.001


@pytest.mark.parametrize("config", CONFIGS)
def test_frozen_parameters_stay_and_have_no_state(config):
    model = weights_like(shapes(MIXTRAL), seed=0)
    every, none = (functools.partial(jax.tree.map, lambda _, b=b: b, is_leaf=hax.is_named_array) for b in (True, False))
    frozen = eqx.tree_at(lambda m: m.embeddings, every(model), none(model.embeddings))
    optimizer = config(learning_rate=0.1, learning_rate_1d=0.05, warmup=0).build(10)
    state = init_optimizer_for_trainables(optimizer, trainables_only(model, frozen))
    assert not any(".embeddings." in jax.tree_util.keystr(keys) for keys, _ in jax.tree_util.tree_leaves_with_path(state))
    step = eqx.filter_jit(functools.partial(take_train_step, optimizer, is_trainable=frozen))
    after, _, _ = step(model, state, weights_like(shapes(MIXTRAL), seed=1))
    jax.tree.map(np.testing.assert_array_equal, after.embeddings, model.embeddings)
    moved = jax.tree.map(
        lambda a, b: float(np.abs(a - b).max()), trainables_only(after.transformer, True), trainables_only(model.transformer, True)
    )
    assert min(jax.tree.leaves(moved)) > 0.001


@pytest.mark.parametrize("config", CONFIGS)
def test_bfloat16_parameters_of_every_type(config):
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), gaussian_like(TREE, seed=0))
    gradients = gradients_of(params, [1.0, 0.3])
    exactly = FLOAT32 if config in (MarsShampooConfig, MarsMConfig) else {}
    optimizer = config(learning_rate=0.1, learning_rate_1d=0.05, warmup=0, momentum_dtype="float32", **exactly).build(10)
    found = updates_of(optimizer, params, gradients)
    assert {u.dtype for u in jax.tree.leaves(found)} == {jnp.dtype(jnp.bfloat16)}
    wide = functools.partial(jax.tree.map, lambda x: x.astype(jnp.float32))
    full = updates_of(optimizer, wide(params), [wide(g) for g in gradients])
    for u, expected in zip(found, full, strict=True):
        for name in TREE:
            assert np.linalg.norm(wide(u)[name] - expected[name]) <= 0.05 * np.linalg.norm(expected[name]) + 1e-3


@pytest.mark.parametrize("function", [mars_adamw, mars_lion, mars_shampoo, mars_m])
def test_under_optax_inject_hyperparams(function):
    """It makes every number an array that update may be given anew: of the defaults, whole numbers too."""
    fixed = {"newton_schulz_dtype": "float32"} if function in (mars_shampoo, mars_m) else {}
    params = gaussian_like(TREE, seed=0)
    injected = optax.inject_hyperparams(function)(learning_rate=0.1, gamma=0.05, **fixed)
    gradients = gradients_of(params, [1.0, 0.1])
    found = updates_of(injected, params, gradients)
    assert_close(found, updates_of(function(0.1, gamma=0.05, **fixed), params, gradients), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("function", [mars_adamw, mars_lion, mars_shampoo, mars_m])
def test_float64(function):
    with jax.enable_x64(True):
        params = {"a": jnp.asarray(np.random.default_rng(0).standard_normal((4, 6))), "v": jnp.ones(3, jnp.float64)}
        optimizer = function(0.1, max_grad_norm=1.0, diagnostics_every=2)

        def step(carry, _):
            params, state = carry
            updates, state = optimizer.update(params, state, params)
            return (optax.apply_updates(params, updates), state), None

        (after, _), _ = jax.lax.scan(step, (params, optimizer.init(params)), None, 3)
        assert {x.dtype for x in jax.tree.leaves(after)} == {jnp.dtype("float64")}


def test_numbers_are_parameters_too_and_complex_ones_are_not():
    params = {"x": 1.0, "w": jnp.ones((2, 3))}
    optimizer = mars_adamw(0.1, learning_rate_1d=0.1, weight_decay_1d=0.0)
    updates, _ = optimizer.update(params, optimizer.init(params), params)
    assert float(updates["x"]) == pytest.approx(-0.1)
    with pytest.raises(TypeError, match="^w is complex; only real arrays can be optimized$"):
        optimizer.init({"w": jnp.ones((2, 3), jnp.complex64)})
