"""Labelled images in memory, and the order and the variations in which training sees them."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import equinox as eqx
import haliax as hax
import numpy as np
from haliax import NamedArray
from jaxtyping import Int32, UInt8, UInt32
from levanter.data.dataset import AsyncDataset

AXES = ("height", "width", "color")


class Images(eqx.Module):
    """One image, or a batch of them with a batch axis in front. The model's input is the pixels, normalized on the device."""

    pixels: NamedArray
    """uint8 [height, width, color]"""
    labels: NamedArray
    """int32 []"""
    weights: NamedArray
    """float32 []: 1, or 0 for what fills up a last batch."""


@dataclass(frozen=True)
class ImageSet:
    """Images of one size with their labels."""

    images: UInt8[np.ndarray, "n height width color"]
    labels: Int32[np.ndarray, " n"]

    def __len__(self) -> int:
        return len(self.images)


@dataclass(frozen=True)
class Normalization:
    """(value/scale − mean)/std, color by color."""

    mean: tuple[float, ...]
    std: tuple[float, ...]
    scale: float = 255.0
    """The largest value of a pixel."""


@dataclass(frozen=True)
class Augmentation:
    """A random crop of the image after it was padded with zeros, and a random flip of left and right."""

    padding: int
    """Pixels on every side; the crop has the image's size."""
    flip: bool

    def __call__(self, image: UInt8[np.ndarray, "h w c"], random: np.random.Generator) -> UInt8[np.ndarray, "h w c"]:
        height, width, _ = image.shape
        top, left = random.integers(2 * self.padding + 1, size=2)
        flipped = self.flip and random.integers(2)
        padded = np.pad(image, ((self.padding, self.padding), (self.padding, self.padding), (0, 0)))
        crop = padded[top : top + height, left : left + width]
        return np.ascontiguousarray(crop[:, ::-1] if flipped else crop)


class TrainingImages(AsyncDataset[Images]):
    """An endless row of epochs, each a permutation of all images, each image varied at random.

    What is at an index depends on the seed and the index alone, so that every process, every number of devices and every resumed run see
    the same.
    """

    def __init__(self, images: ImageSet, augmentation: Augmentation, seed: UInt32[np.ndarray, "2"]):
        self.images, self.augmentation, self.seed = images, augmentation, np.asarray(seed, np.uint64)
        self._order = functools.lru_cache(maxsize=2)(self._permutation)

    async def async_len(self) -> int:
        raise ValueError("training images have no end")

    def is_finite(self) -> bool:
        return False

    async def get_batch(self, indices: Sequence[int]) -> Sequence[Images]:
        return [self._example(index) for index in indices]

    def _example(self, index: int) -> Images:
        epoch, position = divmod(index, len(self.images))
        which = self._order(epoch)[position]
        image = self.augmentation(self.images.images[which], self._random(0, index))
        return _example(image, self.images.labels[which])

    def _permutation(self, epoch: int) -> np.ndarray:
        return self._random(1, epoch).permutation(len(self.images))

    def _random(self, purpose: int, index: int) -> np.random.Generator:
        # A counter-based generator: the two highest words give each purpose and index a stream of its own.
        return np.random.Generator(np.random.Philox(key=self.seed, counter=[0, 0, purpose, index]))


class TestImages(AsyncDataset[Images]):
    """All images once, as they are, in their order."""

    __test__ = False  # pytest collects by names

    def __init__(self, images: ImageSet):
        self.images = images

    async def async_len(self) -> int:
        return len(self.images)

    def is_finite(self) -> bool:
        return True

    async def get_batch(self, indices: Sequence[int]) -> Sequence[Images]:
        return [_example(self.images.images[index], self.images.labels[index]) for index in indices]


def _example(image: UInt8[np.ndarray, "h w c"], label: np.int32) -> Images:
    return Images(hax.named(image, AXES), hax.named(np.asarray(label, np.int32), ()), hax.named(np.ones((), np.float32), ()))
