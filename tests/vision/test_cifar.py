"""CIFAR's archives: small ones written in the official form are read, and what is wrong with one is said with its name."""

import hashlib
import re
from pathlib import Path

import numpy as np
import pytest
from cifar_archives import content, write
from draccus.utils import ParsingError

from levanter_mars.vision.cifar import CHECKSUMS, CifarConfig


def load(path: Path, classes: int = 10, checksum: str | None = None):
    return CifarConfig(classes=classes, archive=str(path), checksum=checksum).load()


@pytest.mark.parametrize("classes", [10, 100])
def test_an_archive_is_read(classes, tmp_path):
    parts = content(classes)
    path = write(tmp_path / "cifar.tar.gz", parts)
    data = load(path, classes, checksum=f"sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}")
    label = "labels" if classes == 10 else "fine_labels"
    train = [part for name, part in parts.items() if "data_batch" in name or name.endswith("/train")]
    test = next(part for name, part in parts.items() if "/test" in name)
    for images, expected in ((data.train, train), (data.test, [test])):
        rows = np.concatenate([part["data"] for part in expected])
        assert images.labels.tolist() == [x for part in expected for x in part[label]]
        # A row is red, green and blue, each row by row.
        for color, (y, x) in ((0, (0, 1)), (1, (5, 31)), (2, (31, 30))):
            np.testing.assert_array_equal(images.images[:, y, x, color], rows[:, 1024 * color + 32 * y + x])
    assert data.classes == tuple(f"class {i}" for i in range(classes))


def broken(change: str) -> dict[str, dict | bytes]:
    parts = content(10)
    batch = parts["cifar-10-batches-py/data_batch_3"]
    if change == "a member is missing":
        del parts["cifar-10-batches-py/data_batch_3"]
    elif change == "images of another size":
        batch["data"] = batch["data"][:, :768]
    elif change == "a label too few":
        batch["labels"].pop()
    elif change == "a label that is no class":
        batch["labels"][0] = 10
    elif change == "labels of several numbers":
        batch["labels"] = [[1], [1, 2], 3, 4]
    elif change == "no images":
        batch |= {"data": batch["data"][:0], "labels": []}
    elif change == "no pickle":
        parts["cifar-10-batches-py/data_batch_3"] = b"\x80\x02}q"
    elif change == "a pickle that calls something":
        parts["cifar-10-batches-py/data_batch_3"] = b"cposix\nsystem\n(S'exit'\ntR."
    elif change == "names of other classes":
        parts["cifar-10-batches-py/batches.meta"]["label_names"].pop()
    return parts


@pytest.mark.parametrize(
    "change, sentence",
    [
        ("a member is missing", "has no cifar-10-batches-py/data_batch_3"),
        ("images of another size", "the images of data_batch_3 are uint8 [4, 768], but must be uint8 [n, 3072]"),
        ("a label too few", "data_batch_3 does not hold one label of labels below 10 for each of its 4 images"),
        ("a label that is no class", "data_batch_3 does not hold one label of labels below 10 for each of its 4 images"),
        ("labels of several numbers", "data_batch_3 does not hold one label of labels below 10 for each of its 4 images"),
        ("no images", "data_batch_3 holds no images"),
        ("no pickle", "cifar-10-batches-py/data_batch_3 is corrupt"),
        ("a pickle that calls something", "data_batch_3 is corrupt: it asks for posix.system, which is no part of an array"),
        ("names of other classes", "cifar-10-batches-py/batches.meta does not hold 10 label_names"),
    ],
)
def test_what_is_wrong_inside(change, sentence, tmp_path):
    path = write(tmp_path / "cifar.tar.gz", broken(change))
    with pytest.raises(ValueError, match=re.escape(f"{path}: ") + ".*" + re.escape(sentence)):
        load(path)


def test_an_archive_cut_short(tmp_path):
    path = write(tmp_path / "cifar.tar.gz", content(10))
    path.write_bytes(path.read_bytes()[:-3000])
    with pytest.raises(ValueError, match=f"{path} is no archive of the form .tar.gz, or a corrupt one"):
        load(path)
    path.write_bytes(b"<html>moved</html>")
    with pytest.raises(ValueError, match=f"{path} is no archive of the form .tar.gz, or a corrupt one"):
        load(path)


def test_the_official_checksum_is_asked_for(tmp_path):
    path = write(tmp_path / "cifar.tar.gz", content(10))
    with pytest.raises(ValueError, match=f"{path}: its md5 is .*, but must be c58f30108f718f92721af3b95e74349a"):
        load(path, checksum="official")
    assert CHECKSUMS[10] == "md5:c58f30108f718f92721af3b95e74349a"


def test_a_missing_archive(tmp_path):
    with pytest.raises(FileNotFoundError, match=f"{tmp_path}/none.tar.gz does not exist"):
        load(tmp_path / "none.tar.gz")


@pytest.mark.parametrize(
    "fields, sentence",
    [
        ({"classes": 20}, "data.classes is 20; it must be 10 or 100"),
        ({"checksum": "md5:123"}, "data.checksum is 'md5:123'; it must be official, null, md5: and 32, or sha256: and 64 hex digits"),
    ],
)
def test_values_out_of_range(fields, sentence):
    with pytest.raises(ParsingError, match=re.escape(sentence)):
        CifarConfig(**fields)
