"""Download one file: resumed where it was cut, checked by SHA-256, there whole or not at all."""

import os
from collections.abc import Callable
from hashlib import sha256
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

from pliant import atomic

Progress = Callable[[int, int | None], None]  # bytes so far, bytes in all if the server says it

BLOCK = 1 << 16


class DownloadFailed(OSError):
    """A download did not end in the file that was wanted."""


def silent(done: int, total: int | None) -> None:
    """Show nothing."""


def download(
    url: str, digest: str, target: Path, *, progress: Progress = silent, timeout: float = 30.0
) -> Path:
    """Fetch `url` into `target`, whose SHA-256 must be `digest`.

    Bytes go to a `.part` file beside it, from which the next call goes on after a cut connection.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(target.name + ".part")
    try:
        _transfer(url, part, progress, timeout)
    except HTTPError as error:
        error.close()
        raise DownloadFailed(f"{url}: the server says {error.code} {error.reason}") from None
    except URLError as error:
        raise DownloadFailed(
            f"cannot reach {url} ({error.reason}): put that file at {target} and run again"
        ) from None
    if (found := file_digest(part)) != digest:
        part.unlink()
        raise DownloadFailed(
            f"{url}: expected a file of SHA-256 {digest}, got {found}; nothing is kept"
        )
    os.replace(part, target)
    atomic.sync_folder(target.parent)
    return target


def file_digest(path: Path) -> str:
    """Return the SHA-256 of a file."""
    found = sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            found.update(block)
    return found.hexdigest()


def _transfer(url: str, part: Path, progress: Progress, timeout: float) -> None:
    have = part.stat().st_size if part.exists() else 0
    headers = {"User-Agent": "pliant"} | ({"Range": f"bytes={have}-"} if have else {})
    try:
        answer = urlopen(Request(url, headers=headers), timeout=timeout)
    except HTTPError as error:
        if error.code != 416 or not have:
            raise
        error.close()
        return  # nothing comes after `have`: the part is whole, or its SHA-256 will tell
    except (ConnectionError, TimeoutError, HTTPException) as error:
        raise _cut(url, have, error) from None
    with answer:
        if answer.status != 206 or not _goes_on_at(answer.headers.get("Content-Range"), have):
            have = 0  # the server knows no ranges: from the beginning
        length = answer.headers.get("Content-Length")
        total = have + int(length) if length is not None else None
        with open(part, "r+b" if have else "wb") as file:
            file.seek(have)
            done = have
            progress(done, total)
            while block := _read(answer, url, done):
                file.write(block)
                done += len(block)
                progress(done, total)
            os.fsync(file.fileno())
    if total is not None and done < total:
        raise _cut(url, done, f"{total} were announced")


def _read(answer: HTTPResponse, url: str, done: int) -> bytes:
    try:
        return answer.read1(BLOCK)  # what has come, so that all of it is on disk after a cut
    except (OSError, HTTPException) as error:
        raise _cut(url, done, error) from None


def _goes_on_at(content_range: str | None, have: int) -> bool:
    return content_range is not None and content_range.startswith(f"bytes {have}-")


def _cut(url: str, kept: int, why: object) -> DownloadFailed:
    return DownloadFailed(
        f"{url}: the connection was cut after {kept} bytes ({why}); run again to go on from there"
    )
