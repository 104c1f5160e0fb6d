"""A device's stream to the server of a split run: dial, prove the key, answer; dial again."""

import logging
import queue
import threading
from pathlib import Path
from typing import Any

from pliant.deploy.door import knock, need_address
from pliant.deploy.split_device import Declined, SplitDevice
from pliant.deploy.split_frames import (
    BadFrame,
    Bye,
    Challenge,
    Hello,
    Proof,
    Question,
    Welcome,
    framed,
    read_down,
)
from pliant.deploy.split_hub import DEAD, METHOD, PULSE, SERVICE
from pliant.deploy.split_line import WINDOW
from pliant.deploy.split_proof import PLAIN, name_of, signed
from pliant.extras import need
from pliant.rng import stream

log = logging.getLogger("pliant")

FIRST, LONGEST = 0.1, 5.0  # seconds before a device dials again, doubling
TRIES = 30  # while the number is taken: for longer than the server keeps a stream that is dead
CALM = 30.0  # seconds before it asks again whether its user lets it train
TAKEN = "ALREADY_EXISTS"
FINAL = ("UNAUTHENTICATED", "FAILED_PRECONDITION", "INVALID_ARGUMENT", "UNIMPLEMENTED")


class Dialler:
    """Keep a device connected until it is stopped or refused."""

    def __init__(
        self,
        device: SplitDevice,
        server: str,
        *,
        process: str,  # a name for whoever starts this again after a crash
        ca: Path | None = None,
        key: Path | None = None,
    ) -> None:
        self._grpc: Any = need("grpc", "deploy")
        self._device, self._server, self._process = device, server, process
        self._host, self._port = need_address(server, ca, key)
        self._ca, self._key = ca, key
        self._stop = threading.Event()
        self._call: Any = None
        self._tries = 0  # in a row, without a welcome

    def stop(self) -> None:
        """Hang up and do not dial again."""
        self._stop.set()
        if self._call is not None:
            self._call.cancel()

    def attend(self) -> None:
        """Answer the server until stopped; raise PermissionError if it refuses this device."""
        while not self._stop.is_set():
            try:
                self._talk()
            except Declined as reason:
                log.warning("device %s does not train: %s", self._device.number, reason)
                self._stop.wait(CALM)
            except BadFrame as error:
                log.warning("device %s: %s; dialling again", self._device.number, error)
            except self._grpc.RpcError as error:
                self._judge(error)
            self._stop.wait(self._pause())
            self._tries += 1

    def _pause(self) -> float:
        """Return how long to wait, a little apart from other devices."""
        draw = stream(self._device.number, "dial", self._tries).random()
        return float(min(LONGEST, FIRST * 2 ** min(self._tries, 10)) * (0.5 + draw / 2))

    def _judge(self, error: Any) -> None:
        code = error.code().name
        if code == TAKEN and self._tries < TRIES:
            if not self._tries:
                log.warning("%s; trying again for a minute", error.details())
            return  # it may be ourselves, before this machine lost its power
        if code in (*FINAL, TAKEN):
            raise PermissionError(f"{self._server} refuses: {error.details()}")
        if self._tries and not self._stop.is_set():
            try:
                door = knock(self._host, self._port, self._ca)
            except PermissionError:
                raise
            except OSError:
                return  # nobody is there yet, or any more
            if door != "split":
                raise PermissionError(f"{self._server}: expected a server of a split method")

    def _channel(self) -> Any:
        options = [
            ("grpc.max_receive_message_length", -1),
            ("grpc.max_send_message_length", -1),
            ("grpc.keepalive_time_ms", PULSE),
            ("grpc.keepalive_timeout_ms", PULSE // 2),
            ("grpc.http2.ping_timeout_ms", DEAD),
            ("grpc.http2.max_pings_without_data", 0),  # two else, and then silence is no sign
            ("grpc.use_local_subchannel_pool", 1),  # so that a new channel dials at once
            ("grpc.enable_http_proxy", 0),
        ]
        if self._ca is None:
            return self._grpc.insecure_channel(self._server, options)
        credentials = self._grpc.ssl_channel_credentials(self._ca.read_bytes())
        return self._grpc.secure_channel(self._server, credentials, options)

    def _talk(self) -> None:
        said: queue.Queue[bytes | None] = queue.Queue(2 * WINDOW + 4)
        with self._channel() as channel:
            self._call = channel.stream_stream(f"/{SERVICE}/{METHOD}")(iter(said.get, None))
            try:
                said.put(framed(Hello(self._device.number, self._process)))
                for raw in self._call:
                    if self._stop.is_set() or not self._heard(raw, said):
                        return
            finally:
                self._call.cancel()
                said.put(None)

    def _heard(self, raw: bytes, said: "queue.Queue[bytes | None]") -> bool:
        """Answer a frame; tell whether to go on."""
        head, tensors = read_down(raw)
        if isinstance(head, Question):
            frame = self._device.answered(head, tensors)
            if frame is not None:
                said.put(frame)
        elif isinstance(head, Welcome):
            for frame in self._device.greeted(head):
                said.put(frame)
            self._tries = 0
        elif isinstance(head, Challenge):
            said.put(framed(Proof(self._proof(head))))
        return not isinstance(head, Bye)

    def _proof(self, challenge: Challenge) -> bytes:
        if self._ca is None or self._key is None:
            return b""
        name = name_of(self._ca)
        if challenge.name != name:
            what = "one without keys" if challenge.name == PLAIN else "another"
            raise PermissionError(f"{self._server}: expected the federation of {self._ca}, {what}")
        return signed(self._key, challenge.nonce, name, self._device.number)
