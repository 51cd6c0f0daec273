"""Where matrices sit on the device mesh while a function of each is computed: whole, one device each, and home again.

Under FSDP no device holds a whole matrix. Left to the compiler, a function of matrices has every device gather and compute all of them.
Here every device gets its share of whole matrices in one all-to-all, computes without communication, and returns the results in another:
the least that can be sent, each device's part of the matrices once out and once back. Knows nothing of what is computed.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
from haliax.partitioning import current_thread_local_mapping, physical_axis_name
from jax._src.mesh import get_concrete_mesh  # within jit JAX has no public way to ask which slice a device belongs to
from jax.sharding import AxisType, PartitionSpec
from jaxtyping import Array, DTypeLike, Float

from levanter_mars.packing import Share, pack
from levanter_mars.parameters import Parameter

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
"""Of a chip against the links between chips: v5e 197 TFLOP/s to 100 GB/s each way, H100 990 TFLOP/s to 450 GB/s. It only decides over how
many chips a matrix is split where there are more chips than matrices."""


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
    placed = [_place(parameter, names, mesh) for parameter, names in zip(parameters, axes, strict=True)]
    groups = [
        _Group.plan([p for p in placed if p.spread_axes(mesh) == spread], spread, mesh, cost, jnp.dtype(dtype).itemsize)
        for spread in dict.fromkeys(p.spread_axes(mesh) for p in placed)
    ]

    def on_each_device(*local: Array) -> tuple[Array, ...]:
        blocks = [p.to_blocks(x.astype(dtype)) for p, x in zip(placed, local, strict=True)]
        results: list[Any] = [None] * len(blocks)
        for group in groups:
            mine = [i for i, p in enumerate(placed) if p.spread_axes(mesh) == group.axes]
            for i, result in zip(mine, group.run(function, [blocks[i] for i in mine]), strict=True):
                results[i] = result
        return tuple(p.from_blocks(result, x.shape) for p, result, x in zip(placed, results, local, strict=True))

    raw = [x.array if isinstance(x, hax.NamedArray) else x for x in arrays]
    specs = tuple(PartitionSpec(*names) for names in axes)
    results = jax.shard_map(on_each_device, in_specs=specs, out_specs=specs, check_vma=False)(*raw)
    return [hax.NamedArray(y, x.axis_names) if isinstance(x, hax.NamedArray) else y for x, y in zip(arrays, results, strict=True)]


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
    return tuple(names if array.shape[i] % _size(mesh, names) == 0 else () for i, names in enumerate(axes))


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
    order: tuple[int, ...]
    """The array's axes: stack, short side, long side."""

    def spread_axes(self, mesh) -> tuple[str, ...]:
        """The axes over which whole matrices are spread: those that cut them, and those along which devices hold the same, unless slow.

        Axes that cut the stack, such as that of experts, already spread it. Copies in other slices of the machine compute the same:
        that takes less than to wait for the network between slices.
        """
        cutting = self.cut.short_axes + self.cut.long_axes
        slow = _slow_axes()
        return tuple(
            name for name, size in mesh.shape.items() if size > 1 and name not in self.stack_axes and (name in cutting or name not in slow)
        )

    def to_blocks(self, local: Array) -> Float[Array, "k short long"]:
        return local.transpose(self.order).reshape(-1, self.cut.short, self.cut.long)

    def from_blocks(self, blocks: Array, shape: tuple[int, ...]) -> Array:
        array = blocks.reshape([shape[i] for i in self.order])
        return array.transpose([self.order.index(i) for i in range(len(shape))])


def _place(parameter: Parameter, names: tuple[tuple[str, ...], ...], mesh) -> _Placed:
    fan_out, fan_in = parameter.tensor_shape
    sides = [parameter.outputs, parameter.inputs]
    # Of a square matrix the side that is cut goes first, where the parts of one matrix come to stand below one another.
    if fan_in < fan_out or (fan_in == fan_out and any(names[i] for i in parameter.inputs)):
        sides.reverse()
    axes = [tuple(name for i in side for name in names[i]) for side in (*sides, parameter.stack)]
    short, long = (math.prod(parameter.shape[i] // _size(mesh, names[i]) for i in side) for side in sides)
    return _Placed(parameter, Cut(axes[0], axes[1], short, long), axes[2], parameter.stack + sides[0] + sides[1])


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

    @staticmethod
    def plan(placed: list[_Placed], axes: tuple[str, ...], mesh, cost: Cost, itemsize: int) -> "_Group":
        cuts = list(dict.fromkeys(p.cut for p in placed))
        counts = [0] * len(cuts)
        for p in placed:
            counts[cuts.index(p.cut)] += math.prod(p.parameter.stack_shape) // _size(mesh, p.stack_axes)
        devices = _size(mesh, axes)
        shapes = [(c.short * _size(mesh, c.short_axes), c.long * _size(mesh, c.long_axes)) for c in cuts]

        def slowest(split: int) -> float:
            work = [cost(m, n, split) for m, n in shapes]
            sent = [2 * (split - 1) / split * w.summed * itemsize for w in work]
            return max(w.flops + _FLOPS_PER_BYTE * bytes for w, bytes in zip(work, sent, strict=True))

        splits = [s for s in range(2, devices + 1) if devices % s == 0 and sum(counts) * s <= devices]
        split = min([1, *splits], key=slowest)
        shares = pack([cost(m, n, 1).flops for m, n in shapes], counts, devices // split)
        return _Group(axes, dict(mesh.shape), cuts, [cuts.index(p.cut) for p in placed], split, shares)

    def run(self, function: MatrixFunction, blocks: list[Array]) -> list[Array]:
        """From every array's blocks on this device to those of the results."""
        counts = [len(x) for x in blocks]
        by_cut = [jnp.concatenate([x for x, i in zip(blocks, self.members, strict=True) if i == cut]) for cut in range(len(self.cuts))]
        exchanges = list(dict.fromkeys(map(self._exchange_axes, self.cuts)))
        received = [self._send(axes, by_cut) for axes in exchanges]
        kinds = list(dict.fromkeys(self.shares))
        kind = jnp.array([kinds.index(share) for share in self.shares])[jax.lax.axis_index(self.axes) // self.split]
        if self.split == 1:
            computed = jax.lax.switch(kind, [partial(self._compute, function, exchanges, share) for share in kinds], received)
        else:
            computed = self._compute_split(function, exchanges, kind, kinds, received)
        home: dict[int, Array] = {}
        for axes, buffer in zip(exchanges, computed, strict=True):
            home |= self._return(axes, buffer)
        taken = [0] * len(self.cuts)
        results = []
        for count, cut in zip(counts, self.members, strict=True):
            results.append(home[cut][taken[cut] : taken[cut] + count])
            taken[cut] += count
        return results

    def _compute(self, function: MatrixFunction, exchanges: list[tuple[str, ...]], share: Share, received: list[Array]) -> list[Array]:
        """One matrix after the other, each written over itself, so that little memory is needed beside them."""
        received = list(received)
        for where, cut, start, n in self._places(exchanges, share):

            def compute(i: Array, buffer: Array, cut=cut, start=start) -> Array:
                at = start + i * self._part(cut)
                rows = jax.lax.dynamic_slice_in_dim(buffer, at, self._part(cut), axis=1)
                result = function(self._assemble(cut, rows), lambda part: part)
                return jax.lax.dynamic_update_slice_in_dim(buffer, self._take_apart(cut, result), at, axis=1)

            received[where] = jax.lax.fori_loop(0, n, compute, received[where])
        return received

    def _compute_split(self, function: MatrixFunction, exchanges, kind: Array, kinds: list[Share], received: list[Array]) -> list[Array]:
        """One matrix, or none, for a group of devices, each of which has some of the columns.

        All groups take part in every sum, so all compute on one shape: smaller matrices are padded with zeros.
        """
        widest = (max(map(self._rows, self.cuts)), max(map(self._columns, self.cuts)))

        def padded(share: Share, received: list[Array]) -> Array:
            for where, cut, start, _ in self._places(exchanges, share):
                x = self._assemble(cut, received[where][:, start : start + self._part(cut)])
                return jnp.pad(x, [(0, full - size) for full, size in zip(widest, x.shape, strict=True)])
            return jnp.zeros(widest, received[0].dtype)

        def cropped(share: Share, result: Array, received: list[Array]) -> list[Array]:
            received = list(received)
            for where, cut, start, _ in self._places(exchanges, share):
                rows = self._take_apart(cut, result[: self._rows(cut), : self._columns(cut)])
                received[where] = jax.lax.dynamic_update_slice_in_dim(received[where], rows, start, axis=1)
            return received

        devices = self.split * len(self.shares)
        groups = [list(range(first, first + self.split)) for first in range(0, devices, self.split)]
        x = jax.lax.switch(kind, [partial(padded, share) for share in kinds], received)
        result = function(x, lambda part: jax.lax.psum(part, self.axes, axis_index_groups=groups))
        return jax.lax.switch(kind, [partial(cropped, share) for share in kinds], result, received)

    def _places(self, exchanges: list[tuple[str, ...]], share: Share) -> Iterator[tuple[int, Cut, int, int]]:
        """Where the matrices of a share are: in which of the received buffers, of which cut, from which column on, and how many."""
        start = [0] * len(exchanges)
        for n, cut in zip(share, self.cuts, strict=True):
            where = exchanges.index(self._exchange_axes(cut))
            if n:
                yield where, cut, start[where], n
            start[where] += n * self._part(cut)

    def _exchange_axes(self, cut: Cut) -> tuple[str, ...]:
        return tuple(name for name in self.axes if name in cut.short_axes + cut.long_axes)

    def _part(self, cut: Cut) -> int:
        """Numbers of one device's block that one device of a group gets: some of its columns."""
        return cut.short * -(-cut.long // self.split)

    def _rows(self, cut: Cut) -> int:
        return cut.short * _size(self, cut.short_axes)

    def _columns(self, cut: Cut) -> int:
        return -(-cut.long // self.split) * _size(self, cut.long_axes)

    def _width(self, axes: tuple[str, ...]) -> int:
        """Numbers that the busiest device gets from each of the devices along `axes`."""
        return max(sum(n * self._part(cut) for n, cut in self._along(axes, share)) for share in self.shares)

    def _along(self, axes: tuple[str, ...], share: Share) -> Iterator[tuple[int, Cut]]:
        return ((n, cut) for n, cut in zip(share, self.cuts, strict=True) if self._exchange_axes(cut) == axes)

    def _send(self, axes: tuple[str, ...], by_cut: list[Array]) -> Float[Array, "sources width"]:
        """Every device's share of the matrices that `axes` cut, of which it gets one row from each of the devices along them."""
        width, taken, rows = self._width(axes), [0] * len(self.cuts), []
        for share, bins in _runs(self.shares):
            parts = []
            for i, (n, cut) in enumerate(zip(share, self.cuts, strict=True)):
                if n and self._exchange_axes(cut) == axes:
                    blocks = by_cut[i][taken[i] : taken[i] + bins * n]
                    taken[i] += bins * n
                    columns = -(-cut.long // self.split)
                    blocks = jnp.pad(blocks, [(0, 0), (0, 0), (0, columns * self.split - cut.long)])
                    blocks = blocks.reshape(bins, n, cut.short, self.split, columns).transpose(0, 3, 1, 2, 4)
                    parts.append(blocks.reshape(bins, self.split, -1))
            row = jnp.concatenate([jnp.zeros((bins, self.split, 0), by_cut[0].dtype), *parts], axis=-1)
            rows.append(jnp.pad(row, [(0, 0), (0, 0), (0, width - row.shape[-1])]))
        outgoing = jnp.concatenate(rows).reshape(-1, width)
        copies = tuple(name for name in self.axes if name not in axes)
        if copies:  # devices that hold the same each send to one part of the devices
            order = [self.axes.index(name) for name in copies + axes]
            outgoing = outgoing.reshape([self.sizes[name] for name in self.axes] + [width]).transpose([*order, len(order)])
            outgoing = outgoing.reshape(_size(self, copies), -1, width)[jax.lax.axis_index(copies)]
        return jax.lax.all_to_all(outgoing, axes, 0, 0, tiled=True) if axes else outgoing

    def _return(self, axes: tuple[str, ...], computed: Array) -> dict[int, Array]:
        """The way back: the blocks of the matrices that `axes` cut, by the index of their cut."""
        width = computed.shape[-1]
        home = jax.lax.all_to_all(computed, axes, 0, 0, tiled=True) if axes else computed
        copies = tuple(name for name in self.axes if name not in axes)
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
                columns = -(-cut.long // self.split)
                blocks = blocks.reshape(bins, self.split, share[i], cut.short, columns).transpose(0, 2, 3, 1, 4)
                found[i].append(blocks.reshape(-1, cut.short, self.split * columns)[..., : cut.long])
            first += bins
        return {i: jnp.concatenate(blocks) for i, blocks in found.items()}

    def _assemble(self, cut: Cut, rows: Float[Array, "sources part"]) -> Float[Array, "m n"]:
        sources = [self.sizes[name] for name in self._exchange_axes(cut)]
        return rows.reshape(*sources, cut.short, -1).transpose(self._order(cut)).reshape(self._rows(cut), -1)

    def _take_apart(self, cut: Cut, matrix: Float[Array, "m n"]) -> Float[Array, "sources part"]:
        order = self._order(cut)
        sizes = [self.sizes[name] for name in self._exchange_axes(cut)] + [cut.short, -(-cut.long // self.split)]
        matrix = matrix.reshape([sizes[i] for i in order]).transpose([order.index(i) for i in range(len(order))])
        return matrix.reshape(-1, self._part(cut))

    def _order(self, cut: Cut) -> tuple[int, ...]:
        """From (exchange axes, short, long) to (short's axes, short, long's axes, long)."""
        axes = self._exchange_axes(cut)
        return (*map(axes.index, cut.short_axes), len(axes), *map(axes.index, cut.long_axes), len(axes) + 1)


def _runs(shares: list[Share]) -> Iterator[tuple[Share, int]]:
    return ((share, len(list(same))) for share, same in groupby(shares))


def _size(mesh: Any, axes: Sequence[str]) -> int:
    shape = mesh.sizes if isinstance(mesh, _Group) else mesh.shape
    return math.prod(shape[name] for name in axes)


def _as_tuple(entry: Any) -> tuple[str, ...]:
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def _slow_axes() -> frozenset[str]:
    mesh = get_concrete_mesh()
    return frozenset() if mesh is None or mesh.empty else axes_between_slices(mesh)


def axes_between_slices(mesh: jax.sharding.Mesh) -> frozenset[str]:
    """The axes of a mesh along which devices belong to different slices: TPU slices, or hosts of GPUs, as JAX numbers them."""
    slices = np.array([getattr(device, "slice_index", 0) for device in mesh.devices.flat]).reshape(mesh.devices.shape)
    return frozenset(name for i, name in enumerate(mesh.axis_names) if (slices != slices.take([0], axis=i)).any())
