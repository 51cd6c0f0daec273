"""Files by URL: downloaded once, checked, and kept only if they are right. The server is a real one, on this machine."""

import functools
import hashlib
import threading
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import pytest

from levanter_mars.vision.files import local_file, matching

CONTENT = b"0123456789" * 1000
RIGHT = f"sha256:{hashlib.sha256(CONTENT).hexdigest()}"


@pytest.fixture
def url(tmp_path):
    (tmp_path / "served").mkdir()
    (tmp_path / "served" / "archive.tar.gz").write_bytes(CONTENT)
    handler = functools.partial(SimpleHTTPRequestHandler, directory=tmp_path / "served")
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_a_download_is_kept(url, tmp_path):
    path = local_file(f"{url}/archive.tar.gz", str(tmp_path / "cache"), RIGHT)
    assert path.name == "archive.tar.gz" and path.read_bytes() == CONTENT
    (tmp_path / "served" / "archive.tar.gz").unlink()
    assert local_file(f"{url}/archive.tar.gz", str(tmp_path / "cache"), RIGHT) == path
    path.write_bytes(CONTENT[1:])
    with pytest.raises(ValueError, match=f"{path}: its sha256 is .*, but must be .*; the file is corrupt or another one"):
        local_file(f"{url}/archive.tar.gz", str(tmp_path / "cache"), RIGHT)


def test_a_wrong_download_is_not_kept(url, tmp_path):
    with pytest.raises(ValueError, match=f"{url}/archive.tar.gz: its md5 is .*, but must be {'0' * 32}"):
        local_file(f"{url}/archive.tar.gz", str(tmp_path / "cache"), f"md5:{'0' * 32}")
    assert [path for path in (tmp_path / "cache").rglob("*") if path.is_file()] == []


def test_what_is_not_there(url, tmp_path):
    with pytest.raises(FileNotFoundError, match=f"{url}/none.tar.gz does not exist"):
        local_file(f"{url}/none.tar.gz", str(tmp_path / "cache"), None)
    with pytest.raises(OSError, match="http://127.0.0.1:1/archive.tar.gz cannot be read: .*Cannot connect"):
        local_file("http://127.0.0.1:1/archive.tar.gz", str(tmp_path / "cache"), None)
    with pytest.raises(OSError, match="none://x/archive.tar.gz cannot be opened: Protocol not known"):
        local_file("none://x/archive.tar.gz", str(tmp_path / "cache"), None)
    assert [path for path in (tmp_path / "cache").rglob("*") if path.is_file()] == []


def test_globs(url, tmp_path):
    for name in ("b-1.parquet", "a-2.parquet", "a-1.parquet"):
        (tmp_path / "served" / name).touch()
    assert matching(f"{url}/a-*.parquet") == [f"{url}/a-1.parquet", f"{url}/a-2.parquet"]
    assert matching("no/glob.parquet") == ["no/glob.parquet"]
    with pytest.raises(FileNotFoundError, match=f"{url}/c-[*].parquet matches no file"):
        matching(f"{url}/c-*.parquet")
    with pytest.raises(OSError, match="http://127.0.0.1:1/[*].parquet cannot be read: .*Cannot connect"):
        matching("http://127.0.0.1:1/*.parquet")
