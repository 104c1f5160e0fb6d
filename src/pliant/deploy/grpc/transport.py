"""The server's transport of federated rounds over gRPC: one stream per device, and no polling."""

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from secrets import token_hex

from pliant.deploy.grpc.channel import (
    CHUNK_BYTES,
    CHUNK_OVERHEAD,
    FRAME_OVERHEAD,
    WAIT_SECONDS,
    StreamOwner,
)
from pliant.deploy.grpc.envelopes import (
    MAX_ENVELOPE_BYTES,
    MAX_REASON_CHARS,
    Envelope,
    open_envelope,
    seal,
)
from pliant.deploy.grpc.server import GrpcServer
from pliant.deploy.server.replies import RawReply

log = logging.getLogger("pliant")

HELLO_SECONDS = 60.0
GONE_SECONDS = 60.0  # offline, after which no reply is waited for
ID_BYTES = 16
ENVELOPE_BYTES = 55  # of a request or a reply, without a reason


class RoundChannel:
    """The requests to one device and its replies, over a sequence of streams.

    A hello precedes the first request, so that the device has built the network, and knows how
    large a request may be. What is not answered when a stream breaks is sent again on the next.
    """

    def __init__(
        self,
        device: int,
        hello: bytes,
        on_change: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.device, self._hello = device, hello
        self._on_change, self._clock = on_change, clock
        self._condition = threading.Condition()
        self._stream = StreamOwner()
        self._greeted_process: str | None = None
        self._pending: dict[str, bytes] = {}  # sealed requests by id, a hello first
        self._hello_id = self._request_id = ""
        self.hello_reply: bytes | None = None
        self._replies: list[RawReply] = []
        self._offline_since = clock()
        self._is_run_over = False

    # called by the training thread

    @property
    def is_online(self) -> bool:
        """Return whether the device has a stream and has answered the hello."""
        with self._condition:
            return self._stream.process is not None and self._hello_id not in self._pending

    def send_request(self, raw: bytes, seconds: float) -> None:
        """Send a request, and stop waiting for the reply to an earlier one."""
        with self._condition:
            self.forget_request()
            self._request_id = token_hex(ID_BYTES)
            self._pending[self._request_id] = seal(Envelope(self._request_id, seconds=seconds), raw)
            self._condition.notify_all()

    def forget_request(self) -> None:
        """Stop waiting for a reply."""
        with self._condition:
            self._pending.pop(self._request_id, None)
            self._replies = []

    @property
    def is_lost(self) -> bool:
        """Return whether a reply is missing and the device is offline."""
        with self._condition:
            return self._request_id in self._pending and self._stream.process is None

    def take_replies(self) -> list[RawReply]:
        """Return the reply if it has come; a failure if the device is gone for good."""
        with self._condition:
            if self.is_lost and self._clock() - self._offline_since > GONE_SECONDS:
                self._end_request(f"it was offline for {GONE_SECONDS:g} s")
            replies, self._replies = self._replies, []
            return replies

    def _end_request(self, reason: str) -> None:
        if self._pending.pop(self._request_id, None) is not None:
            self._replies.append(RawReply(self.device, None, reason))

    def close(self) -> None:
        with self._condition:
            self._is_run_over = True
            self._condition.notify_all()

    # called by the stream's threads

    def attach(self, process: str) -> int | None:
        with self._condition:
            stream_id = self._stream.attach(process)
            if stream_id is not None and process != self._greeted_process:
                self._greeted_process = process
                self._greet()
            self._condition.notify_all()
            return stream_id

    def _greet(self) -> None:
        requests = {key: raw for key, raw in self._pending.items() if key != self._hello_id}
        self._hello_id = token_hex(ID_BYTES)
        hello = Envelope(self._hello_id, is_hello=True, seconds=HELLO_SECONDS)
        self._pending = {self._hello_id: seal(hello, self._hello), **requests}

    def detach(self, stream_id: int) -> None:
        with self._condition:
            if self._stream.detach(stream_id):
                self._offline_since = self._clock()
            self._condition.notify_all()
        self._on_change()

    def leave_round(self) -> None:
        with self._condition:
            self._end_request("its key was revoked")
        self._on_change()

    def iter_frames(self, stream_id: int) -> Iterator[bytes | None]:
        sent: set[str] = set()  # on this stream

        def is_over() -> bool:
            return stream_id != self._stream.stream_id or self._is_run_over

        def find_unsent() -> list[str]:
            return [key for key in self._pending if key not in sent]

        while True:
            with self._condition:
                self._condition.wait_for(lambda: is_over() or find_unsent(), WAIT_SECONDS)
                if is_over():
                    return
                unsent = find_unsent()
                frame = self._pending[unsent[0]] if unsent else None
                sent.intersection_update(self._pending)
                sent.update(unsent[:1])
            yield frame

    def receive_frame(self, stream_id: int, raw: bytes) -> None:
        envelope, body = open_envelope(raw)
        with self._condition:
            if stream_id != self._stream.stream_id or envelope.id not in self._pending:
                return  # a reply to a request that was given up
            del self._pending[envelope.id]
            reason = envelope.reason[:MAX_REASON_CHARS]
            if envelope.id != self._hello_id:
                self._replies.append(RawReply(self.device, None if reason else body, reason))
            elif reason:
                self._greet()
            else:
                self.hello_reply = body
                log.info("device %d joined", self.device)
            self._condition.notify_all()
        self._on_change()


class GrpcTransport:
    """Reach devices through their gRPC streams."""

    def __init__(
        self,
        hello: bytes,
        devices: int,
        *,
        address: str,  # HOST:PORT
        keys: Path | None,
        max_reply_bytes: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._news = threading.Event()
        self.channels = {
            number: RoundChannel(number, hello, self._news.set, clock) for number in range(devices)
        }
        self._server = GrpcServer(
            self.channels,
            address=address,
            keys=keys,
            max_message_bytes=max_reply_bytes + MAX_ENVELOPE_BYTES,
            kind="federated_grpc",
        )
        self.port = self._server.port

    def start(self) -> None:
        self._server.start()

    def close(self) -> None:
        self._server.close()

    def wait(self, seconds: float) -> None:
        """Wait until a device joins, leaves or replies, or the time is over."""
        self._news.wait(seconds)
        self._news.clear()

    @property
    def hello_replies(self) -> dict[int, bytes]:
        hellos = {number: channel.hello_reply for number, channel in self.channels.items()}
        return {number: raw for number, raw in hellos.items() if raw is not None}

    def find_online_devices(self) -> set[int]:
        return {number for number, channel in self.channels.items() if channel.is_online}

    def send(
        self, requests: Mapping[int, bytes], *, round: int, seconds: float, adds: bool = False
    ) -> None:
        for number, channel in self.channels.items():
            if number in requests:
                channel.send_request(requests[number], seconds)
            elif not adds:
                channel.forget_request()

    def find_lost_devices(self) -> set[int]:
        return {number for number, channel in self.channels.items() if channel.is_lost}

    def poll_replies(self) -> list[RawReply]:
        return [reply for channel in self.channels.values() for reply in channel.take_replies()]

    def count_carrier_bytes(self, size: int) -> int:
        chunks = -(-size // CHUNK_BYTES) + 1  # of two frames
        return 2 * (FRAME_OVERHEAD + ENVELOPE_BYTES) + CHUNK_OVERHEAD * chunks
