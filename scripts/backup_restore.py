"""Run packaging/ as an operator does, lose the server's machine, and restore it from a backup.

    python scripts/backup_restore.py --rounds 6

The folders are those of packaging/compose.yaml, and every process is started by the command of the
systemd units: `pliant server --config pliant.toml`, `pliant device --config pliant.toml`, with TLS,
enrolled keys and Flower. After two rounds the run and the keys are copied while the server works,
as docs/operations.md says. Then the server is killed with SIGKILL and its folder deleted. The
backup is put in a new folder, and the same command resumes the run; devices reconnect on their own.
The network at the end must be that of an undisturbed simulation, bit for bit.
"""

import argparse
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar
from urllib.error import URLError
from urllib.request import urlopen

import numpy as np
import psutil

from pliant.engine.ledger import RoundRecord, verify_records
from pliant.engine.run_store import read_records
from pliant.engine.simulate import simulate
from pliant.experiment.build import build_experiment
from pliant.experiment.config import Experiment, load_experiment

OPTIONS = Path(__file__).parents[1] / "packaging" / "pliant.toml"
LIMIT_SECONDS = 900.0
NOT_NEEDED = ("flower", "logs", "presence.json", "*.lock", "lock", "*.pid")
DEVICES = 2
SPEC = """
rounds = {rounds}
per_round = 2

[method]
type = "fedavg"

[network]
input = [1, 28, 28]
classes = 10
mean = [0.1307]
std = [0.3081]

[fleet]
size = 2
round_seconds = 20.0

[rules]
late = "wait"

[evaluation]
every = 1000
statistics = {{ type = "running" }}

[data]  # of the simulation, whose parts the devices get
proxy = 7600
"""
T = TypeVar("T")


def start(folder: Path, *words: object) -> subprocess.Popen[bytes]:
    """Start a command of pliant in a folder; its log goes to a file there."""
    command = [sys.executable, "-m", "pliant", *map(str, words)]
    with open(folder / "console.log", "ab") as log:
        return subprocess.Popen(
            command, cwd=folder, stdin=subprocess.DEVNULL, stdout=log, stderr=log
        )


def call(folder: Path, *words: object) -> str:
    """Run a command of pliant in a folder and return what it prints."""
    command = [sys.executable, "-m", "pliant", *map(str, words)]
    return subprocess.run(
        command, cwd=folder, check=True, stdout=subprocess.PIPE, text=True, timeout=LIMIT_SECONDS
    ).stdout.strip()


def wait_for(condition: Callable[[], T | None]) -> T:
    """Return the first true value of a condition."""
    end = time.monotonic() + LIMIT_SECONDS
    while time.monotonic() < end:
        if found := condition():
            return found
        time.sleep(0.5)
    raise TimeoutError(f"waited for {LIMIT_SECONDS:g} s")


def get(port: int, path: str) -> str | None:
    """Return what the server answers, or None while it does not."""
    with suppress(URLError, OSError), urlopen(f"http://127.0.0.1:{port}{path}") as response:
        return str(response.read().decode())
    return None


def list_metrics(port: int) -> list[str]:
    """Return the lines of /metrics, without comments and the buckets of histograms."""
    lines = (get(port, "/metrics") or "").splitlines()
    return [line for line in lines if not line.startswith("#") and "_bucket" not in line]


def count_rounds(port: int) -> int:
    """Return the rounds that /metrics reports."""
    values = [line.split() for line in list_metrics(port)]
    return int(sum(float(value) for name, value in values if name == "pliant_rounds_total"))


def kill(process: subprocess.Popen[bytes]) -> int:
    """Kill a process and all that it has started; return how many."""
    tree = [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]
    for member in tree:
        with suppress(psutil.NoSuchProcess):
            member.kill()
    process.wait()
    psutil.wait_procs(tree)
    return len(tree)


def back_up(server: Path, backup: Path) -> None:
    """Copy a run that is being written, its records last, and the keys."""
    (backup / "run").mkdir(parents=True)
    shutil.copytree(server / "keys", backup / "keys")
    for name in ("pliant.toml", "experiment.toml"):
        shutil.copy2(server / name, backup)
    ignore = shutil.ignore_patterns(*NOT_NEEDED, "events.jsonl")
    with suppress(shutil.Error):  # a checkpoint that was removed meanwhile
        shutil.copytree(server / "run", backup / "run", ignore=ignore, dirs_exist_ok=True)
    shutil.copy2(server / "run" / "events.jsonl", backup / "run")


def write_folders(experiment: Experiment, folder: Path) -> None:
    """Write the folders that the compose file expects."""
    _, data = build_experiment(experiment)
    for device, share in enumerate(data.shares):
        path = folder / f"device{device}"
        (path / "data").mkdir(parents=True)
        pixels, labels = data.train.pixels[share].numpy(), data.train.labels[share].numpy()
        np.savez(path / "data" / "digits.npz", images=pixels, labels=labels)
        shutil.copy(OPTIONS, path)
    shutil.copy(OPTIONS, folder / "server")


def run(folder: Path, port: int) -> RoundRecord:
    """Run the federation with its loss and restoration; return the record of the last round."""
    server, backup, restored = (folder / name for name in ("server", "backup", "restored"))
    monitor = port + 1
    local = ("--host", "127.0.0.1", "--port", port, "--metrics-port", monitor)
    command = ("server", "--config", "pliant.toml", *local)
    call(server, "deploy", "init", "keys")
    processes = [start(server, *command)]
    try:
        wait_for(lambda: get(monitor, "/readyz"))
        for device in range(DEVICES):
            path, address = folder / f"device{device}", f"127.0.0.1:{port}"
            token = call(server, "server", "devices", "token", "--keys", "keys")
            call(path, "device", "enrol", "--server", address, "--keys", "key", "--token", token)
            call(server, "server", "devices", "approve", device, "--keys", "keys")
            options = ("--server", address, "--test-share", 0)
            processes.append(start(path, "device", "--config", "pliant.toml", *options))
        wait_for(lambda: count_rounds(monitor) >= 2)
        print_line(call(server, "server", "status", "run"))
        print_line("\n".join(list_metrics(monitor)))
        back_up(server, backup)
        print_line(f"killed {kill(processes[0])} processes of the server")
        shutil.rmtree(server)
        shutil.copytree(backup, restored)
        processes[0] = start(restored, *command)
        rounds = wait_for(lambda: count_rounds(monitor))
        print_line(f"the restored server has {rounds} rounds, and is at work again")
        if processes[0].wait(LIMIT_SECONDS):
            raise RuntimeError((restored / "console.log").read_text())
    finally:
        for process in processes:
            if process.poll() is None:
                kill(process)
    print_line(f"{verify_records(read_records(restored / 'run'))} rounds, ledger verified")
    *_, record = read_records(restored / "run")
    assert isinstance(record, RoundRecord)
    return record


def print_line(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def main() -> int:
    """Run and compare with the simulation."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--port", type=int, default=18890)
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="backup_restore_"))
    spec = folder / "server" / "experiment.toml"
    spec.parent.mkdir()
    spec.write_text(SPEC.format(rounds=options.rounds))
    experiment = load_experiment(spec)
    write_folders(experiment, folder)
    record = run(folder, options.port)
    net, data = build_experiment(experiment)
    *_, undisturbed = simulate(
        experiment.method, net, data, experiment.fleet, settings=experiment.settings
    )
    is_same = record.digest == undisturbed.digest
    print_line(f"{record.digest}: same network as undisturbed: {is_same}")
    shutil.rmtree(folder)
    return 0 if is_same else 1


if __name__ == "__main__":
    sys.exit(main())
