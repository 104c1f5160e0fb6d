import gzip
import hashlib
import io
import tarfile
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from pliant.data import get_data_root
from pliant.data.download.cache import (
    download_dataset,
    inspect_dataset,
    locate_file,
    unpack_archive,
)
from pliant.data.download.fetch import DownloadError
from pliant.data.download.published import CIFAR10, FEMNIST, DataFile, DatasetManifest, Download
from pliant.data.sources import DATASETS


def sha256(raw):
    return hashlib.sha256(raw).hexdigest()


ONE, TWO = b"one" * 1000, b"two" * 1000
PAIR = (DataFile("one.bin", sha256(ONE)), DataFile("two.bin", sha256(TWO)))
TARRED = DatasetManifest("tarred", "Two files in a tar", "folder", PAIR)


def make_tar(*members):
    """Return a tar.gz of (name, bytes or link target)."""
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


GOOD = make_tar(("folder/one.bin", ONE), ("folder/two.bin", TWO), ("folder/readme.html", b"hello"))


class QuietHandler(SimpleHTTPRequestHandler):
    def log_message(self, format, *args):
        pass


@pytest.fixture
def served(tmp_path_factory, monkeypatch):
    """Serve a local folder; return the folder and its URL."""
    monkeypatch.setenv("no_proxy", "*")
    folder = tmp_path_factory.mktemp("served")
    with ThreadingHTTPServer(
        ("127.0.0.1", 0), partial(QuietHandler, directory=str(folder))
    ) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield folder, f"http://127.0.0.1:{server.server_address[1]}/"
        server.shutdown()
        thread.join()


def test_only_the_expected_files_are_extracted(tmp_path):
    unpack_archive(io.BytesIO(GOOD), TARRED, tmp_path, "set.tar.gz")
    paths = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*"))
    assert paths == ["folder", "folder/one.bin", "folder/two.bin"]
    assert (tmp_path / "folder" / "two.bin").read_bytes() == TWO


@pytest.mark.parametrize(
    "member",
    [
        ("../escaped.bin", ONE),
        ("/tmp/pliant-escaped.bin", ONE),
        ("folder/../../escaped.bin", ONE),
        ("folder/one.bin", "../../../etc/passwd"),
    ],
)
def test_no_path_inside_an_archive_is_followed(tmp_path, member):
    root = tmp_path / "root"
    root.mkdir()
    with pytest.raises(ValueError, match=r"set.tar.gz: expected one.bin .*, got no such file"):
        unpack_archive(
            io.BytesIO(make_tar(member, ("folder/two.bin", TWO))), TARRED, root, "set.tar.gz"
        )
    assert [path.name for path in tmp_path.rglob("*") if not path.is_dir()] == []


def test_an_archive_with_a_changed_file_leaves_nothing(tmp_path):
    raw = make_tar(("folder/one.bin", ONE), ("folder/two.bin", ONE))
    with pytest.raises(ValueError, match=r"set.tar.gz: expected two.bin with SHA-256"):
        unpack_archive(io.BytesIO(raw), TARRED, tmp_path, "set.tar.gz")
    assert [path for path in tmp_path.rglob("*") if not path.is_dir()] == []


def test_a_truncated_archive_leaves_nothing(tmp_path):
    with pytest.raises(ValueError, match=r"set.tar.gz: expected"):
        unpack_archive(io.BytesIO(GOOD[: len(GOOD) // 2]), TARRED, tmp_path, "set.tar.gz")
    assert [path for path in tmp_path.rglob("*") if not path.is_dir()] == []


def test_a_set_is_missing_incomplete_damaged_or_complete(tmp_path):
    assert inspect_dataset(TARRED, tmp_path).state == "missing"
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "one.bin").write_bytes(ONE)
    status = inspect_dataset(TARRED, tmp_path)
    assert (status.state, status.missing) == ("incomplete", (str(tmp_path / "folder" / "two.bin"),))
    (tmp_path / "folder" / "two.bin.gz").write_bytes(gzip.compress(TWO))
    assert inspect_dataset(TARRED, tmp_path).state == "complete"
    (tmp_path / "folder" / "one.bin").write_bytes(ONE[:-1] + b"x")
    status = inspect_dataset(TARRED, tmp_path)
    assert (status.state, status.damaged) == ("damaged", (str(tmp_path / "folder" / "one.bin"),))
    assert inspect_dataset(TARRED, tmp_path, verify=False).state == "complete"
    (tmp_path / "folder" / "one.bin").write_bytes(ONE)
    (tmp_path / "folder" / "two.bin.gz").write_bytes(gzip.compress(TWO)[:-3])
    assert inspect_dataset(TARRED, tmp_path).damaged == (str(tmp_path / "folder" / "two.bin.gz"),)


def test_an_archive_is_downloaded_unpacked_and_removed(served, tmp_path):
    folder, url = served
    (folder / "set.tar.gz").write_bytes(GOOD)
    manifest = DatasetManifest(
        "tarred", "", "folder", PAIR, (Download(url + "set.tar.gz", sha256(GOOD)),)
    )
    assert download_dataset(manifest, tmp_path).state == "complete"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder"]
    (folder / "set.tar.gz").unlink()  # a complete set is not downloaded again
    assert download_dataset(manifest, tmp_path).state == "complete"


def test_an_archive_provided_by_hand_needs_no_network(tmp_path):
    download = Download("http://127.0.0.1:1/set.tar.gz", sha256(GOOD))
    manifest = DatasetManifest("tarred", "", "folder", PAIR, (download,))
    (tmp_path / "set.tar.gz").write_bytes(GOOD)
    assert download_dataset(manifest, tmp_path).state == "complete"


def test_only_missing_or_damaged_files_are_downloaded(served, tmp_path):
    folder, url = served
    packed = [gzip.compress(raw, mtime=0) for raw in (ONE, TWO)]
    (folder / "two.bin.gz").write_bytes(packed[1])
    manifest = DatasetManifest(
        "pair",
        "",
        "folder",
        PAIR,
        tuple(
            Download(f"{url}{file.name}.gz", sha256(raw))
            for file, raw in zip(PAIR, packed, strict=True)
        ),
    )
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "one.bin").write_bytes(ONE)
    (tmp_path / "folder" / "two.bin").write_bytes(b"damaged")
    names = []

    def progress(name):
        names.append(name)
        return lambda done, total: None

    assert download_dataset(manifest, tmp_path, progress=progress).state == "complete"
    assert names == ["two.bin.gz"]


def test_the_error_for_a_set_without_a_url_tells_how_to_make_it(tmp_path):
    with pytest.raises(
        DownloadError, match=r"femnist cannot be downloaded: make it with LEAF .*femnist"
    ):
        download_dataset(FEMNIST, tmp_path)
    (tmp_path / "femnist" / "train").mkdir(parents=True)
    (tmp_path / "femnist" / "train" / "all_data_0.json").touch()
    status = inspect_dataset(FEMNIST, tmp_path)
    assert (status.state, status.missing) == ("incomplete", (str(tmp_path / "femnist" / "test"),))


def test_every_digest_is_a_sha256():
    manifests = [dataset.manifest for dataset in DATASETS.values()]
    digests = [item.sha256 for m in manifests for item in (*m.files, *m.downloads)]
    assert len(digests) == len(set(digests)) == 31
    assert all(len(bytes.fromhex(digest)) == 32 for digest in digests)


def test_the_root_is_the_argument_or_the_environment_or_the_cache():
    environment = {"PLIANT_DATA": "/from/environment", "XDG_CACHE_HOME": "/cache"}
    assert get_data_root(Path("/mine"), environment) == Path("/mine")
    assert get_data_root(None, environment) == Path("/from/environment")
    assert get_data_root(None, {"XDG_CACHE_HOME": "/cache"}) == Path("/cache/pliant")
    assert get_data_root(None, {}).name == "pliant"


def test_files_are_found_in_the_set_folder_or_the_root_plain_or_gzipped(tmp_path):
    (tmp_path / "file.gz").touch()
    manifest = DatasetManifest("set", "", "set", ())
    assert locate_file(tmp_path, manifest, "file") == tmp_path / "file.gz"
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "file").touch()
    assert locate_file(tmp_path, manifest, "file") == tmp_path / "set" / "file"


def test_the_error_for_a_missing_file_names_its_path_and_the_command(tmp_path):
    with pytest.raises(FileNotFoundError) as error:
        locate_file(tmp_path, CIFAR10, "test_batch.bin")
    assert str(tmp_path / "cifar-10-batches-bin" / "test_batch.bin") in str(error.value)
    assert "pliant data get cifar10" in str(error.value)
