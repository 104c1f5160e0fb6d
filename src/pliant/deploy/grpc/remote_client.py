"""A split client whose part lives on a device.

The device keeps its part, and the server knows the digest. Only methods that merge parts, or pass
them on, fetch the parameters; the server has a copy of these as it last saw them, and a device that
was away gets the newest.
"""

import logging
import math
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

from pliant.data.declared import DataDeclaration
from pliant.deploy.grpc import frames
from pliant.deploy.grpc.channel import DeviceChannel
from pliant.methods.validation import (
    ValidationPolicy,
    check_tensors,
    check_values,
    make_specs,
    select_variances,
)
from pliant.params import Params, clone, flatten, select_subtree
from pliant.split.base import ClientCosts
from pliant.split.client import BatchRequest, LocalClient
from pliant.split.payload import Message

log = logging.getLogger("pliant")

MAX_GROWTH = 100.0  # of the largest number of a tensor in one round, or of 1 if it is smaller


class RemoteClient:
    """A split client behind a device channel."""

    def __init__(
        self,
        channel: DeviceChannel,
        server_copy: LocalClient,
        policy: ValidationPolicy,
        accept: Callable[[DataDeclaration | None], None] | None = None,
        *,
        shares_part: bool = True,
    ) -> None:
        self._accept = accept  # what a device declares of its own data, or raise ValueError
        self.problem: str | None = None  # why the device may not join
        self._refused_process: str | None = None  # that may not join
        self.channel = channel
        self.server_copy = server_copy
        self._policy = policy
        self._shares_part = shares_part  # with the server, whose copy then has its parameters
        self._start = clone(server_copy.params)  # of the round
        self._kept = frames.KeptPart(0, server_copy.digest())
        self._has_changed = False  # the device's part, since it was kept
        self._has_stale_params = False
        self._has_sent_params = True  # the device has the newest parameters
        self._channel_epoch = ""
        self._request_number: int | None = None
        self.problems: list[str] = []  # with what the device sent

    def join_round(self) -> bool:
        """Add the device to the round if it is ready; in a new epoch, let it restore its part."""
        if self._refused_process is not None and self.channel.process == self._refused_process:
            return False
        epoch = self.channel.join_round()
        if epoch is None:
            return False
        self._start = clone(self.server_copy.params)
        if epoch != self._channel_epoch:
            if self._accept is not None and not self._read_declaration(self._accept):
                return False
            if not self._restore_part():
                return False
            log.info("device %s joined", self.channel.device)
            self._channel_epoch = epoch
            self._has_changed = self._has_stale_params = False
        return self.channel.is_in_round

    def report_problems(self, costs: ClientCosts) -> None:
        """Move the problems with the device's part to its costs."""
        costs.refused.update(self.problems)
        costs.has_bad_part |= bool(self.problems)
        self.problems.clear()

    def _read_declaration(self, accept: Callable[[DataDeclaration | None], None]) -> bool:
        """Ask a device with its own data what it has; return whether that can be accepted."""
        number = self.channel.send_request("declare", needs_reply=True)
        received = self.channel.wait_for_reply(number)
        if received is None:
            return False
        try:
            accept(received[0].declaration)
        except ValueError as error:
            self._refuse(f"device {self.channel.device}: {error}")
            self.channel.leave_round()
            return False
        self.problem = self._refused_process = None
        return True

    def _refuse(self, problem: str) -> None:
        """Let the device's process join no more rounds."""
        log.warning("%s", problem)
        self.problem, self._refused_process = problem, self.channel.process

    def _restore_part(self) -> bool:
        """Let the device return to the part of the last checkpoint; return whether it can.

        A device that has lost the part gets the server's parameters and a new optimiser, if the
        server has them: in a method that shares parts, or before the first round.
        """
        found = self._request_digest("restore", self._kept)
        if found is None:
            return False
        if found == self._kept.digest:
            return True
        device, number = self.channel.device, self._kept.number
        if number and not self._shares_part:
            expected, got = self._kept.digest[:16], found[:16] or "none"
            problem = f"device {device}: expected its part {number} with digest {expected}"
            self._refuse(f"{problem}, got {got}")
            self.channel.refuse(f"{problem}, got {got}; it cannot rejoin this run")
            return False
        if number:
            log.warning("device %s has lost its part; it gets the newest one", device)
        self._has_sent_params = False
        return self._request_digest("restore", frames.KeptPart(0)) is not None

    def _request_digest(self, kind: frames.RequestKind, kept: frames.KeptPart) -> str | None:
        """Let the device keep or restore a part; return its digest, or None if it has left."""
        number = self.channel.send_request(kind, kept=kept, needs_reply=True)
        received = self.channel.wait_for_reply(number)
        return None if received is None else received[0].digest

    @property
    def params(self) -> Params:
        if self._has_stale_params:
            self._fetch_params()
        return self.server_copy.params

    def request_batch(self, request: BatchRequest) -> None:
        self._send_params()
        self._request_number = self.channel.send_request(
            "ask", batch=request, needs_reply=request.needs_activation
        )
        self._has_changed = self._has_stale_params = True

    def _send_params(self) -> None:
        if not self._has_sent_params:
            self.channel.send_request("take", self.server_copy.params)
            self._has_sent_params = self._has_changed = True

    def forward(self) -> object | None:
        received = self.channel.wait_for_reply(self._request_number)
        if received is None:
            return None
        reply, tensors = received
        if tensors.keys() != {frames.ACTIVATIONS, frames.LABELS}:
            return tensors  # no `Message`, so validation rejects it
        return Message(
            reply.shape,
            frames.tensor_to_bytes(tensors[frames.ACTIVATIONS]),
            frames.tensor_to_bytes(tensors[frames.LABELS]),
        )

    def backward(self, gradient: bytes | None) -> None:
        tensors = None if gradient is None else {frames.GRADIENT: frames.bytes_to_tensor(gradient)}
        self.channel.send_request("learn", tensors)

    def skip(self) -> None:
        self.channel.send_request("drop")

    def load_params(self, params: Mapping[str, Tensor]) -> None:
        self.server_copy.load_params(params)
        self._has_stale_params = False
        self._has_sent_params = False  # sent when they are needed, as they may change again

    def test(self, server_params: Params, max_tests: int) -> float | None:
        """Let the device test its network; return the accuracy, or None without a valid reply."""
        if not max_tests:
            return None
        self._send_params()
        number = self.channel.send_request("test", server_params, needs_reply=True)
        received = self.channel.wait_for_reply(number)
        if received is None:
            return None
        tests, correct = received[0].tests, received[0].correct
        is_possible = 1 <= tests <= max_tests and 0 <= correct <= tests
        return correct / tests if is_possible else None

    def digest(self) -> str:
        self._keep_part()
        return self._kept.digest

    def _keep_part(self) -> None:
        """Let the device keep its part, if it is there; what it trains is lost without that."""
        if not self.channel.is_in_round:
            return
        self._send_params()
        if self._has_changed:
            kept = frames.KeptPart(self._kept.number + 1)
            found = self._request_digest("keep", kept)
            if found is not None:
                self._kept = frames.KeptPart(kept.number, found)
                self._has_changed = False

    def state_dict(self) -> Params:
        """Return the number and digest of the part that the device keeps, and unsent parameters."""
        self._keep_part()
        params = {} if self._has_sent_params else clone(self.server_copy.params)
        kept = {
            "number": torch.tensor(self._kept.number),
            "digest": frames.bytes_to_tensor(self._kept.digest.encode()),
        }
        return flatten({"kept": kept, "params": params})

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        digest = frames.tensor_to_bytes(state["kept/digest"]).decode()
        self._kept = frames.KeptPart(int(state["kept/number"]), digest)
        params = select_subtree(state, "params")
        if params:
            self.load_params(params)
        self._channel_epoch = ""

    def _fetch_params(self) -> None:
        """Update the server's copy from the device; keep it as it is without a valid reply."""
        self._has_stale_params = False
        number = self.channel.send_request("params", needs_reply=True)
        received = self.channel.wait_for_reply(number)
        if received is None:
            return
        params, policy = received[1], self._policy
        problem = next(iter_part_problems(params, self.server_copy.params, policy.largest), None)
        problem = problem or next(iter_change_problems(params, self._start, policy), None)
        if problem is not None:
            self.problems.append(f"client {self.channel.device}: expected {problem}")
            self.channel.leave_round()
            return
        clipped = clip_change(params, self._start, policy)
        self.server_copy.load_params(params if clipped is None else clipped)
        if clipped is not None:
            self._has_sent_params = False  # the device gets the shorter change


def iter_part_problems(params: Params, expected: Params, max_abs: float) -> Iterator[str]:
    """Yield why no honest device sends these parameters."""
    yield from check_tensors("part", params, make_specs(expected))
    yield from check_values("part", params, max_abs)
    for name, tensor in select_variances(params).items():
        if tensor.numel() and tensor.min() < 0:
            yield f"no variance below 0 at {name!r}, got {float(tensor.min()):.3g}"


def iter_change_problems(params: Params, start: Params, policy: ValidationPolicy) -> Iterator[str]:
    """Yield why a part cannot be the start of its round after honest training."""
    for name, tensor in params.items():
        limit = MAX_GROWTH * max(1.0, measure_max(start[name]))
        if measure_max(tensor) > limit:
            yield f"part {name!r} of numbers up to {limit:g}, got {measure_max(tensor):.6g}"
    length = measure_change(params, start)
    if policy.norm is not None and length > policy.norm and not policy.clip:
        yield f"a part that changes by at most {policy.norm:g}, got {length:.6g}"


def clip_change(params: Params, start: Params, policy: ValidationPolicy) -> Params | None:
    """Return a part whose change is shortened to the policy's norm, if it is longer."""
    if policy.norm is None or (length := measure_change(params, start)) <= policy.norm:
        return None
    factor = policy.norm / length
    return {
        name: start[name] + factor * (tensor - start[name])
        if tensor.is_floating_point()
        else tensor
        for name, tensor in params.items()
    }


def measure_change(params: Params, start: Params) -> float:
    """Return the Euclidean norm of a part's change, without integer counters."""
    squares = [
        float((tensor.to(torch.float64) - start[name].to(torch.float64)).square().sum())
        for name, tensor in params.items()
        if tensor.is_floating_point()
    ]
    return math.sqrt(sum(squares))


def measure_max(tensor: Tensor) -> float:
    if not tensor.numel() or not tensor.is_floating_point():
        return 0.0
    return float(tensor.abs().max())
