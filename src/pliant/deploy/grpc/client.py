"""A device's connection to the server of a split run: authenticate, reply, reconnect.

The process of a split device is `python -m pliant.deploy.grpc.client SETUP`.
"""

import errno
import logging
import queue
import threading
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pliant import runtime
from pliant.deploy.device.heartbeat import Heartbeat
from pliant.deploy.device.host import DeviceSetup
from pliant.deploy.grpc import frames
from pliant.deploy.grpc.channel import MAX_PENDING_REQUESTS
from pliant.deploy.grpc.device import SplitDevice, TrainingDeclined
from pliant.deploy.grpc.handshake import StreamHello, make_hello
from pliant.deploy.grpc.server import (
    GRPC_METHOD,
    GRPC_SERVICE,
    KEEPALIVE_MS,
    PING_TIMEOUT_MS,
)
from pliant.deploy.messages import MalformedMessage, decode_message
from pliant.deploy.security.probe import detect_protocol, parse_server_address
from pliant.deploy.settings import (
    HELLO_BYTES,
    WAITS_FOR_APPROVAL,
    ServerChanged,
    ServerRefusal,
    run_process,
)
from pliant.deploy.versions import DESCRIBE_CALL
from pliant.extras import require
from pliant.rng import rng_stream

log = logging.getLogger("pliant")

FIRST_RETRY_SECONDS, MAX_RETRY_SECONDS = 0.1, 5.0  # the delay doubles in between
DESCRIBE_SECONDS = 30.0  # for the server to say what it is
MAX_DUPLICATE_RETRIES = 30  # takes longer than the server keeps a dead stream
DECLINED_RETRY_SECONDS = 30.0  # before checking the owner's limits again
DUPLICATE_STATUS = "ALREADY_EXISTS"
FATAL_STATUSES = ("UNAUTHENTICATED", "FAILED_PRECONDITION", "INVALID_ARGUMENT", "UNIMPLEMENTED")


@dataclass
class GrpcClient:
    """Keep a device connected until it is stopped or refused."""

    device: SplitDevice
    server: str
    process: str  # stays the same when this is restarted after a crash
    ca: Path | None = None
    key: Path | None = None
    heartbeat: Heartbeat | None = None

    def __post_init__(self) -> None:
        self._grpc: Any = require("grpc", "deploy")
        self._address = parse_server_address(self.server, self.ca, self.key)
        self._stop = threading.Event()
        self._call: Any = None
        self._attempts = 0  # since the server last accepted this device
        self._max_bytes = HELLO_BYTES  # until the network is known

    def stop(self) -> None:
        self._stop.set()
        if self._call is not None:
            self._call.cancel()

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
            if kind != "split":
                raise ServerChanged(f"{self.server} now serves a {kind} run")

    def _open_channel(self) -> Any:
        options = [
            ("grpc.max_receive_message_length", self._max_bytes),
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
        outgoing: queue.Queue[bytes | None] = queue.Queue(2 * MAX_PENDING_REQUESTS + 4)
        with self._open_channel() as channel:
            open_stream = channel.stream_stream(f"/{GRPC_SERVICE}/{GRPC_METHOD}")
            self._call = open_stream(iter(outgoing.get, None), metadata=self._greet(channel))
            try:
                for raw in self._call:
                    with self.heartbeat.working() if self.heartbeat else nullcontext():
                        if self._stop.is_set() or not self._handle_frame(raw, outgoing):
                            return
            finally:
                self._call.cancel()
                outgoing.put(None)

    def _handle_frame(self, raw: bytes, outgoing: "queue.Queue[bytes | None]") -> bool:
        """Handle a frame; return whether the run continues."""
        header, tensors = decode_message(raw, frames.ServerHeader)
        if isinstance(header, frames.SplitRequest):
            frame = self.device.handle_request(header, tensors)
            if frame is not None:
                outgoing.put(frame)
        elif isinstance(header, frames.SplitRunConfig):
            first_frames = self.device.configure(header)
            self._attempts = 0
            if self.device.max_message_bytes > self._max_bytes:
                self._max_bytes = self.device.max_message_bytes  # of the next stream
                return False
            for frame in first_frames:
                outgoing.put(frame)
        return not isinstance(header, frames.RunFinished)

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


def main(setup: DeviceSetup) -> None:
    runtime.retain_freed_memory()
    ca, key = (None if path is None else Path(path) for path in (setup.ca, setup.key))
    device = SplitDevice(setup.device, Path(setup.folder), setup.limits)
    heartbeat = Heartbeat(Path(setup.heartbeat))
    heartbeat.start()
    GrpcClient(device, setup.server, setup.process, ca=ca, key=key, heartbeat=heartbeat).run()


if __name__ == "__main__":
    run_process(main, DeviceSetup, (ValueError, OSError, LookupError))
