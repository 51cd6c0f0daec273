"""Time of a whole training step of mars-adamw in its exact form over that of the approximate form, in turn within one process.

    python -m benchmarks.exact_step --rounds 15

Prints the median milliseconds of each and the median, over rounds, of their ratio. The exact form takes two gradients of a batch.
"""

import time
from dataclasses import dataclass

import draccus
import equinox as eqx
import haliax as hax
import haliax.nn as hnn
import jax
import jax.random as jrandom
from levanter.layers.attention import AttentionMask
from levanter.models.gpt2 import Gpt2Config

from benchmarks.rounds import median_milliseconds, median_ratio, timed_in_turn
from levanter_mars import MarsAdamWConfig

GPT2 = Gpt2Config(hidden_dim=256, num_layers=4, num_heads=4, max_seq_len=128, use_bias=False, gradient_checkpointing=False)
Vocab, Batch = hax.Axis("vocab", 4096), hax.Axis("batch", 8)


@dataclass
class BenchmarkConfig:
    rounds: int = 15
    """How often every form is timed, after two rounds of warm-up."""


def loss_fn(params, static, tokens):
    model = eqx.combine(params, static)
    logits = hax.dot(model.activations(tokens, attn_mask=AttentionMask.causal()), model.get_lm_head(), axis="embed")
    targets = hnn.one_hot(hax.roll(tokens, -1, GPT2.max_Pos), Vocab)
    return hax.mean(hnn.cross_entropy_loss(logits, Vocab, targets, reduction=None)).scalar()


class Contender:
    def __init__(self, config: MarsAdamWConfig, tokens):
        optimizer = config.build(1000)
        model = GPT2.build(Vocab, key=jrandom.PRNGKey(0))
        self._params, static = eqx.partition(model, eqx.is_inexact_array)
        self._state = optimizer.init(self._params)

        def step(params, state, tokens):
            gradient = jax.grad(loss_fn)(params, static, tokens)
            updates, state = optimizer.update(gradient, state, params, obj_fn=lambda params: loss_fn(params, static, tokens))
            return eqx.apply_updates(params, updates), state

        self._step = jax.jit(step, donate_argnums=(0, 1))
        self._tokens = tokens

    def seconds(self) -> float:
        start = time.perf_counter()
        self._params, self._state = jax.block_until_ready(self._step(self._params, self._state, self._tokens))
        return time.perf_counter() - start


@draccus.wrap()
def main(config: BenchmarkConfig):
    tokens = hax.random.randint(jrandom.PRNGKey(1), (Batch, GPT2.max_Pos), 0, Vocab.size)
    contenders = {"approximate": Contender(MarsAdamWConfig(), tokens), "exact": Contender(MarsAdamWConfig(exact=True), tokens)}
    rounds = timed_in_turn({name: contender.seconds for name, contender in contenders.items()}, config.rounds)
    for name in contenders:
        ratio = median_ratio(rounds, name, "approximate")
        print(f"{name:12} {median_milliseconds(rounds, name):8.1f} ms   {ratio:5.2f} x approximate")


if __name__ == "__main__":
    main()
