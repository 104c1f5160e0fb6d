"""Race methods by the wall clock: three device processes that share two cores with other work.

    python scripts/race.py --repeats 5 --out race

Devices 0 and 1 share one core; device 2 shares the other with a busy program, so that each has
about half a core. All train one network on a third of CIFAR-10 each, in rounds of 20 seconds.
Methods take turns in a shuffled order. A curve is the accuracy after each round over the seconds
spent in rounds; the server's evaluations are not counted. The target is what the rival, by default
partial work, reaches in the end, in each repeat. Requests go through the devices' own sockets, as
Flower's polling adds the same seconds to every method. Killed at any time, the same command resumes
with the interrupted run.
"""

import argparse
import csv
import statistics
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from deploy_faults import write_data
from numpy.typing import NDArray

from pliant.bench.local_devices import open_devices, serve_rounds, start_busy_program
from pliant.engine.ledger import RoundRecord
from pliant.engine.run_store import read_records
from pliant.experiment.build import build_experiment, build_server_context
from pliant.experiment.config import Experiment
from pliant.rng import rng_stream
from pliant.value import decode

SECONDS = 20.0  # of a round
CORES = [0, 0, 1]
LOCAL = {"batch": 32, "optimiser": {"type": "sgd", "lr": 0.1, "clip": 5.0}}
METHODS: dict[str, tuple[dict[str, Any], str]] = {  # and what happens at the end of a round
    "progressive": ({"type": "progressive", "local": {**LOCAL, "epochs": 8}}, "partial"),
    "partial-work": ({"type": "fedprox", "mu": 0.0, "local": LOCAL}, "partial"),
    "small": ({"type": "small", "local": {**LOCAL, "epochs": 8}}, "partial"),
    "distreal": ({"type": "distreal", "budget": "paced", "local": LOCAL}, "partial"),
    "fedavg": ({"type": "fedavg", "local": LOCAL}, "wait"),
}
NETWORKS: dict[str, dict[str, Any]] = {
    "cifar_cnn": {"name": "cifar_cnn"},
    "resnet20": {"name": "resnet20", "options": {"width": 8}},
}
Curve = NDArray[np.float64]  # rows of seconds and accuracy


def make_experiment(
    name: str, network: str, seed: int, rounds: int, server_data: Path
) -> Experiment:
    method, late = METHODS[name]
    sources = {key: str((server_data / key).resolve()) for key in ("proxy", "holdout")}
    config = {
        "method": method,
        "network": NETWORKS[network] | {"input": [3, 32, 32], "classes": 10},
        "data": {"name": "cifar10", "proxy": 2000},  # of the simulation, whose parts they get
        "server": sources,
        "fleet": {"size": 3, "round_seconds": SECONDS},
        "rules": {"late": late},
        "rounds": rounds,
        "per_round": 3,
        "seed": seed,
    }
    return decode(config, Experiment)


def run_method(folder: Path, name: str, network: str, seed: int, rounds: int) -> None:
    """Run one method on three new device processes, unless that has been done."""
    run_folder = folder / "run"
    if run_folder.exists() and len(read_rounds(run_folder)) >= rounds:
        return
    experiment = make_experiment(name, network, seed, rounds, folder / "server")
    limits = write_data(experiment, folder / "data")
    write_server_data(experiment, folder / "server")
    context = build_server_context(experiment)
    busy_program = start_busy_program(CORES[2], folder / "other.log")
    try:
        with open_devices(folder, CORES, limits) as transport:
            for record in serve_rounds(experiment, context, transport, run_folder):
                accuracy = get_accuracy(record)
                sys.stderr.write(f"{folder.name}: {record.seconds:.1f} s, {accuracy:.4f}\n")
    finally:
        busy_program.stop()


def write_server_data(experiment: Experiment, folder: Path) -> None:
    """Write the images that the server re-estimates norm statistics and evaluates networks on."""
    _, data = build_experiment(experiment)
    for name, part in (("proxy", data.proxy), ("holdout", data.test)):
        (folder / name).mkdir(parents=True, exist_ok=True)
        pixels, labels = part.pixels.numpy(), part.labels.numpy()
        np.savez(folder / name / "images.npz", images=pixels, labels=labels)


def read_rounds(folder: Path) -> list[RoundRecord]:
    return [record for record in read_records(folder) if isinstance(record, RoundRecord)]


def get_accuracy(record: RoundRecord) -> float:
    """Return the accuracy at the size trained last."""
    score = record.trained_score or record.score
    return score.accuracy if score else float("nan")


def read_curve(folder: Path) -> Curve:
    return np.array([(record.seconds, get_accuracy(record)) for record in read_rounds(folder)])


def find_time(curve: Curve, target: float) -> float:
    """Return the seconds at which the curve first reaches a target; infinity if never."""
    reached = np.flatnonzero(curve[:, 1] >= target)
    if not len(reached):
        return float("inf")
    after = int(reached[0])
    if after == 0:
        return float(curve[0, 0])
    return float(
        np.interp(target, curve[after - 1 : after + 1, 1], curve[after - 1 : after + 1, 0])
    )


def print_race(folder: Path, methods: list[str], rival_name: str, repeats: int) -> None:
    """Print, for each repeat, how many times fewer seconds each method needs than the rival."""
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(["method", "mean ratio", *(f"repeat {r}" for r in range(repeats)), "accuracy"])
    for name in methods:
        curves = [read_curve(folder / f"{name}-{repeat}/run") for repeat in range(repeats)]
        rivals = [read_curve(folder / f"{rival_name}-{repeat}/run") for repeat in range(repeats)]
        ratios = [
            find_time(rival, rival[-1, 1]) / find_time(curve, rival[-1, 1])
            for curve, rival in zip(curves, rivals, strict=True)
        ]
        end = statistics.fmean(curve[-1, 1] for curve in curves)
        texts = [f"{value:.2f}" for value in (statistics.fmean(ratios), *ratios)]
        writer.writerow([name, *texts, f"{end:.4f}"])


def main() -> None:
    """Run every method as often as asked, and print the ratios."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=METHODS)
    parser.add_argument("--network", default="cifar_cnn", choices=NETWORKS)
    parser.add_argument("--rival", default="partial-work", choices=METHODS)
    parser.add_argument("--out", type=Path, default=Path("race"))
    options = parser.parse_args()
    if options.rival not in options.methods:
        parser.error(f"expected the rival among the methods, got {options.rival}")
    torch.set_num_threads(1)  # the busy program would hold up all others in every evaluation
    out = options.out / options.network
    for repeat in range(options.repeats):
        for index in rng_stream(repeat, "race").permutation(len(options.methods)):
            name = options.methods[index]
            run_method(out / f"{name}-{repeat}", name, options.network, repeat, options.rounds)
    print_race(out, options.methods, options.rival, options.repeats)


if __name__ == "__main__":
    main()
