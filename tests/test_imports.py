import re
import subprocess
import sys

import pytest

HEAVY = {"torch", "matplotlib", "duckdb", "flwr", "grpc", "ray", "pymoo", "starlette", "uvicorn"}


def list_imports(*arguments):
    """Run Python and return the top-level packages that it imported."""
    process = subprocess.run(
        [sys.executable, "-X", "importtime", *arguments], capture_output=True, text=True, check=True
    )
    names = re.findall(r"^import time:.*\| +([\w.]+)$", process.stderr, re.MULTILINE)
    return {name.partition(".")[0] for name in names}


def test_importing_pliant_imports_nothing_heavy():
    packages = list_imports("-c", "import pliant")
    assert "pliant" in packages
    assert not packages & HEAVY


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], []])
def test_the_command_line_responds_without_torch(arguments):
    packages = list_imports("-m", "pliant", *arguments)
    assert "cyclopts" in packages
    assert not packages & HEAVY


def test_the_dashboard_needs_no_torch():
    packages = list_imports("-c", "import pliant.dashboard.server")
    assert "starlette" in packages
    assert "torch" not in packages
