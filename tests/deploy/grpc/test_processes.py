"""Real processes of a split run: TLS, keys, kill -9; slow, as each takes seconds to start."""

import os
import signal
import subprocess
import sys
import time

import pytest
from tests.deploy.federation_keys import make_stranger_key
from tests.deploy.grpc_in_process import make_experiment, simulate_rounds
from tests.deploy.supervise.test_federation import find_free_port, find_processes
from tests.waiting import LIMIT, wait_until

from pliant.deploy.device.host import Limits
from pliant.deploy.security.certificates import make_keys
from pliant.deploy.security.probe import detect_protocol
from pliant.deploy.settings import ServerSettings
from pliant.deploy.supervise.child_process import run_supervisor
from pliant.deploy.supervise.federation import Federation
from pliant.engine.ledger import RoundRecord, TaskRecord, verify_records
from pliant.engine.run_store import read_records
from pliant.storage.checkpoint import load

PATIENT = ServerSettings(allowance=300.0, patience=500.0)


def make_federation(experiment, folder, port):
    keys = folder / "keys"
    make_keys(keys)
    limits = Limits(code=str(folder))
    return Federation(
        experiment, folder / "run", settings=PATIENT, port=port, keys=keys, limits=limits
    )


def read_progress(folder, device):
    """Return the last request that a device has saved in its epoch."""
    try:
        return load(folder / "run" / "devices" / str(device) / "split.ckpt")[1]["done"]
    except FileNotFoundError:
        return 0


@pytest.mark.slow
def test_three_processes_reach_the_simulated_weights_and_strangers_stay_out(tmp_path):
    experiment = make_experiment(tmp_path, "splitfed")
    federation = make_federation(experiment, tmp_path, port := find_free_port())
    key = make_stranger_key(tmp_path / "keys", tmp_path / "stranger", 9)
    try:
        federation.server.start()
        while not is_up(port, tmp_path / "keys" / "ca.crt"):
            time.sleep(0.2)
        command = [sys.executable, "-m", "pliant", "device", "--server", f"127.0.0.1:{port}"]
        command += ["--keys", str(key.parent), "--state", str(tmp_path / "9")]
        completed = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=LIMIT
        )
        assert completed.returncode == 2
        [line] = completed.stderr.splitlines()
        assert line.endswith("device 9: expected a registered key")
        for device in federation.devices:
            device.start()
        records = list(federation.watch())
    finally:
        federation.close()
    assert records[-1].digest == simulate_rounds(experiment)[-1].digest
    assert verify_records(read_records(tmp_path / "run")) == 2
    wait_until(lambda: not find_processes(str(tmp_path)), "all processes to end")


def is_up(port, ca):
    try:
        return detect_protocol("127.0.0.1", port, ca) == "split"
    except OSError:
        return False


@pytest.mark.slow
@pytest.mark.parametrize("method", ["split", "adasplit"])
def test_kill_9_of_devices_and_of_the_server_changes_no_bit(method, tmp_path):
    experiment = make_experiment(tmp_path, method, rounds=8)
    federation = make_federation(experiment, tmp_path, find_free_port())
    killed = 0
    with run_supervisor(federation):
        rounds = federation.watch()
        for device in (0, 2):  # each in the middle of a round, wherever it is
            while read_progress(tmp_path, device) < 12 + 12 * device:
                time.sleep(0.001)
            os.kill(federation.devices[device].pids["worker"], signal.SIGKILL)
            killed += 1
        for record in rounds:
            if killed == 2 and record.round + 1 < experiment.rounds:
                os.kill(federation.server.pids["run"], signal.SIGKILL)
                killed += 1
    assert killed == 3
    records = list(read_records(tmp_path / "run"))
    assert verify_records(records) == experiment.rounds
    assert {task.outcome for task in records if isinstance(task, TaskRecord)} == {"finished"}
    assert sum(isinstance(record, RoundRecord) for record in records) == experiment.rounds
    assert record.digest == simulate_rounds(experiment)[-1].digest
