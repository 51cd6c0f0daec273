"""Files of uint16 tokens, read where they lie: nanoGPT's `train.bin` and the `fineweb_*_*.bin` shards of modded-nanogpt."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import fsspec
import numpy as np
from fsspec.implementations.local import LocalFileSystem
from jaxtyping import Integer, UInt16
from tqdm import tqdm

Format = Literal["nanogpt", "fineweb"]

TOKEN = np.dtype("<u2")
HEADER = np.dtype("<i4")
HEADER_WORDS = 256
HEADER_BYTES = HEADER_WORDS * HEADER.itemsize
MAGIC = 20240520
VERSION = 1
PIECE_TOKENS = 1 << 24


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


def open_token_files(patterns: Sequence[str], format: Format) -> list[TokenFile]:
    """The files that paths or globs name, on a local disk or at any fsspec URL, in the order given; a glob's are sorted.

    Reads the sizes of all files and, together where a file system can, their first 1,024 bytes.

    Args:
        format: `nanogpt`, nothing but tokens; `fineweb`, 256 int32 (magic 20240520, version 1, number of tokens), then tokens.

    Raises:
        ValueError: a file is not of the format, or holds less or more than it says. The sentence has the file and the byte.
        FileNotFoundError: a path or a pattern names nothing.
    """
    found = list(itertools.chain.from_iterable(map(_expand, patterns)))
    heads = _fetch([(filesystem, path, 0, min(size, HEADER_BYTES)) for filesystem, path, size in found])
    return [_open(*file, head, format) for file, head in zip(found, heads, strict=True)]


def _expand(pattern: str) -> list[tuple[fsspec.AbstractFileSystem, str, int]]:
    filesystem, path = fsspec.url_to_fs(pattern)
    if fsspec.core.has_magic(path):
        infos = filesystem.glob(path, detail=True)
        if not infos:
            raise FileNotFoundError(f"{pattern} matches no file")
    else:
        try:
            infos = {path: filesystem.info(path)}
        except FileNotFoundError:
            raise FileNotFoundError(f"{path} does not exist") from None
    for path, info in infos.items():
        if info["type"] == "directory":
            raise ValueError(f"{path}: is a directory, but must be a file of tokens")
        if not isinstance(info["size"], int):
            raise ValueError(f"{path}: its file system does not say how long it is")
    return [(filesystem, path, info["size"]) for path, info in sorted(infos.items())]


def _open(filesystem: fsspec.AbstractFileSystem, path: str, size: int, head: bytes, format: Format) -> TokenFile:
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


def pieces(files: Sequence[TokenFile]) -> list[tuple[TokenFile, int, int]]:
    """All tokens of the files in pieces, each a file, a first token and the one behind the last, that fit into memory."""
    return [(file, first, min(first + PIECE_TOKENS, file.tokens)) for file in files for first in range(0, file.tokens, PIECE_TOKENS)]


def first_bad_piece(files: Sequence[TokenFile], vocab_size: int, share: int = 0, shares: int = 1) -> int | None:
    """The index in `pieces` of the first one with a token that is not below `vocab_size`, or None.

    Reads every piece of this share, the pieces share, share + shares, and so on; the first share shows its progress.
    """
    mine = list(enumerate(pieces(files)))[share::shares]
    total = sum(last - first for _, (_, first, last) in mine)
    with tqdm(total=total, desc="Checking tokens", unit=" tokens", unit_scale=True, disable=share > 0) as progress:
        for index, (file, first, last) in mine:
            if read_windows([(file, first)], last - first, TOKEN)[0].max() >= vocab_size:
                return index
            progress.update(last - first)
    return None


def bad_token(piece: tuple[TokenFile, int, int], vocab_size: int) -> ValueError:
    """What is wrong with a bad piece: the file, the byte and the token."""
    file, first, last = piece
    (tokens,) = read_windows([(file, first)], last - first, TOKEN)
    index = int(np.argmax(tokens >= vocab_size))
    return ValueError(
        f"{file.path}: the token at byte {file.byte_of(first + index)} is {tokens[index]}, but the vocabulary has {vocab_size} tokens"
    )


def read_windows(windows: Sequence[tuple[TokenFile, int]], length: int, dtype=np.int32) -> list[Integer[np.ndarray, " length"]]:
    """The windows of `length` tokens that begin at tokens of files. Those of remote files are requested together."""
    read = [None if file.mapped is None else file.mapped[first : first + length] for file, first in windows]
    remote = [i for i, tokens in enumerate(read) if tokens is None]
    fetched = _fetch(
        [
            (file.filesystem, file.path, file.byte_of(first), file.byte_of(first + length))
            for file, first in map(windows.__getitem__, remote)
        ]
    )
    for i, data in zip(remote, fetched, strict=True):
        read[i] = np.frombuffer(data, TOKEN)
    return [np.asarray(tokens, dtype) for tokens in read]


def _fetch(ranges: Sequence[tuple[fsspec.AbstractFileSystem, str, int, int]]) -> list[bytes]:
    """The bytes from a start to an end of files, asked of each file system at once."""
    fetched = [b""] * len(ranges)
    by_filesystem: dict[int, list[int]] = {}
    for i, (filesystem, *_) in enumerate(ranges):
        by_filesystem.setdefault(id(filesystem), []).append(i)
    for indices in by_filesystem.values():
        _, paths, starts, ends = zip(*(ranges[i] for i in indices), strict=True)
        filesystem = ranges[indices[0]][0]
        for i, data in zip(indices, filesystem.cat_ranges(list(paths), list(starts), list(ends), on_error="raise"), strict=True):
            assert isinstance(data, bytes)
            fetched[i] = data
    return fetched
