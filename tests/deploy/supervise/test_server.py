"""Two servers with one folder: the second is refused in one line and changes nothing."""

import logging
import os
import socket
import subprocess
import sys
from contextlib import closing
from types import SimpleNamespace

import pytest
from tests.waiting import LIMIT

from pliant.deploy.settings import ServerSettings
from pliant.deploy.supervise import server as server_module
from pliant.deploy.supervise.child_process import LogForwarder, run_supervisor
from pliant.deploy.supervise.server import RunFollower, ServerSupervisor
from pliant.engine.ledger import RoundRecord
from pliant.storage import formats
from pliant.storage.jsonl import JsonlWriter


class IdleProcess:
    """A server process that does nothing."""

    is_alive, pid = True, 0

    def __init__(self, command, log, env):
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_bytes(b"")

    def stop(self):
        pass


@pytest.fixture(autouse=True)
def _no_process(monkeypatch):
    monkeypatch.setattr(server_module, "ChildProcess", IdleProcess)


@pytest.fixture
def ports():
    with socket.socket() as first, socket.socket() as second:
        for free in (first, second):
            free.bind(("127.0.0.1", 0))
        return [free.getsockname()[1] for free in (first, second)]


def read_files(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def format_refusal(folder):
    return f"{folder}: in use by process {os.getpid()}; wait for it to end, or stop it"


def test_a_second_server_is_refused_before_it_writes(tmp_path, ports):
    run = tmp_path / "run"
    early = ServerSupervisor("split", run, ServerSettings(patience=7.0), port=ports[1])
    assert not run.exists()
    with (
        run_supervisor(ServerSupervisor("split", run, ServerSettings(), port=ports[0])),
        socket.socket() as listening,
    ):
        listening.bind(("127.0.0.1", ports[0]))
        listening.listen()  # as the server process does
        before = read_files(run)
        for port in ports:  # the folder is checked before the port
            with pytest.raises(BlockingIOError) as raised:
                ServerSupervisor("split", run, ServerSettings(patience=7.0), port=port)
            assert str(raised.value) == format_refusal(run)
        with pytest.raises(BlockingIOError) as raised, run_supervisor(early):
            pass
        assert str(raised.value) == format_refusal(run)
        assert read_files(run) == before
    server = ServerSupervisor("split", run, ServerSettings(patience=7.0), port=ports[1])
    with run_supervisor(server):
        assert read_files(run) != before


def test_a_killed_server_leaves_its_folder_unlocked(tmp_path, ports):
    program = (
        "import os, sys; from pathlib import Path; from pliant.storage.run_lock import RunLock\n"
        "lock = RunLock(Path(sys.argv[1]), 'server.lock'); os._exit(9)"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=False, timeout=LIMIT)
    assert (tmp_path / "server.lock").read_text() != str(os.getpid())
    with run_supervisor(ServerSupervisor("split", tmp_path, ServerSettings(), port=ports[0])):
        assert (tmp_path / "server.lock").read_text() == str(os.getpid())


def test_a_port_that_is_taken_leaves_no_folder(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(ValueError, match="Cannot listen on"):
            ServerSupervisor(
                "split", tmp_path / "run", ServerSettings(), port=taken.getsockname()[1]
            )
    assert not (tmp_path / "run").exists()


def test_the_log_of_the_server_process_is_forwarded_line_by_line(tmp_path, caplog):
    path = tmp_path / "log"
    path.write_text("INFO pliant: of an earlier run\n")
    forwarder = LogForwarder(path)
    with open(path, "a") as file, caplog.at_level(logging.INFO, "pliant"):
        file.write("INFO pliant: device 1 joined\nTraceback: of torch\nWARNING pliant: dev")
        file.flush()
        forwarder.forward()
        assert caplog.messages == ["device 1 joined"]
        file.write("ice 2 is odd\n")
        file.flush()
        forwarder.forward()
        forwarder.forward()
    assert [(record.levelname, record.message) for record in caplog.records] == [
        ("INFO", "device 1 joined"),
        ("WARNING", "device 2 is odd"),
    ]


def test_watching_a_server_forwards_its_log(tmp_path, ports, caplog):
    server = ServerSupervisor("split", tmp_path, ServerSettings(), port=ports[0])
    with run_supervisor(server):
        server._follower = SimpleNamespace(read_rounds=lambda: [1], is_done=lambda: False)
        (tmp_path / "logs" / "server.log").write_text("INFO pliant: device 0 joined\n")
        with caplog.at_level(logging.INFO, "pliant"):
            assert next(server.watch()) == 1
    assert caplog.messages == ["device 0 joined"]


def make_round(number, seconds, digest=None):
    numbers = dict.fromkeys(("useful", "available", "down", "up", "joules", "busy"), 0)
    numbers |= {"tasks": 1, "merged": 1, "steps": 1, "macs": 0, "samples": 1}
    return RoundRecord(round=number, seconds=seconds, outcomes={}, digest=digest, **numbers)


def test_a_follower_reads_only_what_is_new_and_starts_over_after_a_resume(tmp_path):
    follower = RunFollower(tmp_path)
    assert follower.read_rounds() == []
    with closing(JsonlWriter(tmp_path / "events.jsonl", formats.RECORDS)) as writer:
        assert follower.read_rounds() == []
        writer.append(make_round(0, 1.0))
        position = writer.sync()
        writer.append(make_round(1, 2.0))
        assert [record.seconds for record in follower.read_rounds()] == [1.0, 2.0]
        writer.rewind(position)  # the run was killed before its second checkpoint
        writer.append(make_round(1, 2.5))
        writer.append(make_round(2, 3.5, "digest"))
        assert [record.seconds for record in follower.read_rounds()] == [1.0, 2.5, 3.5]
        assert not follower.is_done()
        (tmp_path / "checkpoints").mkdir()
        (tmp_path / "checkpoints" / "00000003.ckpt").touch()
        assert follower.is_done()
