import re
import subprocess
import sys

import pytest

HEAVY = {"torch", "matplotlib", "duckdb", "flwr", "grpc", "ray", "pymoo", "starlette", "uvicorn"}


def imported(*arguments):
    """Run Python and return the top-level packages that it imported."""
    answer = subprocess.run(
        [sys.executable, "-X", "importtime", *arguments], capture_output=True, text=True, check=True
    )
    found = re.findall(r"^import time:.*\| +([\w.]+)$", answer.stderr, re.MULTILINE)
    return {name.partition(".")[0] for name in found}


def test_importing_pliant_imports_nothing_heavy():
    found = imported("-c", "import pliant")
    assert "pliant" in found
    assert not found & HEAVY


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], []])
def test_the_command_line_answers_without_torch(arguments):
    found = imported("-m", "pliant", *arguments)
    assert "cyclopts" in found
    assert not found & HEAVY
