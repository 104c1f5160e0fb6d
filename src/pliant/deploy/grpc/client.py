"""A device's connection to a server over gRPC: authenticate, pass frames on, reconnect.

Importing this does not load torch.
"""

import errno
import logging
import queue
import threading
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from pliant.deploy.device.heartbeat import Heartbeat
from pliant.deploy.grpc.chunks import MAX_MESSAGE_BYTES, FrameJoiner, iter_chunks
from pliant.deploy.grpc.handshake import (
    GRPC_METHOD,
    GRPC_SERVICE,
    KEEPALIVE_MS,
    PING_TIMEOUT_MS,
    StreamHello,
    make_hello,
)
from pliant.deploy.security.probe import detect_protocol, parse_server_address
from pliant.deploy.settings import (
    HELLO_BYTES,
    WAITS_FOR_APPROVAL,
    MalformedMessage,
    ServerChanged,
    ServerRefusal,
)
from pliant.deploy.versions import DESCRIBE_CALL, ServerKind
from pliant.extras import require
from pliant.rng import rng_stream

log = logging.getLogger("pliant")

FIRST_RETRY_SECONDS, MAX_RETRY_SECONDS = 0.1, 5.0  # the delay doubles in between
DESCRIBE_SECONDS = 30.0  # for the server to say what it is
MAX_DUPLICATE_RETRIES = 30  # takes longer than the server keeps a dead stream
DECLINED_RETRY_SECONDS = 30.0  # before checking the owner's limits again
MAX_OUTGOING_FRAMES = 20  # more than a server leaves unanswered
DUPLICATE_STATUS = "ALREADY_EXISTS"
FATAL_STATUSES = ("UNAUTHENTICATED", "FAILED_PRECONDITION", "INVALID_ARGUMENT", "UNIMPLEMENTED")


class TrainingDeclined(Exception):
    """The owner's limits do not allow training now."""


class DeviceStream:
    """A device's stream to the server, to send frames on."""

    def __init__(self) -> None:
        self.outgoing: queue.Queue[bytes | None] = queue.Queue(MAX_OUTGOING_FRAMES)
        self.call: Any = None

    def send(self, frame: bytes) -> None:
        self.outgoing.put(frame)

    def iter_outgoing(self) -> Iterator[bytes]:
        """Yield the messages of what is sent, until the stream is closed."""
        for frame in iter(self.outgoing.get, None):
            yield from iter_chunks(frame)

    def close(self) -> None:
        if self.call is not None:
            self.call.cancel()
        with suppress(queue.Full):  # then its reader notices the end without it
            self.outgoing.put_nowait(None)


class StreamDevice(Protocol):
    """A device that handles the frames of its streams."""

    number: int

    @property
    def kind(self) -> ServerKind:
        """Return the kind of server that it understands."""

    @property
    def max_message_bytes(self) -> int:
        """Return the size that no valid frame exceeds, or 0 if the network is not known yet."""

    def handle_frame(self, raw: bytes, stream: DeviceStream) -> bool:
        """Handle a frame of the server; return whether the stream goes on."""


@dataclass
class GrpcClient:
    """Keep a device connected until it is stopped or refused."""

    device: StreamDevice
    server: str
    process: str  # stays the same when this is restarted after a crash
    ca: Path | None = None
    key: Path | None = None
    heartbeat: Heartbeat | None = None

    def __post_init__(self) -> None:
        self._grpc: Any = require("grpc", "deploy")
        self._address = parse_server_address(self.server, self.ca, self.key)
        self._stop = threading.Event()
        self._stream: DeviceStream | None = None
        self._attempts = 0  # since the server last accepted this device

    def stop(self) -> None:
        self._stop.set()
        if self._stream is not None:
            self._stream.close()

    def run(self) -> None:
        """Serve requests until stopped; raise `ServerRefusal` if the server refuses this device."""
        while not self._stop.is_set():
            try:
                self._run_stream()
            except TrainingDeclined as reason:
                log.warning("device %s does not train: %s", self.device.number, reason)
                self._stop.wait(DECLINED_RETRY_SECONDS)
            except MalformedMessage as error:
                log.warning("device %s: expected %s; reconnecting", self.device.number, error)
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                    raise
                log.warning("device %s waits for disk space: %s", self.device.number, error)
                self._stop.wait(DECLINED_RETRY_SECONDS)
            except self._grpc.RpcError as error:
                self._handle_rpc_error(error)
            self._stop.wait(self._compute_retry_delay())
            self._attempts += 1

    def _compute_retry_delay(self) -> float:
        """Return the seconds to wait, with jitter so that devices spread out."""
        jitter = 0.5 + rng_stream(self.device.number, "dial", self._attempts).random() / 2
        delay = min(MAX_RETRY_SECONDS, FIRST_RETRY_SECONDS * 2 ** min(self._attempts, 10))
        return float(delay * jitter)

    def _handle_rpc_error(self, error: Any) -> None:
        code = error.code().name
        if code == DUPLICATE_STATUS and self._attempts < MAX_DUPLICATE_RETRIES:
            if not self._attempts:
                log.warning("%s; retrying for a minute", error.details())
            return  # it may be this device, before its machine lost power
        if WAITS_FOR_APPROVAL in (error.details() or ""):
            if not self._attempts:
                log.warning("%s; retrying", error.details())
            return
        if code in (*FATAL_STATUSES, DUPLICATE_STATUS):
            raise ServerRefusal(f"{self.server} refuses: {error.details()}")
        if self._attempts and not self._stop.is_set():
            try:
                kind = detect_protocol(*self._address, self.ca)
            except PermissionError:
                raise
            except OSError:
                return  # the server is not up yet, or is down
            if kind != self.device.kind:
                raise ServerChanged(f"{self.server} now serves a {kind} run")

    def _open_channel(self) -> Any:
        options = [
            ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
            ("grpc.max_send_message_length", -1),
            ("grpc.keepalive_time_ms", KEEPALIVE_MS),
            ("grpc.keepalive_timeout_ms", KEEPALIVE_MS // 2),
            ("grpc.http2.ping_timeout_ms", PING_TIMEOUT_MS),
            ("grpc.http2.max_pings_without_data", 0),  # unlimited; 2 would hide dead peers
            ("grpc.use_local_subchannel_pool", 1),  # a new channel connects at once
            ("grpc.enable_http_proxy", 0),
        ]
        if self.ca is None:
            return self._grpc.insecure_channel(self.server, options)
        credentials = self._grpc.ssl_channel_credentials(self.ca.read_bytes())
        return self._grpc.secure_channel(self.server, credentials, options)

    def _run_stream(self) -> None:
        self._stream = stream = DeviceStream()
        joiner = FrameJoiner(lambda: max(HELLO_BYTES, self.device.max_message_bytes))
        with self._open_channel() as channel:
            open_stream = channel.stream_stream(f"/{GRPC_SERVICE}/{GRPC_METHOD}")
            stream.call = open_stream(stream.iter_outgoing(), metadata=self._greet(channel))
            try:
                for message in stream.call:
                    frame = joiner.add(message)
                    if frame is None:
                        continue
                    with self.heartbeat.working() if self.heartbeat else nullcontext():
                        if self._stop.is_set():
                            return
                        is_open = self.device.handle_frame(frame.read(), stream)
                    self._attempts = 0
                    if not is_open:
                        return
            finally:
                stream.close()

    def _greet(self, channel: Any) -> list[tuple[str, str | bytes]]:
        """Ask the server what it is; return the headers that prove this device's key."""
        describe = channel.stream_stream(DESCRIBE_CALL)
        call = describe(iter(()), timeout=DESCRIBE_SECONDS)
        for _ in call:
            pass  # everything is in the headers
        hello = StreamHello(self.device.number, self.process)
        try:
            return make_hello(dict(call.trailing_metadata()), hello, self.ca, self.key)
        except ValueError as error:
            raise ServerRefusal(f"{self.server}: {error}") from None
