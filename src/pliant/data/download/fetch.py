"""Download one file: resumable, checked by SHA-256, and moved into place only when complete."""

import hashlib
import os
from collections.abc import Callable
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

from pliant.storage import atomic

ProgressCallback = Callable[[int, int | None], None]  # bytes so far, total bytes if known

CHUNK_BYTES = 1 << 16


class DownloadError(OSError):
    """A download failed."""


def ignore_progress(done: int, total: int | None) -> None: ...


def download_file(
    url: str,
    digest: str,
    target: Path,
    *,
    progress: ProgressCallback = ignore_progress,
    timeout: float = 30.0,
) -> Path:
    """Download `url` to `target`, whose SHA-256 must be `digest`.

    Bytes go to a `.part` file next to it, from which the next call resumes after an interruption.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(target.name + ".part")
    try:
        _transfer(url, part, progress, timeout)
    except HTTPError as error:
        error.close()
        raise DownloadError(f"{url}: server returned {error.code} {error.reason}") from None
    except URLError as error:
        raise DownloadError(
            f"cannot reach {url} ({error.reason}): put that file at {target} and run again"
        ) from None
    if (actual := hash_file(part)) != digest:
        part.unlink()
        raise DownloadError(f"{url}: expected SHA-256 {digest}, got {actual}; download deleted")
    os.replace(part, target)
    atomic.sync_folder(target.parent)
    return target


def hash_file(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _transfer(url: str, part: Path, progress: ProgressCallback, timeout: float) -> None:
    offset = part.stat().st_size if part.exists() else 0
    headers = {"User-Agent": "pliant"} | ({"Range": f"bytes={offset}-"} if offset else {})
    try:
        response = urlopen(Request(url, headers=headers), timeout=timeout)
    except HTTPError as error:
        if error.code != 416 or not offset:
            raise
        error.close()
        return  # no bytes are left: the part is complete, or its SHA-256 is wrong
    except (ConnectionError, TimeoutError, HTTPException) as error:
        raise _make_interruption_error(url, offset, error) from None
    with response:
        content_range = response.headers.get("Content-Range", "")
        if response.status != 206 or not content_range.startswith(f"bytes {offset}-"):
            offset = 0  # the server does not support ranges
        length = response.headers.get("Content-Length")
        total = offset + int(length) if length is not None else None
        with open(part, "r+b" if offset else "wb") as file:
            file.seek(offset)
            done = offset
            progress(done, total)
            while block := _read_chunk(response, url, done):
                file.write(block)
                done += len(block)
                progress(done, total)
            os.fsync(file.fileno())
    if total is not None and done < total:
        raise _make_interruption_error(url, done, f"expected {total}")


def _read_chunk(response: HTTPResponse, url: str, done: int) -> bytes:
    try:
        # read1 returns what has arrived, so an interruption loses nothing
        return response.read1(CHUNK_BYTES)
    except (OSError, HTTPException) as error:
        raise _make_interruption_error(url, done, error) from None


def _make_interruption_error(url: str, num_received: int, reason: object) -> DownloadError:
    return DownloadError(
        f"{url}: connection lost after {num_received} bytes ({reason}); run again to resume"
    )
