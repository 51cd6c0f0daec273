"""What a compiled train step says about a run: memory a device, work, and bounds on its speed."""

import dataclasses
import math
import os
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from haliax.util import is_named_array
from jaxtyping import PyTree
from levanter.callbacks.watch import WatchConfig
from levanter.main.train_lm import TrainLmConfig

from levanter_mars.explanation import bytes_by_part
from levanter_mars.parameters import describe
from levanter_mars.preflight import hlo
from levanter_mars.preflight.hardware import Topology
from levanter_mars.preflight.train_step import OPTIMIZER_SCOPE, LoweredStep, lower_train_step

TEMPORARIES = "gradients and activations"


@dataclass(frozen=True)
class Collective:
    phase: str
    kind: str
    count: int
    payload: float
    """Bytes of the results on one device, of all `count` together."""
    sent: float
    """Bytes that one device puts on its links for them."""


@dataclass(frozen=True)
class Roofline:
    """Seconds that one step takes at least: as long as the busiest of three resources works at its published rate."""

    compute: float
    memory: float
    links: float

    @property
    def step(self) -> float:
        return max(self.compute, self.memory, self.links)

    @property
    def bound_by(self) -> str:
        return max(dataclasses.asdict(self).items(), key=lambda item: item[1])[0]


@dataclass(frozen=True)
class Report:
    """Bytes and FLOPs are those of one device, which is one chip except on TPU7x, where it is half of one."""

    optimizer: str
    topology: Topology
    is_estimate: bool
    """Compiled for CPU devices in the place of GPUs."""
    parameter_count: int
    batch_size: int
    per_device_parallelism: int
    microbatches: int
    sequence_length: int
    vocab_size: int
    num_train_steps: int
    batch_grows: bool
    """Whether the batch is a schedule, whose largest is `batch_size`."""
    state_bytes: dict[str, int]
    """The optimizer state by part, of all devices together, as `jax.eval_shape` of its init counts it."""
    memory: dict[str, float]
    """By what it holds. Empty parts are left out."""
    total: float
    capacity: float
    """That a program can have."""
    fits: bool
    model_flops: float | None
    """Three times Levanter's count of the forward pass of a batch, all devices together; None where the model does not say."""
    compile_seconds: float
    flops: dict[str, float] = field(default_factory=dict)
    collectives: list[Collective] = field(default_factory=list)
    roofline: Roofline | None = None
    """None where the step does not fit, since then the compiler yields no program."""
    notes: list[str] = field(default_factory=list)

    @property
    def tokens_per_second(self) -> float | None:
        """At most."""
        return None if self.roofline is None else self.batch_size * self.sequence_length / self.roofline.step

    @property
    def model_flop_utilization(self) -> float | None:
        """At most."""
        if self.roofline is None or self.model_flops is None:
            return None
        return self.model_flops / self.roofline.step / (self.topology.chips * self.topology.chip.flops)

    @property
    def hours(self) -> float | None:
        """Of the whole run, at least. None where not all steps are as large as this one."""
        return None if self.roofline is None or self.batch_grows else self.roofline.step * self.num_train_steps / 3600

    def to_json(self) -> dict[str, Any]:
        derived = ("tokens_per_second", "model_flop_utilization", "hours")
        document = {item.name: getattr(self, item.name) for item in dataclasses.fields(self)} | {
            name: getattr(self, name) for name in derived
        }
        document["topology"] = self.topology.name
        document["chip"] = {name: value for name, value in dataclasses.asdict(self.topology.chip).items() if name != "compiler_options"}
        document["collectives"] = [dataclasses.asdict(collective) for collective in self.collectives]
        if self.roofline is not None:
            document["roofline"] = dataclasses.asdict(self.roofline) | {"step": self.roofline.step, "bound_by": self.roofline.bound_by}
        return document


def preflight(config: TrainLmConfig, topology: Topology, devices: Sequence[Any], vocab_size: int) -> Report:
    """Lowers and compiles the train step of `config` for `devices`, those of `topology` or as many CPU devices, and reports on it.

    Raises:
        ValueError: what Levanter, Haliax or JAX find wrong with the config on these devices, before anything is compiled.
        jax.errors.JaxRuntimeError: the compiler failed for another reason than a lack of memory.
    """
    step = lower_train_step(config, devices, vocab_size)
    begin = time.perf_counter()
    try:
        compiled, refused = step.lowered.compile(), None
    except jax.errors.JaxRuntimeError as error:
        compiled, refused = None, out_of_memory(str(error))
        if refused is None:
            raise
    seconds = time.perf_counter() - begin

    chip = topology.chip
    capacity = usable_memory(topology, devices)
    memory: dict[str, float] = _held(step)
    notes = _notes(step, topology)
    work: dict[str, Any] = {}
    if compiled is None:
        assert refused is not None
        total, _ = refused
        memory[TEMPORARIES] = max(total - sum(memory.values()), 0.0)
    else:
        statistics: Any = compiled.memory_analysis()
        memory |= {
            "batch": _shard_bytes(step.example),
            "padding of layouts": max(statistics.argument_size_in_bytes - sum(memory.values()) - _shard_bytes(step.example), 0.0),
            TEMPORARIES: statistics.temp_size_in_bytes,
            "outputs beside the state": statistics.output_size_in_bytes - statistics.alias_size_in_bytes,
            "program": statistics.generated_code_size_in_bytes,
        }
        total = sum(memory.values())
        program = hlo.count(compiled.as_text() or "", OPTIMIZER_SCOPE)
        notes += program.notes
        work = _work(program, topology)

    length, batch = step.sequence_length, step.batch_size
    per_token = config.model.flops_per_token(vocab_size, length)
    parallelism = step.trainer.per_device_parallelism
    at_once = batch if parallelism < 0 else parallelism * step.trainer.data_axis_size
    return Report(
        optimizer=config.optimizer.get_choice_name(type(config.optimizer)),
        topology=topology,
        is_estimate=not chip.is_tpu,
        parameter_count=step.parameter_count,
        batch_size=batch,
        per_device_parallelism=parallelism,
        microbatches=max(batch // at_once, 1),
        sequence_length=length,
        vocab_size=step.vocab_size,
        num_train_steps=step.trainer.num_train_steps,
        batch_grows=not isinstance(step.trainer.train_batch_size, int),
        state_bytes=bytes_by_part(step.state.opt_state, _parameters(step)),
        memory={name: size for name, size in memory.items() if size > 0},
        total=total,
        capacity=capacity,
        fits=compiled is not None and total <= capacity,
        model_flops=None if per_token is None else 3 * per_token * length * batch,
        compile_seconds=seconds,
        notes=notes,
        **work,
    )


def usable_memory(topology: Topology, devices: Sequence[Any]) -> float:
    """Bytes of one device that a program can have: of a GPU JAX's share, of a TPU what its compiler does not keep to itself."""
    whole = topology.chip.memory / topology.chip.devices
    if not topology.chip.is_tpu:
        return whole * gpu_share()
    # The compiler says so when it refuses a program: one that makes a second array of the size of the chip.
    array = jax.ShapeDtypeStruct((int(whole) // 4096, 1024), jnp.float32, sharding=jax.sharding.SingleDeviceSharding(devices[0]))
    try:
        jax.jit(jnp.negative).lower(array).compile()
    except jax.errors.JaxRuntimeError as error:
        if refused := out_of_memory(str(error)):
            return refused[1]
    return whole


def gpu_share() -> float:
    """The share of a GPU's memory that JAX allocates, three quarters if the environment says nothing.

    https://docs.jax.dev/en/latest/gpu_memory_allocation.html
    """
    return float(os.environ.get("XLA_CLIENT_MEM_FRACTION") or os.environ.get("XLA_PYTHON_CLIENT_MEM_FRACTION") or 0.75)


def out_of_memory(message: str) -> tuple[float, float] | None:
    """The bytes that the TPU compiler says a program needs, arguments included, and those that it has; None if `message` is not of that."""
    found = re.search(r"temporaries \(([\d.]+)([KMGT]?)\) exceeds available HBM \(([\d.]+)([KMGT]?)\)", message)
    found = found or re.search(r"Used ([\d.]+)([KMGT]?) of ([\d.]+)([KMGT]?) hbm", message)
    if found is None:
        return None
    needed, needed_unit, limit, limit_unit = found.groups()
    return _bytes(needed, needed_unit), _bytes(limit, limit_unit)


def _bytes(number: str, unit: str) -> float:
    return float(number) * 1024.0 ** " KMGT".index(unit or " ")


def _work(program: hlo.Program, topology: Topology) -> dict[str, Any]:
    chip = topology.chip
    collectives = [
        Collective(phase, kind, round(count), program.total("payload", phase, kind), program.total("sent", phase, kind))
        for phase in hlo.PHASES
        for kind in hlo.COLLECTIVES
        if (count := program.total("count", phase, kind))
    ]
    roofline = Roofline(
        compute=program.total("flops") * chip.devices / chip.flops,
        memory=program.total("bytes") * chip.devices / chip.memory_bandwidth,
        links=program.total("sent") * chip.devices / chip.link_bandwidth,
    )
    return {"flops": {phase: program.total("flops", phase) for phase in hlo.PHASES}, "collectives": collectives, "roofline": roofline}


def _held(step: LoweredStep) -> dict[str, float]:
    """Bytes on one device of what stays from step to step, by what it is."""
    state = step.state
    held = {"parameters": _shard_bytes(state.model)}
    parts = bytes_by_part(jax.tree.map(_shard, state.opt_state, is_leaf=is_named_array), _parameters(step))
    held |= {f"optimizer: {part}": size for part, size in parts.items()}
    return held | {"averaged model": _shard_bytes(state.model_averaging)}


def _parameters(step: LoweredStep):
    return jax.tree.leaves(describe(step.state.trainable_model))


def _shard(leaf: Any) -> Any:
    array = leaf.array if is_named_array(leaf) else leaf
    return jax.ShapeDtypeStruct(array.sharding.shard_shape(array.shape), array.dtype) if isinstance(array, jax.ShapeDtypeStruct) else leaf


def _shard_bytes(tree: PyTree) -> float:
    shards = jax.tree.leaves(jax.tree.map(_shard, tree, is_leaf=is_named_array))
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in shards if isinstance(x, jax.ShapeDtypeStruct))


def _notes(step: LoweredStep, topology: Topology) -> list[str]:
    """Where the program compiled here differs from the one that train_lm will run, and why."""
    trainer, notes = step.trainer, [*step.notes]
    if not topology.chip.is_tpu:
        notes.append(
            "an estimate: no compiler for GPUs that are not there exists, so this is XLA's program for CPU devices, with its attention, "
            "its cross entropy, its fusions and its buffers; a GPU's program usually needs less memory for temporaries"
        )
        notes.append(f"capacity is {gpu_share():.0%} of the GPU's memory, which JAX takes; XLA_PYTHON_CLIENT_MEM_FRACTION changes that")
    watch: WatchConfig = trainer.watch
    if watch.is_enabled:
        notes.append(
            f"every {watch.interval} steps trainer.watch has the step also compute statistics of {watch.watch_targets}, which is a program "
            "of its own with a little more memory and time; the other steps are what is reported"
        )
    if not isinstance(trainer.train_batch_size, int):
        notes.append(f"train_batch_size is a schedule; its largest, {step.batch_size}, is reported, and no hours of the run")
    return notes
