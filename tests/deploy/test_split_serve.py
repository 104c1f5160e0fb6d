"""Whom a split server waits for: all at first, then whoever is there, also when started again."""

import logging
import time
from itertools import islice
from types import SimpleNamespace

import pytest
from split_near import described, devices_of, dialling, service_of

from pliant.deploy import split_serve
from pliant.deploy.desk import NotEnough
from pliant.engine.ledger import check
from pliant.engine.store import events


def impatient(monkeypatch, service, devices):
    """Let patience end as soon as these devices are there, and not before."""

    def monotonic():
        lines = [service.lines[device] for device in devices]
        return 1e9 if all(line.is_ready for line in lines) else 0.0

    monkeypatch.setattr(split_serve, "time", SimpleNamespace(monotonic=monotonic, sleep=time.sleep))


def test_a_server_that_is_started_again_does_not_miss_who_had_gone(tmp_path, monkeypatch):
    experiment = described(tmp_path, "splitfed", rounds=3)
    service = service_of(experiment, pace="measured")
    with dialling(devices_of(range(3), tmp_path), service.hub.port, tmp_path):
        rounds = service.rounds(tmp_path / "run")
        assert [record.ends for record in islice(rounds, 1)] == [{"finished": 3}]
        rounds.close()
    service = service_of(experiment, pace="measured")
    impatient(monkeypatch, service, [0, 1])
    with dialling(devices_of([0, 1], tmp_path), service.hub.port, tmp_path):
        left = list(service.rounds(tmp_path / "run"))
    assert [(record.round, record.ends) for record in left] == [
        (1, {"finished": 2}),
        (2, {"finished": 2}),
    ]
    assert check(events(tmp_path / "run")) == 3


def test_fewer_than_a_quorum_are_not_enough(tmp_path, monkeypatch):
    experiment = described(tmp_path, "splitfed", rounds=1, rules={"quorum": 1.0})
    service = service_of(experiment)
    impatient(monkeypatch, service, [0, 1])
    with (
        dialling(devices_of([0, 1], tmp_path), service.hub.port, tmp_path),
        pytest.raises(NotEnough, match="waited for 3 devices or more, 2 came"),
    ):
        list(service.rounds(tmp_path / "run"))


def test_each_device_that_has_come_in_is_one_line_of_the_log(tmp_path, caplog):
    experiment = described(tmp_path, "split", rounds=2)
    service = service_of(experiment)
    with (
        caplog.at_level(logging.INFO, "pliant"),
        dialling(devices_of(range(3), tmp_path), service.hub.port, tmp_path),
    ):
        list(service.rounds(tmp_path / "run"))
    assert sorted(caplog.messages) == [f"device {number} has come in" for number in range(3)]
