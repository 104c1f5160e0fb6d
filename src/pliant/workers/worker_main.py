"""The code that runs in a worker: its context and the loop that serves the parent."""

import gc
import multiprocessing
import os
import pickle
import shutil
import signal
import stat
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from pliant import runtime
from pliant.params import Params
from pliant.storage.run_dir import TORCH_THREADS
from pliant.workers.serialisation import deserialise, serialise
from pliant.workers.shared_memory import map_shared

SETUP_FILE = "setup.pickle"


class JobRunner:
    """The context of a worker, built once, and the function that runs its jobs."""

    def __init__(self) -> None:
        torch.set_num_threads(TORCH_THREADS)
        runtime.retain_freed_memory()
        self._context: Any = None
        self._run_job: Callable[[Any, Params, Any], Any] | None = None

    def prepare(self, functions: bytes) -> bytes:
        """Build the context and return a `ready` or `failed` reply."""
        try:
            setup, self._run_job = pickle.loads(functions)
            self._context = setup()
        except (Exception, SystemExit) as error:  # the user's code may call sys.exit
            return _encode_failure(error)
        return serialise(("ready", None))

    def run(self, shared: Any, job: bytes) -> bytes:
        """Run a job and return a `done` or `failed` reply.

        `shared` holds the serialised parameters, or is the path of a file that does.
        """
        assert self._run_job is not None
        try:
            is_path = isinstance(shared, Path)
            # Ray's store is read-only, and a write to it would crash the process: copy
            params = deserialise(map_shared(shared) if is_path else shared, copy=not is_path)
            return serialise(("done", self._run_job(self._context, params, deserialise(job))))
        except (Exception, SystemExit) as error:
            return _encode_failure(error)


def run_forked_worker(
    pipe: "Connection[Any, Any]", folder: str, environment: dict[str, str]
) -> None:
    """Serve as a worker that was forked from its parent, without the parent's files and signals."""
    for number in map(int, os.listdir("/proc/self/fd")):
        with suppress(OSError):  # one of them was the list
            is_pipe = stat.S_ISFIFO(os.fstat(number).st_mode)  # by which the end of both is known
            if number > 2 and number != pipe.fileno() and not is_pipe:
                os.close(number)  # above all the file with the lock of the run
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    run_worker(pipe, folder, environment)


def run_worker(pipe: "Connection[Any, Any]", folder: str, environment: dict[str, str]) -> None:
    """Serve as a worker process until the parent closes the pipe or dies."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides what Ctrl-C means
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    os.environ.clear()
    os.environ.update(environment)
    gc.freeze()  # what was imported before a fork stays, and its memory stays shared
    gc.enable()
    threading.Thread(target=_end_with_parent, args=(folder,), daemon=True).start()
    runner = JobRunner()
    try:
        pipe.send_bytes(runner.prepare(Path(folder, SETUP_FILE).read_bytes()))
        while True:
            shared, job = pickle.loads(pipe.recv_bytes())
            pipe.send_bytes(runner.run(Path(shared), job))
    except (EOFError, OSError):  # the parent is gone
        return


def _end_with_parent(folder: str) -> None:
    """Stop this process with its parent, even in the middle of a job."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    shutil.rmtree(folder, ignore_errors=True)  # the parent could not do it
    os._exit(1)


def _encode_failure(error: BaseException) -> bytes:
    text = "".join(traceback.format_exception(error))
    try:
        pickle.loads(pickle.dumps(error))
        return serialise(("failed", (error, text)))
    except Exception:  # some exceptions cannot be pickled or unpickled
        return serialise(("failed", (RuntimeError(f"{type(error).__name__}: {error}"), text)))
