"""Keep a device's state between rounds: its method's state and the residual of compression.

States of other experiments stay until they are old or the disk quota is used up.

One file per round, written before the reply is sent, so that a crash loses nothing. The server
names the device's last merged round: training resumes from its file, and the others are deleted.
"""

import shutil
from pathlib import Path
from typing import TypeVar

from pliant.deploy.device.host import ReportableProblem
from pliant.methods.state import build_state, flatten_state
from pliant.params import Params, flatten, select_subtree
from pliant.storage import atomic, checkpoint, formats

DEVICE_STATE, RESIDUAL = "memory", "owed"
MAX_AGE_SECONDS = 30 * 86400.0

S = TypeVar("S")


def load_device_state(folder: Path, merged_round: int | None, initial: S) -> tuple[S, Params]:
    """Return the device state and residual of a merged round, and delete all others.

    Without a readable file, the device starts over from the `initial` state.
    """
    merged = None if merged_round is None else _make_path(folder, merged_round)
    for path in folder.glob("round-*.ckpt"):
        if path != merged:
            path.unlink(missing_ok=True)
    try:
        tensors = {} if merged is None else checkpoint.load(merged)[0]
    except (FileNotFoundError, checkpoint.CorruptCheckpoint, formats.UnsupportedFormat):
        tensors = {}  # start over rather than fail forever
    saved, residual = (select_subtree(tensors, key) for key in (DEVICE_STATE, RESIDUAL))
    return build_state(type(initial), saved) if saved else initial, residual


def save_device_state(folder: Path, round: int, device_state: object, residual: Params) -> None:
    """Write the state after a round; write no file if there is none."""
    tensors = flatten({DEVICE_STATE: flatten_state(device_state), RESIDUAL: residual})
    if tensors:
        path = _make_path(folder, round)
        raw = checkpoint.to_bytes(tensors, {"round": round})
        atomic.write_bytes(path, raw, is_private=True)


def remove_old_states(folder: Path, quota: float, *, now: float) -> None:
    """Delete old states of other experiments beside a folder, and more while all exceed a quota.

    Raise `ReportableProblem` if what must be kept exceeds it.
    """
    others = [path for path in folder.parent.glob("*/") if path != folder and _is_state(path)]
    size = sum(map(_measure_size, [folder, *others]))
    for path in sorted(others, key=lambda path: path.stat().st_mtime):
        if size > quota or now - path.stat().st_mtime > MAX_AGE_SECONDS:
            size -= _measure_size(path)
            shutil.rmtree(path, ignore_errors=True)
    if size > quota:
        raise ReportableProblem(f"expected a state of at most {quota:g} bytes, got {size}")


def _is_state(path: Path) -> bool:
    files = list(path.iterdir()) if path.is_dir() and not path.is_symlink() else []
    return bool(files) and all(file.match("round-*.ckpt") for file in files)


def _measure_size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*") if path.is_file())


def _make_path(folder: Path, round: int) -> Path:
    return folder / f"round-{round:08d}.ckpt"
