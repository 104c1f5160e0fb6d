"""Every fault of `scripts/deploy_faults.py`, one or two per round, on real processes."""

import socket
import subprocess
import sys
from pathlib import Path

import pytest
from tests.waiting import LIMIT

# test_federation.py kills Flower's processes in the fast tests
pytestmark = [pytest.mark.waits, pytest.mark.slow]

SCRIPT = Path(__file__).parents[3] / "scripts" / "deploy_faults.py"


def test_rounds_end_in_time_and_tasks_once_whatever_happens(tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, str(SCRIPT), "all", "--devices", "2", "--rounds", "4"]
    command += ["--seconds", "3", "--allowance", "20", "--tolerance", "60"]
    command += ["--port", str(port), "--out", str(tmp_path / "run")]
    result = subprocess.run(command, capture_output=True, text=True, timeout=2 * LIMIT, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    faults = result.stdout.partition("faults ")[2]
    assert "killed worker" in faults or "killed supernode" in faults, faults
    # stopped in mid-upload, hanging, flooded by a sender without a key, server process killed
    for fault in ("half", "suspended", "401", "killed run"):
        assert fault in faults, faults
