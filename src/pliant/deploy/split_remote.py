"""A client whose part is on a device: what the server asks of it, and what it knows of it.

The server's copy is what it last saw of the part. It is what a device is given when it comes, also
after it had gone, and what is gone on from if the device never comes back.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from pliant.deploy.split_frames import BODY, LABELS, SLOPE, Kind, to_bytes, to_tensor
from pliant.deploy.split_line import Line
from pliant.methods.guard import variances
from pliant.params import Params, clone, is_finite
from pliant.split.client import Here, Turn
from pliant.split.part import below
from pliant.split.payload import Message


class Remote:
    """A client at the other end of a line."""

    def __init__(self, line: Line, here: Here, largest: float) -> None:
        self.line = line
        self._here = here  # what the server knows
        self._largest = largest  # number that a part may hold
        self._is_old = False  # the device has trained since
        self._are_params_old = False
        self._is_told = True  # the device has the parameters that it was given
        self._epoch = ""
        self._asked: int | None = None
        self.complaints: list[str] = []  # about what it has sent

    def rejoin(self) -> bool:
        """Take the device into a round if it is there; give it its part where it is new."""
        epoch = self.line.join()
        if epoch is None:
            return False
        if epoch != self._epoch:
            if self.line.ask("restore", tensors=self._here.state()) is None:
                return False
            self._epoch = epoch
            self._is_old = self._are_params_old = False
            self._is_told = True
        return self.line.is_in

    @property
    def params(self) -> Params:
        if self._are_params_old:
            self._fetch("params")
        return self._here.params

    def ask(self, turn: Turn) -> None:
        self._catch_up()
        self._asked = self._tell("ask", turn=turn, is_wanted=turn.talks)
        self._is_old = self._are_params_old = True

    def message(self) -> object | None:
        found = self.line.answer(self._asked)
        if found is None:
            return None
        answer, tensors = found
        if tensors.keys() != {BODY, LABELS}:
            return tensors  # which the guard refuses by name
        return Message(answer.shape, to_bytes(tensors[BODY]), to_bytes(tensors[LABELS]))

    def learn(self, slope: bytes | None) -> None:
        self._tell("learn", None if slope is None else {SLOPE: to_tensor(slope)})

    def drop(self) -> None:
        self._tell("drop")

    def take(self, params: Mapping[str, Tensor]) -> None:
        self._here.take(params)
        self._are_params_old = False
        self._is_told = False  # sent when it is needed: the last one counts

    def forget(self) -> None:
        self._here.forget()
        self._tell("forget")

    def state(self) -> Params:
        if self._is_old:
            given = None if self._is_told else clone(self._here.params)
            self._fetch("state")
            if given is not None:
                self._here.take(given)
        return self._here.state()

    def restore(self, state: Mapping[str, Tensor]) -> None:
        self._here.restore(state)
        self._epoch = ""

    def _catch_up(self) -> None:
        if not self._is_told:
            self._tell("take", self._here.params)
            self._is_told = True

    def _tell(
        self,
        kind: Kind,
        tensors: Mapping[str, Tensor] | None = None,
        *,
        turn: Turn | None = None,
        is_wanted: bool = False,
    ) -> int | None:
        if self.line.epoch != self._epoch:
            return None  # it has gone, and comes back with the next round at the earliest
        return self.line.ask(kind, turn=turn, tensors=tensors, is_wanted=is_wanted)

    def _fetch(self, kind: Kind) -> None:
        """Ask for what the device has; without a valid answer what was known stays."""
        self._are_params_old = False
        if kind == "state":
            self._is_old = False
        found = self.line.answer(self._tell(kind, is_wanted=True))
        if found is None:
            return
        wanted = self._here.state()
        if kind == "params":
            wanted = below("params", wanted)
        why = unlike(found[1], wanted)
        if why is None:
            why = excess(found[1] if kind == "params" else below("params", found[1]), self._largest)
        if why is not None:
            self.complaints.append(f"client {self.line.device}: expected {why}")
            self.line.expel()
        elif kind == "params":
            self._here.take(found[1])
        else:
            self._here.restore(found[1])


def unlike(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> str | None:
    """Return in what a device's part differs from what it can be."""
    if found.keys() != wanted.keys():
        odd = sorted(found.keys() ^ wanted.keys())[0]
        return f"a part with its own tensors, got another at {odd[:60]!r}"
    for name, tensor in wanted.items():
        got = found[name]
        if got.shape != tensor.shape or got.dtype != tensor.dtype:
            shape = tuple(tensor.shape)
            return f"{shape} of {tensor.dtype} at {name!r}, got {tuple(got.shape)} of {got.dtype}"
    return None if is_finite(found) else "a part of finite numbers"


def excess(params: Mapping[str, Tensor], largest: float) -> str | None:
    """Return which of a part's parameters no honest part could have; others may be given them."""
    for name, tensor in sorted(params.items()):
        most = float(tensor.to(torch.float64).abs().max()) if tensor.numel() else 0.0
        if most > largest:
            return f"numbers up to {largest:g} at {name!r}, got {most:.6g}"
    for name, tensor in variances(params).items():
        lowest = float(tensor.min()) if tensor.numel() else 0.0
        if lowest < 0:
            return f"no variance below 0 at {name!r}, got {lowest:.3g}"
    return None
