"""The Flower ServerApp: it runs the rounds of the experiment whose folder it is given."""

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from pliant import atomic

if TYPE_CHECKING:
    from pliant.engine.ledger import RoundRecord

app = ServerApp()

PIDFILE = "server.pid"
SERVICE = "service.json"


@app.main()  # type: ignore[untyped-decorator] # Flower's stubs are not read
def main(grid: Grid, context: Context) -> None:
    """Run an experiment, or go on with it."""
    folder = Path(str(context.run_config["folder"]))
    (folder / PIDFILE).write_text(str(os.getpid()))
    from pliant.deploy.desk import NotEnough
    from pliant.deploy.follow import FAILURE

    def give_up(error: Exception) -> None:
        """Tell the process that watches this one not to begin again."""
        with suppress(OSError):
            atomic.write_bytes(folder / FAILURE, " ".join(str(error).split()).encode())

    try:
        rounds = _rounds(grid, folder)
    except (ValueError, OSError) as error:
        give_up(error)
        raise
    try:
        for _ in rounds:
            pass  # the folder tells it all
    except NotEnough as error:
        give_up(error)
        raise
    except OSError as error:  # a full disk; of a connection that breaks it is begun again
        if error.errno is not None and not isinstance(error, ConnectionError | TimeoutError):
            give_up(error)
        raise


def _rounds(grid: Grid, folder: Path) -> "Iterator[RoundRecord]":
    import torch

    from pliant.deploy.letters import Order, packed
    from pliant.deploy.link import FlowerLink
    from pliant.deploy.rounds import serve
    from pliant.deploy.service import Service
    from pliant.engine.job import World, example_of
    from pliant.experiment import build, recall
    from pliant.nn.elastic import elastic
    from pliant.value import encode

    torch.set_num_threads(1)
    experiment = recall(folder)
    service = msgspec.json.decode((folder / SERVICE).read_bytes(), type=Service)
    net, data = build(experiment)
    world = World(elastic(net, example_of(data)), data, experiment.federated)
    hello = packed(Order("hello", encode(experiment), -1, pace=service.pace))
    link = FlowerLink(grid, hello)
    return serve(experiment, world, link, folder, service)
