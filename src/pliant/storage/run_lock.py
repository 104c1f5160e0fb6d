"""Locks on run folders, which end with the process that holds them."""

import os
import sys
from pathlib import Path
from typing import BinaryIO


class RunLock:
    """An exclusive lock on a run folder, held until `release` or the end of the process.

    The file stays, with the id of the last owner: removing it could break another process's lock.
    """

    def __init__(self, folder: Path, name: str = "lock") -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._file = open(folder / name, "ab")  # noqa: SIM115 - closed by release()
        try:
            _acquire(self._file)
        except OSError:
            self._file.close()
            raise BlockingIOError(
                f"{folder}: in use by {_describe_owner(folder / name)}; "
                "wait for it to end, or stop it"
            ) from None
        self._file.truncate(0)
        self._file.write(str(os.getpid()).encode())
        self._file.flush()

    def release(self) -> None:
        self._file.close()


def _describe_owner(path: Path) -> str:
    try:
        return f"process {int(path.read_text())}"
    except (OSError, ValueError):
        return "another process"


if sys.platform == "win32":
    import msvcrt

    def _acquire(file: BinaryIO) -> None:
        file.seek(0)
        msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)

else:
    import fcntl

    def _acquire(file: BinaryIO) -> None:
        # Child processes do not inherit the file, so they cannot keep the lock.
        fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
