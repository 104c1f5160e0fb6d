"""A split run in this process: real gRPC, TLS and keys on loopback, devices as threads."""

import threading
from contextlib import contextmanager, suppress

import torch

from pliant.deploy import split_device, split_serve
from pliant.deploy.host import Limits
from pliant.deploy.service import Service
from pliant.deploy.split_device import SplitDevice
from pliant.deploy.split_serve import SplitService
from pliant.deploy.split_stream import Dialler
from pliant.engine.split import session_of, simulate_split
from pliant.engine.store import events
from pliant.experiment import Experiment, build
from pliant.value import decode

BUILDING = threading.Lock()  # tracing a network, and drawing its weights, are for one thread


def alone(function):
    def locked(*arguments, **options):
        with BUILDING:
            return function(*arguments, **options)

    return locked


for module in (split_device, split_serve):
    module.build = alone(build)
    module.session_of = alone(session_of)
torch.set_num_threads(1)

TINY = """
import torch
from pliant.data import Images, Source
from pliant.nn.models import lenet


def images(count, seed):
    draws = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % 3
    pixels = torch.randint(0, 128, (count, 1, 16, 16), generator=draws, dtype=torch.uint8)
    pixels[torch.arange(count), 0, 4 * labels] += 127
    return Images.from_tensors(pixels, labels, classes=3)


def source():
    return Source(images(60, 0), images(30, 1))


def network():
    return lenet(3, filters=(4, 6), hidden=(16, 12), channels=1, side=16)
"""


def described(folder, method="adasplit", *, fields=None, **others):
    """Describe a run small enough for a test: three devices with some dozen images each."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tiny.py").write_text(TINY)
    plain = {
        "method": {"type": method, "local": {"batch": 8}} | (fields or {}),
        "network": {"name": f"{folder}/tiny.py:network"},
        "data": {"name": f"{folder}/tiny.py:source", "proxy": 10},
        "fleet": {"size": 3, "round_seconds": 60.0},
        "rounds": 2,
        "evaluation": {"every": 2, "statistics": {"type": "running"}},
    }
    return decode(plain | others, Experiment)


def simulated(experiment, folder=None, **options):
    """Return the simulated run's records."""
    net, data = build(experiment)
    rounds = simulate_split(
        experiment.method,
        net,
        data,
        experiment.fleet,
        setting=experiment.setting,
        server_speed=experiment.server_speed,
        folder=folder,
        **options,
    )
    return list(rounds)


class Killed(BaseException):
    """What a device in a thread dies of."""


def devices_of(numbers, folder, kind=SplitDevice):
    limits = Limits(code=str(folder))
    return {number: kind(number, folder / f"device{number}", limits) for number in numbers}


@contextmanager
def dialling(devices, port, folder, keys=None):
    """Let devices dial, each in a thread; one that is killed begins again with its folder."""
    diallers, threads, is_over = {}, [], threading.Event()

    def live(device):
        while not is_over.is_set():
            diallers[device.number] = dialler(device, port, keys)
            with suppress(Killed):
                diallers[device.number].attend()
                return
            device = devices_of([device.number], folder)[device.number]

    for device in devices.values():
        threads.append(threading.Thread(target=live, args=(device,), daemon=True))
        threads[-1].start()
    try:
        yield diallers
    finally:
        is_over.set()
        for one in list(diallers.values()):
            one.stop()
        for thread in threads:
            thread.join(10)


def dialler(device, port, keys=None, process="near"):
    files = {}
    if keys is not None:
        files = {"ca": keys / "ca.crt", "key": keys / "devices" / str(device.number) / "key"}
    return Dialler(device, f"127.0.0.1:{port}", process=process, **files)


def service_of(experiment, keys=None, port=0, **options):
    given = {"allowance": 30.0, "patience": 60.0, "pace": "fleet"} | options
    return SplitService(experiment, Service(**given), address=f"127.0.0.1:{port}", keys=keys)


def served(experiment, folder, keys=None, devices=None, through=lambda port: port, **options):
    """Run an experiment with devices that are threads; return all records."""
    service = service_of(experiment, keys, **options)
    devices = devices or devices_of(range(experiment.fleet.size), folder)
    with dialling(devices, through(service.hub.port), folder, keys):
        list(service.rounds(folder / "run"))
    return list(events(folder / "run"))
