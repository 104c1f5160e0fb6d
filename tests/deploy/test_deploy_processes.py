"""Ports that cannot be listened at, and ends that nobody may disturb; no process is started."""

import os
import signal
import socket
import tempfile

import pytest
from near import described

from pliant.cli.server import shown
from pliant.deploy import door, remote
from pliant.deploy.federation import Federation
from pliant.deploy.processes import kept, need_port


def ask_to_end():
    os.kill(os.getpid(), signal.SIGINT)
    os.kill(os.getpid(), signal.SIGTERM)


class Running:
    """What is interrupted while it runs, and again while it closes."""

    def __init__(self, *given, **options):
        self.is_closed = False

    def start(self):
        pass

    def watch(self):
        ask_to_end()
        return iter(())

    def close(self):
        ask_to_end()
        self.is_closed = True
        Closed.append(self)


Closed = []


@pytest.fixture(autouse=True)
def handlers():
    Closed.clear()
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    yield
    assert before == (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM))


def test_a_second_ctrl_c_does_not_disturb_the_end_of_a_server(tmp_path, capsys):
    assert shown(Running(), described(), tmp_path, "here") == 130
    assert len(Closed) == 1
    assert "the same command goes on" in capsys.readouterr().err


def test_a_second_ctrl_c_does_not_disturb_the_end_of_a_device(tmp_path, monkeypatch):
    from pliant.cli import main

    monkeypatch.setattr(remote, "RemoteDevice", Running)
    monkeypatch.setattr(door, "awaited", lambda *place: "federated")
    told = ["--server", "localhost:22110", "--number", "0", "--insecure", "--state", str(tmp_path)]
    assert main(["device", *told]) == 130
    assert len(Closed) == 1


def test_what_ends_by_itself_or_fails_to_start_is_closed_undisturbed():
    running = Running()
    with kept(running):
        pass
    assert running.is_closed
    failing = Running()
    failing.start = lambda: 1 / 0
    with pytest.raises(ZeroDivisionError), kept(failing):
        pass
    assert failing.is_closed


def test_nothing_is_heard_between_the_first_ctrl_c_and_the_end():
    running, steps = Running(), []

    def work():
        try:
            ask_to_end()
        finally:
            ask_to_end()
            steps.append("cleared up")

    with pytest.raises(KeyboardInterrupt), kept(running):
        work()
    assert steps == ["cleared up"]
    assert running.is_closed


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return probe.getsockname()[1]


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    return tmp_path / "temporary"


def test_a_federation_closes_the_rest_if_one_part_fails_to(tmp_path, temporary):
    federation = Federation(described(), tmp_path / "run", port=free_port())
    assert len(list(temporary.iterdir())) == 3
    closed = []

    def fail():
        raise OSError("stuck")

    federation.devices[1].close = fail
    federation.server.close = lambda: closed.append("server")
    with pytest.raises(OSError, match="stuck"):
        federation.close()
    assert closed == ["server"]
    assert len(list(temporary.iterdir())) == 1  # that of the device which is stuck


def test_a_federation_that_cannot_be_made_leaves_no_folders_behind(
    tmp_path, temporary, monkeypatch
):
    with pytest.raises(IndexError):
        Federation(described(), tmp_path / "run", port=free_port(), cpus=[0])
    assert list(temporary.iterdir()) == []


@pytest.mark.parametrize("port", [0, -1, 99999])
def test_a_port_that_cannot_be_is_told(port):
    with pytest.raises(ValueError, match=f"Expected --port from 1 to 65535, got {port}"):
        need_port("127.0.0.1", port)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_a_port_that_is_taken_is_told_in_both_families(host):
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        taken = socket.create_server((host, 0), family=family)
    except OSError:
        pytest.skip(f"this machine has no {host}")
    with taken:
        port = taken.getsockname()[1]
        with pytest.raises(ValueError, match=r"Cannot listen at .* it is taken"):
            need_port(host, port)
    need_port(host, port)


@pytest.mark.parametrize(
    ("host", "said"),
    [("256.1.1.1", "Expected --host with an address"), ("192.0.2.1", "no address of this machine")],
)
def test_a_host_that_is_another_machine_is_told(host, said):
    with pytest.raises(ValueError, match=said):
        need_port(host, free_port())
