"""Labelled images in memory, and the order and the variations in which training sees them."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import equinox as eqx
import numpy as np
from haliax import NamedArray
from jaxtyping import Bool, Int32, Int64, UInt8
from levanter.data.dataset import AsyncDataset

AXES = ("height", "width", "color")


class Images(eqx.Module):
    """One image, or a batch of them with a batch axis in front. The model's input is the pixels, normalized on the device."""

    pixels: NamedArray
    """uint8 [height, width, color]"""
    labels: NamedArray
    """int32 []"""


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

    def draw(self, n: int, random: np.random.Generator) -> "Variations":
        """Draws a crop and a flip for each of `n` images."""
        tops, lefts = random.integers(2 * self.padding + 1, size=(2, n))
        return Variations(self.padding, tops, lefts, random.integers(2, size=n).astype(bool) & self.flip)


@dataclass(frozen=True)
class Variations:
    """What is done to each of n images."""

    padding: int
    tops: Int64[np.ndarray, " n"]
    lefts: Int64[np.ndarray, " n"]
    """Where the crop begins in the padded image."""
    flips: Bool[np.ndarray, " n"]

    def apply(self, i: int, image: UInt8[np.ndarray, "h w c"]) -> UInt8[np.ndarray, "h w c"]:
        """Varies an image as the i-th."""
        height, width, colors = image.shape
        pad, top, left = self.padding, self.tops[i], self.lefts[i]
        padded = np.zeros((height + 2 * pad, width + 2 * pad, colors), np.uint8)
        padded[pad : pad + height, pad : pad + width] = image
        crop = padded[top : top + height, left : left + width]
        return crop[:, ::-1] if self.flips[i] else crop


class TrainingImages(AsyncDataset[Images]):
    """An endless row of epochs, each a permutation of all images, each image varied at random.

    What is at an index depends on the seed and the index alone, so that every process, every number of devices and every resumed run see
    the same.
    """

    def __init__(self, images: ImageSet, augmentation: Augmentation, seed: int):
        self.images, self.augmentation, self.seed = images, augmentation, seed
        self._epoch = functools.lru_cache(maxsize=2)(self._draw_epoch)

    async def async_len(self) -> int:
        raise ValueError("training images have no end")

    def is_finite(self) -> bool:
        return False

    async def get_batch(self, indices: Sequence[int]) -> Sequence[Images]:
        return [self._image(index) for index in indices]

    def _image(self, index: int) -> Images:
        epoch, i = divmod(index, len(self.images))
        order, variations = self._epoch(epoch)
        which = order[i]
        return _named(variations.apply(i, self.images.images[which]), self.images.labels[which])

    def _draw_epoch(self, epoch: int) -> tuple[Int64[np.ndarray, " n"], Variations]:
        random = np.random.default_rng([self.seed, epoch])
        return random.permutation(len(self.images)), self.augmentation.draw(len(self.images), random)


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
        return [_named(self.images.images[index], self.images.labels[index]) for index in indices]


def _named(image: UInt8[np.ndarray, "h w c"], label: np.int32) -> Images:
    # Not hax.named, which would make an array of JAX's of every image.
    return Images(NamedArray(image, AXES), NamedArray(np.asarray(label), ()))  # type: ignore[bad-argument-type]
