"""Take half of a device's core away in mid-round and check whether it still delivers in time.

    python scripts/contention.py --trials 20 --out contention

Three device processes train the FEMNIST network on digits in folders of their own: device 0 alone
on one core, the others on the other. In each round, another program takes half of device 0's core
from 30 % to 90 % of the round's time. The full network needs 85 % of that time when undisturbed:
the median of three rounds, measured again before every five trials per method, as the machine's
speed varies. With DISTREAL the device must change its rates within two mini-batches and deliver
before the deadline in 95 % of the trials; with progressive training, which trains the full network
here, it must make fewer steps and deliver; with FedAvg it must miss the deadline. The rounds are
those of `pliant server`; messages go through the devices' own sockets, as Flower's polling would
blur the times. Writes records, `contention.json` and a plot.
"""

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

import numpy as np
from deploy_faults import write_data

from pliant.bench.local_devices import Disturbance, SocketTransport, open_devices, serve_rounds
from pliant.engine.ledger import TaskRecord, verify_records
from pliant.engine.run_store import read_records
from pliant.engine.worker_context import WorkerContext
from pliant.experiment.build import build_server_context
from pliant.experiment.config import Experiment
from pliant.value import decode

FULL_SHARE = 0.85  # of a round's time that the full network needs when undisturbed
BLOCK = 5  # trials of each method between two measurements of the machine's speed
EPOCHS = 6  # so that a round takes a few seconds
BATCH = 64
SEED = 18  # gives device 0 1,623 of 2,500 samples
FROM, TO = 0.3, 0.9  # when the other program runs, as shares of the round's time
METHODS = {
    "distreal": {"type": "distreal", "choice": "blocks"},
    "progressive": {"type": "progressive", "stages": [{}]},  # in its last stage
    "fedavg": {"type": "fedavg"},
}
COLOURS = ("#1f5f8b", "#3c7a3c", "#b3541e")


def make_experiment(method: dict[str, Any], rounds: int, seconds: float) -> Experiment:
    """Make a run in which device 0 has more than half of the samples."""
    config = {
        "method": method
        | {"local": {"batch": BATCH, "epochs": EPOCHS, "optimiser": {"type": "sgd", "lr": 0.05}}},
        "network": {"name": "femnist_cnn", "input": [1, 28, 28], "classes": 10},
        "data": {"name": "digits", "proxy": 5500, "partition": {"type": "unequal"}},
        "fleet": {"size": 3, "round_seconds": seconds},
        "rounds": rounds,
        "per_round": 3,
        "seed": SEED,
        "evaluation": {"every": 1000, "statistics": {"type": "running"}},
    }
    return decode(config, Experiment)


def measure_full_round(folder: Path, cores: list[int]) -> float:
    """Return how long device 0 needs for an undisturbed round with the full network."""
    experiment = make_experiment(METHODS["fedavg"], 4, 60.0)
    tasks, _, _ = run_experiment(folder, "calm", experiment, cores, is_undisturbed=True)
    return statistics.median(task.ends[-1] - task.starts[0] for task in tasks[1:])


def run_trials(
    folder: Path, name: str, trials: int, cores: list[int], seconds: float
) -> dict[str, Any]:
    """Run one method and return how device 0 did in each round."""
    experiment = make_experiment(METHODS[name], trials, seconds)
    tasks, transport, context = run_experiment(folder, name, experiment, cores)
    pairs = zip(tasks[:trials], transport.disturbed, strict=False)
    rounds = [summarise_trial(task, disturbed, seconds) for task, disturbed in pairs]
    policy: Any = context.budget_policy
    batches = EPOCHS * -(-context.data.count_samples(0) // BATCH)
    return {"batches": batches, "table": len(policy.rows.shares), "trials": rounds}


def run_experiment(
    folder: Path,
    name: str,
    experiment: Experiment,
    cores: list[int],
    *,
    is_undisturbed: bool = False,
) -> tuple[list[TaskRecord], SocketTransport, WorkerContext]:
    """Run an experiment on three device processes; return device 0's tasks."""
    seconds, run_folder = experiment.fleet.round_seconds, folder / name
    limits, context = write_data(experiment, folder / "data"), build_server_context(experiment)
    with open_devices(folder, cores, limits) as transport:
        if not is_undisturbed:
            span = FROM * seconds, TO * seconds
            transport.disturbance = Disturbance(cores[0], *span, folder / "other.log")
        for _ in serve_rounds(experiment, context, transport, run_folder):
            pass
    records = list(read_records(run_folder))
    verify_records(records)
    tasks = [r for r in records if isinstance(r, TaskRecord) and r.device == 0]
    return tasks, transport, context


def summarise_trial(
    task: TaskRecord, disturbed: tuple[float, float], seconds: float
) -> dict[str, Any]:
    """Return whether a trial delivered, and how soon the rates fell."""
    after = [step for step, start in enumerate(task.starts) if start > disturbed[0]]
    row_before = np.median(task.rows[: after[0]]) if after and after[0] else 0
    fallen = [step for step in after if task.rows[step] < row_before - 1]
    return {
        "end": task.outcome,
        "delivered": task.outcome == "finished",
        "used": (task.ends[-1] - task.starts[0]) / seconds if task.ends else None,
        "until_change": fallen[0] - after[0] if fallen else None,  # mini-batches
        "seconds": seconds,
        "disturbed": [
            time / seconds for time in disturbed
        ],  # this and the rest: shares of the round
        "starts": [start / seconds for start in task.starts],
        "rows": task.rows,
    }


def plot_trials(path: Path, results: dict[str, Any]) -> None:
    """Plot all trials of all methods: rows over time, and mini-batches done over time."""
    from pliant.extras import require

    pyplot: Any = require("matplotlib.pyplot", "report")
    figure, (rows, done) = pyplot.subplots(1, 2, figsize=(10, 3.4), layout="constrained")
    for (name, result), colour in zip(results.items(), COLOURS, strict=True):
        trials = result["trials"]
        delivered = sum(trial["delivered"] for trial in trials)
        for number, trial in enumerate(trials):
            style = {"color": colour, "linewidth": 1.8, "zorder": 3}
            if number != len(trials) // 2:
                style = {"color": colour, "linewidth": 0.6, "alpha": 0.3}
            else:
                style["label"] = f"{name}: {delivered} of {len(trials)} delivered"
            shares = [(row + 1) / result["table"] for row in trial["rows"]]
            rows.step(trial["starts"], shares, where="post", **style)
            done.plot(trial["starts"], range(len(trial["starts"])), **style)
    batches = result["batches"]
    for axis in (rows, done):
        axis.axvspan(*trials[0]["disturbed"], color="0.88", zorder=0)
        axis.axvline(1.0, color="#a01c1c", linestyle="--")
        axis.set_xlabel("share of the round's time (grey: another program on the core)")
        axis.set_xlim(0, 1.03)
    rows.set_ylim(0, 1.05)
    rows.set_title("row of the table (1: full network)", loc="left", fontsize=10)
    done.axhline(batches, color="0.5", linestyle=":")
    done.set_title(f"mini-batches done, of {batches}", loc="left", fontsize=10)
    done.legend(loc="upper left", frameon=False)
    figure.savefig(path)


def main() -> int:
    """Run all methods and print the trials; return 0 if the claim holds."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--out", type=Path, default=Path("contention"))
    parser.add_argument("--cores", type=int, nargs=3, default=[0, 1, 1])
    options = parser.parse_args()
    results: dict[str, Any] = {}
    for first in range(0, options.trials, BLOCK):
        folder, count = options.out / str(first), min(BLOCK, options.trials - first)
        seconds = round(measure_full_round(folder, options.cores) / FULL_SHARE, 3)
        for name in METHODS:
            result = run_trials(folder, name, count, options.cores, seconds)
            results.setdefault(name, {**result, "trials": []})["trials"] += result["trials"]
    (options.out / "contention.json").write_text(json.dumps(results, indent=1))
    plot_trials(options.out / "contention.png", results)
    for name, result in results.items():
        sys.stdout.write(f"{name}: {result['batches']} mini-batches\n")
        for number, trial in enumerate(result["trials"]):
            used = "-" if trial["used"] is None else f"{trial['used']:.2f}"
            sys.stdout.write(
                f"  trial {number:2}: {trial['end']:9} used {used} of {trial['seconds']:.2f} s, "
                f"rates changed after {trial['until_change']} disturbed mini-batches, "
                f"disturbed from {trial['disturbed'][0]:.2f} to {trial['disturbed'][1]:.2f}, "
                f"rows {trial['rows'][0]} to {min(trial['rows'], default=0)}\n"
            )
    delivered = {
        name: [trial["delivered"] for trial in result["trials"]] for name, result in results.items()
    }
    soon = [trial["until_change"] in (0, 1, 2) for trial in results["distreal"]["trials"]]
    for name, trials in delivered.items():
        sys.stdout.write(f"{name} delivered {sum(trials)} of {len(trials)}\n")
    sys.stdout.write(f"distreal changed its rates within two mini-batches in {sum(soon)}\n")
    holds = all(
        sum(trials) <= 0.05 * len(trials) if name == "fedavg" else sum(trials) >= 0.95 * len(trials)
        for name, trials in delivered.items()
    )
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
