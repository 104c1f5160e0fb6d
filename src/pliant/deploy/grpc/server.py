"""A server's gRPC port: device streams, TLS, and proof of each device's key.

One thread serves all streams, so that a device costs its connection and nothing else. The threads
of a run give it work through the devices' channels.
"""

import asyncio
import logging
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import IO, Any, NoReturn, Protocol

from msgspec import Struct

from pliant.deploy.grpc.chunks import (
    MAX_MESSAGE_BYTES,
    Buffers,
    FrameJoiner,
    FrameTooLarge,
    iter_chunks,
)
from pliant.deploy.grpc.event_loop import run_in_loop
from pliant.deploy.grpc.handshake import (
    GRPC_METHOD,
    GRPC_SERVICE,
    KEEPALIVE_MS,
    PING_TIMEOUT_MS,
    Authenticator,
    StreamRefused,
)
from pliant.deploy.grpc.health import MAX_WATCHERS, HealthService
from pliant.deploy.security import certificates
from pliant.deploy.security.enrolment import EnrolmentService
from pliant.deploy.security.registry import DeviceRegistry
from pliant.deploy.settings import MalformedMessage
from pliant.deploy.versions import DESCRIBE_CALL, ENROL_CALL, ENROL_HEADER, ServerKind
from pliant.extras import require

log = logging.getLogger("pliant")

HANDSHAKE_MS = 10_000  # for a TLS connection
IDLE_MS = 30_000  # of a connection without a call
MAX_HEADER_BYTES = 8192
CALLS_PER_CONNECTION = 16
WINDOW_BYTES = 128 * 1024  # that a device may send before they are read; 512 kB took more memory
SPARE_CALLS = 64  # for streams about to be replaced or refused, and those who ask what this is
SPARE_CONNECTIONS = 1024  # of those who have proved nothing yet
STOP_SECONDS = 2.0  # for devices to hear that the run is over
WATCH_SECONDS = 1.0  # between looks for revoked keys


class GrpcServerSetup(Struct, frozen=True):
    """The arguments of a server's process."""

    folder: str
    address: str  # to listen on
    keys: str | None


class StreamChannel(Protocol):
    """The server's end of a device's streams; none of these calls waits for anything."""

    device: int

    def attach(self, process: str, wake: Callable[[], None]) -> int | None:
        """Start a stream of a device's process and return its id; None if another one has it.

        `wake` is called, from any thread, when there may be something to send.
        """

    def detach(self, stream_id: int) -> None: ...

    def iter_frames(self, stream_id: int) -> Iterator[Buffers | None]:
        """Yield what to send on a stream until it is over, and None if there is nothing now.

        Raise `StreamRefused` if the device is refused.
        """

    def receive_frame(self, stream_id: int, frame: IO[bytes]) -> None:
        """Accept what a device has sent, and close it; raise `MalformedMessage` if not valid."""

    def leave_round(self) -> None:
        """Drop the device until it joins another round."""

    def close(self) -> None:
        """End the stream, as the run is over."""


@dataclass(eq=False)
class _DeviceStream:
    """A stream whose device has proved its key."""

    channel: StreamChannel
    stream_id: int
    key: certificates.PublicKey | None
    news: asyncio.Event  # there may be something to send
    revocation: asyncio.Future[None]  # fails when the key is revoked


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
        open_file: Callable[[], IO[bytes]] = BytesIO,  # for a frame that a device sends
    ) -> None:
        self._grpc: Any = require("grpc", "deploy")
        self._channels, self._open_file = channels, open_file
        self._max_frame_bytes = max_message_bytes
        self._registry, federation = None, certificates.INSECURE_FEDERATION
        self._enrolment: EnrolmentService | None = None
        if keys is not None:
            self._registry = DeviceRegistry(keys)
            self._enrolment = EnrolmentService(keys, self._registry)
            federation = certificates.read_federation_name(keys / "ca.crt")
        self._authenticator = Authenticator(self._registry, federation, kind)
        self._refused_processes: dict[int, str] = {}  # by device: the last duplicate
        self._streams: set[_DeviceStream] = set()
        self._enrolling = ThreadPoolExecutor(1, "pliant-enrol")  # it writes a file
        self._watcher: asyncio.Task[None] | None = None
        self.port: int = run_in_loop(self._open(address, keys))

    async def _open(self, address: str, keys: Path | None) -> int:
        """Make the server, which belongs to the event loop, and return its port."""
        grpc, devices = self._grpc, len(self._channels)
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
        self._health = HealthService(grpc)
        self._server = grpc.aio.server(
            handlers=(service, self._health.handler),
            options=[
                ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
                ("grpc.max_send_message_length", -1),
                ("grpc.max_metadata_size", MAX_HEADER_BYTES),
                ("grpc.max_concurrent_streams", CALLS_PER_CONNECTION),
                ("grpc.max_allowed_incoming_connections", 2 * devices + SPARE_CONNECTIONS),
                ("grpc.max_connection_idle_ms", IDLE_MS),
                ("grpc.server_handshake_timeout_ms", HANDSHAKE_MS),
                ("grpc.http2.bdp_probe", 0),  # else windows grow to megabytes of memory each
                ("grpc.http2.lookahead_bytes", WINDOW_BYTES),
                ("grpc.so_reuseport", 0),
                ("grpc.keepalive_time_ms", KEEPALIVE_MS),
                ("grpc.keepalive_timeout_ms", KEEPALIVE_MS // 2),
                ("grpc.http2.ping_timeout_ms", PING_TIMEOUT_MS),
                ("grpc.http2.min_ping_interval_without_data_ms", KEEPALIVE_MS // 4),
            ],
            maximum_concurrent_rpcs=2 * devices + SPARE_CALLS + MAX_WATCHERS,
        )
        try:
            if keys is None:
                port = int(self._server.add_insecure_port(address))
            else:
                pair = (keys / "server.key").read_bytes(), (keys / "server.pem").read_bytes()
                credentials = grpc.ssl_server_credentials([pair])
                port = int(self._server.add_secure_port(address, credentials))
        except RuntimeError as error:
            raise ValueError(f"Cannot listen at {address}: {error}") from None
        if not port:
            raise ValueError(f"Cannot listen at {address}")
        return port

    def start(self) -> None:
        run_in_loop(self._start())

    async def _start(self) -> None:
        await self._server.start()
        self._health.set_serving(True)
        if self._registry is not None:
            self._watcher = asyncio.create_task(self._watch_keys(self._registry))

    def close(self) -> None:
        """Tell all devices that the run is over, then stop."""
        for channel in self._channels.values():
            channel.close()
        run_in_loop(self._stop())
        self._enrolling.shutdown(wait=False)

    async def _stop(self) -> None:
        if self._watcher is not None:
            self._watcher.cancel()
        self._health.set_serving(False)
        await self._server.stop(STOP_SECONDS)

    async def _watch_keys(self, registry: DeviceRegistry) -> None:
        """End the streams whose keys are revoked, as soon as the registry says so."""
        version = registry.version
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            if registry.version == version:
                continue
            version = registry.version
            for stream in list(self._streams):
                try:
                    self._check_key(stream)
                except StreamRefused as refusal:
                    if not stream.revocation.done():
                        stream.revocation.set_exception(refusal)

    async def _describe(self, _: Any, context: Any) -> None:
        """Say what this server is, without reading anything; headers never wait for the peer."""
        context.set_trailing_metadata(self._authenticator.describe())

    async def _enrol(self, _: Any, context: Any) -> None:
        """Answer a device's enrolment, which is in its headers."""
        if self._enrolment is not None:
            header = str(dict(context.invocation_metadata()).get(ENROL_HEADER, ""))
            answer = await asyncio.get_running_loop().run_in_executor(
                self._enrolling, self._enrolment.answer, header, _get_address(context)
            )
            context.set_trailing_metadata([(ENROL_HEADER, answer)])

    async def _handle_stream(self, _: Any, context: Any) -> None:
        try:
            stream = self._authenticate(context)
        except StreamRefused as refusal:
            if not refusal.is_logged:
                log.warning("%s: %s", context.peer(), refusal.reason)
            await self._abort(context, refusal)
        channel = stream.channel
        self._streams.add(stream)
        work = [self._send_requests(stream, context), self._receive_replies(stream, context)]
        tasks = [stream.revocation, *map(asyncio.ensure_future, work)]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._streams.discard(stream)
            channel.detach(stream.stream_id)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        errors = [error for task in done if (error := task.exception()) is not None]
        for error in errors:
            if isinstance(error, StreamRefused):
                if error.code == "UNAUTHENTICATED":
                    log.warning("%s", error.reason)
                    channel.leave_round()
                await self._abort(context, error)
            # else the stream broke; the device will reconnect
            log.debug("device %s: its stream broke: %r", channel.device, error)

    async def _abort(self, context: Any, refusal: StreamRefused) -> NoReturn:
        await context.abort(getattr(self._grpc.StatusCode, refusal.code), refusal.reason)
        raise refusal  # not reached

    def _authenticate(self, context: Any) -> _DeviceStream:
        """Verify a device's identity and start its stream."""
        headers = dict(context.invocation_metadata())
        hello, key = self._authenticator.verify(headers, _get_address(context))
        name = f"device {hello.device}"
        if hello.device not in self._channels:
            reason = f"{name}: expected a number below {len(self._channels)}"
            raise StreamRefused("FAILED_PRECONDITION", reason)
        channel, news = self._channels[hello.device], asyncio.Event()
        loop = asyncio.get_running_loop()
        stream_id = channel.attach(hello.process, lambda: _call_soon(loop, news.set))
        if stream_id is None:
            is_logged = self._refused_processes.get(hello.device) == hello.process
            self._refused_processes[hello.device] = hello.process
            reason = f"{name}: expected one device with this number, got a second"
            raise StreamRefused("ALREADY_EXISTS", reason, is_logged=is_logged)
        return _DeviceStream(channel, stream_id, key, news, loop.create_future())

    def _check_key(self, stream: _DeviceStream) -> None:
        """Raise `StreamRefused` if the device's key is not accepted any more."""
        refusal = self._authenticator.find_revocation(stream.channel.device, stream.key)
        if refusal is not None:
            raise refusal

    async def _send_requests(self, stream: _DeviceStream, context: Any) -> None:
        """Send what the channel has to send, as fast as the device reads it."""
        for frame in stream.channel.iter_frames(stream.stream_id):
            if frame is None:
                await stream.news.wait()
                stream.news.clear()
                continue
            self._check_key(stream)
            for chunk in iter_chunks(*frame):
                await context.write(chunk)

    async def _receive_replies(self, stream: _DeviceStream, context: Any) -> None:
        """Pass a device's frames to its channel until the stream ends or its key is revoked."""
        channel = stream.channel
        joiner = FrameJoiner(lambda: self._max_frame_bytes, self._open_file)
        try:
            while (message := await context.read()) is not self._grpc.aio.EOF:
                frame = joiner.add(message)
                if frame is not None:
                    self._check_key(stream)
                    channel.receive_frame(stream.stream_id, frame)
        except MalformedMessage as error:
            reason = f"device {channel.device}: expected {error}"
            log.warning("%s", reason)
            is_large = isinstance(error, FrameTooLarge)
            code = "RESOURCE_EXHAUSTED" if is_large else "INVALID_ARGUMENT"
            raise StreamRefused(code, reason) from None
        finally:
            joiner.close()


def _call_soon(loop: asyncio.AbstractEventLoop, function: Callable[[], None]) -> None:
    with suppress(RuntimeError):  # the loop is closed
        loop.call_soon_threadsafe(function)


def _get_address(context: Any) -> str:
    """Return the address of a caller without its port."""
    address: str = context.peer().rpartition(":")[0]
    return address
