"""Take half of a device's core away in mid-round and check whether it still delivers in time.

    python scripts/contention.py --trials 20 --out contention

Three device processes train the FEMNIST network on digits in folders of their own: device 0 alone
on one core, the others on the other. In each round, another program takes half of device 0's core
from 30 % to 90 % of the round's time. The full network needs 85 % of that time when undisturbed:
the median of three rounds, measured again before every five trials per method, as the machine's
speed varies. With DISTREAL the device must change its rates within two mini-batches and deliver
before the deadline in 95 % of the trials; with FedAvg it must miss it. The rounds are those of
`pliant server`; messages go through the devices' own sockets, as Flower's polling would blur the
times. Writes records, `contention.json` and a plot.
"""

import argparse
import json
import statistics
import sys
import tempfile
import threading
import time
from multiprocessing.connection import Client
from pathlib import Path
from typing import Any

import numpy as np
from deploy_faults import write_data

from pliant.deploy.device.host import DeviceSetup, Limits
from pliant.deploy.messages import TrainRequest, encode_for_devices, encode_message
from pliant.deploy.server.replies import RawReply
from pliant.deploy.server.rounds import DeviceTransport
from pliant.deploy.server.serve import serve
from pliant.deploy.settings import ARRIVAL_HEADER, ServerSettings
from pliant.deploy.supervise.child_process import (
    ChildProcess,
    make_command,
    make_process_env,
    read_log_tail,
)
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
BUSY = "import time; print(time.monotonic(), flush=True)\nwhile True: pass"
METHODS = {
    "distreal": {"type": "distreal", "choice": "blocks"},
    "fedavg": {"type": "fedavg"},
}


class SocketTransport:
    """A transport to workers on this machine that runs another program on device 0's core."""

    def __init__(
        self, sockets: list[str], core: int, seconds: float, log: Path, *, is_undisturbed: bool
    ) -> None:
        self._sockets = sockets
        self._is_undisturbed = is_undisturbed
        self._log = log
        self._core = core
        self._seconds = seconds
        self._replies: list[RawReply] = []
        self._disturber: threading.Thread | None = None
        self.hello_replies: dict[int, bytes] = {}
        self.disturbed: list[tuple[float, float]] = []

    def find_online_devices(self) -> set[int]:
        return set(range(len(self._sockets)))

    def send(self, requests: dict[int, bytes], *, round: int, seconds: float) -> None:
        self.wait_for_disturber()
        self._replies = []
        start = time.monotonic()
        for device, raw in requests.items():
            threading.Thread(target=self._request, args=(device, raw), daemon=True).start()
        if not self._is_undisturbed:
            self._disturber = threading.Thread(target=self._disturb, args=(start,), daemon=True)
            self._disturber.start()

    def wait_for_disturber(self) -> None:
        """Wait until the other program has ended: it belongs to one round."""
        if self._disturber is not None:
            self._disturber.join()

    def poll_replies(self) -> list[RawReply]:
        replies, self._replies = self._replies, []
        return replies

    def count_carrier_bytes(self, size: int) -> int:
        return 0  # messages stay on this machine

    def call(self, device: int, request: bytes) -> bytes:
        with connect(self._sockets[device]) as connection:
            connection.send_bytes(ARRIVAL_HEADER.pack(time.monotonic()) + request)
            return connection.recv_bytes()

    def _request(self, device: int, request: bytes) -> None:
        raw = self.call(device, request)
        self._replies.append(RawReply(device, raw))  # the list may have been replaced meanwhile

    def _disturb(self, start: float) -> None:
        time.sleep(max(0.0, start + FROM * self._seconds - time.monotonic()))
        command = ["taskset", "-c", str(self._core), sys.executable, "-S", "-c", BUSY]
        other = ChildProcess(command, self._log, make_process_env(self._log.parent))
        time.sleep(max(0.0, start + TO * self._seconds - time.monotonic()))
        other.stop()
        since = float(read_log_tail(self._log, 1)) - start  # when it started to use the core
        self.disturbed.append((since, time.monotonic() - start))


def connect(path: str) -> Any:
    """Connect to a worker, waiting while it starts."""
    end = time.monotonic() + 120
    while True:
        try:
            return Client(path, family="AF_UNIX")
        except OSError:
            if time.monotonic() > end:
                raise
            time.sleep(0.1)


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


def start_workers(
    folder: Path, cores: list[int], limits: list[Limits]
) -> tuple[list[ChildProcess], list[str]]:
    """Start three workers, each on its core and with its own data."""
    children, sockets = [], []
    socket_folder = tempfile.mkdtemp(prefix="pliant-")
    env = make_process_env(folder)
    for number, core in enumerate(cores):
        socket = f"{socket_folder}/{number}"
        state = str(folder / f"device{number}")
        setup = DeviceSetup(number, state, limits[number], socket=socket, idle_seconds=3600.0)
        command = ["taskset", "-c", str(core), *make_command("pliant.deploy.device.worker", setup)]
        children.append(ChildProcess(command, folder / f"worker{number}.log", env))
        sockets.append(socket)
    return children, sockets


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
    """Run an experiment on three workers; return device 0's tasks."""
    children, sockets = start_workers(folder, cores, write_data(experiment, folder / "data"))
    seconds = experiment.fleet.round_seconds
    log = folder / "other.log"
    transport = SocketTransport(sockets, cores[0], seconds, log, is_undisturbed=is_undisturbed)
    try:
        hello = encode_message(TrainRequest("hello", encode_for_devices(experiment), -1))
        for device in range(3):  # they build the network, calibrate and declare their data
            transport.hello_replies[device] = transport.call(device, hello)
        context = build_server_context(experiment)
        run_folder = folder / name
        settings = ServerSettings(allowance=seconds, retries=experiment.rounds)
        devices = DeviceTransport(experiment, settings, transport, sleep=lambda _: time.sleep(0.01))
        for _ in serve(context, devices, run_folder):
            pass
        transport.wait_for_disturber()
    finally:
        for child in children:
            child.stop()
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
    """Plot all trials of both methods: rows over time, and mini-batches done over time."""
    from pliant.extras import require

    pyplot: Any = require("matplotlib.pyplot", "report")
    figure, (rows, done) = pyplot.subplots(1, 2, figsize=(10, 3.4), layout="constrained")
    for (name, result), colour in zip(results.items(), ("#1f5f8b", "#b3541e"), strict=True):
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
    """Run both methods and print the trials; return 0 if the claim holds."""
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
    delivered = [trial["delivered"] for trial in results["distreal"]["trials"]]
    soon = [trial["until_change"] in (0, 1, 2) for trial in results["distreal"]["trials"]]
    missed = [not trial["delivered"] for trial in results["fedavg"]["trials"]]
    sys.stdout.write(
        f"distreal delivered {sum(delivered)} of {len(delivered)}, changed its rates within two "
        f"mini-batches in {sum(soon)}; fedavg missed {sum(missed)} of {len(missed)}\n"
    )
    holds = sum(delivered) >= 0.95 * len(delivered) and sum(missed) >= 0.95 * len(missed)
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
