"""The server's transport of federated rounds over gRPC: one stream per device, and no polling."""

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from secrets import token_hex
from typing import IO

from pliant.deploy.grpc.channel import (
    FRAME_OVERHEAD,
    RECORD_BYTES,
    RECORD_OVERHEAD,
    StreamOwner,
)
from pliant.deploy.grpc.chunks import Buffers, open_spooled
from pliant.deploy.grpc.envelopes import (
    MAX_ENVELOPE_BYTES,
    MAX_REASON_CHARS,
    Envelope,
    open_envelope,
    seal,
)
from pliant.deploy.grpc.server import GrpcServer
from pliant.deploy.messages import AnyMessage, list_buffers
from pliant.deploy.server.replies import RawReply
from pliant.deploy.settings import HELLO_BYTES

log = logging.getLogger("pliant")

HELLO_SECONDS = 60.0
GONE_SECONDS = 60.0  # offline, after which no reply is waited for
ID_BYTES = 16
ENVELOPE_BYTES = 55  # of a request or a reply, without a reason


class RoundChannel:
    """The requests to one device and its replies, over a sequence of streams.

    A hello precedes the first request, so that the device has built the network, and knows how
    large a request may be. What is not answered when a stream breaks is sent again on the next. A
    reply stays in the file that it came in until it is taken.
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
        self._lock = threading.RLock()
        self._stream = StreamOwner()
        self._greeted_process: str | None = None
        self._pending: dict[str, Buffers] = {}  # sealed requests by id, a hello first
        self._hello_id = self._request_id = ""
        self.hello_reply: bytes | None = None
        self._reply: IO[bytes] | str | None = None  # or why there is none
        self._offline_since = clock()
        self._is_run_over = False

    # called by the training thread

    @property
    def is_online(self) -> bool:
        """Return whether the device has a stream and has answered the hello."""
        with self._lock:
            return self._stream.process is not None and self._hello_id not in self._pending

    def send_request(self, message: AnyMessage, seconds: float) -> None:
        """Send a request, and stop waiting for the reply to an earlier one."""
        with self._lock:
            self.forget_request()
            self._request_id = token_hex(ID_BYTES)
            envelope = Envelope(self._request_id, seconds=seconds)
            self._pending[self._request_id] = seal(envelope), *list_buffers(message)
            self._stream.wake()

    def forget_request(self) -> None:
        """Stop waiting for a reply."""
        with self._lock:
            self._pending.pop(self._request_id, None)
            self._drop_reply()

    def _drop_reply(self) -> None:
        if self._reply is not None and not isinstance(self._reply, str):
            self._reply.close()
        self._reply = None

    @property
    def is_lost(self) -> bool:
        """Return whether a reply is missing and the device is offline."""
        with self._lock:
            return self._request_id in self._pending and self._stream.process is None

    def take_reply(self) -> RawReply | None:
        """Return the reply if it has come; a failure if the device is gone for good."""
        with self._lock:
            if self.is_lost and self._clock() - self._offline_since > GONE_SECONDS:
                self._end_request(f"it was offline for {GONE_SECONDS:g} s")
            reply, self._reply = self._reply, None
        if reply is None:
            return None
        if isinstance(reply, str):
            return RawReply(self.device, None, reply)
        with reply:
            return RawReply(self.device, reply.read())

    def _end_request(self, reason: str) -> None:
        if self._pending.pop(self._request_id, None) is not None:
            self._reply = reason

    def close(self) -> None:
        with self._lock:
            self._is_run_over = True
            self._drop_reply()
            self._stream.wake()

    # called by the thread of all streams

    def attach(self, process: str, wake: Callable[[], None]) -> int | None:
        with self._lock:
            stream_id = self._stream.attach(process, wake)
            if stream_id is not None and process != self._greeted_process:
                self._greeted_process = process
                self._greet()
            return stream_id

    def _greet(self) -> None:
        requests = {key: raw for key, raw in self._pending.items() if key != self._hello_id}
        self._hello_id = token_hex(ID_BYTES)
        hello = Envelope(self._hello_id, is_hello=True, seconds=HELLO_SECONDS)
        self._pending = {self._hello_id: (seal(hello), self._hello), **requests}
        self._stream.wake()

    def detach(self, stream_id: int) -> None:
        with self._lock:
            if self._stream.detach(stream_id):
                self._offline_since = self._clock()
        self._on_change()

    def leave_round(self) -> None:
        with self._lock:
            self._end_request("its key was revoked")
        self._on_change()

    def iter_frames(self, stream_id: int) -> Iterator[Buffers | None]:
        sent: set[str] = set()  # on this stream
        while True:
            with self._lock:
                if stream_id != self._stream.stream_id or self._is_run_over:
                    return
                unsent = [key for key in self._pending if key not in sent]
                frame = self._pending[unsent[0]] if unsent else None
                sent.intersection_update(self._pending)
                sent.update(unsent[:1])
            yield frame

    def receive_frame(self, stream_id: int, frame: IO[bytes]) -> None:
        is_kept = False
        try:
            is_kept = self._receive(stream_id, open_envelope(frame), frame)
        finally:
            if not is_kept:
                frame.close()

    def _receive(self, stream_id: int, envelope: Envelope, frame: IO[bytes]) -> bool:
        """Accept a reply; return whether its file is kept until it is taken."""
        with self._lock:
            is_expected = envelope.id in self._pending and not self._is_run_over
            if stream_id != self._stream.stream_id or not is_expected:
                return False  # a reply to a request that was given up
            del self._pending[envelope.id]
            reason, is_reply = envelope.reason[:MAX_REASON_CHARS], envelope.id != self._hello_id
            if is_reply:
                self._reply = reason or frame
            elif reason:
                self._greet()
            else:
                self.hello_reply = frame.read(HELLO_BYTES)  # a longer one is not valid
                log.info("device %d joined", self.device)
        self._on_change()
        return is_reply and not reason


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
        folder: Path | None = None,  # for replies until they are merged
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
            open_file=partial(open_spooled, folder),
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
        self, requests: Mapping[int, AnyMessage], *, round: int, seconds: float, adds: bool = False
    ) -> None:
        for number, channel in self.channels.items():
            if number in requests:
                channel.send_request(requests[number], seconds)
            elif not adds:
                channel.forget_request()

    def find_lost_devices(self) -> set[int]:
        return {number for number, channel in self.channels.items() if channel.is_lost}

    def poll_replies(self) -> Iterator[RawReply]:
        """Yield the replies one by one, as each is read from its file when it is asked for."""
        for channel in self.channels.values():
            reply = channel.take_reply()
            if reply is not None:
                yield reply

    def count_carrier_bytes(self, size: int) -> int:
        records = -(-size // RECORD_BYTES) + 1  # of two frames
        return 2 * (FRAME_OVERHEAD + ENVELOPE_BYTES) + RECORD_OVERHEAD * records
