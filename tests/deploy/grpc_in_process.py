"""A split run in this process: real gRPC, TLS and keys on loopback, devices as threads."""

import threading
from contextlib import contextmanager, suppress

import torch
from tests.waiting import LIMIT

from pliant.deploy.device.host import Limits
from pliant.deploy.grpc import device as device_module
from pliant.deploy.grpc import handshake, server_main
from pliant.deploy.grpc.chunks import iter_chunks
from pliant.deploy.grpc.client import GrpcClient
from pliant.deploy.grpc.device import SplitDevice
from pliant.deploy.grpc.server_main import SplitServerRun
from pliant.deploy.settings import ServerRefusal, ServerSettings
from pliant.engine.run_store import read_records
from pliant.engine.split_loop import simulate_split
from pliant.experiment.build import build_experiment, build_session
from pliant.experiment.config import Experiment
from pliant.value import decode

BUILD_LOCK = threading.Lock()  # tracing a network and drawing its weights are not thread-safe


def with_build_lock(function):
    def locked(*arguments, **options):
        with BUILD_LOCK:
            return function(*arguments, **options)

    return locked


for module in (device_module, server_main):
    module.build_session = with_build_lock(build_session)
torch.set_num_threads(1)

USER_CODE = """
import torch
from pliant.data import ImageDataset, TrainTestData, digits
from pliant.nn.models import lenet


def images(count, seed):
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % 3
    pixels = torch.randint(0, 128, (count, 1, 16, 16), generator=generator, dtype=torch.uint8)
    pixels[torch.arange(count), 0, 4 * labels] += 127
    return ImageDataset.from_tensors(pixels, labels, classes=3)


def source():
    return TrainTestData(images(60, 0), images(30, 1))


def few_tests():
    source = digits()
    return TrainTestData(source.train, source.test.select(range(100)))


def network():
    return lenet(3, filters=(4, 6), hidden=(16, 12), channels=1, side=16)
"""


def make_experiment(folder, method="adasplit", *, fields=None, **others):
    """Describe a run small enough for a test: three devices with some dozen images each."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tiny.py").write_text(USER_CODE)
    config = {
        "method": {"type": method, "local": {"batch": 8}} | (fields or {}),
        "network": {"name": f"{folder}/tiny.py:network"},
        "data": {"name": f"{folder}/tiny.py:source", "proxy": 10},
        "fleet": {"size": 3, "round_seconds": LIMIT},
        "rounds": 2,
        "rules": {"late": "wait"},
        "evaluation": {"every": 2, "statistics": {"type": "running"}},
    }
    return decode(config | others, Experiment)


def simulate_rounds(experiment, folder=None, **options):
    """Simulate an experiment and return the records of its rounds."""
    net, data = build_experiment(experiment)
    rounds = simulate_split(
        experiment.method,
        net,
        data,
        experiment.fleet,
        settings=experiment.settings,
        server_speed=experiment.server_speed,
        folder=folder,
        **options,
    )
    return list(rounds)


class Killed(BaseException):
    """Raised in a device's thread to kill the device."""


def make_devices(numbers, folder, device_class=SplitDevice):
    limits = Limits(code=str(folder))
    return {number: device_class(number, folder / f"device{number}", limits) for number in numbers}


@contextmanager
def connect_devices(devices, port, folder, keys=None):
    """Connect each device in a thread; restart a killed one with its folder."""
    clients, threads, is_over = {}, [], threading.Event()

    def run_device(device):
        while not is_over.is_set():
            clients[device.number] = make_client(device, port, keys)
            with suppress(Killed):
                try:
                    clients[device.number].run()
                except ServerRefusal as refusal:
                    clients[device.number].refusal = str(refusal)
                return
            device = make_devices([device.number], folder)[device.number]

    for device in devices.values():
        threads.append(threading.Thread(target=run_device, args=(device,), daemon=True))
        threads[-1].start()
    try:
        yield clients
    finally:
        is_over.set()
        for client in list(clients.values()):
            client.stop()
        for thread in threads:
            thread.join(LIMIT)


def make_client(device, port, keys=None, process="original"):
    files = {}
    if keys is not None:
        files = {"ca": keys / "ca.crt", "key": keys / "devices" / str(device.number) / "key"}
    return GrpcClient(device, f"127.0.0.1:{port}", process=process, **files)


def open_raw_stream(channel, frames, *, device=0, process="", split=iter_chunks, **fields):
    """Open a stream as a device does, and send anything on it."""
    call = channel.stream_stream("/pliant.Split/Describe")(iter(()), wait_for_ready=True)
    assert list(call) == []
    hello = handshake.StreamHello(device, process, **fields)
    headers = handshake.make_hello(dict(call.trailing_metadata()), hello, None, None)
    messages = (message for frame in frames for message in split(frame))
    return channel.stream_stream("/pliant.Split/Work")(messages, metadata=headers)


def make_server_run(experiment, keys=None, port=0, **options):
    fields = {"allowance": LIMIT, "patience": LIMIT, "pace": "simulated"} | options
    return SplitServerRun(
        experiment, ServerSettings(**fields), address=f"127.0.0.1:{port}", keys=keys
    )


def run_with_devices(
    experiment, folder, keys=None, devices=None, through=lambda port: port, **options
):
    """Run an experiment with devices that are threads; return all records."""
    server_run = make_server_run(experiment, keys, **options)
    devices = devices or make_devices(range(experiment.fleet.size), folder)
    with connect_devices(devices, through(server_run.grpc_server.port), folder, keys):
        list(server_run.run_rounds(folder / "run"))
    return list(read_records(folder / "run"))
