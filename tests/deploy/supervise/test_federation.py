"""Real processes, real Flower, TLS and keys."""

import os
import signal
import socket
import subprocess
import sys
from contextlib import ExitStack, closing, suppress
from http.client import HTTPConnection, HTTPException
from pathlib import Path

import pytest
from tests.deploy.federation_keys import make_federation_keys, make_stranger_key
from tests.deploy.flower.foreign_app import start_foreign_app
from tests.deploy.in_process import make_experiment
from tests.experiment.user_method import run, write_spec
from tests.waiting import LIMIT, wait_until

from pliant.deploy.device.host import Limits
from pliant.deploy.settings import PID_FILE, ServerSettings
from pliant.deploy.supervise.child_process import run_supervisor
from pliant.deploy.supervise.federation import open_run
from pliant.deploy.supervise.node import DeviceSupervisor
from pliant.deploy.supervise.server import RunFollower, ServerSupervisor
from pliant.engine.ledger import TaskRecord, verify_records
from pliant.engine.run_store import read_records
from pliant.storage.run_lock import RunLock

pytestmark = pytest.mark.waits

PATIENT = ServerSettings(allowance=300.0, patience=500.0)
REFUSALS = {  # in the log of a device's connection
    "unknown": "expected a registered key",
    "other authority": "CERTIFICATE_VERIFY_FAILED",
    "plain": "no server at",
}


def find_free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def find_processes(text):
    """Return the ids of processes with a text in their command line."""
    pids = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            if text in path.read_text() and int(path.parent.name) != os.getpid():
                pids.append(int(path.parent.name))
    return pids


def can_connect_without_tls(port):
    with closing(HTTPConnection("127.0.0.1", port, timeout=LIMIT)) as connection:
        connection.request("GET", "/health")
        with suppress(HTTPException, ConnectionError):
            return bool(connection.getresponse())
    return False


def wait_for_rounds(process, follower, count):
    def has_rounds():
        assert process.poll() is None, process.stderr.read()
        return len(follower.read_rounds()) >= count

    wait_until(has_rounds, f"{count} rounds")


def try_to_join(folder, port):
    """Start SuperNodes without a registered key, and return once each has failed."""
    make_federation_keys(folder / "others", devices=1)
    make_stranger_key(folder / "run" / "keys", folder / "stranger")
    ca = folder / "run" / "keys" / "ca.crt"
    key = folder / "run" / "devices" / "0" / "keys" / "key"
    credentials = {
        "unknown": (ca, folder / "stranger" / "key"),
        "other authority": (folder / "others" / "ca.crt", key),
        "plain": (None, None),
    }
    with ExitStack() as stack:
        for name, (ca, key) in credentials.items():
            device = DeviceSupervisor(
                "federated", 0, f"127.0.0.1:{port}", folder / name, Limits(), ca=ca, key=key
            )
            device.services = device.services[:1]  # without a worker, which would have no work
            stack.enter_context(run_supervisor(device))
        for name, message in REFUSALS.items():
            log = folder / name / "logs" / "supernode.log"
            wait_until(lambda log=log, m=message: m in log.read_text(), f"{name} to fail")


@pytest.fixture(scope="module")
def deployed(tmp_path_factory):
    """Deploy a user's method with keys, kill a worker and the run, and try to join without a key.

    A local process tries to start an app of its own, too. Return the folder of it all, whether the
    port was open to plain HTTP, and the exit code of that process.
    """
    folder = tmp_path_factory.mktemp("deployed")
    run_folder, port = folder / "run", find_free_port()
    follower = RunFollower(run_folder)
    command = [sys.executable, "-m", "pliant", "deploy", "up", str(write_spec(folder))]
    command += ["--pace", "simulated", "--port", str(port), "--out", str(run_folder)]
    command += ["--allowance", str(LIMIT), "--patience", str(LIMIT)]  # no device is late
    with subprocess.Popen(command, cwd=folder, stderr=subprocess.PIPE, text=True) as process:
        try:
            wait_for_rounds(process, follower, 1)
            command = f'device.worker\0{{"device":1,"folder":"{run_folder}/devices/1"'
            (worker,) = find_processes(command)
            os.kill(worker, signal.SIGKILL)
            wait_for_rounds(process, follower, 2)
            server = int((run_folder / PID_FILE).read_text())
            os.kill(server, signal.SIGSTOP)  # the server of the devices runs on
            try_to_join(folder, port)
            is_open = can_connect_without_tls(port)
            (folder / "foreign").mkdir()
            security = f'root-certificates = "{run_folder / "keys" / "ca.crt"}"'
            foreign = start_foreign_app(folder / "foreign", f"127.0.0.1:{port}", security)
            os.kill(server, signal.SIGKILL)
            assert process.wait(2 * LIMIT) == 0, process.stderr.read()
        finally:
            process.terminate()
    return folder, is_open, foreign.returncode


def test_a_federation_whose_processes_are_killed_ends_with_the_simulated_weights(
    deployed, tmp_path
):
    folder, *_ = deployed
    records = list(read_records(folder / "run"))
    assert verify_records(records) == 3
    assert {task.outcome for task in records if isinstance(task, TaskRecord)} == {"finished"}
    assert records[-1].digest == run(write_spec(tmp_path), tmp_path / "run")
    wait_until(lambda: not find_processes(str(folder)), "all processes to end")


def test_unknown_devices_are_refused(deployed):
    """Only a registered key is accepted: no unknown key, no other authority, no plain HTTP."""
    folder, is_open_to_plain_http, _ = deployed
    logs = {log.parents[1].name: log for log in folder.rglob("supernode.log")}
    assert {"0", "1"} | REFUSALS.keys() == logs.keys()
    assert {n for n, log in logs.items() if "joined" in log.read_text()} == {"0", "1"}
    assert not is_open_to_plain_http


def test_a_local_process_without_the_secret_runs_nothing(deployed):
    folder, _, foreign_code = deployed
    assert foreign_code != 0
    assert not (folder / "foreign" / "ran-on-server").exists()  # which takes a second at most


def test_a_folder_with_another_run_is_refused(tmp_path):
    open_run(tmp_path / "run", make_experiment())
    open_run(tmp_path / "run", make_experiment())
    with pytest.raises(FileExistsError, match="another run"):
        open_run(tmp_path / "run", make_experiment("fedprox"))


def test_without_keys_only_loopback_is_served(tmp_path):
    open_run(tmp_path / "run", make_experiment())
    with pytest.raises(ValueError, match="loopback only"):
        ServerSupervisor("federated", tmp_path / "run", PATIENT, host="0.0.0.0")
    with pytest.raises(ValueError, match="loopback only"):
        DeviceSupervisor("federated", 0, "example.org:9092", tmp_path / "device", Limits())


@pytest.mark.parametrize("server", ["example.org", ":9092", "localhost:port", ""])
def test_an_address_is_host_and_port(tmp_path, server):
    with pytest.raises(ValueError, match="HOST:PORT"):
        DeviceSupervisor("federated", 0, server, tmp_path / "device", Limits())


def test_a_taken_port_is_refused(tmp_path):
    open_run(tmp_path / "run", make_experiment())
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(ValueError, match="Cannot listen"):
            ServerSupervisor("federated", tmp_path / "run", PATIENT, port=taken.getsockname()[1])


def test_a_second_server_on_the_same_run_is_refused_and_changes_nothing(tmp_path):
    open_run(tmp_path / "run", make_experiment())
    lock = RunLock(tmp_path / "run", "server.lock")
    before = sorted(path.name for path in (tmp_path / "run").iterdir())
    with pytest.raises(BlockingIOError, match="in use by process"):
        ServerSupervisor("federated", tmp_path / "run", PATIENT, port=find_free_port())
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == before
    lock.release()
