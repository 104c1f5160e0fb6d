"""`pliant dash` on the command line: errors, and when a token is required."""

import os
import re
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request

import pytest
from tests.dashboard.written_runs import write_run
from tests.waiting import LIMIT

from pliant.cli import main

DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["none"], "none: expected a folder of runs"),
        ([".", "--port", "70000"], "Expected a port from 0 to 65535, got 70000"),
        ([".", "--port", "-1"], "Expected a port from 0 to 65535, got -1"),
        ([".", "--port", "web"], "--port"),
        ([".", "--host", "no.such.host.invalid"], "Expected an address of this machine"),
    ],
)
def test_wrong_input_is_a_one_line_error(words, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["dash", *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


def test_a_taken_port_is_an_error(tmp_path, capsys):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        assert main(["dash", str(tmp_path), "--port", port]) == 2
    assert f"Cannot listen on 127.0.0.1 port {port}" in capsys.readouterr().err


def get_status(address, **headers):
    try:
        with DIRECT.open(
            urllib.request.Request(address, headers=headers), timeout=LIMIT
        ) as response:
            return response.status
    except urllib.error.HTTPError as error:
        with error:
            return error.code


def test_an_address_other_than_loopback_requires_a_token(tmp_path):
    write_run(tmp_path / "one")
    # not the usual loopback address, yet unreachable from other machines
    words = ["dash", str(tmp_path), "--host", "127.0.0.2", "--port", "0"]
    environment = os.environ | {"PLIANT_TOKEN": "chosen-by-hand"}
    process = subprocess.Popen(
        [sys.executable, "-m", "pliant", *words], stdout=subprocess.PIPE, text=True, env=environment
    )
    try:
        line = process.stdout.readline().strip()
        address = re.fullmatch(r"(http://127\.0\.0\.2:\d+/)\?token=chosen-by-hand", line)
        assert address, line
        assert get_status(address[1]) == 403
        assert get_status(f"{address[1]}api/runs", authorization="Bearer chosen-by-hand") == 200
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(LIMIT)
        process.stdout.close()
