"""The runs of a report: where they are, what they were asked for, which differ in the seed only."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from pliant import record

EVENTS = "events.jsonl"
ASIDE = ("seed", "workers")  # what does not set one group apart from another


@dataclass(frozen=True)
class Run:
    """One run: its folder, its name among the others, its config as plain data."""

    folder: Path
    name: str
    config: dict[str, Any]
    made_by: dict[str, str]  # versions, and the command

    @property
    def events(self) -> Path:
        """Return its file of records."""
        return self.folder / EVENTS


@dataclass(frozen=True)
class Group:
    """Runs that differ in their seed only."""

    label: str
    runs: tuple[Run, ...]

    @property
    def first(self) -> Run:
        """Return the run that stands for all."""
        return self.runs[0]


def load_runs(paths: Sequence[Path]) -> list[Run]:
    """Read the runs in these folders; what has no record yet is left out."""
    found: dict[Path, None] = {}
    for path in paths:
        if not path.is_dir():
            raise FileNotFoundError(f"{path}: expected the folder of a run or of runs")
        found |= dict.fromkeys(record.find(path.resolve()))
    kept = [folder for folder in found if _has_records(folder)]
    if not kept:
        return []
    base = kept[0].parent if len(kept) == 1 else Path(os.path.commonpath(kept))
    return [_load(folder, str(folder.relative_to(base))) for folder in kept]


def _has_records(folder: Path) -> bool:
    path = folder / EVENTS
    return path.is_file() and path.stat().st_size > 0


def _load(folder: Path, name: str) -> Run:
    return Run(folder, name, _read(folder / "config.json"), _read(folder / "versions.json"))


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise ValueError(f"{path}: {error}") from None


def grouped(runs: Sequence[Run]) -> list[Group]:
    """Put runs together that differ in their seed only, in the order of their first."""
    found: dict[bytes, list[Run]] = {}
    for run in runs:
        rest = {key: value for key, value in run.config.items() if key not in ASIDE}
        found.setdefault(msgspec.json.encode(rest, order="sorted"), []).append(run)
    labels = _labels([members[0].name for members in found.values()])
    return [
        Group(label, tuple(members)) for label, members in zip(labels, found.values(), strict=True)
    ]


def _labels(names: list[str]) -> list[str]:
    """Shorten names like method=kappa_0.3,seed=0 to what sets them apart, in words."""
    short = [" ".join(_parts(name)) or name for name in names]
    return [one if short.count(one) == 1 else name for one, name in zip(short, names, strict=True)]


def _parts(name: str) -> Iterator[str]:
    for part in name.split(","):
        key, equals, value = part.rpartition("=")
        if not equals or key.rpartition("/")[2] != "seed":
            yield value.replace("_", " ") if equals else value


def flattened(config: dict[str, Any], above: str = "") -> dict[str, str]:
    """Return the leaves of a config by their dotted keys; long lists are told by their length."""
    found: dict[str, str] = {}
    for key, value in config.items():
        if isinstance(value, dict):
            found |= flattened(value, f"{above}{key}.")
        else:
            text = msgspec.json.encode(value).decode()
            is_long = isinstance(value, list) and len(text) > 120
            found[f"{above}{key}"] = f"[{len(value)} entries]" if is_long else text
    return found
