"""Real processes of federated rounds over gRPC: TLS, keys, kill -9."""

import os
import signal

import pytest
from tests.deploy.in_process import compute_simulated_digest, make_experiment
from tests.deploy.supervise.test_federation import find_free_port, find_processes
from tests.waiting import LIMIT, wait_until

from pliant.deploy.security.certificates import make_keys
from pliant.deploy.settings import ServerSettings
from pliant.deploy.supervise.child_process import run_supervisor
from pliant.deploy.supervise.federation import Federation
from pliant.engine.ledger import TaskRecord, verify_records
from pliant.engine.run_store import read_records

pytestmark = pytest.mark.waits


def test_killed_processes_change_no_bit_of_the_simulated_weights(tmp_path):
    experiment = make_experiment("scaffold", fleet={"size": 2}, per_round=2, rounds=5)
    make_keys(tmp_path / "keys")
    settings = ServerSettings(LIMIT, LIMIT, pace="simulated", transport="grpc")
    federation = Federation(
        experiment,
        tmp_path / "run",
        settings=settings,
        port=find_free_port(),
        keys=tmp_path / "keys",
    )
    victims = [
        lambda: federation.devices[0].pids["node"],
        lambda: federation.server.pids["run"],
        lambda: federation.devices[1].pids["node"],
    ]
    with run_supervisor(federation):
        for record in federation.watch():
            if record.round < len(victims):
                os.kill(victims[record.round](), signal.SIGKILL)
    assert record.digest == compute_simulated_digest(experiment)
    records = list(read_records(tmp_path / "run"))
    assert verify_records(records) == 5
    outcomes = {task.outcome for task in records if isinstance(task, TaskRecord)}
    assert outcomes == {"finished"}
    wait_until(lambda: not find_processes(str(tmp_path)), "all processes to end")
