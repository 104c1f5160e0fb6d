"""FedAvg in Flower's simulation: one virtual node per device, on Ray."""

import os
import time
from itertools import pairwise

os.environ.update(
    FLWR_TELEMETRY_ENABLED="0", FLWR_DISABLE_UPDATE_CHECK="1", RAY_USAGE_STATS_ENABLED="0"
)

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from workload import (
    PER_ROUND,
    Curve,
    evaluate,
    load_workload,
    make_network,
    read_arguments,
    report,
    train,
)

started = time.perf_counter()
args = read_arguments()
path, rounds = args.data, args.rounds
client, server = ClientApp(), ServerApp()


@client.train()
def train_device(message: Message, context: Context) -> Message:
    torch.set_num_threads(1)
    net = make_network()
    net.load_state_dict(message.content["arrays"].to_torch_state_dict())
    images, labels = load_workload(path).get_device(int(context.node_config["partition-id"]))
    train(net, images, labels)
    metrics = MetricRecord({"num-examples": len(labels)})
    content = RecordDict({"arrays": ArrayRecord(net.state_dict()), "metrics": metrics})
    return Message(content=content, reply_to=message)


@server.main()
def run_rounds(grid: Grid, context: Context) -> None:
    workload = load_workload(path)
    ends = [time.perf_counter()]
    curve: Curve = []

    def note_accuracy(arrays: ArrayRecord) -> None:
        net = make_network()
        net.load_state_dict(arrays.to_torch_state_dict())
        accuracy = evaluate(net, workload)
        curve.append((time.perf_counter() - started, accuracy))

    def note_end(round_number: int, arrays: ArrayRecord) -> MetricRecord | None:
        if args.every and round_number and round_number % args.every == 0:
            note_accuracy(arrays)
        if round_number == 0:
            ends[0] = time.perf_counter()
        else:
            ends.append(time.perf_counter())
        return None

    devices = len(workload)
    strategy = FedAvg(
        fraction_train=PER_ROUND / devices,
        fraction_evaluate=0.0,
        min_train_nodes=PER_ROUND,
        min_available_nodes=devices,
    )
    result = strategy.start(
        grid=grid,
        initial_arrays=ArrayRecord(make_network().state_dict()),
        num_rounds=rounds,
        train_config=ConfigRecord(),
        evaluate_fn=note_end,
    )
    if not args.every or rounds % args.every:
        note_accuracy(result.arrays)
    report([after - before for before, after in pairwise(ends)], curve, started)


run_simulation(
    server_app=server,
    client_app=client,
    num_supernodes=len(load_workload(path)),
    backend_config={
        "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
        "init_args": {"num_cpus": args.processes},
    },
)
