"""Counts what a compiled program does on one device: FLOPs of matrix products, memory traffic, collectives.

XLA's own cost analysis counts a loop's body once; here a body counts as often as its loop runs. The text form of the program
(`jax.stages.Compiled.as_text`) is read because the device-independent API has nothing between that text and one total.
"""

import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from levanter_mars.trips import trips_in

Phase = Literal["forward/backward", "optimizer"]
PHASES: tuple[Phase, ...] = ("forward/backward", "optimizer")
COLLECTIVES = (
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "all-to-all",
    "collective-permute",
    "ragged-all-to-all",
    "collective-broadcast",
)

BYTES = {"pred": 1, "s4": 0.5, "u4": 0.5, "s8": 1, "u8": 1, "s16": 2, "u16": 2, "f16": 2, "bf16": 2, "s32": 4, "u32": 4, "f32": 4}
BYTES |= {"s64": 8, "u64": 8, "f64": 8, "c64": 8, "c128": 16}


class Quantity(NamedTuple):
    """What is counted: flops of matrix products, bytes through the device's memory, and count, payload and sent of collectives."""

    what: Literal["flops", "bytes", "count", "payload", "sent"]
    phase: Phase | None
    """None for bytes: the compiler fuses and moves data across phases."""
    kind: str = ""


class Totals(defaultdict[Quantity, float]):
    """Quantities that were not counted are 0."""

    def __init__(self):
        super().__init__(float)

    def add(self, other: Mapping[Quantity, float], times: int = 1) -> None:
        for quantity, value in other.items():
            self[quantity] += value * times


@dataclass
class Program:
    """What one execution does on one device.

    `payload` is the size of a collective's larger side, its result or for a reduce-scatter its operand. `sent` is what a device puts on
    its links for it in a ring: (n-1)/n of the payload among n devices, twice that for an all-reduce, all of it for a permute.
    """

    totals: Totals
    notes: list[str] = field(default_factory=list)
    """What could not be counted."""

    def total(self, what: str, phase: Phase | None = None, kind: str | None = None) -> float:
        return sum(
            value
            for quantity, value in self.totals.items()
            if quantity.what == what and phase in (None, quantity.phase) and kind in (None, quantity.kind)
        )


def count(text: str, optimizer_scope: str) -> Program:
    """Counts the program `text`. Instructions under the named scope `optimizer_scope` are the optimizer's, all others forward/backward."""
    counter = _Counter(_parse(text), optimizer_scope, _devices(text))
    return Program(counter.of(counter.entry), sorted(counter.notes))


class Shape(NamedTuple):
    dtype: str
    dims: tuple[int, ...]
    in_main_memory: bool

    @property
    def bytes(self) -> float:
        return BYTES.get(self.dtype, 1) * math.prod(self.dims)


@dataclass(frozen=True)
class Instruction:
    name: str
    result: list[Shape]
    opcode: str
    operands: list[str]
    attributes: str
    is_root: bool
    literal: str
    """What stands between the parentheses: a constant's value, a parameter's number."""

    def called(self, attribute: str) -> list[str]:
        found = re.search(rf"\b{attribute}=(\{{[^}}]*\}}|%[\w.\-]+)", self.attributes)
        return re.findall(r"%([\w.\-]+)", found[1]) if found else []

    @property
    def bytes(self) -> float:
        return sum(shape.bytes for shape in self.result if shape.in_main_memory)


Computation = dict[str, Instruction]

_INSTRUCTION = re.compile(r"^\s+(ROOT )?%([\w.\-]+) = (\(.*?\)|\S+) ([\w\-]+)\((.*)$")
_SHAPE = re.compile(r"\b([a-z]+\d*(?:e\d+m\d+\w*)?)\[([\d,]*)\](?:\{([^}]*)\})?")
_HEADER = re.compile(r"^(ENTRY )?%([\w.\-]+) \(.*\{$")


def _parse(text: str) -> tuple[dict[str, Computation], str]:
    computations: dict[str, Computation] = {}
    entry, current = "", {}
    for line in text.splitlines():
        if header := _HEADER.match(line):
            current = computations[header[2]] = {}
            entry = header[2] if header[1] else entry
        elif found := _INSTRUCTION.match(re.sub(r"/\*.*?\*/", "", line)):
            inside, attributes = _split_at_closing(found[5])
            operands = re.findall(r"%([\w.\-]+)", inside)
            current[found[2]] = Instruction(found[2], _shapes(found[3]), found[4], operands, attributes, bool(found[1]), inside)
    return computations, entry


def _split_at_closing(rest: str) -> tuple[str, str]:
    depth = 1
    for i, character in enumerate(rest):
        depth += (character == "(") - (character == ")")
        if depth == 0:
            return rest[:i], rest[i + 1 :]
    return rest, ""


def _shapes(text: str) -> list[Shape]:
    """A layout that ends in S(n) is in memory space n; 0, the default, is the device's main memory, the others are on the chip."""
    return [
        Shape(dtype, tuple(map(int, filter(None, dims.split(",")))), re.search(r"S\([1-9]\d*\)", layout) is None)
        for dtype, dims, layout in _SHAPE.findall(text)
    ]


_NO_TRAFFIC = {
    "parameter",
    "constant",
    "tuple",
    "get-tuple-element",
    "bitcast",
    "while",
    "conditional",
    "call",
    "after-all",
    "partition-id",
}
_NO_TRAFFIC |= {"replica-id", "opt-barrier", "async-start", "async-done", "async-update", "copy-done", "slice-done", "domain", "iota"}


class _Counter:
    def __init__(self, program: tuple[dict[str, Computation], str], optimizer_scope: str, devices: int):
        self.computations, self.entry = program
        self.optimizer_scope = optimizer_scope
        self.devices = devices
        self.notes: set[str] = set()
        self._known: dict[str, Totals] = {}

    def of(self, name: str) -> Totals:
        if name not in self._known:
            computation = self.computations[name]
            totals = Totals()
            for instruction in computation.values():
                totals.add(self._instruction(instruction, computation, name))
            self._known[name] = totals
        return self._known[name]

    def _instruction(self, x: Instruction, computation: Computation, name: str) -> Totals:
        phase = self._phase(x)
        totals = Totals()
        kind = x.opcode.removesuffix("-start")
        match kind:
            case "while":
                trips = self._trip_count(x, computation)
                for called in x.called("condition") + x.called("body"):
                    totals.add(self.of(called), trips)
                return totals
            case "conditional":
                branches = x.called("branch_computations") or x.called("true_computation") + x.called("false_computation")
                return max(map(self.of, branches), key=lambda branch: sum(branch.values()), default=totals)
            case "call" | "async":
                for called in x.called("to_apply") + x.called("calls"):
                    totals.add(self.of(called))
            case "fusion":
                for called in x.called("calls"):
                    totals.add({q: v for q, v in self.of(called).items() if q.what != "bytes"})
            case "dot":
                totals[Quantity("flops", phase)] += _dot_flops(x, computation)
            case "convolution":
                totals[Quantity("flops", phase)] += _convolution_flops(x, computation)
            case "custom-call":
                totals[Quantity("flops", phase)] += self._kernel_flops(x)
            case _ if kind in COLLECTIVES:
                totals.add(self._collective(x, kind, computation, name, phase))
        if x.opcode not in _NO_TRAFFIC:
            totals[Quantity("bytes", None)] += self._traffic(x, computation)
        return totals

    def _phase(self, x: Instruction) -> Phase:
        return "optimizer" if self.optimizer_scope in _op_name(x) else "forward/backward"

    def _trip_count(self, loop: Instruction, computation: Computation) -> int:
        """XLA says it on the CPU. On the TPU the condition does: the root compares an element of the loop's state with a constant.
        Of a loop without a constant the source may have said it."""
        if found := re.search(r'"known_trip_count":\{"n":"(\d+)"\}', loop.attributes):
            return int(found[1])
        condition = self.computations[loop.called("condition")[0]]
        root = next(x for x in condition.values() if x.is_root)
        if root.opcode == "fusion":  # a lone comparison, wrapped
            inner = next(x for x in self.computations[root.called("calls")[0]].values() if x.is_root)
            root = Instruction(root.name, root.result, inner.opcode, root.operands, inner.attributes, True, "")
        compared = [condition[name] for name in root.operands if name in condition]
        constants = [int(x.literal) for x in compared if x.opcode == "constant" and x.literal.lstrip("-").isdigit()]
        elements = [x for x in compared if x.opcode == "get-tuple-element"]
        if root.opcode == "compare" and "direction=LT" in root.attributes and len(constants) == len(elements) == 1:
            index = _index(elements[0])
            step = self._step(loop, index)
            if step and step > 0:
                return -(-(constants[0] - self._start(loop, index, computation)) // step)
        if (trips := trips_in(_op_name(loop))) is not None:
            return trips
        self.notes.add(f"how often the loop {loop.name} runs is not known; it is counted once")
        return 1

    def _step(self, loop: Instruction, index: int) -> int | None:
        """By how much the loop's body raises the element `index` of its state. More than 1 where the compiler unrolled it."""
        body = self.computations[loop.called("body")[0]]
        root = next(x for x in body.values() if x.is_root)
        return self._raised(root.operands[index], body, index, ()) if root.opcode == "tuple" else None

    def _raised(self, name: str, computation: Computation, index: int, arguments: tuple[int | None, ...]) -> int | None:
        """The value of `name` if the counter were 0, where it is a sum of the counter and constants."""
        x = computation[name]
        match x.opcode:
            case "constant":
                return int(x.literal) if x.literal.lstrip("-").isdigit() else None
            case "parameter" if arguments:
                return arguments[int(x.literal)]
            case "get-tuple-element" if computation[x.operands[0]].opcode == "parameter":
                return 0 if _index(x) == index else None
            case "copy" | "bitcast":
                return self._raised(x.operands[0], computation, index, arguments)
            case "add":
                left, right = (self._raised(operand, computation, index, arguments) for operand in x.operands)
                return None if left is None or right is None else left + right
            case "fusion":
                inside = self.computations[x.called("calls")[0]]
                given = tuple(self._raised(operand, computation, index, arguments) for operand in x.operands)
                return self._raised(next(y.name for y in inside.values() if y.is_root), inside, index, given)
        return None

    def _start(self, loop: Instruction, index: int, computation: Computation) -> int:
        """Where the loop counter starts: 0 unless the loop's initial state holds another constant."""
        state = computation.get(loop.operands[0])
        initial = computation.get(state.operands[index]) if state and state.opcode == "tuple" else None
        while initial and initial.opcode in ("copy", "bitcast") and initial.operands:
            initial = computation.get(initial.operands[0])
        return int(initial.literal) if initial and initial.opcode == "constant" and initial.literal.isdigit() else 0

    def _collective(self, x: Instruction, kind: str, computation: Computation, name: str, phase: Phase) -> dict[Quantity, float]:
        # The TPU compiler spreads one asynchronous collective over several fusions, each of which repeats the instruction.
        if "async_collective_fusion_config" in x.attributes and not any(
            "AsyncCollectiveStart" in other.attributes for other in computation.values()
        ):
            return {}
        result = [shape for shape in x.result if shape.dims or kind == "all-reduce"]
        if x.opcode.endswith("-start") and kind in ("all-gather", "collective-permute", "reduce-scatter", "all-to-all"):
            result = result[len(result) // 2 :]  # operands come first
        payload = sum(shape.bytes for shape in result)
        devices = _group_size(x.attributes, self.devices)
        if kind == "all-reduce" and name.startswith("all-reduce-scatter"):
            kind = "reduce-scatter"  # the TPU's form: an all-reduce fused with the slice that keeps one device's share
        elif kind == "reduce-scatter":
            payload *= devices
        share = 1.0 if kind in ("collective-permute", "collective-broadcast") else (devices - 1) / devices
        sent = payload * share * (2 if kind == "all-reduce" else 1)
        return {Quantity("count", phase, kind): 1, Quantity("payload", phase, kind): payload, Quantity("sent", phase, kind): sent}

    def _kernel_flops(self, x: Instruction) -> float:
        """Of Splash attention: 2, 3 and 4 matrix products of queries × keys × head size, over the whole square.

        The compiler sees a Pallas kernel as a closed box. The masked half of the square is counted, as it is in model FLOPs.
        """
        if 'custom_call_target="tpu_custom_call"' not in x.attributes:
            return 0.0
        kernel = re.match(r"splash_m[hq]a_(fwd|dq|dkv)", x.name)
        layouts = re.search(r"operand_layout_constraints=\{(.*?\})\}", x.attributes)
        arrays = [s for s in _shapes(layouts[1]) if len(s.dims) >= 3 and s.dtype in ("f32", "bf16", "f16")] if layouts else []
        if kernel is None or len(arrays) < 2:
            self.notes.add(f"the FLOPs of the kernel {re.sub(r'[.0-9]+$', '', x.name)} are not known; they count as none")
            return 0.0
        queries, keys = arrays[:2]
        return {"fwd": 2, "dq": 3, "dkv": 4}[kernel[1]] * 2.0 * math.prod(queries.dims) * keys.dims[-2]

    def _traffic(self, x: Instruction, computation: Computation) -> float:
        """Bytes that `x` reads from and writes to the device's main memory. Of an array of which only a slice is used, the slice."""
        operands = [computation[name] for name in x.operands if name in computation]
        match x.opcode:
            case "dynamic-slice" | "slice" | "gather":
                return 2 * x.bytes
            case "dynamic-update-slice" | "scatter":
                return 2 * operands[1 if x.opcode == "dynamic-update-slice" else -1].bytes if len(operands) > 1 else x.bytes
            case "copy-start" | "slice-start":
                moved = min((shape.bytes for shape in x.result if shape.dims), default=0.0)
                return moved * sum(shape.in_main_memory for shape in x.result[:2])
            case "custom-call" if "tpu_custom_call" not in x.attributes:
                return 0.0
            case "fusion":
                return sum(self._fusion_traffic(x, operands))
        return x.bytes + sum(operand.bytes for operand in operands)

    def _fusion_traffic(self, x: Instruction, operands: list[Instruction]) -> Iterator[float]:
        inside = self.computations[x.called("calls")[0]]
        for parameter in inside.values():
            if parameter.opcode == "parameter" and int(parameter.literal) < len(operands):
                yield min(operands[int(parameter.literal)].bytes, self._read(parameter.name, inside))
        root = next(y for y in inside.values() if y.is_root)
        outputs = [inside[name] for name in root.operands] if root.opcode == "tuple" else [root]
        for output, shape in zip(outputs, x.result, strict=False):
            while output.opcode == "bitcast":
                output = inside[output.operands[0]]
            if shape.in_main_memory:
                yield inside[output.operands[1]].result[0].bytes if output.opcode == "dynamic-update-slice" else shape.bytes

    def _read(self, name: str, inside: Computation) -> float:
        """Bytes that a fusion reads of its parameter `name`: slices, if all who use it take slices; else everything, as infinity."""
        read = 0.0
        for user in inside.values():
            if name not in user.operands:
                continue
            match user.opcode:
                case "dynamic-slice" | "slice" | "gather" if user.operands[0] == name:
                    read += user.result[0].bytes
                case "dynamic-update-slice" if user.operands[0] == name:
                    pass  # written in place
                case "bitcast":
                    read += self._read(user.name, inside)
                case "fusion":
                    nested = self.computations[user.called("calls")[0]]
                    numbers = {str(i) for i, operand in enumerate(user.operands) if operand == name}
                    read += sum(self._read(y.name, nested) for y in nested.values() if y.opcode == "parameter" and y.literal in numbers)
                case _:
                    return math.inf
        return read


def _index(element: Instruction) -> int:
    return int(_found(r"index=(\d+)", element))


def _op_name(x: Instruction) -> str:
    """The named scopes of the source around `x`, and what it was there."""
    found = re.search(r'op_name="([^"]*)"', x.attributes)
    return found[1] if found else ""


def _found(pattern: str, x: Instruction) -> str:
    found = re.search(pattern, x.attributes)
    assert found is not None, f"{x.opcode} without {pattern}"
    return found[1]


def _dims(name: str, computation: Computation) -> tuple[int, ...]:
    return computation[name].result[0].dims


def _dot_flops(x: Instruction, computation: Computation) -> float:
    contracted = _found(r"lhs_contracting_dims=\{([\d,]*)\}", x).split(",")
    left = _dims(x.operands[0], computation)
    return 2.0 * math.prod(x.result[0].dims) * math.prod(left[int(i)] for i in contracted if i)


def _convolution_flops(x: Instruction, computation: Computation) -> float:
    """The TPU compiler turns every matrix product into a convolution, batch dimensions into windows that are mostly padding. So of each
    window only the positions that lie within the operand count."""
    labels, kernel_labels, output_labels = re.split("_|->", _found(r"dim_labels=([\w>\-]+)", x))
    left, kernel, output = _dims(x.operands[0], computation), _dims(x.operands[1], computation), x.result[0].dims
    window = dict(re.findall(r"(\w+)=([\w\-]+)", found[1])) if (found := re.search(r"window=\{([^}]*)\}", x.attributes)) else {}
    per_dimension = {key: value.split("x") for key, value in window.items()}
    flops = 2.0 * output[output_labels.index("b")] * output[output_labels.index("f")] * kernel[kernel_labels.index("i")]
    for i in range(sum(label.isdigit() for label in labels)):

        def at(key: str, default: str, i=i) -> str:
            return per_dimension[key][i] if key in per_dimension else default

        flops *= _window_positions(
            size=left[labels.index(str(i))],
            window=kernel[kernel_labels.index(str(i))],
            outputs=output[output_labels.index(str(i))],
            stride=int(at("stride", "1")),
            pad=int(at("pad", "0_0").split("_")[0]),
            spread=int(at("lhs_dilate", "1")),
            window_spread=int(at("rhs_dilate", "1")),
        )
    return flops


def _window_positions(*, size: int, window: int, outputs: int, stride: int, pad: int, spread: int, window_spread: int) -> int:
    """Pairs of an output and a window position that meet an element of the operand, along one dimension."""
    if outputs * window > 10**6 and stride == spread == window_spread == 1 and pad == 0:
        return outputs * window
    positions = (o * stride + w * window_spread - pad for o in range(outputs) for w in range(window))
    return sum(0 <= p <= (size - 1) * spread and p % spread == 0 for p in positions)


def _devices(text: str) -> int:
    """That the program runs on."""
    found = (re.search(rf"^HloModule .*\b{name}=(\d+)", text, re.MULTILINE) for name in ("replica_count", "num_partitions"))
    return math.prod(int(number[1]) for number in found if number)


def _group_size(attributes: str, devices: int) -> int:
    """Of how many of all `devices` take part in one collective."""
    if found := re.search(r"replica_groups=mesh\[([^\]]*)\]\s*\{([^}]*)\}", attributes):
        sizes = dict(re.findall(r"'([^']+)'=(\d+)", found[1]))
        return math.prod(int(sizes[axis]) for axis in re.findall(r"'([^']+)'", found[2]) if axis in sizes)
    if found := re.search(r"replica_groups=\[\d+,(\d+)\]", attributes):
        return int(found[1])
    if found := re.search(r"replica_groups=\{\{([\d,]*)\}", attributes):
        return found[1].count(",") + 1
    return devices  # replica_groups={}
