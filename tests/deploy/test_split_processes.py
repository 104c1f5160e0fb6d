"""Real processes of a split run: TLS, keys, kill -9; slow, because each takes seconds to start."""

import os
import signal
import subprocess
import sys
import time

import pytest
from split_near import described, simulated
from test_federation import free_port, own_processes

from pliant.checkpoint import load
from pliant.deploy.door import knock
from pliant.deploy.federation import Federation
from pliant.deploy.host import Limits
from pliant.deploy.keys import device_key, make_keys
from pliant.deploy.service import Service
from pliant.engine.ledger import RoundRecord, TaskRecord, check
from pliant.engine.store import events

PATIENT = Service(allowance=300.0, patience=500.0)


def federation_of(experiment, folder, port):
    keys = folder / "keys"
    make_keys(keys, devices=3)
    limits = Limits(code=str(folder))
    return Federation(
        experiment, folder / "run", service=PATIENT, port=port, keys=keys, limits=limits
    )


def done_by(folder, device):
    """Return how far a device's disk is, in its epoch."""
    try:
        return load(folder / "run" / "devices" / str(device) / "split.ckpt")[1]["done"]
    except FileNotFoundError:
        return 0


@pytest.mark.slow
def test_three_processes_end_with_the_simulated_weights_and_strangers_stay_out(tmp_path):
    experiment = described(tmp_path, "splitfed")
    federation = federation_of(experiment, tmp_path, port := free_port())
    key = device_key(tmp_path / "keys" / "devices" / "9")[0]
    (tmp_path / "keys" / "devices" / "9" / "key.pub").unlink()  # it was never registered
    try:
        federation.server.start()
        while not is_there(port, tmp_path / "keys" / "ca.crt"):
            time.sleep(0.2)
        command = [sys.executable, "-m", "pliant", "device", "--server", f"127.0.0.1:{port}"]
        command += ["--number", "9", "--keys", str(key.parents[2]), "--state", str(tmp_path / "9")]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
        assert done.returncode == 2
        [told] = done.stderr.splitlines()
        assert told.endswith("device 9: expected a registered key")
        for device in federation.devices:
            device.start()
        records = list(federation.watch())
    finally:
        federation.close()
    assert records[-1].digest == simulated(experiment)[-1].digest
    assert check(events(tmp_path / "run")) == 2
    time.sleep(2.0)
    assert own_processes(tmp_path) == []


def is_there(port, ca):
    try:
        return knock("127.0.0.1", port, ca) == "split"
    except OSError:
        return False


@pytest.mark.slow
@pytest.mark.parametrize("method", ["split", "adasplit"])
def test_kill_9_of_devices_and_of_the_server_changes_no_bit(method, tmp_path):
    experiment = described(tmp_path, method, rounds=8)
    federation = federation_of(experiment, tmp_path, free_port())
    killed = 0
    with federation:
        rounds = federation.watch()
        for device in (0, 2):  # each in the middle of a round, wherever it is
            while done_by(tmp_path, device) < 12 + 12 * device:
                time.sleep(0.001)
            os.kill(federation.devices[device].pids["worker"], signal.SIGKILL)
            killed += 1
        for record in rounds:
            if killed == 2 and record.round + 1 < experiment.rounds:
                os.kill(federation.server.pids["run"], signal.SIGKILL)
                killed += 1
    assert killed == 3
    found = list(events(tmp_path / "run"))
    assert check(found) == experiment.rounds
    assert {task.end for task in found if isinstance(task, TaskRecord)} == {"finished"}
    assert sum(isinstance(record, RoundRecord) for record in found) == experiment.rounds
    assert record.digest == simulated(experiment)[-1].digest
