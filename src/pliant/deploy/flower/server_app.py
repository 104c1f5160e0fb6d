"""The Flower ServerApp: it runs the rounds of the run in a folder."""

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import msgspec
from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from pliant.deploy.settings import (
    BYTE_LIMIT_FILE,
    FAILURE_FILE,
    PID_FILE,
    SETTINGS_FILE,
    ServerSettings,
)
from pliant.storage import atomic

app = ServerApp()


@app.main()  # type: ignore[untyped-decorator] # Flower's stubs are not read
def main(grid: Grid, context: Context) -> None:
    folder = Path(str(context.run_config["folder"]))
    (folder / PID_FILE).write_text(str(os.getpid()))
    from pliant.deploy.server.rounds import NotEnoughDevices

    def write_failure(error: Exception) -> None:
        """Tell the supervisor not to restart this run."""
        with suppress(OSError):
            atomic.write_bytes(folder / FAILURE_FILE, " ".join(str(error).split()).encode())

    try:
        rounds = _serve_folder(grid, folder)
    except (ValueError, OSError) as error:
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


def _serve_folder(grid: Grid, folder: Path) -> Iterator[object]:
    import torch

    from pliant.deploy.flower.transport import FlowerTransport
    from pliant.deploy.messages import (
        TrainRequest,
        encode_for_devices,
        encode_message,
        has_own_data,
    )
    from pliant.deploy.server.replies import find_max_reply_bytes
    from pliant.deploy.server.rounds import DeviceTransport
    from pliant.deploy.server.serve import serve
    from pliant.experiment.build import build_run_context, build_server_context
    from pliant.experiment.config import load_run_config

    torch.set_num_threads(1)
    experiment = load_run_config(folder)
    settings = msgspec.json.decode((folder / SETTINGS_FILE).read_bytes(), type=ServerSettings)
    is_own = has_own_data(experiment, settings.pace)
    context = (build_server_context if is_own else build_run_context)(experiment)
    largest = find_max_reply_bytes(context, experiment.settings.guard)
    atomic.write_bytes(folder / BYTE_LIMIT_FILE, str(largest).encode())
    config = encode_for_devices(experiment, settings.pace)
    hello = encode_message(TrainRequest("hello", config, -1, pace=settings.pace))
    transport = DeviceTransport(experiment, settings, FlowerTransport(grid, hello))
    return serve(context, transport, folder)
