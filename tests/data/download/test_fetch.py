import hashlib
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from tests.waiting import LIMIT

from pliant.data.download.fetch import DownloadError, download_file

BODY = bytes(range(256)) * 2000  # half a megabyte: several blocks
DIGEST = hashlib.sha256(BODY).hexdigest()


class Server(ThreadingHTTPServer):
    """A local server whose behaviour a test can choose."""

    supports_ranges = True
    stop_after: int | None = None
    hang: threading.Event | None = None
    requested_ranges: list[str | None]

    def url(self, name: str = "set.bin") -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/{name}"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        requested = self.headers.get("Range")
        self.server.requested_ranges.append(requested)
        if self.path != "/set.bin":
            self.send_error(404)
            return
        start = 0
        if requested and self.server.supports_ranges:
            start = int(requested.removeprefix("bytes=").rstrip("-"))
            if start >= len(BODY):
                self.send_error(416)
                return
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {start}-{len(BODY) - 1}/{len(BODY)}")
        else:
            self.send_response(200)
        self.send_header("Content-Length", str(len(BODY) - start))
        self.end_headers()
        end = len(BODY) if self.server.stop_after is None else self.server.stop_after
        self.wfile.write(BODY[start:end])
        if self.server.hang is not None:
            self.server.hang.wait(LIMIT)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("no_proxy", "*")
    with Server(("127.0.0.1", 0), Handler) as running:
        running.requested_ranges = []
        thread = threading.Thread(target=running.serve_forever, args=(0.01,))
        thread.start()
        yield running
        running.shutdown()
        thread.join()


def part_file(target: Path) -> Path:
    return target.with_name(target.name + ".part")


def test_a_download_is_complete_and_reports_its_progress(server, tmp_path):
    reports = []
    target = tmp_path / "folder" / "set.bin"
    download_file(server.url(), DIGEST, target, progress=lambda *step: reports.append(step))
    assert target.read_bytes() == BODY
    assert reports[0] == (0, len(BODY))
    assert reports[-1] == (len(BODY), len(BODY))
    assert not part_file(target).exists()


def test_a_download_resumes_after_a_lost_connection(server, tmp_path):
    target = tmp_path / "set.bin"
    server.stop_after = 300_000
    with pytest.raises(
        DownloadError, match=r"connection lost after 300000 bytes .* run again to resume"
    ):
        download_file(server.url(), DIGEST, target)
    assert not target.exists()
    assert part_file(target).read_bytes() == BODY[:300_000]
    server.stop_after = None
    download_file(server.url(), DIGEST, target)
    assert server.requested_ranges == [None, "bytes=300000-"]
    assert target.read_bytes() == BODY


def test_a_silent_server_counts_as_a_lost_connection(server, tmp_path):
    target = tmp_path / "set.bin"
    server.stop_after, server.hang = 1000, threading.Event()
    with pytest.raises(DownloadError, match="connection lost after 1000 bytes"):
        download_file(server.url(), DIGEST, target, timeout=3.0)
    server.hang.set()
    assert part_file(target).read_bytes() == BODY[:1000]


def test_without_range_support_a_download_restarts(server, tmp_path):
    target = tmp_path / "set.bin"
    part_file(target).write_bytes(BODY[:1000])
    server.supports_ranges = False
    download_file(server.url(), DIGEST, target)
    assert target.read_bytes() == BODY


def test_a_complete_part_file_is_used(server, tmp_path):
    target = tmp_path / "set.bin"
    part_file(target).write_bytes(BODY)
    download_file(server.url(), DIGEST, target)
    assert target.read_bytes() == BODY


def test_a_file_with_a_wrong_hash_is_deleted(server, tmp_path):
    target = tmp_path / "set.bin"
    with pytest.raises(DownloadError, match=f"expected SHA-256 {'0' * 64}, got {DIGEST}"):
        download_file(server.url(), "0" * 64, target)
    assert list(tmp_path.iterdir()) == []


def test_a_part_of_another_file_is_detected_and_deleted(server, tmp_path):
    target = tmp_path / "set.bin"
    part_file(target).write_bytes(b"x" * 1000)
    with pytest.raises(DownloadError, match="download deleted"):
        download_file(server.url(), DIGEST, target)
    assert list(tmp_path.iterdir()) == []


def test_a_missing_page_is_reported_with_its_status_code(server, tmp_path):
    with pytest.raises(DownloadError, match=r"other.bin: server returned 404"):
        download_file(server.url("other.bin"), DIGEST, tmp_path / "set.bin")
    assert list(tmp_path.iterdir()) == []


def test_without_a_network_the_error_tells_where_to_put_the_file(monkeypatch, tmp_path):
    monkeypatch.setenv("no_proxy", "*")
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # bound but not listening: connections are refused
        url = f"http://127.0.0.1:{unused.getsockname()[1]}/set.bin"
        with pytest.raises(DownloadError) as error:
            download_file(url, DIGEST, tmp_path / "set.bin")
    assert f"cannot reach {url}" in str(error.value)
    assert f"put that file at {tmp_path / 'set.bin'} and run again" in str(error.value)
