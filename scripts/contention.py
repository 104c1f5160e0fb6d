"""Take the core of a device away in the middle of a round, and see whether it still delivers.

    python scripts/contention.py --trials 20 --out contention

Three device processes train the FEMNIST network on the embedded digits: device 0 alone on one core,
the others on the other one. In each round, when 30 % of its time are gone, another program takes
half of device 0's core, and leaves it when 90 % are gone. The time of a round is such that the full
network needs 80 % of it while nothing disturbs. With DISTREAL the device must change its rates
within two mini-batches and deliver before the deadline in 95 % of the trials; with FedAvg it must
miss it. The rounds are those of `pliant server`; letters go through the devices' own sockets, as
Flower's polls would only blur the times. Writes records, `contention.json` and a picture.
"""

import argparse
import json
import sys
import tempfile
import threading
import time
from multiprocessing.connection import Client
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from pliant.deploy.curve import curve_from
from pliant.deploy.host import Limits
from pliant.deploy.letters import Answer, Order, packed, read_answer
from pliant.deploy.post import Reply
from pliant.deploy.processes import Child, environment
from pliant.deploy.rounds import serve
from pliant.deploy.service import Service
from pliant.deploy.worker import Setup
from pliant.engine.job import World, example_of
from pliant.engine.ledger import TaskRecord, check
from pliant.engine.store import events
from pliant.experiment import Experiment, build
from pliant.nn.elastic import elastic
from pliant.value import decode, encode

CALM = 0.8  # of a round's time is what the full network needs
EPOCHS = 6  # so that a round lasts for some seconds
BATCH = 64
SEED = 18  # with which device 0 has 1,623 of 2,500 samples
FROM, TO = 0.3, 0.9  # of a round's time is the other program there
BUSY = "while True: pass"
METHODS = {
    "distreal": {"type": "distreal", "choice": "blocks"},
    "fedavg": {"type": "fedavg"},
}


class Sockets:
    """A link to workers on this machine; it lets another program disturb device 0."""

    def __init__(self, sockets: list[str], core: int, seconds: float, log: Path) -> None:
        self._sockets = sockets
        self._log = log
        self._core = core
        self._seconds = seconds
        self._found: list[Reply] = []
        self._other: threading.Thread | None = None
        self.greetings: dict[int, bytes] = {}
        self.disturbed: list[tuple[float, float]] = []

    def online(self) -> set[int]:
        return set(range(len(self._sockets)))

    def send(self, letters: dict[int, bytes], *, round: int, seconds: float) -> None:
        self.settle()
        self._found = []
        began = time.monotonic()
        for device, letter in letters.items():
            threading.Thread(target=self._asked, args=(device, letter), daemon=True).start()
        self._other = threading.Thread(target=self._disturb, args=(began,), daemon=True)
        self._other.start()

    def settle(self) -> None:
        """Wait until the other program has gone: it belongs to one round."""
        if self._other is not None:
            self._other.join()

    def replies(self) -> list[Reply]:
        found, self._found = self._found, []
        return found

    def ask(self, device: int, letter: bytes) -> bytes:
        with connected(self._sockets[device]) as link:
            link.send_bytes(letter)
            return link.recv_bytes()

    def _asked(self, device: int, letter: bytes) -> None:
        raw = self.ask(device, letter)
        self._found.append(Reply(device, raw))

    def _disturb(self, began: float) -> None:
        time.sleep(max(0.0, began + FROM * self._seconds - time.monotonic()))
        command = ["taskset", "-c", str(self._core), sys.executable, "-S", "-c", BUSY]
        other = Child(command, self._log, environment(self._log.parent))
        since = time.monotonic() - began
        time.sleep(max(0.0, began + TO * self._seconds - time.monotonic()))
        other.end()
        self.disturbed.append((since, time.monotonic() - began))


def connected(path: str) -> Any:
    """Wait for a worker that is starting."""
    end = time.monotonic() + 120
    while True:
        try:
            return Client(path, family="AF_UNIX")
        except OSError:
            if time.monotonic() > end:
                raise
            time.sleep(0.1)


def described(method: dict[str, Any], rounds: int, seconds: float) -> Experiment:
    """Describe the run: device 0 has more than half of the samples."""
    plain = {
        "method": method
        | {"local": {"batch": BATCH, "epochs": EPOCHS, "optimiser": {"type": "sgd", "lr": 0.05}}},
        "network": {"name": "femnist_cnn"},
        "data": {"name": "digits", "proxy": 5500, "partition": {"type": "unequal"}},
        "fleet": {"size": 3, "round_seconds": seconds},
        "rounds": rounds,
        "per_round": 3,
        "seed": SEED,
        "evaluation": {"every": 1000},
    }
    return decode(plain, Experiment)


def started(folder: Path, cores: list[int]) -> tuple[list[Child], list[str]]:
    """Start three workers, each on its core."""
    children, sockets = [], []
    private = tempfile.mkdtemp(prefix="pliant-")
    for number, core in enumerate(cores):
        socket = f"{private}/{number}"
        setup = Setup(number, str(folder / f"device{number}"), socket, Limits(), 3600.0)
        text = msgspec.json.encode(setup).decode()
        command = ["taskset", "-c", str(core), sys.executable, "-m", "pliant.deploy.worker", text]
        children.append(Child(command, folder / f"worker{number}.log", environment(folder)))
        sockets.append(socket)
    return children, sockets


def trial(folder: Path, name: str, trials: int, cores: list[int]) -> dict[str, Any]:
    """Run one method and return what became of device 0 in each round."""
    children, sockets = started(folder, cores)
    try:
        first = described(METHODS[name], trials, 10.0)
        net, data = build(first)
        hello = packed(Order("hello", encode(first), -1))
        link = Sockets(sockets, cores[0], 0.0, folder / "other.log")
        greeting: Answer = read_answer(link.ask(0, hello))[0]
        curve = curve_from(greeting.curve)
        assert curve is not None, greeting.reason
        batches = EPOCHS * -(-data.sizes()[0] // BATCH)
        seconds = round(batches * curve.at(1.0) / CALM, 3)
        experiment = described(METHODS[name], trials, seconds)
        for device in range(3):
            link.ask(device, packed(Order("hello", encode(experiment), -1)))
        link = Sockets(sockets, cores[0], seconds, folder / "other.log")
        world = World(elastic(net, example_of(data)), data, experiment.federated)
        run = folder / name
        service = Service(allowance=seconds, retries=trials)
        for _ in serve(experiment, world, link, run, service, sleep=lambda _: time.sleep(0.01)):
            pass
        link.settle()
        plan: Any = world.method.plan(world.net)
        records = list(events(run))
        check(records)
    finally:
        for child in children:
            child.end()
    tasks = [r for r in records if isinstance(r, TaskRecord) and r.device == 0][:trials]
    pairs = zip(tasks, link.disturbed[: len(tasks)], strict=True)
    rounds = [judged(task, disturbed, seconds) for task, disturbed in pairs]
    table = len(plan.rows.shares)
    return {"seconds": seconds, "batches": batches, "table": table, "trials": rounds}


def judged(task: TaskRecord, disturbed: tuple[float, float], seconds: float) -> dict[str, Any]:
    """Return how a trial went: delivered or not, and how soon the rates fell."""
    begun = [place for place, start in enumerate(task.starts) if start > disturbed[0]]
    calm = np.median(task.rows[: begun[0]]) if begun and begun[0] else 0
    fell = [place for place in begun if task.rows[place] < calm - 1]
    return {
        "end": task.end,
        "delivered": task.end == "finished",
        "used": (task.ends[-1] - task.starts[0]) / seconds if task.ends else None,
        "until_change": fell[0] - begun[0] if fell else None,  # whole mini-batches
        "disturbed": disturbed,
        "starts": task.starts,
        "rows": task.rows,
    }


def draw(path: Path, found: dict[str, Any]) -> None:
    """Draw all trials of both methods: rows over time, and mini-batches done over time."""
    from pliant.extras import need

    plot: Any = need("matplotlib.pyplot", "report")
    figure, (rows, done) = plot.subplots(1, 2, figsize=(10, 3.4), layout="constrained")
    for (name, told), colour in zip(found.items(), ("#1f5f8b", "#b3541e"), strict=True):
        kept = sum(trial["delivered"] for trial in told["trials"])
        for place, trial in enumerate(told["trials"]):
            look = {"color": colour, "linewidth": 1.8, "zorder": 3}
            if place != len(told["trials"]) // 2:
                look = {"color": colour, "linewidth": 0.6, "alpha": 0.3}
            else:
                look["label"] = f"{name}: {kept} of {len(told['trials'])} delivered"
            shares = [(row + 1) / told["table"] for row in trial["rows"]]
            rows.step(trial["starts"], shares, where="post", **look)
            done.plot(trial["starts"], range(len(trial["starts"])), **look)
    seconds, batches = told["seconds"], told["batches"]
    for axis in (rows, done):
        axis.axvspan(*told["trials"][0]["disturbed"], color="0.88", zorder=0)
        axis.axvline(seconds, color="#a01c1c", linestyle="--")
        axis.set_xlabel("seconds since the order (grey: another program on the core)")
        axis.set_xlim(0, seconds * 1.03)
    rows.set_ylim(0, 1.05)
    rows.set_title("row of the table (1: full network)", loc="left", fontsize=10)
    done.axhline(batches, color="0.5", linestyle=":")
    done.set_title(f"mini-batches done, of {batches}", loc="left", fontsize=10)
    done.legend(loc="upper left", frameon=False)
    figure.savefig(path)


def main() -> int:
    """Run both methods, print the timeline and say whether the claim holds."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--out", type=Path, default=Path("contention"))
    parser.add_argument("--cores", type=int, nargs=3, default=[0, 1, 1])
    given = parser.parse_args()
    found = {name: trial(given.out, name, given.trials, given.cores) for name in METHODS}
    (given.out / "contention.json").write_text(json.dumps(found, indent=1))
    draw(given.out / "contention.png", found)
    for name, told in found.items():
        sys.stdout.write(f"{name}: {told['batches']} mini-batches, {told['seconds']} s a round\n")
        for number, one in enumerate(told["trials"]):
            used = "-" if one["used"] is None else f"{one['used']:.2f}"
            sys.stdout.write(
                f"  trial {number:2}: {one['end']:9} used {used} of the time, "
                f"rates changed after {one['until_change']} disturbed mini-batches, "
                f"disturbed {one['disturbed'][0]:.2f}-{one['disturbed'][1]:.2f} s, "
                f"rows {one['rows'][0]} to {min(one['rows'], default=0)}\n"
            )
    delivered = [one["delivered"] for one in found["distreal"]["trials"]]
    soon = [one["until_change"] in (0, 1, 2) for one in found["distreal"]["trials"]]
    missed = [not one["delivered"] for one in found["fedavg"]["trials"]]
    sys.stdout.write(
        f"distreal delivered {sum(delivered)} of {len(delivered)}, changed its rates within two "
        f"mini-batches in {sum(soon)}; fedavg missed {sum(missed)} of {len(missed)}\n"
    )
    holds = sum(delivered) >= 0.95 * len(delivered) and sum(missed) >= 0.95 * len(missed)
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
