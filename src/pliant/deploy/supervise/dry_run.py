"""Show what would leave a device: run the messages of one round between a server and it, here."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec
from msgspec.structs import replace

from pliant.deploy.device.agent import DeviceAgent
from pliant.deploy.device.host import Limits
from pliant.deploy.device.own_data import OwnDataReader
from pliant.deploy.messages import (
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


class PreviewTransport:
    """Pass messages to one device in this process, and keep its replies."""

    def __init__(self, agent: DeviceAgent, hello: bytes) -> None:
        self._agent = agent
        self.replies = [agent.handle_request(hello)]
        self.hello_replies = {agent.number: self.replies[0]}
        self._requests: dict[int, bytes] = {}

    def find_online_devices(self) -> set[int]:
        return {self._agent.number}

    def send(self, requests: Mapping[int, bytes], *, round: int, seconds: float) -> None:
        self._requests = dict(requests)

    def poll_replies(self) -> list[RawReply]:
        """Handle the requests; a hello reply is the first."""
        raw_replies = [self._agent.handle_request(raw) for raw in self._requests.values()]
        self._requests = {}
        self.replies += raw_replies
        return [RawReply(self._agent.number, raw) for raw in raw_replies]


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


def _describe(raw: bytes) -> Iterator[str]:
    """Yield the size of a message, its header and its tensors."""
    reply, tensors = decode_message(raw, TrainReply)
    yield f"{reply.kind}: {len(raw):,} bytes"
    for name, value in msgspec.to_builtins(reply).items():
        yield f"    {name} = {msgspec.json.encode(value).decode()}"
    for name, tensor in tensors.items():
        yield f"    tensor {name} {str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
