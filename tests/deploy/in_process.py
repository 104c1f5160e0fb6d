"""Run a federation in this process: everything but the network between its parts."""

import time
from dataclasses import replace

import msgspec
import numpy as np

from pliant.deploy import step_times
from pliant.deploy.device import agent as agent_module
from pliant.deploy.device.agent import DeviceAgent
from pliant.deploy.device.host import Limits
from pliant.deploy.messages import (
    TrainRequest,
    encode_for_devices,
    encode_message,
    has_own_data,
)
from pliant.deploy.server.replies import RawReply
from pliant.deploy.server.rounds import DeviceTransport
from pliant.deploy.server.serve import serve
from pliant.deploy.settings import ServerSettings
from pliant.engine.run_store import read_records
from pliant.engine.simulate import simulate
from pliant.engine.task_control import count_carrier_bytes
from pliant.experiment.build import build_run_context, build_server_context
from pliant.experiment.config import Experiment
from pliant.methods.verbs import get_inner_method
from pliant.storage import atomic
from pliant.value import decode


class InProcessTransport:
    """A transport to devices that reply at once; `tamper` may change or drop their replies.

    With an experiment, the devices are greeted first.
    """

    def __init__(self, devices, tamper=lambda device, round, raw: raw, experiment=None):
        self.devices = devices
        self.tamper = tamper
        self.hello_replies = {}
        self.waiting = []
        if experiment is not None:
            hello = encode_message(TrainRequest("hello", encode_for_devices(experiment), -1))
            self.hello_replies = {d: agent.handle_request(hello) for d, agent in devices.items()}

    def find_online_devices(self):
        return set(self.devices)

    def send(self, requests, *, round, seconds, adds=False):
        kept = [entry for entry in self.waiting if adds and entry[0] not in requests]
        sent = [(device, round, bytes(request)) for device, request in requests.items()]
        self.waiting = kept + sent

    def find_lost_devices(self):
        return set()

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

    def count_carrier_bytes(self, size):
        return count_carrier_bytes(size)


def make_experiment(method="fedavg", *, fleet=None, **fields):
    """Make an experiment small enough for a test: three devices with a few dozen digits each."""
    config = {
        "method": {"type": method, "local": {"batch": 16}} if isinstance(method, str) else method,
        "fleet": {"size": 3, "round_seconds": 60.0} | (fleet or {}),
        "data": {"proxy": 7800},
        "network": {"options": {"hidden": 16}},
        "rounds": 2,
        "per_round": 3,
        "evaluation": {"every": 1000, "statistics": {"type": "running"}},
    }
    return decode(config | fields, Experiment)


def make_own_experiment(method="fedavg", *, network=None, **fields):
    """Make the same experiment for devices that bring these digits as their own data."""
    form = {"input": [1, 28, 28], "classes": 10, "mean": [0.1307], "std": [0.3081]}
    return make_experiment(method, network=form | (network or {}), **fields)


def write_own_data(experiment, folder, *, tests=20):
    """Write each device's part of the simulated split, and some tests, to a folder of its own."""
    source = make_context(experiment).data
    for device, share in enumerate(source.shares):
        for part, images, indices in (
            ("train", source.train, share),
            ("test", source.test, np.arange(tests * device, tests * (device + 1))),
        ):
            path = folder / str(device) / part
            path.mkdir(parents=True)
            pixels, labels = images.pixels[indices].numpy(), images.labels[indices].numpy()
            np.savez(path / "digits.npz", images=pixels, labels=labels)


def make_own_devices(experiment, folder, **limits):
    """Make devices with the data that `write_own_data` has written to a folder."""
    return {
        number: DeviceAgent(
            number,
            folder / f"device{number}",
            Limits(data=str(folder / str(number)), **limits),
        )
        for number in range(experiment.fleet.size)
    }


CONTEXTS, CURVES = {}, {}


def make_context(experiment, *, check=True):
    """Build an experiment's network and data once for all devices and tests in this process.

    Networks are evaluated on a few digits only.
    """
    inputs = (experiment.data, experiment.network, experiment.fleet.size, experiment.seed)
    key = msgspec.json.encode(inputs)
    if key not in CONTEXTS:
        context = build_run_context(experiment, check=check)
        if not context.data.test_shares:
            few = context.data.test.select(np.arange(100))
            context = replace(context, data=replace(context.data, test=few))
        CONTEXTS[key] = context
    return replace(CONTEXTS[key], method=get_inner_method(experiment.federated_method))


def load_curve(context, device, folder):
    """Give a device the step times that another one has measured in this process, if any."""
    path = step_times._curve_path(context, folder)
    if path.name in CURVES and not path.exists():
        atomic.write_bytes(path, CURVES[path.name])
    curve = step_times.load_or_calibrate(context, device, folder)
    CURVES.setdefault(path.name, path.read_bytes())
    return curve


agent_module.build_run_context = make_context
agent_module.load_or_calibrate = load_curve


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
    settings = ServerSettings(**options)
    rounds = DeviceTransport(experiment, settings, transport, clock, sleep)
    make = build_server_context if has_own_data(experiment, settings.pace) else make_context
    list(serve(make(experiment), rounds, folder))
    return list(read_records(folder))


def simulate_in_process(experiment, method=None):
    """Return the rounds of the simulated run, with another method if given."""
    context = make_context(experiment)
    records = simulate(
        method or experiment.method,
        context.net.module,
        context.data,
        experiment.fleet,
        settings=experiment.settings,
    )
    return list(records)


def compute_simulated_digest(experiment, method=None):
    return simulate_in_process(experiment, method)[-1].digest
