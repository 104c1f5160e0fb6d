"""Three devices whose folders the server's user cannot read reach the simulation's accuracy."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.deploy.supervise.test_federation import find_free_port
from tests.waiting import LIMIT

SCRIPT = Path(__file__).parents[3] / "scripts" / "private_federation.py"
USER = 61000


def can_run_as_others():
    if os.name == "nt" or os.geteuid() != 0:
        return False
    command = [sys.executable, "-c", "import pliant"]
    try:
        return not subprocess.run(command, user=USER, group=USER, extra_groups=[]).returncode
    except OSError:
        return False


@pytest.mark.slow
def test_a_federation_of_users_who_cannot_read_each_other(tmp_path):
    if not can_run_as_others():
        pytest.skip("needs root, and a Python that other users can execute")
    for folder in (tmp_path, *tmp_path.parents[:2]):
        folder.chmod(0o755)  # the private folders are below
    command = [sys.executable, str(SCRIPT), "--rounds", "2", "--port", str(find_free_port())]
    result = subprocess.run(
        [*command, "--out", str(tmp_path / "federation")],
        capture_output=True, text=True, timeout=3 * LIMIT, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.splitlines()[-1].endswith("server's folder: ca.key, server.key")
