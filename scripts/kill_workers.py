"""Kill a worker process in each of several runs: all must finish with the same result.

    python scripts/kill_workers.py --runs 20

A worker is killed (SIGKILL) at a time that varies between runs: while it starts, or while it trains
in some round.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import psutil

SPEC = """
rounds = 6
per_round = 4

[method]
type = "fedavg"
local = { batch = 10, epochs = 2 }

[fleet]
size = 100

[network]
name = "digits_cnn"

[evaluation]
every = 6
"""
TIMEOUT = 180.0  # seconds


def run(spec: Path, folder: Path, workers: str, rng: random.Random | None) -> tuple[str, int]:
    """Run once, with a kill if `rng` is given; return the final SHA-256 and the number of kills."""
    command = [sys.executable, "-m", "pliant", "run", str(spec), workers, "--out", str(folder)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        try:
            kills = _kill_worker(process, folder, rng) if rng is not None else 0
            code = process.wait(TIMEOUT)
        except BaseException:
            process.kill()
            raise
    if code:
        raise SystemExit(f"expected a run to end with exit code 0, got {code}")
    return read_digest(folder), kills


def read_digest(folder: Path) -> str:
    """Return the SHA-256 of the final network of a run."""
    last = (folder / "events.jsonl").read_bytes().splitlines()[-1]
    digest: str = json.loads(last)["digest"]
    return digest


def _kill_worker(process: "subprocess.Popen[bytes]", folder: Path, rng: random.Random) -> int:
    """Kill a worker after a random number of records; 0 means while it starts."""
    lines = rng.choice((0, 1, 5, 10, 15, 20))
    delay = rng.random() * (2.0 if lines == 0 else 0.02)
    deadline = time.monotonic() + TIMEOUT
    while process.poll() is None and time.monotonic() < deadline:
        workers = _find_workers(process.pid)
        if workers and _count_records(folder) >= lines:
            time.sleep(delay)
            with suppress(psutil.NoSuchProcess):
                os.kill(rng.choice(workers).pid, signal.SIGKILL)
                return 1
        time.sleep(0.001)
    return 0


def _find_workers(parent: int) -> Sequence[psutil.Process]:
    workers = []
    with suppress(psutil.NoSuchProcess):
        for child in psutil.Process(parent).children():
            with suppress(psutil.NoSuchProcess):
                if "spawn_main" in " ".join(child.cmdline()):
                    workers.append(child)
    return workers


def _count_records(folder: Path) -> int:
    path = folder / "events.jsonl"
    return path.read_bytes().count(b"\n") - 1 if path.exists() else -1  # without the header


def main() -> int:
    """Read the command line and compare the runs."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="pliant-kill-") as name:
        spec = Path(name, "small.toml")
        spec.write_text(SPEC)
        expected, _ = run(spec, Path(name, "undisturbed"), 'workers={type="inline"}', None)
        killed = 0
        for number in range(options.runs):
            rng = random.Random(f"{options.seed} {number}")
            folder, workers = Path(name, str(number)), 'workers={type="processes",count=2}'
            digest, kills = run(spec, folder, workers, rng)
            killed += kills
            if digest != expected:
                raise SystemExit(f"run {number}: expected {expected}, got {digest}")
    sys.stdout.write(
        f"{killed} workers killed in {options.runs} runs: one SHA-256, {expected}, as inline\n"
    )
    return 0 if killed == options.runs else 1


if __name__ == "__main__":
    sys.exit(main())
