"""Worker processes on this machine, with one torch thread, stopped with their parent."""

import multiprocessing
import os
import pickle
import signal
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import connection, resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from pliant.params import Params
from pliant.workers.pool import WorkerLost, WorkerReply
from pliant.workers.serialisation import deserialise, serialise, serialise_chunks
from pliant.workers.shared_memory import choose_memory_folder, write_shared
from pliant.workers.worker_main import SETUP_FILE, run_forked_worker, run_worker

STOP_TIMEOUT = 2.0  # seconds between SIGTERM and SIGKILL
ONE_THREAD_ENV = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


@dataclass(frozen=True, eq=False)
class ProcessHandle:
    """A process and our end of its pipe."""

    process: BaseProcess
    pipe: "Connection[Any, Any]"


class ProcessBackend:
    """Worker processes, with the parameters in a file that they map."""

    def __init__(self, setup: Callable[[], Any], run_job: Callable[[Any, Params, Any], Any]):
        if getattr(multiprocessing.current_process(), "_inheriting", False):
            # a worker is importing the user's script; multiprocessing would fail later
            raise RuntimeError(
                'Expected the script to start its work under `if __name__ == "__main__":`, '
                "because worker processes import it"
            )
        functions = pickle.dumps((setup, run_job), protocol=5)
        self._folder = TemporaryDirectory(
            prefix="pliant-", dir=choose_memory_folder(), ignore_cleanup_errors=True
        )
        self._alive: set[ProcessHandle] = set()
        Path(self._folder.name, SETUP_FILE).write_bytes(functions)
        self._shared: dict[int, Path] = {}  # files, by version
        self._spare: Path | None = None  # a released file, whose memory is used again

    def start(self) -> ProcessHandle:
        ours, theirs = multiprocessing.Pipe()
        try:
            with theirs:
                process = _start_process(theirs, self._folder.name)
        except BaseException:
            ours.close()
            raise
        worker = ProcessHandle(process, ours)
        self._alive.add(worker)
        return worker

    def share(self, params: Params, version: int) -> None:
        path = self._spare or Path(self._folder.name, f"shared-{version}")
        self._spare, self._shared[version] = None, path
        write_shared(path, serialise_chunks(params))

    def release(self, version: int) -> None:
        path = self._shared.pop(version)
        if self._spare is not None:
            self._spare.unlink()
        self._spare = path

    def submit(self, worker: ProcessHandle, job: object, version: int) -> None:
        with suppress(OSError):
            worker.pipe.send_bytes(pickle.dumps((str(self._shared[version]), serialise(job))))

    def poll(
        self, workers: Collection[ProcessHandle]
    ) -> Iterator[tuple[ProcessHandle, WorkerReply]]:
        by_pipe: dict[Any, ProcessHandle] = {worker.pipe: worker for worker in workers}
        for pipe in connection.wait(list(by_pipe)):
            yield by_pipe[pipe], _receive_reply(by_pipe[pipe])

    def stop(self, workers: Collection[ProcessHandle]) -> None:
        stopping = self._alive.intersection(workers)
        for worker in stopping:
            worker.process.terminate()
        for worker in stopping:
            worker.process.join(STOP_TIMEOUT)
            if worker.process.is_alive():
                worker.process.kill()
                worker.process.join()
            self._alive.discard(worker)
            worker.process.close()
            worker.pipe.close()

    def close(self) -> None:
        try:
            self.stop(self._alive)  # after an interrupt the pool may not know all of them
        finally:
            self._folder.cleanup()


def preload_modules(*modules: str) -> None:
    """Start the process that workers are forked from, if any, and let it import modules."""
    if sys.platform == "linux" and not _can_fork():
        from pliant.workers.fork_server import start_server

        with _set_child_environment():
            start_server(*modules)


def _start_process(pipe: "Connection[Any, Any]", folder: str) -> BaseProcess:
    # the environment of now: the process that forks has that of its start
    arguments = pipe, folder, os.environ | ONE_THREAD_ENV
    # daemons, so that they stop with an interpreter that never closes the pool
    if _can_fork():
        child = multiprocessing.get_context("fork").Process(
            target=run_forked_worker, args=arguments, daemon=True
        )
        with _set_child_environment():
            child.start()
        return child
    if sys.platform == "linux":  # elsewhere system libraries may not survive a fork
        from pliant.workers.fork_server import ForkedWorker

        preload_modules()
        forked = ForkedWorker(target=run_worker, args=arguments, daemon=True)
        try:
            forked.start()
        except (EOFError, ConnectionError) as error:
            raise WorkerLost("the process that forks workers died while starting") from error
        return forked
    context = multiprocessing.get_context("spawn")
    spawned = context.Process(target=run_worker, args=arguments, daemon=True)
    with _set_child_environment():
        spawned.start()
    return spawned


def _can_fork() -> bool:
    """Return whether this process is safe to fork: only its one thread could hold a lock."""
    tasks = Path("/proc/self/task")
    return sys.platform == "linux" and tasks.exists() and len(list(tasks.iterdir())) == 1


def _receive_reply(worker: ProcessHandle) -> WorkerReply:
    try:
        message = worker.pipe.recv_bytes()
    except (EOFError, OSError):
        worker.process.join(STOP_TIMEOUT)
        return WorkerReply("lost", describe_exit(worker.process.exitcode))
    return WorkerReply(*deserialise(message))


def describe_exit(exit_code: int | None) -> str:
    """Describe how a process ended."""
    if exit_code is None:
        return "closed its pipe"
    if exit_code >= 0:
        return f"exit code {exit_code}"
    try:
        return f"signal {-exit_code} ({signal.Signals(-exit_code).name})"
    except ValueError:
        return f"signal {-exit_code}"


@contextmanager
def _set_child_environment() -> Iterator[None]:
    """Start child processes with one thread and with Ctrl-C blocked.

    Ctrl-C reaches every process of the terminal, and a worker that is still importing must not die
    of it with a traceback. The parent receives the signal after the start.
    """
    before = {name: os.environ.get(name) for name in ONE_THREAD_ENV}
    can_block = hasattr(signal, "pthread_sigmask")
    if can_block:
        resource_tracker.ensure_running()  # it unblocks the signal when it starts
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    os.environ.update(ONE_THREAD_ENV)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
        if can_block:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
