"""Which devices a split server waits for: all at first, then those that are connected."""

import logging
import time
from functools import partial
from itertools import islice
from types import SimpleNamespace

import pytest
from tests.deploy.grpc_in_process import (
    connect_devices,
    make_devices,
    make_experiment,
    make_server_run,
    run_with_devices,
)
from tests.waiting import wait_until

from pliant.deploy.grpc import server_main
from pliant.deploy.grpc.device import SplitDevice
from pliant.deploy.grpc.environment import WallClockEnvironment
from pliant.deploy.server.presence import read_presence
from pliant.deploy.server.rounds import NotEnoughDevices
from pliant.engine.ledger import TaskRecord, verify_records
from pliant.engine.run_store import read_records


def end_patience_after(monkeypatch, server_run, devices):
    """End the server's patience once it has counted these devices, and not before.

    The time passes while the server sleeps, so it counts the devices before it reads the clock.
    """
    now = [0.0]

    def sleep(seconds):
        channels = [server_run.channels[device] for device in devices]
        if all(channel.is_ready for channel in channels):
            now[0] = 1e9
        time.sleep(seconds)

    clock = SimpleNamespace(monotonic=lambda: now[0], sleep=sleep)
    monkeypatch.setattr(server_main, "time", clock)


def test_a_restarted_server_does_not_wait_for_devices_that_had_left(tmp_path, monkeypatch):
    experiment = make_experiment(tmp_path, "splitfed", rounds=3)
    server_run = make_server_run(experiment, pace="measured")
    with connect_devices(make_devices(range(3), tmp_path), server_run.grpc_server.port, tmp_path):
        rounds = server_run.run_rounds(tmp_path / "run")
        assert [record.outcomes for record in islice(rounds, 1)] == [{"finished": 3}]
        wait_until(
            lambda: read_presence(tmp_path / "run").online == (0, 1, 2), "three devices online"
        )
        rounds.close()
    server_run = make_server_run(experiment, pace="measured")
    end_patience_after(monkeypatch, server_run, [0, 1])
    with connect_devices(make_devices([0, 1], tmp_path), server_run.grpc_server.port, tmp_path):
        records = list(server_run.run_rounds(tmp_path / "run"))
    assert [(record.round, record.outcomes) for record in records] == [
        (1, {"finished": 2}),
        (2, {"finished": 2}),
    ]
    assert verify_records(read_records(tmp_path / "run")) == 3


def test_a_run_without_a_quorum_ends(tmp_path, monkeypatch):
    rules = {"late": "wait", "quorum": 1.0}
    experiment = make_experiment(tmp_path, "splitfed", rounds=1, rules=rules)
    server_run = make_server_run(experiment)
    end_patience_after(monkeypatch, server_run, [0, 1])
    with (
        connect_devices(make_devices([0, 1], tmp_path), server_run.grpc_server.port, tmp_path),
        pytest.raises(NotEnoughDevices, match="expected 3 or more devices online, got 2"),
    ):
        list(server_run.run_rounds(tmp_path / "run"))


@pytest.mark.parametrize(("lengths", "outcome"), [(9.9, "finished"), (10.1, "partial")])
def test_even_a_round_that_waits_for_all_ends_after_twenty_lengths(
    tmp_path, monkeypatch, lengths, outcome
):
    """Device 2 takes this many round lengths for each of its three mini-batches."""
    passed = [0.0]

    class SlowDevice(SplitDevice):
        def handle_request(self, request, tensors):
            if self.number == 2 and request.kind == "ask":
                passed[0] += lengths * experiment.fleet.round_seconds
            return super().handle_request(request, tensors)

    experiment = make_experiment(tmp_path, "splitfed", rounds=1)
    clock = partial(WallClockEnvironment, clock=lambda: time.monotonic() + passed[0])
    monkeypatch.setattr(server_main, "WallClockEnvironment", clock)
    devices = make_devices(range(3), tmp_path, SlowDevice)
    records = run_with_devices(experiment, tmp_path, devices=devices, pace="measured")
    assert passed[0] >= 2 * lengths * experiment.fleet.round_seconds
    [task] = [r for r in records if isinstance(r, TaskRecord) and r.device == 2]
    assert task.outcome == outcome


def test_the_log_has_one_line_per_joined_device(tmp_path, caplog):
    experiment = make_experiment(tmp_path, "split", rounds=2)
    server_run = make_server_run(experiment)
    with (
        caplog.at_level(logging.INFO, "pliant"),
        connect_devices(make_devices(range(3), tmp_path), server_run.grpc_server.port, tmp_path),
    ):
        list(server_run.run_rounds(tmp_path / "run"))
    assert sorted(caplog.messages) == [f"device {number} joined" for number in range(3)]
