"""Files of data sets: from a path or a URL to a local file whose checksum is right."""

import hashlib
import os
import shutil
import tempfile
from http import HTTPStatus
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
    filesystem, path = filesystem_of(source)
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
    except Exception as error:  # each kind of file system raises its own
        raise _unreachable(source, error) from error


def _unreachable(source: str, error: Exception) -> OSError:
    # Of a server that cannot be reached fsspec says that the file is not found, from the reason.
    reason = error.__cause__ if isinstance(error, FileNotFoundError) and error.__cause__ is not None else error
    if isinstance(reason, FileNotFoundError) or getattr(reason, "status", None) == HTTPStatus.NOT_FOUND:
        return FileNotFoundError(f"{source} does not exist")
    return OSError(f"{source} cannot be read: {type(reason).__name__} {reason}")


def _check(path: Path, checksum: str | None, name: str) -> None:
    if checksum is None:
        return
    algorithm, _, expected = checksum.partition(":")
    with path.open("rb") as file:
        found = hashlib.file_digest(file, algorithm).hexdigest()
    if found != expected.lower():
        raise ValueError(f"{name}: its {algorithm} is {found}, but must be {expected}; the file is corrupt or another one")


def filesystem_of(source: str) -> tuple[fsspec.AbstractFileSystem, str]:
    """What opens a path or URL, and its path there.

    Raises:
        OSError: nothing that is installed does.
    """
    try:
        return fsspec.url_to_fs(source)
    except (ValueError, ImportError) as error:
        raise OSError(f"{source} cannot be opened: {error}") from None


def matching(pattern: str) -> list[str]:
    """The paths or URLs that a glob matches, sorted; what is no glob stands for itself.

    Raises:
        OSError: there is none, or the file system cannot be read.
    """
    if not fsspec.core.has_magic(pattern):
        return [pattern]
    filesystem, path = filesystem_of(pattern)
    try:
        found = sorted(filesystem.glob(path))
    except Exception as error:  # each kind of file system raises its own
        raise _unreachable(pattern, error) from error
    if not found:
        raise FileNotFoundError(f"{pattern} matches no file")
    return [filesystem.unstrip_protocol(file) for file in found]


def is_checksum(text: str) -> bool:
    """Whether it is of the form `md5:…` or `sha256:…`."""
    algorithm, _, digest = text.partition(":")
    length = {"md5": 32, "sha256": 64}.get(algorithm)
    return len(digest) == length and set(digest.lower()) <= set("0123456789abcdef")
