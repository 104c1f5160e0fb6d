import hashlib
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from pliant.data.fetch import DownloadFailed, download

BODY = bytes(range(256)) * 2000  # half a megabyte: several blocks
DIGEST = hashlib.sha256(BODY).hexdigest()


class Server(ThreadingHTTPServer):
    """A publisher on this machine whose manners a test can choose."""

    knows_ranges = True
    cut_after: int | None = None
    hang: threading.Event | None = None
    asked: list[str | None]

    def url(self, name: str = "set.bin") -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/{name}"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        wanted = self.headers.get("Range")
        self.server.asked.append(wanted)
        if self.path != "/set.bin":
            self.send_error(404)
            return
        start = 0
        if wanted and self.server.knows_ranges:
            start = int(wanted.removeprefix("bytes=").rstrip("-"))
            if start >= len(BODY):
                self.send_error(416)
                return
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {start}-{len(BODY) - 1}/{len(BODY)}")
        else:
            self.send_response(200)
        self.send_header("Content-Length", str(len(BODY) - start))
        self.end_headers()
        end = len(BODY) if self.server.cut_after is None else self.server.cut_after
        self.wfile.write(BODY[start:end])
        if self.server.hang is not None:
            self.server.hang.wait(5)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("no_proxy", "*")
    with Server(("127.0.0.1", 0), Handler) as running:
        running.asked = []
        thread = threading.Thread(target=running.serve_forever, args=(0.01,))
        thread.start()
        yield running
        running.shutdown()
        thread.join()


def part(target: Path) -> Path:
    return target.with_name(target.name + ".part")


def test_a_download_arrives_whole_and_tells_how_far_it_is(server, tmp_path):
    told = []
    target = tmp_path / "folder" / "set.bin"
    download(server.url(), DIGEST, target, progress=lambda *step: told.append(step))
    assert target.read_bytes() == BODY
    assert told[0] == (0, len(BODY))
    assert told[-1] == (len(BODY), len(BODY))
    assert not part(target).exists()


def test_a_cut_connection_keeps_the_part_and_the_next_call_goes_on(server, tmp_path):
    target = tmp_path / "set.bin"
    server.cut_after = 300_000
    with pytest.raises(DownloadFailed, match=r"cut after 300000 bytes .* run again"):
        download(server.url(), DIGEST, target)
    assert not target.exists()
    assert part(target).read_bytes() == BODY[:300_000]
    server.cut_after = None
    download(server.url(), DIGEST, target)
    assert server.asked == [None, "bytes=300000-"]
    assert target.read_bytes() == BODY


def test_a_server_that_falls_silent_counts_as_cut(server, tmp_path):
    target = tmp_path / "set.bin"
    server.cut_after, server.hang = 1000, threading.Event()
    with pytest.raises(DownloadFailed, match="cut after 1000 bytes"):
        download(server.url(), DIGEST, target, timeout=0.2)
    server.hang.set()
    assert part(target).read_bytes() == BODY[:1000]


def test_a_server_without_ranges_is_asked_from_the_beginning(server, tmp_path):
    target = tmp_path / "set.bin"
    part(target).write_bytes(BODY[:1000])
    server.knows_ranges = False
    download(server.url(), DIGEST, target)
    assert target.read_bytes() == BODY


def test_a_part_that_is_whole_already_is_taken(server, tmp_path):
    target = tmp_path / "set.bin"
    part(target).write_bytes(BODY)
    download(server.url(), DIGEST, target)
    assert target.read_bytes() == BODY


def test_a_wrong_hash_leaves_nothing(server, tmp_path):
    target = tmp_path / "set.bin"
    with pytest.raises(
        DownloadFailed, match=f"expected a file of SHA-256 {'0' * 64}, got {DIGEST}"
    ):
        download(server.url(), "0" * 64, target)
    assert list(tmp_path.iterdir()) == []


def test_a_part_of_another_file_is_found_out_and_removed(server, tmp_path):
    target = tmp_path / "set.bin"
    part(target).write_bytes(b"x" * 1000)
    with pytest.raises(DownloadFailed, match="nothing is kept"):
        download(server.url(), DIGEST, target)
    assert list(tmp_path.iterdir()) == []


def test_a_missing_page_is_told_by_its_number(server, tmp_path):
    with pytest.raises(DownloadFailed, match=r"other.bin: the server says 404"):
        download(server.url("other.bin"), DIGEST, tmp_path / "set.bin")
    assert list(tmp_path.iterdir()) == []


def test_without_network_it_says_which_file_to_put_where(monkeypatch, tmp_path):
    monkeypatch.setenv("no_proxy", "*")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))  # bound and not listening: nobody answers here
        url = f"http://127.0.0.1:{free.getsockname()[1]}/set.bin"
        with pytest.raises(DownloadFailed) as told:
            download(url, DIGEST, tmp_path / "set.bin")
    assert f"cannot reach {url}" in str(told.value)
    assert f"put that file at {tmp_path / 'set.bin'} and run again" in str(told.value)
