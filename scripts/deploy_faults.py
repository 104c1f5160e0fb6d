"""Kill devices and the server of a real federation, and disturb the network between them.

    python scripts/deploy_faults.py devices --kills 50 --rounds 30
    python scripts/deploy_faults.py server --kills 20 --rounds 30
    python scripts/deploy_faults.py wire --rounds 10
    python scripts/deploy_faults.py hang --rounds 10
    python scripts/deploy_faults.py flood --rounds 10
    python scripts/deploy_faults.py all --rounds 4 --seconds 3

`devices`: SIGKILL to the worker, the SuperNode or all processes of a device at random times; each
round must end within five seconds of its deadline, and wait for offline devices no longer than the
allowance plus five seconds. `server`: SIGKILL to the run's process or to SuperLink; the network
must equal that of the undisturbed simulated run. `wire`: device 0 is behind a proxy that delays,
resets, stops halfway or forwards one byte per second. `hang`: in every other round, a device's
worker or SuperNode is suspended until the round has ended without it. `flood`: in every other
round, eight threads send megabytes of valid messages to the server's port, without a key. `all`:
one or two of these per round. In each case, every dispatched task must have exactly one outcome in
the ledger. Each device has its images in a folder of its own, and the server has none. On a busy
machine, allow more than five seconds with `--tolerance`.
"""

import argparse
import random
import sys
import tempfile
from collections import Counter
from pathlib import Path

import numpy as np
from faults import Proxy, flood, kill_devices, kill_server, resume, suspend

from pliant.deploy.device.host import Limits
from pliant.deploy.security.certificates import make_keys
from pliant.deploy.settings import ServerSettings
from pliant.deploy.supervise.child_process import run_supervisor
from pliant.deploy.supervise.federation import Federation
from pliant.deploy.supervise.node import DeviceSupervisor
from pliant.engine.ledger import RoundRecord, TaskRecord, verify_records
from pliant.engine.run_store import read_records
from pliant.engine.simulate import simulate
from pliant.experiment.build import build_experiment
from pliant.experiment.config import Experiment
from pliant.value import decode

FAULTS = ("devices", "wire", "hang", "flood", "server")
TURNS = (("devices", "flood"), ("wire", "server"), ("hang",))  # of `all`, one after each round
MODES = ("plain", "delay", "reset", "half", "slow")


def make_experiment(devices: int, rounds: int, seconds: float, late: str) -> Experiment:
    """Make a small run of four mini-batches per device."""
    config = {
        "method": {"type": "fedavg"},
        "network": {"input": [1, 28, 28], "classes": 10, "mean": [0.1307], "std": [0.3081]},
        "fleet": {"size": devices, "round_seconds": seconds},
        "data": {"proxy": 7600},  # of the simulation, whose parts the devices get
        "rounds": rounds,
        "per_round": devices,
        "rules": {"late": late},
        "evaluation": {"every": 1000, "statistics": {"type": "running"}},
    }
    return decode(config, Experiment)


def write_data(experiment: Experiment, folder: Path) -> list[Limits]:
    """Write each device's part of the simulated data; return the limits that name its folder."""
    _, data = build_experiment(experiment)
    limits = []
    for device, share in enumerate(data.shares):
        path = folder / str(device)
        path.mkdir(parents=True, exist_ok=True)
        pixels, labels = data.train.pixels[share].numpy(), data.train.labels[share].numpy()
        np.savez(path / "digits.npz", images=pixels, labels=labels)
        limits.append(Limits(data=str(path.resolve()), test_share=0.0))
    return limits


def check_ledger(folder: Path) -> tuple[float, float]:
    """Check the ledger; return the longest wait for devices and the longest wait for replies."""
    records = list(read_records(folder))
    rounds = verify_records(records)
    outcomes = Counter(r.outcome.partition(":")[0] for r in records if isinstance(r, TaskRecord))
    clock, waits, times = 0.0, [], []
    for record in records:
        if isinstance(record, RoundRecord):
            assert record.dispatched_at is not None
            waits.append(record.dispatched_at - clock)
            times.append(record.seconds - record.dispatched_at)
            clock = record.seconds
    wait, time = max(waits[1:]), max(times)  # the first round waits until all have started
    sys.stdout.write(
        f"{rounds} rounds, outcomes {dict(outcomes)}, waited at most {wait:.1f} s for "
    )
    sys.stdout.write(f"offline devices and {time:.1f} s for replies\n")
    return wait, time


def inject_faults(
    options: argparse.Namespace,
    federation: Federation,
    proxy: Proxy,
    rng: random.Random,
    suspended: list[int],
    number: int,
) -> list[Counter[str]]:
    """Inject the faults that follow a round; return what they hit, which may grow."""
    resume(suspended)
    if options.fault == "all":
        faults: tuple[str, ...] = TURNS[number % len(TURNS)]
        proxy.mode = "half" if "wire" in faults else "plain"
        kills, pauses = 1, (0.0, 0.0 if "server" in faults else options.seconds)
    else:
        faults, kills = (options.fault,), options.kills if number == 0 else 0
        proxy.mode = MODES[number % len(MODES)] if "wire" in faults else "plain"
        pauses = (8.0, 25.0) if "server" in faults else (2.0, 12.0)
    hits = []
    for fault in faults:
        if fault == "devices":
            hits.append(kill_devices(federation, kills, rng, pauses))
        elif fault == "server":
            hits.append(kill_server(federation, kills, rng, pauses))
        elif fault == "wire":
            hits.append(Counter([proxy.mode]))
        elif options.fault == "all" or number % 2 == 0:
            hits.append(
                suspend(federation, rng, suspended)
                if fault == "hang"
                else flood(options.port, 1.0 if options.fault == "all" else options.seconds)
            )
    return hits


def main() -> int:
    """Run one kind of fault; return 0 if all requirements hold."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("fault", choices=[*FAULTS, "all"])
    parser.add_argument("--devices", type=int, default=3)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--allowance", type=float, default=20.0)
    parser.add_argument("--tolerance", type=float, default=5.0)
    parser.add_argument("--port", type=int, default=18760)
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args()
    folder = options.out or Path(tempfile.mkdtemp(prefix="deploy_faults_")) / options.fault
    late = "discard" if options.fault == "server" else "partial"
    experiment = make_experiment(options.devices, options.rounds, options.seconds, late)
    keys = folder.parent / f"{folder.name}-keys"
    if not keys.exists():
        make_keys(keys)
    settings = ServerSettings(allowance=options.allowance, patience=300.0, retries=1000)
    federation = Federation(experiment, folder, settings=settings, port=options.port, keys=keys)
    rng = random.Random(0)
    proxy = Proxy(options.port)
    for device, limits in enumerate(write_data(experiment, folder / "data")):
        is_behind_proxy = device == 0 and options.fault in ("wire", "all")
        port = proxy.port if is_behind_proxy else options.port
        state = folder / "devices" / str(device)
        federation.devices[device] = DeviceSupervisor(
            "federated", device, f"127.0.0.1:{port}", state, limits,
            ca=keys / "ca.crt", key=state / "keys" / "key",
        )  # fmt: skip
    hits: dict[int, list[Counter[str]]] = {}  # by round
    suspended: list[int] = []
    with run_supervisor(federation):
        for record in federation.watch():
            sys.stdout.write(f"round {record.round}: {record.seconds:.1f} s {record.outcomes}\n")
            sys.stdout.flush()
            if record.round not in hits:  # a killed server may run a round again
                hits[record.round] = inject_faults(
                    options, federation, proxy, rng, suspended, record.round
                )
    proxy.close()
    total = sum((counts for found in hits.values() for counts in found), Counter[str]())
    sys.stdout.write(f"faults {dict(total)}\n")
    wait, time = check_ledger(folder)
    if options.fault == "server":
        net, data = build_experiment(experiment)
        undisturbed = simulate(
            experiment.method, net, data, experiment.fleet, settings=experiment.settings
        )
        is_same = record.digest == list(undisturbed)[-1].digest
        sys.stdout.write(f"same network as undisturbed: {is_same}\n")
        return 0 if is_same else 1
    max_wait = options.allowance + options.tolerance
    return 0 if time <= options.seconds + max_wait and wait <= max_wait else 1


if __name__ == "__main__":
    sys.exit(main())
