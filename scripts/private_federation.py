"""Train the digits on three devices whose folders the server cannot read, and in a simulation.

    sudo python scripts/private_federation.py

Every device and the server run as a user of their own (ids from 61000 on), so this must run as
root, with a Python that other users can execute. Each device's images are in a folder of mode 700.
The devices enrol their keys with tokens, and connect by TLS. At the end, the accuracy must be that
of the simulation, within one point, although devices keep a fifth of their images for tests, and no
file of the server's may hold a private key of a device.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from pliant.engine.ledger import RoundRecord
from pliant.engine.run_store import read_records
from pliant.engine.simulate import simulate
from pliant.experiment.build import build_experiment
from pliant.experiment.config import Experiment, load_experiment

FIRST_USER = 61000  # of the server; devices have the next ones
DEVICES = 3
TOLERANCE = 0.01
LIMIT_SECONDS = 1800.0
SPEC = """\
rounds = {rounds}
per_round = 3

[method]
type = "fedavg"
local = {{ batch = 32 }}

[network]
name = "digits_cnn"
input = [1, 28, 28]
classes = 10
mean = [0.1307]
std = [0.3081]

[server]
holdout = "holdout"

[fleet]
size = 3
round_seconds = 60.0

[rules]
late = "wait"

[evaluation]
every = {rounds}

[data]  # of the simulation
proxy = 2000
"""


def write_data(experiment: Experiment, folder: Path) -> None:
    """Write each device's images to a private folder, and the test images to the server's."""
    _, data = build_experiment(experiment)
    for device, share in enumerate(data.shares):
        path = folder / f"device{device}"
        (path / "data").mkdir(parents=True)
        pixels, labels = data.train.pixels[share].numpy(), data.train.labels[share].numpy()
        np.savez(path / "data" / "digits.npz", images=pixels, labels=labels)
        give_away(path, FIRST_USER + 1 + device)
    path = folder / "server"
    (path / "holdout").mkdir(parents=True)
    pixels, labels = data.test.pixels.numpy(), data.test.labels.numpy()
    np.savez(path / "holdout" / "digits.npz", images=pixels, labels=labels)


def give_away(folder: Path, user: int) -> None:
    """Make a folder private to a user."""
    for path in (folder, *folder.rglob("*")):
        os.chown(path, user, user)
    folder.chmod(0o700)


def make_runner(folder: Path, user: int) -> Callable[..., subprocess.Popen[str]]:
    """Return a function that runs pliant as a user, in the user's folder."""

    def run(*words: object) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "pliant", *map(str, words)],
            cwd=folder,
            env={"HOME": str(folder), "PATH": os.environ["PATH"], "OMP_NUM_THREADS": "1"},
            user=user,
            group=user,
            extra_groups=[],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    return run


def finish(process: subprocess.Popen[str]) -> str:
    """Wait for a command and return what it prints."""
    out, error = process.communicate(timeout=LIMIT_SECONDS)
    if process.returncode:
        raise RuntimeError(error)
    return out.strip()


def check_unreadable(folder: Path) -> None:
    """Raise an error if the server's user can list a device's folder."""
    command = ["ls", *(str(folder / f"device{device}") for device in range(DEVICES))]
    result = subprocess.run(
        command,
        user=FIRST_USER,
        group=FIRST_USER,
        extra_groups=[],
        capture_output=True,
        check=False,
    )
    if result.stdout or result.stderr.count(b"Permission denied") != DEVICES:
        raise RuntimeError(f"the server's user reads {result.stdout!r}")


def deploy(folder: Path, port: int) -> RoundRecord:
    """Enrol three devices with a server, and return the record of the last round."""
    serve = make_runner(folder / "server", FIRST_USER)
    users = [
        make_runner(folder / f"device{device}", FIRST_USER + 1 + device)
        for device in range(DEVICES)
    ]
    address, patience = f"127.0.0.1:{port}", LIMIT_SECONDS
    finish(serve("deploy", "init", "keys"))
    with ExitStack() as stack:
        options = ("--keys", "keys", "--port", port, "--out", "run", "--patience", patience)
        server = serve("server", "spec.toml", *options)
        stack.callback(server.terminate)
        wait_for_log(server, folder / "server" / "run" / "flower" / "logs" / "superlink.log")
        for device, run in enumerate(users):
            token = finish(serve("server", "devices", "token", "--keys", "keys"))
            finish(run("device", "enrol", "--server", address, "--token", token, "--keys", "key"))
            finish(serve("server", "devices", "approve", device, "--keys", "keys"))
        print_line(finish(serve("server", "devices", "list", "--keys", "keys")))
        check_unreadable(folder)
        for run in users:
            device_process = run(
                "device", "--server", address, "--keys", "key", "--data", "data", "--state", "state"
            )
            stack.callback(device_process.terminate)
        print_line(finish(server))
    *_, record = read_records(folder / "server" / "run")
    assert isinstance(record, RoundRecord)
    return record


def wait_for_log(server: subprocess.Popen[str], log: Path) -> None:
    """Wait until SuperLink listens."""
    end = time.monotonic() + LIMIT_SECONDS
    while not (log.exists() and "Uvicorn running" in log.read_text()):
        if server.poll() is not None or time.monotonic() > end:
            raise RuntimeError(f"the server did not start: {server.communicate()}")
        time.sleep(0.2)


def find_private_keys(folder: Path) -> list[str]:
    """Return the files below a folder with private keys."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return sorted(path.name for path in files if b"PRIVATE KEY" in path.read_bytes())


def print_line(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def main() -> int:
    """Run both and compare them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--port", type=int, default=18790)
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args()
    if os.geteuid() != 0:
        print_line("expected to run as root, to start processes of other users")
        return 2
    folder = options.out or Path(tempfile.mkdtemp(prefix="private_federation_"))
    (folder / "server").mkdir(parents=True)
    folder.chmod(0o755)
    spec = folder / "server" / "spec.toml"
    spec.write_text(SPEC.format(rounds=options.rounds))
    experiment = load_experiment(spec)
    write_data(experiment, folder)
    give_away(folder / "server", FIRST_USER)
    record = deploy(folder, options.port)
    net, data = build_experiment(experiment)
    settings, fleet = experiment.settings, experiment.fleet
    *_, simulated = simulate(experiment.method, net, data, fleet, settings=settings)
    assert record.score is not None
    assert simulated.score is not None
    found, expected = record.score.accuracy, simulated.score.accuracy
    print_line(f"accuracy {found:.4f} on devices, {expected:.4f} in the simulation")
    keys = find_private_keys(folder / "server")
    print_line(f"private keys in the server's folder: {', '.join(keys)}")
    is_good = abs(found - expected) <= TOLERANCE and keys == ["ca.key", "server.key"]
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
