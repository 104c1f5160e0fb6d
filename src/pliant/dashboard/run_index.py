"""Index the runs below a folder, and summarise each from its config and the end of its records.

A browser names a run as the index found it: no path is ever made from a request, and symbolic links
are not followed.
"""

import os
from collections import OrderedDict
from hashlib import blake2b
from pathlib import Path
from typing import Any

import msgspec

from pliant.analysis.runs import IGNORED_KEYS
from pliant.dashboard.run_view import RunView
from pliant.dashboard.search_view import SearchView
from pliant.engine.record_fields import EVENTS, decode_round
from pliant.storage import run_dir
from pliant.storage.tail import read_range

TRIALS = "trials.jsonl"  # of a search
TAIL_BYTES = 1 << 16  # at a file's end, read for its summary
MAX_CONFIG_BYTES = 1 << 23
MAX_VIEWS = 96  # runs whose rounds are held in memory


class RunSummary(msgspec.Struct, frozen=True):
    """One line of the list of runs."""

    id: str
    name: str
    method: str = ""
    comparison: str = ""  # the folder it is in; empty at the top
    group: str = ""  # the same for runs of a comparison that differ only in their seed
    about: str = ""  # network, data, seed
    rounds: int = 0  # in the config
    done: int = 0
    seconds: float = 0.0
    accuracy: float | None = None
    changed: float = 0.0  # when its records were last written
    is_search: bool = False
    has_table: bool = False  # a search that is finished
    table_rows: int = 0  # of the table in its config; 0: none there

    @property
    def is_finished(self) -> bool:
        return self.has_table or 0 < self.rounds <= self.done


class RunIndex:
    """The runs of a folder with their summaries; `version` rises with every change."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.resolve()
        self.version = 0
        self._config_summaries: dict[str, RunSummary] = {}
        self._entries: dict[str, tuple[int, RunSummary, tuple[int, int, bool]]] = {}
        self._views: OrderedDict[str, RunView | SearchView] = OrderedDict()

    def scan(self, *, full: bool = True) -> None:
        """Update the summaries of all runs, or only of those that were not finished."""
        if full:
            paths = run_dir.find_run_dirs(self.folder)
            names = {path.relative_to(self.folder).as_posix() for path in paths}
            for name in self._entries.keys() - names:
                del self._entries[name], self._config_summaries[name]
                self._views.pop(name, None)
                self.version += 1
        else:
            names = {name for name, entry in self._entries.items() if not entry[1].is_finished}
        for name in names:
            self._update_entry(name)

    def _update_entry(self, name: str) -> None:
        if name not in self._config_summaries:
            self._config_summaries[name] = _summarise_config(self.folder / name, name)
        path, is_search = self._records_path(name), self._config_summaries[name].is_search
        try:
            stat = os.stat(path, follow_symlinks=False)
            has_table = is_search and (path.parent / run_dir.TABLE_FILE).is_file()
            state = (stat.st_size, stat.st_mtime_ns, has_table)
        except OSError:
            state = (0, 0, False)
        entry = self._entries.get(name)
        if entry is not None and entry[2] == state:
            return
        summary = _add_progress(self._config_summaries[name], path, *state)
        if entry is not None and entry[1] == summary:
            self._entries[name] = (entry[0], summary, state)
        else:
            self.version += 1
            self._entries[name] = (self.version, summary, state)

    def _records_path(self, name: str) -> Path:
        return self.folder / name / (TRIALS if self._config_summaries[name].is_search else EVENTS)

    def list_summaries(self, since: int = 0) -> list[RunSummary]:
        """Return the summaries that changed since a version, newest runs first."""
        changed = [summary for version, summary, _ in self._entries.values() if version > since]
        return sorted(changed, key=lambda summary: (-summary.changed, summary.name))

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def get_view(self, name: str) -> RunView | SearchView:
        """Return the view of a run; LookupError if there is no such run."""
        if name not in self._entries:
            raise LookupError(f"no run {name!r} here")
        if name not in self._views:
            view_class = SearchView if self._config_summaries[name].is_search else RunView
            self._views[name] = view_class(self._records_path(name))
            while len(self._views) > MAX_VIEWS:
                self._views.popitem(last=False)
        self._views.move_to_end(name)
        return self._views[name]

    def read_config(self, name: str) -> dict[str, Any]:
        """Return a run's config and the versions that made it."""
        if name not in self._entries:
            raise LookupError(f"no run {name!r} here")
        folder = self.folder / name
        files = {"config": "config.json", "made": "versions.json"}
        return {key: _read_json(folder / file) for key, file in files.items()}


def _read_json(path: Path) -> Any:
    try:
        return msgspec.json.decode(read_range(path, 0, MAX_CONFIG_BYTES))
    except (OSError, msgspec.DecodeError):
        return {}


def _summarise_config(folder: Path, name: str) -> RunSummary:
    config = _read_json(folder / "config.json")

    def get_value(*keys: str) -> Any:
        value = config
        for key in keys:
            value = value.get(key) if isinstance(value, dict) else None
        return value

    parts = [get_value("network", "name"), get_value("data", "name"), f"seed {get_value('seed')}"]
    about = " · ".join(str(part) for part in parts if part not in (None, "seed None"))
    rounds = get_value("rounds") if get_value("seconds") is None else 0
    is_search = get_value("method") is None and get_value("search") is not None
    comparison = name.rpartition("/")[0]
    table = get_value("method", "table", "rates")
    return RunSummary(
        name,
        name if name != "." else folder.name,
        "search" if is_search else _name_method(get_value("method")),
        comparison,
        f"{comparison}/{_hash_config(config)}" if config else name,
        about,
        rounds if isinstance(rounds, int) else 0,
        is_search=is_search,
        table_rows=len(table) if isinstance(table, list) else 0,
    )


def _hash_config(config: Any) -> str:
    """Return a hash that is the same for all seeds, as groups of the report are."""
    fields = config.items() if isinstance(config, dict) else ()
    compared = {key: value for key, value in fields if key not in IGNORED_KEYS}
    return blake2b(msgspec.json.encode(compared, order="sorted"), digest_size=8).hexdigest()


def _name_method(method: Any) -> str:
    """Return a method's type, or the class of a user's own."""
    fields = method if isinstance(method, dict) else {}
    name = fields.get("code", "") if fields.get("type") == "user" else fields.get("type")
    return str(name or "").rpartition(":")[2]


def _add_progress(
    summary: RunSummary, path: Path, size: int, modified_ns: int, has_table: bool
) -> RunSummary:
    if not size:
        return summary
    try:
        lines = read_range(path, max(0, size - TAIL_BYTES), size).splitlines(keepends=True)
    except OSError:
        return summary
    rounds = [record for record in map(decode_round, reversed(lines)) if record is not None]
    summary = msgspec.structs.replace(summary, changed=modified_ns / 1e9, has_table=has_table)
    if not rounds:
        return summary
    last = rounds[0]
    accuracy = next((record.accuracy for record in rounds if record.accuracy is not None), None)
    done = last.round + 1
    planned = done if last.digest else summary.rounds  # a run may end by its seconds
    return msgspec.structs.replace(
        summary, rounds=planned, done=done, seconds=last.seconds, accuracy=accuracy
    )
