"""Archives in the official form of CIFAR for Python, as stand-ins: few images, of random pixels."""

import io
import pickle
import struct
import tarfile
from pathlib import Path

import numpy as np

N = 4
"""Images in each file of an archive."""


class Python2Pickler(pickle._Pickler):
    """Writes strings as Python 2's `str`, bytes of no encoding, as the official files have them."""

    dispatch = pickle._Pickler.dispatch.copy()

    def save_str(self, text: str) -> None:
        data = text.encode("latin1")
        self.write(pickle.BINSTRING + struct.pack("<i", len(data)) + data)

    def save_bytes(self, data: bytes) -> None:
        self.save_str(data.decode("latin1"))

    dispatch[str] = save_str
    dispatch[bytes] = save_bytes


def pickled(content) -> bytes:
    file = io.BytesIO()
    Python2Pickler(file, protocol=2).dump(content)
    return file.getvalue().replace(b"numpy._core.multiarray", b"numpy.core.multiarray")


def content(classes: int) -> dict[str, dict]:
    """What the members of an archive hold."""
    rng = np.random.default_rng(classes)

    def images(label):
        return {"data": rng.integers(0, 256, (N, 3072), np.uint8), label: rng.integers(0, classes, N).tolist()}

    names = [f"class {i}" for i in range(classes)]
    if classes == 10:
        folder = "cifar-10-batches-py"
        parts = {name: images("labels") for name in ("test_batch", *(f"data_batch_{i}" for i in range(1, 6)))}
        parts["batches.meta"] = {"label_names": names}
    else:
        folder = "cifar-100-python"
        parts = {name: images("fine_labels") | {"coarse_labels": [0] * N} for name in ("train", "test")}
        parts["meta"] = {"fine_label_names": names, "coarse_label_names": ["one"]}
    return {f"{folder}/{name}": part for name, part in parts.items()}


def write(path: Path, members: dict[str, dict | bytes]) -> Path:
    with tarfile.open(path, "w:gz") as archive:
        for name, member in members.items():
            data = member if isinstance(member, bytes) else pickled(member)
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return path
