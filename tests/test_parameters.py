"""What `describe` says of Levanter's models, of equinox and haliax modules and of plain arrays, as explicit tables."""

import dataclasses

import equinox as eqx
import haliax as hax
import haliax.nn as hnn
import jax
import jax.numpy as jnp
import jax.random as jrandom
import numpy as np
import optax
import pytest
from haliax.nn.scan import BlockSeq
from haliax.quantization import QuantizationConfig, partition_for_grad_overwrite, quantize_linear_layers
from levanter.adaptor.lora import LoraConfig, lora_trainable_params_filter, loraize
from levanter.layers.stacked import ArrayStacked
from levanter.trainer_state import trainables_only
from models import GPT2, LLAMA, MIXTRAL, QWEN3_MOE, gaussian_like, shapes

from levanter_mars.parameters import AxisRoles, Parameter, declared_axes, describe, map_parameters, matrix, vector

KEY = jrandom.PRNGKey(0)


def described(params, axis_roles=None) -> list[Parameter]:
    return jax.tree.leaves(describe(params, axis_roles))


def table(params, axis_roles=None) -> list[tuple]:
    """(path, kind, stack shape, tensor shape) of every parameter."""
    return [(p.path, p.kind, p.stack_shape, p.tensor_shape) for p in described(params, axis_roles)]


def trained(model, is_trainable=True):
    """The part of a model that Levanter's trainer hands to an optimizer."""
    _, trainable = partition_for_grad_overwrite(trainables_only(model, is_trainable))
    return trainable


GPT2_TABLE = [
    ("transformer.blocks.stacked.ln_1.weight", "vector", (3,), (8,)),
    ("transformer.blocks.stacked.ln_1.bias", "vector", (3,), (8,)),
    ("transformer.blocks.stacked.attn.c_attn.weight", "matrix", (3,), (24, 8)),
    ("transformer.blocks.stacked.attn.c_attn.bias", "vector", (3,), (24,)),
    ("transformer.blocks.stacked.attn.c_proj.weight", "matrix", (3,), (8, 8)),
    ("transformer.blocks.stacked.attn.c_proj.bias", "vector", (3,), (8,)),
    ("transformer.blocks.stacked.ln_2.weight", "vector", (3,), (8,)),
    ("transformer.blocks.stacked.ln_2.bias", "vector", (3,), (8,)),
    ("transformer.blocks.stacked.mlp.c_fc.weight", "matrix", (3,), (32, 8)),
    ("transformer.blocks.stacked.mlp.c_fc.bias", "vector", (3,), (32,)),
    ("transformer.blocks.stacked.mlp.c_proj.weight", "matrix", (3,), (8, 32)),
    ("transformer.blocks.stacked.mlp.c_proj.bias", "vector", (3,), (8,)),
    ("transformer.ln_f.weight", "vector", (), (8,)),
    ("transformer.ln_f.bias", "vector", (), (8,)),
    ("embeddings.token_embeddings.weight", "matrix", (), (11, 8)),
    ("embeddings.position_embeddings.weight", "matrix", (), (16, 8)),
]


def test_gpt2():
    assert table(trained(shapes(GPT2))) == GPT2_TABLE


def test_gpt2_without_biases_keeps_its_norms_weights():
    assert table(trained(shapes(dataclasses.replace(GPT2, use_bias=False)))) == [row for row in GPT2_TABLE if not row[0].endswith("bias")]


def test_embeddings_are_tables_looked_up_by_token_and_the_head_over_the_same_vocabulary():
    assert [p.path for p in described(trained(shapes(GPT2))) if p.embedding] == [
        "embeddings.token_embeddings.weight",
        "embeddings.position_embeddings.weight",
    ]
    # An untied head is a Linear from width to vocabulary.
    assert [p.path for p in described(trained(shapes(LLAMA))) if p.embedding] == ["embeddings.token_embeddings.weight", "lm_head.weight"]


def test_axes_of_an_attention_projection():
    c_attn = described(trained(shapes(GPT2)))[2]
    named = {role: {c_attn.axis_names[i] for i in getattr(c_attn, role)} for role in ("stack", "inputs", "outputs")}
    assert named == {"stack": {"layers"}, "inputs": {"embed"}, "outputs": {"qkv", "heads", "head_size"}}


def test_llama_with_grouped_query_heads():
    assert table(trained(shapes(LLAMA))) == [
        ("transformer.layers.stacked.self_attn.q_proj.weight", "matrix", (3,), (8, 8)),
        ("transformer.layers.stacked.self_attn.k_proj.weight", "matrix", (3,), (4, 8)),
        ("transformer.layers.stacked.self_attn.v_proj.weight", "matrix", (3,), (4, 8)),
        ("transformer.layers.stacked.self_attn.o_proj.weight", "matrix", (3,), (8, 8)),
        ("transformer.layers.stacked.mlp.gate_proj.weight", "matrix", (3,), (20, 8)),
        ("transformer.layers.stacked.mlp.up_proj.weight", "matrix", (3,), (20, 8)),
        ("transformer.layers.stacked.mlp.down_proj.weight", "matrix", (3,), (8, 20)),
        ("transformer.layers.stacked.input_layernorm.weight", "vector", (3,), (8,)),
        ("transformer.layers.stacked.post_attention_layernorm.weight", "vector", (3,), (8,)),
        ("transformer.norm.weight", "vector", (), (8,)),
        ("embeddings.token_embeddings.weight", "matrix", (), (11, 8)),
        ("lm_head.weight", "matrix", (), (11, 8)),
    ]


def test_mixtral_experts_are_separate_matrices():
    rows = {path.split("stacked.")[1]: row for path, *row in table(trained(shapes(MIXTRAL))) if "moe" in path}
    assert rows == {
        "block_sparse_moe.gate.weight": ["matrix", (2,), (5, 8)],  # the router: its output is the experts axis
        "block_sparse_moe.experts.w1.weight": ["matrix", (2, 5), (20, 8)],
        "block_sparse_moe.experts.w2.weight": ["matrix", (2, 5), (8, 20)],
        "block_sparse_moe.experts.w3.weight": ["matrix", (2, 5), (20, 8)],
    }


def test_qwen3_moe_with_query_and_key_norms():
    rows = {path.split("stacked.")[1]: row for path, *row in table(trained(shapes(QWEN3_MOE))) if "stacked" in path}
    assert rows == {
        "self_attn.q_proj.weight": ["matrix", (2,), (24, 8)],
        "self_attn.k_proj.weight": ["matrix", (2,), (12, 8)],
        "self_attn.v_proj.weight": ["matrix", (2,), (12, 8)],
        "self_attn.o_proj.weight": ["matrix", (2,), (8, 24)],
        "self_attn.q_norm.weight": ["vector", (2,), (6,)],
        "self_attn.k_norm.weight": ["vector", (2,), (6,)],
        "mlp.gate.weight": ["matrix", (2,), (5, 8)],
        "mlp.experts.gate_proj.weight": ["matrix", (2, 5), (12, 8)],
        "mlp.experts.up_proj.weight": ["matrix", (2, 5), (12, 8)],
        "mlp.experts.down_proj.weight": ["matrix", (2, 5), (8, 12)],
        "input_layernorm.weight": ["vector", (2,), (8,)],
        "post_attention_layernorm.weight": ["vector", (2,), (8,)],
    }


def test_lora_adapters_are_the_only_trained_parameters():
    config = LoraConfig(r=5, target_modules=["c_attn", "c_fc"])
    model = eqx.filter_eval_shape(lambda m: loraize(m, config, key=KEY), shapes(GPT2))
    assert table(trained(model, lora_trainable_params_filter(model))) == [
        ("transformer.blocks.stacked.attn.c_attn.lora.lora_A.weight", "matrix", (3,), (5, 8)),
        ("transformer.blocks.stacked.attn.c_attn.lora.lora_B.weight", "matrix", (3,), (24, 5)),
        ("transformer.blocks.stacked.mlp.c_fc.lora.lora_A.weight", "matrix", (3,), (5, 8)),
        ("transformer.blocks.stacked.mlp.c_fc.lora.lora_B.weight", "matrix", (3,), (32, 5)),
    ]


def test_fp8_scales_are_overwritten_not_optimized():
    quantized = eqx.filter_eval_shape(lambda m: quantize_linear_layers(m, QuantizationConfig(fp8=True)), shapes(GPT2))
    assert any("kernel_scale" in p.path for p in described(trainables_only(quantized, True)))
    assert table(trained(quantized)) == GPT2_TABLE


class Gain(eqx.Module):
    """A module that nobody taught: plain arrays and a constant."""

    kernel: jax.Array
    gain: jax.Array
    scalar: jax.Array
    name: str = eqx.field(static=True, default="gain")


class Layer(eqx.Module):
    linear: eqx.nn.Linear
    norm: eqx.nn.LayerNorm
    plain: Gain
    shared: jax.Array

    @staticmethod
    def init(key, shared):
        plain = Gain(jnp.ones((5, 7)), jnp.ones(7), jnp.ones(()))
        return Layer(eqx.nn.Linear(4, 6, key=key), eqx.nn.LayerNorm((2, 6)), plain, shared)


def test_array_stacked_layers_of_equinox_modules():
    stack = ArrayStacked.init(3, Layer)(jrandom.split(KEY, 3), jnp.ones(9))
    assert table(stack) == [
        ("stacked.linear.weight", "matrix", (3,), (6, 4)),  # equinox stores (out, in)
        ("stacked.linear.bias", "vector", (3,), (6,)),
        ("stacked.norm.weight", "vector", (3,), (12,)),
        ("stacked.norm.bias", "vector", (3,), (12,)),
        ("stacked.plain.kernel", "matrix", (3,), (7, 5)),  # plain arrays are (in, out)
        ("stacked.plain.gain", "vector", (3,), (7,)),
        ("stacked.plain.scalar", "vector", (3,), (1,)),
        ("stacked.shared", "vector", (3,), (9,)),
    ]
    # ArrayStacked shares an array without its axis in front among the layers.
    shared = eqx.tree_at(lambda s: s.stacked.shared, stack, jnp.ones((8, 9)))
    assert table(shared)[-1] == ("stacked.shared", "matrix", (), (9, 8))


def test_other_equinox_modules():
    modules = {"embedding": eqx.nn.Embedding(11, 4, key=KEY), "norm": eqx.nn.RMSNorm(6), "mlp": eqx.nn.MLP(3, 2, 5, 1, key=KEY)}
    params = eqx.filter(modules, eqx.is_array)
    assert table(params) == [
        ("embedding.weight", "matrix", (), (11, 4)),
        ("mlp.layers.0.weight", "matrix", (), (5, 3)),
        ("mlp.layers.0.bias", "vector", (), (5,)),
        ("mlp.layers.1.weight", "matrix", (), (2, 5)),
        ("mlp.layers.1.bias", "vector", (), (2,)),
        ("norm.weight", "vector", (), (6,)),
        ("norm.bias", "vector", (), (6,)),
    ]
    assert [p.path for p in described(params) if p.embedding] == ["embedding.weight"]


In, Out, Layers, H, W = hax.make_axes(In=4, Out=6, Layers=3, H=2, W=5)


class NamedLayer(eqx.Module):
    linear: hnn.Linear
    scale: hax.NamedArray

    @staticmethod
    def init(key):
        return NamedLayer(hnn.Linear.init(In, Out, key=key), hax.ones(Out))


def test_a_sequence_of_blocks_has_no_stack():
    blocks = BlockSeq.init(hax.Axis("Layers", 2), NamedLayer)(key=jrandom.split(KEY, 2))
    assert table(blocks) == [
        (f"blocks.{layer}.{name}", *row)
        for layer in range(2)
        for name, *row in [
            ("linear.weight", "matrix", (), (6, 4)),
            ("linear.bias", "vector", (), (6,)),
            ("scale", "vector", (), (6,)),
        ]
    ]


def test_a_stack_of_the_same_blocks():
    stack = hnn.Stacked.init(Layers, NamedLayer)(key=jrandom.split(KEY, 3))
    assert table(stack) == [
        ("stacked.linear.weight", "matrix", (3,), (6, 4)),
        ("stacked.linear.bias", "vector", (3,), (6,)),
        ("stacked.scale", "vector", (3,), (6,)),
    ]


def test_convolution_filters_are_neither_matrix_nor_vector():
    conv = hnn.Conv.init((H, W), In, Out, kernel_size=(3, 7), key=KEY)
    assert table(conv) == [("weight", "other", (), (6, 4 * 3 * 7)), ("bias", "vector", (), (6,))]
    transposed = hnn.ConvTranspose.init((H, W), In, Out, kernel_size=(3, 7), key=KEY)
    assert table(transposed) == [("weight", "other", (), (6, 4 * 3 * 7)), ("bias", "vector", (), (6,))]


def test_a_linear_over_several_axes():
    linear = hnn.Linear.init((In, H), (Out, W), key=KEY)
    assert table(linear) == [("weight", "matrix", (), (6 * 5, 4 * 2)), ("bias", "vector", (), (30,))]


def test_a_linear_with_no_output_axis_is_one_row():
    assert table(hnn.Linear.init(In, (), key=KEY)) == [("weight", "matrix", (), (1, 4)), ("bias", "vector", (), (1,))]


def test_named_arrays_of_no_known_module():
    assert table({"one": hax.ones(In), "two": hax.ones((In, Out))}) == [
        ("one", "vector", (), (4,)),
        ("two", "other", (), (24, 1)),  # names alone do not say which axis is the input
    ]


PLAIN = {"filter": jnp.ones((3, 3, 4, 6)), "matrix": jnp.ones((4, 6)), "number": jnp.ones(()), "vector": jnp.ones(5)}
PLAIN_TABLE = [
    ("filter", "other", (), (216, 1)),
    ("matrix", "matrix", (), (6, 4)),  # (in, out)
    ("number", "vector", (), (1,)),
    ("vector", "vector", (), (5,)),
]


def test_plain_arrays():
    assert table(PLAIN) == PLAIN_TABLE
    assert described(PLAIN)[1].inputs == (0,)


def test_a_single_array_is_a_tree():
    assert table(jnp.ones((4, 6))) == [("", "matrix", (), (6, 4))]


@pytest.mark.parametrize(
    "params",
    [jax.eval_shape(lambda: PLAIN), jax.tree.map(np.asarray, PLAIN), jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), PLAIN)],
    ids=["eval_shape", "numpy", "ShapeDtypeStruct"],
)
def test_shapes_are_enough(params):
    assert table(params) == PLAIN_TABLE


def test_tracers():
    found = []
    jax.jit(lambda params: found.extend(table(params)))(PLAIN)
    assert found == PLAIN_TABLE


def test_what_is_not_there_stays_what_it_is():
    params = {
        "matrix": jnp.ones((4, 6)),
        "named": hax.NamedArray(None, (In,)),
        "none": None,
        "masked": optax.MaskedNode(),
        "linear": dataclasses.replace(hnn.Linear.init(In, Out, key=KEY), weight=None),
    }
    tree = describe(params)
    assert table(params) == [("linear.bias", "vector", (), (6,)), ("matrix", "matrix", (), (6, 4))]
    assert tree["none"] is None and tree["masked"] == optax.MaskedNode() and tree["named"].array is None and tree["linear"].weight is None


STACKED = {"experts": jnp.ones((3, 4, 6)), "rest": {"a": jnp.ones((4, 6)), "b": jnp.ones(5)}}


@pytest.mark.parametrize(
    "axis_roles",
    [
        {"experts": matrix(inputs=-1, outputs=1), "rest": {"a": vector(-1), "b": None}},
        {"experts": matrix(inputs=2, outputs=-2), "rest": {"a": vector(1), "b": vector(0)}},
        lambda params: {"experts": matrix(inputs=params["experts"].ndim - 1, outputs=1), "rest": {"a": vector(-1), "b": None}},
    ],
    ids=["tree", "positions from the other end", "function"],
)
def test_roles_that_the_caller_gives(axis_roles):
    assert table(STACKED, axis_roles) == [
        ("experts", "matrix", (3,), (4, 6)),
        ("rest.a", "vector", (4,), (6,)),
        ("rest.b", "vector", (), (5,)),
    ]


def test_a_prefix_of_roles_covers_what_is_below_it_and_none_means_as_declared():
    roles = {"experts": matrix(inputs=1, outputs=2), "rest": None}
    assert table(STACKED, roles) == [
        ("experts", "matrix", (3,), (6, 4)),
        ("rest.a", "matrix", (), (6, 4)),
        ("rest.b", "vector", (), (5,)),
    ]
    assert table(STACKED, {"experts": None, "rest": vector(-1)}) == [
        ("experts", "other", (), (72, 1)),
        ("rest.a", "vector", (4,), (6,)),
        ("rest.b", "vector", (), (5,)),
    ]


def test_roles_of_a_model_by_axis_name():
    linear = hnn.Linear.init(In, Out, key=KEY)
    roles = eqx.tree_at(lambda m: (m.weight, m.bias), linear, (vector("Out"), vector(Out)))
    assert table(linear, roles) == [("weight", "vector", (4,), (6,)), ("bias", "vector", (), (6,))]


def test_other_can_be_given_too():
    assert table({"a": jnp.ones((4, 6))}, {"a": AxisRoles("other", inputs=(0,), outputs=(1,))}) == [("a", "other", (), (6, 4))]


class Taught(eqx.Module):
    kernel: jax.Array
    bias: jax.Array


def test_a_module_class_of_ones_own_can_be_taught():
    module = {"layer": Taught(jnp.ones((3, 6, 4)), jnp.ones(6))}
    assert table(module)[0] == ("layer.kernel", "other", (), (72, 1))
    declared_axes.register(Taught, lambda m: {"kernel": matrix(inputs=-1, outputs=-2)})
    assert table(module) == [("layer.kernel", "matrix", (3,), (6, 4)), ("layer.bias", "vector", (), (6,))]


def test_a_leaf_that_is_no_array_is_an_error():
    with pytest.raises(TypeError, match="^layers.0.activation is a function; only arrays can be optimized$"):
        describe({"layers": [{"activation": lambda x: x}]})


def test_an_axis_that_is_not_there_is_an_error():
    with pytest.raises(ValueError, match=r"^weight has no axis 'Heads'; its axes are \('In', 'Out'\)$"):
        describe({"weight": hax.ones((In, Out))}, {"weight": matrix(inputs="Heads", outputs="Out")})
    with pytest.raises(ValueError, match=r"^a has no axis 2; its axes are \(0, 1\)$"):
        describe({"a": jnp.ones((4, 6))}, {"a": matrix(inputs=2, outputs=0)})
    with pytest.raises(ValueError, match=r"^a has no axis 'In'; its axes are \(0, 1\)$"):
        describe({"a": jnp.ones((4, 6))}, {"a": matrix(inputs="In", outputs=0)})


def test_one_axis_in_two_roles_is_an_error():
    with pytest.raises(ValueError, match=r"^a: inputs \(0,\) and outputs \(-2,\) must be different axes$"):
        describe({"a": jnp.ones((4, 6))}, {"a": matrix(inputs=0, outputs=-2)})


@jax.jit
def norms(tree):
    return map_parameters(lambda parameter, x: parameter.norm(x), tree)


def test_norms_are_per_layer_and_per_expert():
    model = gaussian_like(trained(shapes(MIXTRAL)), seed=1)
    block, found = model.transformer.layers.stacked, norms(model).transformer.layers.stacked

    experts = block.block_sparse_moe.experts.w1.weight
    positions = [[axis.name for axis in experts.axes].index(name) for name in ("layers", "experts")]
    by_tensor = np.moveaxis(np.asarray(experts.array), positions, [0, 1]).reshape(2, 5, -1)
    found_w1 = found.block_sparse_moe.experts.w1.weight
    assert {axis.name for axis in found_w1.axes} == {"layers", "experts"}
    np.testing.assert_allclose(found_w1.rearrange(("layers", "experts")).array, np.linalg.norm(by_tensor, axis=-1), rtol=1e-6)

    norm = block.input_layernorm.weight
    np.testing.assert_allclose(
        found.input_layernorm.weight.array, np.linalg.norm(norm.rearrange(("layers", "embed")).array, axis=1), rtol=1e-6
    )


def test_norms_of_plain_arrays_broadcast_against_them():
    x = gaussian_like(jnp.zeros((3, 4, 6)), seed=2)
    (parameter,) = described(x, matrix(inputs=1, outputs=2))
    np.testing.assert_allclose(parameter.norm(x), np.linalg.norm(x.reshape(3, 24), axis=1).reshape(3, 1, 1), rtol=1e-6)
    (whole,) = described(x)
    np.testing.assert_allclose(whole.norm(x), np.linalg.norm(x.ravel()).reshape(1, 1, 1), rtol=1e-6)


def test_norms_of_bfloat16_are_taken_in_float32():
    x = jnp.full((64, 64), 1.0, jnp.bfloat16)  # 4096 summands: a bfloat16 sum would stop at 256
    (parameter,) = described(x)
    assert parameter.norm(x).dtype == jnp.float32
    np.testing.assert_array_equal(parameter.norm(x), [[64.0]])


@pytest.mark.parametrize("config", [GPT2, LLAMA, MIXTRAL], ids=["gpt2", "llama", "mixtral"])
def test_matrices_and_back(config):
    params = gaussian_like(trained(shapes(config)), seed=0)

    def check(parameter, x):
        if parameter.kind == "matrix":
            matrices = parameter.to_matrices(x)
            assert matrices.shape == (*parameter.stack_shape, *parameter.tensor_shape)
            back = parameter.from_matrices(matrices, x)
            assert back.axes == x.axes
            np.testing.assert_array_equal(back.array, x.array)

    map_parameters(check, params)
    c_attn = next(p for p in described(params) if p.path.endswith(("c_attn.weight", "q_proj.weight")))
    assert len(c_attn.outputs) > 1


def test_an_array_between_its_stacks_and_features_as_matrices():
    roles = matrix(inputs=(0, 3), outputs=2)
    x = jnp.arange(2 * 3 * 4 * 5.0).reshape(2, 3, 4, 5)
    (parameter,) = described([x], [roles])
    np.testing.assert_array_equal(parameter.to_matrices(x), np.einsum("aisb->isab", x).reshape(3, 4, 10))
    np.testing.assert_array_equal(parameter.from_matrices(parameter.to_matrices(x), x), x)


def test_means_are_per_tensor():
    x = jnp.arange(24.0).reshape(2, 3, 4)
    (parameter,) = described([x], [matrix(inputs=1, outputs=2)])
    np.testing.assert_allclose(parameter.mean(x).ravel(), [5.5, 17.5])


def test_a_head_is_a_head_whether_or_not_its_embedding_is_trained():
    params = trained(shapes(LLAMA))
    for absent in (None, optax.MaskedNode()):
        without = eqx.tree_at(lambda m: m.embeddings.token_embeddings.weight, params, replace=absent)
        assert [p.path for p in described(without) if p.embedding] == ["lm_head.weight"]


def test_equinox_cells_and_convolutions():
    modules = {"gru": eqx.nn.GRUCell(3, 2, key=KEY), "lstm": eqx.nn.LSTMCell(3, 2, key=KEY), "conv": eqx.nn.Conv2d(3, 4, 5, key=KEY)}
    assert sorted(table(eqx.filter(modules, eqx.is_inexact_array))) == [
        ("conv.bias", "vector", (), (4,)),
        ("conv.weight", "other", (), (4, 75)),
        ("gru.bias", "vector", (), (6,)),
        ("gru.bias_n", "vector", (), (2,)),
        ("gru.weight_hh", "matrix", (), (6, 2)),
        ("gru.weight_ih", "matrix", (), (6, 3)),
        ("lstm.bias", "vector", (), (8,)),
        ("lstm.weight_hh", "matrix", (), (8, 2)),
        ("lstm.weight_ih", "matrix", (), (8, 3)),
    ]
