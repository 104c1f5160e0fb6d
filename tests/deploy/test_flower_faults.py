"""A little of every fault that `scripts/deploy_faults.py` knows, one a round, on real processes."""

import socket
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "scripts" / "deploy_faults.py"


def test_every_round_ends_in_time_and_every_task_once_whatever_happens(tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, str(SCRIPT), "all", "--rounds", "6", "--seconds", "3"]
    command += ["--allowance", "10", "--port", str(port), "--out", str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=840, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    told = done.stdout.partition("faults ")[2]
    assert "worker" in told or "supernode" in told, told
    for fault in ("half", "415", "run"):  # cut in mid-upload, a flood, the server's process killed
        assert fault in told, told
