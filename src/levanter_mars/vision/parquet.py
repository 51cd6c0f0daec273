"""`data: {type: parquet}`: images as the Hugging Face hub stores them, in parquet files of encoded pictures."""

import io
import itertools
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
from draccus.utils import ParsingError
from jaxtyping import Int64, UInt8

from levanter_mars.vision.files import is_checksum, local_file, matching
from levanter_mars.vision.image_data import ImageDataConfig, Splits
from levanter_mars.vision.images import ImageSet


@ImageDataConfig.register_subclass("parquet")
@dataclass(frozen=True)
class ParquetConfig(ImageDataConfig):
    train: list[str] = field(default_factory=list)
    """Paths, globs or fsspec URLs."""
    test: list[str] = field(default_factory=list)
    image_column: str = "img"
    label_column: str = "label"
    """label in CIFAR-10, fine_label in CIFAR-100."""
    size: int = 32
    """Height and width of every image, in 3 colors."""
    checksums: dict[str, str] = field(default_factory=dict)
    """md5:… or sha256:… of files, by their names without folders. Files that are not named are not checked."""
    cache_dir: str = "~/.cache/levanter_mars"
    """Where a download is kept."""

    def __post_init__(self):
        super().__post_init__()
        for name in ("train", "test"):
            if not getattr(self, name):
                raise ParsingError(f"data.{name} names no files; parquet data needs train and test")
        if self.size < 1:
            raise ParsingError(f"data.size is {self.size}; it must be at least 1")
        for name, checksum in self.checksums.items():
            if not is_checksum(checksum):
                raise ParsingError(f"data.checksums of {name} is {checksum!r}; it must be md5: and 32, or sha256: and 64 hex digits")

    def load(self) -> Splits:
        train, test = self._read_all(self.train), self._read_all(self.test)
        names = train[0].class_names
        labels = np.concatenate([file.labels for file in train + test])
        count = len(names) if names else int(labels.max()) + 1
        if not names and not 1 <= count <= len(labels):
            raise ValueError(f"{train[0].path}: it names no classes, and the largest label of {len(labels)} images is {labels.max()}")
        for file in train + test:
            if file.class_names != names:
                raise ValueError(f"{file.path}: its classes are {file.class_names}, but those of {train[0].path} are {names}")
            wrong = file.labels[(file.labels < 0) | (file.labels >= count)]
            if len(wrong):
                raise ValueError(f"{file.path}: labels must be from 0 to {count - 1}, but one is {wrong[0]}")
        return Splits(_join(train), _join(test), tuple(names or map(str, range(count))))

    def _read_all(self, patterns: list[str]) -> "list[_File]":
        files = itertools.chain.from_iterable(map(matching, patterns))
        return [self._read(local_file(file, self.cache_dir, self.checksums.get(Path(file).name))) for file in files]

    def _read(self, path: Path) -> "_File":
        # Imported late: only this type needs them.
        import pyarrow
        import pyarrow.parquet
        from PIL import Image

        try:
            table = pyarrow.parquet.read_table(path)
        except (pyarrow.ArrowException, OSError) as error:
            raise ValueError(f"{path} is no parquet file, or a corrupt one: {error}") from None
        for column in (self.image_column, self.label_column):
            if column not in table.column_names:
                raise ValueError(f"{path} has no column {column}; its columns are {', '.join(table.column_names)}")
        if not len(table):
            raise ValueError(f"{path} holds no rows")
        images = np.empty((len(table), self.size, self.size, 3), np.uint8)
        for i, encoded in enumerate(table[self.image_column].to_pylist()):
            try:
                with Image.open(io.BytesIO(encoded["bytes"])) as image:
                    pixels = np.asarray(image.convert("RGB"))
            except Exception as error:  # a corrupt picture may end in any
                raise ValueError(f"{path}: the image of row {i} cannot be read: {error}") from None
            if pixels.shape != images.shape[1:]:
                height, width, _ = pixels.shape
                raise ValueError(f"{path}: the image of row {i} has {height}×{width} pixels, but data.size is {self.size}")
            images[i] = pixels
        try:
            labels = table[self.label_column].to_numpy().astype(np.int64, casting="same_kind")
        except (TypeError, pyarrow.ArrowException):
            raise ValueError(f"{path}: column {self.label_column} does not hold whole numbers") from None
        try:
            names = _class_names(table.schema.metadata, self.label_column)
        except (ValueError, AttributeError) as error:
            raise ValueError(f"{path}: its metadata is corrupt: {error}") from None
        return _File(path, images, labels, names)


class _File(NamedTuple):
    path: Path
    images: UInt8[np.ndarray, "n height width color"]
    labels: Int64[np.ndarray, " n"]
    class_names: list[str] | None


def _join(files: list[_File]) -> ImageSet:
    return ImageSet(np.concatenate([file.images for file in files]), np.concatenate([file.labels for file in files]).astype(np.int32))


def _class_names(metadata: dict[bytes, bytes] | None, column: str) -> list[str] | None:
    """What the hub's `datasets` writes of a column of labels into the file's metadata."""
    description = json.loads((metadata or {}).get(b"huggingface", b"{}"))
    names = description.get("info", {}).get("features", {}).get(column, {}).get("names")
    if names is not None and not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
        raise ValueError(f"the classes of {column} are {names!r}, but must be a list of names")
    return names
