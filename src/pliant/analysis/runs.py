"""Find runs, read their configs and rounds, and group those that differ only in their seed."""

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, get_args

import msgspec
import numpy as np
from numpy.typing import NDArray

from pliant.analysis.records import read_rounds
from pliant.engine.record_fields import EVENTS, RoundFields
from pliant.storage import run_dir

Floats = NDArray[np.float64]

COLUMNS = (
    "round", "seconds", "tasks", "merged", "samples", "steps", "macs", "useful", "available",
    "down", "up", "busy", "joules", "loss", "accuracy", "test_loss",
)  # fmt: skip
FEDERATED, SPLIT = "federated methods", "split methods"
IGNORED_KEYS = ("seed", "workers")  # differences that do not separate groups


@dataclass(frozen=True, eq=False)
class RunFolder:
    """One run: its folder, its name relative to the others, its config as plain data."""

    folder: Path
    name: str
    config: dict[str, Any]
    provenance: dict[str, str]  # versions and the command

    @cached_property
    def rounds(self) -> list[RoundFields]:
        return read_rounds(self.folder)

    @cached_property
    def columns(self) -> dict[str, Floats]:
        """Return the rounds by column; numbers that are not known are NaN."""
        return {
            name: np.array([getattr(record, name) for record in self.rounds], np.float64)
            for name in COLUMNS
        }

    @property
    def is_asynchronous(self) -> bool:
        """Return whether its rounds are versions of the network."""
        return any(record.staleness is not None for record in self.rounds)

    def __getitem__(self, name: str) -> Floats:
        return self.columns[name]

    def axis(self, name: str) -> Floats:
        """Return rounds, virtual seconds, MACs or bytes so far, at the end of each round."""
        axes = {
            "rounds": self["round"] + 1,
            "seconds": self["seconds"],
            "macs": np.cumsum(self["macs"]),
            "bytes": np.cumsum(self["down"] + self["up"]),
        }
        return axes[name]

    def total(self, *names: str) -> float:
        return float(sum(self[name].sum() for name in names))

    @property
    def final_accuracy(self) -> float | None:
        accuracies = (record.accuracy for record in reversed(self.rounds))
        return next((accuracy for accuracy in accuracies if accuracy is not None), None)


@dataclass(frozen=True)
class RunGroup:
    """Runs that differ only in their seed."""

    label: str
    runs: tuple[RunFolder, ...]
    index: int = 0  # in the report

    @property
    def first_run(self) -> RunFolder:
        return self.runs[0]

    def total(self, name: str) -> float:
        return sum(run.total(name) for run in self.runs)

    @property
    def outcome_counts(self) -> Counter[str]:
        rounds = (record for run in self.runs for record in run.rounds)
        return sum((Counter(record.outcomes) for record in rounds), Counter[str]())

    @property
    def kind(self) -> str:
        """Return whether the method is federated or splits the network."""
        from pliant.split import AnySplit

        split_tags = {method.__struct_config__.tag for method in get_args(AnySplit)}
        config = self.first_run.config.get("method", {})
        return SPLIT if config.get("type") in split_tags else FEDERATED


def load_runs(paths: Sequence[Path]) -> list[RunFolder]:
    """Read the runs in these folders that have a record."""
    folders: dict[Path, None] = {}
    for path in paths:
        if not path.is_dir():
            raise FileNotFoundError(f"{path}: expected the folder of a run or of runs")
        folders |= dict.fromkeys(run_dir.find_run_dirs(path.resolve()))
    records = {folder: folder / EVENTS for folder in folders}
    started = [folder for folder, path in records.items() if path.is_file() and path.stat().st_size]
    if not started:
        return []
    base = started[0].parent if len(started) == 1 else Path(os.path.commonpath(started))
    names = [str(folder.relative_to(base)) for folder in started]
    return [_load_run(folder, name) for folder, name in zip(started, names, strict=True)]


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


def select_finished(groups: Sequence[RunGroup]) -> list[RunGroup]:
    """Return the groups with a finished round, numbered, without runs that have none."""
    finished = [(g.label, tuple(run for run in g.runs if run.rounds)) for g in groups]
    with_runs = [(label, runs) for label, runs in finished if runs]
    return [RunGroup(label, runs, index) for index, (label, runs) in enumerate(with_runs)]


def group_comparable(groups: list[RunGroup]) -> dict[str, list[RunGroup]]:
    """Divide groups by kind of method where the kinds have no data in common, as in `pliant demo`.

    Curves on the same axes invite a comparison. The name is empty if all groups are comparable.
    """
    by_kind: dict[str, list[RunGroup]] = {}
    for group in groups:
        by_kind.setdefault(group.kind, []).append(group)
    data = [
        {msgspec.json.encode(g.first_run.config.get("data"), order="sorted") for g in members}
        for members in by_kind.values()
    ]
    return {"": groups} if len(data) < 2 or set.intersection(*data) else by_kind


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


def get_config_value(config: dict[str, Any], *keys: str) -> Any:
    """Return a value of nested plain data; None if there is none."""
    value: Any = config
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    return value


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
