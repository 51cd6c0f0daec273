"""Time of the jitted optimizer update alone on a 17 M-parameter GPT-2, each optimizer in turn within one process.

    python -m benchmarks.update_time --rounds 40

Prints the median milliseconds of each and the medians, over rounds, of its time over AdamW's and over Lion's in the same round.
Ratios hold on a noisy machine; the absolute times are this machine's.
"""

import json
import time
from dataclasses import dataclass
from pathlib import Path

import draccus
import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import jax.random as jrandom
import optax
from levanter.models.gpt2 import Gpt2Config
from levanter.optim.config import AdamConfig, LionConfig, OptimizerConfig
from levanter.optim.mars import MarsConfig
from levanter.optim.muon import MuonConfig

from benchmarks.rounds import median_milliseconds, median_ratio, timed_in_turn
from levanter_mars import MarsAdamWConfig, MarsLionConfig, MarsMConfig, MarsShampooConfig

# Levanter's own mars calls this name, which JAX removed.
jax.tree_map = jax.tree.map

OPTIMIZERS: dict[str, OptimizerConfig] = {
    "adamw": AdamConfig(),
    "mars-adamw": MarsAdamWConfig(),
    "mars-adamw, correction_clip: global": MarsAdamWConfig(correction_clip="global"),
    "mars-adamw, correction_clip: null": MarsAdamWConfig(correction_clip=None),
    "mars-adamw, diagnostics_every: 10": MarsAdamWConfig(diagnostics_every=10),
    "levanter's mars, repaired": MarsConfig(),
    "lion": LionConfig(),
    "mars-lion": MarsLionConfig(),
    "mars-lion, correction_clip: null": MarsLionConfig(correction_clip=None),
    "muon": MuonConfig(use_kimi_scaling=True),
    "mars-shampoo": MarsShampooConfig(),
    "mars-m": MarsMConfig(),
    "mars-m, correction_clip: null": MarsMConfig(correction_clip=None),
}


@dataclass
class BenchmarkConfig:
    rounds: int = 40
    """How often every optimizer is timed, after two rounds of warm-up."""
    gradient_norm: float = 0.3
    """The gradient's global norm. Above about 0.5 the clip of a tensor may bind, and MARS takes the norms that it needs then."""
    json: Path | None = None


class Contender:
    """One optimizer with its own state, updated by its compiled `update`."""

    def __init__(self, config: OptimizerConfig, params, gradients):
        transformation = config.build(1000)

        def update(gradients, state, params):
            updates, state = transformation.update(gradients, state, params)
            return state, updates

        # A train step has no use for a gradient after the update, so its memory is given away. The state comes first among the
        # results, so that an optimizer that keeps the gradient keeps it where it is.
        self._update = jax.jit(update, donate_argnums=0)
        self._state = transformation.init(params)
        self._params, self._gradients = params, gradients

    def seconds(self) -> float:
        gradients = jax.block_until_ready(jax.tree.map(jnp.copy, self._gradients))
        start = time.perf_counter()
        self._state, updates = self._update(gradients, self._state, self._params)
        jax.block_until_ready((updates, self._state))
        return time.perf_counter() - start


@draccus.wrap()
def main(config: BenchmarkConfig):
    gpt2 = Gpt2Config(hidden_dim=384, num_layers=6, num_heads=6, max_seq_len=256, use_bias=False)
    model = gpt2.build(hax.Axis("vocab", 16384), key=jrandom.PRNGKey(0))
    params = eqx.filter(model, eqx.is_inexact_array)
    gradients = jax.tree.map(lambda p: jrandom.normal(jrandom.PRNGKey(p.size), p.shape), params)
    gradients = optax.tree.scale(config.gradient_norm / optax.global_norm(gradients), gradients)
    contenders = {name: Contender(optimizer, params, gradients) for name, optimizer in OPTIMIZERS.items()}

    rounds = timed_in_turn({name: contender.seconds for name, contender in contenders.items()}, config.rounds)
    document = {
        "parameters": sum(p.size for p in jax.tree.leaves(params)),
        "device": jax.devices()[0].device_kind,
        "rounds": config.rounds,
        "gradient_norm": config.gradient_norm,
        "rows": [
            {
                "optimizer": name,
                "milliseconds": median_milliseconds(rounds, name),
                "ratio_to_adamw": median_ratio(rounds, name, "adamw"),
                "ratio_to_lion": median_ratio(rounds, name, "lion"),
            }
            for name in contenders
        ],
    }
    print(f"{document['parameters']:,} parameters, {config.rounds} rounds, {document['device']}")
    for row in document["rows"]:
        ratios = f"{row['ratio_to_adamw']:5.2f} x adamw   {row['ratio_to_lion']:5.2f} x lion"
        print(f"{row['optimizer']:40} {row['milliseconds']:8.1f} ms   {ratios}")
    if config.json is not None:
        config.json.write_text(json.dumps(document, indent=2) + "\n")


if __name__ == "__main__":
    main()
