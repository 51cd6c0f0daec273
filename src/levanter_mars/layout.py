"""Where matrices sit on the device mesh while a function of each is computed: whole, one device each, and home again.

Under FSDP no device holds a whole matrix. Left to the compiler, a function of matrices has every device gather and compute all of them.
Here every device gets its share of whole matrices in one all-to-all, computes without communication, and returns the results in another:
the least that can be sent, each device's part of the matrices once out and once back. Knows nothing of what is computed.
"""

import dataclasses
import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import groupby
from typing import Any, NamedTuple

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
from haliax.partitioning import current_thread_local_mapping, physical_axis_name
from jax._src.mesh import get_concrete_mesh  # within jit JAX has no public way to ask for devices: of which slice, with which layout
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import AxisType, PartitionSpec
from jaxtyping import Array, DTypeLike, Float, Int

from levanter_mars.packing import Share, pack
from levanter_mars.parameters import Parameter
from levanter_mars.trips import expected_trips

Sum = Callable[[Array], Array]
MatrixFunction = Callable[[Float[Array, "*batch m n"], Sum], Float[Array, "*batch m n"]]
"""A function of each matrix, m ≤ n, and of the sum over the devices that hold its other columns: the identity where none do.

It must commute with permutations of rows and columns and keep zero rows and columns zero, as functions of singular values do."""


class Work(NamedTuple):
    flops: float
    """Of the function, for one matrix or one device's columns of it."""
    summed: float
    """How many numbers of the matrix it sums over devices where columns are split."""


Cost = Callable[[int, int, int], Work]
"""The work on each of `split` devices for an m × n matrix: cost(m, n, split)."""

_FLOPS_PER_BYTE = 2000
"""Of a chip against the links between chips: v5e 197 TFLOP/s to the 100 GB/s of two of its four links, along one axis of the
torus, H100 990 TFLOP/s to 450 GB/s. It only decides over how many chips a matrix is split where there are more chips than matrices."""


def map_matrices(
    function: MatrixFunction, cost: Cost, parameters: Sequence[Parameter], arrays: Sequence[Any], dtype: DTypeLike
) -> list[Any] | None:
    """`function` of every matrix of `arrays`, which lie on the mesh of the context as its axis mapping, or their explicit sharding, says.

    Args:
        function: see MatrixFunction.
        cost: see Cost.
        parameters: what each array is; all are matrices or stacks of them.
        arrays: arrays or NamedArrays, of which some may be cut over devices in any of their axes.
        dtype: in which matrices are sent and given to the function.

    Returns:
        The results in the form and the sharding of `arrays`, in `dtype`. None where there is nothing to lay out: on one device, or
        where it is not known how some array lies on the mesh, or one is empty.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1 or AxisType.Manual in mesh.axis_types or not arrays or any(0 in p.shape for p in parameters):
        return None
    axes = [names for x in arrays if (names := _mesh_axes(x, mesh)) is not None]
    if len(axes) < len(arrays):
        return None
    slow = _slow_axes()
    placed = [_place(parameter, names, mesh, slow) for parameter, names in zip(parameters, axes, strict=True)]
    together = {spread: [i for i, p in enumerate(placed) if p.spread == spread] for spread in dict.fromkeys(p.spread for p in placed)}
    groups = {
        spread: _Group.plan([placed[i] for i in mine], spread, mesh, cost, jnp.dtype(dtype).itemsize) for spread, mine in together.items()
    }

    def on_each_device(*local: Array) -> tuple[Array, ...]:
        stored = [_stored_as(x) for x in local]
        blocks = [p.to_blocks(as_stored(x.astype(dtype))) for p, x, as_stored in zip(placed, local, stored, strict=True)]
        results: list[Any] = [None] * len(blocks)
        for spread, mine in together.items():
            for i, result in zip(mine, groups[spread].run(function, [blocks[i] for i in mine]), strict=True):
                results[i] = result
        home = [p.from_blocks(result, x.shape) for p, result, x in zip(placed, results, local, strict=True)]
        return tuple(as_stored(x) for x, as_stored in zip(home, stored, strict=True))

    raw = [x.array if isinstance(x, hax.NamedArray) else x for x in arrays]
    specs = tuple(PartitionSpec(*names) for names in axes)
    results = jax.shard_map(on_each_device, in_specs=specs, out_specs=specs, check_vma=False)(*raw)
    return [dataclasses.replace(x, array=y) if isinstance(x, hax.NamedArray) else y for x, y in zip(arrays, results, strict=True)]


def _mesh_axes(x: Any, mesh) -> tuple[tuple[str, ...], ...] | None:
    """The axes of the mesh that cut each axis of `x`; None if nobody says, as of plain arrays where the compiler handles the mesh."""
    array = x.array if isinstance(x, hax.NamedArray) else x
    if all(kind == AxisType.Explicit for kind in mesh.axis_types):
        entries = [None if entry is PartitionSpec.UNCONSTRAINED else entry for entry in jax.typeof(array).sharding.spec]
        entries += [None] * (array.ndim - len(entries))
    elif isinstance(x, hax.NamedArray) and current_thread_local_mapping() is not None:
        entries = [physical_axis_name(axis) for axis in x.axes]
    else:
        return None
    axes = [tuple(name for name in _as_tuple(entry) if mesh.shape.get(name, 1) > 1) for entry in entries]
    # The compiler pads an axis that does not divide. Here it is gathered.
    return tuple(names if array.shape[i] % _size(mesh.shape, names) == 0 else () for i, names in enumerate(axes))


class Cut(NamedTuple):
    """What one device holds of a matrix: `short` × `long` numbers, which `short_axes` and `long_axes` of the mesh multiply."""

    short_axes: tuple[str, ...]
    long_axes: tuple[str, ...]
    short: int
    long: int


@dataclass(frozen=True)
class _Placed:
    parameter: Parameter
    cut: Cut
    stack_axes: tuple[str, ...]
    spread: tuple[str, ...]
    """The axes over which whole matrices are spread: those that cut them, and those along which devices hold the same, unless slow.

    Axes that cut the stack, such as that of experts, already spread it. Copies in other slices of the machine compute the same: that takes
    less than to wait for the network between slices.
    """
    order: tuple[int, ...]
    """The array's axes: stack, short side, long side."""

    def to_blocks(self, local: Array) -> Float[Array, "k short long"]:
        return local.transpose(self.order).reshape(-1, self.cut.short, self.cut.long)

    def from_blocks(self, blocks: Array, shape: tuple[int, ...]) -> Array:
        array = blocks.reshape([shape[i] for i in self.order])
        return array.transpose([self.order.index(i) for i in range(len(shape))])


def _place(parameter: Parameter, names: tuple[tuple[str, ...], ...], mesh, slow: frozenset[str]) -> _Placed:
    fan_out, fan_in = parameter.tensor_shape
    sides = [parameter.outputs, parameter.inputs]
    # Of a square matrix the side that is cut goes first, where the parts of one matrix come to stand below one another.
    if fan_in < fan_out or (fan_in == fan_out and any(names[i] for i in parameter.inputs)):
        sides.reverse()
    short_axes, long_axes, stack_axes = (tuple(name for i in side for name in names[i]) for side in (*sides, parameter.stack))
    short, long = (math.prod(parameter.shape[i] // _size(mesh.shape, names[i]) for i in side) for side in sides)
    elsewhere = {*stack_axes, *(slow - {*short_axes, *long_axes})}
    spread = tuple(name for name, size in mesh.shape.items() if size > 1 and name not in elsewhere)
    return _Placed(parameter, Cut(short_axes, long_axes, short, long), stack_axes, spread, parameter.stack + sides[0] + sides[1])


class _Place(NamedTuple):
    """Where the matrices of one cut are on a device."""

    buffer: int
    """Index of the received buffer."""
    start: int
    """Its column in which they begin."""
    n: int
    """How many they are."""


@dataclass(frozen=True)
class _Group:
    """Matrices that are spread over the same axes of the mesh, and how."""

    axes: tuple[str, ...]
    sizes: dict[str, int]
    """Of all axes of the mesh."""
    cuts: list[Cut]
    members: list[int]
    """The index in `cuts` of every array."""
    split: int
    """How many devices share a matrix; 1 but where there are more devices than matrices."""
    shares: list[Share]
    """How many matrices of each cut every group of `split` devices gets."""
    fullest: Share
    """That which takes longest."""

    @staticmethod
    def plan(placed: list[_Placed], axes: tuple[str, ...], mesh, cost: Cost, itemsize: int) -> "_Group":
        cuts = list(dict.fromkeys(p.cut for p in placed))
        counts = [0] * len(cuts)
        for p in placed:
            counts[cuts.index(p.cut)] += math.prod(p.parameter.stack_shape) // _size(mesh.shape, p.stack_axes)
        devices = _size(mesh.shape, axes)
        shapes = [(c.short * _size(mesh.shape, c.short_axes), c.long * _size(mesh.shape, c.long_axes)) for c in cuts]

        def slowest(split: int) -> float:
            work = [cost(m, n, split) for m, n in shapes]
            sent = [2 * (split - 1) / split * w.summed * itemsize for w in work]
            return max(w.flops + _FLOPS_PER_BYTE * bytes for w, bytes in zip(work, sent, strict=True))

        splits = [s for s in range(2, devices + 1) if devices % s == 0 and sum(counts) * s <= devices]
        split = min([1, *splits], key=slowest)
        flops = [cost(m, n, 1).flops for m, n in shapes]
        if split == 1:
            shares = pack(flops, counts, devices)
        else:  # a group computes one matrix, all groups in step, and there are as many groups
            shares = [tuple(int(i == cut) for i in range(len(cuts))) for cut, n in enumerate(counts) for _ in range(n)]
            shares += [(0,) * len(cuts)] * (devices // split - len(shares))
        fullest = max(shares, key=lambda share: sum(map(operator.mul, share, flops)))
        return _Group(axes, dict(mesh.shape), cuts, [cuts.index(p.cut) for p in placed], split, shares, fullest)

    def run(self, function: MatrixFunction, blocks: list[Array]) -> list[Array]:
        """From every array's blocks on this device to those of the results."""
        counts = [len(x) for x in blocks]
        by_cut = [jnp.concatenate([x for x, i in zip(blocks, self.members, strict=True) if i == cut]) for cut in range(len(self.cuts))]
        received = [self._send(axes, by_cut) for axes in self._exchanges]
        me = jax.lax.axis_index(self.axes) // self.split
        computed = self._compute(function, me, received) if self.split == 1 else self._compute_split(function, me, received)
        home: dict[int, Array] = {}
        for axes, buffer in zip(self._exchanges, computed, strict=True):
            home |= self._return(axes, buffer)
        taken = [0] * len(self.cuts)
        results = []
        for count, cut in zip(counts, self.members, strict=True):
            results.append(home[cut][taken[cut] : taken[cut] + count])
            taken[cut] += count
        return results

    def _compute(self, function: MatrixFunction, me: Int[Array, ""], received: list[Array]) -> list[Array]:
        """One matrix after the other, each written over itself, so that little memory is needed beside them.

        Every device looks up where its matrices of a cut begin and how many they are. Given a branch for every kind of share instead, the
        TPU compiler copies the buffers before it, and the program holds the function once for each.
        """
        received = list(received)
        places = [self._places(share) for share in self.shares]
        for i, cut in enumerate(self.cuts):
            where = places[0][i].buffer
            start = jnp.array([place[i].start for place in places])[me]
            counts = [place[i].n for place in places]
            n = counts[0] if len(set(counts)) == 1 else jnp.array(counts)[me]

            def compute(j: Array, buffer: Array, cut=cut, start=start) -> Array:
                at = start + j * self._part(cut)
                rows = jax.lax.dynamic_slice_in_dim(buffer, at, self._part(cut), axis=1)
                result = function(self._assemble(cut, rows), lambda part: part)
                return jax.lax.dynamic_update_slice_in_dim(buffer, self._take_apart(cut, result), at, axis=1)

            with expected_trips(self.fullest[i]):
                received[where] = jax.lax.fori_loop(0, n, compute, received[where])
        return received

    def _compute_split(self, function: MatrixFunction, me: Int[Array, ""], received: list[Array]) -> list[Array]:
        """One matrix, or none, for a group of devices, each of which has some of the columns.

        All groups take part in every sum, so all compute on one shape: smaller matrices are padded with zeros.
        """
        widest = (max(map(self._rows, self.cuts)), max(map(self._columns, self.cuts)))

        def padded(share: Share, received: list[Array]) -> Array:
            for cut, (buffer, start, n) in zip(self.cuts, self._places(share), strict=True):
                if not n:
                    continue
                x = self._assemble(cut, received[buffer][:, start : start + self._part(cut)])
                return jnp.pad(x, [(0, full - size) for full, size in zip(widest, x.shape, strict=True)])
            return jnp.zeros(widest, received[0].dtype)

        def cropped(share: Share, result: Array, received: list[Array]) -> list[Array]:
            received = list(received)
            for cut, (buffer, start, n) in zip(self.cuts, self._places(share), strict=True):
                if n:
                    rows = self._take_apart(cut, result[: self._rows(cut), : self._columns(cut)])
                    received[buffer] = jax.lax.dynamic_update_slice_in_dim(received[buffer], rows, start, axis=1)
            return received

        devices = self.split * len(self.shares)
        groups = [list(range(first, first + self.split)) for first in range(0, devices, self.split)]
        kinds = list(dict.fromkeys(self.shares))
        kind = jnp.array([kinds.index(share) for share in self.shares])[me]
        x = jax.lax.switch(kind, [partial(padded, share) for share in kinds], received)
        result = function(x, lambda part: jax.lax.psum(part, self.axes, axis_index_groups=groups))
        return jax.lax.switch(kind, [partial(cropped, share) for share in kinds], result, received)

    @cached_property
    def _exchanges(self) -> list[tuple[str, ...]]:
        """The axes along which matrices are exchanged: one buffer is sent and received for each."""
        return list(dict.fromkeys(map(self._exchange_axes, self.cuts)))

    def _places(self, share: Share) -> list[_Place]:
        """Of the matrices of a share, for every cut."""
        start = [0] * len(self._exchanges)
        places = []
        for n, cut in zip(share, self.cuts, strict=True):
            buffer = self._exchanges.index(self._exchange_axes(cut))
            places.append(_Place(buffer, start[buffer], n))
            start[buffer] += n * self._part(cut)
        return places

    def _exchange_axes(self, cut: Cut) -> tuple[str, ...]:
        return tuple(name for name in self.axes if name in cut.short_axes + cut.long_axes)

    def _copies(self, axes: tuple[str, ...]) -> tuple[str, ...]:
        """The other axes: along them devices hold the same of what `axes` cut."""
        return tuple(name for name in self.axes if name not in axes)

    def _part_columns(self, cut: Cut) -> int:
        """Columns of one device's block that one device of a group gets."""
        return -(-cut.long // self.split)

    def _part(self, cut: Cut) -> int:
        """Numbers in them."""
        return cut.short * self._part_columns(cut)

    def _rows(self, cut: Cut) -> int:
        return cut.short * _size(self.sizes, cut.short_axes)

    def _columns(self, cut: Cut) -> int:
        return self._part_columns(cut) * _size(self.sizes, cut.long_axes)

    def _width(self, axes: tuple[str, ...]) -> int:
        """Numbers that the busiest device gets from each of the devices along `axes`."""
        parts = [self._part(cut) if self._exchange_axes(cut) == axes else 0 for cut in self.cuts]
        return max(sum(n * part for n, part in zip(share, parts, strict=True)) for share in self.shares)

    def _send(self, axes: tuple[str, ...], by_cut: list[Array]) -> Float[Array, "sources width"]:
        """Every device's share of the matrices that `axes` cut, of which it gets one row from each of the devices along them."""
        width, taken, rows = self._width(axes), [0] * len(self.cuts), []
        for share, bins in _runs(self.shares):
            parts = []
            for i, (n, cut) in enumerate(zip(share, self.cuts, strict=True)):
                if n and self._exchange_axes(cut) == axes:
                    blocks = by_cut[i][taken[i] : taken[i] + bins * n]
                    taken[i] += bins * n
                    columns = self._part_columns(cut)
                    blocks = jnp.pad(blocks, [(0, 0), (0, 0), (0, columns * self.split - cut.long)])
                    blocks = blocks.reshape(bins, n, cut.short, self.split, columns).transpose(0, 3, 1, 2, 4)
                    parts.append(blocks.reshape(bins, self.split, -1))
            row = jnp.concatenate([jnp.zeros((bins, self.split, 0), by_cut[0].dtype), *parts], axis=-1)
            rows.append(jnp.pad(row, [(0, 0), (0, 0), (0, width - row.shape[-1])]))
        outgoing = jnp.concatenate(rows).reshape(-1, width)
        copies = self._copies(axes)
        if copies:  # devices that hold the same each send to one part of the devices
            order = [self.axes.index(name) for name in copies + axes]
            outgoing = outgoing.reshape([self.sizes[name] for name in self.axes] + [width]).transpose([*order, len(order)])
            outgoing = outgoing.reshape(_size(self.sizes, copies), -1, width)[jax.lax.axis_index(copies)]
        return jax.lax.all_to_all(outgoing, axes, 0, 0, tiled=True) if axes else outgoing

    def _return(self, axes: tuple[str, ...], computed: Array) -> dict[int, Array]:
        """The way back: the blocks of the matrices that `axes` cut, by the index of their cut."""
        width = computed.shape[-1]
        home = jax.lax.all_to_all(computed, axes, 0, 0, tiled=True) if axes else computed
        copies = self._copies(axes)
        if copies:
            home = jax.lax.all_gather(home, copies, axis=0)
            order = [(copies + axes).index(name) for name in self.axes]
            home = home.reshape([self.sizes[name] for name in copies + axes] + [width]).transpose([*order, len(order)])
        home = home.reshape(len(self.shares), self.split, width)
        first, found = 0, {i: [] for i, cut in enumerate(self.cuts) if self._exchange_axes(cut) == axes}
        for share, bins in _runs(self.shares):
            start = 0
            for i in found:
                cut, size = self.cuts[i], share[i] * self._part(self.cuts[i])
                blocks = home[first : first + bins, :, start : start + size]
                start += size
                columns = self._part_columns(cut)
                blocks = blocks.reshape(bins, self.split, share[i], cut.short, columns).transpose(0, 2, 3, 1, 4)
                found[i].append(blocks.reshape(-1, cut.short, self.split * columns)[..., : cut.long])
            first += bins
        return {i: jnp.concatenate(blocks) for i, blocks in found.items()}

    def _assemble(self, cut: Cut, rows: Float[Array, "sources part"]) -> Float[Array, "m n"]:
        sources = [self.sizes[name] for name in self._exchange_axes(cut)]
        return rows.reshape(*sources, cut.short, -1).transpose(self._order(cut)).reshape(self._rows(cut), -1)

    def _take_apart(self, cut: Cut, matrix: Float[Array, "m n"]) -> Float[Array, "sources part"]:
        order = self._order(cut)
        sizes = [self.sizes[name] for name in self._exchange_axes(cut)] + [cut.short, self._part_columns(cut)]
        matrix = matrix.reshape([sizes[i] for i in order]).transpose([order.index(i) for i in range(len(order))])
        return matrix.reshape(-1, self._part(cut))

    def _order(self, cut: Cut) -> tuple[int, ...]:
        """From (exchange axes, short, long) to (short's axes, short, long's axes, long)."""
        axes = self._exchange_axes(cut)
        return (*map(axes.index, cut.short_axes), len(axes), *map(axes.index, cut.long_axes), len(axes) + 1)


def _runs(shares: list[Share]) -> Iterator[tuple[Share, int]]:
    return ((share, len(list(same))) for share, same in groupby(shares))


def _size(sizes: Mapping[str, int], axes: Sequence[str]) -> int:
    return math.prod(sizes[name] for name in axes)


def _as_tuple(entry: Any) -> tuple[str, ...]:
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def _slow_axes() -> frozenset[str]:
    mesh = get_concrete_mesh()
    return frozenset() if mesh is None or mesh.empty else axes_between_slices(mesh)


def _stored_as(x: Array) -> Callable[[Array], Array]:
    """Orders the axes of another array of this shape in memory as the device does those of a stored `x`.

    A TPU pads the two axes that it stores last, and so picks others for them than the last two where that saves memory. Rows that are
    sent have an order of their own, and left alone the compiler may carry it over to all that is computed from them or for them: of
    GPT-2 XL on 64 chips, copies of momenta and parameters in float32, half of them padding, in place of one of bfloat16.
    """
    mesh = get_concrete_mesh()
    if mesh is None or mesh.empty:
        return lambda x: x
    device = mesh.devices.flat[0]
    order = Layout.from_pjrt_layout(device.client.get_default_layout(x.dtype, x.shape, device)).major_to_minor
    if order == tuple(range(x.ndim)):  # as CPUs and GPUs always store
        return lambda x: x
    return lambda x: with_layout_constraint(x, Layout(order))


def axes_between_slices(mesh: jax.sharding.Mesh) -> frozenset[str]:
    """The axes of a mesh along which devices belong to different slices: TPU slices, or hosts of GPUs, as JAX numbers them."""
    slices = np.array([getattr(device, "slice_index", 0) for device in mesh.devices.flat]).reshape(mesh.devices.shape)
    return frozenset(name for i, name in enumerate(mesh.axis_names) if (slices != slices.take([0], axis=i)).any())
