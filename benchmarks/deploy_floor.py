"""Compare the overhead of a pliant round with a Flower round that does nothing.

    python benchmarks/deploy_floor.py --rounds 24 --out runs/floor

One federation of three devices with TLS and keys runs three kinds of rounds in turn: pliant's,
with training; a bare round, in which Flower carries as many bytes to the same nodes and back,
polled as often as pliant polls; and the same with Flower's own `send_and_receive`. Nodes poll every
three seconds, so a pause precedes each round, and each kind gets the same pauses in another order.
Prints seconds per round (mean and standard error) and the memory (PSS) of an idle device.
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

from pliant.deploy.flower import client_app as device_app
from pliant.deploy.flower.client_app import BODY

HERE = Path(__file__)
POLL = 3.0  # seconds between two polls of a node
server_app = ServerApp()
client_app = device_app.app  # pliant's own, with a handler for queries added below


@client_app.query()  # type: ignore[untyped-decorator] # Flower's stubs are not read
def echo(message: Message, context: Context) -> Message:
    """Reply at once, with as many bytes as an update has."""
    size = int.from_bytes(message.content[BODY]["size"].data, "little")
    return Message(make_content(bytes(size), 0), reply_to=message)


def make_content(raw: bytes, size: int) -> RecordDict:
    """Wrap bytes like a pliant message, with the size of the reply."""
    body = Array("uint8", (len(raw),), "pliant.letter", raw)
    reply_size = Array("uint8", (8,), "pliant.size", size.to_bytes(8, "little"))
    return RecordDict({BODY: ArrayRecord({BODY: body, "size": reply_size})})


@server_app.main()  # type: ignore[untyped-decorator] # as above
def run_server(grid: Grid, context: Context) -> None:
    """Run the three kinds of rounds in turn and write how long each took."""
    import numpy as np
    import torch

    from pliant.deploy.flower.transport import FlowerTransport
    from pliant.deploy.messages import TrainRequest, encode_message
    from pliant.deploy.server.rounds import DeviceTransport, serve
    from pliant.deploy.settings import PID_FILE, ServerSettings
    from pliant.engine.local_work import build_context
    from pliant.experiment.build import build_experiment
    from pliant.experiment.config import load_run_config
    from pliant.params import get_params
    from pliant.value import encode

    folder = Path(str(context.run_config["folder"]))
    (folder / PID_FILE).write_text(str(os.getpid()))
    torch.set_num_threads(1)
    experiment = load_run_config(folder)
    net, data = build_experiment(experiment)
    worker_context = build_context(net, data, experiment.federated_method)
    hello = encode_message(TrainRequest("hello", encode(experiment), -1))
    request = TrainRequest("train", encode(experiment), 0)
    size = len(encode_message(request, {"params": get_params(net)}))
    settings = ServerSettings(allowance=60.0, patience=300.0)
    transport = DeviceTransport(experiment, settings, FlowerTransport(grid, hello))
    rounds = serve(worker_context, transport, folder)
    next(rounds)  # the first one waits for devices
    kinds: dict[str, Callable[[], object]] = {
        "pliant": lambda: next(rounds),
        "bare": lambda: run_bare_round(grid, size),
        "send_and_receive": lambda: grid.send_and_receive(make_messages(grid, size)),
    }
    count = experiment.rounds - 2
    pauses = {
        kind: np.random.default_rng(seed).permutation(np.arange(count) * POLL / count)
        for seed, kind in enumerate(kinds)
    }
    seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
    for number in range(count):
        for kind, run_round in kinds.items():
            time.sleep(pauses[kind][number])
            start = time.monotonic()
            run_round()
            seconds[kind].append(time.monotonic() - start)
    (folder / "floor.json").write_text(json.dumps(seconds))
    for _ in rounds:  # one more, so that everything is written before the run ends
        pass


def make_messages(grid: Grid, size: int) -> list[Message]:
    """Return one message per node, as large as a training request."""
    body, kind = bytes(size), MessageType.QUERY
    return [
        Message(make_content(body, size), dst_node_id=node.node_id, message_type=kind, ttl=60.0)
        for node in grid.get_nodes()
    ]


def run_bare_round(grid: Grid, size: int) -> None:
    """Do what `send_and_receive` does, but poll as often as pliant."""
    from pliant.deploy.server.rounds import POLL_SECONDS

    waiting = set(grid.push_messages(make_messages(grid, size)))
    while True:
        waiting -= {m.metadata.reply_to_message_id for m in grid.pull_messages(list(waiting))}
        if not waiting:
            return
        time.sleep(POLL_SECONDS)


def measure_memory(pids: dict[str, int]) -> dict[str, float]:
    """Return the proportional memory of processes and their children, in MB."""
    import psutil

    memory = {}
    for name, pid in pids.items():
        processes = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
        memory[name] = sum(process.memory_full_info().pss for process in processes) / 1e6
    return memory


def main() -> None:
    """Run the federation and print the measurements."""
    from pliant.deploy.security.certificates import make_keys
    from pliant.deploy.supervise import server as server_module
    from pliant.deploy.supervise.child_process import run_supervisor
    from pliant.deploy.supervise.federation import Federation
    from pliant.engine.ledger import TaskRecord
    from pliant.engine.run_store import read_records
    from pliant.experiment.config import Experiment
    from pliant.value import decode

    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=24)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--port", type=int, default=18790)
    options = parser.parse_args()
    os.environ["PYTHONPATH"] = os.pathsep.join(
        [str(HERE.resolve().parent), os.environ.get("PYTHONPATH", "")]
    )
    server_module.APP_PROJECT = server_module.APP_PROJECT.replace(
        "pliant.deploy.flower.server_app:app", f"{HERE.stem}:server_app"
    ).replace("pliant.deploy.flower.client_app:app", f"{HERE.stem}:client_app")
    config = {
        "method": {"type": "fedavg"},
        "fleet": {"size": 3, "round_seconds": 20.0},
        "rounds": options.rounds + 2,
        "per_round": 3,
        "evaluation": {"every": 1000},
    }
    keys = options.out.parent / f"{options.out.name}-keys"
    make_keys(keys, devices=3)
    federation = Federation(decode(config, Experiment), options.out, port=options.port, keys=keys)
    with run_supervisor(federation):
        for record in federation.watch():
            sys.stderr.write(f"round {record.round}: {record.seconds:.1f} s\n")
            memory = measure_memory(federation.devices[0].pids)
    seconds = json.loads((options.out / "floor.json").read_text())
    tasks = [r for r in read_records(options.out) if isinstance(r, TaskRecord) and r.round]
    seconds["training"] = [
        max(task.seconds for task in tasks if task.round == number)
        for number in range(1, options.rounds + 1)
    ]
    seconds["pliant - training"] = [
        total - training
        for total, training in zip(seconds["pliant"], seconds["training"], strict=True)
    ]
    for kind, values in seconds.items():
        error = statistics.stdev(values) / len(values) ** 0.5
        print(f"{kind:20} {statistics.fmean(values):6.2f} ± {error:.2f} s per round")
    floor = statistics.fmean(seconds["bare"])
    overhead = statistics.fmean(seconds["pliant - training"]) - floor
    print(f"overhead {overhead:+.2f} s: {overhead / floor:+.1%} of the bare round")
    print("idle device: " + ", ".join(f"{name} {mb:.0f} MB" for name, mb in memory.items()))


if __name__ == "__main__":
    main()
