"""Measure what a transport adds to a federated round, and the memory of an idle device.

    python scripts/round_overhead.py grpc --rounds 100
    python scripts/round_overhead.py flower --rounds 20

A server and three devices on this machine, with TLS and keys, train FedAvg on a few of the digits.
The overhead is the mean time of a round less the longest training of its devices: what remains is
selecting, sending, validating, merging, writing records and checkpoints. The first round, for which
everything starts, does not count. With `--idle`, the devices then wait until their workers have
ended, two minutes after the last request; memory is PSS, which counts shared pages once, and RSS.
Each device is a `pliant device`, its supervisor included.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import mean

import psutil

from pliant.deploy.security.certificates import make_keys
from pliant.deploy.security.enrolment import enrol_local_device
from pliant.deploy.settings import ServerSettings, TransportName
from pliant.deploy.supervise.child_process import run_supervisor
from pliant.deploy.supervise.federation import open_run, select_server_kind
from pliant.deploy.supervise.server import ServerSupervisor
from pliant.engine.ledger import TaskRecord
from pliant.engine.run_store import read_records
from pliant.experiment.config import Experiment
from pliant.value import decode

DEVICES = 3
IDLE_SECONDS = 150.0  # a worker ends after 120
MEGABYTE = 1e6


def make_experiment(rounds: int) -> Experiment:
    """Make a run of short rounds."""
    config = {
        "method": {"type": "fedavg", "local": {"batch": 32}},
        "fleet": {"size": DEVICES, "round_seconds": 30.0},
        "data": {"proxy": 7700},
        "rounds": rounds,
        "per_round": DEVICES,
        "evaluation": {"every": 100000, "statistics": {"type": "running"}},
    }
    return decode(config, Experiment)


@contextmanager
def run_device(server: str, keys: Path, state: Path) -> Iterator[int]:
    """Run a device until the end of the context; yield its process id."""
    command = [sys.executable, "-m", "pliant", "device", "--server", server]
    command += ["--keys", str(keys), "--state", str(state)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        try:
            yield process.pid
        finally:
            process.terminate()


def measure_memory(pid: int) -> tuple[float, float]:
    """Return the megabytes of a device's processes: PSS and RSS."""
    parent = psutil.Process(pid)
    memory = [p.memory_full_info() for p in (parent, *parent.children(recursive=True))]
    return sum(m.pss for m in memory) / MEGABYTE, sum(m.rss for m in memory) / MEGABYTE


def find_training_seconds(folder: Path) -> list[float]:
    """Return the longest training of each round."""
    longest: dict[int, float] = {}
    for record in read_records(folder):
        if isinstance(record, TaskRecord):
            longest[record.round] = max(longest.get(record.round, 0.0), record.seconds)
    return [longest[number] for number in sorted(longest)]


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("transport", choices=["grpc", "flower"])
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--port", type=int, default=18780)
    parser.add_argument("--idle", action="store_true")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="round_overhead_"))
    transport: TransportName = options.transport
    experiment, keys = make_experiment(options.rounds), folder / "keys"
    make_keys(keys)
    kind, settings = select_server_kind(experiment, transport), ServerSettings(transport=transport)
    server = ServerSupervisor(kind, folder / "run", settings, port=options.port, keys=keys)
    open_run(folder / "run", experiment)
    with ExitStack() as stack:
        pids = []
        for number in range(DEVICES):
            enrol_local_device(keys, number, folder / str(number))
            device = run_device(server.address, folder / str(number), folder / f"state{number}")
            pids.append(stack.enter_context(device))
        with run_supervisor(server):
            times = [time.monotonic() for _ in server.watch()]  # of records, as they are seen
        training = mean(find_training_seconds(folder / "run")[1:])
        length = (times[-1] - times[0]) / (len(times) - 1)
        sys.stdout.write(
            f"{transport}: {1000 * (length - training):.0f} ms a round beyond its "
            f"{1000 * training:.0f} ms of training (mean of {len(times) - 1})\n"
        )
        if options.idle:
            time.sleep(IDLE_SECONDS)
            for pss, rss in map(measure_memory, pids):
                sys.stdout.write(f"idle device: {pss:.0f} MB PSS, {rss:.0f} MB RSS\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
