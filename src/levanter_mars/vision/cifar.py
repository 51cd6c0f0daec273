"""`data: {type: cifar}`: CIFAR-10 and CIFAR-100 (Krizhevsky 2009) from their official archives for Python."""

import io
import pickle
import tarfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from draccus.utils import ParsingError

from levanter_mars.vision.files import is_checksum, local_file
from levanter_mars.vision.image_data import ImageDataConfig, Splits
from levanter_mars.vision.images import ImageSet

PAGE = "https://www.cs.toronto.edu/~kriz"
CHECKSUMS = {10: "md5:c58f30108f718f92721af3b95e74349a", 100: "md5:eb9058c3a382ffc7106e4002c42a8d85"}
"""Of cifar-10-python.tar.gz and cifar-100-python.tar.gz, as PAGE/cifar.html has them."""
ROW = 3 * 32 * 32


@ImageDataConfig.register_subclass("cifar")
@dataclass(frozen=True)
class CifarConfig(ImageDataConfig):
    classes: int = 10
    """10 or 100."""
    archive: str | None = None
    """Path or URL of cifar-10-python.tar.gz or cifar-100-python.tar.gz; null for the official URL."""
    checksum: str | None = "official"
    """md5:… or sha256:… of the archive; official for the one on the data sets' page, null for no check."""
    cache_dir: str = "~/.cache/levanter_mars"
    """Where a download is kept."""

    def __post_init__(self):
        super().__post_init__()
        if self.classes not in CHECKSUMS:
            raise ParsingError(f"data.classes is {self.classes}; it must be 10 or 100")
        if self.checksum not in (None, "official") and not is_checksum(self.checksum):
            raise ParsingError(f"data.checksum is {self.checksum!r}; it must be official, null, md5: and 32, or sha256: and 64 hex digits")

    def load(self) -> Splits:
        checksum = CHECKSUMS[self.classes] if self.checksum == "official" else self.checksum
        path = local_file(self.archive or f"{PAGE}/cifar-{self.classes}-python.tar.gz", self.cache_dir, checksum)
        if self.classes == 10:
            folder, train, test, label = "cifar-10-batches-py", [f"data_batch_{i}" for i in range(1, 6)], "test_batch", "labels"
            meta, names = "batches.meta", "label_names"
        else:
            folder, train, test, label = "cifar-100-python", ["train"], "test", "fine_labels"
            meta, names = "meta", "fine_label_names"
        parts = _read(path, [f"{folder}/{name}" for name in (*train, test, meta)])
        sets = [self._images(path, name, parts[f"{folder}/{name}"], label) for name in (*train, test)]
        joined = ImageSet(np.concatenate([s.images for s in sets[:-1]]), np.concatenate([s.labels for s in sets[:-1]]))
        classes = parts[f"{folder}/{meta}"].get(names)
        if not isinstance(classes, list) or len(classes) != self.classes:
            raise ValueError(f"{path}: {folder}/{meta} does not hold {self.classes} {names}")
        return Splits(joined, sets[-1], tuple(map(str, classes)))

    def _images(self, path: Path, name: str, part: dict, label: str) -> ImageSet:
        data, labels = part.get("data"), np.asarray(part.get(label, ()), object)
        if not isinstance(data, np.ndarray) or data.dtype != np.uint8 or data.ndim != 2 or data.shape[1] != ROW:
            found = f"{data.dtype} {list(data.shape)}" if isinstance(data, np.ndarray) else type(data).__name__
            raise ValueError(f"{path}: the images of {name} are {found}, but must be uint8 [n, {ROW}], of 32×32 pixels in 3 colors")
        if not len(data):
            raise ValueError(f"{path}: {name} holds no images")
        is_class = [isinstance(x, int | np.integer) and 0 <= x < self.classes for x in labels.ravel()]
        if labels.shape != (len(data),) or not all(is_class):
            raise ValueError(f"{path}: {name} does not hold one label of {label} below {self.classes} for each of its {len(data)} images")
        # Stored color by color, each row by row.
        images = data.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
        return ImageSet(np.ascontiguousarray(images), labels.astype(np.int32))


def _read(path: Path, members: list[str]) -> dict[str, dict]:
    try:
        with tarfile.open(path, "r:gz") as archive:
            # In the archive's order, because a compressed file goes back only by beginning again.
            wanted = {member.name: member for member in archive if member.name in members}
            missing = [name for name in members if name not in wanted]
            if missing:
                raise ValueError(f"{path}: has no {missing[0]}")
            return {name: _unpickle(path, name, archive.extractfile(member)) for name, member in wanted.items()}
    except (tarfile.TarError, EOFError, zlib.error, OSError) as error:
        if isinstance(error, FileNotFoundError | PermissionError):
            raise
        raise ValueError(f"{path} is no archive of the form .tar.gz, or a corrupt one: {error}") from None


def _unpickle(path: Path, name: str, file: Any) -> dict:
    try:
        content = _ArraysOnly(io.BytesIO(file.read()), encoding="latin1").load()
    except Exception as error:  # a corrupt pickle may end in any
        raise ValueError(f"{path}: {name} is corrupt: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path}: {name} holds a {type(content).__name__}, but must hold a dictionary")
    return content


class _ArraysOnly(pickle.Unpickler):
    """A pickle can call anything; these hold dictionaries, lists, strings and arrays."""

    def find_class(self, module: str, name: str) -> Any:
        module = module.replace("numpy.core", "numpy._core")
        if (module, name) in {("numpy._core.multiarray", "_reconstruct"), ("numpy", "ndarray"), ("numpy", "dtype")} or (
            (module, name) == ("_codecs", "encode")
        ):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, which is no part of an array")
