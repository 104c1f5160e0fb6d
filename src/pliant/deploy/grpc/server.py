"""The gRPC server of a split run: device streams, TLS, and proof of each device's key."""

import logging
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from pliant.deploy.grpc import frames
from pliant.deploy.grpc.channel import DeviceChannel
from pliant.deploy.grpc.handshake import Authenticator, StreamRefused
from pliant.deploy.messages import MalformedMessage, decode_message, encode_message
from pliant.deploy.security import certificates
from pliant.deploy.versions import DESCRIBE_CALL
from pliant.extras import require

log = logging.getLogger("pliant")

GRPC_SERVICE, GRPC_METHOD = "pliant.Split", "Work"
HANDSHAKE_MS = 10_000  # for a TLS connection
MAX_HEADER_BYTES = 8192
KEEPALIVE_MS = 20_000  # between pings on a silent connection
PING_TIMEOUT_MS = 60_000  # the longest that a stream outlives its peer
SPARE_STREAMS = 8  # for streams about to be replaced or refused


class GrpcServer:
    """Accept device streams and connect each to the device's channel."""

    def __init__(
        self,
        channels: dict[int, DeviceChannel],
        experiment: object,  # as plain data
        *,
        address: str,  # HOST:PORT
        keys: Path | None,
        max_message_bytes: int,
    ) -> None:
        grpc: Any = require("grpc", "deploy")
        self._grpc, self._channels, self._experiment = grpc, channels, experiment
        public_keys, federation = None, certificates.INSECURE_FEDERATION
        if keys is not None:
            public_keys = certificates.read_public_keys(keys)
            federation = certificates.read_federation_name(keys / "ca.crt")
        self._authenticator = Authenticator(public_keys, federation)
        self._refused_processes: dict[int, str] = {}  # by device: the last duplicate
        functions = {
            DESCRIBE_CALL.rpartition("/")[2]: self._describe,
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

    def _handle_stream(self, requests: Iterator[bytes], context: Any) -> Iterator[bytes]:
        try:
            channel, stream_id = self._authenticate(context)
        except StreamRefused as error:
            if not error.is_logged:
                log.warning("%s: %s", context.peer(), error.reason)
            context.abort(getattr(self._grpc.StatusCode, error.code), error.reason)
        refusals: list[StreamRefused] = []
        context.add_callback(lambda: channel.detach(stream_id))
        reader = threading.Thread(
            target=self._receive_replies, args=(requests, channel, stream_id, refusals), daemon=True
        )
        reader.start()
        epoch: str | None = None
        while context.is_active():
            frame, epoch = channel.get_next_frame(stream_id, epoch, self._experiment, timeout=1.0)
            if frame is not None:
                yield frame
            if epoch is None:
                break
        if refusals:
            context.abort(getattr(self._grpc.StatusCode, refusals[0].code), refusals[0].reason)
        if channel.is_run_over:
            yield encode_message(frames.RunFinished())

    def _authenticate(self, context: Any) -> tuple[DeviceChannel, int]:
        """Verify a device's identity; return its channel and the id of its stream."""
        address = context.peer().rpartition(":")[0]
        hello = self._authenticator.verify(dict(context.invocation_metadata()), address)
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
        return channel, stream_id

    def _receive_replies(
        self,
        requests: Iterator[bytes],
        channel: DeviceChannel,
        stream_id: int,
        refusals: list[StreamRefused],
    ) -> None:
        """Pass a device's frames to its channel until the stream ends."""
        try:
            for raw in requests:
                channel.count_received(len(raw))
                header, tensors = decode_message(raw, frames.DeviceHeader)
                if isinstance(header, frames.Ready):
                    channel.mark_ready(stream_id, header.epoch, header.done_up_to)
                elif isinstance(header, frames.SplitReply):
                    channel.receive_reply(stream_id, header, tensors)
                else:
                    raise MalformedMessage(f"a reply, got {type(header).__name__}")
        except MalformedMessage as error:
            reason = f"device {channel.device}: expected {error}"
            log.warning("%s", reason)
            refusals.append(StreamRefused("INVALID_ARGUMENT", reason))
        except Exception:  # the stream broke; the device will reconnect
            log.debug("device %s: its stream broke", channel.device)
        channel.detach(stream_id)
