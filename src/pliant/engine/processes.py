"""Worker processes on this machine: spawned, one torch thread each, ended with their parent."""

import multiprocessing
import os
import pickle
import signal
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import connection, resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from pliant.engine.relay import Answer
from pliant.engine.resident import SETUP, serve
from pliant.engine.segment import Segment, memory_folder
from pliant.engine.wire import decoded, message, pieces
from pliant.params import Params

PATIENCE = 2.0  # seconds between asking a worker to end and ending it
ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


@dataclass(frozen=True, eq=False)
class Worker:
    """A process and this side of the pipe to it."""

    process: SpawnProcess
    link: "Connection[Any, Any]"


class ProcessCrew:
    """Processes, a folder in memory for what they all read, and a segment in it."""

    def __init__(self, setup: Callable[[], Any], perform: Callable[[Any, Params, Any], Any]):
        if getattr(multiprocessing.current_process(), "_inheriting", False):
            # this is a worker that imports the user's script; multiprocessing would refuse later
            raise RuntimeError(
                'Expected the script to start its work under `if __name__ == "__main__":`, '
                "because worker processes import it"
            )
        functions = pickle.dumps((setup, perform), protocol=5)
        self._folder = TemporaryDirectory(
            prefix="pliant-", dir=memory_folder(), ignore_cleanup_errors=True
        )
        self._segment: Segment | None = None
        self._segments = 0
        self._alive: set[Worker] = set()
        try:
            Path(self._folder.name, SETUP).write_bytes(functions)
        except BaseException:
            self._folder.cleanup()
            raise

    def hire(self) -> Worker:
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        # a daemon: an interpreter that ends without closing the pool ends it too
        process = context.Process(target=serve, args=(theirs, self._folder.name), daemon=True)
        try:
            with theirs, _inherited():
                process.start()
        except BaseException:
            ours.close()
            raise
        worker = Worker(process, ours)
        self._alive.add(worker)
        return worker

    def share(self, shared: Params) -> None:
        parts = pieces(shared)
        size = sum(len(part) for part in parts)
        if self._segment is None or self._segment.size < size:
            if self._segment is not None:
                self._segment.close()
                self._segment = None
            self._segments += 1
            self._segment = Segment(Path(self._folder.name, f"shared-{self._segments}"), size)
        self._segment.write(parts)

    def hand(self, worker: Worker, job: object) -> None:
        assert self._segment is not None
        sent = pickle.dumps((str(self._segment.path), message(job)))
        with suppress(OSError):
            worker.link.send_bytes(sent)

    def hear(self, workers: Collection[Worker]) -> Iterator[tuple[Worker, Answer]]:
        by_link: dict[Any, Worker] = {worker.link: worker for worker in workers}
        for link in connection.wait(list(by_link)):
            yield by_link[link], _answer(by_link[link])

    def dismiss(self, workers: Collection[Worker]) -> None:
        leaving = [worker for worker in workers if worker in self._alive]
        for worker in leaving:
            worker.process.terminate()
        for worker in leaving:
            worker.process.join(PATIENCE)
            if worker.process.is_alive():
                worker.process.kill()
                worker.process.join()
            self._alive.discard(worker)
            worker.process.close()
            worker.link.close()

    def close(self) -> None:
        try:
            self.dismiss(self._alive)  # an interrupt may have hidden some from the relay
        finally:
            if self._segment is not None:
                self._segment.close()
            self._folder.cleanup()


def _answer(worker: Worker) -> Answer:
    try:
        answer = worker.link.recv_bytes()
    except (EOFError, OSError):
        worker.process.join(PATIENCE)
        return Answer("lost", ending(worker.process.exitcode))
    return Answer(*decoded(answer))


def ending(code: int | None) -> str:
    """Say in words how a process ended."""
    if code is None:
        return "closing its pipe"
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"signal {-code} ({signal.Signals(-code).name})"
    except ValueError:
        return f"signal {-code}"


@contextmanager
def _inherited() -> Iterator[None]:
    """Let a process that starts now have one thread, from its first import, and hold Ctrl-C back.

    Ctrl-C reaches every process of the terminal; a worker that is still importing must not die of
    it with a traceback. The parent gets it when the start is done.
    """
    before = {name: os.environ.get(name) for name in ONE_THREAD}
    holds = hasattr(signal, "pthread_sigmask")
    if holds:
        resource_tracker.ensure_running()  # started later, it would let the signal through
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    os.environ.update(ONE_THREAD)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
        if holds:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
