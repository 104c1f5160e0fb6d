"""The Flower ServerApp: it runs the rounds of the experiment whose folder it is given."""

import os
from pathlib import Path

import msgspec
from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

app = ServerApp()

PIDFILE = "server.pid"
SERVICE = "service.json"


@app.main()  # type: ignore[untyped-decorator] # Flower's stubs are not read
def main(grid: Grid, context: Context) -> None:
    """Run an experiment, or go on with it."""
    import torch

    from pliant.deploy.letters import Order, packed
    from pliant.deploy.link import FlowerLink
    from pliant.deploy.rounds import serve
    from pliant.deploy.service import Service
    from pliant.engine.job import World, example_of
    from pliant.experiment import build, recall
    from pliant.nn.elastic import elastic
    from pliant.value import encode

    folder = Path(str(context.run_config["folder"]))
    (folder / PIDFILE).write_text(str(os.getpid()))
    torch.set_num_threads(1)
    experiment = recall(folder)
    service = msgspec.json.decode((folder / SERVICE).read_bytes(), type=Service)
    net, data = build(experiment)
    world = World(elastic(net, example_of(data)), data, experiment.federated)
    link = FlowerLink(grid, packed(Order("hello", encode(experiment), -1)))
    for _ in serve(experiment, world, link, folder, service):
        pass  # the folder tells it all
