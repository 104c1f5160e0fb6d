"""Keep processes running: start them, restart those that die, and stop them all at the end."""

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from enum import Enum, auto
from pathlib import Path
from typing import Protocol

from pliant.deploy.supervise.child_process import LogForwarder, read_log_tail, rotate_log
from pliant.storage.run_lock import RunLock

log = logging.getLogger("pliant")

FIRST_DELAY, MAX_DELAY = 0.2, 30.0  # seconds before a restart; the delay doubles in between
SETTLED_SECONDS = 30.0  # of life, after which the delay starts from the first one again
MAX_DEATHS = 10  # without progress, before giving up
HANG_SECONDS = 60.0  # without a heartbeat


class Process(Protocol):
    """A process that was started, and may have ended."""

    @property
    def pid(self) -> int | None: ...

    @property
    def exit_code(self) -> int | None: ...  # negative if it was killed, None if unknown

    @property
    def is_alive(self) -> bool: ...

    def stop(self) -> None: ...


class Reaction(Enum):
    """What to do about a process that has ended; to give up, raise an error with one line."""

    RESTART = auto()  # after a delay, with a warning, and not forever
    RETRY = auto()  # after a delay, silently
    WAIT = auto()  # until the reaction is another


@dataclass
class Service:
    """A process to keep running, and the history of its deaths."""

    name: str  # in `Supervisor.pids`
    title: str  # in messages
    start_process: Callable[[], Process]
    log: Path
    react: Callable[[int | None], Reaction] = lambda exit_code: Reaction.RESTART
    progress: Callable[[], object] | None = None  # changes with progress; without it, a long life
    is_log_forwarded: bool = False
    heartbeat: Path | None = None  # a file that the process touches
    clock: Callable[[], float] = time.monotonic

    def start(self) -> None:
        self._log_forwarder = LogForwarder(self.log) if self.is_log_forwarded else None
        self._delay, self._restart_at = FIRST_DELAY, 0.0  # 0 if no restart is pending
        self._deaths, self._last_progress = 0, self.progress() if self.progress else None
        self._launch()

    def _launch(self) -> None:
        self.process = self.start_process()
        self._started_at, self._restart_at = self.clock(), 0.0
        self._last_beat, self._beat_at = -1, self.clock()

    def stop(self) -> None:
        self.process.stop()

    def forward_log(self) -> None:
        if self._log_forwarder is not None:
            self._log_forwarder.forward()
        rotate_log(self.log)

    def check(self) -> bool:
        """React if the process has ended or hangs; return whether no restart is pending."""
        if self.process.is_alive and self._is_hanging():
            log.warning("%s hangs; killing it", self.title)
            self.process.stop()
        is_alive = self.process.is_alive
        self.forward_log()  # of a process that has ended, all of it
        if is_alive:
            return True
        if not self._restart_at:
            reaction = self.react(self.process.exit_code)
            if reaction is Reaction.WAIT:
                return True
            self._schedule_restart(is_death=reaction is Reaction.RESTART)
        if self.clock() < self._restart_at:
            return False
        self._launch()
        return True

    def _is_hanging(self) -> bool:
        """Return whether the heartbeat has not changed for long by this process's clock."""
        if self.heartbeat is None:
            return False
        beat = self.heartbeat.stat().st_mtime_ns if self.heartbeat.exists() else -1
        if beat != self._last_beat:
            self._last_beat, self._beat_at = beat, self.clock()
        # without a first beat, it is still starting
        return beat >= 0 and self.clock() - self._beat_at > HANG_SECONDS

    def _schedule_restart(self, *, is_death: bool) -> None:
        now = self.clock()
        is_settled = now - self._started_at >= SETTLED_SECONDS
        if is_settled:
            self._delay = FIRST_DELAY
        if is_death:
            progress = self.progress() if self.progress else None
            has_progressed = progress != self._last_progress if self.progress else is_settled
            self._deaths, self._last_progress = 1 if has_progressed else self._deaths + 1, progress
            if self._deaths >= MAX_DEATHS:
                reason = read_log_tail(self.log, 1) if self.log.exists() else ""
                problem = f"{self.title} died {MAX_DEATHS} times without progress"
                raise ChildProcessError(f"{problem}; see {self.log}: {reason}")
            log.warning("%s died; restarting it", self.title)
        self._restart_at = now + self._delay
        self._delay = min(2 * self._delay, MAX_DELAY)


class Supervisor:
    """Keep services running under the lock of a folder; each depends on those before it."""

    def __init__(self, folder: Path, lock_file: str, services: Sequence[Service]) -> None:
        self.folder, self._lock_file, self.services = folder, lock_file, services
        self._on_close = ExitStack()
        self._started: list[Service] = []
        self.checked_at = time.monotonic()

    @property
    def pids(self) -> dict[str, int]:
        processes = {service.name: service.process for service in self._started}
        return {name: p.pid for name, p in processes.items() if p.is_alive and p.pid is not None}

    def start(self) -> None:
        """Lock the folder and start all services."""
        self._on_close.callback(RunLock(self.folder, self._lock_file).release)
        for service in self.services:
            service.start()
            self._started.append(service)
            self._on_close.callback(service.stop)

    def forward_logs(self) -> None:
        """Repeat what the processes have logged since the last time."""
        for service in self._started:
            service.forward_log()

    def check(self) -> None:
        """Restart dead processes, but none while one that it depends on waits for its restart."""
        self.checked_at = time.monotonic()
        for service in self._started:
            if not service.check():
                return

    def close(self) -> None:
        """Stop the processes in reverse order and release the folder."""
        self._on_close.close()
