"""A server's gRPC port: device streams, TLS, and proof of each device's key."""

import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

from msgspec import Struct

from pliant.deploy.grpc.handshake import (
    GRPC_METHOD,
    GRPC_SERVICE,
    KEEPALIVE_MS,
    PING_TIMEOUT_MS,
    Authenticator,
    StreamRefused,
)
from pliant.deploy.security import certificates
from pliant.deploy.security.enrolment import EnrolmentService
from pliant.deploy.security.registry import DeviceRegistry
from pliant.deploy.settings import MalformedMessage
from pliant.deploy.versions import DESCRIBE_CALL, ENROL_CALL, ENROL_HEADER, ServerKind
from pliant.extras import require

log = logging.getLogger("pliant")

HANDSHAKE_MS = 10_000  # for a TLS connection
MAX_HEADER_BYTES = 8192
SPARE_STREAMS = 8  # for streams about to be replaced or refused


class GrpcServerSetup(Struct, frozen=True):
    """The arguments of a server's process."""

    folder: str
    address: str  # to listen on
    keys: str | None


class StreamChannel(Protocol):
    """The server's end of a device's streams."""

    device: int

    def attach(self, process: str) -> int | None:
        """Start a stream of a device's process and return its id; None if another one has it."""

    def detach(self, stream_id: int) -> None: ...

    def iter_frames(self, stream_id: int) -> Iterator[bytes | None]:
        """Yield what to send on a stream until it is over, and None after a second of silence.

        Raise `StreamRefused` if the device is refused.
        """

    def receive_frame(self, stream_id: int, raw: bytes) -> None:
        """Accept what a device has sent; raise `MalformedMessage` if it is not valid."""

    def leave_round(self) -> None:
        """Drop the device until it joins another round."""

    def close(self) -> None:
        """End the stream, as the run is over."""


class GrpcServer:
    """Accept device streams and connect each to the device's channel."""

    def __init__(
        self,
        channels: Mapping[int, StreamChannel],
        *,
        address: str,  # HOST:PORT
        keys: Path | None,
        max_message_bytes: int,
        kind: ServerKind = "split",
    ) -> None:
        grpc: Any = require("grpc", "deploy")
        self._grpc, self._channels = grpc, channels
        registry, federation = None, certificates.INSECURE_FEDERATION
        self._enrolment: EnrolmentService | None = None
        if keys is not None:
            registry = DeviceRegistry(keys)
            self._enrolment = EnrolmentService(keys, registry)
            federation = certificates.read_federation_name(keys / "ca.crt")
        self._authenticator = Authenticator(registry, federation, kind)
        self._refused_processes: dict[int, str] = {}  # by device: the last duplicate
        functions = {
            DESCRIBE_CALL.rpartition("/")[2]: self._describe,
            ENROL_CALL.rpartition("/")[2]: self._enrol,
            GRPC_METHOD: self._handle_stream,
        }
        handlers = {  # bytes in, bytes out
            name: grpc.stream_stream_rpc_method_handler(function)
            for name, function in functions.items()
        }
        service = grpc.method_handlers_generic_handler(GRPC_SERVICE, handlers)
        self._server = grpc.server(
            ThreadPoolExecutor(2 * len(channels) + SPARE_STREAMS, "pliant-grpc"),
            handlers=(service,),
            options=[
                ("grpc.max_receive_message_length", max_message_bytes),
                ("grpc.max_send_message_length", -1),
                ("grpc.max_metadata_size", MAX_HEADER_BYTES),
                ("grpc.server_handshake_timeout_ms", HANDSHAKE_MS),
                ("grpc.so_reuseport", 0),
                ("grpc.keepalive_time_ms", KEEPALIVE_MS),
                ("grpc.keepalive_timeout_ms", KEEPALIVE_MS // 2),
                ("grpc.http2.ping_timeout_ms", PING_TIMEOUT_MS),
                ("grpc.http2.min_ping_interval_without_data_ms", KEEPALIVE_MS // 4),
            ],
            maximum_concurrent_rpcs=2 * len(channels) + SPARE_STREAMS,
        )
        try:
            if keys is None:
                self.port = int(self._server.add_insecure_port(address))
            else:
                pair = (keys / "server.key").read_bytes(), (keys / "server.pem").read_bytes()
                credentials = grpc.ssl_server_credentials([pair])
                self.port = int(self._server.add_secure_port(address, credentials))
        except RuntimeError as error:
            raise ValueError(f"Cannot listen at {address}: {error}") from None
        if not self.port:
            raise ValueError(f"Cannot listen at {address}")

    def start(self) -> None:
        self._server.start()

    def close(self) -> None:
        """Tell all devices that the run is over, then stop."""
        for channel in self._channels.values():
            channel.close()
        self._server.stop(2.0).wait()

    def _describe(self, requests: Iterator[bytes], context: Any) -> Iterator[bytes]:
        """Say what this server is, without reading anything; headers never wait for the peer."""
        context.set_trailing_metadata(self._authenticator.describe())
        return iter(())

    def _enrol(self, requests: Iterator[bytes], context: Any) -> Iterator[bytes]:
        """Answer a device's enrolment, which is in its headers."""
        if self._enrolment is not None:
            header = dict(context.invocation_metadata()).get(ENROL_HEADER, "")
            answer = self._enrolment.answer(str(header), _get_address(context))
            context.set_trailing_metadata([(ENROL_HEADER, answer)])
        return iter(())

    def _handle_stream(self, requests: Iterator[bytes], context: Any) -> Iterator[bytes]:
        try:
            channel, stream_id, key = self._authenticate(context)
        except StreamRefused as error:
            if not error.is_logged:
                log.warning("%s: %s", context.peer(), error.reason)
            context.abort(getattr(self._grpc.StatusCode, error.code), error.reason)
        refusals: list[StreamRefused] = []
        context.add_callback(lambda: channel.detach(stream_id))

        def check_key() -> None:
            refusal = self._authenticator.find_revocation(channel.device, key)
            if refusal is not None:
                raise refusal

        reader = threading.Thread(
            target=self._receive_replies,
            args=(requests, channel, stream_id, check_key, refusals),
            daemon=True,
        )
        reader.start()
        try:
            for frame in channel.iter_frames(stream_id):
                check_key()
                if not context.is_active():
                    break
                if frame is not None:
                    yield frame
        except StreamRefused as refusal:
            refusals.append(refusal)
        if refusals:
            if refusals[0].code == "UNAUTHENTICATED":
                log.warning("%s", refusals[0].reason)
                channel.leave_round()
            channel.detach(stream_id)
            context.abort(getattr(self._grpc.StatusCode, refusals[0].code), refusals[0].reason)

    def _authenticate(
        self, context: Any
    ) -> tuple[StreamChannel, int, certificates.PublicKey | None]:
        """Verify a device's identity; return its channel, the id of its stream and its key."""
        headers = dict(context.invocation_metadata())
        hello, key = self._authenticator.verify(headers, _get_address(context))
        name = f"device {hello.device}"
        if hello.device not in self._channels:
            reason = f"{name}: expected a number below {len(self._channels)}"
            raise StreamRefused("FAILED_PRECONDITION", reason)
        channel = self._channels[hello.device]
        stream_id = channel.attach(hello.process)
        if stream_id is None:
            is_logged = self._refused_processes.get(hello.device) == hello.process
            self._refused_processes[hello.device] = hello.process
            reason = f"{name}: expected one device with this number, got a second"
            raise StreamRefused("ALREADY_EXISTS", reason, is_logged=is_logged)
        return channel, stream_id, key

    def _receive_replies(
        self,
        requests: Iterator[bytes],
        channel: StreamChannel,
        stream_id: int,
        check_key: Callable[[], None],
        refusals: list[StreamRefused],
    ) -> None:
        """Pass a device's frames to its channel until the stream ends or its key is revoked."""
        try:
            for raw in requests:
                check_key()
                channel.receive_frame(stream_id, raw)
        except MalformedMessage as error:
            reason = f"device {channel.device}: expected {error}"
            log.warning("%s", reason)
            refusals.append(StreamRefused("INVALID_ARGUMENT", reason))
        except StreamRefused as refusal:
            refusals.append(refusal)
        except Exception:  # the stream broke; the device will reconnect
            log.debug("device %s: its stream broke", channel.device)
        channel.detach(stream_id)


def _get_address(context: Any) -> str:
    """Return the address of a caller without its port."""
    address: str = context.peer().rpartition(":")[0]
    return address
