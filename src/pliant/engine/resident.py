"""The inside of a worker: the world it holds, and the loop that answers the parent."""

import multiprocessing
import os
import pickle
import shutil
import signal
import threading
import traceback
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from pliant import memory
from pliant.engine.segment import mapped
from pliant.engine.wire import decoded, message
from pliant.params import Params
from pliant.record import THREADS

SETUP = "setup.pickle"


class Resident:
    """What stays in a worker: the world, built once, and the function for jobs."""

    def __init__(self) -> None:
        torch.set_num_threads(THREADS)
        memory.keep()
        self._world: Any = None
        self._perform: Callable[[Any, Params, Any], Any] | None = None

    def prepare(self, functions: bytes) -> bytes:
        """Build the world and answer `ready`, or `failed`."""
        try:
            setup, self._perform = pickle.loads(functions)
            self._world = setup()
        except Exception as error:
            return _failure(error)
        return message(("ready", None))

    def answer(self, read: Callable[[], Params], job: bytes) -> bytes:
        """Perform a job and answer `done`, or `failed`."""
        assert self._perform is not None
        try:
            return message(("done", self._perform(self._world, read(), decoded(job))))
        except Exception as error:
            return _failure(error)


def serve(link: "Connection[Any, Any]", folder: str) -> None:
    """Be a worker process until the parent closes the link or dies."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides what Ctrl-C means
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    threading.Thread(target=_end_with_parent, args=(folder,), daemon=True).start()
    resident = Resident()
    try:
        link.send_bytes(resident.prepare(Path(folder, SETUP).read_bytes()))
        while True:
            segment, job = pickle.loads(link.recv_bytes())
            link.send_bytes(resident.answer(partial(_read, segment), job))
    except (EOFError, OSError):  # the parent has gone
        return


def _read(segment: str) -> Params:
    found: Params = decoded(mapped(segment), copies=False)
    return found


def _end_with_parent(folder: str) -> None:
    """End this process with its parent, even in the middle of a job."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    shutil.rmtree(folder, ignore_errors=True)  # the parent could not
    os._exit(1)


def _failure(error: Exception) -> bytes:
    text = "".join(traceback.format_exception(error))
    try:
        sent = pickle.dumps(error)
        pickle.loads(sent)
        return message(("failed", (error, text)))
    except Exception:  # some exceptions cannot be pickled, or not be built again
        return message(("failed", (RuntimeError(f"{type(error).__name__}: {error}"), text)))
