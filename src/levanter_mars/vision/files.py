"""Files of data sets: from a path or a URL to a local file whose checksum is right."""

import hashlib
import os
import shutil
import tempfile
from pathlib import Path
from typing import BinaryIO

import fsspec
from fsspec.implementations.local import LocalFileSystem


def local_file(source: str, cache_dir: str, checksum: str | None) -> Path:
    """The file that `source`, a path or any fsspec URL, names; what is remote is downloaded into `cache_dir` once.

    Args:
        checksum: `md5:…` or `sha256:…`; None for no check.

    Raises:
        OSError: there is no such file, or it cannot be downloaded.
        ValueError: its checksum is another one. A download that was wrong is not kept.
    """
    filesystem, path = fsspec.url_to_fs(source)
    if isinstance(filesystem, LocalFileSystem):
        if not Path(path).is_file():
            raise FileNotFoundError(f"{source} does not exist")
        _check(Path(path), checksum, source)
        return Path(path)
    folder = Path(cache_dir).expanduser() / hashlib.sha256(source.encode()).hexdigest()[:16]
    target = folder / Path(path).name
    if target.exists():
        _check(target, checksum, str(target))
        return target
    folder.mkdir(parents=True, exist_ok=True)
    print(f"Downloading {source} to {target}", flush=True)
    descriptor, name = tempfile.mkstemp(dir=folder, suffix=".unfinished")
    unfinished = Path(name)
    try:
        with os.fdopen(descriptor, "wb") as file:
            _copy(filesystem, path, file, source)
        _check(unfinished, checksum, source)
        unfinished.rename(target)
    finally:
        unfinished.unlink(missing_ok=True)
    return target


def _copy(filesystem: fsspec.AbstractFileSystem, path: str, file: BinaryIO, source: str) -> None:
    try:
        with filesystem.open(path, "rb") as remote:
            shutil.copyfileobj(remote, file, 1 << 20)  # type: ignore[bad-argument-type]
    except FileNotFoundError:
        raise FileNotFoundError(f"{source} does not exist") from None
    except Exception as error:  # each kind of file system raises its own
        raise OSError(f"{source} cannot be downloaded: {type(error).__name__} {error}") from error


def _check(path: Path, checksum: str | None, name: str) -> None:
    if checksum is None:
        return
    algorithm, _, expected = checksum.partition(":")
    with path.open("rb") as file:
        found = hashlib.file_digest(file, algorithm).hexdigest()
    if found != expected.lower():
        raise ValueError(f"{name}: its {algorithm} is {found}, but must be {expected}; the file is corrupt or another one")


def is_checksum(text: str) -> bool:
    """Whether it is of the form `md5:…` or `sha256:…`."""
    algorithm, _, digest = text.partition(":")
    length = {"md5": 32, "sha256": 64}.get(algorithm)
    return len(digest) == length and set(digest.lower()) <= set("0123456789abcdef")
