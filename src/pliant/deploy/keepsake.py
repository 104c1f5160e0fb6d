"""What a device keeps between rounds: its method's memory and what it has not yet sent.

A file a round, written before the answer is given, so that a crash loses nothing. The server says
which of the device's rounds counted last: that one is gone on from, and the others are dropped.
"""

from pathlib import Path

from pliant import atomic, checkpoint
from pliant.params import Params

MEMORY, OWED = "memory", "owed"


class Keepsakes:
    """The folder of one run on a device."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def recall(self, merged: int | None) -> tuple[Params, Params]:
        """Return memory and what is owed as of a round that counted, and forget all others."""
        wanted = None if merged is None else self._path(merged)
        for path in self._folder.glob("round-*.ckpt"):
            if path != wanted:
                path.unlink(missing_ok=True)
        if wanted is None or not wanted.exists():
            return {}, {}
        try:
            tensors, _ = checkpoint.load(wanted)
        except checkpoint.CorruptCheckpoint:  # begin anew rather than never again
            return {}, {}
        return _group(tensors, MEMORY), _group(tensors, OWED)

    def keep(self, round: int, memory: Params, owed: Params) -> None:
        """Write what a round has left; nothing is written where there is nothing to keep."""
        tensors = {f"{MEMORY}/{name}": tensor for name, tensor in memory.items()}
        tensors |= {f"{OWED}/{name}": tensor for name, tensor in owed.items()}
        if tensors:
            atomic.write_bytes(self._path(round), checkpoint.to_bytes(tensors, {"round": round}))

    def _path(self, round: int) -> Path:
        return self._folder / f"round-{round:08d}.ckpt"


def _group(tensors: Params, group: str) -> Params:
    head = f"{group}/"
    return {
        name.removeprefix(head): tensor for name, tensor in tensors.items() if name.startswith(head)
    }
