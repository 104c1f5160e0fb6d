"""Run directories: the config of a run and the versions it ran on."""

import os
import platform
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from itertools import count, islice
from pathlib import Path
from typing import Any

import msgspec

from pliant.storage import atomic, formats
from pliant.storage.run_lock import RunLock

TORCH_THREADS = 1  # in every process of a run, so that no result depends on the cores
CONFIG_FILE = "config.json"
INPUTS_FILE = "inputs.json"
RECORD_FILES = ("events.jsonl", "trials.jsonl")  # of runs and of searches
TABLE_FILE = "table.safetensors"  # of a finished search
LIBRARIES = ("pliant", "torch", "numpy", "msgspec", "safetensors", "pymoo", "flwr", "ray")


def create_run_dir(folder: Path, config: dict[str, Any]) -> None:
    """Create a run directory with its config and the versions in use, before the first step."""
    if (folder / CONFIG_FILE).exists():
        raise FileExistsError(
            f"{folder} already holds a run: resume it with `pliant run --resume "
            f"{shlex.quote(str(folder))}`, or choose another folder"
        )
    if any(folder.glob(f"*/{CONFIG_FILE}")):  # it would hide them
        raise FileExistsError(f"{folder} holds several runs: choose another folder for this one")
    command = shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])
    _write_json(folder / "versions.json", {"command": command} | collect_versions())
    _write_json(folder / CONFIG_FILE, {"format": formats.RUN_CONFIG.number} | config)


@contextmanager
def remove_unused(*folders: Path) -> Iterator[None]:
    """Remove folders that are new and hold no record yet if what is done here fails.

    Otherwise the folder of a run that was refused would block the corrected one.
    """
    new_folders = [folder for folder in folders if not folder.exists()]
    new_parents = {p for folder in new_folders for p in folder.parents if not p.exists()}
    try:
        yield
    except (Exception, SystemExit):
        for folder in new_folders:
            if not any(_has_records(folder / name) for name in RECORD_FILES):
                shutil.rmtree(folder, ignore_errors=True)
        for parent in sorted(new_parents, key=lambda path: -len(path.parts)):
            with suppress(OSError):  # it is not empty
                parent.rmdir()
        raise


def _has_records(path: Path) -> bool:
    """Return whether a file has a line after its header."""
    if not path.exists():
        return False
    with open(path, "rb") as file:
        return len(list(islice(file, 2))) == 2


def read_config(folder: Path) -> dict[str, Any]:
    """Read the config of a run as plain data."""
    try:
        return _read_json(folder / CONFIG_FILE)
    except FileNotFoundError:
        raise FileNotFoundError(f"{folder}: expected a run folder, found no config.json") from None


def read_inputs(folder: Path) -> dict[str, Any] | None:
    """Read what a run was started with, as far as it was written."""
    path = folder / INPUTS_FILE
    return _read_json(path) if path.exists() else None


def write_inputs(folder: Path, inputs: dict[str, Any]) -> None:
    """Write what a run was started with, for `read_inputs`."""
    _write_json(folder / INPUTS_FILE, {"format": formats.RUN_CONFIG.number} | inputs)


def set_rounds(folder: Path, rounds: int) -> None:
    """Change the number of rounds in the config of a run."""
    config = {"format": formats.RUN_CONFIG.number} | read_config(folder) | {"rounds": rounds}
    _write_json(folder / CONFIG_FILE, config)


def check_run_format(folder: Path) -> None:
    """Refuse a run that an older or a newer pliant wrote; say nothing about unreadable ones."""
    try:
        read_config(folder)
    except formats.UnsupportedFormat:
        raise
    except (OSError, ValueError):
        return


def find_run_dirs(folder: Path) -> Iterator[Path]:
    """Yield all run folders below a folder, or the folder itself; skip symbolic links."""
    if (folder / CONFIG_FILE).is_file():
        yield folder
        return  # runs are not nested
    with os.scandir(folder) as entries:
        inner = sorted(entry.path for entry in entries if entry.is_dir(follow_symlinks=False))
    for path in inner:
        yield from find_run_dirs(Path(path))


def move_aside(folder: Path) -> Path | None:
    """Rename a folder to NAME.old-1, or the next free number; None if there is no folder."""
    if not folder.exists():
        return None
    for run_folder in find_run_dirs(folder):
        RunLock(run_folder).release()  # refuses while another process writes there
    names = (folder.with_name(f"{folder.name}.old-{number}") for number in count(1))
    return folder.rename(next(path for path in names if not path.exists()))


def collect_versions() -> dict[str, str]:
    """Return what a result depends on: interpreter, platform, libraries, threads and commit."""
    versions = {"python": sys.version.split()[0], "platform": platform.platform()}
    for library in LIBRARIES:
        if (number := _find_version(library)) is not None:
            versions[library] = number
    versions["torch threads"] = str(TORCH_THREADS)
    commit = _find_commit(Path(__file__).resolve().parents[1])
    return versions | ({"commit": commit} if commit else {})


@cache  # read from disk and parsed like a mail; a process keeps what it has imported
def _find_version(library: str) -> str | None:
    try:
        return version(library)
    except PackageNotFoundError:
        return None


def _find_commit(package: Path) -> str | None:
    """Return the commit of the checkout that a package belongs to; None for an installed package.

    A repository that merely contains the environment is the user's own.
    """
    root = package.parent.parent
    if package.parent.name != "src" or not (root / ".git").exists():
        return None
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=40"]
    try:
        completed = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return completed.stdout.strip() or None


def _read_json(path: Path) -> dict[str, Any]:
    try:
        plain = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: {error}") from None
    formats.RUN_CONFIG.check(plain.pop("format", None), path)
    return plain


def _write_json(path: Path, value: Any) -> None:
    atomic.write_bytes(path, msgspec.json.format(msgspec.json.encode(value), indent=2) + b"\n")
