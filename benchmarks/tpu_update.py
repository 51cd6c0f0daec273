"""What one optimizer update of a GPT-2 takes of each chip, compiled for a TPU topology on a machine without TPUs.

    python -m benchmarks.tpu_update --size small --topology v5e:4x4

Needs libtpu (`pip install '.[tpu]'`). For each optimizer, on one chip: bytes of state a parameter, GFLOP of matrix products, MiB of
collectives' results by kind, MiB of temporaries, MiB read from and written to memory; and the least that each takes, see `Floor`.
"""

import json
import math
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import draccus
import equinox as eqx
import haliax as hax
import jax
import numpy as np
from haliax.partitioning import infer_resource_partitions
from jax.sharding import AxisType, Mesh
from levanter.models.gpt2 import Gpt2Config
from levanter.optim.config import AdamConfig, LionConfig, OptimizerConfig
from levanter.optim.mars import MarsConfig
from levanter.optim.muon import MuonConfig
from levanter.trainer_state import trainables_only

from levanter_mars import MarsAdamWConfig, MarsLionConfig, MarsMConfig, MarsShampooConfig
from levanter_mars.newton_schulz import newton_schulz_flops
from levanter_mars.parameters import describe
from levanter_mars.preflight import hlo
from levanter_mars.preflight.absent_devices import absent_devices
from levanter_mars.preflight.hardware import parse_topology, tpu_devices

# Levanter's own mars calls this name, which JAX removed.
jax.tree_map = jax.tree.map

MIB = 2**20
KEY = jax.ShapeDtypeStruct((2,), np.uint32)
OPTIMIZERS: dict[str, OptimizerConfig] = {
    "adam": AdamConfig(max_grad_norm=None),
    "lion": LionConfig(max_grad_norm=None),
    "muon": MuonConfig(max_grad_norm=None, use_kimi_scaling=True),
    "levanter's mars, repaired": MarsConfig(max_grad_norm=None),
    "mars-adamw": MarsAdamWConfig(max_grad_norm=None),
    "mars-lion": MarsLionConfig(max_grad_norm=None),
    "mars-shampoo": MarsShampooConfig(max_grad_norm=None),
    "mars-shampoo, embeddings by adamw": MarsShampooConfig(max_grad_norm=None, embeddings="adamw"),
    "mars-m": MarsMConfig(max_grad_norm=None),
    "mars-m, lean": MarsMConfig(max_grad_norm=None, correction_clip=None),
}
ORTHOGONALIZE = ("muon", "mars-shampoo, embeddings by adamw", "mars-m", "mars-m, lean")
ORTHOGONALIZE_EMBEDDINGS_TOO = ("mars-shampoo",)
SIZES = {"small": (768, 12, 12), "medium": (1024, 24, 16), "large": (1280, 36, 20), "xl": (1600, 48, 25)}


@dataclass
class BenchmarkConfig:
    size: str = "small"
    """small, medium, large or xl."""
    topology: str = "v5e:4x4"
    replicas: int | None = None
    """Copies of the parameters, each cut over the other chips along embed; None for the fewest that divide it."""
    optimizers: list[str] = field(default_factory=lambda: list(OPTIMIZERS))
    json: Path | None = None


@dataclass
class Row:
    optimizer: str
    state_bytes_per_parameter: float
    gflop: float
    collectives_mib: dict[str, float]
    temporaries_mib: float
    memory_traffic_mib: float
    floor: "Floor"


@dataclass
class Floor:
    """The least on each chip, if all were shared evenly."""

    gflop: float
    """Newton–Schulz of every matrix once, for those who orthogonalize; else none."""
    collectives_mib: float
    """For them, in bfloat16, what a chip computes once out and what it holds once back; the numbers that norms take are not counted."""
    memory_traffic_mib: float
    """Gradients read, parameters and state read and written, each once."""


def shapes_of(model: Gpt2Config) -> Any:
    return trainables_only(eqx.filter_eval_shape(model.build, hax.Axis("vocab", 50304), key=KEY), True)


def measure(name: str, model: Gpt2Config, mesh: Mesh) -> Row:
    optimizer = OPTIMIZERS[name].build(1000)
    mapping = {"embed": "data"}
    with jax.set_mesh(mesh), hax.axis_mapping(mapping):
        params, static = eqx.partition(shapes_of(model), lambda x: isinstance(x, jax.ShapeDtypeStruct))
        state, fixed = eqx.partition(
            eqx.filter_eval_shape(lambda p: optimizer.init(eqx.combine(p, static)), params), lambda x: isinstance(x, jax.ShapeDtypeStruct)
        )

        def step(params: Any, state: Any, gradients: Any) -> Any:
            params, gradients = eqx.combine(params, static), eqx.combine(gradients, static)
            updates, state = optimizer.update(gradients, eqx.combine(state, fixed), params)
            return eqx.filter((eqx.apply_updates(params, updates), state), eqx.is_array)

        of_params, of_state = infer_resource_partitions(params, mapping), infer_resource_partitions(state, mapping)
        shardings = {"in_shardings": (of_params, of_state, of_params), "out_shardings": (of_params, of_state)}
        compiled = jax.jit(step, donate_argnums=(0, 1), **shardings).lower(params, state, params).compile()
    program = hlo.count(compiled.as_text(), "")
    payloads = {kind: program.total("payload", kind=kind) / MIB for kind in hlo.COLLECTIVES}
    leaves = jax.tree.leaves(params)
    of_parameters, of_state = (sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree)) for tree in (params, state))
    gflop, mib = 0.0, 0.0
    if name in ORTHOGONALIZE + ORTHOGONALIZE_EMBEDDINGS_TOO:
        gflop, mib = orthogonalizing(model, mesh.size, replicas=mesh.shape["replica"], embeddings=name in ORTHOGONALIZE_EMBEDDINGS_TOO)
    return Row(
        name,
        of_state / sum(x.size for x in leaves),
        program.total("flops") / 1e9,
        {kind: mib for kind, mib in payloads.items() if mib >= 0.01},
        compiled.memory_analysis().temp_size_in_bytes / MIB,
        program.total("bytes") / MIB,
        Floor(gflop, mib, (3 * of_parameters + 2 * of_state) / mesh.size / MIB),
    )


def orthogonalizing(model: Gpt2Config, chips: int, *, replicas: int, embeddings: bool) -> tuple[float, float]:
    """GFLOP and MiB of `Floor`: 5·(4m²n + 2m³) FLOP of an m × n matrix, m ≤ n."""
    matrices = [p for p in jax.tree.leaves(describe(shapes_of(model))) if p.kind == "matrix" and (embeddings or not p.embedding)]
    flops = sum(math.prod(p.stack_shape) * newton_schulz_flops(min(p.tensor_shape), max(p.tensor_shape), 5) for p in matrices)
    return flops / chips / 1e9, 2 * (1 + replicas) * sum(math.prod(p.shape) for p in matrices) / chips / MIB


def main() -> None:
    config = draccus.parse(BenchmarkConfig)
    for value, allowed in ((config.size, SIZES), *((name, OPTIMIZERS) for name in config.optimizers)):
        if value not in allowed:
            sys.exit(f"{value!r} is none of {', '.join(allowed)}")
    topology = parse_topology(config.topology)
    devices = tpu_devices(topology)
    hidden, layers, heads = SIZES[config.size]
    model = Gpt2Config(max_seq_len=1024, hidden_dim=hidden, num_layers=layers, num_heads=heads, use_bias=False)
    replicas = config.replicas or len(devices) // math.gcd(len(devices), hidden)
    mesh = Mesh(np.array(devices).reshape(replicas, -1, 1), ("replica", "data", "model"), axis_types=(AxisType.Auto,) * 3)
    print(f"GPT-2 {config.size} on {topology.name}, one chip, {replicas} x {len(devices) // replicas}")
    rows = []
    with absent_devices(devices):
        for name in config.optimizers:
            rows.append(measure(name, model, mesh))
            print(json.dumps(asdict(rows[-1])), flush=True)
    if config.json is not None:
        document = {"size": config.size, "topology": topology.name, "chips": len(devices), "replicas": replicas}
        config.json.write_text(json.dumps(document | {"rows": list(map(asdict, rows))}, indent=2) + "\n")


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    main()
