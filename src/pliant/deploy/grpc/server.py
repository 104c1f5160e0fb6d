"""The gRPC server of a split run: device streams, TLS, and proof of each device's key."""

import logging
import secrets
import threading
from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pliant.deploy.grpc import frames
from pliant.deploy.grpc.channel import DeviceChannel
from pliant.deploy.messages import MalformedMessage, decode_message, encode_message
from pliant.deploy.security import certificates
from pliant.extras import require

log = logging.getLogger("pliant")

GRPC_SERVICE, GRPC_METHOD = "pliant.Split", "Work"
HANDSHAKE_SECONDS = 20.0  # a device must prove its key within this time
KEEPALIVE_MS = 20_000  # between pings on a silent connection
PING_TIMEOUT_MS = 60_000  # the longest that a stream outlives its peer
SPARE_STREAMS = 8  # for streams about to be replaced or refused


@dataclass
class StreamRefused(Exception):
    """A stream is refused for a reason."""

    code: str
    reason: str
    is_logged: bool = False  # the log has this refusal already


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
        self._public_keys = None if keys is None else certificates.read_public_keys(keys)
        self._federation_name = certificates.INSECURE_FEDERATION
        if keys is not None:
            self._federation_name = certificates.read_federation_name(keys / "ca.crt")
        self._refused_processes: dict[int, str] = {}  # by device: the last duplicate
        handler = grpc.stream_stream_rpc_method_handler(self._handle_stream)  # bytes in, bytes out
        service = grpc.method_handlers_generic_handler(GRPC_SERVICE, {GRPC_METHOD: handler})
        self._server = grpc.server(
            ThreadPoolExecutor(2 * len(channels) + SPARE_STREAMS, "pliant-grpc"),
            handlers=(service,),
            options=[
                ("grpc.max_receive_message_length", max_message_bytes),
                ("grpc.max_send_message_length", -1),
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

    def _handle_stream(self, requests: Iterator[bytes], context: Any) -> Iterator[bytes]:
        timer = threading.Timer(HANDSHAKE_SECONDS, context.cancel)
        timer.daemon = True
        timer.start()
        try:
            channel, stream_id = yield from self._authenticate(requests)
        except StreamRefused as error:
            if not error.is_logged:
                log.warning("%s: %s", context.peer(), error.reason)
            context.abort(getattr(self._grpc.StatusCode, error.code), error.reason)
        finally:
            timer.cancel()
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

    def _authenticate(
        self, requests: Iterator[bytes]
    ) -> Generator[bytes, None, tuple[DeviceChannel, int]]:
        """Verify a device's identity; return its channel and the id of its stream."""
        hello = _receive_header(requests, frames.Hello)
        name, version = f"device {hello.device}", frames.PROTOCOL_VERSION
        if hello.version != version:
            reason = f"{name}: expected protocol version {version}, got {hello.version}"
            raise StreamRefused("FAILED_PRECONDITION", reason)
        nonce = secrets.token_bytes(32)
        yield encode_message(frames.Challenge(nonce, self._federation_name))
        proof = _receive_header(requests, frames.Proof)
        if self._public_keys is not None and not certificates.is_signature_valid(
            self._public_keys, proof.signature, nonce, self._federation_name, hello.device
        ):
            raise StreamRefused("UNAUTHENTICATED", f"{name}: expected a registered key")
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


def _receive_header(requests: Iterator[bytes], header_type: type[Any]) -> Any:
    try:
        header, _ = decode_message(next(requests), frames.DeviceHeader)
    except MalformedMessage as error:
        raise StreamRefused("INVALID_ARGUMENT", f"expected {error}") from None
    except Exception:  # gRPC raises a different class for each way of ending
        raise StreamRefused("CANCELLED", "the stream ended during the handshake") from None
    if not isinstance(header, header_type):
        name = type(header).__name__
        raise StreamRefused("INVALID_ARGUMENT", f"expected {header_type.__name__}, got {name}")
    return header
