"""Broken streams, killed devices, a restarted server: the weights stay the same."""

import socket
import threading
from itertools import islice

import pytest
from tests.deploy.faulty_proxy import FaultyProxy
from tests.deploy.grpc_in_process import (
    Killed,
    connect_devices,
    make_devices,
    make_experiment,
    make_server_run,
    run_with_devices,
    simulate_rounds,
)
from tests.waiting import LIMIT, wait_until

from pliant.deploy.grpc.device import SplitDevice
from pliant.engine.ledger import TaskRecord, verify_records
from pliant.engine.run_store import read_records

pytestmark = pytest.mark.waits

FIELDS = {"splitfed": {"version": 2}, "adasplit": {"kappa": 0.5}}


class KillableDevice(SplitDevice):
    """A device that is killed at a request: before it is done, or before the reply is sent."""

    deaths = {}  # device: (request number, when)  # noqa: RUF012 # set by each test

    def handle_request(self, request, tensors):
        number, when = self.deaths.get(self.number, (0, ""))
        if request.number == number and when == "before":
            raise Killed
        frame = super().handle_request(request, tensors)
        if request.number == number and when == "after":
            raise Killed
        return frame


@pytest.mark.parametrize("name", FIELDS)
def test_killed_devices_resume_in_the_middle_of_a_round(name, tmp_path):
    KillableDevice.deaths = {0: (5, "before"), 1: (6, "after"), 2: (9, "after")}
    experiment = make_experiment(tmp_path, name, fields=FIELDS[name])
    devices = make_devices(range(3), tmp_path, KillableDevice)
    records = run_with_devices(experiment, tmp_path, devices=devices)
    simulate_rounds(experiment, tmp_path / "simulated")
    assert records == list(read_records(tmp_path / "simulated"))


def test_connections_that_are_reset_again_and_again_change_nothing(tmp_path):
    proxies = []

    class CuttingDevice(SplitDevice):
        """A device that resets all connections at every fifth request."""

        def handle_request(self, request, tensors):
            frame = super().handle_request(request, tensors)
            if request.number % 5 == 0:
                proxies[0].cut()
            return frame

    def through(port):
        proxies.append(FaultyProxy(port))
        return proxies[0].port

    experiment = make_experiment(tmp_path, "split")
    devices = make_devices(range(3), tmp_path, CuttingDevice)
    records = run_with_devices(experiment, tmp_path, devices=devices, through=through)
    proxies[0].close()
    assert proxies[0].cuts > 5
    assert records[-1].digest == simulate_rounds(experiment)[-1].digest
    outcomes = {task.outcome for task in records if isinstance(task, TaskRecord)}
    assert outcomes == {"finished"}


def test_a_restarted_server_resumes_from_its_checkpoint(tmp_path):
    experiment = make_experiment(tmp_path, "adasplit", fields=FIELDS["adasplit"], rounds=4)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with connect_devices(make_devices(range(3), tmp_path), port, tmp_path):
        for count in (1, 2, None):
            rounds = make_server_run(experiment, port=port).run_rounds(tmp_path / "run")
            list(islice(rounds, count))
            rounds.close()
    simulate_rounds(experiment, tmp_path / "simulated")
    assert list(read_records(tmp_path / "run")) == list(read_records(tmp_path / "simulated"))


def test_rounds_continue_without_a_hanging_device_until_it_rejoins(tmp_path):
    wake = threading.Event()

    class HangingDevice(SplitDevice):
        """A device that hangs in its fourth request until the test wakes it."""

        def handle_request(self, request, tensors):
            if self.number == 2 and request.number == 4 and not wake.is_set():
                wake.wait(LIMIT)
            return super().handle_request(request, tensors)

    fields = {"kappa": 0.0, "eta": 1.0}
    experiment = make_experiment(tmp_path, "adasplit", fields=fields, rounds=4)
    server_run = make_server_run(experiment, allowance=15.0, pace="measured")
    devices = make_devices(range(3), tmp_path, HangingDevice)
    with connect_devices(devices, server_run.grpc_server.port, tmp_path):
        for record in server_run.run_rounds(tmp_path / "run"):
            if record.round == 1:
                wake.set()
                wait_until(lambda: server_run.channels[2].is_ready, "device 2 to join again")
    records = list(read_records(tmp_path / "run"))
    assert verify_records(records) == 4
    tasks = [task for task in records if isinstance(task, TaskRecord) and task.device == 2]
    assert [(task.round, task.outcome) for task in tasks] == [
        (0, "partial"),
        (2, "finished"),
        (3, "finished"),
    ]
    assert next(record.seconds for record in records if not isinstance(record, TaskRecord)) > 15.0
