"""A device of split learning: it executes each request once and survives being killed.

After every request that leaves no mini-batch open, it writes its part and the replies that the
server may not have yet to one file. A killed device resumes from this file: the server repeats the
later requests, and the same data, filters and gradients give the same bits.

After every round it keeps its part in a file of its own, and tells the server only the digest. A
restarted server names the part that its checkpoint belongs to: the newest one, or the one before.
"""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, ClassVar

import msgspec

from pliant.data.declared import DataDeclaration
from pliant.deploy.device.agent import localise_config
from pliant.deploy.device.host import Limits, read_host
from pliant.deploy.device.own_data import OwnDataReader
from pliant.deploy.grpc import frames
from pliant.deploy.grpc.client import DeviceStream, TrainingDeclined
from pliant.deploy.grpc.frames import find_max_message_bytes
from pliant.deploy.messages import decode_message, encode_message
from pliant.deploy.settings import MalformedMessage
from pliant.deploy.versions import ServerKind
from pliant.engine.evaluation import measure_accuracy
from pliant.experiment.build import build_session
from pliant.experiment.config import Experiment
from pliant.methods.base import TaskKey
from pliant.methods.validation import check_tensors, make_specs
from pliant.nn.norm_statistics import RunningStats
from pliant.params import Params, digest, flatten, get_params, select_subtree
from pliant.split.client import BatchRequest, SplitClient
from pliant.split.payload import Message
from pliant.storage import atomic, checkpoint, formats
from pliant.value import decode

STATE_PREFIX, REPLY_PREFIX = "state", "answer"


@dataclass
class SplitDevice:
    """One client's part of the network and the requests executed on it."""

    kind: ClassVar[ServerKind] = "split"
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

    def list_kept(self) -> list[Path]:
        """Return the files of the parts that are kept, newest first."""
        return sorted(self.folder.glob("kept-*.ckpt"), reverse=True)

    def handle_frame(self, raw: bytes, stream: DeviceStream) -> bool:
        header, tensors = decode_message(raw, frames.ServerHeader)
        if isinstance(header, frames.SplitRequest):
            frame = self.handle_request(header, tensors)
            if frame is not None:
                stream.send(frame)
        elif isinstance(header, frames.SplitRunConfig):
            for frame in self.configure(header):
                stream.send(frame)
        return not isinstance(header, frames.RunFinished)

    def configure(self, config: frames.SplitRunConfig) -> list[bytes]:
        """Build the client that the server describes, once; return the first frames to send."""
        self.check_limits()
        experiment_digest = sha256(msgspec.json.encode(config.experiment)).hexdigest()
        if experiment_digest != self._experiment_digest:
            self._client = self._build_client(config.experiment)
            self._experiment_digest, self._channel_epoch = experiment_digest, ""
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
        reply, result = self._execute(request, tensors)
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
        reply = msgspec.structs.replace(reply, saved_up_to=saved, seconds=seconds)
        frame = encode_message(reply, result)
        self._pending_replies[done] = frame
        if not self._is_batch_open:
            self._save()
        return frame

    def _execute(
        self, request: frames.SplitRequest, tensors: Params
    ) -> tuple[frames.SplitReply, Params]:
        """Return the reply, apart from its times, and its tensors."""
        client, kind = self._client, request.kind
        reply = frames.SplitReply(request.number, 0)
        if kind == "ask":
            if request.batch is None:
                raise MalformedMessage("a request with a mini-batch, got none")
            shape, result = self._start_batch(request.batch)
            return msgspec.structs.replace(reply, shape=shape), result
        if kind == "params":
            return reply, client.params
        if kind == "declare":
            return msgspec.structs.replace(reply, declaration=self._declaration), {}
        if kind == "test":
            tests, correct = self._test(tensors)
            return msgspec.structs.replace(reply, tests=tests, correct=correct), {}
        if kind == "learn":
            gradient = tensors.get(frames.GRADIENT)
            client.backward(None if gradient is None else frames.tensor_to_bytes(gradient))
        elif kind == "drop":
            client.skip()
        elif kind == "take":
            client.load_params(tensors)
        else:
            if request.kept is None:
                raise MalformedMessage("a request that names a part, got none")
            change = self._keep if kind == "keep" else self._restore
            reply = msgspec.structs.replace(reply, digest=change(request.kept.number))
        self._is_batch_open = False
        return reply, {}

    def _start_batch(self, batch: BatchRequest) -> tuple[tuple[int, ...], Params]:
        """Return the shape of the activations and the message, if they are needed now."""
        if batch.step == 0:
            self.check_limits()
            self._cpu_share = self.limits.compute_cpu_share(read_host())
        self._client.request_batch(batch)
        self._is_batch_open = True
        message = self._client.forward() if batch.needs_activation else None
        if not isinstance(message, Message):
            return (), {}
        parts = {frames.ACTIVATIONS: message.body, frames.LABELS: message.labels}
        return message.shape, {n: frames.bytes_to_tensor(raw) for n, raw in parts.items()}

    def _keep(self, number: int) -> str:
        """Write the part to a file of its own, keep the one before it, and return its digest."""
        state = self._client.state_dict()
        raw = checkpoint.to_bytes(state, {"experiment": self._experiment_digest})
        atomic.write_bytes(self._make_kept_path(number), raw, is_private=True)
        newest = [self._make_kept_path(n) for n in (number, number - 1)]
        for path in self.list_kept():
            if path not in newest:
                path.unlink()
        return digest(state)

    def _restore(self, number: int) -> str:
        """Return to a part that was kept, and return its digest; "" if there is none."""
        if number:
            try:
                state, header = checkpoint.load(self._make_kept_path(number))
            except (FileNotFoundError, checkpoint.CorruptCheckpoint, formats.UnsupportedFormat):
                return ""
            if header != {"experiment": self._experiment_digest}:
                return ""
            self._client.load_state_dict(state)
        else:
            self._client.load_state_dict(self._initial_state)
        return digest(self._client.state_dict())

    def _make_kept_path(self, number: int) -> Path:
        return self.folder / f"kept-{number:08d}.ckpt"

    def _test(self, server_params: Params) -> tuple[int, int]:
        """Return the number of this device's test images, and how many are classified right."""
        session, data = self._session, self._session.data
        tests = len(data.get_test_indices(self.number))
        if not tests:
            return 0, 0
        expected = make_specs(get_params(session.split_network.server))
        problem = next(check_tensors("test", server_params, expected), None)
        if problem is not None:
            raise MalformedMessage(problem)
        evaluation = self._evaluation
        if not len(data.proxy):  # to estimate norm statistics on
            evaluation = msgspec.structs.replace(evaluation, statistics=RunningStats())
        params = session.assemble_params(self.number, server_params)
        accuracy = measure_accuracy(session.net, params, data, self.number, evaluation)
        return tests, round(accuracy * tests)

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
        self._session = build_session(experiment, only_client=self.number, data=data)
        self._evaluation = experiment.evaluation
        client = self._session.clients[self.number]
        self._initial_state = client.state_dict()
        self.max_message_bytes = find_max_message_bytes(self._session, to_device=True)
        return client

    def _save(self) -> None:
        replies = {str(n): frames.bytes_to_tensor(raw) for n, raw in self._pending_replies.items()}
        tensors = flatten({STATE_PREFIX: self._client.state_dict(), REPLY_PREFIX: replies})
        header = {"epoch": self._channel_epoch, "done": self._done_up_to}
        # Renamed without fsync: a killed process loses nothing, and after a power loss the device
        # returns to the part that it kept after the last round.
        temporary = self._path.with_suffix(".tmp")
        with open(temporary, "wb", opener=_open_private) as file:
            file.write(checkpoint.to_bytes(tensors, header))
        os.replace(temporary, self._path)
        self._saved_up_to = self._done_up_to

    def _load(self, channel_epoch: str) -> None:
        """Resume an epoch from the file; a new one starts with a part that the server names."""
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


def _open_private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
