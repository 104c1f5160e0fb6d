"""A split client whose part lives on a device.

The server keeps a copy of the part as it last saw it. A device receives this copy when it joins or
rejoins, and training continues from it if the device never returns.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from pliant.deploy.grpc import frames
from pliant.deploy.grpc.channel import DeviceChannel
from pliant.methods.validation import select_variances
from pliant.params import Params, clone, is_finite, select_subtree
from pliant.split.client import BatchRequest, LocalClient
from pliant.split.payload import Message


class RemoteClient:
    """A split client behind a device channel."""

    def __init__(self, channel: DeviceChannel, server_copy: LocalClient, max_abs: float) -> None:
        self.channel = channel
        self.server_copy = server_copy
        self._max_abs = max_abs  # of the numbers in a part
        self._has_stale_state = False  # the device has trained since
        self._has_stale_params = False
        self._has_sent_params = True  # the device has the newest parameters
        self._channel_epoch = ""
        self._request_number: int | None = None
        self.problems: list[str] = []  # with what the device sent

    def join_round(self) -> bool:
        """Add the device to the round if it is ready; send it its part in a new epoch."""
        epoch = self.channel.join_round()
        if epoch is None:
            return False
        if epoch != self._channel_epoch:
            if self.channel.send_request("restore", tensors=self.server_copy.state_dict()) is None:
                return False
            self._channel_epoch = epoch
            self._has_stale_state = self._has_stale_params = False
            self._has_sent_params = True
        return self.channel.is_in_round

    @property
    def params(self) -> Params:
        if self._has_stale_params:
            self._fetch("params")
        return self.server_copy.params

    def request_batch(self, request: BatchRequest) -> None:
        if not self._has_sent_params:
            self._send_request("take", self.server_copy.params)
            self._has_sent_params = True
        self._request_number = self._send_request(
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
        self._send_request("learn", tensors)

    def skip(self) -> None:
        self._send_request("drop")

    def load_params(self, params: Mapping[str, Tensor]) -> None:
        self.server_copy.load_params(params)
        self._has_stale_params = False
        self._has_sent_params = False  # sent with the next batch request, as they may change again

    def reset_optimiser(self) -> None:
        self.server_copy.reset_optimiser()
        self._send_request("forget")

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

    def _send_request(
        self,
        kind: frames.RequestKind,
        tensors: Mapping[str, Tensor] | None = None,
        *,
        batch: BatchRequest | None = None,
        needs_reply: bool = False,
    ) -> int | None:
        if self.channel.epoch != self._channel_epoch:
            return None  # it has left, and may rejoin in the next round
        return self.channel.send_request(
            kind, batch=batch, tensors=tensors, needs_reply=needs_reply
        )

    def _fetch(self, kind: frames.RequestKind) -> None:
        """Update the server's copy from the device; keep it as it is without a valid reply."""
        self._has_stale_params = False
        if kind == "state":
            self._has_stale_state = False
        received = self.channel.wait_for_reply(self._send_request(kind, needs_reply=True))
        if received is None:
            return
        tensors = received[1]
        expected = self.server_copy.state_dict()
        if kind == "params":
            expected = select_subtree(expected, "params")
        problem = find_mismatch(tensors, expected)
        if problem is None:
            params = tensors if kind == "params" else select_subtree(tensors, "params")
            problem = find_implausible_value(params, self._max_abs)
        if problem is not None:
            self.problems.append(f"client {self.channel.device}: expected {problem}")
            self.channel.exclude_device()
        elif kind == "params":
            self.server_copy.load_params(tensors)
        else:
            self.server_copy.load_state_dict(tensors)


def find_mismatch(received: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> str | None:
    """Return how a device's tensors differ in names, shapes or types; None if they match."""
    if received.keys() != expected.keys():
        name = sorted(received.keys() ^ expected.keys())[0]
        return f"the tensors of its part, got a difference at {name[:60]!r}"
    for name, tensor in expected.items():
        other = received[name]
        if other.shape != tensor.shape or other.dtype != tensor.dtype:
            shape, other_shape = tuple(tensor.shape), tuple(other.shape)
            return f"{shape} of {tensor.dtype} at {name!r}, got {other_shape} of {other.dtype}"
    return None if is_finite(received) else "a part of finite numbers"


def find_implausible_value(params: Mapping[str, Tensor], max_abs: float) -> str | None:
    """Return which parameter has a value that no honest device sends; None if all are plausible."""
    for name, tensor in sorted(params.items()):
        largest = float(tensor.to(torch.float64).abs().max()) if tensor.numel() else 0.0
        if largest > max_abs:
            return f"numbers up to {max_abs:g} at {name!r}, got {largest:.6g}"
    for name, tensor in select_variances(params).items():
        lowest = float(tensor.min()) if tensor.numel() else 0.0
        if lowest < 0:
            return f"no variance below 0 at {name!r}, got {lowest:.3g}"
    return None
