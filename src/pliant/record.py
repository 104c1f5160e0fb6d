"""Run directories: what was asked for, what it ran on, and an append-only file of what happened."""

import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from pliant import atomic

THREADS = 1  # of torch in every process of a run, so that no result depends on the cores
LIBRARIES = ("pliant", "torch", "numpy", "msgspec", "safetensors", "pymoo", "flwr", "ray")
R = TypeVar("R")


class Records:
    """An append-only file of JSON lines; a line that a kill cut short is cut off on opening."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        keep = whole_size(path)
        self._file = open(path, "ab")  # noqa: SIM115 - closed by close(), the object is the context
        if self._file.tell() != keep:
            self._file.truncate(keep)
            self._file.seek(keep)

    def append(self, record: Any) -> None:
        """Write one record as one line, to the operating system at once."""
        self._file.write(msgspec.json.encode(record) + b"\n")
        self._file.flush()

    def position(self) -> int:
        """Force what was written to disk and return the size so far: a checkpoint stores it."""
        self._file.flush()
        os.fsync(self._file.fileno())
        return self._file.tell()

    def rewind(self, position: int) -> None:
        """Forget everything after a position: what a resumed run will write again."""
        if position > self._file.tell():
            raise ValueError(
                f"{self.path}: expected at least {position} bytes, got {self._file.tell()}"
            )
        self._file.truncate(position)
        self._file.seek(position)

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def __enter__(self) -> "Records":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def whole_size(path: Path) -> int:
    """Return the length of the part of a file that consists of whole lines."""
    if not path.exists():
        return 0
    size = path.stat().st_size
    with open(path, "rb") as file:
        end = size
        while end > 0:
            start = max(0, end - 65536)
            file.seek(start)
            found = file.read(end - start).rfind(b"\n")
            if found >= 0:
                return start + found + 1
            end = start
    return 0


def read(path: Path, kind: type[R]) -> Iterator[R]:
    """Yield the records of a file; a last line without its end is left out."""
    decoder = msgspec.json.Decoder(kind)
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                return
            try:
                yield decoder.decode(line)
            except msgspec.DecodeError as error:
                raise ValueError(f"{path}:{number}: {error}") from None


def begin(folder: Path, config: Any) -> None:
    """Make a run directory with its config and the versions it runs on, before the first step."""
    if (folder / "config.json").exists():
        raise FileExistsError(f"{folder} holds a run already: resume it or choose another folder")
    command = shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])
    atomic.write_bytes(folder / "versions.json", _pretty({"command": command} | versions()))
    atomic.write_bytes(folder / "config.json", _pretty(config))


def find(folder: Path) -> Iterator[Path]:
    """Yield the folders of runs in a folder, itself included; a symbolic link is not followed."""
    if (folder / "config.json").is_file():
        yield folder
        return  # a run holds no other runs
    with os.scandir(folder) as entries:
        inner = sorted(entry.path for entry in entries if entry.is_dir(follow_symlinks=False))
    for path in inner:
        yield from find(Path(path))


def versions() -> dict[str, str]:
    """Return what a result depends on: interpreter, platform, libraries, threads, the commit."""
    found = {"python": sys.version.split()[0], "platform": platform.platform()}
    for library in LIBRARIES:
        try:
            found[library] = version(library)
        except PackageNotFoundError:
            continue
    found["torch threads"] = str(THREADS)
    commit = _commit(Path(__file__).resolve().parent)
    return found | ({"commit": commit} if commit else {})


def _commit(package: Path) -> str | None:
    """Return the commit of the checkout that a package lies in; None where it is installed.

    The repository that an environment lies in is the user's own, and says nothing of the package.
    """
    root = package.parent.parent
    if package.parent.name != "src" or not (root / ".git").exists():
        return None
    try:
        asked = subprocess.run(
            ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=40"],
            capture_output=True,
            text=True,
            timeout=5,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return asked.stdout.strip() or None


def _pretty(value: Any) -> bytes:
    return msgspec.json.format(msgspec.json.encode(value), indent=2) + b"\n"
