"""Every fault of `scripts/deploy_faults.py`, one per round, on real processes."""

import socket
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[3] / "scripts" / "deploy_faults.py"


def test_rounds_end_in_time_and_tasks_once_whatever_happens(tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, str(SCRIPT), "all", "--rounds", "6", "--seconds", "3"]
    command += ["--allowance", "10", "--port", str(port), "--out", str(tmp_path / "run")]
    result = subprocess.run(command, capture_output=True, text=True, timeout=840, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    faults = result.stdout.partition("faults ")[2]
    assert "worker" in faults or "supernode" in faults, faults
    for fault in ("half", "415", "run"):  # stopped in mid-upload, flooded, server process killed
        assert fault in faults, faults
