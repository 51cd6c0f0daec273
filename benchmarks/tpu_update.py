"""What one optimizer update of a GPT-2 takes of each chip, compiled for a TPU topology on a machine without TPUs.

    python benchmarks/tpu_update.py --size small --topology v5e:4x4 --json small.json

Needs libtpu (`pip install '.[tpu]'`). Prints, for each optimizer, the bytes of state a parameter, the GFLOP of matrix products, the MiB of
collectives' results by kind and the MiB of temporaries on a chip, and last the least that orthogonalizing all matrices takes: Newton–Schulz
of each once, and every chip's part of the matrices in bfloat16 once out and once back.
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
    "mars-m": MarsMConfig(max_grad_norm=None),
    "mars-m, lean": MarsMConfig(max_grad_norm=None, correction_clip=None),
}
SIZES = {"small": (768, 12, 12), "medium": (1024, 24, 16), "large": (1280, 36, 20), "xl": (1600, 48, 25)}


@dataclass
class BenchmarkConfig:
    size: str = "small"
    """small, medium, large or xl."""
    topology: str = "v5e:4x4"
    replicas: int = 1
    """Copies of the parameters, each cut over the other chips."""
    optimizers: list[str] = field(default_factory=lambda: list(OPTIMIZERS))
    json: Path | None = None


@dataclass
class Row:
    optimizer: str
    state_bytes_per_parameter: float
    gflop: float
    collectives_mib: dict[str, float]
    temporaries_mib: float


def measure(name: str, model: Gpt2Config, mesh: Mesh) -> Row:
    optimizer = OPTIMIZERS[name].build(1000)
    mapping = {"embed": "data"}
    with jax.set_mesh(mesh), hax.axis_mapping(mapping):
        params = trainables_only(eqx.filter_eval_shape(model.build, hax.Axis("vocab", 50304), key=KEY), True)
        params, static = eqx.partition(params, lambda x: isinstance(x, jax.ShapeDtypeStruct))
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
    count = sum(x.size for x in jax.tree.leaves(params))
    return Row(
        name,
        sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state)) / count,
        program.total("flops") / 1e9,
        {kind: mib for kind, mib in payloads.items() if mib >= 0.01},
        compiled.memory_analysis().temp_size_in_bytes / MIB,
    )


def floor(model: Gpt2Config, chips: int) -> tuple[float, float]:
    """GFLOP and MiB on each chip, if both were shared evenly."""
    params = trainables_only(eqx.filter_eval_shape(model.build, hax.Axis("vocab", 50304), key=KEY), True)
    matrices = [p for p in jax.tree.leaves(describe(params)) if p.kind == "matrix" and not p.embedding and "embeddings" not in p.path]
    flops = sum(math.prod(p.stack_shape) * newton_schulz_flops(min(p.tensor_shape), max(p.tensor_shape), 5) for p in matrices)
    return flops / chips / 1e9, 2 * 2 * sum(math.prod(p.shape) for p in matrices) / chips / MIB


def main() -> None:
    config = draccus.parse(BenchmarkConfig)
    for value, allowed in ((config.size, SIZES), *((name, OPTIMIZERS) for name in config.optimizers)):
        if value not in allowed:
            sys.exit(f"{value!r} is none of {', '.join(allowed)}")
    topology = parse_topology(config.topology)
    devices = tpu_devices(topology)
    hidden, layers, heads = SIZES[config.size]
    model = Gpt2Config(max_seq_len=1024, hidden_dim=hidden, num_layers=layers, num_heads=heads, use_bias=False)
    shape = (config.replicas, len(devices) // config.replicas)
    mesh = Mesh(np.array(devices).reshape(shape), ("replica", "data"), axis_types=(AxisType.Auto,) * 2)
    print(f"GPT-2 {config.size} on {topology.name}, one chip, {config.replicas} x {shape[1]}")
    print("| optimizer | state, B/parameter | GFLOP | collectives, MiB | temporaries, MiB |\n|---|---|---|---|---|")
    rows = []
    with absent_devices(devices):
        for name in config.optimizers:
            row = measure(name, model, mesh)
            rows.append(row)
            kinds = ", ".join(f"{kind} {mib:,.1f}" for kind, mib in row.collectives_mib.items()) or "0"
            print(f"| {name} | {row.state_bytes_per_parameter:.2f} | {row.gflop:,.0f} | {kinds} | {row.temporaries_mib:,.1f} |", flush=True)
    gflop, mib = floor(model, len(devices))
    print(f"| *floor of orthogonalizing* | | {gflop:,.0f} | {mib:,.1f} | |")
    if config.json is not None:
        document = {"size": config.size, "topology": topology.name, "rows": list(map(asdict, rows)), "floor": {"gflop": gflop, "mib": mib}}
        config.json.write_text(json.dumps(document, indent=2) + "\n")


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    main()
