"""Devices keep their parts: a restarted server finds them by digest, and refuses others."""

import re
import stat
import time
from itertools import islice
from types import SimpleNamespace

import pytest
from tests.deploy.grpc_in_process import (
    connect_devices,
    make_devices,
    make_experiment,
    make_server_run,
    run_with_devices,
    simulate_rounds,
)
from tests.waiting import wait_until

from pliant.deploy.grpc.device import SplitDevice
from pliant.engine.ledger import TaskRecord
from pliant.params import digest

OPTIONS = {"fields": {"kappa": 0.5}, "rounds": 3}


def run_some_rounds(experiment, folder, devices, count, **options):
    """Run as many rounds with these devices; return the records and why devices were refused."""
    server_run = make_server_run(experiment, **options)
    with connect_devices(devices, server_run.grpc_server.port, folder) as clients:
        rounds = server_run.run_rounds(folder / "run")
        records = list(islice(rounds, count))
        rounds.close()
    refusals = {n: client.refusal for n, client in clients.items() if hasattr(client, "refusal")}
    return records, refusals


class NosyDevice(SplitDevice):
    """A device that notes what it is asked for."""

    kinds = []  # noqa: RUF012 # of all devices

    def _execute(self, request, tensors):
        self.kinds.append((request.kind, sum(tensor.nbytes for tensor in tensors.values())))
        return super()._execute(request, tensors)


def test_adasplit_sends_no_part_and_files_are_private(tmp_path):
    NosyDevice.kinds.clear()
    experiment = make_experiment(tmp_path, **OPTIONS)
    devices = make_devices(range(3), tmp_path, NosyDevice)
    run_with_devices(experiment, tmp_path, devices=devices)
    assert {kind for kind, _ in NosyDevice.kinds} == {"restore", "ask", "learn", "keep", "test"}
    assert {size for kind, size in NosyDevice.kinds if kind != "test"} == {0}
    files = [path for device in devices.values() for path in device.folder.glob("*.ckpt")]
    assert len(files) == 9  # the last two parts of each device, and the one that it works on
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o600}


def test_devices_return_to_the_part_before_if_the_server_lost_its_last_checkpoint(tmp_path):
    """As if the server was killed after the devices kept their parts, and before it saved."""
    experiment = make_experiment(tmp_path, **OPTIONS)
    devices = make_devices(range(3), tmp_path)
    run_some_rounds(experiment, tmp_path, devices, 2)
    (tmp_path / "run" / "checkpoints" / "00000002.ckpt").unlink()
    devices = make_devices(range(3), tmp_path)
    records, refusals = run_some_rounds(experiment, tmp_path, devices, None)
    assert [record.round for record in records] == [1, 2]
    assert records[-1].digest == simulate_rounds(experiment)[-1].digest
    assert refusals == {}


class LyingDevice(SplitDevice):
    """A device that names another digest than that of the part that it keeps."""

    def _keep(self, number):
        super()._keep(number)
        return digest({})


class BoastingDevice(SplitDevice):
    """A device that claims to have kept a part of which it has no file."""

    def _restore(self, number):
        return super()._restore(number) or digest({})


@pytest.mark.parametrize(
    ("first", "second"),
    [(LyingDevice, SplitDevice), (SplitDevice, BoastingDevice)],
)
def test_a_device_with_another_part_than_the_servers_is_refused(
    tmp_path, first, second, monkeypatch
):
    experiment = make_experiment(tmp_path, **OPTIONS)
    devices = make_devices([0, 1], tmp_path) | make_devices([2], tmp_path, first)
    run_some_rounds(experiment, tmp_path, devices, 1)
    if second is BoastingDevice:
        for path in (tmp_path / "device2").glob("*.ckpt"):
            path.unlink()
    server_run = make_server_run(experiment)

    def read_clock():  # patience ends when device 2 is refused and the others have joined
        have_joined = all(server_run.channels[number].is_in_round for number in (0, 1))
        return 1e9 if have_joined and server_run.clients[2].problem else 0.0

    clock = SimpleNamespace(monotonic=read_clock, sleep=time.sleep)
    monkeypatch.setattr("pliant.deploy.grpc.server_main.time", clock)
    devices = make_devices([0, 1], tmp_path) | make_devices([2], tmp_path, second)
    with connect_devices(devices, server_run.grpc_server.port, tmp_path) as clients:
        records = list(server_run.run_rounds(tmp_path / "run"))
        wait_until(lambda: hasattr(clients[2], "refusal"), "the refusal of device 2")
    assert [record.outcomes for record in records] == [{"finished": 2}, {"finished": 2}]
    [line] = clients[2].refusal.splitlines()
    reason = "device 2: expected its part 1 with digest [0-9a-f]{16}, got [0-9a-f]{16}; it cannot"
    assert re.search(reason, line)


class EmptyHandedDevice(SplitDevice):
    """A device that trains, and sends nothing when it is asked for its part."""

    def _execute(self, request, tensors):
        reply, result = super()._execute(request, tensors)
        return reply, {} if request.kind == "params" else result


def test_a_device_that_withholds_its_part_is_named_and_left_out(tmp_path):
    """`tests/split/test_splitfed.py` shows that the server's part is as if it had sent nothing."""
    options = {"evaluation": {"every": 9}, "rounds": 1}
    experiment = make_experiment(tmp_path, "splitfed", fields={"version": 2}, **options)
    devices = make_devices([0, 1], tmp_path) | make_devices([2], tmp_path, EmptyHandedDevice)
    records = run_with_devices(experiment, tmp_path, devices=devices, pace="measured")
    tasks = [record for record in records if isinstance(record, TaskRecord)]
    assert [task.outcome for task in tasks[:2]] == ["finished", "finished"]
    assert tasks[2].outcome.startswith("rejected: client 2: expected part '")
    assert tasks[2].outcome.endswith("', got none")


def test_a_device_that_lost_its_part_gets_the_shared_one(tmp_path):
    experiment = make_experiment(tmp_path, "splitfed", rounds=2)
    run_some_rounds(experiment, tmp_path, make_devices(range(3), tmp_path), 1)
    for path in (tmp_path / "device2").glob("*.ckpt"):
        path.unlink()
    records, refusals = run_some_rounds(experiment, tmp_path, make_devices(range(3), tmp_path), 1)
    assert records[0].outcomes == {"finished": 3}
    assert refusals == {}
