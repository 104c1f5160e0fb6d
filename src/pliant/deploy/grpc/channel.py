"""The server's channel to one device: numbered requests, each answered exactly once.

A request stays pending until the device has saved its result, and the number of pending requests is
limited. When a stream breaks, the device opens another one and resumes where it stopped. A device
that stays silent for too long is dropped: its channel starts a new epoch, and both sides forget the
requests of the old one.
"""

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from secrets import token_hex
from typing import IO

import msgspec
from torch import Tensor

from pliant.deploy.grpc import frames
from pliant.deploy.grpc.chunks import Buffers
from pliant.deploy.grpc.handshake import StreamRefused
from pliant.deploy.messages import decode_message, encode_message
from pliant.deploy.settings import MalformedMessage
from pliant.params import Params
from pliant.split.client import BatchRequest

MAX_PENDING_REQUESTS = 8
MIN_BATCH_SECONDS, MAX_BATCH_SECONDS = 1e-6, 1e6  # plausible times of a mini-batch
MAX_UNEXPECTED_REPLIES = 64  # the stream is closed after this many

STREAM_BYTES = 6200  # TLS handshake and headers of a stream, and of the call before it
RECORD_BYTES, RECORD_OVERHEAD = 16384, 31  # largest HTTP/2 frame; its header and TLS record
FRAME_OVERHEAD = 22  # gRPC's prefix, that of a chunk, window updates and pings


def count_wire_bytes(size: int) -> int:
    """Return the bytes on the wire of a frame of this size."""
    return size + FRAME_OVERHEAD + RECORD_OVERHEAD * -(-size // RECORD_BYTES)


class StreamOwner:
    """Which process of a device has a stream; only one may."""

    def __init__(self) -> None:
        self.stream_id = 0  # of the newest stream; older ones are closed
        self.process: str | None = None  # None without a stream
        self.wake: Callable[[], None] = _ignore  # lets the stream look for something to send

    def attach(self, process: str, wake: Callable[[], None]) -> int | None:
        """Start a stream of a process and return its id.

        This closes an older stream of the same process, even one not yet known to be broken. While
        another process has a stream, return None: two would evict each other indefinitely.
        """
        if self.process not in (None, process):
            return None
        self.wake()  # the older stream ends
        self.stream_id, self.process, self.wake = self.stream_id + 1, process, wake
        return self.stream_id

    def detach(self, stream_id: int) -> bool:
        """End a stream; return whether it was the newest."""
        is_newest = stream_id == self.stream_id
        if is_newest:
            self.wake()
            self.stream_id, self.process, self.wake = stream_id + 1, None, _ignore
        return is_newest


def _ignore() -> None:
    """Wake nobody, as there is no stream."""


class DeviceChannel:
    """Requests to a device and its replies, over a sequence of streams."""

    def __init__(
        self,
        device: int,
        timeout: float,
        *,
        experiment: object = None,  # as plain data
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.device, self.timeout, self._clock = device, timeout, clock
        self._experiment = experiment
        self._condition = threading.Condition()
        self._stream = StreamOwner()
        self.is_run_over = False
        self.resumed_streams = 0  # streams that resumed an epoch
        self.is_in_round = False
        self.deadline: float | None = None  # after which no reply is waited for in this round
        self.batch_seconds: list[float] = []  # of the round's mini-batches, in all epochs
        self._traffic = self._test_traffic = 0  # bytes that are not charged yet
        self._refusals: dict[int, str] = {}  # by stream: why it ends
        self._start_epoch()

    def _start_epoch(self) -> None:
        self.epoch = token_hex(8)
        self.is_ready = False  # the device is set up for this epoch, on the current stream
        self._last_number = 0
        self._pending_requests: dict[int, tuple[frames.SplitRequest, Mapping[str, Tensor]]] = {}
        self._awaited_replies: set[int] = set()
        self._replies: dict[int, tuple[frames.SplitReply, Params]] = {}
        self._received_numbers: set[int] = set()  # above `_received_up_to`
        self._received_up_to = 0
        self._last_reply_time = self._clock()
        self._next_number = 1  # the next one to send on the stream
        self._unexpected_replies = 0

    # called by the training thread

    def join_round(self) -> str | None:
        """Add the device to the round if it is ready; return the epoch if it takes part."""
        with self._condition:
            if not self.is_in_round:
                self.is_in_round = self.is_ready
            self.batch_seconds = []
            return self.epoch if self.is_in_round else None

    def send_request(
        self,
        kind: frames.RequestKind,
        tensors: Mapping[str, Tensor] | None = None,
        *,
        batch: BatchRequest | None = None,
        kept: frames.KeptPart | None = None,
        needs_reply: bool = False,
    ) -> int | None:
        """Queue a request, waiting only while too many are pending.

        Return its number, or None if the device has left.
        """
        with self._condition:
            self._wait_for(lambda: len(self._pending_requests) < MAX_PENDING_REQUESTS)
            if not self.is_in_round:
                return None
            self._last_number += 1
            number = self._last_number
            request = frames.SplitRequest(number, kind, batch=batch, kept=kept)
            self._pending_requests[number] = request, dict(tensors or {})
            if needs_reply:
                self._awaited_replies.add(number)
            self._notify()
            return number

    def wait_for_reply(self, number: int | None) -> tuple[frames.SplitReply, Params] | None:
        with self._condition:
            if number is None:
                return None
            self._wait_for(lambda: number in self._replies)
            return self._replies.pop(number, None)

    def wait_for_all_replies(self) -> bool:
        """Wait until no reply is missing; return whether the device is still in the round."""
        with self._condition:
            self._wait_for(lambda: self._received_up_to == self._last_number)
            return self.is_in_round

    def _wait_for(self, predicate: Callable[[], bool]) -> None:
        """Wait for a condition; drop the device if it stays silent for too long."""
        start = self._clock()
        while self.is_in_round and not predicate():
            end = max(start, self._last_reply_time) + self.timeout
            end = end if self.deadline is None else min(end, self.deadline)
            remaining = end - self._clock()
            if remaining <= 0:
                self.leave_round()
                return
            self._condition.wait(min(remaining, 1.0))

    def _notify(self) -> None:
        """Wake the training thread and the stream."""
        self._condition.notify_all()
        self._stream.wake()

    def leave_round(self) -> None:
        """Drop the device until it joins another round."""
        with self._condition:
            self.is_in_round = False
            self._start_epoch()
            self._notify()

    def refuse(self, reason: str) -> None:
        """Drop the device and end its stream, telling it why."""
        with self._condition:
            self._refusals = {self._stream.stream_id: reason}
            self.detach(self._stream.stream_id)
            self.leave_round()

    def close(self) -> None:
        """Tell the stream that the run is over."""
        with self._condition:
            self.is_run_over = True
            self._notify()

    def take_traffic(self) -> int:
        """Return the bytes to and from the device since the last call, without tests."""
        with self._condition:
            traffic, self._traffic = self._traffic, 0
            return traffic

    def take_test_traffic(self) -> int:
        """Return the bytes of tests on the device since the last call."""
        with self._condition:
            traffic, self._test_traffic = self._test_traffic, 0
            return traffic

    @property
    def process(self) -> str | None:
        """Return the process that has a stream, if there is one."""
        with self._condition:
            return self._stream.process

    # called by the thread of all streams

    def attach(self, process: str = "", wake: Callable[[], None] = _ignore) -> int | None:
        """Start a stream of a device's process and return its id; None if another one has it."""
        with self._condition:
            stream_id = self._stream.attach(process, wake)
            if stream_id is not None:
                self._traffic += STREAM_BYTES
                self.is_ready = False
                self._notify()
            return stream_id

    def detach(self, stream_id: int) -> None:
        with self._condition:
            if self._stream.detach(stream_id):
                self.is_ready = False
            self._notify()

    def mark_ready(self, stream_id: int, epoch: str, done_up_to: int) -> None:
        """Resume after the device's last completed request; start a new epoch if it lost track."""
        with self._condition:
            if stream_id != self._stream.stream_id or epoch != self.epoch:
                return  # a newer epoch has been announced in the meantime
            first = min(self._pending_requests, default=self._last_number + 1)
            if not first - 1 <= done_up_to <= self._last_number:
                self.leave_round()
                return
            self.resumed_streams += bool(self._last_number)
            self._next_number, self._unexpected_replies = done_up_to + 1, 0
            self.is_ready = True
            self._notify()

    def receive_frame(self, stream_id: int, frame: IO[bytes]) -> None:
        raw = frame.read()
        with self._condition:
            self._traffic += count_wire_bytes(len(raw))
        header, tensors = decode_message(raw, frames.DeviceHeader)
        if isinstance(header, frames.Ready):
            self.mark_ready(stream_id, header.epoch, header.done_up_to)
        elif isinstance(header, frames.SplitReply):
            self.receive_reply(stream_id, header, tensors)
        else:
            raise MalformedMessage(f"a reply, got {type(header).__name__}")

    def iter_frames(self, stream_id: int) -> Iterator[Buffers | None]:
        frame, epoch = self.get_next_frame(stream_id, None)
        while epoch is not None:
            yield None if frame is None else (frame,)
            frame, epoch = self.get_next_frame(stream_id, epoch)
        with self._condition:
            reason = self._refusals.get(stream_id)
        if reason is not None:
            raise StreamRefused("FAILED_PRECONDITION", reason)
        if self.is_run_over:
            yield (encode_message(frames.RunFinished()),)

    def get_next_frame(
        self, stream_id: int, announced_epoch: str | None, timeout: float = 0.0
    ) -> tuple[bytes | None, str | None]:
        """Return a stream's next frame and the epoch announced to the device so far.

        The frame is None if there was nothing to send before the timeout; the epoch is None once
        the stream is over.
        """

        def is_over() -> bool:
            return stream_id != self._stream.stream_id or self.is_run_over

        def has_request() -> bool:
            return self.is_ready and self._next_number in self._pending_requests

        with self._condition:
            self._condition.wait_for(
                lambda: is_over() or announced_epoch != self.epoch or has_request(), timeout
            )
            if is_over():
                return None, None
            if announced_epoch != self.epoch:
                self.is_ready = False
                frame = encode_message(frames.SplitRunConfig(self.epoch, self._experiment))
                self._traffic += count_wire_bytes(len(frame))
                return frame, self.epoch
            if not has_request():
                return None, announced_epoch
            request, tensors = self._pending_requests[self._next_number]
            self._next_number += 1
            received_up_to = self._received_up_to
        header = msgspec.structs.replace(request, received_up_to=received_up_to)
        frame = encode_message(header, tensors)
        size = count_wire_bytes(len(frame))
        with self._condition:
            if request.kind == "test":
                self._test_traffic += size
            else:
                self._traffic += size
        return frame, announced_epoch

    def receive_reply(self, stream_id: int, reply: frames.SplitReply, tensors: Params) -> None:
        """Accept a reply; ignore one that was received before."""
        with self._condition:
            if stream_id != self._stream.stream_id or not self.is_ready:
                return
            number = reply.number
            is_new = number > self._received_up_to and number not in self._received_numbers
            if not is_new or number > self._last_number:
                self._unexpected_replies += 1
                if self._unexpected_replies > MAX_UNEXPECTED_REPLIES:
                    count = self._unexpected_replies
                    raise MalformedMessage(f"replies to requests, got {count} others")
                self._discard_saved(reply.saved_up_to)
                return
            self._last_reply_time = self._clock()  # reconnecting does not count as a sign of life
            self._received_numbers.add(number)
            while self._received_up_to + 1 in self._received_numbers:
                self._received_up_to += 1
                self._received_numbers.discard(self._received_up_to)
            if self._pending_requests[number][0].kind in ("learn", "drop"):
                is_plausible = MIN_BATCH_SECONDS < reply.seconds < MAX_BATCH_SECONDS
                self.batch_seconds.append(reply.seconds if is_plausible else MIN_BATCH_SECONDS)
            if number in self._awaited_replies:
                self._awaited_replies.discard(number)
                self._replies[number] = reply, tensors
            self._discard_saved(reply.saved_up_to)
            self._notify()

    def _discard_saved(self, saved_up_to: int) -> None:
        last = min(saved_up_to, self._received_up_to)
        for number in [number for number in self._pending_requests if number <= last]:
            del self._pending_requests[number]
        self._notify()
