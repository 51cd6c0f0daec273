"""`data:` of train_vision: where images are read from, how they are varied and normalized. Here the base of all types, and the default."""

import abc
from dataclasses import dataclass
from typing import NamedTuple

import draccus
import numpy as np
from draccus.utils import ParsingError

from levanter_mars.vision.images import Augmentation, ImageSet, Normalization


class Splits(NamedTuple):
    train: ImageSet
    test: ImageSet
    classes: tuple[str, ...]


@dataclass(frozen=True)
class ImageDataConfig(draccus.ChoiceRegistry, abc.ABC):
    crop_padding: int = 4
    """Pixels of zeros around a training image before a random crop of its size; 0 for no crop."""
    flip: bool = True
    """Flip training images left to right at random."""
    mean: list[float] | None = None
    """What is subtracted from each color, of 0 to 1; null for the mean of the training images."""
    std: list[float] | None = None
    """What each color is then divided by; null for the standard deviation of the training images."""

    def __post_init__(self):
        if self.crop_padding < 0:
            raise ParsingError(f"data.crop_padding is {self.crop_padding}; it must be at least 0")
        if self.mean is not None and not all(0 <= x <= 1 for x in self.mean):
            raise ParsingError(f"data.mean is {self.mean}; it must hold numbers from 0 to 1, the largest value of a pixel")
        if self.std is not None and not all(0 < x <= 1 for x in self.std):
            raise ParsingError(f"data.std is {self.std}; it must hold numbers above 0 and at most 1")

    @classmethod
    def default_choice_name(cls) -> str:
        return "digits"

    @property
    def pixel_scale(self) -> float:
        """The largest value of a pixel."""
        return 255.0

    @property
    def augmentation(self) -> Augmentation:
        return Augmentation(self.crop_padding, self.flip)

    @abc.abstractmethod
    def load(self) -> Splits:
        """
        Raises:
            ValueError, OSError: a file is missing, corrupt or not of this form; the sentence has its name.
        """

    def normalization(self, train: ImageSet) -> Normalization:
        """
        Raises:
            ValueError: mean or std are for another number of colors than the images have.
        """
        values = train.images.reshape(-1, train.images.shape[-1]) / np.float32(self.pixel_scale)
        given = {"mean": self.mean, "std": self.std}
        measured = {"mean": values.mean(axis=0, dtype=np.float64), "std": values.std(axis=0, dtype=np.float64)}
        for name, value in given.items():
            if value is not None and len(value) != values.shape[1]:
                raise ValueError(f"data.{name} has {len(value)} numbers; the images have {values.shape[1]} colors")
        mean, std = (tuple(float(x) for x in (measured[name] if value is None else value)) for name, value in given.items())
        return Normalization(mean, std, self.pixel_scale)


@ImageDataConfig.register_subclass("digits")
@dataclass(frozen=True)
class DigitsConfig(ImageDataConfig):
    """The 1,797 handwritten digits of 8×8 pixels that come with scikit-learn (a part of UCI's "Optical recognition of handwritten digits").

    The first half is for training and the other for the test, as in scikit-learn's own example, so that other people have written them.
    """

    crop_padding: int = 1
    flip: bool = False

    @property
    def pixel_scale(self) -> float:
        return 16.0

    def load(self) -> Splits:
        try:
            from sklearn.datasets import load_digits
        except ImportError:
            raise ValueError("data.type digits needs scikit-learn: pip install 'levanter-mars[vision]'") from None
        pixels, target = load_digits(return_X_y=True)
        images = np.asarray(pixels, np.uint8).reshape(-1, 8, 8, 1)
        labels = np.asarray(target, np.int32)
        half = len(images) // 2
        return Splits(ImageSet(images[:half], labels[:half]), ImageSet(images[half:], labels[half:]), tuple(map(str, range(10))))
