"""Real processes, real Flower, TLS and keys."""

import os
import signal
import socket
import subprocess
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
from near import described, simulated

from pliant.deploy.federation import Federation, open_run
from pliant.deploy.host import Limits
from pliant.deploy.keys import device_key, make_keys
from pliant.deploy.remote import RemoteDevice
from pliant.deploy.service import Service
from pliant.engine.ledger import TaskRecord, check
from pliant.engine.lock import Lock
from pliant.engine.store import events

PATIENT = Service(allowance=300.0, patience=500.0)


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def own_processes(folder):
    """Return the processes of this machine that name a folder in their command line."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            text = path.read_text()
        except OSError:
            continue
        if str(folder) in text and int(path.parent.name) != os.getpid():
            found.append(text.replace("\0", " "))
    return found


def test_a_federation_with_tls_and_keys_ends_with_the_simulated_weights(tmp_path):
    keys = tmp_path / "keys"
    make_keys(keys, devices=3)
    experiment = described(fleet={"round_seconds": 120.0})
    federation = Federation(
        experiment, tmp_path / "run", service=PATIENT, port=free_port(), keys=keys
    )
    with federation:
        records = list(federation.watch())
    assert check(events(tmp_path / "run")) == 2
    assert records[-1].digest == simulated(experiment)
    time.sleep(2.0)
    assert own_processes(tmp_path) == []


def test_killed_processes_come_back_and_nothing_merged_is_lost(tmp_path):
    experiment = described(fleet={"round_seconds": 120.0}, rounds=3)
    federation = Federation(experiment, tmp_path / "run", service=PATIENT, port=free_port())
    with federation:
        for record in federation.watch():
            if record.round == 0:
                os.kill(federation.devices[1].pids["worker"], signal.SIGKILL)
            if record.round == 1:
                os.kill(federation.server.pids["run"], signal.SIGKILL)
    found = list(events(tmp_path / "run"))
    assert check(found) == 3
    ends = {task.end for task in found if isinstance(task, TaskRecord)}
    assert ends == {"finished"}
    assert record.digest == simulated(experiment)


def test_strangers_are_sent_away(tmp_path):
    """An unknown key, another authority, no TLS: none of them gets in where a known key does."""
    keys, others = tmp_path / "keys", tmp_path / "others"
    make_keys(keys, devices=1)
    make_keys(others, devices=1)
    device_key(keys / "stranger")
    experiment = described(fleet={"size": 1, "round_seconds": 120.0}, per_round=1, rounds=1)
    open_run(tmp_path / "run", experiment)
    port = free_port()
    from pliant.deploy.server import Server

    trials = {
        "friend": (keys / "ca.crt", keys / "devices" / "0" / "key"),
        "unknown": (keys / "ca.crt", keys / "stranger" / "key"),
        "astray": (others / "ca.crt", keys / "devices" / "0" / "key"),
        "plain": (None, None),
    }
    with Server(tmp_path / "run", PATIENT, port=port, keys=keys) as server, ExitStack() as stack:
        for name, (ca, key) in reversed(trials.items()):
            folder = tmp_path / name
            device = RemoteDevice(0, f"127.0.0.1:{port}", folder, Limits(), ca=ca, key=key)
            stack.enter_context(device)
        assert [record.ends for record in server.watch()] == [{"finished": 1}]  # the friend
        heard = {name: (tmp_path / name / "logs" / "supernode.log").read_text() for name in trials}
        assert [name for name, log in heard.items() if "SuperNode ID" in log] == ["friend"]
        done = subprocess.run(
            ["curl", "-s", "-m", "5", f"http://127.0.0.1:{port}/v1/control/list-runs"],
            capture_output=True,
            check=False,
        )
        assert done.returncode != 0


def test_a_run_of_another_kind_is_not_gone_on_with(tmp_path):
    open_run(tmp_path / "run", described())
    open_run(tmp_path / "run", described())
    with pytest.raises(FileExistsError, match="another run"):
        open_run(tmp_path / "run", described("fedprox"))


def test_without_keys_only_loopback_is_served(tmp_path):
    from pliant.deploy.server import Server

    open_run(tmp_path / "run", described())
    with pytest.raises(ValueError, match="loopback only"):
        Server(tmp_path / "run", PATIENT, host="0.0.0.0")
    with pytest.raises(ValueError, match="loopback only"):
        RemoteDevice(0, "example.org:9092", tmp_path / "device", Limits())


@pytest.mark.parametrize("server", ["example.org", ":9092", "localhost:port", ""])
def test_an_address_is_host_and_port(tmp_path, server):
    with pytest.raises(ValueError, match="HOST:PORT"):
        RemoteDevice(0, server, tmp_path / "device", Limits())


def test_a_port_that_is_taken_is_told_in_one_line(tmp_path):
    from pliant.deploy.server import Server

    open_run(tmp_path / "run", described())
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(ValueError, match="Cannot listen"):
            Server(tmp_path / "run", PATIENT, port=taken.getsockname()[1])


def test_a_second_server_at_the_same_run_is_sent_away_and_changes_nothing(tmp_path):
    from pliant.deploy.server import Server

    open_run(tmp_path / "run", described())
    lock = Lock(tmp_path / "run", "server.lock")
    before = sorted(path.name for path in (tmp_path / "run").iterdir())
    with pytest.raises(BlockingIOError, match="expected no other process at this run"):
        Server(tmp_path / "run", PATIENT, port=free_port())
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == before
    lock.close()


def test_a_run_that_gives_up_says_why(tmp_path):
    from pliant.deploy.server import Server

    open_run(tmp_path / "run", described())
    hasty = Service(patience=1.0)
    with (
        pytest.raises(ChildProcessError, match="waited for 1 devices or more, 0 came"),
        Server(tmp_path / "run", hasty, port=free_port()) as server,
    ):
        list(server.watch())
