"""A device process that sends all kinds of bad answers, one a round, among two honest ones."""

import subprocess
import sys
import time
from multiprocessing.connection import Client
from pathlib import Path

import msgspec
import pytest
from bad_answers import BAD
from near import Near, described, devices_of, served, world_of
from test_federation import PATIENT, free_port

from pliant.deploy.federation import Federation
from pliant.deploy.host import Limits
from pliant.deploy.keys import make_keys
from pliant.deploy.remote import RemoteDevice
from pliant.deploy.worker import CAME, Setup
from pliant.engine.ledger import RoundRecord, TaskRecord, check
from pliant.engine.simulate import simulate
from pliant.engine.store import events

PROGRAM = str(Path(__file__).with_name("bad_answers.py"))


class BadRemote(RemoteDevice):
    program = (PROGRAM,)


class Deaf:
    """A method that hears all devices but number 1."""

    def __init__(self, inner):
        self.inner, self.local = inner, inner.local
        self.plan, self.subnet, self.sends = inner.plan, inner.subnet, inner.sends
        self.train = inner.train

    def merge(self, net, state, updates):
        return self.inner.merge(net, state, [u for u in updates if u.device != 1])


def without_it(experiment):
    """Return the digest of a simulated run in which device 1 is never heard."""
    world = world_of(experiment)
    method, setting = Deaf(experiment.method), experiment.setting
    run = simulate(method, world.net.net, world.data, experiment.fleet, setting=setting)
    return list(run)[-1].digest


def judge(records, experiment):
    """Each kind is refused by name, others are merged, and the network is the one without it."""
    assert check(records) == len(BAD)
    bad = [r for r in records if isinstance(r, TaskRecord) and r.device == 1]
    rest = [r for r in records if isinstance(r, TaskRecord) and r.device != 1]
    for kind, task in zip(BAD, bad, strict=True):
        assert task.end.startswith("rejected: device 1: expected "), kind
        assert task.useful == 0.0, kind
    assert {task.end for task in rest} == {"finished"}
    last = [r for r in records if isinstance(r, RoundRecord)][-1]
    assert last.digest == without_it(experiment)


def test_a_process_that_sends_every_kind_of_bad_answer_changes_nothing(tmp_path):
    experiment = described(rounds=len(BAD))
    path = str(tmp_path / "socket")
    setup = Setup(1, str(tmp_path / "bad"), path, Limits(), 60.0)
    told = msgspec.json.encode(setup).decode()
    with subprocess.Popen([sys.executable, PROGRAM, told]) as process:
        try:

            def asked(letter):
                end = time.monotonic() + 60
                while not Path(path).exists() and time.monotonic() < end:
                    time.sleep(0.05)
                with Client(path, family="AF_UNIX") as link:
                    link.send_bytes(CAME.pack(time.monotonic()) + letter)
                    return link.recv_bytes()

            devices = devices_of(experiment, tmp_path) | {1: asked}
            judge(served(experiment, Near(devices), tmp_path / "run"), experiment)
        finally:
            process.kill()


@pytest.mark.slow
def test_a_bad_device_in_a_federation_with_tls_and_keys_changes_nothing(tmp_path):
    keys = tmp_path / "keys"
    make_keys(keys, devices=3)
    experiment = described(rounds=len(BAD), fleet={"round_seconds": 120.0})
    federation = Federation(
        experiment, tmp_path / "run", service=PATIENT, port=free_port(), keys=keys
    )
    federation.devices[1] = BadRemote(
        1,
        federation.server.address,
        tmp_path / "run" / "devices" / "1",
        Limits(),
        ca=keys / "ca.crt",
        key=keys / "devices" / "1" / "key",
    )
    with federation:
        for _ in federation.watch():
            pass
    judge(list(events(tmp_path / "run")), experiment)
