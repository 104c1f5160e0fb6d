"""Print what methods plan with slow links, and who finishes when speeds change; nothing is trained.

    python scripts/deadlines.py links
    python scripts/deadlines.py changes

DenseNet-40 with 15 mini-batches per round. `links`: speed 0.9; the whole network takes this share
of the round, each way. `changes`: speeds from U[1/4, 1], redrawn 0, 1, 2 and 4 times per round; the
share of devices that finish under `discard`, with a grace of 3 % and (in brackets) without.
"""

import argparse
import sys
from collections.abc import Mapping
from itertools import product

import numpy as np
import torch

import pliant as pl
from pliant.devices import Fleet
from pliant.engine.round_loop import Run
from pliant.engine.round_rules import TaskOutcome
from pliant.engine.run_store import RunState
from pliant.engine.simulated_devices import schedule_round
from pliant.engine.timetable import Timetable
from pliant.engine.worker_context import build_context
from pliant.methods.base import TaskKey
from pliant.methods.verbs import Method
from pliant.params import get_params, nbytes

SAMPLES, DEVICES = 475, 200  # as on CIFAR-10 with a proxy: 15 mini-batches of 32
LAMBDAS = (0.0, 1.0, 2.0, 4.0)
LINK_SHARES = (0.0, 0.05, 0.2, 0.4)
PACKED: Mapping[str, Method] = {
    "feddropout": pl.FedDropout(),
    "heterofl": pl.HeteroFl(),
    "heterofl, fine": pl.HeteroFl(fine=True),
    "fedrolex": pl.FedRolex(),
    "fjord": pl.Fjord(),
}
ADAPTIVE: Mapping[str, Method] = {
    "distreal": pl.Distreal(),
    "distreal, paced": pl.Distreal(budget="paced"),
    "coherent": pl.Coherent(),
}


CHANGING = ADAPTIVE | {
    "fjord, dynamic": pl.Fjord(dynamic=True),
    "feddropout": pl.FedDropout(),
    "feddropout, margin 0.7": pl.FedDropout(margin=0.7),
    "heterofl": pl.HeteroFl(),
    "heterofl, fine": pl.HeteroFl(fine=True),
    "fjord": pl.Fjord(),
    "fedavg": pl.FedAvg(),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("table", choices=TABLES)
    torch.set_num_threads(1)
    TABLES[parser.parse_args().table]()


def print_links() -> None:
    """Print the planned share of the full MACs, and the largest that fits, for each link."""
    print_row("method", *(f"{share:.0%} each way" for share in LINK_SHARES))
    for name, method in (PACKED | ADAPTIVE).items():
        run = make_run(method, Fleet(size=1))
        print_row(name, *(describe_plan(run, share, 0.9) for share in LINK_SHARES))


def describe_plan(run: Run, share: float, speed: float) -> str:
    policy, params = run.context.budget_policy, run.state.server_state.params
    rate = nbytes(params) / share if share else None
    link = pl.DeviceClass(up=rate, down=rate)
    run.fleet = Fleet(size=1, speed=pl.ConstantTrace(speed), classes=(link,))
    feasible = [
        cost
        for row, cost in enumerate(policy.rows.shares)
        if 2 * share * measure_sent_share(run, row) + cost / speed <= 1 + 1e-9
    ]
    if not feasible:
        return "no row fits"
    most = max(feasible) if policy.is_per_round else (1 - 2 * share) * speed  # may mix rows
    planned = schedule(run).planned.sum() / (SAMPLES * run.context.full_macs)
    return f"{planned:.2f} of {most:.2f}"


def measure_sent_share(run: Run, row: int) -> float:
    """Return the share of the network's bytes that a row's device is sent."""
    net, params = run.context.net, run.state.server_state.params
    subnet = run.context.subnet_to_send(row, TaskKey(0, 0, 0))
    return 1.0 if subnet is None else nbytes(net.take(params, subnet)) / nbytes(params)


def print_changes() -> None:
    """Print the share of devices that finish, for each time model, method and lambda."""
    print_row("changes", "cost", "method", *(f"lambda {per_round:g}" for per_round in LAMBDAS))
    for changes, cost in product(("anytime", "batch"), ("realised", "expected")):
        for name, method in CHANGING.items():
            run = make_run(method, Fleet(size=DEVICES))
            print_row(
                changes, cost, name, *(describe_share(run, changes, cost, x) for x in LAMBDAS)
            )


def describe_share(run: Run, changes: str, cost: str, per_round: float) -> str:
    speed = pl.ChangingTrace(low=0.25, high=1.0, per_round=per_round)
    run.fleet = Fleet(size=DEVICES, speed=speed)
    run.settings = pl.RunSettings(
        per_round=DEVICES, rules=pl.RoundRules(changes=changes, cost=cost)
    )
    timetable = schedule(run)
    finished = timetable.outcomes == TaskOutcome.FINISHED
    in_length = finished & (timetable.arrival <= run.fleet.round_seconds * (1 + 1e-8))
    return f"{finished.mean():.0%} ({in_length.mean():.0%})"


def make_run(method: Method, fleet: Fleet) -> Run:
    """Prepare a run of DenseNet-40 on blank images, of which only the schedule is of interest."""
    pixels = torch.zeros((1, 3, 32, 32), dtype=torch.uint8).expand(SAMPLES, -1, -1, -1)
    images = pl.ImageDataset(
        pixels, torch.zeros(SAMPLES, dtype=torch.int64), 10, (0.0,) * 3, (1.0,) * 3, name="blank"
    )
    data = pl.FederatedData(images, images, images, (np.arange(SAMPLES),), np.zeros(0, np.int64))
    net = pl.models.densenet40(classes=10)
    context = build_context(net, data, method)
    state = RunState(0, 0.0, context.init_state(get_params(net)), {})
    return Run(context, fleet, pl.RunSettings(per_round=fleet.size), state)


def schedule(run: Run) -> Timetable:
    return schedule_round(run, np.arange(run.fleet.size))[0]


def print_row(*cells: str) -> None:
    sys.stdout.write(f"| {' | '.join(cells)} |\n")
    sys.stdout.flush()


TABLES = {"links": print_links, "changes": print_changes}

if __name__ == "__main__":
    main()
