"""The Flower ServerApp: it runs the rounds of the run in a folder."""

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from pliant.deploy.settings import FAILURE_FILE, PID_FILE
from pliant.storage import atomic
from pliant.user_errors import describe_user_error

app = ServerApp()


@app.main()  # type: ignore[untyped-decorator] # Flower's stubs are not read
def main(grid: Grid, context: Context) -> None:
    folder = Path(str(context.run_config["folder"]))
    (folder / PID_FILE).write_text(str(os.getpid()))
    from pliant.deploy.server.rounds import NotEnoughDevices

    def write_failure(error: BaseException) -> None:
        """Tell the supervisor not to restart this run."""
        line = describe_user_error(error) or " ".join(str(error).split())
        with suppress(OSError):
            atomic.write_bytes(folder / FAILURE_FILE, line.encode())

    try:
        rounds = _serve_folder(grid, folder)
    except (Exception, SystemExit) as error:
        if isinstance(error, ValueError | OSError) or describe_user_error(error) is not None:
            write_failure(error)
        raise
    try:
        for _ in rounds:
            pass  # the records are in the folder
    except NotEnoughDevices as error:
        write_failure(error)
        raise
    except OSError as error:  # such as a full disk; after a broken connection, restart
        if error.errno is not None and not isinstance(error, ConnectionError | TimeoutError):
            write_failure(error)
        raise
    except (Exception, SystemExit) as error:
        if describe_user_error(error) is not None:  # it would fail again
            write_failure(error)
        raise


def _serve_folder(grid: Grid, folder: Path) -> Iterator[object]:
    import torch

    from pliant.deploy.flower.transport import FlowerTransport
    from pliant.deploy.server.rounds import DeviceTransport
    from pliant.deploy.server.serve import prepare_run, serve

    torch.set_num_threads(1)
    prepared = prepare_run(folder)
    messages = FlowerTransport(grid, prepared.hello)
    devices = DeviceTransport(prepared.experiment, prepared.settings, messages)
    return serve(prepared.context, devices, folder)
