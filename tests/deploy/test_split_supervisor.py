"""Two servers at one folder: the second is refused in one line, and the first is untouched."""

import logging
import os
import socket
import subprocess
import sys
from types import SimpleNamespace

import pytest

from pliant.deploy import split_server
from pliant.deploy.service import Service
from pliant.deploy.split_echo import Echo
from pliant.deploy.split_server import SplitServer


class Quiet:
    """A process of a run that does nothing."""

    is_alive, process = True, SimpleNamespace(pid=0)

    def __init__(self, command, log, env):
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_bytes(b"")

    def end(self):
        pass


@pytest.fixture(autouse=True)
def _no_process(monkeypatch):
    monkeypatch.setattr(split_server, "Child", Quiet)


@pytest.fixture
def ports():
    with socket.socket() as one, socket.socket() as two:
        for probe in (one, two):
            probe.bind(("127.0.0.1", 0))
        found = [probe.getsockname()[1] for probe in (one, two)]
    return found


def contents(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def told(folder):
    found = f"{folder}: expected no other process at this run, found process {os.getpid()}; "
    return f"{found}wait for its end or stop it"


def test_a_second_server_is_refused_before_it_writes(tmp_path, ports):
    run = tmp_path / "run"
    early = SplitServer(run, Service(patience=7.0), port=ports[1])
    assert not run.exists()
    with SplitServer(run, Service(), port=ports[0]), socket.socket() as listening:
        listening.bind(("127.0.0.1", ports[0]))
        listening.listen()  # as the run's process does
        before = contents(run)
        for port in ports:  # the folder is told of before the port
            with pytest.raises(BlockingIOError) as refused:
                SplitServer(run, Service(patience=7.0), port=port)
            assert str(refused.value) == told(run)
        with pytest.raises(BlockingIOError) as refused, early:
            pass
        assert str(refused.value) == told(run)
        assert contents(run) == before
    with SplitServer(run, Service(patience=7.0), port=ports[1]):  # the folder is free again
        assert contents(run) != before


def test_a_server_that_was_killed_leaves_its_folder_free(tmp_path, ports):
    program = (
        "import os, sys; from pathlib import Path; from pliant.engine.lock import Lock\n"
        "lock = Lock(Path(sys.argv[1]), 'server.lock'); os._exit(9)"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=False, timeout=60)
    assert (tmp_path / "server.lock").read_text() != str(os.getpid())
    with SplitServer(tmp_path, Service(), port=ports[0]):
        assert (tmp_path / "server.lock").read_text() == str(os.getpid())


def test_a_port_that_is_taken_leaves_no_folder(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(ValueError, match="Cannot listen at"):
            SplitServer(tmp_path / "run", Service(), port=taken.getsockname()[1])
    assert not (tmp_path / "run").exists()


def test_what_the_runs_process_says_is_said_again_line_by_line(tmp_path, caplog):
    path = tmp_path / "log"
    path.write_text("INFO pliant: of a run before\n")
    echo = Echo(path)
    with open(path, "a") as file, caplog.at_level(logging.INFO, "pliant"):
        file.write("INFO pliant: device 1 has come in\nTraceback: of torch\nWARNING pliant: dev")
        file.flush()
        echo.say()
        assert caplog.messages == ["device 1 has come in"]
        file.write("ice 2 is odd\n")
        file.flush()
        echo.say()
        echo.say()
    assert [(record.levelname, record.message) for record in caplog.records] == [
        ("INFO", "device 1 has come in"),
        ("WARNING", "device 2 is odd"),
    ]


def test_a_server_says_what_its_process_says(tmp_path, ports, caplog):
    with SplitServer(tmp_path, Service(), port=ports[0]) as server:
        server._follower = SimpleNamespace(rounds=lambda: [1], is_done=lambda: False)
        (tmp_path / "logs" / "server.log").write_text("INFO pliant: device 0 has come in\n")
        with caplog.at_level(logging.INFO, "pliant"):
            assert next(server.watch()) == 1
    assert caplog.messages == ["device 0 has come in"]
