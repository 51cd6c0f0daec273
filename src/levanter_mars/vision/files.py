"""Files of data sets: from a path or a URL to a local file whose checksum is right."""

import hashlib
import os
import shutil
import tempfile
from pathlib import Path

import fsspec
from fsspec.implementations.local import LocalFileSystem


def local_file(source: str, cache_dir: str, checksum: str | None) -> Path:
    """The file that `source`, a path or any fsspec URL, names; what is remote is downloaded into `cache_dir` once.

    Args:
        checksum: `md5:…` or `sha256:…`; None for no check.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: its checksum is another one. A download that was wrong is not kept.
    """
    filesystem, path = fsspec.url_to_fs(source)
    if isinstance(filesystem, LocalFileSystem):
        if not Path(path).is_file():
            raise FileNotFoundError(f"{source} does not exist")
        check_file(Path(path), checksum)
        return Path(path)
    folder = Path(cache_dir).expanduser() / hashlib.sha256(source.encode()).hexdigest()[:16]
    target = folder / Path(path).name
    if not target.exists():
        folder.mkdir(parents=True, exist_ok=True)
        print(f"Downloading {source} to {target}", flush=True)
        descriptor, unfinished = tempfile.mkstemp(dir=folder, suffix=".unfinished")
        try:
            with os.fdopen(descriptor, "wb") as file, filesystem.open(path, "rb") as remote:
                shutil.copyfileobj(remote, file, 1 << 20)
            check_file(Path(unfinished), checksum, name=source)
            Path(unfinished).rename(target)
        except FileNotFoundError:
            raise FileNotFoundError(f"{source} does not exist") from None
        finally:
            Path(unfinished).unlink(missing_ok=True)
    check_file(target, checksum)
    return target


def check_file(path: Path, checksum: str | None, name: str | None = None) -> None:
    """
    Raises:
        ValueError: the file's checksum is not `checksum`.
    """
    if checksum is None:
        return
    algorithm, _, expected = checksum.partition(":")
    with path.open("rb") as file:
        found = hashlib.file_digest(file, algorithm).hexdigest()
    if found != expected.lower():
        raise ValueError(
            f"{name or path}: its {algorithm} is {found}, but {expected} is that of the right file; it is corrupt or another one"
        )


def is_checksum(text: str) -> bool:
    algorithm, _, digest = text.partition(":")
    length = {"md5": 32, "sha256": 64}.get(algorithm)
    return len(digest) == length and set(digest.lower()) <= set("0123456789abcdef")
