"""A process that imports torch once, and the workers that are forked from it."""

import io
import os
from multiprocessing import context, popen_forkserver, reduction, spawn, util
from multiprocessing.forkserver import ForkServer, read_signed
from multiprocessing.process import BaseProcess

# Not the server of `multiprocessing`: a user's own processes need other imports and threads.
_server = ForkServer()
PRELOADED = ("pliant.workers.preload", "pliant.workers.worker_main")


def start_server(*modules: str) -> None:
    """Start the server, unless it runs, and let it import modules without waiting for them."""
    _server.set_forkserver_preload([*PRELOADED, *modules])
    _server.ensure_running()


class ForkedWorker(context.ForkServerProcess):
    """A process that is forked from this module's server."""

    @staticmethod
    def _Popen(process_obj: BaseProcess) -> "_Launch":
        return _Launch(process_obj)


class _Launch(popen_forkserver.Popen):
    def _launch(self, process_obj: BaseProcess) -> None:
        """Start a process as the base class does, but from this module's server."""
        data = io.BytesIO()
        context.set_spawning_popen(self)
        try:
            reduction.dump(spawn.get_preparation_data(process_obj.name), data)
            reduction.dump(process_obj, data)
        finally:
            context.set_spawning_popen(None)
        self.sentinel, write_end = _server.connect_to_new_process(self._fds)  # type: ignore[attr-defined]
        parent_sentinel = os.dup(write_end)  # open as long as this process lives
        self.finalizer = util.Finalize(self, _close_files, (parent_sentinel, self.sentinel))
        with open(write_end, "wb") as pipe:
            pipe.write(data.getbuffer())
        self.pid = read_signed(self.sentinel)  # waits for the imports


def _close_files(*files: int) -> None:
    for file in files:
        os.close(file)
