"""A device process that sends every kind of bad reply, one per round, among two honest ones."""

import subprocess
import time
from pathlib import Path

import pytest
from tests.deploy.bad_replies import BAD_REPLIES
from tests.deploy.in_process import (
    InProcessTransport,
    compute_simulated_digest,
    make_devices,
    make_experiment,
    serve_rounds,
)
from tests.deploy.supervise.test_federation import PATIENT, find_free_port
from tests.methods.wrapped_method import WrappedMethod
from tests.waiting import LIMIT, connect_unix

from pliant.deploy.device.host import DeviceSetup, Limits
from pliant.deploy.security.certificates import make_keys
from pliant.deploy.settings import ARRIVAL_HEADER
from pliant.deploy.supervise.child_process import make_command, run_supervisor
from pliant.deploy.supervise.federation import Federation
from pliant.deploy.supervise.node import DeviceSupervisor
from pliant.engine.ledger import RoundRecord, TaskRecord, verify_records
from pliant.engine.run_store import read_records

pytestmark = pytest.mark.waits

ROOT = Path(__file__).parents[3]
PROGRAM = "tests.deploy.bad_replies"
UNREAD_OUTCOMES = ("late", "dropped: Reply message objects are unavailable")


class WithoutDevice1(WrappedMethod):
    """A method that merges the updates of all devices but number 1."""

    def merge(self, net, state, updates):
        return super().merge(net, state, [u for u in updates if u.device != 1])


def check_records(records, experiment, unread=()):
    """Check that each bad reply is rejected and the network is the one without device 1.

    SuperLink does not read replies that are too large: they are late, or it reports that their
    parts are missing.
    """
    assert verify_records(records) == len(BAD_REPLIES)
    bad = [r for r in records if isinstance(r, TaskRecord) and r.device == 1]
    honest = [r for r in records if isinstance(r, TaskRecord) and r.device != 1]
    for kind, task in zip(BAD_REPLIES, bad, strict=True):
        rejected = ("rejected: device 1: expected ",)
        expected = UNREAD_OUTCOMES if kind in unread else rejected
        assert task.outcome.startswith(expected), (kind, task.outcome)
        assert task.useful == 0.0, kind
    assert {task.outcome for task in honest} == {"finished"}
    last = [r for r in records if isinstance(r, RoundRecord)][-1]
    assert last.digest == compute_simulated_digest(experiment, WithoutDevice1(experiment.method))


def test_a_process_that_sends_every_kind_of_bad_reply_changes_nothing(tmp_path):
    experiment = make_experiment(rounds=len(BAD_REPLIES), data={"proxy": 7950})
    path = str(tmp_path / "socket")
    setup = DeviceSetup(1, str(tmp_path / "bad"), Limits(), socket=path, idle_seconds=LIMIT)
    with subprocess.Popen(make_command(PROGRAM, setup), cwd=ROOT) as process:
        try:

            def call_worker(request):
                with connect_unix(path) as connection:
                    connection.send_bytes(ARRIVAL_HEADER.pack(time.monotonic()) + request)
                    return connection.recv_bytes()

            devices = make_devices(experiment, tmp_path) | {1: call_worker}
            check_records(
                serve_rounds(experiment, InProcessTransport(devices), tmp_path / "run"), experiment
            )
        finally:
            process.kill()


@pytest.mark.slow
def test_a_bad_device_in_a_federation_with_tls_and_keys_changes_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    keys = tmp_path / "keys"
    make_keys(keys)
    experiment = make_experiment(rounds=len(BAD_REPLIES), fleet={"round_seconds": 60.0})
    federation = Federation(
        experiment, tmp_path / "run", settings=PATIENT, port=find_free_port(), keys=keys
    )
    federation.devices[1] = DeviceSupervisor(
        "federated",
        1,
        federation.server.address,
        tmp_path / "run" / "devices" / "1",
        Limits(),
        ca=keys / "ca.crt",
        key=tmp_path / "run" / "devices" / "1" / "keys" / "key",
        worker=PROGRAM,
    )
    with run_supervisor(federation):
        for _ in federation.watch():
            pass
    records = list(read_records(tmp_path / "run"))
    check_records(records, experiment, unread=("twenty megabytes",))
