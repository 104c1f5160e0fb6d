"""The server's side of Flower: which devices are there, orders out, answers in."""

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from flwr.app import Array, ArrayRecord, Message, MessageType, RecordDict

from pliant.deploy.looks import Looks
from pliant.deploy.post import Reply

log = logging.getLogger("pliant")

BODY = "body"
HELLO_SECONDS = 60.0


def content(raw: bytes) -> RecordDict:
    """Return a letter as Flower carries it."""
    array = Array("uint8", (len(raw),), "pliant.letter", raw)
    return RecordDict({BODY: ArrayRecord({BODY: array})})


def body(message: Any) -> bytes:
    """Return the letter in a message."""
    raw: bytes = message.content[BODY][BODY].data
    return raw


class FlowerLink:
    """Devices behind a Flower grid.

    A device with a registered key is known by the name of its registration, which is its number.
    Others are asked for it, which only a trusted network (one machine) may believe. All are greeted
    when they come, so that they have built what they need before their first order.
    """

    def __init__(
        self, grid: Any, hello: bytes, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._grid = grid
        self._hello = hello
        self._clock = clock
        self._numbers: dict[int, int] = {}  # of a node
        self._met: set[int] = set()  # nodes that have answered a greeting
        self._asked: dict[str, tuple[int, float]] = {}  # message -> node, until when
        self._sent: dict[str, int] = {}  # message -> device
        self._greetings, self._answers = Looks(grid), Looks(grid)
        self.greetings: dict[int, bytes] = {}  # what a device said of itself

    def online(self) -> set[int]:
        nodes = {node.node_id: node.name for node in self._grid.get_nodes()}
        waiting = {node for node, _ in self._asked.values()}
        fresh = [node for node in nodes if node not in self._met and node not in waiting]
        if fresh:
            letters = [self._message(node, self._hello, "hello", HELLO_SECONDS) for node in fresh]
            until = self._clock() + HELLO_SECONDS
            for node, identity in zip(fresh, self._grid.push_messages(letters), strict=True):
                if identity:
                    self._asked[identity] = (node, until)
        self._greeted(nodes)
        self._numbers |= {node: int(name) for node, name in nodes.items() if name.isdigit()}
        return {self._numbers[node] for node in nodes if node in self._numbers}

    def _greeted(self, nodes: Mapping[int, str]) -> None:
        if not self._asked:
            return
        for message in self._greetings.messages(list(self._asked)):
            node, _ = self._asked.pop(message.metadata.reply_to_message_id, (None, 0.0))
            if node is None or message.has_error():
                continue
            self._met.add(node)
            named = nodes.get(node) or ""
            try:
                raw = body(message)
                said = named if named.isdigit() else message.content["device"]["number"]
                claimed = int(said)
            except Exception as error:  # a message of another form
                log.warning("node %d greets with %s; left alone", node, type(error).__name__)
                continue
            for other in [other for other, number in self._numbers.items() if number == claimed]:
                del self._numbers[other]  # it was started anew
            self._numbers[node] = claimed
            self.greetings[claimed] = raw
        now = self._clock()
        for identity in [key for key, (_, until) in self._asked.items() if until < now]:
            del self._asked[identity]

    def messages(
        self, letters: Mapping[int, bytes], *, round: int, seconds: float
    ) -> dict[int, Message]:
        """Return the message to each device that is known."""
        nodes = {number: node for node, number in self._numbers.items()}
        return {
            device: self._message(nodes[device], letter, str(round), seconds)
            for device, letter in letters.items()
            if device in nodes
        }

    def send(self, letters: Mapping[int, bytes], *, round: int, seconds: float) -> None:
        messages = self.messages(letters, round=round, seconds=seconds)
        self._sent = {}
        self._answers.forget()
        for device, identity in zip(messages, self._pushed([*messages.values()]), strict=True):
            if identity:
                self._sent[identity] = device

    def _pushed(self, messages: list[Message]) -> Iterable[str]:
        found: Iterable[str] = self._grid.push_messages(messages) if messages else []
        return found

    def replies(self) -> list[Reply]:
        if not self._sent:
            return []
        found = []
        for message in self._answers.messages(list(self._sent)):
            device = self._sent.pop(message.metadata.reply_to_message_id, None)
            if device is None:
                continue
            if message.has_error():
                found.append(Reply(device, None, str(message.error.reason)))
                continue
            try:
                found.append(Reply(device, body(message)))
            except Exception as error:  # a message of another form
                found.append(Reply(device, b"", type(error).__name__))
        return found

    def _message(self, node: int, raw: bytes, group: str, seconds: float) -> Message:
        return Message(
            content(raw),
            dst_node_id=node,
            message_type=MessageType.TRAIN,
            ttl=seconds,
            group_id=group,
        )
