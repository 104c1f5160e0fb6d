"""The data root as a store: which sets are there, whole or damaged, and how to get the others."""

import gzip
import os
import shutil
import tarfile
import tempfile
import zlib
from collections.abc import Callable, Iterable
from hashlib import sha256
from pathlib import Path
from typing import IO, Literal

from pliant import atomic
from pliant.data.fetch import DownloadFailed, Progress, download, file_digest, silent
from pliant.data.published import Download, Published
from pliant.data.root import find_file
from pliant.value import Value

State = Literal["complete", "damaged", "incomplete", "missing"]


class Status(Value, frozen=True):
    """What there is of one set under a root."""

    name: str
    title: str
    state: State
    present: tuple[str, ...] = ()
    damaged: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()


def status(published: Published, root: Path, *, is_verified: bool = True) -> Status:
    """Look for the files of a set; check the SHA-256 of each one if asked to."""
    if not published.files:
        return _status_of_folders(published, root)
    present: list[str] = []
    damaged: list[str] = []
    missing: list[str] = []
    for file in published.files:
        path = find_file(root, published.folder, file.name)
        if path is None:
            missing.append(str(root / published.folder / file.name))
        elif is_verified and content_digest(path) != file.sha256:
            damaged.append(str(path))
        else:
            present.append(str(path))
    state: State = "damaged" if damaged else "incomplete" if missing else "complete"
    if len(missing) == len(published.files):
        state = "missing"
    return Status(
        published.name, published.title, state, tuple(present), tuple(damaged), tuple(missing)
    )


def content_digest(path: Path) -> str | None:
    """Return the SHA-256 of a file's plain content, None where it cannot be unpacked."""
    if path.suffix != ".gz":
        return file_digest(path)
    found = sha256()
    try:
        with gzip.open(path, "rb") as file:
            while block := file.read(1 << 20):
                found.update(block)
    except (OSError, EOFError, zlib.error):
        return None
    return found.hexdigest()


def get(
    published: Published,
    root: Path,
    *,
    progress: Callable[[str], Progress] = lambda name: silent,
    timeout: float = 30.0,
) -> Status:
    """Download what is missing or damaged of a set; `progress` is asked once for each file."""
    if not published.downloads:
        raise DownloadFailed(
            f"{published.name} cannot be downloaded: {published.by_hand} in "
            f"{root / published.folder}"
        )
    before = status(published, root)
    if before.state == "complete":
        return before
    for item in published.downloads:
        if item.is_archive:
            _get_archive(published, item, root, progress(item.name), timeout)
        elif not _is_good(published, item, before):
            target = root / published.folder / item.name
            download(item.url, item.sha256, target, progress=progress(item.name), timeout=timeout)
            plain = target.with_name(target.name.removesuffix(".gz"))
            if str(plain) in before.damaged:
                plain.unlink()  # it would hide the good gzipped one
    return status(published, root)


def unpack(archive: IO[bytes], published: Published, root: Path, where: object) -> None:
    """Take the files of a set, and only these, out of a tar archive and put them in their folder.

    They are written to a temporary folder under their own plain names and moved when all are there
    and have the right SHA-256: no path inside the archive is ever followed.
    """
    target = root / published.folder
    target.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".unpacking.", dir=root) as name:
        scratch = Path(name)
        try:
            with tarfile.open(fileobj=archive, mode="r|*") as tar:
                found = _take(tar, published, scratch)
        except (tarfile.TarError, OSError, EOFError, zlib.error) as error:
            raise ValueError(f"{where}: expected a whole tar archive, got {error}") from None
        for file in published.files:
            if found.get(file.name) != file.sha256:
                got = found.get(file.name, "no such file")
                raise ValueError(
                    f"{where}: expected {file.name} of SHA-256 {file.sha256}, got {got}"
                )
        for file in published.files:
            os.replace(scratch / file.name, target / file.name)
    atomic.sync_folder(target)


def _take(tar: tarfile.TarFile, published: Published, scratch: Path) -> dict[str, str]:
    wanted = {f"{published.folder}/{file.name}": file.name for file in published.files}
    found: dict[str, str] = {}
    for member in tar:
        name = wanted.get(member.name.removeprefix("./"))
        content = tar.extractfile(member) if name and member.isreg() else None
        if name is not None and content is not None:
            with open(scratch / name, "wb") as file:
                shutil.copyfileobj(content, file)
                file.flush()
                os.fsync(file.fileno())
            found[name] = file_digest(scratch / name)
    return found


def _get_archive(
    published: Published, item: Download, root: Path, progress: Progress, timeout: float
) -> None:
    archive = root / item.name
    # a file that the user put there by hand is as good as a download
    if not archive.is_file() or file_digest(archive) != item.sha256:
        download(item.url, item.sha256, archive, progress=progress, timeout=timeout)
    with open(archive, "rb") as file:
        unpack(file, published, root, archive)
    archive.unlink()


def _is_good(published: Published, item: Download, before: Status) -> bool:
    names = {Path(path).name.removesuffix(".gz") for path in before.present}
    return item.name.removesuffix(".gz") in names


def _status_of_folders(published: Published, root: Path) -> Status:
    parts = [femnist_part(root, part) for part in ("train", "test")]
    missing = [root / published.folder / part for part in ("train", "test")]
    if all(part is not None for part in parts):
        return Status(published.name, published.title, "complete", present=_texts(parts))
    if any(part is not None for part in parts):
        lost = [path for path, part in zip(missing, parts, strict=True) if part is None]
        return Status(
            published.name, published.title, "incomplete", _texts(parts), missing=_texts(lost)
        )
    return Status(published.name, published.title, "missing", missing=_texts(missing))


def femnist_part(root: Path, part: str) -> Path | None:
    """Return the folder of LEAF's files for `train` or `test`."""
    for place in (root / "femnist", root / "femnist" / "data", root):
        if any((place / part).glob("*.json")):
            return place / part
    return None


def _texts(paths: Iterable[Path | None]) -> tuple[str, ...]:
    return tuple(str(path) for path in paths if path is not None)
