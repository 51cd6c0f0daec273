"""Files of uint16 tokens, read where they lie: nanoGPT's `train.bin` and the `fineweb_*_*.bin` shards of modded-nanogpt."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import fsspec
import numpy as np
from fsspec.implementations.local import LocalFileSystem
from jaxtyping import Int32, UInt16
from tqdm import tqdm

Format = Literal["nanogpt", "fineweb"]

TOKEN = np.dtype("<u2")
HEADER = np.dtype("<i4")
HEADER_WORDS = 256
HEADER_BYTES = HEADER_WORDS * HEADER.itemsize
MAGIC = 20240520
VERSION = 1
SCAN_TOKENS = 1 << 24


@dataclass(frozen=True)
class TokenFile:
    """A file whose tokens begin at the byte `start`."""

    path: str
    filesystem: fsspec.AbstractFileSystem
    start: int
    tokens: int

    def byte_of(self, token: int) -> int:
        """Where in the file the token of that index is."""
        return self.start + token * TOKEN.itemsize

    @cached_property
    def mapped(self) -> UInt16[np.ndarray, " tokens"] | None:
        """All tokens as mapped memory, or None where the file is not on a local disk."""
        if not isinstance(self.filesystem, LocalFileSystem):
            return None
        return np.memmap(self.path, TOKEN, mode="r", offset=self.start, shape=(self.tokens,))

    def pieces(self) -> Iterator[UInt16[np.ndarray, " piece"]]:
        """All tokens in their order, so many at a time that they fit into memory."""
        for first in range(0, self.tokens, SCAN_TOKENS):
            last = min(first + SCAN_TOKENS, self.tokens)
            if self.mapped is not None:
                yield self.mapped[first:last]
            else:
                yield np.frombuffer(_fetch(self.filesystem, self.path, self.byte_of(first), self.byte_of(last)), TOKEN)


def open_token_files(patterns: Sequence[str], format: Format) -> list[TokenFile]:
    """The files that paths or globs name, on a local disk or at any fsspec URL, in the order given; a glob's are sorted.

    Args:
        format: `nanogpt`, nothing but tokens; `fineweb`, 256 int32 (magic 20240520, version 1, number of tokens), then tokens.

    Raises:
        ValueError: a file is not of the format, or holds less or more than it says. The sentence has the file and the byte.
        FileNotFoundError: a path or a pattern names nothing.
    """
    return [_open(path, filesystem, format) for path, filesystem in itertools.chain.from_iterable(map(_expand, patterns))]


def _expand(pattern: str) -> list[tuple[str, fsspec.AbstractFileSystem]]:
    filesystem, path = fsspec.url_to_fs(pattern)
    if not fsspec.core.has_magic(path):
        return [(path, filesystem)]
    paths = sorted(filesystem.glob(path))
    if not paths:
        raise FileNotFoundError(f"{pattern} matches no file")
    return [(path, filesystem) for path in paths]


def _open(path: str, filesystem: fsspec.AbstractFileSystem, format: Format) -> TokenFile:
    if not filesystem.exists(path):
        raise FileNotFoundError(f"{path} does not exist")
    size = filesystem.size(path)
    if not isinstance(size, int):
        raise ValueError(f"{path}: its file system does not say how long it is")
    head = _fetch(filesystem, path, 0, min(size, HEADER_BYTES))
    if format == "nanogpt":
        if head[: HEADER.itemsize] == MAGIC.to_bytes(HEADER.itemsize, "little"):
            raise ValueError(f"{path}: byte 0 begins a header of format fineweb, but the format is nanogpt, which has none")
        start, said = 0, None
    else:
        if size < HEADER_BYTES:
            raise ValueError(f"{path}: ends at byte {size}, inside the header of {HEADER_BYTES} bytes that format fineweb begins with")
        magic, version, said = (int(word) for word in np.frombuffer(head, HEADER)[:3])
        if magic != MAGIC:
            raise ValueError(f"{path}: the magic number at byte 0 is {magic}, but format fineweb has {MAGIC}")
        if version != VERSION:
            raise ValueError(f"{path}: the version at byte 4 is {version}, but only {VERSION} is known")
        start = HEADER_BYTES
    if (size - start) % TOKEN.itemsize:
        raise ValueError(f"{path}: ends at byte {size}, in the middle of a token of {TOKEN.itemsize} bytes")
    tokens = (size - start) // TOKEN.itemsize
    if said is not None and tokens != said:
        raise ValueError(
            f"{path}: the header says {said} tokens at byte 8, which would end at byte {start + said * TOKEN.itemsize}, "
            f"but the file ends at byte {size}"
        )
    if tokens == 0:
        raise ValueError(f"{path}: holds no tokens; it ends at byte {size}")
    return TokenFile(path, filesystem, start, tokens)


def _fetch(filesystem: fsspec.AbstractFileSystem, path: str, start: int, end: int) -> bytes:
    data = filesystem.cat_file(path, start=start, end=end)
    assert isinstance(data, bytes)
    return data


def check_tokens(files: Sequence[TokenFile], vocab_size: int) -> None:
    """Reads all tokens, with a progress bar.

    Raises:
        ValueError: a token is not below `vocab_size`. The sentence has the file and the byte.
    """
    with tqdm(total=sum(file.tokens for file in files), desc="Checking tokens", unit=" tokens", unit_scale=True) as progress:
        for file in files:
            first = 0
            for piece in file.pieces():
                if piece.max() >= vocab_size:
                    index = int(np.argmax(piece >= vocab_size))
                    raise ValueError(
                        f"{file.path}: the token at byte {file.byte_of(first + index)} is {piece[index]}, "
                        f"but the vocabulary has {vocab_size} tokens"
                    )
                first += len(piece)
                progress.update(len(piece))


def read_windows(windows: Sequence[tuple[TokenFile, int]], length: int) -> list[Int32[np.ndarray, " length"]]:
    """The windows of `length` tokens that begin at tokens of files. Those of remote files are requested together."""
    read: list[np.ndarray | None] = [None if file.mapped is None else file.mapped[first : first + length] for file, first in windows]
    by_filesystem: dict[int, list[int]] = {}
    for i, (file, _) in enumerate(windows):
        if read[i] is None:
            by_filesystem.setdefault(id(file.filesystem), []).append(i)
    for indices in by_filesystem.values():
        remote = [windows[i] for i in indices]
        ranges = remote[0][0].filesystem.cat_ranges(
            [file.path for file, _ in remote],
            [file.byte_of(first) for file, first in remote],
            [file.byte_of(first + length) for file, first in remote],
            on_error="raise",
        )
        for i, data in zip(indices, ranges, strict=True):
            read[i] = np.frombuffer(data, TOKEN)  # pyrefly: ignore[no-matching-overload]
    return [np.asarray(tokens, dtype=np.int32) for tokens in read]
