"""Measure what the wire adds to an exchange of split learning: one device process, TLS and keys.

    python scripts/split_wire.py [SPEC.toml] --rounds 12

The same experiment, with one client, runs in this process first and over loopback afterwards;
without a file `splitfed` on 640 of the digits, in mini-batches of 32. Wall
time is that of rounds only; CPU time is that of both processes, checkpoints included. The first
round (start-up) and the last one (evaluation) do not count.
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import psutil
import torch

from pliant.deploy.host import Limits
from pliant.deploy.keys import make_keys
from pliant.deploy.service import Service
from pliant.deploy.split_node import SplitRemoteDevice
from pliant.deploy.split_serve import SplitService
from pliant.engine.split import simulate_split
from pliant.experiment import Experiment, build, load_experiment

PLAIN = """
[network]
name = "digits_cnn"

[data]
proxy = 7360

[method]
type = "splitfed"
cut = "features.2"
local = { batch = 32, optimiser = { type = "adam", lr = 1e-3 } }
"""
PATIENT = Service(allowance=300.0, patience=300.0)


def spent(pid: int) -> float:
    """Return the CPU seconds of a process so far."""
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


def here(experiment: Experiment) -> tuple[list[tuple[float, float]], str | None]:
    """Return CPU and wall seconds of an exchange in each round, in this process."""
    net, data = build(experiment)
    found, before = [], (time.process_time(), time.perf_counter())
    method, fleet, setting = experiment.method, experiment.fleet, experiment.setting
    for record in simulate_split(method, net, data, fleet, setting=setting):
        now = time.process_time(), time.perf_counter()
        found.append(tuple((b - a) / record.steps for a, b in zip(before, now, strict=True)))
        before = now
    return found[1:-1], record.digest


def there(experiment: Experiment, folder: Path) -> tuple[list[tuple[float, float]], str | None]:
    """Return the same with the client in a process of its own."""
    keys = folder / "keys"
    make_keys(keys, devices=1)
    service = SplitService(experiment, PATIENT, address="127.0.0.1:0", keys=keys)
    device = SplitRemoteDevice(
        0,
        f"127.0.0.1:{service.hub.port}",
        folder / "device",
        Limits(),
        ca=keys / "ca.crt",
        key=keys / "devices" / "0" / "key",
    )
    found, cpu, wall = [], 0.0, 0.0
    with device:
        for record in service.rounds(folder / "run"):
            now = time.process_time() + spent(device.pids["worker"])
            found.append(((now - cpu) / record.steps, (record.seconds - wall) / record.steps))
            cpu, wall = now, record.seconds
    return found[1:-1], record.digest


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("spec", type=Path, nargs="?")
    parser.add_argument("--rounds", type=int, default=12)
    given = parser.parse_args()
    torch.set_num_threads(1)
    told = ["fleet.size=1", "per_round=1", f"rounds={given.rounds}"]
    told += ["evaluation.every=100000", "checkpoint_every=100000"]
    with tempfile.TemporaryDirectory() as folder:
        plain = Path(folder) / "splitfed.toml"
        plain.write_text(PLAIN)
        experiment = load_experiment(given.spec or plain, told)
        near, mine = here(experiment)
        far, theirs = there(experiment, Path(folder))
    for name, pairs in (("in process", near), ("over the wire", far)):
        cpu, wall = (1000 * median(column) for column in zip(*pairs, strict=True))
        sys.stdout.write(f"{name:>14}: {wall:8.2f} ms  {1000 / wall:7.1f}/s  CPU {cpu:8.2f} ms\n")
    sys.stdout.write(f"same weights: {mine == theirs}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
