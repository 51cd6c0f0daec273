"""Token files hold what their bytes hold; what is wrong with one is said with its name and the byte."""

import fsspec
import numpy as np
import pytest

from levanter_mars.data import token_files
from levanter_mars.data.token_files import bad_token, first_bad_piece, open_token_files, pieces, read_windows

TOKENS = np.random.default_rng(0).integers(0, 50257, 1000).astype("<u2")


def header(magic=20240520, version=1, tokens=1000) -> bytes:
    words = np.zeros(256, "<i4")
    words[:3] = magic, version, tokens
    return words.tobytes()


@pytest.mark.parametrize("format, prefix", [("nanogpt", b""), ("fineweb", header())])
@pytest.mark.parametrize("place", ["{folder}", "memory://token_files"])
def test_windows_are_the_bytes_of_the_file(tmp_path, place, format, prefix):
    url = place.format(folder=tmp_path) + "/a.bin"
    with fsspec.open(url, "wb") as out:
        out.write(prefix + TOKENS.tobytes())
    (file,) = open_token_files([url], format)
    assert file.tokens == 1000
    windows = read_windows([(file, 0), (file, 990), (file, 123)], 10)
    np.testing.assert_array_equal(windows, [TOKENS[:10], TOKENS[990:], TOKENS[123:133]])
    assert {window.dtype for window in windows} == {np.dtype(np.int32)}
    # Only a local file is mapped; nothing is copied to a local disk.
    assert (file.mapped is None) == url.startswith("memory")
    assert first_bad_piece([file], 50257) is None


def test_a_glob_gives_the_shards_in_order(tmp_path):
    for i in (2, 0, 1):
        (tmp_path / f"fineweb_train_{i:06}.bin").write_bytes(header(tokens=i + 1) + TOKENS[: i + 1].tobytes())
    (tmp_path / "fineweb_val_000000.bin").write_bytes(header(tokens=7) + TOKENS[:7].tobytes())
    files = open_token_files([f"{tmp_path}/fineweb_train_*.bin", f"{tmp_path}/fineweb_val_000000.bin"], "fineweb")
    assert [file.tokens for file in files] == [1, 2, 3, 7]


@pytest.mark.parametrize(
    "format, content, sentence",
    [
        ("nanogpt", TOKENS.tobytes()[:-1], "ends at byte 1999, in the middle of a token"),
        ("nanogpt", b"", "holds no tokens; it ends at byte 0"),
        ("nanogpt", header() + TOKENS.tobytes(), "byte 0 begins a header of format fineweb"),
        ("fineweb", TOKENS.tobytes(), "the magic number at byte 0 is"),
        ("fineweb", header(magic=7) + TOKENS.tobytes(), "the magic number at byte 0 is 7, but format fineweb has 20240520"),
        ("fineweb", header(version=2) + TOKENS.tobytes(), "the version at byte 4 is 2, but only 1 is known"),
        ("fineweb", header()[:1000], "ends at byte 1000, inside the header of 1024 bytes"),
        (
            "fineweb",
            header() + TOKENS.tobytes()[:-2],
            "says 1000 tokens at byte 8, which would end at byte 3024, but the file ends at byte 3022",
        ),
        ("fineweb", header() + TOKENS.tobytes()[:-1], "ends at byte 3023, in the middle of a token"),
        ("fineweb", header() + TOKENS.tobytes() * 2, "would end at byte 3024, but the file ends at byte 5024"),
        ("fineweb", header(tokens=0), "holds no tokens; it ends at byte 1024"),
    ],
)
def test_a_bad_file_is_named_with_the_byte(tmp_path, format, content, sentence):
    path = tmp_path / "bad.bin"
    path.write_bytes(content)
    with pytest.raises(ValueError) as error:
        open_token_files([str(path)], format)
    assert str(error.value).startswith(f"{path}: ")
    assert sentence in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("place", ["{folder}", "memory://token_files"])
def test_a_token_outside_the_vocabulary_is_found_in_every_piece(tmp_path, monkeypatch, place):
    monkeypatch.setattr(token_files, "PIECE_TOKENS", 300)
    url = place.format(folder=tmp_path) + "/c.bin"
    for index in (0, 299, 300, 650, 999):
        tokens = TOKENS.copy()
        tokens[index:] = 50257
        with fsspec.open(url, "wb") as out:
            out.write(header() + tokens.tobytes())
        files = open_token_files([url], "fineweb")
        bad = first_bad_piece(files, 50257)
        assert bad == index // 300
        sentence = str(bad_token(pieces(files)[bad], 50257))
        assert sentence.endswith(f"c.bin: the token at byte {1024 + 2 * index} is 50257, but the vocabulary has 50257 tokens")
        assert first_bad_piece(files, 50258) is None


def test_shares_read_every_piece_once(tmp_path, monkeypatch):
    monkeypatch.setattr(token_files, "PIECE_TOKENS", 300)
    TOKENS.tofile(tmp_path / "a.bin")
    TOKENS[:400].tofile(tmp_path / "b.bin")
    files = open_token_files([f"{tmp_path}/*.bin"], "nanogpt")
    assert [(file.path[-5:], first, last) for file, first, last in pieces(files)] == [
        ("a.bin", 0, 300), ("a.bin", 300, 600), ("a.bin", 600, 900), ("a.bin", 900, 1000), ("b.bin", 0, 300), ("b.bin", 300, 400),
    ]  # fmt: skip
    # Every piece has a token that is not below 1, so each of as many shares finds its own.
    assert [first_bad_piece(files, 1, share, 6) for share in range(6)] == list(range(6))
    assert [first_bad_piece(files, 1, share, 4) for share in range(4)] == list(range(4))
    assert first_bad_piece(files, 1, 7, 8) is None


def test_what_is_not_there_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"missing\.bin does not exist"):
        open_token_files([f"{tmp_path}/missing.bin"], "nanogpt")
    with pytest.raises(FileNotFoundError, match=r"fineweb_train_\*\.bin matches no file"):
        open_token_files([f"{tmp_path}/fineweb_train_*.bin"], "fineweb")
    with pytest.raises(ValueError, match="is a directory, but must be a file of tokens"):
        open_token_files([str(tmp_path)], "nanogpt")


def test_a_link_is_the_file_it_points_to(tmp_path):
    TOKENS.tofile(tmp_path / "a.bin")
    (tmp_path / "link.bin").symlink_to(tmp_path / "a.bin")
    (file,) = open_token_files([f"{tmp_path}/l*.bin"], "nanogpt")
    assert file.tokens == 1000
