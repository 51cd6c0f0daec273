"""ResNet in its CIFAR form (He et al. 2015, arXiv 1512.03385; a 3×3 stem, no max-pooling), with named axes."""

import dataclasses
import math
from dataclasses import dataclass, field
from typing import get_args

import equinox as eqx
import haliax as hax
import haliax.nn as hnn
import jax.random as jrandom
from draccus.utils import ParsingError
from haliax import Axis, NamedArray
from haliax.nn.conv import Conv
from haliax.nn.pool import mean_pool
from jaxtyping import PRNGKeyArray

from levanter_mars.vision.batch_norm import BatchNorm, BatchStatistics

IN = "in_channels"
"""A convolution maps `in_channels` to `channels`: Haliax wants the two to have different names."""


@dataclass(frozen=True)
class ResNetConfig:
    """ResNet-18 by default: 11,173,962 parameters for 10 classes."""

    width: int = 64
    """Channels of the first stage; each later one has twice as many and halves height and width."""
    blocks: list[int] = field(default_factory=lambda: [2, 2, 2, 2])
    """Basic blocks of every stage."""
    batch_statistics: BatchStatistics = "global"
    """What training normalizes by: the statistics of the whole batch on all devices (`global`), or of each device's part (`per_device`)."""
    batch_norm_epsilon: float = 1e-5

    def __post_init__(self):
        if self.width < 1:
            raise ParsingError(f"model.width is {self.width}; it must be at least 1")
        if not self.blocks or min(self.blocks) < 1:
            raise ParsingError(f"model.blocks is {self.blocks}; it must hold at least one number, all at least 1")
        if self.batch_statistics not in get_args(BatchStatistics):
            raise ParsingError(f"model.batch_statistics is {self.batch_statistics!r}; it must be global or per_device")
        if not 0 < self.batch_norm_epsilon < math.inf:
            raise ParsingError(f"model.batch_norm_epsilon is {self.batch_norm_epsilon}; it must be a finite number above 0")

    def build(self, Colors: Axis, Classes: Axis, *, key: PRNGKeyArray) -> "ResNet":
        """A model of random weights for images [..., height, width, Colors]."""
        stem_key, block_key, head_key = jrandom.split(key, 3)
        stages = [self.width * 2**stage for stage in range(len(self.blocks))]
        blocks: list[Block] = []
        before = self.width
        for stage, (width, count) in enumerate(zip(stages, self.blocks, strict=True)):
            for i in range(count):
                stride = 2 if stage > 0 and i == 0 else 1
                blocks.append(Block.init(before, width, stride, self, key=jrandom.fold_in(block_key, len(blocks))))
                before = width
        Channels = Axis("channels", before)
        # The variance of PyTorch's initial weights, which the published runs begin with; the convolutions have its distribution.
        head = hnn.Linear.init(Channels, Classes, key=head_key, init_scale=1 / math.sqrt(3))
        return ResNet(Colors, Classes, _conv(Colors.size, self.width, 3, 1, key=stem_key), self._norm(self.width), tuple(blocks), head)

    def _norm(self, channels: int) -> BatchNorm:
        return BatchNorm.init(Axis("channels", channels), self.batch_norm_epsilon, self.batch_statistics)


class ResNet(eqx.Module):
    Colors: Axis = eqx.field(static=True)
    Classes: Axis = eqx.field(static=True)
    stem: Conv
    norm: BatchNorm
    blocks: "tuple[Block, ...]"
    head: hnn.Linear

    def __call__(self, images: NamedArray) -> tuple[NamedArray, "ResNet"]:
        """The logits [batch, classes] of normalized images [batch, height, width, colors].

        Returns:
            The logits, and this model with the statistics that its batch normalizations used.
        """
        x, norm = self.norm(_convolve(self.stem, images.rename({self.Colors.name: IN})))
        x = hnn.relu(x)
        blocks = []
        for block in self.blocks:
            x, block = block(x)
            blocks.append(block)
        x = mean_pool((x.resolve_axis("height"), x.resolve_axis("width")), x)["height", 0, "width", 0]
        return hax.auto_sharded(self.head(x)), dataclasses.replace(self, norm=norm, blocks=tuple(blocks))


class Block(eqx.Module):
    """Two 3×3 convolutions around which the input goes, through a 1×1 convolution where its shape changes."""

    conv1: Conv
    norm1: BatchNorm
    conv2: Conv
    norm2: BatchNorm
    shortcut: Conv | None
    shortcut_norm: BatchNorm | None

    @staticmethod
    def init(before: int, width: int, stride: int, config: ResNetConfig, *, key: PRNGKeyArray) -> "Block":
        key1, key2, shortcut_key = jrandom.split(key, 3)
        projects = stride != 1 or before != width
        return Block(
            _conv(before, width, 3, stride, key=key1),
            config._norm(width),
            _conv(width, width, 3, 1, key=key2),
            config._norm(width),
            _conv(before, width, 1, stride, key=shortcut_key) if projects else None,
            config._norm(width) if projects else None,
        )

    def __call__(self, x: NamedArray) -> tuple[NamedArray, "Block"]:
        inputs = x.rename({"channels": IN})
        y, norm1 = self.norm1(_convolve(self.conv1, inputs))
        y, norm2 = self.norm2(_convolve(self.conv2, hnn.relu(y).rename({"channels": IN})))
        shortcut_norm = None
        if self.shortcut is not None and self.shortcut_norm is not None:
            x, shortcut_norm = self.shortcut_norm(_convolve(self.shortcut, inputs))
        return hnn.relu(x + y), dataclasses.replace(self, norm1=norm1, norm2=norm2, shortcut_norm=shortcut_norm)


def _conv(before: int, width: int, size: int, stride: int, *, key: PRNGKeyArray) -> Conv:
    return Conv.init(
        ("height", "width"), Axis(IN, before), Axis("channels", width), size, stride=stride, padding=size // 2, use_bias=False, key=key
    )


def _convolve(conv: Conv, x: NamedArray) -> NamedArray:
    # Kept sharded by the batch, so that the compiler gathers the filters, which may be sharded (FSDP), and not the images.
    return hax.auto_sharded(conv(x.astype(conv.weight.dtype)))
