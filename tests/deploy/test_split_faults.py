"""Broken streams, killed devices, a server that is started again: the weights stay the same."""

import socket
import threading
from itertools import islice

import pytest
from cable import Cable
from split_near import (
    Killed,
    described,
    devices_of,
    dialling,
    served,
    service_of,
    simulated,
)

from pliant.deploy.split_device import SplitDevice
from pliant.engine.ledger import TaskRecord, check
from pliant.engine.store import events

FIELDS = {"splitfed": {"version": 2}, "adasplit": {"kappa": 0.5}}


class Mortal(SplitDevice):
    """A device that is killed at a question: before it is done, or before the answer is sent."""

    deaths = {}  # device: (question, when)  # noqa: RUF012 # set by each test

    def answered(self, question, tensors):
        at, when = self.deaths.get(self.number, (0, ""))
        if question.number == at and when == "before":
            raise Killed
        frame = super().answered(question, tensors)
        if question.number == at and when == "after":
            raise Killed
        return frame


@pytest.mark.parametrize("name", FIELDS)
def test_killed_devices_go_on_in_the_middle_of_a_round(name, tmp_path):
    Mortal.deaths = {0: (5, "before"), 1: (6, "after"), 2: (9, "after")}
    experiment = described(tmp_path, name, fields=FIELDS[name])
    devices = devices_of(range(3), tmp_path, Mortal)
    found = served(experiment, tmp_path, devices=devices)
    simulated(experiment, tmp_path / "simulated")
    assert found == list(events(tmp_path / "simulated"))


def test_a_cable_that_is_cut_again_and_again_changes_nothing(tmp_path):
    cables = []

    class Clumsy(SplitDevice):
        """A device that stumbles over its cable at every fifth question."""

        def answered(self, question, tensors):
            frame = super().answered(question, tensors)
            if question.number % 5 == 0:
                cables[0].cut()
            return frame

    def through(port):
        cables.append(Cable(port))
        return cables[0].port

    experiment = described(tmp_path, "split")
    devices = devices_of(range(3), tmp_path, Clumsy)
    found = served(experiment, tmp_path, devices=devices, through=through)
    cables[0].close()
    assert cables[0].cuts > 5
    assert found[-1].digest == simulated(experiment)[-1].digest
    ends = {task.end for task in found if isinstance(task, TaskRecord)}
    assert ends == {"finished"}


def test_a_server_that_is_started_again_goes_on_from_its_checkpoint(tmp_path):
    experiment = described(tmp_path, "adasplit", fields=FIELDS["adasplit"], rounds=4)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with dialling(devices_of(range(3), tmp_path), port, tmp_path):
        for count in (1, 2, None):
            rounds = service_of(experiment, port=port).rounds(tmp_path / "run")
            list(islice(rounds, count))
            rounds.close()
    simulated(experiment, tmp_path / "simulated")
    assert list(events(tmp_path / "run")) == list(events(tmp_path / "simulated"))


def test_a_device_that_hangs_is_gone_without_and_comes_back(tmp_path):
    woken = threading.Event()

    class Sleepy(SplitDevice):
        """A device that hangs in its fourth question until it is woken."""

        def answered(self, question, tensors):
            if self.number == 2 and question.number == 4 and not woken.is_set():
                woken.wait(60)
            return super().answered(question, tensors)

    experiment = described(tmp_path, "adasplit", fields={"kappa": 0.0, "eta": 1.0}, rounds=4)
    service = service_of(experiment, allowance=4.0, pace="measured")
    with dialling(devices_of(range(3), tmp_path, Sleepy), service.hub.port, tmp_path):
        for record in service.rounds(tmp_path / "run"):
            if record.round == 1:
                woken.set()
                while not service.lines[2].is_ready:  # it hears of the new epoch, and says so
                    woken.wait(0.05)
                    threading.Event().wait(0.05)
    found = list(events(tmp_path / "run"))
    assert check(found) == 4
    tasks = [task for task in found if isinstance(task, TaskRecord) and task.device == 2]
    assert [(task.round, task.end) for task in tasks] == [
        (0, "partial"),
        (2, "finished"),
        (3, "finished"),
    ]
    assert next(record.seconds for record in found if not isinstance(record, TaskRecord)) > 4.0
