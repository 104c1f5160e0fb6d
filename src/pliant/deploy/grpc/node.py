"""A device's connection in federated rounds over gRPC, which passes requests to the worker.

It runs as `python -m pliant.deploy.grpc.node SETUP`, without torch: an idle device stays small. A
request that the server sends again, on a new stream, is not passed on again.
"""

import logging
import os
import threading
import time
from collections.abc import Callable
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import ClassVar, NamedTuple

from pliant.deploy.device.heartbeat import Heartbeat
from pliant.deploy.device.host import DeviceSetup
from pliant.deploy.device.worker_call import call_worker
from pliant.deploy.grpc.client import DeviceStream, GrpcClient
from pliant.deploy.grpc.envelopes import MAX_ENVELOPE_BYTES, Envelope, open_envelope, seal
from pliant.deploy.settings import ARRIVAL_HEADER, BYTE_LIMIT_FILE, read_byte_limit, run_process
from pliant.deploy.versions import ServerKind

log = logging.getLogger("pliant")


class WaitingRequest(NamedTuple):
    """A request that the worker has not got yet."""

    envelope: Envelope
    body: bytes
    arrived_at: float  # by the machine's monotonic clock


class RoundNode:
    """Pass the server's requests to the worker, one at a time, and send its replies."""

    kind: ClassVar[ServerKind] = "federated_grpc"

    def __init__(self, setup: DeviceSetup, call_worker: Callable[[bytes, float], bytes]) -> None:
        self.number, self._call_worker = setup.device, call_worker
        self._byte_limit = Path(setup.folder) / BYTE_LIMIT_FILE
        self._condition = threading.Condition()
        self._stream: DeviceStream | None = None  # the newest
        self._waiting: list[WaitingRequest] = []
        self._current_id = ""  # of the request that the worker has
        self._reply_id, self._reply = "", b""  # the last one, until the next

    @property
    def max_message_bytes(self) -> int:
        return read_byte_limit(self._byte_limit) + MAX_ENVELOPE_BYTES

    def handle_frame(self, raw: bytes, stream: DeviceStream) -> bool:
        message = BytesIO(raw)
        envelope, body = open_envelope(message), message.read()
        with self._condition:
            self._stream = stream
            known = {self._current_id, *(request.envelope.id for request in self._waiting)}
            if envelope.id == self._reply_id:
                self._send_reply()
            elif envelope.id not in known:
                # the server has given up on older requests
                hellos = [request for request in self._waiting if request.envelope.is_hello]
                self._waiting = [*hellos, WaitingRequest(envelope, body, time.monotonic())]
                self._condition.notify_all()
        return True

    def handle_requests(self) -> None:
        """Pass requests to the worker forever."""
        while True:
            with self._condition:
                self._condition.wait_for(lambda: self._waiting)
                request = self._waiting.pop(0)
                self._current_id, self._reply_id, self._reply = request.envelope.id, "", b""
            reply = self._handle_request(request)
            with self._condition:
                self._reply_id, self._reply, self._current_id = request.envelope.id, reply, ""
                self._send_reply()

    def _handle_request(self, request: WaitingRequest) -> bytes:
        envelope = request.envelope
        try:
            raw = ARRIVAL_HEADER.pack(request.arrived_at) + request.body
            return seal(Envelope(envelope.id)) + self._call_worker(raw, envelope.seconds)
        except TimeoutError:
            reason = "the worker has not answered in time"
        except (EOFError, OSError) as problem:  # it died, or there is none
            reason = f"the worker failed: {type(problem).__name__}"
        log.warning("device %s: %s", self.number, reason)
        return seal(Envelope(envelope.id, reason=reason))

    def _send_reply(self) -> None:
        assert self._stream is not None
        self._stream.send(self._reply)


def handle_requests_or_exit(node: RoundNode) -> None:
    """End the process if requests cannot be handled any more, so that it is restarted."""
    try:
        node.handle_requests()
    finally:
        logging.exception("device %s: its connection failed", node.number)
        os._exit(1)


def main(setup: DeviceSetup) -> None:
    log.setLevel(logging.INFO)
    ca, key = (None if path is None else Path(path) for path in (setup.ca, setup.key))
    Heartbeat(Path(setup.heartbeat)).start()
    node = RoundNode(setup, partial(call_worker, setup.socket))
    threading.Thread(target=handle_requests_or_exit, args=(node,), daemon=True).start()
    GrpcClient(node, setup.server, setup.process, ca=ca, key=key).run()


if __name__ == "__main__":
    run_process(main, DeviceSetup, (ValueError, OSError), uses_torch=False)
