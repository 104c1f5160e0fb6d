"""Asynchronous runs of real processes, with TLS and keys, some of which are killed."""

import os
import signal

import pytest
from tests.deploy.in_process import compute_simulated_digest, make_experiment
from tests.deploy.supervise.test_federation import find_free_port
from tests.waiting import LIMIT

from pliant.deploy.security.certificates import make_keys
from pliant.deploy.settings import ServerSettings
from pliant.deploy.supervise.child_process import run_supervisor
from pliant.deploy.supervise.federation import Federation
from pliant.engine.ledger import TaskRecord, verify_records
from pliant.engine.run_store import read_records

pytestmark = pytest.mark.waits


def make_async(buffer):
    """Make a run of two devices, as each takes seconds to start."""
    inner = {"type": "scaffold", "local": {"batch": 16}}
    speed = {"type": "constant", "low": 0.3, "high": 1.0}
    return make_experiment(
        {"type": "fedbuff", "buffer": buffer, "concurrency": 2, "inner": inner},
        rounds=3,
        data={"proxy": 7950},
        fleet={"size": 2, "round_seconds": 5.0, "speed": speed},
    )


def serve(experiment, folder, pace, kills, transport="flower"):
    """Serve a run, kill what `kills` names after each version, and return the records."""
    make_keys(folder / "keys")
    settings = ServerSettings(LIMIT, LIMIT, pace=pace, transport=transport)
    federation = Federation(
        experiment, folder / "run", settings=settings, port=find_free_port(), keys=folder / "keys"
    )
    with run_supervisor(federation):
        for record in federation.watch():
            if record.round in kills:
                os.kill(kills[record.round](federation), signal.SIGKILL)
    return list(read_records(folder / "run"))


def get_server(federation):
    return federation.server.pids["run"]


@pytest.mark.slow  # killed devices get work again in the rehearsal below too
def test_a_killed_device_comes_back_and_gets_work(tmp_path):
    kills = {
        0: lambda federation: federation.devices[0].pids["supernode"],
        1: lambda federation: federation.devices[0].pids["worker"],
    }
    records = serve(make_async(buffer=2), tmp_path, "measured", kills)  # both must send updates
    assert verify_records(records) == 3
    tasks = [task for task in records if isinstance(task, TaskRecord)]
    for device in range(2):
        finished = [t.round for t in tasks if t.device == device and t.outcome == "finished"]
        assert finished == [0, 1, 2]
    lost = [task for task in tasks if task.outcome.startswith("dropped")]
    assert {task.device for task in lost} <= {0}


@pytest.mark.slow  # the same in one process: test_live_tasks.py; kills: test_grpc_federation.py
@pytest.mark.parametrize("transport", ["grpc", "flower"])
def test_a_rehearsal_with_kills_ends_with_the_simulated_weights(tmp_path, transport):
    experiment = make_async(buffer=1)
    kills = {0: lambda federation: federation.devices[1].pids["worker"], 1: get_server}
    records = serve(experiment, tmp_path, "simulated", kills, transport)
    assert verify_records(records) == 3
    assert {task.staleness for task in records if isinstance(task, TaskRecord)} > {0}
    assert records[-1].digest == compute_simulated_digest(experiment)
