"""One process at a run: a lock in its folder that ends with the process which holds it."""

import os
import sys
from pathlib import Path
from typing import BinaryIO

NAME = "lock"


class Lock:
    """The right to write to a folder, until it is closed or the process dies in whatever way.

    The file stays, with the number of the process that had it last: who removed it could take it
    from under another's lock.
    """

    def __init__(self, folder: Path, name: str = NAME) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._file = open(folder / name, "ab")  # noqa: SIM115 - closed by close()
        try:
            _take(self._file)
        except OSError:
            self._file.close()
            raise BlockingIOError(
                f"{folder}: expected no other process at this run, found {_owner(folder / name)}; "
                "wait for its end or stop it"
            ) from None
        self._file.truncate(0)
        self._file.write(str(os.getpid()).encode())
        self._file.flush()

    def close(self) -> None:
        """Give the folder free."""
        self._file.close()


def _owner(path: Path) -> str:
    try:
        return f"process {int(path.read_text())}"
    except (OSError, ValueError):
        return "one"


if sys.platform == "win32":
    import msvcrt

    def _take(file: BinaryIO) -> None:
        file.seek(0)
        msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)

else:
    import fcntl

    def _take(file: BinaryIO) -> None:
        # a process that this one starts does not inherit the file, so it cannot keep the lock
        fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
