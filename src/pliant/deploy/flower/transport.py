"""The server's transport over a Flower grid."""

import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MessageType, RecordDict

from pliant.deploy.flower.polling import ReplyPoller
from pliant.deploy.server.transport import RawReply

log = logging.getLogger("pliant")

BODY = "body"
HELLO_SECONDS = 60.0


def make_content(raw: bytes, device: int | None = None) -> RecordDict:
    """Return the content of a message; a reply names its device."""
    array = Array("uint8", (len(raw),), "pliant.letter", raw)
    content = RecordDict({BODY: ArrayRecord({BODY: array})})
    if device is not None:
        content["device"] = ConfigRecord({"number": device})
    return content


def extract_body(message: Any) -> bytes:
    raw: bytes = message.content[BODY][BODY].data
    return raw


def read_reply(device: int, message: Any) -> RawReply:
    """Return a device's reply, of which the validation rejects a malformed one."""
    if message.has_error():
        return RawReply(device, None, str(message.error.reason))
    try:
        return RawReply(device, extract_body(message))
    except Exception as error:
        return RawReply(device, b"", type(error).__name__)


class FlowerTransport:
    """Reach devices through a Flower grid.

    A device with a key is registered under its number. Others are asked for theirs, which is safe
    only on a trusted network (one machine). Every device gets a hello when it connects, so that it
    has built the network before its first training request.
    """

    def __init__(
        self, grid: Any, hello: bytes, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._grid, self._hello, self._clock = grid, hello, clock
        self.device_of_node: dict[int, int] = {}
        self._ready_nodes: set[int] = set()  # that have replied to a hello
        self._pending_hellos: dict[str, tuple[int, float]] = {}  # message -> node, expiry
        self._pending_requests: dict[str, int] = {}  # message -> device
        self._hello_poller, self._reply_poller = ReplyPoller(grid), ReplyPoller(grid)
        self.hello_replies: dict[int, bytes] = {}

    def find_online_devices(self) -> set[int]:
        nodes = {node.node_id: node.name for node in self._grid.get_nodes()}
        waiting = {node for node, _ in self._pending_hellos.values()}
        new = [node for node in nodes if node not in self._ready_nodes and node not in waiting]
        if new:
            hellos = [self._make_message(node, self._hello, "hello", HELLO_SECONDS) for node in new]
            expiry = self._clock() + HELLO_SECONDS
            for node, message_id in zip(new, self._grid.push_messages(hellos), strict=True):
                if message_id:
                    self._pending_hellos[message_id] = (node, expiry)
        self._collect_hello_replies(nodes)
        self.device_of_node |= {node: int(name) for node, name in nodes.items() if name.isdigit()}
        return {self.device_of_node[node] for node in nodes if node in self.device_of_node}

    def _collect_hello_replies(self, nodes: Mapping[int, str]) -> None:
        if not self._pending_hellos:
            return
        for message in self._hello_poller.poll(list(self._pending_hellos)):
            node, _ = self._pending_hellos.pop(message.metadata.reply_to_message_id, (None, 0.0))
            if node is None or message.has_error():
                continue
            self._ready_nodes.add(node)
            name = nodes.get(node) or ""
            try:
                raw = extract_body(message)
                device = int(name if name.isdigit() else message.content["device"]["number"])
            except Exception as error:  # a malformed message
                log.warning(
                    "node %d sent a malformed hello (%s); ignoring it", node, type(error).__name__
                )
                continue
            for other in [other for other, d in self.device_of_node.items() if d == device]:
                del self.device_of_node[other]  # the device was restarted
            self.device_of_node[node] = device
            self.hello_replies[device] = raw
        now = self._clock()
        for message_id in [key for key, (_, end) in self._pending_hellos.items() if end < now]:
            del self._pending_hellos[message_id]

    def make_messages(
        self, requests: Mapping[int, bytes], *, round: int, seconds: float
    ) -> dict[int, Message]:
        """Return one message per known device."""
        nodes = {device: node for node, device in self.device_of_node.items()}
        return {
            device: self._make_message(nodes[device], raw, str(round), seconds)
            for device, raw in requests.items()
            if device in nodes
        }

    def send(self, requests: Mapping[int, bytes], *, round: int, seconds: float) -> None:
        messages = self.make_messages(requests, round=round, seconds=seconds)
        self._pending_requests = {}
        self._reply_poller.reset()
        message_ids = self._grid.push_messages([*messages.values()]) if messages else []
        for device, message_id in zip(messages, message_ids, strict=True):
            if message_id:
                self._pending_requests[message_id] = device

    def poll_replies(self) -> list[RawReply]:
        if not self._pending_requests:
            return []
        replies = []
        for message in self._reply_poller.poll(list(self._pending_requests)):
            device = self._pending_requests.pop(message.metadata.reply_to_message_id, None)
            if device is not None:
                replies.append(read_reply(device, message))
        return replies

    def _make_message(self, node: int, raw: bytes, group: str, seconds: float) -> Message:
        return Message(
            make_content(raw),
            dst_node_id=node,
            message_type=MessageType.TRAIN,
            ttl=seconds,
            group_id=group,
        )
