"""Show what would leave a device: run the messages of one round between a server and it, here."""

import threading
from collections.abc import Iterator, Mapping
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
from msgspec.structs import replace
from torch import Tensor

from pliant.deploy.device.agent import DeviceAgent
from pliant.deploy.device.host import Limits
from pliant.deploy.device.own_data import OwnDataReader
from pliant.deploy.grpc import frames
from pliant.deploy.grpc.device import SplitDevice
from pliant.deploy.grpc.server import GrpcServer
from pliant.deploy.grpc.server_main import SplitServerRun
from pliant.deploy.messages import (
    AnyMessage,
    TrainReply,
    TrainRequest,
    decode_message,
    encode_for_devices,
    encode_message,
)
from pliant.deploy.server.replies import RawReply
from pliant.deploy.server.rounds import DeviceTransport, make_run
from pliant.deploy.settings import ServerSettings
from pliant.experiment.build import build_server_context, choose_statistics
from pliant.experiment.config import Experiment, ServerConfig
from pliant.params import Params

PREVIEW_SECONDS = 600.0  # in which the round must end


class PreviewTransport:
    """Pass messages to one device in this process, and keep its replies."""

    def __init__(self, agent: DeviceAgent, hello: bytes) -> None:
        self._agent = agent
        self.replies = [agent.handle_request(hello)]
        self.hello_replies = {agent.number: self.replies[0]}
        self._requests: dict[int, AnyMessage] = {}

    def find_online_devices(self) -> set[int]:
        return {self._agent.number}

    def send(
        self, requests: Mapping[int, AnyMessage], *, round: int, seconds: float, adds: bool = False
    ) -> None:
        self._requests = dict(requests)

    def find_lost_devices(self) -> set[int]:
        return set()

    def poll_replies(self) -> list[RawReply]:
        """Handle the requests; a hello reply is the first."""
        raw_replies = [self._agent.handle_request(bytes(raw)) for raw in self._requests.values()]
        self._requests = {}
        self.replies += raw_replies
        return [RawReply(self._agent.number, raw) for raw in raw_replies]

    def count_carrier_bytes(self, size: int) -> int:
        return 0  # nothing is sent


def preview_messages(experiment: Experiment, number: int, limits: Limits) -> Iterator[str]:
    """Yield a description of every message that a device sends in one round and one test."""
    OwnDataReader(limits).declare(experiment.network.image_form)  # fail now if it cannot be read
    experiment = choose_statistics(replace(experiment, server=ServerConfig()))
    fleet = replace(experiment.fleet, size=max(experiment.fleet.size, number + 1))
    experiment = replace(experiment, fleet=fleet)
    hello = encode_message(TrainRequest("hello", encode_for_devices(experiment), number))
    with TemporaryDirectory() as folder:
        messages = PreviewTransport(DeviceAgent(number, Path(folder), limits), hello)
        transport = DeviceTransport(experiment, ServerSettings(), messages)
        run = make_run(experiment, build_server_context(experiment))
        yield from _describe(messages.replies[0])
        transport.find_ready_devices(run)
        for problem in transport.problems:
            raise ValueError(problem)
        transport.dispatch(run, [number])
        transport.collect(run)
        transport.test_network(run)
        for raw in messages.replies[1:]:
            yield from _describe(raw)


class PreviewServer(GrpcServer):
    """Connect one device in this process with its channel; open no port."""

    def __init__(self, channels: Mapping[int, Any], **options: Any) -> None:
        [self._channel] = channels.values()
        self.device: SplitDevice
        self.frames: list[bytes] = []  # that would leave the device

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run_device, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._channel.close()
        self._thread.join()

    def _run_device(self) -> None:
        channel, epoch = self._channel, None
        stream_id = channel.attach()
        while not channel.is_run_over:
            raw, epoch = channel.get_next_frame(stream_id, epoch, timeout=0.1)
            if raw is None:
                continue
            request, tensors = decode_message(raw, frames.ServerHeader)
            if isinstance(request, frames.SplitRunConfig):
                replies = self.device.configure(request)
            else:
                replies = [self.device.handle_request(request, tensors) or b""]
            for reply in replies:
                self.frames.append(reply)
                channel.receive_frame(stream_id, BytesIO(reply))


def preview_frames(experiment: Experiment, number: int, limits: Limits) -> Iterator[str]:
    """Yield a description of the frames that a device of a split method sends in one round.

    Of frames that are alike but for their contents, one is described.
    """
    OwnDataReader(limits).declare(experiment.network.image_form)  # fail now if it cannot be read
    fleet = replace(experiment.fleet, size=1)
    experiment = replace(
        choose_statistics(experiment), server=ServerConfig(), fleet=fleet, per_round=1, rounds=1
    )
    with TemporaryDirectory() as folder:
        settings = ServerSettings(allowance=PREVIEW_SECONDS, patience=PREVIEW_SECONDS)
        run = SplitServerRun(
            experiment, settings, address="", keys=None, server_class=PreviewServer
        )
        server = run.grpc_server
        assert isinstance(server, PreviewServer)
        server.device = SplitDevice(0, Path(folder) / "device", limits)
        config = encode_for_devices(experiment)
        server.device.configure(frames.SplitRunConfig("", config))  # fail now if it cannot
        for _ in run.run_rounds(Path(folder) / "run"):
            pass
    groups: dict[object, list[bytes]] = {}
    for raw in server.frames:
        header, tensors = decode_message(raw, frames.DeviceHeader)
        has_declaration = getattr(header, "declaration", None) is not None
        groups.setdefault((type(header), has_declaration, *sorted(tensors)), []).append(raw)
    for group in groups.values():
        yield f"{len(group)} x {', '.join(_name_frame(group[0]))}: {sum(map(len, group)):,} bytes"
        yield from _describe_fields(*decode_message(max(group, key=len), frames.DeviceHeader))


def _name_frame(raw: bytes) -> list[str]:
    """Return the tensors of a frame; without any, what its header is."""
    header, tensors = decode_message(raw, frames.DeviceHeader)
    names = sorted({name.partition("/")[0] for name in tensors})
    return names or [type(header).__name__]


def _describe(raw: bytes) -> Iterator[str]:
    """Yield the size of a message, its header and its tensors."""
    reply, tensors = decode_message(raw, TrainReply)
    yield f"{reply.kind}: {len(raw):,} bytes"
    yield from _describe_fields(reply, tensors)


def _describe_fields(reply: msgspec.Struct, tensors: Params) -> Iterator[str]:
    for name, value in msgspec.to_builtins(reply).items():
        yield f"    {name} = {msgspec.json.encode(value).decode()}"
    yield from map(_describe_tensor, tensors.items())


def _describe_tensor(item: tuple[str, Tensor]) -> str:
    name, tensor = item
    return f"    tensor {name} {str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
