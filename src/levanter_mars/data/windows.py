"""Token files cut into the sequences that a model sees: one after the other, or at random as nanoGPT's script draws them."""

import asyncio
from collections.abc import Sequence

import jax
import numpy as np
from haliax import Axis
from jaxtyping import PRNGKeyArray, UInt32
from levanter.data.dataset import AsyncDataset
from levanter.data.text.datasets import CausalLmDataset, TokenSeqDict

from levanter_mars.data.token_files import TokenFile, read_windows


class ConsecutiveWindows(AsyncDataset[TokenSeqDict]):
    """Each file's tokens in windows that follow one another without overlap. What is left at a file's end, less than a window, is left out.

    Raises:
        ValueError: a file holds less than a window.
    """

    def __init__(self, files: Sequence[TokenFile], length: int):
        _check_lengths(files, length)
        self.files, self.length = files, length
        self.ends = np.cumsum([file.tokens // length for file in files])

    async def async_len(self) -> int:
        return int(self.ends[-1])

    def is_finite(self) -> bool:
        return True

    async def get_batch(self, indices: Sequence[int]) -> Sequence[TokenSeqDict]:
        return await _read(self.files, self.length, [self._position(index) for index in indices])

    def _position(self, index: int) -> tuple[int, int]:
        if not 0 <= index < self.ends[-1]:
            raise IndexError(f"window {index} of {self.ends[-1]}")
        file = int(np.searchsorted(self.ends, index, side="right"))
        begin = int(self.ends[file - 1]) if file else 0
        return file, (index - begin) * self.length


class RandomWindows(AsyncDataset[TokenSeqDict]):
    """An endless row of windows, each from a random file and at a random token of it, with replacement.

    Both draws are uniform, and the last possible begin is left out, as in the published script, which needs one token more than a window.
    The window of an index depends on the seed and the index alone, so that every process and every resumed run sees the same ones.

    Raises:
        ValueError: a file holds no more than a window.
    """

    def __init__(self, files: Sequence[TokenFile], length: int, seed: UInt32[np.ndarray, "2"]):
        _check_lengths(files, length + 1)
        self.files, self.length, self.seed = files, length, np.asarray(seed, np.uint64)

    async def async_len(self) -> int:
        raise ValueError(
            "random windows have no end, so that none can be held out or counted: windows of a bin component must be consecutive for that"
        )

    def is_finite(self) -> bool:
        return False

    async def get_batch(self, indices: Sequence[int]) -> Sequence[TokenSeqDict]:
        return await _read(self.files, self.length, [self._position(index) for index in indices])

    def _position(self, index: int) -> tuple[int, int]:
        # A counter-based generator: the index in its highest word gives each window a stream of its own.
        random = np.random.Generator(np.random.Philox(key=self.seed, counter=[0, 0, 0, index]))
        file = int(random.integers(len(self.files)))
        return file, int(random.integers(self.files[file].tokens - self.length))


class RandomExamples(CausalLmDataset):
    """Examples of random windows. They need no shuffling, so Levanter's only seeds them: a run's own key gives it its own windows."""

    def __init__(self, windows: RandomWindows, Pos: Axis, **attention):
        super().__init__(windows, Pos, **attention)
        self.windows, self.attention = windows, attention

    def shuffle(self, key: PRNGKeyArray, **_) -> "RandomExamples":  # pyrefly: ignore[bad-override]
        seed = np.asarray(jax.random.key_data(key))
        return RandomExamples(RandomWindows(self.windows.files, self.windows.length, seed), self.Pos, **self.attention)

    def block_shuffle(self, *, key: PRNGKeyArray, **_) -> "RandomExamples":  # pyrefly: ignore[bad-override]
        return self.shuffle(key)


def _check_lengths(files: Sequence[TokenFile], tokens: int) -> None:
    for file in files:
        if file.tokens < tokens:
            raise ValueError(
                f"{file.path}: holds {file.tokens} tokens, up to byte {file.byte_of(file.tokens)}, but a window needs {tokens}"
            )


async def _read(files: Sequence[TokenFile], length: int, positions: Sequence[tuple[int, int]]) -> list[TokenSeqDict]:
    # In a thread, because a page that is not in memory yet, or a bucket, would hold up the loader's other requests.
    windows = await asyncio.to_thread(read_windows, [(files[file], first) for file, first in positions], length)
    return [{"input_ids": window} for window in windows]
