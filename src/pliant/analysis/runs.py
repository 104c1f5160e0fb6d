"""Find runs, read their configs, and group those that differ only in their seed."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from pliant.analysis.records import EVENTS
from pliant.storage import run_dir

IGNORED_KEYS = ("seed", "workers")  # differences that do not separate groups


@dataclass(frozen=True)
class RunFolder:
    """One run: its folder, its name relative to the others, its config as plain data."""

    folder: Path
    name: str
    config: dict[str, Any]
    provenance: dict[str, str]  # versions and the command


@dataclass(frozen=True)
class RunGroup:
    """Runs that differ only in their seed."""

    label: str
    runs: tuple[RunFolder, ...]

    @property
    def first_run(self) -> RunFolder:
        return self.runs[0]


def load_runs(paths: Sequence[Path]) -> list[RunFolder]:
    """Read the runs in these folders that have a record."""
    folders: dict[Path, None] = {}
    for path in paths:
        if not path.is_dir():
            raise FileNotFoundError(f"{path}: expected the folder of a run or of runs")
        folders |= dict.fromkeys(run_dir.find_run_dirs(path.resolve()))
    started = [folder for folder in folders if _has_records(folder)]
    if not started:
        return []
    base = started[0].parent if len(started) == 1 else Path(os.path.commonpath(started))
    names = [str(folder.relative_to(base)) for folder in started]
    return [_load_run(folder, name) for folder, name in zip(started, names, strict=True)]


def _has_records(folder: Path) -> bool:
    path = folder / EVENTS
    return path.is_file() and path.stat().st_size > 0


def _load_run(folder: Path, name: str) -> RunFolder:
    config, path = run_dir.read_config(folder), folder / "versions.json"
    try:
        versions = path.read_bytes() if path.is_file() else b"{}"
        return RunFolder(folder, name, config, msgspec.json.decode(versions, type=dict[str, Any]))
    except msgspec.DecodeError as error:
        raise ValueError(f"{path}: {error}") from None


def group_runs(runs: Sequence[RunFolder]) -> list[RunGroup]:
    """Group runs that differ only in their seed, in the order of their first run."""
    groups: dict[bytes, list[RunFolder]] = {}
    for run in runs:
        config = {key: value for key, value in run.config.items() if key not in IGNORED_KEYS}
        groups.setdefault(msgspec.json.encode(config, order="sorted"), []).append(run)
    labels = _shorten_names([members[0].name for members in groups.values()])
    pairs = zip(labels, groups.values(), strict=True)
    return [RunGroup(label, tuple(members)) for label, members in pairs]


def _shorten_names(names: list[str]) -> list[str]:
    """Shorten names such as method=kappa_0.3,seed=0 to kappa 0.3 where that is unique."""
    labels = [" ".join(_iter_label_parts(name)) or name for name in names]
    pairs = zip(labels, names, strict=True)
    return [label if labels.count(label) == 1 else name for label, name in pairs]


def _iter_label_parts(name: str) -> Iterator[str]:
    for part in name.split(","):
        key, equals, value = part.rpartition("=")
        if not equals or key.rpartition("/")[2] != "seed":
            yield value.replace("_", " ") if equals else value


def flatten_config(config: dict[str, Any], prefix: str = "") -> dict[str, str]:
    """Return the leaves of a config by dotted key; a long list is replaced by its length."""
    leaves: dict[str, str] = {}
    for key, value in config.items():
        if isinstance(value, dict):
            leaves |= flatten_config(value, f"{prefix}{key}.")
        else:
            text = msgspec.json.encode(value).decode()
            is_long = isinstance(value, list) and len(text) > 120
            leaves[f"{prefix}{key}"] = f"[{len(value)} entries]" if is_long else text
    return leaves
