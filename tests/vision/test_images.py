"""The order and the variations in which training sees images, and how they are normalized."""

import asyncio

import numpy as np
import pytest
from draccus.utils import ParsingError

from levanter_mars.vision.image_data import DigitsConfig
from levanter_mars.vision.images import Augmentation, ImageSet, TestImages, TrainingImages

N, PAD = 20, 4
NONE = Augmentation(padding=0, flip=False)


def images() -> ImageSet:
    """Images of 6 × 5 pixels in 3 colors, none of them 0, that are told apart by their labels."""
    return ImageSet(np.random.default_rng(0).integers(1, 256, (N, 6, 5, 3), np.uint8), np.arange(N, dtype=np.int32))


def batch(dataset, indices) -> tuple[np.ndarray, list[int]]:
    examples = asyncio.run(dataset.get_batch(list(indices)))
    return np.stack([x.pixels.array for x in examples]), [int(x.labels.array) for x in examples]


def every_variation(image: np.ndarray) -> dict[bytes, tuple[int, int, bool]]:
    padded = np.pad(image, ((PAD, PAD), (PAD, PAD), (0, 0)))
    height, width, _ = image.shape
    found = {}
    for top in range(2 * PAD + 1):
        for left in range(2 * PAD + 1):
            crop = padded[top : top + height, left : left + width]
            for flipped in (False, True):
                found[(crop[:, ::-1] if flipped else crop).tobytes()] = (top, left, flipped)
    return found


def test_an_epoch_is_a_permutation_and_the_next_another():
    pixels, labels = batch(TrainingImages(images(), NONE, seed=0), range(2 * N))
    assert sorted(labels[:N]) == sorted(labels[N:]) == list(range(N))
    assert labels[:N] != labels[N:] and labels[:N] != list(range(N))
    np.testing.assert_array_equal(pixels, images().images[labels])


def test_every_image_is_a_crop_of_its_padded_original_and_all_crops_come():
    dataset = TrainingImages(images(), Augmentation(PAD, flip=True), seed=0)
    pixels, labels = batch(dataset, range(100 * N))
    drawn = [every_variation(images().images[label])[x.tobytes()] for x, label in zip(pixels, labels, strict=True)]
    tops, lefts, flips = zip(*drawn, strict=True)
    for values in (tops, lefts):
        counts = np.bincount(values, minlength=2 * PAD + 1) / len(values)
        assert counts.min() > 0.8 / 9 and counts.max() < 1.2 / 9
    assert 0.45 < np.mean(flips) < 0.55
    assert len(set(drawn)) == 162  # so the three are drawn independently


def test_without_a_flip_no_image_is_flipped():
    pixels, labels = batch(TrainingImages(images(), Augmentation(PAD, flip=False), seed=0), range(10 * N))
    drawn = [every_variation(images().images[label])[x.tobytes()] for x, label in zip(pixels, labels, strict=True)]
    # A crop that holds nothing but padding looks the same flipped; there is none, as an image is larger than its padding.
    assert not any(flipped for _, _, flipped in drawn)


def test_what_is_at_an_index_depends_on_the_seed_and_the_index_alone():
    def at(seed, indices):
        return batch(TrainingImages(images(), Augmentation(PAD, flip=True), seed), indices)

    straight, labels = at(0, range(3 * N))
    resumed, resumed_labels = at(0, range(N + 3, 3 * N))
    np.testing.assert_array_equal(resumed, straight[N + 3 :])
    assert resumed_labels == labels[N + 3 :]
    shuffled = np.random.default_rng(0).permutation(3 * N)
    np.testing.assert_array_equal(at(0, shuffled)[0], straight[shuffled])
    assert at(1, range(N))[1] != labels[:N]


def test_test_images_are_left_as_they_are():
    pixels, labels = batch(TestImages(images()), range(N))
    np.testing.assert_array_equal(pixels, images().images)
    assert labels == list(range(N))


def test_images_are_normalized_by_the_training_images_or_as_said():
    data = DigitsConfig()
    splits = data.load()
    assert (len(splits.train), len(splits.test), splits.classes) == (898, 899, tuple("0123456789"))
    scaled = splits.train.images / 16
    measured = data.normalization(splits.train)
    np.testing.assert_allclose((measured.mean, measured.std), ([scaled.mean()], [scaled.std()]), rtol=1e-6)
    given = DigitsConfig(mean=[0.25], std=[0.5]).normalization(splits.train)
    assert (given.mean, given.std, given.scale) == ((0.25,), (0.5,), 16.0)
    with pytest.raises(ValueError, match="data.mean has 2 numbers; the images have 1 colors"):
        DigitsConfig(mean=[0.1, 0.2]).normalization(splits.train)


@pytest.mark.parametrize(
    "fields, sentence",
    [
        ({"crop_padding": -1}, "data.crop_padding is -1; it must be at least 0"),
        ({"mean": [125.3]}, r"data.mean is \[125.3\]; it must hold numbers from 0 to 1"),
        ({"std": [0.0]}, r"data.std is \[0.0\]; it must hold numbers above 0 and at most 1"),
        ({"std": [float("nan")]}, r"data.std is \[nan\]; it must hold numbers above 0 and at most 1"),
    ],
)
def test_values_out_of_range(fields, sentence):
    with pytest.raises(ParsingError, match=sentence):
        DigitsConfig(**fields)
