"""A split client whose part lives on a device.

The server keeps a copy of the part as it last saw it. A device receives this copy when it joins or
rejoins, and training continues from it if the device never returns.
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
    ) -> None:
        self._accept = accept  # what a device declares of its own data, or raise ValueError
        self.declaration_problem: str | None = None
        self._refused_process: str | None = None  # whose declaration was not accepted
        self.channel = channel
        self.server_copy = server_copy
        self._policy = policy
        self._start = clone(server_copy.params)  # of the round
        self._has_stale_state = False  # the device has trained since
        self._has_stale_params = False
        self._has_sent_params = True  # the device has the newest parameters
        self._channel_epoch = ""
        self._request_number: int | None = None
        self.problems: list[str] = []  # with what the device sent

    def join_round(self) -> bool:
        """Add the device to the round if it is ready; send it its part in a new epoch."""
        if self._refused_process is not None and self.channel.process == self._refused_process:
            return False
        epoch = self.channel.join_round()
        if epoch is None:
            return False
        self._start = clone(self.server_copy.params)
        if epoch != self._channel_epoch:
            if self._accept is not None and not self._read_declaration(self._accept):
                return False
            if self.channel.send_request("restore", self.server_copy.state_dict()) is None:
                return False
            log.info("device %s joined", self.channel.device)
            self._channel_epoch = epoch
            self._has_stale_state = self._has_stale_params = False
            self._has_sent_params = True
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
            self.declaration_problem = f"device {self.channel.device}: {error}"
            log.warning("%s", self.declaration_problem)
            self._refused_process = self.channel.process
            self.channel.leave_round()
            return False
        self.declaration_problem = self._refused_process = None
        return True

    @property
    def params(self) -> Params:
        if self._has_stale_params:
            self._fetch("params")
        return self.server_copy.params

    def request_batch(self, request: BatchRequest) -> None:
        if not self._has_sent_params:
            self.channel.send_request("take", self.server_copy.params)
            self._has_sent_params = True
        self._request_number = self.channel.send_request(
            "ask", batch=request, needs_reply=request.needs_activation
        )
        self._has_stale_state = self._has_stale_params = True

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
        self._has_sent_params = False  # sent with the next batch request, as they may change again

    def reset_optimiser(self) -> None:
        self.server_copy.reset_optimiser()
        self.channel.send_request("forget")

    def state_dict(self) -> Params:
        if self._has_stale_state:
            unsent_params = None if self._has_sent_params else clone(self.server_copy.params)
            self._fetch("state")
            if unsent_params is not None:
                self.server_copy.load_params(unsent_params)
        return self.server_copy.state_dict()

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self.server_copy.load_state_dict(state)
        self._channel_epoch = ""

    def _fetch(self, kind: frames.RequestKind) -> None:
        """Update the server's copy from the device; keep it as it is without a valid reply."""
        self._has_stale_params = False
        if kind == "state":
            self._has_stale_state = False
        received = self.channel.wait_for_reply(self.channel.send_request(kind, needs_reply=True))
        if received is None:
            return
        tensors, expected = received[1], self.server_copy.state_dict()
        params = tensors if kind == "params" else select_subtree(tensors, "params")
        if kind == "params":
            expected = select_subtree(expected, "params")
        problem = next(iter_part_problems(tensors, expected, params, self._policy.largest), None)
        problem = problem or next(iter_change_problems(params, self._start, self._policy), None)
        if problem is None and (clipped := clip_change(params, self._start, self._policy)):
            tensors = dict(tensors) | (
                clipped if kind == "params" else flatten({"params": clipped})
            )
            self._has_sent_params = False  # the device gets the shorter change
        if problem is not None:
            self.problems.append(f"client {self.channel.device}: expected {problem}")
            self.channel.leave_round()
        elif kind == "params":
            self.server_copy.load_params(tensors)
        else:
            self.server_copy.load_state_dict(tensors)


def iter_part_problems(
    tensors: Params, expected: Params, params: Params, max_abs: float
) -> Iterator[str]:
    """Yield why no honest device sends these tensors, some of which are parameters."""
    yield from check_tensors("part", tensors, make_specs(expected))
    yield from check_values("part", tensors, math.inf)
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
