"""The server's transport over a Flower grid."""

import logging
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from types import SimpleNamespace
from typing import Any

from flwr.app import Message, MessageType

from pliant.deploy.flower.client_app import extract_body, make_content
from pliant.deploy.messages import AnyMessage, list_buffers
from pliant.deploy.server.replies import RawReply
from pliant.engine.task_control import count_carrier_bytes

log = logging.getLogger("pliant")

HELLO_SECONDS = 60.0
PULL_SECONDS = 2.0  # after which the next pull starts alongside
MAX_PULLS = 8  # in progress at once
LOOK_SECONDS = 5.0  # between looks at who is online
GONE_SECONDS = 60.0  # offline, after which no reply is waited for
_TRANSPORT_MODULES = ("httpx", "httpcore")  # whose errors are not a message's fault


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
        self._pending_requests: dict[str, tuple[int, int]] = {}  # message -> device, node
        self._online_nodes: set[int] = set()
        self._last_seen: dict[int, float] = {}  # of nodes that have a request
        self._looked_at = -LOOK_SECONDS
        self._hello_poller, self._reply_poller = ReplyPoller(grid), ReplyPoller(grid)
        self.hello_replies: dict[int, bytes] = {}

    def find_online_devices(self) -> set[int]:
        nodes = {node.node_id: node.name for node in self._grid.get_nodes()}
        self._online_nodes = set(nodes)
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
        pending, now = self._pending_hellos.items(), self._clock()
        self._pending_hellos = {key: hello for key, hello in pending if hello[1] >= now}

    def make_messages(
        self, requests: Mapping[int, AnyMessage], *, round: int, seconds: float
    ) -> dict[int, Message]:
        """Return one message per known device."""
        nodes = {device: node for node, device in self.device_of_node.items()}
        return {
            device: self._make_message(nodes[device], raw, str(round), seconds)
            for device, raw in requests.items()
            if device in nodes
        }

    def send(
        self, requests: Mapping[int, AnyMessage], *, round: int, seconds: float, adds: bool = False
    ) -> None:
        messages = self.make_messages(requests, round=round, seconds=seconds)
        if adds:
            pending = self._pending_requests.items()
            self._pending_requests = {key: (d, n) for key, (d, n) in pending if d not in requests}
        else:
            self._pending_requests = {}
            self._reply_poller.reset()
        message_ids = self._grid.push_messages([*messages.values()]) if messages else []
        nodes = {device: node for node, device in self.device_of_node.items()}
        for device, message_id in zip(messages, message_ids, strict=True):
            if message_id:
                self._pending_requests[message_id] = device, nodes.get(device, 0)
        now, waiting = self._clock(), {node for _, node in self._pending_requests.values()}
        asked = {nodes.get(device, 0) for device in messages}
        self._last_seen = {n: now if n in asked else self._last_seen.get(n, now) for n in waiting}

    def find_lost_devices(self) -> set[int]:
        pending = self._pending_requests.values()
        return {
            device
            for device, node in pending
            if node not in self._online_nodes or self.device_of_node.get(node) != device
        }

    def poll_replies(self) -> list[RawReply]:
        if not self._pending_requests:
            return []
        replies = []
        for message in self._reply_poller.poll(list(self._pending_requests)):
            device, _ = self._pending_requests.pop(
                message.metadata.reply_to_message_id, (None, None)
            )
            if device is not None:
                replies.append(read_reply(device, message))
        return replies + self._give_up_gone_devices()

    def count_carrier_bytes(self, size: int) -> int:
        return count_carrier_bytes(size)

    def _give_up_gone_devices(self) -> list[RawReply]:
        """Return failures for devices that are gone, or have another key: no reply will come."""
        now = self._clock()
        if now - self._looked_at < LOOK_SECONDS:
            return []
        self._looked_at = now
        online = {node.node_id for node in self._grid.get_nodes()}
        self._last_seen |= dict.fromkeys(online & self._last_seen.keys(), now)
        gone = {node for node, seen in self._last_seen.items() if now - seen > GONE_SECONDS}
        lost = {key: d for key, (d, node) in self._pending_requests.items() if node in gone}
        for key in lost:
            del self._pending_requests[key]
        reason = f"it was offline for {GONE_SECONDS:g} s"
        return [RawReply(device, None, reason) for device in lost.values()]

    def _make_message(self, node: int, raw: AnyMessage, group: str, seconds: float) -> Message:
        return Message(
            make_content(*list_buffers(raw)),
            dst_node_id=node,
            message_type=MessageType.TRAIN,
            ttl=seconds,
            group_id=group,
        )


class ReplyPoller:
    """Poll for replies in separate threads, so that no reply can hold up a round.

    If a sender is killed in mid-upload, Flower waits minutes for the rest of its reply. One message
    that Flower cannot read costs it all the messages that it pulled together with it.
    """

    def __init__(self, grid: Any) -> None:
        self._grid = grid
        self._pulls: list[Future[list[Message]]] = []
        self._needs_single_pulls = False  # once Flower could not read a message

    def reset(self) -> None:
        self._pulls = []

    def poll(self, message_ids: list[str]) -> list[Message]:
        """Return the replies that have arrived; a later call returns those still being pulled.

        Flower delivers a message once. It reports an error for a message that another pull is still
        fetching, so errors count only when no pull is in progress.
        """
        if len(self._pulls) < MAX_PULLS:
            self._pulls.append(Future())
            arguments = (self._pulls[-1], message_ids)
            threading.Thread(target=self._run_pull, args=arguments, daemon=True).start()
        wait(self._pulls[-1:], PULL_SECONDS)
        done = [pull for pull in self._pulls if pull.done()]
        self._pulls = [pull for pull in self._pulls if pull not in done]
        messages = [message for pull in done for message in pull.result()]
        if self._pulls:
            return [message for message in messages if not message.has_error()]
        return sorted(messages, key=lambda message: message.has_error())

    def _run_pull(self, future: "Future[list[Message]]", message_ids: list[str]) -> None:
        try:
            future.set_result(self._pull(message_ids))
        except BaseException as error:
            future.set_exception(error)

    def _pull(self, message_ids: list[str]) -> list[Message]:
        if not self._needs_single_pulls:
            try:
                return list(self._grid.pull_messages(message_ids))
            except Exception as error:
                if _is_transport_error(error):
                    raise
                log.warning(
                    "a message is unreadable (%s); pulling one at a time from now on", type(error)
                )
                self._needs_single_pulls = True
        return [m for message_id in message_ids for m in self._pull_one(message_id)]

    def _pull_one(self, message_id: str) -> list[Message]:
        try:
            return list(self._grid.pull_messages([message_id]))
        except Exception as error:
            if _is_transport_error(error):
                raise
            metadata = SimpleNamespace(reply_to_message_id=message_id)
            return [SimpleNamespace(metadata=metadata, has_error=lambda: False, content={})]


def _is_transport_error(error: BaseException) -> bool:
    return (
        isinstance(error, OSError) or type(error).__module__.partition(".")[0] in _TRANSPORT_MODULES
    )
