"""Unusable ports, and closing that no second signal may disturb, and the ends of processes."""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from typing import ClassVar

import psutil
import pytest
from tests.deploy.in_process import make_experiment
from tests.deploy.supervise.test_federation import find_free_port
from tests.waiting import wait_until

from pliant.cli.server import show_rounds
from pliant.deploy.security import probe
from pliant.deploy.security.certificates import make_keys
from pliant.deploy.settings import ServerChanged
from pliant.deploy.supervise import child_process, node
from pliant.deploy.supervise.child_process import (
    ChildProcess,
    check_port,
    rotate_log,
    run_supervisor,
)
from pliant.deploy.supervise.federation import Federation
from pliant.deploy.supervise.server import _SubmittedRun


def send_signals():
    os.kill(os.getpid(), signal.SIGINT)
    os.kill(os.getpid(), signal.SIGTERM)


class InterruptedSupervisor:
    """A supervisor that is interrupted while it runs, and again while it closes."""

    closed: ClassVar = []

    def __init__(self, *_, **options):
        self.is_closed = False

    def start(self):
        pass

    def watch(self):
        send_signals()
        return iter(())

    def close(self):
        send_signals()
        self.is_closed = True
        self.closed.append(self)


@pytest.fixture(autouse=True)
def _check_signal_handlers():
    InterruptedSupervisor.closed.clear()
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    yield
    assert before == (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM))


def test_a_second_ctrl_c_does_not_disturb_closing_a_server(tmp_path, capsys):
    assert show_rounds(InterruptedSupervisor(), make_experiment(), tmp_path, "here") == 130
    assert len(InterruptedSupervisor.closed) == 1
    assert "run the same command to resume" in capsys.readouterr().err


def test_a_second_ctrl_c_does_not_disturb_closing_a_device(tmp_path, monkeypatch):
    from pliant.cli import main

    monkeypatch.setattr(node, "DeviceSupervisor", InterruptedSupervisor)
    monkeypatch.setattr(probe, "wait_for_server", lambda *address: "federated")
    options = [
        "--server",
        "localhost:22110",
        "--number",
        "0",
        "--insecure",
        "--state",
        str(tmp_path),
    ]
    assert main(["device", *options]) == 130
    assert len(InterruptedSupervisor.closed) == 1


def test_a_device_follows_a_server_that_changes_its_kind(tmp_path, monkeypatch):
    from pliant.cli import main

    kinds = []

    class ChangingSupervisor(InterruptedSupervisor):
        def __init__(self, kind, *_, **options):
            super().__init__()
            kinds.append(kind)

        def watch(self):
            if len(kinds) == 1:
                raise ServerChanged("localhost:22110 now serves a split run")
            super().watch()

        def close(self):
            self.closed.append(self)

    answers = iter(["federated", "split"])
    monkeypatch.setattr(node, "DeviceSupervisor", ChangingSupervisor)
    monkeypatch.setattr(probe, "wait_for_server", lambda *address: next(answers))
    options = ["--server", "localhost:22110", "--number", "0", "--insecure"]
    assert main(["device", *options, "--state", str(tmp_path)]) == 130
    assert kinds == ["federated", "split"]
    assert len(InterruptedSupervisor.closed) == 2


def test_a_supervisor_that_ends_or_fails_to_start_is_closed_undisturbed():
    ending = InterruptedSupervisor()
    with run_supervisor(ending):
        pass
    assert ending.is_closed
    failing = InterruptedSupervisor()
    failing.start = lambda: 1 / 0
    with pytest.raises(ZeroDivisionError), run_supervisor(failing):
        pass
    assert failing.is_closed


def test_signals_after_the_first_ctrl_c_are_ignored():
    supervisor, steps = InterruptedSupervisor(), []

    def work():
        try:
            send_signals()
        finally:
            send_signals()
            steps.append("cleaned up")

    with pytest.raises(KeyboardInterrupt), run_supervisor(supervisor):
        work()
    assert steps == ["cleaned up"]
    assert supervisor.is_closed


@pytest.fixture
def temporary_folder(tmp_path, monkeypatch):
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    return tmp_path / "temporary"


def test_a_federation_closes_the_rest_if_one_part_fails_to_close(tmp_path, temporary_folder):
    federation = Federation(make_experiment(), tmp_path / "run", port=find_free_port())
    assert len(list(temporary_folder.iterdir())) == 3
    closed: ClassVar = []

    def fail():
        raise OSError("stuck")

    federation.devices[1].close = fail
    federation.server.close = lambda: closed.append("server")
    with pytest.raises(OSError, match="stuck"):
        federation.close()
    assert closed == ["server"]
    assert len(list(temporary_folder.iterdir())) == 1  # of the device that is stuck


def test_a_federation_that_fails_to_start_leaves_no_folders_behind(tmp_path, temporary_folder):
    keys = tmp_path / "keys"
    make_keys(keys)
    (tmp_path / "run" / "devices" / "2" / "keys").mkdir(parents=True)
    with pytest.raises(FileNotFoundError, match="expected the keys of `pliant device enrol`"):
        Federation(make_experiment(), tmp_path / "run", port=find_free_port(), keys=keys)
    assert list(temporary_folder.iterdir()) == []


@pytest.mark.parametrize("port", [0, -1, 99999])
def test_an_impossible_port_is_refused(port):
    with pytest.raises(ValueError, match=f"Expected --port from 1 to 65535, got {port}"):
        check_port("127.0.0.1", port)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_a_taken_port_is_refused_in_both_families(host):
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        taken = socket.create_server((host, 0), family=family)
    except OSError:
        pytest.skip(f"this machine has no {host}")
    with taken:
        port = taken.getsockname()[1]
        with pytest.raises(ValueError, match=r"Cannot listen on .* the port is taken"):
            check_port(host, port)
    check_port(host, port)


@pytest.mark.parametrize(
    ("host", "message"),
    [
        ("256.1.1.1", "Expected --host to be an address of this machine"),
        ("192.0.2.1", "it is not an address of this machine"),
    ],
)
def test_a_host_that_is_another_machine_is_refused(host, message):
    with pytest.raises(ValueError, match=message):
        check_port(host, find_free_port())


def test_a_dead_process_takes_its_children_with_it(tmp_path):
    path = tmp_path / "child"
    program = f"sleep 1000 & echo $! > {path}.new; mv {path}.new {path}; exec sleep 1000"
    process = ChildProcess(["sh", "-c", program], tmp_path / "log", os.environ)
    wait_until(path.exists, "the child to start")
    child = psutil.Process(int(path.read_text()))
    os.kill(process.pid, signal.SIGKILL)
    wait_until(lambda: not process.is_alive, "the process to end")
    assert process.exit_code == -signal.SIGKILL
    wait_until(lambda: not is_running(child), "its child to end")
    process.stop()  # there is nothing left to stop


def is_running(process):
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_a_process_that_got_the_number_of_another_is_not_signalled(tmp_path):
    path = tmp_path / "pid"
    with subprocess.Popen(["sleep", "1000"]) as process:
        try:
            path.write_text(str(process.pid))
            run = _SubmittedRun(path, 0.0)
            assert (run.is_alive, run.pid) == (True, process.pid)
            os.utime(path, (time.time() - 100, time.time() - 100))  # written by an earlier process
            assert (run.is_alive, run.pid) == (False, None)
            run.stop()
            assert process.poll() is None
        finally:
            process.kill()


def test_a_log_is_rotated_while_its_process_appends_to_it(tmp_path, monkeypatch):
    monkeypatch.setattr(child_process, "MAX_LOG_BYTES", 100)
    path = tmp_path / "logs" / "x.log"
    code = "import sys, time\nfor i in range(40): print(f'line {i:04}', flush=True)\n"
    code += f"from pathlib import Path\nwhile not Path({str(tmp_path / 'go')!r}).exists(): "
    code += "time.sleep(0.01)\nprint('last', flush=True)"
    child = ChildProcess([sys.executable, "-c", code], path, os.environ)
    wait_until(lambda: "0039" in path.read_text(), "40 lines")
    rotate_log(path)
    assert path.stat().st_size == 0
    assert path.with_suffix(".log.1").read_text().endswith("line 0039\n")
    assert path.with_suffix(".log.1").stat().st_size == 100
    (tmp_path / "go").touch()
    wait_until(lambda: not child.is_alive, "the end")
    assert path.read_text() == "last\n"
    modes = {oct(file.stat().st_mode & 0o777) for file in path.parent.iterdir()}
    assert modes == {"0o600"}


def test_the_last_line_of_a_process_is_its_own(tmp_path):
    log = tmp_path / "superlink.log"
    log.write_text("ERROR: of an earlier process\n")

    def run(code):
        child = ChildProcess([sys.executable, "-c", code], log, os.environ)
        wait_until(lambda: not child.is_alive, "the process to end")
        return child.read_last_line()

    assert run("pass") == f"it wrote nothing to {log}"
    assert run("print('first'); print('the port is taken'); print()") == "the port is taken"


def test_only_their_owner_reads_the_files_of_processes(tmp_path):
    code = f"open({str(tmp_path / 'state.db')!r}, 'w')"
    child = ChildProcess([sys.executable, "-c", code], tmp_path / "x.log", os.environ)
    wait_until(lambda: not child.is_alive, "the end")
    modes = {file.stat().st_mode & 0o777 for file in (tmp_path / "state.db", tmp_path / "x.log")}
    assert modes == {0o600}
