"""What a run has on disk: its records and its checkpoints, and how it goes on from them."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pliant import checkpoint
from pliant.engine.ledger import Record
from pliant.engine.lock import Lock
from pliant.methods.base import State
from pliant.params import Params
from pliant.record import Records, read


@dataclass(frozen=True)
class Saved:
    """Everything that a run needs in order to go on."""

    round: int  # the next one
    seconds: float
    state: State
    memory: dict[int, Params]  # what each device keeps between rounds


CHECKPOINTS = "checkpoints"


class Store:
    """The folder of a run; opening it cuts off whatever came after its last checkpoint."""

    def __init__(self, folder: Path) -> None:
        self._lock = Lock(folder)  # first: opening the records cuts them
        self._checkpoints = folder / CHECKPOINTS
        try:
            self._records = Records(folder / "events.jsonl")
        except BaseException:
            self._lock.close()
            raise

    def resume(self) -> Saved | None:
        """Return where the run was, and forget the records of what was not saved."""
        found = checkpoint.newest(self._checkpoints)
        if found is None:
            self._records.rewind(0)
            return None
        _, tensors, state = found
        self._records.rewind(state["position"])
        return _split(tensors, state)

    def append(self, records: list[Record]) -> None:
        """Write the records of a round."""
        with _named(self._records.path):
            for record in records:
                self._records.append(record)

    def save(self, saved: Saved) -> None:
        """Write a checkpoint that includes all records so far."""
        tensors = {f"params/{name}": tensor for name, tensor in saved.state.params.items()}
        for key, params in saved.state.extra.items():
            tensors |= {f"extra/{key}/{name}": tensor for name, tensor in params.items()}
        for device, params in saved.memory.items():
            tensors |= {f"memory/{device}/{name}": tensor for name, tensor in params.items()}
        with _named(self._records.path):
            position = self._records.position()
        state = {"round": saved.round, "seconds": saved.seconds.hex(), "position": position}
        with _named(self._checkpoints):
            checkpoint.save(self._checkpoints, saved.round, tensors, state)

    def close(self) -> None:
        """Close the record file and give the folder free."""
        try:
            with _named(self._records.path):  # what could not be written is tried again, in vain
                self._records.close()
        finally:
            self._lock.close()


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """Let an error of writing, like that of a full disk, say where it happened."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


def events(folder: Path) -> Iterator[Record]:
    """Yield the records of the run in a folder.

    >>> import tempfile
    >>> from pathlib import Path
    >>> import torch
    >>> import pliant as pl
    >>> images = pl.Images.from_tensors(torch.rand(40, 1, 28, 28), torch.arange(40) % 10)
    >>> data = pl.data.Source(images, images).share(pl.Iid(), devices=4, proxy=8)
    >>> with tempfile.TemporaryDirectory() as place:
    ...     net, run = pl.models.digits_cnn(), Path(place, "run")
    ...     fleet = pl.Fleet(size=4)
    ...     rounds = list(pl.simulate(pl.FedAvg(), net, data, fleet, rounds=1, folder=run))
    ...     [type(event).__name__ for event in pl.events(run)]
    ['TaskRecord', 'TaskRecord', 'TaskRecord', 'TaskRecord', 'RoundRecord']
    """
    kind: Any = Record  # a union is no class
    yield from read(folder / "events.jsonl", kind)


def newest(folder: Path) -> Saved | None:
    """Return where the run in a folder was saved last, and leave its files alone."""
    found = checkpoint.newest(folder / CHECKPOINTS)
    return None if found is None else _split(found[1], found[2])


def _split(tensors: Params, state: Any) -> Saved:
    params: Params = {}
    extra: dict[str, Params] = {}
    memory: dict[int, Params] = {}
    for name, tensor in tensors.items():
        kind, _, rest = name.partition("/")
        if kind == "params":
            params[rest] = tensor
            continue
        key, _, leaf = rest.partition("/")
        if kind == "extra":
            extra.setdefault(key, {})[leaf] = tensor
        else:
            memory.setdefault(int(key), {})[leaf] = tensor
    return Saved(state["round"], float.fromhex(state["seconds"]), State(params, extra), memory)
