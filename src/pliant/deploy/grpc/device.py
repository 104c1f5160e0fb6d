"""A device of split learning: it executes each request once and survives being killed.

After every request that leaves no mini-batch open, it writes its part and the replies that the
server may not have yet to one file. A killed device resumes from this file: the server repeats the
later requests, and the same data, filters and gradients give the same bits.
"""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import msgspec

from pliant.data.declared import DataDeclaration
from pliant.deploy.device.agent import localise_config
from pliant.deploy.device.host import Limits, read_host
from pliant.deploy.device.own_data import OwnDataReader
from pliant.deploy.grpc import frames
from pliant.deploy.grpc.frames import find_max_message_bytes
from pliant.deploy.messages import MalformedMessage, encode_message
from pliant.experiment.build import build_session
from pliant.experiment.config import Experiment
from pliant.methods.base import TaskKey
from pliant.params import Params, flatten, nbytes, select_subtree
from pliant.split.client import SplitClient
from pliant.split.payload import Message
from pliant.storage import checkpoint, formats
from pliant.value import decode

STATE_PREFIX, REPLY_PREFIX = "state", "answer"


class TrainingDeclined(Exception):
    """The owner's limits do not allow training now."""


@dataclass
class SplitDevice:
    """One client's part of the network and the requests executed on it."""

    number: int
    folder: Path
    limits: Limits
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._path = self.folder / "split.ckpt"
        self._cpu_share = self.limits.compute_cpu_share(read_host())  # updated in every round
        self._experiment_digest = ""
        self.max_message_bytes = 0  # of the experiment
        self._channel_epoch, self._done_up_to, self._saved_up_to = "", 0, 0
        self._pending_replies: dict[int, bytes] = {}  # not yet confirmed by the server
        self._batch_seconds = 0.0  # spent on the open mini-batch
        self._is_batch_open = False
        self._declaration: DataDeclaration | None = None  # of its own data

    def configure(self, config: frames.SplitRunConfig) -> list[bytes]:
        """Build the client that the server describes, once; return the first frames to send."""
        self.check_limits()
        digest = sha256(msgspec.json.encode(config.experiment)).hexdigest()
        if digest != self._experiment_digest:
            self._client = self._build_client(config.experiment)
            self._experiment_digest, self._channel_epoch = digest, ""
        if config.epoch != self._channel_epoch:
            self._load(config.epoch)
        return [
            encode_message(frames.Ready(self._channel_epoch, self._done_up_to)),
            *self._pending_replies.values(),
        ]

    def handle_request(self, request: frames.SplitRequest, tensors: Params) -> bytes | None:
        """Execute a request unless it was done before; return the reply, if there is one."""
        for number in [n for n in self._pending_replies if n <= request.received_up_to]:
            del self._pending_replies[number]
        if request.number <= self._done_up_to:
            return self._pending_replies.get(request.number)
        if request.number != self._done_up_to + 1:
            raise MalformedMessage(f"request {self._done_up_to + 1}, got {request.number}")
        start = self.clock()
        shape, result = self._execute(request, tensors)
        elapsed = self.clock() - start
        seconds = 0.0
        if request.kind in ("ask", "learn", "drop"):
            if self._cpu_share < 1:
                self.sleep(elapsed * (1 / self._cpu_share - 1))
            self._batch_seconds += self.clock() - start
        if request.kind in ("learn", "drop"):
            seconds, self._batch_seconds = self._batch_seconds, 0.0
        self._done_up_to = done = request.number
        saved = self._saved_up_to if self._is_batch_open else done
        declaration = self._declaration if request.kind == "declare" else None
        reply = frames.SplitReply(done, saved, seconds, shape, declaration)
        frame = encode_message(reply, result)
        self._pending_replies[done] = frame
        if not self._is_batch_open:
            self._save()
        return frame

    def _execute(
        self, request: frames.SplitRequest, tensors: Params
    ) -> tuple[tuple[int, ...], Params]:
        """Return the shape of the activations, if there are any, and the tensors of the reply."""
        client, kind = self._client, request.kind
        if kind == "ask":
            batch = request.batch
            if batch is None:
                raise MalformedMessage("a request with a mini-batch, got none")
            if batch.step == 0:
                self.check_limits()
                self._cpu_share = self.limits.compute_cpu_share(read_host())
            client.request_batch(batch)
            self._is_batch_open = True
            message = client.forward() if batch.needs_activation else None
            if not isinstance(message, Message):
                return (), {}
            parts = {frames.ACTIVATIONS: message.body, frames.LABELS: message.labels}
            return message.shape, {n: frames.bytes_to_tensor(raw) for n, raw in parts.items()}
        if kind == "params":
            return (), client.params
        if kind == "state":
            return (), client.state_dict()
        if kind == "learn":
            gradient = tensors.get(frames.GRADIENT)
            client.backward(None if gradient is None else frames.tensor_to_bytes(gradient))
        elif kind == "drop":
            client.skip()
        elif kind == "take":
            client.load_params(tensors)
        elif kind == "forget":
            client.reset_optimiser()
        elif kind == "declare":
            return (), {}
        else:
            client.load_state_dict(tensors)
        self._is_batch_open = False
        return (), {}

    def check_limits(self) -> None:
        """Raise `TrainingDeclined` if the owner's limits do not allow training now."""
        reason = self.limits.find_refusal(read_host())
        if reason is not None:
            raise TrainingDeclined(reason)

    def _build_client(self, encoded_experiment: Any) -> SplitClient:
        experiment = decode(localise_config(encoded_experiment, self.limits), Experiment)
        data, self._declaration = None, None
        if experiment.network.input is not None:
            form, reader = experiment.network.image_form, OwnDataReader(self.limits)
            self._declaration = reader.declare(form)
            key = TaskKey(experiment.seed, 0, self.number)
            data = reader.select(form, self._declaration, key)
            # split learning needs as many samples as declared in every round
            count = min(self._declaration.max_samples, data.count_samples(0))
            self._declaration = msgspec.structs.replace(self._declaration, max_samples=count)
        session = build_session(experiment, only_client=self.number, data=data)
        client = session.clients[self.number]
        self.max_message_bytes = find_max_message_bytes(session, nbytes(client.state_dict()))
        return client

    def _save(self) -> None:
        replies = {str(n): frames.bytes_to_tensor(raw) for n, raw in self._pending_replies.items()}
        tensors = flatten({STATE_PREFIX: self._client.state_dict(), REPLY_PREFIX: replies})
        header = {"epoch": self._channel_epoch, "done": self._done_up_to}
        # Renamed without fsync: a killed process loses nothing, and after a power loss the server
        # sends the part again.
        temporary = self._path.with_suffix(".tmp")
        temporary.touch(0o600)  # replies have activations and labels
        temporary.write_bytes(checkpoint.to_bytes(tensors, header))
        os.replace(temporary, self._path)
        self._saved_up_to = self._done_up_to

    def _load(self, channel_epoch: str) -> None:
        """Resume an epoch from the file; a new one starts with the part that the server sends."""
        self._channel_epoch, self._pending_replies = channel_epoch, {}
        self._done_up_to = self._saved_up_to = 0
        self._is_batch_open, self._batch_seconds = False, 0.0
        try:
            tensors, header = checkpoint.load(self._path)
        except (FileNotFoundError, checkpoint.CorruptCheckpoint, formats.UnsupportedFormat):
            return
        if header["epoch"] == channel_epoch:
            self._client.load_state_dict(select_subtree(tensors, STATE_PREFIX))
            self._done_up_to = self._saved_up_to = int(header["done"])
            replies = select_subtree(tensors, REPLY_PREFIX)
            self._pending_replies = {int(n): frames.tensor_to_bytes(replies[n]) for n in replies}
