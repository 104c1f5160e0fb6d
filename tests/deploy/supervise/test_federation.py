"""Real processes, real Flower, TLS and keys."""

import os
import signal
import socket
from contextlib import ExitStack
from http.client import HTTPConnection, HTTPException
from pathlib import Path

import pytest
from tests.deploy.in_process import compute_simulated_digest, make_experiment
from tests.waiting import LIMIT, wait_until

from pliant.deploy.device.host import Limits
from pliant.deploy.security.certificates import make_device_key, make_keys
from pliant.deploy.settings import ServerSettings
from pliant.deploy.supervise.child_process import run_supervisor
from pliant.deploy.supervise.federation import Federation, open_run
from pliant.deploy.supervise.node import DeviceSupervisor
from pliant.deploy.supervise.server import ServerSupervisor
from pliant.engine.ledger import TaskRecord, verify_records
from pliant.engine.run_store import read_records
from pliant.storage.run_lock import RunLock

pytestmark = pytest.mark.waits

PATIENT = ServerSettings(allowance=300.0, patience=500.0)
REFUSALS = {  # in the log of a SuperNode
    "unknown": "Failed to activate SuperNode",
    "other authority": "CERTIFICATE_VERIFY_FAILED",
    "plain": "Connection attempt failed",
}


def find_free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def find_processes(folder):
    """Return the command lines of processes that name a folder."""
    commands = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            text = path.read_text()
        except OSError:
            continue
        if str(folder) in text and int(path.parent.name) != os.getpid():
            commands.append(text.replace("\0", " "))
    return commands


def test_a_federation_whose_processes_are_killed_ends_with_the_simulated_weights(tmp_path):
    keys = tmp_path / "keys"
    make_keys(keys, devices=3)
    experiment = make_experiment(fleet={"round_seconds": 120.0}, rounds=3)
    federation = Federation(
        experiment, tmp_path / "run", settings=PATIENT, port=find_free_port(), keys=keys
    )
    with run_supervisor(federation):
        for record in federation.watch():
            if record.round == 0:
                os.kill(federation.devices[1].pids["worker"], signal.SIGKILL)
            if record.round == 1:
                os.kill(federation.server.pids["run"], signal.SIGKILL)
    records = list(read_records(tmp_path / "run"))
    assert verify_records(records) == 3
    outcomes = {task.outcome for task in records if isinstance(task, TaskRecord)}
    assert outcomes == {"finished"}
    assert record.digest == compute_simulated_digest(experiment)
    wait_until(lambda: not find_processes(tmp_path), "all processes to end")


def test_unknown_devices_are_refused(tmp_path):
    """Only a registered key is accepted: no unknown key, no other authority, no plain HTTP."""
    keys, others = tmp_path / "keys", tmp_path / "others"
    make_keys(keys, devices=1)
    make_keys(others, devices=1)
    make_device_key(keys / "stranger")
    experiment = make_experiment(fleet={"size": 1, "round_seconds": 120.0}, per_round=1, rounds=1)
    open_run(tmp_path / "run", experiment)
    port = find_free_port()
    credentials = {
        "registered": (keys / "ca.crt", keys / "devices" / "0" / "key"),
        "unknown": (keys / "ca.crt", keys / "stranger" / "key"),
        "other authority": (others / "ca.crt", keys / "devices" / "0" / "key"),
        "plain": (None, None),
    }
    supervisor = ServerSupervisor("federated", tmp_path / "run", PATIENT, port=port, keys=keys)
    with (
        run_supervisor(supervisor) as server,
        ExitStack() as stack,
    ):
        for name, (ca, key) in reversed(credentials.items()):
            folder = tmp_path / name
            device = DeviceSupervisor(
                "federated", 0, f"127.0.0.1:{port}", folder, Limits(), ca=ca, key=key
            )
            stack.enter_context(run_supervisor(device))
        assert [record.outcomes for record in server.watch()] == [{"finished": 1}]
        logs = {name: tmp_path / name / "logs" / "supernode.log" for name in credentials}
        for name, message in REFUSALS.items():  # each of them has tried
            wait_until(lambda n=name, m=message: m in logs[n].read_text(), f"{name} to fail")
        accepted = [name for name, log in logs.items() if "SuperNode ID" in log.read_text()]
        assert accepted == ["registered"]
        connection = HTTPConnection("127.0.0.1", port, timeout=LIMIT)
        connection.request("GET", "/health")
        with pytest.raises((HTTPException, ConnectionError)):
            connection.getresponse()
        connection.close()


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


def test_a_run_that_gives_up_says_why(tmp_path):
    open_run(tmp_path / "run", make_experiment())
    impatient = ServerSettings(patience=1.0)
    server = ServerSupervisor("federated", tmp_path / "run", impatient, port=find_free_port())
    with (
        pytest.raises(ChildProcessError, match="expected 1 or more devices online, got 0"),
        run_supervisor(server),
    ):
        list(server.watch())
