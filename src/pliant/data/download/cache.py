"""The data root: find, check and download data sets."""

import gzip
import hashlib
import os
import shutil
import sys
import tarfile
import tempfile
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Literal

from pliant.data.download import fetch
from pliant.data.download.published import DatasetManifest
from pliant.storage import atomic
from pliant.value import Value


def get_data_root(
    root: str | Path | None = None, environment: Mapping[str, str] = os.environ
) -> Path:
    """Return the folder of all data sets: `root`, PLIANT_DATA or the user's cache folder."""
    if root is not None:
        return Path(root).expanduser()
    if folder := environment.get("PLIANT_DATA"):
        return Path(folder).expanduser()
    return _get_cache_folder(environment) / "pliant"


def _get_cache_folder(environment: Mapping[str, str]) -> Path:
    if folder := environment.get("XDG_CACHE_HOME"):
        return Path(folder)
    if sys.platform == "win32" and (folder := environment.get("LOCALAPPDATA")):
        return Path(folder)
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches"
    return Path.home() / ".cache"


def find_file(root: Path, folder: str, name: str) -> Path | None:
    """Return a data file, plain or gzipped, from the set's folder or the root itself."""
    for parent in (root / folder, root):
        for path in (parent / name, parent / f"{name}.gz"):
            if path.is_file():
                return path
    return None


def locate_file(root: Path, manifest: DatasetManifest, name: str) -> Path:
    """Return the path of a data file, or raise an error that tells how to get it."""
    path = find_file(root, manifest.folder, name)
    if path is None:
        raise FileNotFoundError(
            f"{root / manifest.folder / name}: expected this file (or with .gz): "
            f"run `pliant data get {manifest.name}` or set PLIANT_DATA to another folder"
        )
    return path


def find_femnist_part(root: Path, part: str) -> Path | None:
    """Return the folder of LEAF's `train` or `test` files."""
    for parent in (root / "femnist", root / "femnist" / "data", root):
        if any((parent / part).glob("*.json")):
            return parent / part
    return None


DatasetState = Literal["complete", "damaged", "incomplete", "missing"]


class DatasetStatus(Value, frozen=True):
    """The state of one data set under a root."""

    name: str
    title: str
    state: DatasetState
    present: tuple[str, ...] = ()
    damaged: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()


def inspect_dataset(manifest: DatasetManifest, root: Path, *, verify: bool = True) -> DatasetStatus:
    """Look for the files of a set and, if `verify`, check their SHA-256."""
    digests = {file.name: file.sha256 for file in manifest.files}
    found = {name: find_file(root, manifest.folder, name) for name in digests}
    if not manifest.files:  # FEMNIST, whose files have no fixed names
        found = {part: find_femnist_part(root, part) for part in ("train", "test")}
    paths: dict[str, list[str]] = {"present": [], "damaged": [], "missing": []}
    for name, path in found.items():
        if path is None:
            paths["missing"].append(str(root / manifest.folder / name))
        elif verify and name in digests and hash_content(path) != digests[name]:
            paths["damaged"].append(str(path))
        else:
            paths["present"].append(str(path))
    state: DatasetState = "incomplete" if paths["missing"] else "complete"
    if paths["damaged"]:
        state = "damaged"
    elif len(paths["missing"]) == len(found):
        state = "missing"
    return DatasetStatus(manifest.name, manifest.title, state, *map(tuple, paths.values()))


def hash_content(path: Path) -> str | None:
    """Return the SHA-256 of a file's plain content, or None if it cannot be unpacked."""
    if path.suffix != ".gz":
        return fetch.hash_file(path)
    try:
        with gzip.open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except (OSError, EOFError, zlib.error):
        return None


def download_dataset(
    manifest: DatasetManifest,
    root: Path,
    *,
    progress: Callable[[str], fetch.ProgressCallback] = lambda name: fetch.ignore_progress,
) -> DatasetStatus:
    """Download the missing or damaged files of a set; call `progress` once per file."""
    if not manifest.downloads:
        raise fetch.DownloadError(
            f"{manifest.name} cannot be downloaded: {manifest.manual_instructions} in "
            f"{root / manifest.folder}"
        )
    before = inspect_dataset(manifest, root)
    if before.state == "complete":
        return before
    present_names = {Path(path).name.removesuffix(".gz") for path in before.present}
    for item in manifest.downloads:
        if item.is_archive:
            archive = root / item.name
            # the user may have put the archive there by hand
            if not archive.is_file() or fetch.hash_file(archive) != item.sha256:
                fetch.download_file(item.url, item.sha256, archive, progress=progress(item.name))
            with open(archive, "rb") as file:
                unpack_archive(file, manifest, root, archive)
            archive.unlink()
        elif item.name.removesuffix(".gz") not in present_names:
            target = root / manifest.folder / item.name
            fetch.download_file(item.url, item.sha256, target, progress=progress(item.name))
            plain = target.with_name(target.name.removesuffix(".gz"))
            if str(plain) in before.damaged:
                plain.unlink()  # it would take precedence over the gzipped file
    return inspect_dataset(manifest, root)


def unpack_archive(
    archive: IO[bytes], manifest: DatasetManifest, root: Path, where: object
) -> None:
    """Extract only the files of a set from a tar archive into their folder.

    Files are written to a temporary folder under their plain names and moved once all are present
    with the right SHA-256, so no path inside the archive is ever followed.
    """
    target = root / manifest.folder
    target.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".unpacking.", dir=root) as name:
        scratch = Path(name)
        try:
            with tarfile.open(fileobj=archive, mode="r|*") as tar:
                digests = _extract_files(tar, manifest, scratch)
        except (tarfile.TarError, OSError, EOFError, zlib.error) as error:
            raise ValueError(f"{where}: expected a complete tar archive, got {error}") from None
        for file in manifest.files:
            if (digest := digests.get(file.name, "no such file")) != file.sha256:
                raise ValueError(
                    f"{where}: expected {file.name} with SHA-256 {file.sha256}, got {digest}"
                )
        for file in manifest.files:
            os.replace(scratch / file.name, target / file.name)
    atomic.sync_folder(target)


def _extract_files(
    tar: tarfile.TarFile, manifest: DatasetManifest, scratch: Path
) -> dict[str, str]:
    names = {f"{manifest.folder}/{file.name}": file.name for file in manifest.files}
    digests: dict[str, str] = {}
    for member in tar:
        name = names.get(member.name.removeprefix("./"))
        content = tar.extractfile(member) if name and member.isreg() else None
        if name is not None and content is not None:
            with open(scratch / name, "wb") as file:
                shutil.copyfileobj(content, file)
                file.flush()
                os.fsync(file.fileno())
            digests[name] = fetch.hash_file(scratch / name)
    return digests
