"""A short version of `scripts/load_devices.py`: light devices with keys on a real server."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tests.waiting import LIMIT

pytestmark = [pytest.mark.waits, pytest.mark.slow]

SCRIPT = Path(__file__).parents[3] / "scripts" / "load_devices.py"


def test_thirty_light_devices_enrol_connect_and_train_two_rounds():
    options = "--devices 30 --rounds 2 --per-round 10 --hidden 20 --pause 0"
    command = [sys.executable, str(SCRIPT), *options.split()]
    output = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, check=True)
    result = json.loads(output.stdout.splitlines()[-1])
    assert result["outcomes"] == {"finished": 20}
    assert (result["devices"], result["rounds"]) == (30, 2)
    assert not result["imports_torch"]
    assert result["threads"]["run"] < 32
