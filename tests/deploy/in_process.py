"""Run a federation in this process: everything but the network between its parts."""

import time
from dataclasses import replace

import msgspec

from pliant.deploy.device import agent as agent_module
from pliant.deploy.device.agent import DeviceAgent
from pliant.deploy.device.host import Limits
from pliant.deploy.server.replies import RawReply
from pliant.deploy.server.rounds import DeviceTransport, serve
from pliant.deploy.settings import ServerSettings
from pliant.engine.run_store import read_records
from pliant.engine.simulate import simulate
from pliant.experiment.build import build_run_context
from pliant.experiment.config import Experiment
from pliant.value import decode


class InProcessTransport:
    """A transport to devices that reply at once; `tamper` may change or drop their replies."""

    def __init__(self, devices, tamper=lambda device, round, raw: raw):
        self.devices = devices
        self.tamper = tamper
        self.hello_replies = {}
        self.waiting = []

    def find_online_devices(self):
        return set(self.devices)

    def send(self, requests, *, round, seconds):
        self.waiting = [(device, round, request) for device, request in requests.items()]

    def poll_replies(self):
        if not self.waiting:
            return []
        device, round, request = self.waiting.pop(0)
        agent = self.devices[device]
        raw = agent(request) if callable(agent) else agent.handle_request(request)
        raw = self.tamper(device, round, raw)
        if raw is None:
            return []
        return [raw if isinstance(raw, RawReply) else RawReply(device, raw)]


def make_experiment(method="fedavg", *, fleet=None, **fields):
    """Make an experiment small enough for a test: three devices with a few dozen digits each."""
    config = {
        "method": {"type": method, "local": {"batch": 16}} if isinstance(method, str) else method,
        "fleet": {"size": 3, "round_seconds": 60.0} | (fleet or {}),
        "data": {"proxy": 7800},
        "rounds": 2,
        "per_round": 3,
        "evaluation": {"every": 1000, "statistics": {"type": "running"}},
    }
    return decode(config | fields, Experiment)


CONTEXTS = {}


def make_context(experiment, *, check=True):
    """Build an experiment's network and data once for all devices and tests in this process."""
    inputs = (experiment.data, experiment.network, experiment.fleet.size, experiment.seed)
    key = msgspec.json.encode(inputs)
    if key not in CONTEXTS:
        CONTEXTS[key] = build_run_context(experiment, check=check)
    return replace(CONTEXTS[key], method=experiment.federated_method)


agent_module.build_run_context = make_context


def make_devices(experiment, folder, limits=None):
    return {
        number: DeviceAgent(number, folder / f"device{number}", limits or Limits())
        for number in range(experiment.fleet.size)
    }


def sleep_briefly(seconds):
    """Replace the pauses between polls: devices in this process reply at once."""
    time.sleep(0.001)


def serve_rounds(
    experiment, transport, folder, clock=time.monotonic, sleep=sleep_briefly, **options
):
    """Run the server's rounds and return all records."""
    rounds = DeviceTransport(experiment, ServerSettings(**options), transport, clock, sleep)
    list(serve(make_context(experiment), rounds, folder))
    return list(read_records(folder))


def compute_simulated_digest(experiment, method=None):
    """Return the digest of the simulated run's network, with another method if given."""
    context = make_context(experiment)
    records = simulate(
        method or experiment.method,
        context.net.module,
        context.data,
        experiment.fleet,
        settings=experiment.settings,
    )
    return list(records)[-1].digest
