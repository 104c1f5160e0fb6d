"""The server's end of the line to one device: questions with numbers, each answered exactly once.

Questions are kept until the device's disk has what they did; no more than a window of them are
under way. A stream that breaks is replaced by the device's next one, which goes on where the device
is. A device that says nothing for too long has gone: its line begins a new epoch, and whatever was
asked in the old one is forgotten on both sides.
"""

import threading
import time
from collections.abc import Callable, Mapping
from secrets import token_hex

from torch import Tensor

from pliant.deploy.split_frames import Answer, Down, Kind, Question, Welcome, framed
from pliant.params import Params
from pliant.split.client import Turn

WINDOW = 8  # questions under way
SHORTEST, LONGEST = 1e-6, 1e6  # seconds that a mini-batch may take
STRAY = 64  # answers to nothing that was asked, after which a stream is cut


class StrayAnswers(ValueError):
    """A device sends what nobody has asked for."""


class Line:
    """Questions to a device and its answers; streams come and go."""

    def __init__(
        self,
        device: int,
        seconds: float,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.device, self.seconds, self._clock = device, seconds, clock
        self._change = threading.Condition()
        self._stream = 0  # the newest one; older ones are ended
        self._process: str | None = None  # whose stream it is; None: nobody's
        self.is_over = False  # the whole run
        self.resumed = 0  # streams that went on in an epoch
        self.is_in = False  # takes part in the round
        self.times: list[float] = []  # seconds of each mini-batch in the round, in all epochs
        self._begin()

    def _begin(self) -> None:
        self.epoch = token_hex(8)
        self.is_ready = False  # the device has said so in this epoch, on a stream that is there
        self._asked = 0
        self._kept: dict[int, tuple[Question, Mapping[str, Tensor]]] = {}
        self._wanted: set[int] = set()
        self._answers: dict[int, tuple[Answer, Params]] = {}
        self._heard: set[int] = set()  # numbers above `_all_heard`
        self._all_heard = 0
        self._last_word = self._clock()
        self._next = 1  # to be sent on the stream
        self._strays = 0

    # the training's side

    def join(self) -> str | None:
        """Take the device into the round if it is there; return the epoch if it is in."""
        with self._change:
            if not self.is_in:
                self.is_in = self.is_ready
            self.times = []
            return self.epoch if self.is_in else None

    def ask(
        self,
        kind: Kind,
        *,
        turn: Turn | None = None,
        tensors: Mapping[str, Tensor] | None = None,
        is_wanted: bool = False,
    ) -> int | None:
        """Ask; wait only while the window is full. Return the number, None if it has gone."""
        with self._change:
            self._await(lambda: len(self._kept) < WINDOW)
            if not self.is_in:
                return None
            self._asked += 1
            number = self._asked
            self._kept[number] = (Question(number, kind, turn=turn), dict(tensors or {}))
            if is_wanted:
                self._wanted.add(number)
            self._change.notify_all()
            return number

    def answer(self, number: int | None) -> tuple[Answer, Params] | None:
        """Wait for an answer that is wanted; return None if the device has gone."""
        with self._change:
            if number is None:
                return None
            self._await(lambda: number in self._answers)
            return self._answers.pop(number, None)

    def settled(self) -> bool:
        """Wait until everything is answered; tell whether the device is still there."""
        with self._change:
            self._await(lambda: self._all_heard == self._asked)
            return self.is_in

    def _await(self, is_so: Callable[[], bool]) -> None:
        """Wait for something; a device that says nothing for too long meanwhile has gone."""
        began = self._clock()
        while self.is_in and not is_so():
            left = max(began, self._last_word) + self.seconds - self._clock()
            if left <= 0:
                self._leave()
                return
            self._change.wait(min(left, 1.0))

    def _leave(self) -> None:
        self.is_in = False
        self._begin()
        self._change.notify_all()

    def expel(self) -> None:
        """Go on without the device for the rest of the round."""
        with self._change:
            self._leave()

    def close(self) -> None:
        """Tell the stream that the run is over."""
        with self._change:
            self.is_over = True
            self._change.notify_all()

    # the stream's side

    def attach(self, process: str = "") -> int | None:
        """Begin a stream of a device's process; return its token.

        An older stream of the same process ends, also one that nobody has found broken yet. While
        another process has a stream there is no token: two would throw each other out for ever.
        """
        with self._change:
            if self._process not in (None, process):
                return None
            self._stream += 1
            self._process = process
            self.is_ready = False
            self._change.notify_all()
            return self._stream

    def detach(self, stream: int) -> None:
        """End a stream."""
        with self._change:
            if stream == self._stream:
                self._stream += 1
                self._process = None
                self.is_ready = False
            self._change.notify_all()

    def ready(self, stream: int, epoch: str, done: int) -> None:
        """Go on after what the device has done; whoever has lost its place begins anew."""
        with self._change:
            if stream != self._stream or epoch != self.epoch:
                return  # it was told of a newer epoch meanwhile
            first = min(self._kept, default=self._asked + 1)
            if not first - 1 <= done <= self._asked:
                self._leave()
                return
            self.resumed += bool(self._asked)
            self._next, self._strays = done + 1, 0
            self.is_ready = True
            self._change.notify_all()

    def outgoing(
        self, stream: int, told: str | None, experiment: object, wait: float
    ) -> tuple[bytes | None, str | None]:
        """Return the next frame of a stream and which epoch the device was told of.

        No frame: nothing to say for so many seconds. No epoch: the stream is over.
        """
        with self._change:
            self._change.wait_for(lambda: self._has_word(stream, told), wait)
            if stream != self._stream or self.is_over:
                return None, None
            if told != self.epoch:
                self.is_ready = False
                return framed(Welcome(self.epoch, experiment)), self.epoch
            if not self.is_ready or self._next not in self._kept:
                return None, told
            question, tensors = self._kept[self._next]
            self._next += 1
            heard = self._all_heard
        head: Down = Question(question.number, question.kind, heard, question.turn)
        return framed(head, tensors), told

    def _has_word(self, stream: int, told: str | None) -> bool:
        is_over = stream != self._stream or self.is_over
        return is_over or told != self.epoch or (self.is_ready and self._next in self._kept)

    def heard(self, stream: int, answer: Answer, tensors: Params) -> None:
        """Take an answer; one that was given before changes nothing."""
        with self._change:
            if stream != self._stream or not self.is_ready:
                return
            number = answer.number
            is_new = number > self._all_heard and number not in self._heard
            if not is_new or number > self._asked:
                self._strays += 1
                if self._strays > STRAY:
                    raise StrayAnswers(f"device {self.device}: expected answers to questions")
                self._spare(answer.saved)
                return
            self._last_word = self._clock()  # dialling again and again is no answer
            self._heard.add(number)
            while self._all_heard + 1 in self._heard:
                self._all_heard += 1
                self._heard.discard(self._all_heard)
            if self._kept[number][0].kind in ("learn", "drop"):
                is_possible = SHORTEST < answer.seconds < LONGEST
                self.times.append(answer.seconds if is_possible else SHORTEST)
            if number in self._wanted:
                self._wanted.discard(number)
                self._answers[number] = answer, tensors
            self._spare(answer.saved)
            self._change.notify_all()

    def _spare(self, saved: int) -> None:
        """Let go of questions that are answered and on the device's disk."""
        for number in [n for n in self._kept if n <= min(saved, self._all_heard)]:
            del self._kept[number]
        self._change.notify_all()
