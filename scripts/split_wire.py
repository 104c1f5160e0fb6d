"""Measure what the network adds to an exchange of split learning: one device process, TLS and keys.

    python scripts/split_wire.py [SPEC.toml] --rounds 12

The same experiment, with one client, runs in this process first and over loopback afterwards;
without a file, `splitfed` on 640 of the digits in mini-batches of 32. Wall time covers rounds only;
CPU time covers both processes, including checkpoints. The first round (start-up) and the last one
(evaluation) do not count.
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import psutil
import torch

from pliant.deploy.device.host import Limits
from pliant.deploy.grpc.server_main import SplitServerRun
from pliant.deploy.security.certificates import make_keys
from pliant.deploy.security.enrolment import enrol_local_device
from pliant.deploy.settings import ServerSettings
from pliant.deploy.supervise.child_process import run_supervisor
from pliant.deploy.supervise.node import DeviceSupervisor
from pliant.engine.split_loop import simulate_split
from pliant.experiment.build import build_experiment
from pliant.experiment.config import Experiment, load_experiment

DEFAULT_SPEC = """
[network]
name = "digits_cnn"

[data]
proxy = 7360

[rules]
late = "wait"

[method]
type = "splitfed"
cut = "features.2"
local = { batch = 32, optimiser = { type = "adam", lr = 1e-3 } }
"""
SETTINGS = ServerSettings(allowance=300.0, patience=300.0)
Timings = list[tuple[float, float]]  # CPU and wall seconds of an exchange, by round


def read_cpu_seconds(pid: int) -> float:
    """Return the CPU seconds of a process so far."""
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


def time_in_process(experiment: Experiment) -> tuple[Timings, str | None]:
    """Time the exchanges in this process; return the digest of the weights, too."""
    net, data = build_experiment(experiment)
    timings, before = [], (time.process_time(), time.perf_counter())
    method, fleet, settings = experiment.method, experiment.fleet, experiment.settings
    for record in simulate_split(method, net, data, fleet, settings=settings):
        now = time.process_time(), time.perf_counter()
        timings.append(tuple((b - a) / record.steps for a, b in zip(before, now, strict=True)))
        before = now
    return timings[1:-1], record.digest


def time_over_network(experiment: Experiment, folder: Path) -> tuple[Timings, str | None]:
    """Time the exchanges with the client in a process of its own."""
    keys = folder / "keys"
    make_keys(keys)
    enrol_local_device(keys, 0, folder / "device" / "keys")
    server_run = SplitServerRun(experiment, SETTINGS, address="127.0.0.1:0", keys=keys)
    device = DeviceSupervisor(
        "split",
        0,
        f"127.0.0.1:{server_run.grpc_server.port}",
        folder / "device",
        Limits(),
        ca=keys / "ca.crt",
        key=folder / "device" / "keys" / "key",
    )
    timings, cpu, wall = [], 0.0, 0.0
    with run_supervisor(device):
        for record in server_run.run_rounds(folder / "run"):
            now = time.process_time() + read_cpu_seconds(device.pids["worker"])
            timings.append(((now - cpu) / record.steps, (record.seconds - wall) / record.steps))
            cpu, wall = now, record.seconds
    return timings[1:-1], record.digest


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("spec", type=Path, nargs="?")
    parser.add_argument("--rounds", type=int, default=12)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    overrides = ["fleet.size=1", "per_round=1", f"rounds={arguments.rounds}"]
    overrides += ["evaluation.every=100000", "checkpoint_every=100000"]
    with tempfile.TemporaryDirectory() as folder:
        default_spec = Path(folder) / "splitfed.toml"
        default_spec.write_text(DEFAULT_SPEC)
        experiment = load_experiment(arguments.spec or default_spec, overrides)
        local_timings, local_digest = time_in_process(experiment)
        network_timings, network_digest = time_over_network(experiment, Path(folder))
    for name, timings in (("in process", local_timings), ("over the wire", network_timings)):
        cpu, wall = (1000 * median(column) for column in zip(*timings, strict=True))
        sys.stdout.write(f"{name:>14}: {wall:8.2f} ms  {1000 / wall:7.1f}/s  CPU {cpu:8.2f} ms\n")
    sys.stdout.write(f"same weights: {local_digest == network_digest}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
