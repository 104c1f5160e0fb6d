"""Kill devices and the server of a real federation, and spoil the wire between them.

    python scripts/deploy_faults.py devices --kills 50 --rounds 30
    python scripts/deploy_faults.py server --kills 20 --rounds 30
    python scripts/deploy_faults.py wire --rounds 10
    python scripts/deploy_faults.py hang --rounds 10
    python scripts/deploy_faults.py flood --rounds 10
    python scripts/deploy_faults.py all --rounds 6 --seconds 3

`devices`: SIGKILL to the worker, the SuperNode or all processes of a device at random moments; each
round must end by its deadline and five seconds. Before that it waits for devices that are away, but
not longer than the allowance and five seconds. `server`: SIGKILL to the run's process or to
SuperLink; the network must be that of the simulated run, which nobody disturbs. `wire`: device 0 is
behind a proxy that delays, resets, stops half-way or lets a byte a second through; others go on.
`hang`: in every other round a device's worker or SuperNode is stopped for as long as the round may
last. `flood`: in every other round eight threads throw megabytes at the server's port as fast as it
takes them. `all`: a little of each, one a round. In all of them every dispatched task must have one
end in the ledger.
"""

import argparse
import random
import sys
import tempfile
from collections import Counter
from pathlib import Path

from faults import Proxy, flood, hang, kill_devices, kill_server

from pliant.deploy.federation import Federation
from pliant.deploy.keys import make_keys
from pliant.deploy.remote import RemoteDevice
from pliant.deploy.service import Service
from pliant.engine.ledger import RoundRecord, TaskRecord, check
from pliant.engine.simulate import simulate
from pliant.engine.store import events
from pliant.experiment import Experiment, build
from pliant.value import decode

FAULTS = ("devices", "wire", "hang", "flood", "server")
MANNERS = ("plain", "delay", "reset", "half", "slow")
LATE = 5.0  # seconds after its deadline by which a round must have ended


def described(rounds: int, seconds: float, late: str) -> Experiment:
    """Describe a small run: three devices, four mini-batches each."""
    plain = {
        "method": {"type": "fedavg"},
        "fleet": {"size": 3, "round_seconds": seconds},
        "data": {"proxy": 7600},
        "rounds": rounds,
        "per_round": 3,
        "rules": {"late": late},
        "evaluation": {"every": 1000},
    }
    return decode(plain, Experiment)


def told(folder: Path) -> tuple[float, float]:
    """Check the ledger; return the longest wait for devices and the longest time they had then."""
    records = list(events(folder))
    rounds = check(records)
    ends = Counter(r.end.partition(":")[0] for r in records if isinstance(r, TaskRecord))
    clock, waits, times = 0.0, [], []
    for record in records:
        if isinstance(record, RoundRecord):
            assert record.asked is not None
            waits.append(record.asked - clock)
            times.append(record.seconds - record.asked)
            clock = record.seconds
    wait, time = max(waits[1:]), max(times)  # the first round waits until all have started
    sys.stdout.write(f"{rounds} rounds, ends {dict(ends)}, waited {wait:.1f} s at most for absent ")
    sys.stdout.write(f"devices and {time:.1f} s at most for answers\n")
    return wait, time


def strike(
    given: argparse.Namespace,
    federation: Federation,
    proxy: Proxy,
    luck: random.Random,
    number: int,
) -> Counter[str]:
    """Do behind a round what its number asks for; return what was hit, which may grow."""
    if given.fault == "all":
        kind = FAULTS[number % len(FAULTS)]
        proxy.manner = "half" if kind == "wire" else "plain"
        kills, pauses = 1, (0.0, given.seconds)
    else:
        kind, kills = given.fault, given.kills if number == 0 else 0
        proxy.manner = MANNERS[number % len(MANNERS)] if kind == "wire" else "plain"
        pauses = (8.0, 25.0) if kind == "server" else (2.0, 12.0)
    if kind == "devices":
        return kill_devices(federation, kills, luck, pauses)
    if kind == "server":
        return kill_server(federation, kills, luck, pauses)
    if kind == "wire":
        return Counter([proxy.manner])
    if given.fault != "all" and number % 2:
        return Counter()
    if kind == "hang":
        return Counter([hang(federation, luck, given.seconds + given.allowance)])
    return flood(given.port, given.seconds)


def main() -> int:
    """Run one kind of fault and say whether the promise holds."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("fault", choices=[*FAULTS, "all"])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--allowance", type=float, default=20.0)
    parser.add_argument("--port", type=int, default=18760)
    parser.add_argument("--out", type=Path, default=None)
    given = parser.parse_args()
    folder = given.out or Path(tempfile.mkdtemp(prefix="deploy_faults_")) / given.fault
    late = "discard" if given.fault == "server" else "partial"
    experiment = described(given.rounds, given.seconds, late)
    keys = folder.parent / f"{folder.name}-keys"
    if not keys.exists():
        make_keys(keys, devices=3)
    service = Service(allowance=given.allowance, patience=300.0, retries=1000)
    federation = Federation(experiment, folder, service=service, port=given.port, keys=keys)
    luck = random.Random(0)
    proxy = Proxy(given.port)
    if given.fault in ("wire", "all"):
        first = federation.devices[0]
        federation.devices[0] = RemoteDevice(
            0, f"127.0.0.1:{proxy.port}", folder / "devices" / "0", first.limits,
            ca=keys / "ca.crt", key=keys / "devices" / "0" / "key",
        )  # fmt: skip
    hits: list[Counter[str]] = []
    with federation:
        for record in federation.watch():
            sys.stdout.write(f"round {record.round}: {record.seconds:.1f} s {record.ends}\n")
            sys.stdout.flush()
            hits.append(strike(given, federation, proxy, luck, record.round))
    proxy.close()
    sys.stdout.write(f"faults {dict(sum(hits, Counter()))}\n")
    wait, time = told(folder)
    if given.fault == "server":
        net, data = build(experiment)
        calm = simulate(experiment.method, net, data, experiment.fleet, setting=experiment.setting)
        wanted = list(calm)[-1].digest
        is_same = record.digest == wanted
        sys.stdout.write(f"same network as undisturbed: {is_same}\n")
        return 0 if is_same else 1
    is_in_time = time <= given.seconds + given.allowance + LATE and wait <= given.allowance + LATE
    return 0 if is_in_time else 1


if __name__ == "__main__":
    sys.exit(main())
