"""`convolutions`: a filter follows the rule of its matrix out × (in·height·width), or that of vectors, whatever module holds it."""

import dataclasses

import equinox as eqx
import haliax.nn as hnn
import jax
import jax.numpy as jnp
import jax.random as jrandom
import numpy as np
import optax
import pytest
from draccus.utils import ParsingError
from haliax import Axis

from levanter_mars import MarsAdamWConfig, MarsLionConfig, MarsMConfig, MarsShampooConfig, mars_adamw, mars_lion, mars_m, mars_shampoo
from levanter_mars.parameters import matrix

KEY = jrandom.PRNGKey(0)
IN, OUT, LAYERS = Axis("in", 4), Axis("out", 6), Axis("layers", 3)
TYPES = {
    "mars-adamw": mars_adamw,
    "mars-lion": mars_lion,
    "mars-shampoo": lambda rate, **kwargs: mars_shampoo(rate, newton_schulz_dtype="float32", **kwargs),
    "mars-m": lambda rate, **kwargs: mars_m(rate, newton_schulz_dtype="float32", **kwargs),
}


def named_conv(kind, key=KEY):
    return kind.init(("height", "width"), IN, OUT, kernel_size=(3, 7), key=key)


class Layer(eqx.Module):
    conv: hnn.Conv

    @staticmethod
    def init(key):
        return Layer(named_conv(hnn.Conv, key))


def filters() -> dict:
    return {
        "conv": named_conv(hnn.Conv),
        "transposed": named_conv(hnn.ConvTranspose),
        "stacked": hnn.Stacked.init(LAYERS, Layer)(jrandom.split(KEY, LAYERS.size)),
        "equinox": eqx.nn.Conv2d(4, 6, (3, 7), key=KEY),
    }


def as_stored(model: dict) -> dict:
    """The filters as plain arrays, (layers,) out × (in·height·width)."""

    def named(x):
        order = [name for name in ("layers", "out", "in", "height", "width") if name in {axis.name for axis in x.axes}]
        return x.rearrange(tuple(order)).array

    weights = {
        "conv": named(model["conv"].weight),
        "transposed": named(model["transposed"].weight),
        "stacked": named(model["stacked"].stacked.conv.weight),
        "equinox": model["equinox"].weight,
    }
    return {name: x.reshape(*x.shape[:-3], -1) for name, x in weights.items()}


def random_like(tree, seed: int, scale: float):
    leaves, structure = jax.tree.flatten(tree)
    keys = jrandom.split(jrandom.PRNGKey(seed), len(leaves))
    return structure.unflatten([scale * jrandom.normal(key, x.shape) for key, x in zip(keys, leaves, strict=True)])


def third_update(optimizer, params, gradients):
    state = optimizer.init(params)
    update = jax.jit(optimizer.update)
    for gradient in gradients:
        updates, state = update(gradient, state, params)
    return updates


@pytest.mark.parametrize("name", TYPES)
def test_a_filter_follows_its_matrix_or_the_vectors(name):
    model = eqx.filter(filters(), eqx.is_inexact_array)
    # Of which the correction's clip, at norm 1, binds on some: each layer's filter is a tensor of its own.
    gradients = [random_like(model, seed, scale=0.06) for seed in range(3)]
    stored, stored_gradients = as_stored(model), [as_stored(gradient) for gradient in gradients]
    roles = {key: matrix(inputs=-1, outputs=-2) for key in stored}

    as_matrices = third_update(TYPES[name](1e-2, axis_roles=roles), stored, stored_gradients)
    found = as_stored(third_update(TYPES[name](1e-2, convolutions="matrix"), model, gradients))
    for key, expected in as_matrices.items():
        np.testing.assert_allclose(found[key], expected, atol=2e-6, err_msg=key)

    flat, *flat_gradients = (jax.tree.map(jnp.ravel, tree) for tree in (stored, *stored_gradients))
    as_vectors = third_update(TYPES[name](1e-2), flat, flat_gradients)
    found = as_stored(third_update(TYPES[name](1e-2, convolutions="vector"), model, gradients))
    for key, expected in as_vectors.items():
        np.testing.assert_allclose(found[key].ravel(), expected, atol=2e-6, err_msg=key)
        assert np.abs(as_matrices[key].ravel() - expected).max() > 1e-4


@pytest.mark.parametrize(
    "config, rule",
    [(MarsAdamWConfig(), "adamw"), (MarsLionConfig(), "adamw"), (MarsShampooConfig(), "mars-shampoo"), (MarsMConfig(), "mars-m")],
)
def test_orthogonalized_types_take_filters_for_matrices_and_the_others_follow_the_release(config, rule):
    conv = eqx.filter_eval_shape(lambda: named_conv(hnn.Conv))
    assert config.rules(conv).weight.name == rule
    matrices = dataclasses.replace(config, convolutions="matrix").rules(conv)
    assert (matrices.weight.name, matrices.bias.name) == (config.get_choice_name(type(config)), "adamw")
    assert dataclasses.replace(config, convolutions="vector").rules(conv).weight.name == "adamw"


def test_a_plain_array_of_four_axes_is_no_filter():
    """Nothing says which of its axes are inputs: it follows the vectors' rule until `axis_roles` says."""
    x = jnp.ones((6, 4, 3, 7))
    update = third_update(mars_m(1e-2, convolutions="matrix", newton_schulz_dtype="float32"), [x], [[x]])[0]
    adamw = optax.adamw(1e-2, b1=0.9, b2=0.95, weight_decay=0.01)
    np.testing.assert_allclose(update, adamw.update([x], adamw.init([x]), [x])[0][0], rtol=1e-5)


def test_a_value_out_of_range():
    with pytest.raises(ParsingError, match='mars-m: convolutions is \'tensor\'; it must be "matrix" or "vector"'):
        MarsMConfig(convolutions="tensor")
