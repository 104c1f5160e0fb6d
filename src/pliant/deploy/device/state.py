"""Keep a device's state between rounds: its method's state and the residual of compression.

One file per round, written before the reply is sent, so that a crash loses nothing. The server
names the device's last merged round: training resumes from its file, and the others are deleted.
"""

from pathlib import Path
from typing import TypeVar

from pliant.methods.state import build_state, flatten_state
from pliant.params import Params, flatten, select_subtree
from pliant.storage import atomic, checkpoint, formats

DEVICE_STATE, RESIDUAL = "memory", "owed"

S = TypeVar("S")


class DeviceStateStore:
    """Store the state of one run on a device."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def load(self, merged_round: int | None, initial: S) -> tuple[S, Params]:
        """Return the device state and residual of a merged round, and delete all others.

        Without a readable file, the device starts over from the `initial` state.
        """
        merged = None if merged_round is None else self._path(merged_round)
        for path in self._folder.glob("round-*.ckpt"):
            if path != merged:
                path.unlink(missing_ok=True)
        if merged is None or not merged.exists():
            return initial, {}
        try:
            tensors, _ = checkpoint.load(merged)
        except (
            checkpoint.CorruptCheckpoint,
            formats.UnsupportedFormat,
        ):  # start over rather than fail forever
            return initial, {}
        saved, residual = (select_subtree(tensors, key) for key in (DEVICE_STATE, RESIDUAL))
        return build_state(type(initial), saved) if saved else initial, residual

    def save(self, round: int, device_state: object, residual: Params) -> None:
        """Write the state after a round; write no file if there is none."""
        tensors = flatten({DEVICE_STATE: flatten_state(device_state), RESIDUAL: residual})
        if tensors:
            atomic.write_bytes(self._path(round), checkpoint.to_bytes(tensors, {"round": round}))

    def _path(self, round: int) -> Path:
        return self._folder / f"round-{round:08d}.ckpt"
