"""A device of split learning: it does what it is asked, once, and survives being killed.

After every question that leaves no mini-batch open, its part and the answers that the server may
not have yet are written to one file. Killed, it goes on from there: the server asks again for what
came later, and the same data, filters and gradients give the same bits.
"""

import os
import time
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import msgspec

from pliant import checkpoint
from pliant.deploy.device import local
from pliant.deploy.host import Limits, allowed_share, hints, refusal
from pliant.deploy.split_frames import (
    BODY,
    LABELS,
    SLOPE,
    Answer,
    BadFrame,
    Question,
    Ready,
    Welcome,
    framed,
    to_bytes,
    to_tensor,
)
from pliant.engine.split import session_of
from pliant.experiment import Experiment, build
from pliant.params import Params
from pliant.split import AnySplit
from pliant.split.client import Client
from pliant.split.part import below
from pliant.split.payload import Message
from pliant.value import decode

STATE, ANSWER = "state", "answer"


class Declined(Exception):
    """The user of this machine does not want it to train now."""


class SplitDevice:
    """One client's part of the network, and what was done with it."""

    def __init__(
        self,
        number: int,
        folder: Path,
        limits: Limits,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.number, self._path = number, folder / "split.ckpt"
        folder.mkdir(parents=True, exist_ok=True)
        self._limits, self._clock, self._sleep = limits, clock, sleep
        self._share = allowed_share(limits, hints())  # of a core; asked anew in every round
        self._key = ""
        self._epoch, self._done, self._saved = "", 0, 0
        self._answers: dict[int, bytes] = {}  # that the server may not have
        self._spent = 0.0  # seconds, in the mini-batch that is open
        self._is_open = False

    def greeted(self, welcome: Welcome) -> list[bytes]:
        """Build what the server describes, once; return what to say first."""
        self.need_consent()
        key = sha256(msgspec.json.encode(welcome.experiment)).hexdigest()
        if key != self._key:
            self._client = self._built(welcome.experiment)
            self._key, self._epoch = key, ""
        if welcome.epoch != self._epoch:
            self._recall(welcome.epoch)
        return [framed(Ready(self._epoch, self._done)), *self._answers.values()]

    def answered(self, question: Question, tensors: Params) -> bytes | None:
        """Do what is asked, unless it was done before; return the answer where there is one."""
        for number in [number for number in self._answers if number <= question.heard]:
            del self._answers[number]
        if question.number <= self._done:
            return self._answers.get(question.number)
        if question.number != self._done + 1:
            raise BadFrame(f"expected question {self._done + 1}, got {question.number}")
        began = self._clock()
        message = self._do(question, tensors)
        took = self._clock() - began
        seconds = 0.0
        if question.kind in ("ask", "learn", "drop"):
            if self._share < 1:
                self._sleep(took * (1 / self._share - 1))
            self._spent += self._clock() - began
        if question.kind in ("learn", "drop"):
            seconds, self._spent = self._spent, 0.0
        self._done = question.number
        saved = self._saved if self._is_open else self._done
        if isinstance(message, Message):
            sent = {BODY: to_tensor(message.body), LABELS: to_tensor(message.labels)}
            frame = framed(Answer(self._done, saved, seconds, message.shape), sent)
        else:
            frame = framed(Answer(self._done, saved, seconds), message)
        self._answers[self._done] = frame
        if not self._is_open:
            self._save()
        return frame

    def _do(self, question: Question, tensors: Params) -> Message | Params | None:
        client, kind = self._client, question.kind
        if kind == "ask":
            turn = question.turn
            if turn is None:
                raise BadFrame("expected a mini-batch to be told")
            if turn.step == 0:
                self.need_consent()
                self._share = allowed_share(self._limits, hints())
            client.ask(turn)
            self._is_open = True
            found = client.message() if turn.talks else None
            return found if isinstance(found, Message) else None
        if kind == "params":
            return client.params
        if kind == "state":
            return client.state()
        if kind == "learn":
            client.learn(to_bytes(tensors[SLOPE]) if SLOPE in tensors else None)
        elif kind == "drop":
            client.drop()
        elif kind == "take":
            client.take(tensors)
        elif kind == "forget":
            client.forget()
        else:
            client.restore(tensors)
        self._is_open = False
        return None

    def need_consent(self) -> None:
        """Refuse to train while the user does not want it."""
        reason = refusal(self._limits, hints())
        if reason is not None:
            raise Declined(reason)

    def _built(self, described: Any) -> Client:
        experiment = decode(local(described, self._limits), Experiment)
        method = experiment.method
        if not isinstance(method, AnySplit):
            raise ValueError(f"Expected a split method, got {type(method).__name__}")
        net, data = build(experiment)
        session = session_of(method, net, data, experiment.fleet, experiment.seed, only=self.number)
        return session.clients[self.number]

    # the disk

    def _save(self) -> None:
        tensors = {f"{STATE}/{name}": tensor for name, tensor in self._client.state().items()}
        tensors |= {f"{ANSWER}/{n}": to_tensor(raw) for n, raw in self._answers.items()}
        head = {"epoch": self._epoch, "done": self._done}
        # renamed, but not forced to the platter: a process that is killed loses nothing, and a
        # machine that loses its power is given its part again by the server
        fresh = self._path.with_suffix(".tmp")
        fresh.write_bytes(checkpoint.to_bytes(tensors, head))
        os.replace(fresh, self._path)
        self._saved = self._done

    def _recall(self, epoch: str) -> None:
        """Go on in an epoch where the disk is; a new one begins with what the server sends."""
        self._epoch, self._done, self._saved, self._answers = epoch, 0, 0, {}
        self._is_open, self._spent = False, 0.0
        try:
            tensors, head = checkpoint.load(self._path)
        except (FileNotFoundError, checkpoint.CorruptCheckpoint):
            return
        if head["epoch"] == epoch:
            self._client.restore(below(STATE, tensors))
            self._done = self._saved = int(head["done"])
            self._answers = {int(n): to_bytes(t) for n, t in below(ANSWER, tensors).items()}
