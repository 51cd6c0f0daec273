"""Windows are a Levanter dataset: the same as of Levanter's own cache, or drawn as the published script draws them."""

import asyncio

import jax
import numpy as np
import pytest
from haliax import Axis
from levanter.data.text.datasets import TokenSeqDataset
from levanter.store.cache import SerialCacheWriter, TreeCache

from levanter_mars.data.token_files import open_token_files
from levanter_mars.data.windows import ConsecutiveWindows, RandomExamples, RandomWindows

LENGTH = 16
SEED = np.array([3, 4], np.uint32)


def files(folder, *sizes):
    """nanoGPT files, each with the tokens that follow the last file's."""
    first = 0
    for i, size in enumerate(sizes):
        np.arange(first, first + size).astype("<u2").tofile(folder / f"{i}.bin")
        first += size
    return open_token_files([f"{folder}/*.bin"], "nanogpt")


def rows(dataset, indices):
    return np.array([row["input_ids"] for row in asyncio.run(dataset.get_batch(indices))])


def test_consecutive_windows_are_those_of_levanters_cache(tmp_path):
    windows = ConsecutiveWindows(files(tmp_path, 1003), LENGTH)
    tokens = np.arange(1003)
    exemplar = {"input_ids": np.zeros(0, np.int32)}
    with SerialCacheWriter(str(tmp_path / "cache"), exemplar) as writer:
        writer.write_batch([{"input_ids": document.astype(np.int32)} for document in np.split(tokens, [10, 400, 401, 900])])
    cached = TokenSeqDataset(TreeCache.load(str(tmp_path / "cache"), exemplar), LENGTH)
    assert windows.as_sync_dataset().__len__() == len(cached.as_sync_dataset()) == 62
    order = np.random.default_rng(0).permutation(62).tolist()
    np.testing.assert_array_equal(rows(windows, order), [row["input_ids"] for row in cached.as_sync_dataset().get_batch(order)])


def test_consecutive_windows_end_with_their_file(tmp_path):
    windows = ConsecutiveWindows(files(tmp_path, 40, 16, 70), LENGTH)
    begins = [0, 16, 40, 56, 72, 88, 104]
    np.testing.assert_array_equal(rows(windows, range(7)), np.add.outer(begins, np.arange(LENGTH)))
    with pytest.raises(IndexError, match="window 7 of 7"):
        rows(windows, [7])


def test_random_windows_are_uniform_over_files_and_begins(tmp_path):
    """As random.choice over shards and torch.randint(len(data) - block_size) over begins."""
    windows = RandomWindows(files(tmp_path, 116, 36), LENGTH, SEED)
    drawn = rows(windows, range(8000))
    np.testing.assert_array_equal(drawn - drawn[:, :1], np.broadcast_to(np.arange(LENGTH), drawn.shape))
    begins = np.bincount(drawn[:, 0], minlength=152)
    expected = np.zeros(152)
    expected[:100], expected[116:136] = 8000 / 2 / 100, 8000 / 2 / 20
    assert set(np.flatnonzero(begins)) == set(np.flatnonzero(expected))
    # χ² of 119 degrees of freedom has mean 119 and standard deviation 15.4.
    possible = expected > 0
    assert abs(((begins - expected)[possible] ** 2 / expected[possible]).sum() - 119) < 4 * 15.4


def test_a_random_window_depends_on_seed_and_index_alone(tmp_path):
    shards = files(tmp_path, 5000, 3000)
    all_at_once = rows(RandomWindows(shards, LENGTH, SEED), range(100))
    later = rows(RandomWindows(shards, LENGTH, SEED), [70, 3])
    np.testing.assert_array_equal(later, all_at_once[[70, 3]])
    assert (rows(RandomWindows(shards, LENGTH, SEED + 1), range(100)) != all_at_once).any(axis=1).sum() > 95


def test_levanters_shuffles_only_seed_random_windows(tmp_path):
    windows = RandomWindows(files(tmp_path, 5000), LENGTH, SEED)
    examples = RandomExamples(windows, Axis("position", LENGTH), block_cross_document_attention=False)
    key, other = jax.random.split(jax.random.PRNGKey(0))

    def tokens(dataset):
        return np.array([example.tokens for example in asyncio.run(dataset.get_batch(range(20)))])

    shuffled = tokens(examples.shuffle(key, perm_type="feistel"))
    np.testing.assert_array_equal(shuffled, tokens(examples.block_shuffle(io_block_size=256, window_blocks=512, key=key)))
    np.testing.assert_array_equal(shuffled, rows(RandomWindows(examples.windows.files, LENGTH, np.asarray(key)), range(20)))
    assert (shuffled != tokens(examples.shuffle(other))).any()
    assert not examples.is_finite()


@pytest.mark.parametrize("kind, least", [(ConsecutiveWindows, 16), (lambda *a: RandomWindows(*a, SEED), 17)])
def test_a_file_shorter_than_a_window_is_named(tmp_path, kind, least):
    kind(files(tmp_path, least), LENGTH)
    with pytest.raises(ValueError, match=rf"0\.bin: holds {least - 1} tokens, up to byte {2 * least - 2}, but a window needs {least}"):
        kind(files(tmp_path, least - 1), LENGTH)
