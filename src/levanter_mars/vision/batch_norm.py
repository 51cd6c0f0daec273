"""Batch normalization for a trainer whose state is weights and nothing else.

Training normalizes by the statistics of the batch. Evaluation needs those of the population, which Levanter's trainer has no place to
carry from step to step. They are estimated from training batches whenever a model is evaluated ("precise BN", Wu and Johnson 2021,
arXiv 2105.07576, section 3.2), with the weights of that moment: no moving average that lags behind them, and right for averaged weights.
"""

import dataclasses
from collections.abc import Sequence
from typing import Literal, NamedTuple

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
from haliax import Axis, NamedArray
from haliax.partitioning import current_thread_local_mapping, physical_axis_size
from jaxtyping import PyTree

BatchStatistics = Literal["global", "per_device"]


class Statistics(NamedTuple):
    """The mean and the variance of each channel, in float32."""

    mean: NamedArray
    variance: NamedArray


class BatchNorm(eqx.Module):
    """Normalizes every channel over all other axes, then scales and shifts it: y = weight·(x − mean)/√(variance + ε) + bias.

    Statistics are computed in float32 whatever the dtype of x.
    """

    Channels: Axis = eqx.field(static=True)
    weight: NamedArray
    bias: NamedArray
    epsilon: float = eqx.field(static=True)
    over: BatchStatistics = eqx.field(static=True)
    """What a batch is: `global`, all of it, wherever it lies, so that the number of devices changes nothing; or `per_device`, the part on
    one device, which costs no communication. With gradient accumulation it is in both cases a part of the microbatch."""
    statistics: Statistics | None = None
    """The population's, for evaluation; None in training, where the batch has its own."""

    @staticmethod
    def init(Channels: Axis, epsilon: float = 1e-5, over: BatchStatistics = "global") -> "BatchNorm":
        return BatchNorm(Channels, hax.ones(Channels), hax.zeros(Channels), epsilon, over)

    def __call__(self, x: NamedArray) -> tuple[NamedArray, "BatchNorm"]:
        """Normalizes `x` [..., channels].

        Returns:
            The normalized array, and this module with the statistics that it was normalized by.
        """
        if self.statistics is not None:
            return self._normalized(x, self.statistics), self
        shards = _shards(x) if self.over == "per_device" else None
        if shards is None:
            statistics = _moments(x, self.Channels)
            return self._normalized(x, statistics), dataclasses.replace(self, statistics=statistics)
        Batch, Shard = shards
        parts = _sharded_alike(x.unflatten_axis(Batch, (Shard, Batch.resize(Batch.size // Shard.size))), Batch, Shard)
        statistics = _moments(parts, (Shard, self.Channels))
        y = self._normalized(parts, statistics).flatten_axes((Shard.name, Batch.name), Batch).rearrange(x.axes)
        return hax.auto_sharded(y), dataclasses.replace(self, statistics=_pooled(statistics, Shard))

    def _normalized(self, x: NamedArray, statistics: Statistics) -> NamedArray:
        scale = self.weight.astype(jnp.float32) * hax.rsqrt(statistics.variance + self.epsilon)
        y = (x.astype(jnp.float32) - statistics.mean) * scale + self.bias.astype(jnp.float32)
        return y.astype(x.dtype).rearrange(x.axes)


def measured(model: PyTree) -> list[Statistics]:
    """The statistics in a model's batch normalizations, in the order of its fields."""
    return [norm.statistics for norm in _norms(model) if norm.statistics is not None]


def with_statistics(model: PyTree, statistics: Sequence[Statistics]) -> PyTree:
    """The model as it is evaluated: with these statistics in its batch normalizations, in the order of its fields."""
    rest = iter(statistics)
    return jax.tree.map(
        lambda node: dataclasses.replace(node, statistics=next(rest)) if isinstance(node, BatchNorm) else node,
        model,
        is_leaf=lambda node: isinstance(node, BatchNorm),
    )


def population(of_batches: Sequence[Sequence[Statistics]]) -> list[Statistics]:
    """The statistics of all batches together, from those of each: batches of one size, each a list in the order of the model's fields."""
    Batches = Axis("batches", len(of_batches))
    return [
        _pooled(Statistics(hax.stack(Batches, [s.mean for s in norm]), hax.stack(Batches, [s.variance for s in norm])), Batches)
        for norm in zip(*of_batches, strict=True)
    ]


def _norms(model: PyTree) -> list[BatchNorm]:
    nodes = jax.tree.leaves(model, is_leaf=lambda node: isinstance(node, BatchNorm))
    return [node for node in nodes if isinstance(node, BatchNorm)]


def _moments(x: NamedArray, kept: hax.AxisSelection) -> Statistics:
    """The mean and variance over all axes but `kept`."""
    over = hax.axis.without_axes(x.axes, kept)
    x = x.astype(jnp.float32)
    mean = hax.mean(x, over)
    # From the deviations, not as the difference of two large squares.
    return Statistics(mean, hax.mean(hax.square(x - mean), over))


def _pooled(statistics: Statistics, Parts: Axis) -> Statistics:
    """The statistics of the union of equal parts: the mean of their variances plus the variance of their means."""
    return Statistics(hax.mean(statistics.mean, Parts), hax.mean(statistics.variance, Parts) + hax.var(statistics.mean, Parts))


def _shards(x: NamedArray) -> tuple[Axis, Axis] | None:
    """The axis of `x` that devices share in the current axis mapping, and an axis of as many shards; None where nothing is shared."""
    mapping = current_thread_local_mapping() or {}
    for axis in x.axes:
        shards = physical_axis_size(axis, mapping) if axis.name in mapping else None
        if shards is not None and shards > 1:
            if axis.size % shards:
                raise ValueError(
                    f"a batch of {axis.size} does not divide into {shards} devices, as batch_statistics: per_device needs it to"
                )
            return axis, Axis("shard", shards)
    return None


def _sharded_alike(x: NamedArray, Batch: Axis, Shard: Axis) -> NamedArray:
    """Each shard on the device that had it."""
    mapping = dict(current_thread_local_mapping() or {})
    mapping[Shard.name] = mapping.pop(Batch.name)
    return hax.shard(x, mapping)
