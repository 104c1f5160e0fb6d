"""Kill a worker process in each of some runs: every run must end, with the result of all others.

    python scripts/kill_workers.py --runs 20

A worker is killed (SIGKILL) at a moment that changes from run to run: while it starts, or while it
trains in some round.
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
HANG = 180.0  # seconds


def run(spec: Path, folder: Path, workers: str, kill: random.Random | None) -> tuple[str, int]:
    """Run once, perhaps with a kill; return the final SHA-256 and how many workers were killed."""
    command = [sys.executable, "-m", "pliant", "run", str(spec), workers, "--out", str(folder)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        try:
            kills = _kill_one(process, folder, kill) if kill is not None else 0
            code = process.wait(HANG)
        except BaseException:
            process.kill()
            raise
    if code:
        raise SystemExit(f"a run ended with exit code {code}")
    return digest(folder), kills


def digest(folder: Path) -> str:
    """Return the SHA-256 of the network that a run came to."""
    last = (folder / "events.jsonl").read_bytes().splitlines()[-1]
    found: str = json.loads(last)["digest"]
    return found


def _kill_one(process: "subprocess.Popen[bytes]", folder: Path, draws: random.Random) -> int:
    """Kill a worker when so many records are written; 0 is while it starts."""
    lines = draws.choice((0, 1, 5, 10, 15, 20))
    delay = draws.random() * (2.0 if lines == 0 else 0.02)
    end = time.monotonic() + HANG
    while process.poll() is None and time.monotonic() < end:
        workers = _workers(process.pid)
        if workers and _records(folder) >= lines:
            time.sleep(delay)
            with suppress(psutil.NoSuchProcess):
                os.kill(draws.choice(workers).pid, signal.SIGKILL)
                return 1
        time.sleep(0.001)
    return 0


def _workers(parent: int) -> Sequence[psutil.Process]:
    found = []
    with suppress(psutil.NoSuchProcess):
        for child in psutil.Process(parent).children():
            with suppress(psutil.NoSuchProcess):
                if "spawn_main" in " ".join(child.cmdline()):
                    found.append(child)
    return found


def _records(folder: Path) -> int:
    path = folder / "events.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else -1


def main() -> int:
    """Read the command line and compare the runs."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="pliant-kill-") as name:
        spec = Path(name, "small.toml")
        spec.write_text(SPEC)
        wanted, _ = run(spec, Path(name, "calm"), 'workers={type="inline"}', None)
        killed = 0
        for number in range(asked.runs):
            draws = random.Random(f"{asked.seed} {number}")
            folder, workers = Path(name, str(number)), 'workers={type="processes",count=2}'
            found, kills = run(spec, folder, workers, draws)
            killed += kills
            if found != wanted:
                raise SystemExit(f"run {number}: {found} in the place of {wanted}")
    sys.stdout.write(
        f"{killed} workers killed in {asked.runs} runs: one SHA-256, {wanted}, as inline\n"
    )
    return 0 if killed == asked.runs else 1


if __name__ == "__main__":
    sys.exit(main())
