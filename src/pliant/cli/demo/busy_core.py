"""A real device process in the demo, whose core a busy program takes away in mid-round."""

import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import pliant as pl

if TYPE_CHECKING:
    from pliant.bench.local_devices import SocketTransport
    from pliant.engine.ledger import TaskRecord
    from pliant.experiment.config import Experiment
    from pliant.methods import AnyMethod

ROUNDS = 2  # per method
EPOCHS, BATCH, IMAGES = 5, 64, 800
FULL_SHARE = 0.85  # of a round's time that the full network needs when undisturbed
FROM, TO = 0.3, 0.9  # when the busy program runs, as shares of the round's time
TEXT = (
    "Not a simulation: a device process of its own trains on one core, with a deadline in every "
    "round. In mid-round, a busy program starts on the same core and takes half of it."
)
UNAVAILABLE = "Skipped: this system cannot keep a process on one core."


@dataclass(frozen=True)
class SlowedDevice:
    """What a device did in rounds in which a busy program took half of its core."""

    round_seconds: float
    full_seconds: float  # of an undisturbed round with the full network
    delivered: dict[str, int]  # rounds in time, by method
    spent: dict[str, float]  # share of the full network's MACs


def can_pin() -> bool:
    """Return whether this system can keep a process on one core."""
    return hasattr(os, "sched_setaffinity")


def run_slowed_device(folder: Path, seed: int) -> SlowedDevice:
    """Measure a calm round with the full network, then disturb FedAvg and DISTREAL."""
    from pliant.bench.local_devices import Disturbance, open_devices
    from pliant.deploy.device.host import Limits

    shutil.rmtree(folder, ignore_errors=True)  # times are measured anew
    core = min(os.sched_getaffinity(0))
    local = pl.LocalTraining(pl.Sgd(lr=0.05), batch=BATCH, epochs=EPOCHS)
    delivered, spent = {}, {}
    with open_devices(folder, [core], [Limits()]) as transport:
        calm = _run(pl.FedAvg(local), 60.0, seed, transport, folder / "calm")
        full_seconds = min(task.ends[-1] - task.starts[0] for task in calm)
        seconds = round(full_seconds / FULL_SHARE, 2)
        span = FROM * seconds, TO * seconds
        transport.disturbance = Disturbance(core, *span, folder / "busy.log")
        for method in (pl.FedAvg(local), pl.Distreal(local=local)):
            name = "FedAvg" if isinstance(method, pl.FedAvg) else "DISTREAL"
            tasks = _run(method, seconds, seed, transport, folder / name.lower())
            delivered[name] = sum(task.outcome == "finished" for task in tasks)
            spent[name] = sum(task.macs for task in tasks) / (ROUNDS * calm[0].macs)
    return SlowedDevice(seconds, full_seconds, delivered, spent)


def _run(
    method: "AnyMethod", seconds: float, seed: int, transport: "SocketTransport", folder: Path
) -> "Sequence[TaskRecord]":
    from pliant.bench.local_devices import serve_rounds
    from pliant.engine.ledger import TaskRecord
    from pliant.engine.run_store import read_records
    from pliant.experiment.build import build_run_context

    experiment = _make_experiment(method, seconds, seed)
    context = build_run_context(experiment)
    # a round without an update would be repeated
    for _ in islice(serve_rounds(experiment, context, transport, folder), ROUNDS):
        pass
    transport.wait_for_disturber()
    return [record for record in read_records(folder) if isinstance(record, TaskRecord)]


def _make_experiment(method: "AnyMethod", seconds: float, seed: int) -> "Experiment":
    from pliant.experiment.config import DataConfig, Experiment, NetworkConfig

    return Experiment(
        method,
        pl.Fleet(size=1, round_seconds=seconds),
        NetworkConfig("femnist_cnn"),
        DataConfig("digits", proxy=8000 - IMAGES),
        rounds=ROUNDS,
        per_round=1,
        seed=seed,
        evaluation=pl.Evaluation(every=1000),
    )


def describe_slowed_device(device: SlowedDevice) -> str:
    """Return which updates were in time, and what DISTREAL spent less."""
    fedavg, distreal = device.delivered["FedAvg"], device.delivered["DISTREAL"]
    text = (
        f"A round lasts {device.round_seconds:.1f} s, of which the full network needs "
        f"{device.full_seconds:.1f} s if undisturbed. FedAvg delivered {fedavg} of {ROUNDS} "
        f"updates in time, DISTREAL {distreal} of {ROUNDS}"
    )
    if distreal > fedavg:
        text += (
            ": it measures its mini-batches and narrowed the network while the program ran, to "
            f"{device.spent['DISTREAL']:.0%} of the compute on average"
        )
    return f"{text}."
