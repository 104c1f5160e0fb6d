"""Take the core of a device away in the middle of a round, and see whether it still delivers.

    python scripts/contention.py --trials 20 --out contention

Three device processes train the FEMNIST network on the embedded digits: device 0 alone on one core,
the others on the other one. In each round, when 30 % of its time are gone, another program takes
half of device 0's core, and leaves it when 90 % are gone. The time of a round is such that the full
network needs 85 % of it while nothing disturbs: the median of three rounds, timed anew before every
five trials of each method, as machines are not always as fast. With DISTREAL the device must change
its rates within two mini-batches and deliver before the deadline in 95 % of the trials; with FedAvg
it must miss it. The rounds are those of `pliant server`; letters go through the devices' own
sockets, as Flower's polls would only blur the times. Writes records, `contention.json`, a picture.
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

import msgspec
import numpy as np

from pliant.deploy.host import Limits
from pliant.deploy.letters import Order, packed
from pliant.deploy.post import Reply
from pliant.deploy.processes import Child, environment
from pliant.deploy.rounds import serve
from pliant.deploy.service import Service
from pliant.deploy.worker import CAME, Setup
from pliant.engine.job import World, example_of
from pliant.engine.ledger import TaskRecord, check
from pliant.engine.store import events
from pliant.experiment import Experiment, build
from pliant.nn.elastic import elastic
from pliant.value import decode, encode

CALM = 0.85  # of a round's time is what the full network needs
BLOCK = 5  # trials of each method between two looks at how fast the machine is
EPOCHS = 6  # so that a round lasts for some seconds
BATCH = 64
SEED = 18  # with which device 0 has 1,623 of 2,500 samples
FROM, TO = 0.3, 0.9  # of a round's time is the other program there
BUSY = "import time; print(time.monotonic(), flush=True)\nwhile True: pass"
METHODS = {
    "distreal": {"type": "distreal", "choice": "blocks"},
    "fedavg": {"type": "fedavg"},
}


class Sockets:
    """A link to workers on this machine; it lets another program disturb device 0."""

    def __init__(
        self, sockets: list[str], core: int, seconds: float, log: Path, *, is_calm: bool
    ) -> None:
        self._sockets = sockets
        self._is_calm = is_calm
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
        if not self._is_calm:
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
            link.send_bytes(CAME.pack(time.monotonic()) + letter)
            return link.recv_bytes()

    def _asked(self, device: int, letter: bytes) -> None:
        raw = self.ask(device, letter)
        self._found.append(Reply(device, raw))

    def _disturb(self, began: float) -> None:
        time.sleep(max(0.0, began + FROM * self._seconds - time.monotonic()))
        command = ["taskset", "-c", str(self._core), sys.executable, "-S", "-c", BUSY]
        other = Child(command, self._log, environment(self._log.parent))
        time.sleep(max(0.0, began + TO * self._seconds - time.monotonic()))
        other.end()
        since = float(other.last_words(1)) - began  # when it had begun to take the core
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


def calm(folder: Path, cores: list[int]) -> float:
    """Return how long device 0 needs for a round with the full network when nothing disturbs it."""
    tasks, _, _ = ran(folder, "calm", described(METHODS["fedavg"], 4, 60.0), cores, is_calm=True)
    return statistics.median(task.ends[-1] - task.starts[0] for task in tasks[1:])


def trial(folder: Path, name: str, trials: int, cores: list[int], seconds: float) -> dict[str, Any]:
    """Run one method and return what became of device 0 in each round."""
    experiment = described(METHODS[name], trials, seconds)
    tasks, link, world = ran(folder, name, experiment, cores)
    pairs = zip(tasks[:trials], link.disturbed, strict=False)
    rounds = [judged(task, disturbed, seconds) for task, disturbed in pairs]
    plan: Any = world.method.plan(world.net)
    batches = EPOCHS * -(-world.data.sizes()[0] // BATCH)
    return {"batches": batches, "table": len(plan.rows.shares), "trials": rounds}


def ran(
    folder: Path, name: str, experiment: Experiment, cores: list[int], *, is_calm: bool = False
) -> tuple[list[TaskRecord], Sockets, World]:
    """Run an experiment on three workers; return device 0's tasks."""
    children, sockets = started(folder, cores)
    seconds = experiment.fleet.round_seconds
    link = Sockets(sockets, cores[0], seconds, folder / "other.log", is_calm=is_calm)
    try:
        for device in range(3):  # they build and calibrate
            link.ask(device, packed(Order("hello", encode(experiment), -1)))
        net, data = build(experiment)
        world = World(elastic(net, example_of(data)), data, experiment.federated)
        run, service = folder / name, Service(allowance=seconds, retries=experiment.rounds)
        for _ in serve(experiment, world, link, run, service, sleep=lambda _: time.sleep(0.01)):
            pass
        link.settle()
    finally:
        for child in children:
            child.end()
    records = list(events(run))
    check(records)
    return [r for r in records if isinstance(r, TaskRecord) and r.device == 0], link, world


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
        "seconds": seconds,
        "disturbed": [time / seconds for time in disturbed],  # and what follows: parts of the round
        "starts": [start / seconds for start in task.starts],
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
    batches = told["batches"]
    for axis in (rows, done):
        axis.axvspan(*told["trials"][0]["disturbed"], color="0.88", zorder=0)
        axis.axvline(1.0, color="#a01c1c", linestyle="--")
        axis.set_xlabel("part of the round's time (grey: another program on the core)")
        axis.set_xlim(0, 1.03)
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
    found: dict[str, Any] = {}
    for begun in range(0, given.trials, BLOCK):
        folder, count = given.out / str(begun), min(BLOCK, given.trials - begun)
        seconds = round(calm(folder, given.cores) / CALM, 3)
        for name in METHODS:
            told = trial(folder, name, count, given.cores, seconds)
            found.setdefault(name, {**told, "trials": []})["trials"] += told["trials"]
    (given.out / "contention.json").write_text(json.dumps(found, indent=1))
    draw(given.out / "contention.png", found)
    for name, told in found.items():
        sys.stdout.write(f"{name}: {told['batches']} mini-batches\n")
        for number, one in enumerate(told["trials"]):
            used = "-" if one["used"] is None else f"{one['used']:.2f}"
            sys.stdout.write(
                f"  trial {number:2}: {one['end']:9} used {used} of {one['seconds']:.2f} s, "
                f"rates changed after {one['until_change']} disturbed mini-batches, "
                f"disturbed from {one['disturbed'][0]:.2f} to {one['disturbed'][1]:.2f}, "
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
