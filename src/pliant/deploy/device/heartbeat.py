"""Show the supervisor of a process that it is alive, by touching a file.

A thread touches it every second, except while the process has been at one piece of work for too
long. A process that is suspended or stuck therefore stops touching it.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

TOUCH_SECONDS = 1.0
MAX_STEP_SECONDS = 600.0  # for a mini-batch, or to load the data


class Heartbeat:
    """Touch a file for as long as this process works or waits."""

    def __init__(self, path: Path, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._path, self._clock = path, clock
        self._busy_since: float | None = None

    def start(self) -> None:
        self.touch()
        threading.Thread(target=self._run, daemon=True).start()

    def note_progress(self) -> None:
        """Start the next piece of work."""
        self._busy_since = self._clock()

    @contextmanager
    def working(self) -> Iterator[None]:
        """Be at work until the end of the context."""
        self.note_progress()
        try:
            yield
        finally:
            self._busy_since = None

    def touch(self) -> None:
        """Touch the file unless the process is stuck."""
        since = self._busy_since
        if since is None or self._clock() - since < MAX_STEP_SECONDS:
            try:
                self._path.touch()
            except OSError:  # the disk is full, or the folder is gone
                return

    def _run(self) -> None:
        while True:
            time.sleep(TOUCH_SECONDS)
            self.touch()
