"""The runs below a folder: found by walking it, told in a few words from the ends of their files.

A run is asked for by the name under which it was found; no path is ever made from what a browser
sends, and symbolic links are not followed.
"""

import os
from collections import OrderedDict
from pathlib import Path
from typing import Any

import msgspec

from pliant import record
from pliant.dashboard.fold import Fold, round_lines
from pliant.dashboard.tail import read_part
from pliant.dashboard.trials import Search

EVENTS = "events.jsonl"
TRIALS = "trials.jsonl"  # of a search
END = 1 << 16  # bytes of a file's end that are read for its summary
LIMIT = 1 << 23  # bytes of a config
FOLDS = 48  # runs whose rounds are kept in memory
ROUND = b'{"type":"round"'


class Summary(msgspec.Struct, frozen=True):
    """One line of the list of runs."""

    id: str
    name: str
    method: str = ""
    about: str = ""  # network, data, seed
    rounds: int = 0  # wanted
    done: int = 0
    seconds: float = 0.0
    accuracy: float | None = None
    changed: float = 0.0  # when its file was written to last
    is_search: bool = False

    @property
    def is_finished(self) -> bool:
        """Tell whether all its rounds are done."""
        return 0 < self.rounds <= self.done


class Shelf:
    """The runs of a folder and what is known of each; `version` rises whenever that changes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.resolve()
        self.version = 0
        self._configs: dict[str, Summary] = {}
        self._known: dict[str, tuple[int, Summary, tuple[int, int]]] = {}
        self._folds: OrderedDict[str, Fold | Search] = OrderedDict()

    def scan(self, *, anew: bool = True) -> None:
        """Look what has changed: in all runs, or only in those that were not finished."""
        if anew:
            found = {path.relative_to(self.folder).as_posix() for path in record.find(self.folder)}
            for name in self._known.keys() - found:
                del self._known[name], self._configs[name]
                self._folds.pop(name, None)
                self.version += 1
        else:
            found = {name for name, known in self._known.items() if not known[1].is_finished}
        for name in found:
            self._look(name)

    def _look(self, name: str) -> None:
        if name not in self._configs:
            self._configs[name] = _described(self.folder / name, name)
        path = self._records(name)
        try:
            stat = os.stat(path, follow_symlinks=False)
            state = (stat.st_size, stat.st_mtime_ns)
        except OSError:
            state = (0, 0)
        known = self._known.get(name)
        if known is not None and known[2] == state:
            return
        summary = _ended(self._configs[name], path, *state)
        if known is None or known[1] != summary:
            self.version += 1
        version = self.version if known is None or known[1] != summary else known[0]
        self._known[name] = (version, summary, state)

    def _records(self, name: str) -> Path:
        return self.folder / name / (TRIALS if self._configs[name].is_search else EVENTS)

    def summaries(self, since: int = 0) -> list[Summary]:
        """Return what has changed since a version, newest runs first."""
        chosen = [summary for version, summary, _ in self._known.values() if version > since]
        return sorted(chosen, key=lambda one: (-one.changed, one.name))

    def __len__(self) -> int:
        return len(self._known)

    def fold(self, name: str) -> Fold | Search:
        """Return a run's rounds, as far as they were read; LookupError if there is no such run."""
        if name not in self._known:
            raise LookupError(f"no run {name!r} here")
        if name not in self._folds:
            path = self._records(name)
            self._folds[name] = Search(path) if self._configs[name].is_search else Fold(path)
            while len(self._folds) > FOLDS:
                self._folds.popitem(last=False)
        self._folds.move_to_end(name)
        return self._folds[name]

    def config(self, name: str) -> dict[str, Any]:
        """Return what a run was asked for and what it was made by."""
        if name not in self._known:
            raise LookupError(f"no run {name!r} here")
        folder = self.folder / name
        return {"config": _json(folder / "config.json"), "made": _json(folder / "versions.json")}


def _json(path: Path) -> Any:
    try:
        return msgspec.json.decode(read_part(path, 0, LIMIT))
    except (OSError, msgspec.DecodeError):
        return {}


def _described(folder: Path, name: str) -> Summary:
    config = _json(folder / "config.json")

    def at(*keys: str) -> Any:
        found = config
        for key in keys:
            found = found.get(key) if isinstance(found, dict) else None
        return found

    parts = [at("network", "name"), at("data", "name"), f"seed {at('seed')}"]
    about = " · ".join(str(part) for part in parts if part not in (None, "seed None"))
    rounds, is_search = at("rounds"), at("method") is None and at("search") is not None
    return Summary(
        name,
        name if name != "." else folder.name,
        "search" if is_search else str(at("method", "type") or ""),
        about,
        rounds if isinstance(rounds, int) else 0,
        is_search=is_search,
    )


def _ended(described: Summary, path: Path, size: int, stamp: int) -> Summary:
    """Add what the end of the record file says."""
    if not size:
        return described
    try:
        lines = read_part(path, max(0, size - END), size).splitlines(keepends=True)
    except OSError:
        return described
    last, accuracy = None, None
    for line in reversed(lines):
        if not (line.startswith(ROUND) and line.endswith(b"\n")):
            continue
        try:
            found = round_lines.decode(line)
        except msgspec.DecodeError:
            continue
        last = last or found
        accuracy = found.accuracy
        if accuracy is not None:
            break
    changed = stamp / 1e9
    if last is None:
        return msgspec.structs.replace(described, changed=changed)
    return msgspec.structs.replace(
        described, done=last.round + 1, seconds=last.seconds, accuracy=accuracy, changed=changed
    )
