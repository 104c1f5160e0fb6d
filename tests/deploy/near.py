"""Devices in this process: everything of a federation but the network between its parts."""

import time

import msgspec

from pliant.deploy import device as device_module
from pliant.deploy.device import Device
from pliant.deploy.host import Limits
from pliant.deploy.post import Reply
from pliant.deploy.rounds import serve
from pliant.deploy.service import Service
from pliant.engine.job import World, example_of
from pliant.engine.simulate import simulate
from pliant.engine.store import events
from pliant.experiment import Experiment, build
from pliant.nn.elastic import elastic
from pliant.value import decode


class Near:
    """A link to devices that answer at once; `meddle` may change what they say, or lose it."""

    def __init__(self, devices, meddle=lambda device, round, raw: raw):
        self.devices = devices
        self.meddle = meddle
        self.greetings = {}
        self.waiting = []

    def online(self):
        return set(self.devices)

    def send(self, letters, *, round, seconds):
        self.waiting = [(device, round, letter) for device, letter in letters.items()]

    def replies(self):
        if not self.waiting:
            return []
        device, round, letter = self.waiting.pop(0)
        answer = self.devices[device]
        raw = answer(letter) if callable(answer) else answer.answer(letter)
        raw = self.meddle(device, round, raw)
        if raw is None:
            return []
        return [raw if isinstance(raw, Reply) else Reply(device, raw)]


def described(method="fedavg", *, fleet=None, **fields):
    """Describe a run small enough for a test: three devices with some dozen digits each."""
    plain = {
        "method": {"type": method, "local": {"batch": 16}},
        "fleet": {"size": 3, "round_seconds": 60.0} | (fleet or {}),
        "data": {"proxy": 7800},
        "rounds": 2,
        "per_round": 3,
        "evaluation": {"every": 1000, "statistics": {"type": "running"}},
    }
    return decode(plain | fields, Experiment)


BUILT = {}


def built_once(experiment):
    """Build what an experiment describes, for all devices and tests in this process."""
    told = (experiment.data, experiment.network, experiment.fleet.size, experiment.seed)
    key = msgspec.json.encode(told)
    if key not in BUILT:
        BUILT[key] = build(experiment)
    return BUILT[key]


FLEXIBLE = {}


def elastic_once(net, example):
    """Make a network elastic once; training leaves it as it is."""
    if id(net) not in FLEXIBLE:
        FLEXIBLE[id(net)] = elastic(net, example)
    return FLEXIBLE[id(net)]


device_module.build = built_once
device_module.elastic = elastic_once


def world_of(experiment):
    net, data = built_once(experiment)
    return World(elastic_once(net, example_of(data)), data, experiment.federated)


def devices_of(experiment, folder, limits=None):
    return {
        number: Device(number, folder / f"device{number}", limits or Limits())
        for number in range(experiment.fleet.size)
    }


def served(experiment, link, folder, clock=time.monotonic, sleep=time.sleep, **options):
    """Run the server's rounds and return all records."""
    world, service = world_of(experiment), Service(**options)
    list(serve(experiment, world, link, folder, service, clock=clock, sleep=sleep))
    return list(events(folder))


def simulated(experiment):
    """Return the digest of the simulated run's network."""
    world = world_of(experiment)
    run = simulate(
        experiment.method, world.net.net, world.data, experiment.fleet, setting=experiment.setting
    )
    return list(run)[-1].digest
