"""Run `pliant` in a process that suspends itself before some rounds.

A test then meets the run at these rounds, however fast or slow the machine is:
`python -m tests.suspended 2,5 run small.toml`.
"""

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
from tests.waiting import wait_until

from pliant.cli import main
from pliant.workers import pool


def start_suspended(rounds, *words, **options):
    """Start a run that suspends itself before these rounds, counted from 0."""
    command = [sys.executable, "-m", "tests.suspended", ",".join(map(str, rounds))]
    root = Path(__file__).parents[1]
    return subprocess.Popen([*command, *map(str, words)], cwd=root, text=True, **options)


def wait_until_suspended(process):
    def is_suspended():
        assert process.poll() is None, "the run ended instead"
        return psutil.Process(process.pid).status() == psutil.STATUS_STOPPED

    wait_until(is_suspended, "the run to suspend itself")


def suspend_before(rounds):
    stream_jobs, count = pool.Pool.stream, iter(range(sys.maxsize))

    def stream(self, *arguments, **options):
        if next(count) in rounds:
            os.kill(os.getpid(), signal.SIGSTOP)
        return stream_jobs(self, *arguments, **options)

    pool.Pool.stream = stream


if __name__ == "__main__":
    suspend_before({int(number) for number in sys.argv[1].split(",")})
    sys.exit(main(sys.argv[2:]))
