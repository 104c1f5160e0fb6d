"""A run on disk: its records and checkpoints."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import NoneType
from typing import Any

import msgspec

from pliant.data.declared import DataDeclaration
from pliant.engine.ledger import Record, TaskRecord
from pliant.engine.selection import History, LastTask
from pliant.methods.base import ServerState, TaskKey
from pliant.methods.privacy import Release
from pliant.methods.state import build_state, flatten_state
from pliant.params import Params, flatten, group_subtrees, select_subtree
from pliant.storage import checkpoint, formats
from pliant.storage.jsonl import JsonlWriter, read_jsonl
from pliant.storage.run_lock import RunLock


@dataclass(frozen=True)
class TaskInFlight:
    """A task that a device is working on; times are seconds of the run."""

    key: TaskKey  # its `round` counts the dispatches
    rows: tuple[int, ...]  # of the mini-batches that the server will get
    macs: tuple[float, ...]  # planned
    lr: float
    base: int  # the version of the network that the device was sent
    sent_at: float
    last_row: int | None  # that it may choose
    ends_at: float  # when its update arrives, or the device leaves
    record: TaskRecord | None  # if the update turns out valid; None: on a real device


@dataclass(frozen=True)
class RunState:
    """Everything that a run needs to resume."""

    next_round: int
    seconds: float
    server_state: Any  # a `ServerState`, or the method's own
    device_states: dict[int, Any]  # kept by each device between rounds, in the method's own type
    history: History = field(default_factory=dict)  # by which some selections choose
    residuals: dict[int, Params] = field(default_factory=dict)  # of compression, by device
    declarations: dict[int, DataDeclaration] = field(default_factory=dict)  # by device
    releases: tuple[Release, ...] = ()  # rounds that count for privacy
    average: Params = field(default_factory=dict)  # of the network over the rounds, if asked for
    # of asynchronous runs only
    dispatches: int = 0  # so far
    in_flight: tuple[TaskInFlight, ...] = ()
    base_params: dict[int, Params] = field(default_factory=dict)  # sent to them, by version

    @property
    def trained_params(self) -> Params:
        """Return the network that is tested and kept: the average if there is one."""
        params: Params = self.average or self.server_state.params
        return params


CHECKPOINTS = "checkpoints"
EVENTS_FILE = "events.jsonl"


class RunStore:
    """The folder of a run, locked while open."""

    def __init__(self, folder: Path, *, is_private: bool = False) -> None:
        self._is_private = is_private  # only their owner may read the checkpoints
        self._lock = RunLock(folder)  # before the writer, which truncates the file
        self._checkpoints = folder / CHECKPOINTS
        self._parts: dict[str, tuple[Any, str]] = {}  # what was saved and its file, by prefix
        try:
            self._writer = JsonlWriter(folder / EVENTS_FILE, formats.RECORDS)
        except BaseException:
            self._lock.release()
            raise

    def resume(
        self, state_type: type = ServerState, device_state_type: type = NoneType
    ) -> RunState | None:
        """Load the newest checkpoint, with states of these types; drop the records after it."""
        newest = checkpoint.load_newest(self._checkpoints)
        if newest is None:
            self._writer.rewind(0)
            return None
        _, tensors, metadata = newest
        self._writer.rewind(metadata["position"])
        return _build_run_state(tensors, metadata, state_type, device_state_type)

    def append(self, records: list[Record]) -> None:
        """Write the records of a round."""
        with _add_path_to_errors(self._writer.path):
            for record in records:
                self._writer.append(record)

    def save(self, run_state: RunState) -> None:
        """Write a checkpoint after all records so far; what devices keep is in files of its own."""
        server = flatten_state(run_state.server_state)
        tensors = flatten(
            {"server": server, "average": run_state.average, "versions": run_state.base_params}
        )
        with _add_path_to_errors(self._checkpoints):
            parts = self._write_parts("devices", run_state.device_states)
            parts |= self._write_parts("residuals", run_state.residuals)
        with _add_path_to_errors(self._writer.path):
            position = self._writer.sync()
        metadata = {
            "round": run_state.next_round,
            "seconds": run_state.seconds.hex(),
            "position": position,
            "history": {str(device): task for device, task in run_state.history.items()},
            "declarations": {str(device): d for device, d in run_state.declarations.items()},
            "releases": run_state.releases,
            "dispatches": run_state.dispatches,
            "in_flight": run_state.in_flight,
        }
        with _add_path_to_errors(self._checkpoints):
            checkpoint.save(
                self._checkpoints,
                run_state.next_round,
                tensors,
                metadata,
                parts,
                is_private=self._is_private,
            )

    def _write_parts(self, kind: str, values: Mapping[int, Any]) -> dict[str, str]:
        """Write what changed since the last checkpoint; return the files of all devices."""
        files = {}
        for device, value in values.items():
            prefix = f"{kind}/{device}"
            last, file = self._parts.get(prefix, (None, ""))
            if last is not value:
                tensors = value if isinstance(value, dict) else flatten_state(value)
                name = f"{kind}-{device}"
                file = checkpoint.write_part(
                    self._checkpoints, name, tensors, is_private=self._is_private
                )
                self._parts[prefix] = value, file
            files[prefix] = file
        return files

    def close(self) -> None:
        """Close the record file and release the lock."""
        try:
            with _add_path_to_errors(self._writer.path):  # closing flushes what is left
                self._writer.close()
        finally:
            self._lock.release()


@contextmanager
def _add_path_to_errors(path: Path) -> Iterator[None]:
    """Name the path in write errors that have none, such as a full disk."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


def read_records(folder: str | Path) -> Iterator[Record]:
    """Yield the records of the run in a folder.

    >>> import tempfile
    >>> from pathlib import Path
    >>> import pliant as pl
    >>> data = pl.data.digits().share(pl.Iid(), devices=4, proxy=7900)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     method, net, run = pl.FedAvg(), pl.models.digits_cnn(), Path(folder, "run")
    ...     rounds = list(pl.simulate(method, net, data, pl.Fleet(size=4), rounds=1, folder=run))
    ...     [type(record).__name__ for record in pl.read_records(run)]
    ['TaskRecord', 'TaskRecord', 'TaskRecord', 'TaskRecord', 'RoundRecord']
    """
    record_type: Any = Record  # a union is not a type[T]
    yield from read_jsonl(Path(folder, EVENTS_FILE), record_type, formats.RECORDS)


def load_run_state(
    folder: Path, state_type: type = ServerState, device_state_type: type = NoneType
) -> RunState | None:
    """Load the newest checkpoint of a run without opening it for writing."""
    newest = checkpoint.load_newest(folder / CHECKPOINTS)
    if newest is None:
        return None
    return _build_run_state(newest[1], newest[2], state_type, device_state_type)


def load_trained_params(folder: str | Path) -> Params:
    """Return the parameters in the newest checkpoint of a run.

    >>> import tempfile
    >>> from pathlib import Path
    >>> import pliant as pl
    >>> data = pl.data.digits().share(pl.Iid(), devices=4, proxy=7900)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     method, net, run = pl.FedAvg(), pl.models.digits_cnn(), Path(folder, "run")
    ...     rounds = list(pl.simulate(method, net, data, pl.Fleet(size=4), rounds=1, folder=run))
    ...     net.load_state_dict(pl.load_trained_params(run))
    <All keys matched successfully>
    """
    return load_trained_round(folder)[1]


def load_trained_round(folder: str | Path) -> tuple[int, Params]:
    """Return the number of rounds before the newest checkpoint of a run, and its parameters."""
    newest = checkpoint.load_newest(Path(folder, CHECKPOINTS), with_parts=False)
    if newest is None:
        raise ValueError(f"{folder}: expected a run with a checkpoint, found none")
    run_state = _build_run_state(newest[1], newest[2], ServerState, NoneType)
    return run_state.next_round, run_state.trained_params


def _build_run_state(
    tensors: Params, metadata: Any, state_type: type, device_state_type: type
) -> RunState:
    devices = group_subtrees(select_subtree(tensors, "devices"))
    residuals = group_subtrees(select_subtree(tensors, "residuals"))
    versions = group_subtrees(select_subtree(tensors, "versions"))
    return RunState(
        metadata["round"],
        float.fromhex(metadata["seconds"]),
        build_state(state_type, select_subtree(tensors, "server")),
        {int(device): build_state(device_state_type, devices[device]) for device in devices}
        if device_state_type is not NoneType
        else {},
        {int(device): LastTask(*task) for device, task in metadata.get("history", {}).items()},
        {int(device): residual for device, residual in residuals.items()},
        msgspec.convert(metadata.get("declarations", {}), dict[int, DataDeclaration], strict=False),
        tuple(Release(*release) for release in metadata.get("releases", ())),
        select_subtree(tensors, "average"),
        metadata.get("dispatches", 0),
        msgspec.convert(metadata.get("in_flight", []), tuple[TaskInFlight, ...]),
        {int(version): params for version, params in versions.items()},
    )
