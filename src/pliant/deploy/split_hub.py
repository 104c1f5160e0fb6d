"""The door for devices of a split run: gRPC streams, TLS, and proof of their keys."""

import logging
import threading
from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from pliant.deploy.split_frames import (
    VERSION,
    Answer,
    BadFrame,
    Bye,
    Challenge,
    Hello,
    Proof,
    Ready,
    framed,
    read_up,
)
from pliant.deploy.split_line import Line, StrayAnswers
from pliant.deploy.split_proof import PLAIN, is_proved, name_of, nonce, registered
from pliant.extras import need

log = logging.getLogger("pliant")

SERVICE, METHOD = "pliant.Split", "Work"
GREETING = 20.0  # seconds in which a device must have proved its key
PULSE = 20_000  # milliseconds between two signs of life on a silent connection
DEAD = 60_000  # milliseconds that a stream lives on at most when its other end has gone
SPARE = 8  # streams beyond one a device: for those that are about to be replaced or refused


class Refused(Exception):
    """A stream that is not served, and why."""

    def __init__(self, code: str, why: str, *, is_told: bool = False) -> None:
        super().__init__(why)
        self.code, self.why = code, why
        self.is_told = is_told  # in the log, not long ago


class Hub:
    """Streams of devices, each joined to the device's line."""

    def __init__(
        self,
        lines: dict[int, Line],
        experiment: object,  # as plain data
        *,
        address: str,  # HOST:PORT
        keys: Path | None,
        largest: int,  # bytes of a message
    ) -> None:
        grpc: Any = need("grpc", "deploy")
        self._grpc, self._lines, self._experiment = grpc, lines, experiment
        self._keys = None if keys is None else registered(keys)
        self._name = PLAIN if keys is None else name_of(keys / "ca.crt")
        self._rivals: dict[int, str] = {}  # the last process that found its number taken
        handler = grpc.stream_stream_rpc_method_handler(self._work)  # bytes in, bytes out
        service = grpc.method_handlers_generic_handler(SERVICE, {METHOD: handler})
        self._server = grpc.server(
            ThreadPoolExecutor(2 * len(lines) + SPARE, "pliant-hub"),
            handlers=(service,),
            options=[
                ("grpc.max_receive_message_length", largest),
                ("grpc.max_send_message_length", -1),
                ("grpc.so_reuseport", 0),
                ("grpc.keepalive_time_ms", PULSE),
                ("grpc.keepalive_timeout_ms", PULSE // 2),
                ("grpc.http2.ping_timeout_ms", DEAD),
                ("grpc.http2.min_ping_interval_without_data_ms", PULSE // 4),
            ],
            maximum_concurrent_rpcs=2 * len(lines) + SPARE,
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
        """Let devices come."""
        self._server.start()

    def close(self) -> None:
        """Tell all devices that the run is over, and close the door."""
        for line in self._lines.values():
            line.close()
        self._server.stop(2.0).wait()

    def _work(self, requests: Iterator[bytes], context: Any) -> Iterator[bytes]:
        late = threading.Timer(GREETING, context.cancel)
        late.daemon = True
        late.start()
        try:
            line, stream = yield from self._greeted(requests)
        except Refused as error:
            if not error.is_told:
                log.warning("%s: %s", context.peer(), error.why)
            context.abort(getattr(self._grpc.StatusCode, error.code), error.why)
        finally:
            late.cancel()
        problem: list[Refused] = []
        context.add_callback(lambda: line.detach(stream))
        reader = threading.Thread(
            target=self._listen, args=(requests, line, stream, problem), daemon=True
        )
        reader.start()
        told: str | None = None
        while context.is_active():
            frame, told = line.outgoing(stream, told, self._experiment, wait=1.0)
            if frame is not None:
                yield frame
            if told is None:
                break
        if problem:
            context.abort(getattr(self._grpc.StatusCode, problem[0].code), problem[0].why)
        if line.is_over:
            yield framed(Bye())

    def _greeted(self, requests: Iterator[bytes]) -> Generator[bytes, None, tuple[Line, int]]:
        """Let a device prove who it is; return its line, and its stream's token there."""
        hello = _first(requests, Hello)
        if hello.version != VERSION:
            raise Refused(
                "FAILED_PRECONDITION",
                f"device {hello.device}: expected version {VERSION} of the frames, "
                f"got {hello.version}",
            )
        once = nonce()
        yield framed(Challenge(once, self._name))
        proof = _first(requests, Proof)
        if self._keys is not None and not is_proved(
            self._keys, proof.signature, once, self._name, hello.device
        ):
            raise Refused("UNAUTHENTICATED", f"device {hello.device}: expected a registered key")
        if hello.device not in self._lines:
            raise Refused(
                "FAILED_PRECONDITION",
                f"device {hello.device}: expected a number below {len(self._lines)}",
            )
        line = self._lines[hello.device]
        stream = line.attach(hello.process)
        if stream is None:
            is_told = self._rivals.get(hello.device) == hello.process
            self._rivals[hello.device] = hello.process
            why = f"device {hello.device}: expected one device of this number, got a second one"
            raise Refused("ALREADY_EXISTS", why, is_told=is_told)
        return line, stream

    def _listen(
        self, requests: Iterator[bytes], line: Line, stream: int, problem: list[Refused]
    ) -> None:
        """Take what a device says until its stream ends."""
        try:
            for raw in requests:
                head, tensors = read_up(raw)
                if isinstance(head, Ready):
                    line.ready(stream, head.epoch, head.done)
                elif isinstance(head, Answer):
                    line.heard(stream, head, tensors)
                else:
                    raise BadFrame(f"expected an answer, got {type(head).__name__}")
        except (BadFrame, StrayAnswers) as error:
            log.warning("device %s: %s", line.device, error)
            problem.append(Refused("INVALID_ARGUMENT", f"device {line.device}: {error}"))
        except Exception:  # the stream has broken; the device dials again
            log.debug("device %s: its stream has broken", line.device)
        line.detach(stream)


def _first(requests: Iterator[bytes], kind: type[Any]) -> Any:
    try:
        head, _ = read_up(next(requests))
    except BadFrame as error:
        raise Refused("INVALID_ARGUMENT", str(error)) from None
    except Exception:  # gRPC has a name of its own for each way of breaking off
        raise Refused("CANCELLED", "the stream ended before the greeting") from None
    if not isinstance(head, kind):
        name = type(head).__name__
        raise Refused("INVALID_ARGUMENT", f"expected {kind.__name__}, got {name}")
    return head
