import json
import subprocess
import sys

import pytest
from tests.waiting import LIMIT

SCRIPT = """
import logging, sys
from pathlib import Path
from pliant.deploy import logs
logs.MAX_LOG_BYTES = 2000
file = Path(sys.argv[1]) if len(sys.argv) > 1 else None
logs.set_up_logging("info", "json", file)
log = logging.getLogger("pliant")
log.debug("hidden")
for number in range(60):
    log.info("device %d said \\"hello\\"\\nand left", number)
logging.getLogger("other.library").info("hidden too")
try:
    1 / 0
except ZeroDivisionError:
    log.exception("failed")
"""


def run(*arguments):
    command = [sys.executable, "-c", SCRIPT, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, check=True)


def test_every_line_is_json_with_time_and_level():
    lines = [json.loads(line) for line in run().stderr.splitlines()]
    assert len(lines) == 61
    assert {line["level"] for line in lines} == {"info", "error"}
    assert lines[3]["message"] == 'device 3 said "hello"\nand left'
    assert lines[0]["time"].endswith("Z")
    assert "ZeroDivisionError" in lines[-1]["error"]


def test_a_log_file_rotates_and_is_private(tmp_path):
    assert run(tmp_path / "logs" / "server.log").stderr == ""
    files = sorted((tmp_path / "logs").iterdir())
    assert [file.name for file in files] == ["server.log", *(f"server.log.{n}" for n in (1, 2, 3))]
    for file in files:
        assert file.stat().st_mode & 0o777 == 0o600
        assert file.stat().st_size <= 2000
    assert json.loads(files[0].read_text().splitlines()[-1])["message"] == "failed"


@pytest.mark.parametrize("name", ["server", "device"])
def test_the_options_are_those_of_the_command(name, capsys):
    from pliant import cli

    cli.main([name, "--help"])
    assert "--log-format" in capsys.readouterr().out
