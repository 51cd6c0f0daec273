"""Images in parquet, as the Hugging Face hub stores them: small files are read, and what is wrong with one is said with its name."""

import hashlib
import re
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from draccus.utils import ParsingError
from parquet_files import write

from levanter_mars.vision.parquet import ParquetConfig

NAMES = ["airplane", "automobile", "bird"]


def pixels(seed: int, n: int = 5, size: int = 32) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (n, size, size, 3), np.uint8)


@pytest.fixture
def files(tmp_path) -> Path:
    """A folder with two files of training images and one of test images."""
    write(tmp_path / "train-0.parquet", pixels(0), [0, 1, 2, 0, 1], NAMES)
    write(tmp_path / "train-1.parquet", pixels(1), [2, 2, 2, 1, 0], NAMES)
    write(tmp_path / "test.parquet", pixels(2), [1, 1, 1, 0, 2], NAMES)
    return tmp_path


def config(folder: Path, **fields) -> ParquetConfig:
    return ParquetConfig(train=[f"{folder}/train-*.parquet"], test=[f"{folder}/test.parquet"], **fields)


def test_files_are_read(files):
    digest = hashlib.md5((files / "train-1.parquet").read_bytes()).hexdigest()
    data = config(files, checksums={"train-1.parquet": f"md5:{digest}"}).load()
    np.testing.assert_array_equal(data.train.images, np.concatenate([pixels(0), pixels(1)]))
    assert data.train.labels.tolist() == [0, 1, 2, 0, 1, 2, 2, 2, 1, 0]
    np.testing.assert_array_equal(data.test.images, pixels(2))
    assert data.test.labels.tolist() == [1, 1, 1, 0, 2] and data.classes == tuple(NAMES)


def test_classes_without_names_are_counted(tmp_path):
    write(tmp_path / "train-0.parquet", pixels(0), [0, 3, 2, 0, 1])
    write(tmp_path / "test.parquet", pixels(2), [1, 1, 1, 0, 2])
    assert config(tmp_path).load().classes == ("0", "1", "2", "3")


def test_a_corrupt_file(files):
    path = files / "train-1.parquet"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ValueError, match=f"{path} is no parquet file, or a corrupt one"):
        config(files).load()


def test_another_file_than_the_checksums(files):
    with pytest.raises(ValueError, match=f"{files}/train-1.parquet: its md5 is .*, but must be {'0' * 32}"):
        config(files, checksums={"train-1.parquet": f"md5:{'0' * 32}"}).load()


def test_missing_files(files):
    (files / "test.parquet").unlink()
    with pytest.raises(FileNotFoundError, match=f"{files}/test.parquet does not exist"):
        config(files).load()
    with pytest.raises(FileNotFoundError, match=re.escape(f"{files}/none-*.parquet matches no file")):
        ParquetConfig(train=[f"{files}/none-*.parquet"], test=["x"]).load()


def test_images_of_another_size(files):
    write(files / "train-1.parquet", pixels(1, size=28), [2, 2, 2, 1, 0], NAMES)
    with pytest.raises(ValueError, match=f"{files}/train-1.parquet: the image of row 0 has 28×28 pixels, but data.size is 32"):
        config(files).load()


def test_an_image_that_is_none(files):
    table = pyarrow.parquet.read_table(files / "train-1.parquet")
    images = [*table["img"].to_pylist()[:3], {"bytes": b"GIF", "path": None}, {"bytes": None, "path": "x"}]
    pyarrow.parquet.write_table(table.set_column(0, "img", pyarrow.array(images)), files / "train-1.parquet")
    with pytest.raises(ValueError, match=f"{files}/train-1.parquet: the image of row 3 cannot be read"):
        config(files).load()


@pytest.mark.parametrize(
    "labels, sentence",
    [
        ([0, 1, 2, 3, 0], "train-1.parquet: labels must be from 0 to 2, but one is 3"),
        ([0, 1, 2, -1, 0], "train-1.parquet: labels must be from 0 to 2, but one is -1"),
        ([0.5, 1.0, 2.0, 0.0, 1.0], "train-1.parquet: column label does not hold whole numbers"),
        ([0, 2**32, 2, 0, 1], "train-1.parquet: labels must be from 0 to 2, but one is 4294967296"),
        ([0, None, 2, 0, 1], "train-1.parquet: column label does not hold whole numbers"),
    ],
)
def test_labels_that_are_none(labels, sentence, files):
    write(files / "train-1.parquet", pixels(1), labels, NAMES)
    with pytest.raises(ValueError, match=re.escape(f"{files}/{sentence}")):
        config(files).load()


def test_other_classes(files):
    write(files / "test.parquet", pixels(2), [1, 1, 1, 0, 2], NAMES[::-1])
    with pytest.raises(ValueError, match=re.escape(f"{files}/test.parquet: its classes are {NAMES[::-1]}, but those of")):
        config(files).load()


def test_corrupt_metadata(files):
    table = pyarrow.parquet.read_table(files / "test.parquet").replace_schema_metadata({"huggingface": "{"})
    pyarrow.parquet.write_table(table, files / "test.parquet")
    with pytest.raises(ValueError, match=f"{files}/test.parquet: its metadata is corrupt"):
        config(files).load()


def test_classes_that_are_no_names(files):
    write(files / "test.parquet", pixels(2), [1, 1, 1, 0, 2], 5)
    with pytest.raises(ValueError, match=f"{files}/test.parquet: .*the classes of label are 5, but must be a list of names"):
        config(files).load()


@pytest.mark.parametrize("label", [3_000_000, -1])
def test_labels_without_names_that_are_no_classes(files, label):
    for name in ("train-0", "train-1", "test"):
        write(files / f"{name}.parquet", pixels(2), [label] * 5)
    with pytest.raises(ValueError, match=f"it names no classes, and the largest label of .* images is {label}"):
        config(files).load()


def test_other_columns(files):
    with pytest.raises(ValueError, match=f"{files}/train-0.parquet has no column fine_label; its columns are img, label"):
        config(files, label_column="fine_label").load()


@pytest.mark.parametrize(
    "fields, sentence",
    [
        ({"test": []}, "data.test names no files; parquet data needs train and test"),
        ({"size": 0}, "data.size is 0; it must be at least 1"),
        ({"checksums": {"a": "crc:1"}}, "data.checksums of a is 'crc:1'; it must be md5: and 32, or sha256: and 64 hex digits"),
    ],
)
def test_values_out_of_range(fields, sentence):
    with pytest.raises(ParsingError, match=re.escape(sentence)):
        ParquetConfig(**{"train": ["a"], "test": ["b"]} | fields)
