"""What a round of pliant takes beyond its training, against a round of Flower that does nothing.

    python benchmarks/deploy_floor.py --rounds 24 --out runs/floor

One federation of three devices with TLS and keys. Its server app runs three kinds of rounds in
turn: pliant's own, training and all; a bare one, in which Flower carries as many bytes to the same
nodes and back and nobody does anything, asked for as often as pliant does; and the same by Flower's
own `send_and_receive`. Nodes poll every three seconds, so before each round there is a pause, and
each kind gets the same pauses in another order. Prints seconds a round, mean and standard error,
and the memory (PSS) of an idle device.
"""

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

from flwr.app import Array, ArrayRecord, Context, Message, MessageType, RecordDict
from flwr.serverapp import Grid, ServerApp

from pliant.deploy import client_app as device_app
from pliant.deploy.client_app import BODY

HERE = Path(__file__)
KINDS = ("pliant", "bare", "send_and_receive")
POLL = 3.0  # seconds between two looks of a node for messages
server_app = ServerApp()
client_app = device_app.app  # pliant's own; an answer to queries comes to it here


@client_app.query()  # type: ignore[untyped-decorator] # Flower's stubs are not read
def echo(message: Message, context: Context) -> Message:
    """Answer with as many bytes as an update has, at once."""
    array = message.content[BODY]["size"].data
    size = int.from_bytes(array, "little")
    return Message(carried(bytes(size), 0), reply_to=message)


def carried(raw: bytes, size: int) -> RecordDict:
    """Return bytes as pliant's letters are carried, and how many are wanted back."""
    body = Array("uint8", (len(raw),), "pliant.letter", raw)
    wanted = Array("uint8", (8,), "pliant.size", size.to_bytes(8, "little"))
    return RecordDict({BODY: ArrayRecord({BODY: body, "size": wanted})})


@server_app.main()  # type: ignore[untyped-decorator] # as above
def main_of_server(grid: Grid, context: Context) -> None:
    """Run the three kinds of rounds in turn and write how long each took."""
    import numpy as np
    import torch

    from pliant.deploy.letters import Order, packed
    from pliant.deploy.link import FlowerLink
    from pliant.deploy.rounds import serve
    from pliant.deploy.server_app import PIDFILE
    from pliant.deploy.service import Service
    from pliant.engine.job import World, example_of
    from pliant.experiment import build, recall
    from pliant.nn.elastic import elastic
    from pliant.params import params_of
    from pliant.value import encode

    folder = Path(str(context.run_config["folder"]))
    (folder / PIDFILE).write_text(str(os.getpid()))
    torch.set_num_threads(1)
    experiment = recall(folder)
    net, data = build(experiment)
    world = World(elastic(net, example_of(data)), data, experiment.federated)
    link = FlowerLink(grid, packed(Order("hello", encode(experiment), -1)))
    size = len(packed(Order("train", encode(experiment), 0), {"params": params_of(net)}))
    rounds = serve(experiment, world, link, folder, Service(allowance=60.0, patience=300.0))
    next(rounds)  # the first one waits for devices
    ways: dict[str, Callable[[], object]] = {
        "pliant": lambda: next(rounds),
        "bare": lambda: polled(grid, size),
        "send_and_receive": lambda: grid.send_and_receive(messages(grid, size)),
    }
    count = experiment.rounds - 2
    pauses = {
        kind: np.random.default_rng(place).permutation(np.arange(count) * POLL / count)
        for place, kind in enumerate(ways)
    }
    taken: dict[str, list[float]] = {kind: [] for kind in ways}
    for number in range(count):
        for kind, way in ways.items():
            time.sleep(pauses[kind][number])
            began = time.monotonic()
            way()
            taken[kind].append(time.monotonic() - began)
    (folder / "floor.json").write_text(json.dumps(taken))
    for _ in rounds:  # one more, so that all is written before the run ends
        pass


def messages(grid: Grid, size: int) -> list[Message]:
    """Return a message to each node with as many bytes as an order has."""
    body = bytes(size)
    return [
        Message(
            carried(body, size), dst_node_id=node.node_id, message_type=MessageType.QUERY, ttl=60.0
        )
        for node in grid.get_nodes()
    ]


def polled(grid: Grid, size: int) -> None:
    """Do what `send_and_receive` does, but look for answers as often as pliant."""
    from pliant.deploy.desk import POLL as OFTEN

    waiting = set(grid.push_messages(messages(grid, size)))
    while True:
        waiting -= {m.metadata.reply_to_message_id for m in grid.pull_messages(list(waiting))}
        if not waiting:
            return
        time.sleep(OFTEN)


def memory(pids: dict[str, int]) -> dict[str, float]:
    """Return the proportional memory of processes and of what they have started, in MB."""
    import psutil

    found = {}
    for name, pid in pids.items():
        family = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
        found[name] = sum(one.memory_full_info().pss for one in family) / 1e6
    return found


def main() -> None:
    """Start the federation, wait, and print what was measured."""
    from pliant.deploy import server as server_module
    from pliant.deploy.federation import Federation
    from pliant.deploy.keys import make_keys
    from pliant.engine.ledger import TaskRecord
    from pliant.engine.store import events
    from pliant.experiment import Experiment
    from pliant.value import decode

    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=24)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--port", type=int, default=18790)
    given = parser.parse_args()
    os.environ["PYTHONPATH"] = os.pathsep.join(
        [str(HERE.resolve().parent), os.environ.get("PYTHONPATH", "")]
    )
    server_module.APP = server_module.APP.replace(
        "pliant.deploy.server_app:app", f"{HERE.stem}:server_app"
    ).replace("pliant.deploy.client_app:app", f"{HERE.stem}:client_app")
    plain = {
        "method": {"type": "fedavg"},
        "fleet": {"size": 3, "round_seconds": 20.0},
        "rounds": given.rounds + 2,
        "per_round": 3,
        "evaluation": {"every": 1000},
    }
    keys = given.out.parent / f"{given.out.name}-keys"
    make_keys(keys, devices=3)
    federation = Federation(decode(plain, Experiment), given.out, port=given.port, keys=keys)
    with federation:
        for record in federation.watch():
            sys.stderr.write(f"round {record.round}: {record.seconds:.1f} s\n")
            held = memory(federation.devices[0].pids)
    taken = json.loads((given.out / "floor.json").read_text())
    tasks = [r for r in events(given.out) if isinstance(r, TaskRecord) and r.round]
    trained = [
        max(task.seconds for task in tasks if task.round == number)
        for number in range(1, given.rounds + 1)
    ]
    taken["training"] = trained
    taken["pliant - training"] = [
        all_ - own for all_, own in zip(taken["pliant"], trained, strict=True)
    ]
    for kind, found in taken.items():
        error = statistics.stdev(found) / len(found) ** 0.5
        print(f"{kind:20} {statistics.fmean(found):6.2f} ± {error:.2f} s a round")
    floor = statistics.fmean(taken["bare"])
    beyond = statistics.fmean(taken["pliant - training"]) - floor
    print(f"overhead {beyond:+.2f} s: {beyond / floor:+.1%} of the bare round")
    print("a device between rounds: " + ", ".join(f"{k} {v:.0f} MB" for k, v in held.items()))


if __name__ == "__main__":
    main()
