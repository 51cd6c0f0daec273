"""What each array of a model is: matrix, vector or other; which axes stack tensors, which map inputs to outputs.

MARS works on one tensor at a time, and a tensor is what PyTorch would store as one parameter. A Levanter model stores the same
tensor of every layer, or of every expert, in one array. The modules say which axes are which: `Stacked.Block`, `Linear.In` and
`Linear.Out`, `MoELinear.Experts`, `LayerNorm.axis`. This file reads them, so that no other file has to guess from a shape.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

import equinox as eqx
import haliax as hax
import haliax.nn as hnn
import jax
import jax.numpy as jnp
from haliax.nn.conv import Conv, ConvTranspose
from haliax.nn.normalization import LayerNormBase
from jaxtyping import Array, Float, PyTree

try:
    from levanter.layers.stacked import ArrayStacked
except ModuleNotFoundError:  # in a Levanter that has only Haliax's stacks
    ArrayStacked = ()

Kind = Literal["matrix", "vector", "other"]
KINDS: tuple[Kind, ...] = get_args(Kind)
AxisRef = int | str | hax.Axis
"""An axis by its position (negative counts from the end) or, in a NamedArray, by its name."""


@dataclass(frozen=True)
class AxisRoles:
    """The roles of one array's axes. Every axis that is neither an input nor an output stacks tensors.

    A caller builds it with `matrix` or `vector` to say what a plain array is.
    """

    kind: Kind
    inputs: tuple[AxisRef, ...] = ()
    outputs: tuple[AxisRef, ...] = ()
    embedding: bool = False


def matrix(*, inputs: AxisRef | tuple[AxisRef, ...], outputs: AxisRef | tuple[AxisRef, ...], embedding: bool = False) -> AxisRoles:
    """Roles of a weight that maps `inputs` to `outputs`; the other axes stack such matrices (layers, experts)."""
    return AxisRoles("matrix", _as_tuple(inputs), _as_tuple(outputs), embedding)


def vector(features: AxisRef | tuple[AxisRef, ...]) -> AxisRoles:
    """Roles of a bias, a norm's weight, or anything else the release stores with one axis; the other axes stack such vectors."""
    return AxisRoles("vector", outputs=_as_tuple(features))


RolesOrFn = PyTree[AxisRoles | None] | Callable[[PyTree], PyTree[AxisRoles | None]]
"""A tree of AxisRoles that is a prefix of the parameters' tree, or a function of the parameters that returns one.

None in the place of AxisRoles means: as the modules say. Like a function of labels in optax, a function is also called on trees in which
the parameters that follow another rule are masked; `jax.tree.map` passes over those.
"""


@dataclass(frozen=True)
class Parameter:
    """What one array of a model is. `stack`, `inputs` and `outputs` are positions of its axes and together cover them all."""

    path: str
    kind: Kind
    shape: tuple[int, ...]
    stack: tuple[int, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    axis_names: tuple[str, ...] | None = None
    embedding: bool = False
    """Whether it is an embedding's table, or the head: a matrix from features to the vocabulary of one."""

    @property
    def is_filter(self) -> bool:
        """Whether it is a convolution's filter: neither matrix nor vector, but its module says what its inputs and outputs are."""
        return self.kind == "other" and bool(self.inputs) and bool(self.outputs)

    @property
    def stack_shape(self) -> tuple[int, ...]:
        return tuple(self.shape[i] for i in self.stack)

    @property
    def tensor_shape(self) -> tuple[int, ...]:
        """The shape of one tensor as PyTorch would store it: (out, in) for a matrix or a filter, (features,) for a vector."""
        fan_out = math.prod(self.shape[i] for i in self.outputs)
        return (fan_out,) if self.kind == "vector" else (fan_out, math.prod(self.shape[i] for i in self.inputs))

    def norm(self, x: hax.NamedArray | jax.Array) -> hax.NamedArray | jax.Array:
        """The L2 norm of every tensor in `x`, in at least float32.

        Args:
            x: an array of this parameter's shape, named if the parameter is.

        Returns:
            One norm for each stacked tensor, shaped to broadcast against `x`.
        """
        x = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        if isinstance(x, hax.NamedArray):
            return hax.sqrt(hax.sum(hax.square(x), axis=self._feature_names(x)))
        return jnp.sqrt(jnp.sum(jnp.square(x), axis=self.inputs + self.outputs, keepdims=True))

    def mean(self, x: hax.NamedArray | jax.Array) -> hax.NamedArray | jax.Array:
        """The mean of every tensor in `x`, shaped as `norm` is, in at least float32."""
        x = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        if isinstance(x, hax.NamedArray):
            return hax.mean(x, axis=self._feature_names(x))
        return jnp.mean(x, axis=self.inputs + self.outputs, keepdims=True)

    def to_matrices(self, x: hax.NamedArray | jax.Array) -> Float[Array, "*stack out in"]:
        """The tensors of a matrix parameter as PyTorch would store each, the stack's axes in front."""
        array = x.array if isinstance(x, hax.NamedArray) else x
        stack = tuple(array.shape[i] for i in self.stack)
        return array.transpose(self.stack + self.outputs + self.inputs).reshape(*stack, *self.tensor_shape)

    def from_matrices(self, matrices: Float[Array, "*stack out in"], like: hax.NamedArray | jax.Array) -> hax.NamedArray | jax.Array:
        """The inverse of `to_matrices`: an array of the form of `like`."""
        order = self.stack + self.outputs + self.inputs
        array = matrices.reshape([like.array.shape[i] if isinstance(like, hax.NamedArray) else like.shape[i] for i in order])
        array = array.transpose([order.index(i) for i in range(len(order))])
        return dataclasses.replace(like, array=array) if isinstance(like, hax.NamedArray) else array

    def _feature_names(self, x: hax.NamedArray) -> tuple[str, ...]:
        return tuple(x.axes[i].name for i in self.inputs + self.outputs)


def describe(params: PyTree, axis_roles: RolesOrFn | None = None) -> PyTree[Parameter]:
    """Describes every array of `params`, which may hold arrays, tracers, ShapeDtypeStructs and NamedArrays of them.

    Args:
        params: a model, or a tree of its shape such as its gradients. None and masked nodes stay what they are.
        axis_roles: what the caller knows better than the modules.

    Returns:
        The tree of `params` with a Parameter in the place of every array or NamedArray.

    Raises:
        TypeError: if a leaf is not an array.
        ValueError: if roles name an axis that the array does not have, or one axis twice.
    """
    described = list(_walk(params, path=(), stacked=(), declared=None))
    if axis_roles is not None:
        # A tree of roles in the form of a model can be callable too, as its model is. A function is a leaf.
        is_function = callable(axis_roles) and jax.tree_util.all_leaves([axis_roles])
        roles = axis_roles(params) if is_function else axis_roles
        described = [
            _describe(found.path, x, given, stacked) if given is not _AS_DECLARED else found
            for (found, x, stacked), given in zip(described, _roles_per_array(roles, params), strict=True)
        ]
    else:
        described = [found for found, _, _ in described]
    # Of embeddings whose table is masked or frozen too: a head is a head whatever else is trained.
    vocabularies = {_names(module.Vocab) for module in _embeddings(params)}
    vocabularies |= {_output_names(found) for found in described if found.embedding} - {()}
    described = [dataclasses.replace(found, embedding=found.embedding or _output_names(found) in vocabularies) for found in described]
    return jax.tree.structure(params, is_leaf=_is_array).unflatten(described)


def map_parameters(fn: Callable[..., Any], tree: PyTree, *rest: PyTree, axis_roles: RolesOrFn | None = None) -> PyTree:
    """`jax.tree.map` over whole parameters: calls `fn(parameter, x, *xs)` with the Parameter and each tree's array or NamedArray."""
    return jax.tree.map(fn, describe(tree, axis_roles), tree, *rest)


@functools.singledispatch
def declared_axes(module: Any) -> Mapping[str, AxisRoles]:
    """What a module says of the arrays in its own fields, by field name. Register a module class of your own to teach it here.

    `declared_axes.register(MyModule, lambda m: {"kernel": matrix(inputs=-2, outputs=-1)})` declares a field that holds a
    plain array; axes that are not named, such as layers in front, stack.
    """
    del module
    return {}


@declared_axes.register
def _(module: hnn.Linear) -> Mapping[str, AxisRoles]:
    return {"weight": matrix(inputs=_names(module.In), outputs=_names(module.Out)), "bias": vector(_names(module.Out))}


@declared_axes.register
def _(module: hnn.MoELinear) -> Mapping[str, AxisRoles]:
    return {"weight": matrix(inputs=_names(module.In), outputs=_names(module.Out)), "bias": vector(_names(module.Out))}


@declared_axes.register
def _(module: hnn.Embedding) -> Mapping[str, AxisRoles]:
    # PyTorch stores a table as (vocabulary, width), the layout of the output layer that it is often tied to.
    return {"weight": matrix(inputs=_names(module.Embed), outputs=_names(module.Vocab), embedding=True)}


@declared_axes.register
def _(module: LayerNormBase) -> Mapping[str, AxisRoles]:
    return {"weight": vector(_names(module.axis)), "bias": vector(_names(module.axis))}


@declared_axes.register(Conv)
@declared_axes.register(ConvTranspose)
def _(module: Conv | ConvTranspose) -> Mapping[str, AxisRoles]:
    filters = AxisRoles("other", inputs=(*_names(module.In), *_names(tuple(module.Spatial))), outputs=_names(module.Out))
    return {"weight": filters, "bias": vector(_names(module.Out))}


@declared_axes.register
def _(module: eqx.nn.Linear) -> Mapping[str, AxisRoles]:
    return {"weight": matrix(inputs=-1, outputs=-2), "bias": vector(-1)}


@declared_axes.register(eqx.nn.GRUCell)
@declared_axes.register(eqx.nn.LSTMCell)
def _(module: eqx.nn.GRUCell | eqx.nn.LSTMCell) -> Mapping[str, AxisRoles]:
    weight = matrix(inputs=-1, outputs=-2)
    return {"weight_ih": weight, "weight_hh": weight, "bias": vector(-1), "bias_n": vector(-1)}


@declared_axes.register
def _(module: eqx.nn.Conv) -> Mapping[str, AxisRoles]:
    spatial = tuple(range(-module.num_spatial_dims, 0))
    filters = AxisRoles("other", inputs=(spatial[0] - 1, *spatial), outputs=(spatial[0] - 2,))
    return {"weight": filters, "bias": vector(tuple(range(spatial[0] - 1, 0)))}


@declared_axes.register
def _(module: eqx.nn.Embedding) -> Mapping[str, AxisRoles]:
    return {"weight": matrix(inputs=-1, outputs=-2, embedding=True)}


@declared_axes.register(eqx.nn.LayerNorm)
@declared_axes.register(eqx.nn.RMSNorm)
def _(module: eqx.nn.LayerNorm | eqx.nn.RMSNorm) -> Mapping[str, AxisRoles]:
    features = vector(tuple(range(-len(module.shape), 0)))
    return {"weight": features, "bias": features}


def _embeddings(params: PyTree) -> list[hnn.Embedding]:
    nodes = jax.tree.leaves(params, is_leaf=lambda x: isinstance(x, hnn.Embedding))
    return [node for node in nodes if isinstance(node, hnn.Embedding)]


def _output_names(parameter: Parameter) -> tuple[str, ...]:
    """The names of a matrix's output axes: of an embedding and of the head they are the vocabulary. Empty where axes have no names."""
    if parameter.kind != "matrix" or parameter.axis_names is None:
        return ()
    return tuple(parameter.axis_names[i] for i in parameter.outputs)


_Stack = tuple[str | None, int]
"""An enclosing stack of layers: its axis name (None where arrays have no names) and its size."""

_AS_DECLARED = AxisRoles("other")


def _walk(
    node: Any, path: tuple, stacked: tuple[_Stack, ...], declared: AxisRoles | None
) -> Iterator[tuple[Parameter, Any, tuple[_Stack, ...]]]:
    """Yields each array's description, the array and its enclosing stacks, in the order of `jax.tree.leaves`."""
    if _is_array(node):
        yield _describe(jax.tree_util.keystr(path, simple=True, separator="."), node, declared, stacked), node, stacked
        return
    if isinstance(node, hnn.Stacked):
        stacked += ((node.Block.name, node.Block.size),)
    elif isinstance(node, ArrayStacked):
        stacked += ((None, node.num_layers),)
    fields = declared_axes(node)
    for keys, child in jax.tree_util.tree_flatten_with_path(node, is_leaf=lambda x: x is not node)[0]:
        if not keys:
            raise TypeError(
                f"{jax.tree_util.keystr(path, simple=True, separator='.')} is a {type(node).__name__}; only arrays can be optimized"
            )
        name = jax.tree_util.keystr(keys, simple=True)
        yield from _walk(child, path + keys, stacked, fields.get(name))


def _describe(path: str, x: Any, roles: AxisRoles | None, stacked: tuple[_Stack, ...]) -> Parameter:
    if jnp.iscomplexobj(x.array if isinstance(x, hax.NamedArray) else x):
        raise TypeError(f"{path} is complex; only real arrays can be optimized")
    names = tuple(axis.name for axis in x.axes) if isinstance(x, hax.NamedArray) else None
    shape = tuple(axis.size for axis in x.axes) if isinstance(x, hax.NamedArray) else jnp.shape(x)
    roles = roles or (_roles_of_array(shape, stacked) if names is None else _roles_of_named_array(names, stacked))

    def position(ref: AxisRef) -> int:
        ref = ref.name if isinstance(ref, hax.Axis) else ref
        if isinstance(ref, str) and names is not None and ref in names:
            return names.index(ref)
        if isinstance(ref, int) and -len(shape) <= ref < len(shape):
            return ref % len(shape)
        raise ValueError(f"{path} has no axis {ref!r}; its axes are {names or tuple(range(len(shape)))}")

    inputs = tuple(map(position, roles.inputs))
    outputs = tuple(map(position, roles.outputs))
    if len(set(inputs + outputs)) < len(inputs + outputs):
        raise ValueError(f"{path}: inputs {roles.inputs} and outputs {roles.outputs} must be different axes")
    stack = tuple(i for i in range(len(shape)) if i not in inputs + outputs)
    return Parameter(path, roles.kind, shape, stack, inputs, outputs, names, roles.embedding)


def _roles_of_named_array(names: tuple[str, ...], stacked: tuple[_Stack, ...]) -> AxisRoles:
    """An array of no known module: its axes' names say nothing of inputs and outputs, so it is no matrix unless its module says so."""
    layers = {name for name, _ in stacked}
    features = tuple(name for name in names if name not in layers)
    return vector(features) if len(features) <= 1 else AxisRoles("other", outputs=features)


def _roles_of_array(shape: tuple[int, ...], stacked: tuple[_Stack, ...]) -> AxisRoles:
    """A plain array of no known module: two axes below its stacks are a matrix stored (in, out), as optax.contrib.muon has it."""
    layers = 0
    for _, size in stacked:
        # A stack shares the arrays that do not carry its axis in front (levanter.layers.stacked).
        if layers < len(shape) and shape[layers] == size:
            layers += 1
    features = tuple(range(layers, len(shape)))
    if len(features) == 2:
        return matrix(inputs=features[0], outputs=features[1])
    return vector(features) if len(features) <= 1 else AxisRoles("other", outputs=features)


def _roles_per_array(roles: PyTree, params: PyTree) -> list[AxisRoles]:
    def spread(role, subtree):
        # jax.tree.map over named parameters leaves its roles inside NamedArrays.
        role = role.array if isinstance(role, hax.NamedArray) else role
        return jax.tree.map(lambda _: role or _AS_DECLARED, subtree, is_leaf=_is_array)

    return jax.tree.leaves(jax.tree.map(spread, roles, params, is_leaf=lambda x: x is None or isinstance(x, AxisRoles | hax.NamedArray)))


def _is_array(x: Any) -> bool:
    array = x.array if isinstance(x, hax.NamedArray) else x
    return (isinstance(array, int | float | complex) and not isinstance(array, bool)) or (
        hasattr(array, "shape") and hasattr(array, "dtype")
    )


def _names(axes: hax.AxisSelector | hax.AxisSelection) -> tuple[str, ...]:
    return tuple(hax.axis_name(axis) for axis in _as_tuple(axes))


def _as_tuple(x: Any) -> tuple:
    return tuple(x) if isinstance(x, tuple | list) else (x,)
