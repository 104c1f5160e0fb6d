import gzip
import hashlib
import io
import tarfile
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import pytest

from pliant.data.fetch import DownloadFailed
from pliant.data.published import FEMNIST, SETS, Download, File, Published, published
from pliant.data.store import get, status, unpack


def digest(raw):
    return hashlib.sha256(raw).hexdigest()


ONE, TWO = b"one" * 1000, b"two" * 1000
PAIR = (File("one.bin", digest(ONE)), File("two.bin", digest(TWO)))
TARRED = Published("tarred", "Two files in a tar", "folder", PAIR, ())


def tar(*members):
    """Return a tar.gz of (name, bytes or a link's target)."""
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w:gz") as archive:
        for name, content in members:
            entry = tarfile.TarInfo(name)
            if isinstance(content, str):
                entry.type, entry.linkname = tarfile.SYMTYPE, content
                archive.addfile(entry)
            else:
                entry.size = len(content)
                archive.addfile(entry, io.BytesIO(content))
    return raw.getvalue()


GOOD = tar(("folder/one.bin", ONE), ("folder/two.bin", TWO), ("folder/readme.html", b"hello"))


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format, *args):
        pass


@pytest.fixture
def publisher(tmp_path_factory, monkeypatch):
    """Serve a folder of this machine; return the folder and its address."""
    monkeypatch.setenv("no_proxy", "*")
    folder = tmp_path_factory.mktemp("publisher")
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder))) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield folder, f"http://127.0.0.1:{server.server_address[1]}/"
        server.shutdown()
        thread.join()


def test_only_the_expected_files_leave_an_archive(tmp_path):
    unpack(io.BytesIO(GOOD), TARRED, tmp_path, "set.tar.gz")
    found = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*"))
    assert found == ["folder", "folder/one.bin", "folder/two.bin"]
    assert (tmp_path / "folder" / "two.bin").read_bytes() == TWO


@pytest.mark.parametrize(
    "evil",
    [
        ("../escaped.bin", ONE),
        ("/tmp/pliant-escaped.bin", ONE),
        ("folder/../../escaped.bin", ONE),
        ("folder/one.bin", "../../../etc/passwd"),
    ],
)
def test_no_path_inside_an_archive_is_followed(tmp_path, evil):
    root = tmp_path / "root"
    root.mkdir()
    with pytest.raises(ValueError, match=r"set.tar.gz: expected one.bin .*, got no such file"):
        unpack(io.BytesIO(tar(evil, ("folder/two.bin", TWO))), TARRED, root, "set.tar.gz")
    assert [path.name for path in tmp_path.rglob("*") if not path.is_dir()] == []


def test_an_archive_with_a_changed_file_leaves_nothing(tmp_path):
    raw = tar(("folder/one.bin", ONE), ("folder/two.bin", ONE))
    with pytest.raises(ValueError, match=r"set.tar.gz: expected two.bin of SHA-256"):
        unpack(io.BytesIO(raw), TARRED, tmp_path, "set.tar.gz")
    assert [path for path in tmp_path.rglob("*") if not path.is_dir()] == []


def test_a_cut_archive_leaves_nothing(tmp_path):
    with pytest.raises(ValueError, match=r"set.tar.gz: expected"):
        unpack(io.BytesIO(GOOD[: len(GOOD) // 2]), TARRED, tmp_path, "set.tar.gz")
    assert [path for path in tmp_path.rglob("*") if not path.is_dir()] == []


def test_a_set_is_missing_incomplete_damaged_or_complete(tmp_path):
    assert status(TARRED, tmp_path).state == "missing"
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "one.bin").write_bytes(ONE)
    found = status(TARRED, tmp_path)
    assert (found.state, found.missing) == ("incomplete", (str(tmp_path / "folder" / "two.bin"),))
    (tmp_path / "folder" / "two.bin.gz").write_bytes(gzip.compress(TWO))
    assert status(TARRED, tmp_path).state == "complete"
    (tmp_path / "folder" / "one.bin").write_bytes(ONE[:-1] + b"x")
    found = status(TARRED, tmp_path)
    assert (found.state, found.damaged) == ("damaged", (str(tmp_path / "folder" / "one.bin"),))
    assert status(TARRED, tmp_path, is_verified=False).state == "complete"
    (tmp_path / "folder" / "one.bin").write_bytes(ONE)
    (tmp_path / "folder" / "two.bin.gz").write_bytes(gzip.compress(TWO)[:-3])
    assert status(TARRED, tmp_path).damaged == (str(tmp_path / "folder" / "two.bin.gz"),)


def test_an_archive_is_got_unpacked_and_removed(publisher, tmp_path):
    folder, address = publisher
    (folder / "set.tar.gz").write_bytes(GOOD)
    wanted = Published(
        "tarred", "", "folder", PAIR, (Download(address + "set.tar.gz", digest(GOOD), True),)
    )
    assert get(wanted, tmp_path).state == "complete"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder"]
    (folder / "set.tar.gz").unlink()  # what is complete is not asked for again
    assert get(wanted, tmp_path).state == "complete"


def test_an_archive_put_there_by_hand_needs_no_network(tmp_path):
    wanted = Published(
        "tarred",
        "",
        "folder",
        PAIR,
        (Download("http://127.0.0.1:1/set.tar.gz", digest(GOOD), True),),
    )
    (tmp_path / "set.tar.gz").write_bytes(GOOD)
    assert get(wanted, tmp_path).state == "complete"


def test_only_what_is_missing_or_damaged_is_got(publisher, tmp_path):
    folder, address = publisher
    packed = [gzip.compress(raw, mtime=0) for raw in (ONE, TWO)]
    (folder / "two.bin.gz").write_bytes(packed[1])
    wanted = Published(
        "pair",
        "",
        "folder",
        PAIR,
        tuple(
            Download(f"{address}{file.name}.gz", digest(raw))
            for file, raw in zip(PAIR, packed, strict=True)
        ),
    )
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "one.bin").write_bytes(ONE)
    (tmp_path / "folder" / "two.bin").write_bytes(b"damaged")
    asked = []

    def progress(name):
        asked.append(name)
        return lambda done, total: None

    assert get(wanted, tmp_path, progress=progress).state == "complete"
    assert asked == ["two.bin.gz"]


def test_a_set_without_an_address_says_how_to_make_it(tmp_path):
    with pytest.raises(
        DownloadFailed, match=r"femnist cannot be downloaded: make it with LEAF .*femnist"
    ):
        get(FEMNIST, tmp_path)
    (tmp_path / "femnist" / "train").mkdir(parents=True)
    (tmp_path / "femnist" / "train" / "all_data_0.json").touch()
    found = status(FEMNIST, tmp_path)
    assert (found.state, found.missing) == ("incomplete", (str(tmp_path / "femnist" / "test"),))


def test_sets_are_known_by_name():
    assert published("fashion-mnist").name == "fashion_mnist"
    with pytest.raises(LookupError, match=r"expected one of mnist, .*, got imagenet"):
        published("imagenet")


def test_every_pin_is_a_sha256():
    pins = [item.sha256 for one in SETS for item in (*one.files, *one.downloads)]
    assert len(pins) == len(set(pins)) == 30
    assert all(len(bytes.fromhex(pin)) == 32 for pin in pins)
