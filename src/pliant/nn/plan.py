"""The plan of a compact pass: instructions that are the same for every subnet, and what varies.

A `Plan` is made once per network. Binding it to a subnet works out, without tensors, which entries
of each parameter are kept and the few indices and factors that instructions ask for.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, fx

from pliant.nn import channels
from pliant.nn.channels import Mask, Pieces
from pliant.nn.subnet import Subnet

Claim = tuple[Pieces | None, ...]  # for each dimension of a parameter: the channels it follows
Asked = Callable[["Frame"], Any]  # something that an instruction needs to know of a subnet
Environment = list[Any]


@dataclass(frozen=True)
class Instruction:
    """One operation: read slots, write a slot, forget slots that nobody reads any more."""

    run: Callable[[Environment, "Bound"], Any]
    slot: int
    name: str
    done: tuple[int, ...] = ()


@dataclass(frozen=True)
class Work:
    """Multiply-adds of one layer per sample: `each` × kept outputs × kept inputs."""

    layer: str
    each: int
    outputs: Pieces
    inputs: Pieces | None  # None: each output reads itself only (depthwise)
    passes: int  # forward, and one backward each for weights and, behind the first layer, inputs


@dataclass(frozen=True)
class Written:
    """A tensor that the forward pass writes: `each` numbers per sample and kept channel."""

    each: int
    pieces: Pieces


@dataclass(frozen=True)
class Density:
    """A place where absent channels had to be filled with zeros, and why."""

    value: str
    reader: str
    why: str


@dataclass
class Plan:
    """Everything about a network's compact pass that no subnet changes."""

    inputs: list[int] = field(default_factory=list)
    instructions: list[Instruction] = field(default_factory=list)
    slots: int = 0
    output: Any = None
    claims: dict[str, Claim] = field(default_factory=dict)
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    forms: list[tuple[tuple[tuple[int, ...], Claim], list[str]]] = field(default_factory=list)
    asked: list[Asked] = field(default_factory=list)
    works: list[Work] = field(default_factory=list)
    written: list[Written] = field(default_factory=list)
    densities: list[Density] = field(default_factory=list)
    fragile: list[Pieces] = field(default_factory=list)  # could be empty with no site empty


class Frame:
    """The channel positions of one subnet, each worked out once."""

    def __init__(self, subnet: Subnet, device: torch.device, dtype: torch.dtype) -> None:
        self.subnet = subnet
        self.device = device
        self.dtype = dtype
        self._kept: dict[int, NDArray[np.int64]] = {}

    def kept(self, pieces: Pieces) -> NDArray[np.int64]:
        """Return the kept positions of these pieces."""
        # by identity: a plan passes the same object along, and hashing it costs more than the work
        found = self._kept.get(id(pieces))
        if found is None:
            found = self._kept[id(pieces)] = channels.kept(pieces, self.masks)
        return found

    @property
    def masks(self) -> Sequence[Mask]:
        """Return the kept filters of each site."""
        return self.subnet.masks

    def count(self, pieces: Pieces) -> int:
        """Return how many channels of these pieces are there."""
        return len(self.kept(pieces))

    def factors(self, pieces: Pieces) -> NDArray[np.float64] | float:
        """Return what is pending on these pieces."""
        return channels.factors(pieces, self.masks, self.subnet.scales)

    def index(self, places: NDArray[np.int64]) -> Tensor:
        """Return positions as a tensor on the device of the pass."""
        made = torch.from_numpy(places)
        return made if self.device.type == "cpu" else made.to(self.device, non_blocking=True)

    def numbers(self, values: NDArray[np.float64], shape: tuple[int, ...]) -> Tensor:
        """Return factors as a tensor of this shape."""
        made = torch.from_numpy(values).to(self.device, self.dtype, non_blocking=True)
        return made.view(shape)


@dataclass(frozen=True)
class Slice:
    """Which rows of a parameter, seen as (rows, block), are kept; None keeps all."""

    rows: Tensor | None
    block: int
    shape: tuple[int, ...]


class Bound:
    """A plan bound to one subnet: answers for instructions, slices of parameters on demand."""

    def __init__(self, plan: Plan, frame: Frame) -> None:
        self.plan = plan
        self.frame = frame
        self.answers = [ask(frame) for ask in plan.asked]
        self.params: Mapping[str, Tensor] = {}

    @cached_property
    def slices(self) -> dict[str, Slice]:
        """Return which entries of each parameter are kept."""
        found: dict[str, Slice] = {}
        for (shape, claim), names in self.plan.forms:
            found.update(dict.fromkeys(names, self._slice(shape, claim)))
        return found

    def _slice(self, shape: tuple[int, ...], claim: Claim) -> Slice:
        last, block = form(shape, claim)
        if last < 0:
            return Slice(None, 0, shape)
        rows, small = rows_of(self.frame, shape, claim)
        return (
            Slice(None, 0, shape) if small == shape else Slice(self.frame.index(rows), block, small)
        )


def bind(plan: Plan, subnet: Subnet, device: torch.device, dtype: torch.dtype) -> Bound:
    """Work out what the plan needs to know of a subnet."""
    return Bound(plan, Frame(subnet, device, dtype))


def form(shape: tuple[int, ...], claim: Claim) -> tuple[int, int]:
    """Return the last dimension that follows channels (-1: none), and the length of runs behind it.

    The pixels of a flattened channel come together, so they are part of the run.
    """
    last = max((dim for dim, pieces in enumerate(claim) if pieces is not None), default=-1)
    if last < 0:
        return last, 1
    return last, prod(shape[last + 1 :]) * repeat(claim[last])


def rows_of(
    frame: Frame, shape: tuple[int, ...], claim: Claim
) -> tuple[NDArray[np.int64], tuple[int, ...]]:
    """Return which runs of a parameter are kept, and the shape that they make."""
    last, _ = form(shape, claim)
    small = list(shape)
    rows: NDArray[np.int64] | None = None
    for dim in range(last + 1):
        pieces, size = claim[dim], shape[dim]
        if pieces is None:
            places = np.arange(size)
        else:
            places = frame.kept(pieces)
            small[dim] = len(places)
        if dim == last and (together := repeat(pieces)) > 1:
            places, size = places[::together] // together, size // together
        rows = places if rows is None else (rows[:, None] * size + places).ravel()
    assert rows is not None
    return rows, tuple(small)


def repeat(pieces: Pieces | None) -> int:
    """Return how many neighbours each channel stands for, 1 where that differs."""
    repeats = {piece.repeat for piece in pieces or ()}
    return repeats.pop() if len(repeats) == 1 else 1


def execute(plan: Plan, bound: Bound, params: Mapping[str, Tensor], inputs: Sequence[Any]) -> Any:
    """Run the compact pass on compact parameters."""
    if len(inputs) != len(plan.inputs):
        raise ValueError(f"Expected {len(plan.inputs)} inputs, got {len(inputs)}")
    environment: Environment = [None] * plan.slots
    for slot, value in zip(plan.inputs, inputs, strict=True):
        environment[slot] = _laid(value)
    bound = copy.copy(bound)  # its answers are shared, its parameters are this run's own
    bound.params = params
    for instruction in plan.instructions:
        environment[instruction.slot] = instruction.run(environment, bound)
        for slot in instruction.done:
            environment[slot] = None
    return filled(plan.output, environment)


def _laid(value: Any) -> Any:
    """Put images into the memory format in which a CPU convolves fastest."""
    if not isinstance(value, Tensor) or value.dim() != 4 or value.device.type != "cpu":
        return value
    value = value.contiguous(memory_format=torch.channels_last)
    if value.shape[1] == 1:  # both formats at once; say which one is meant
        high, wide = value.shape[2:]
        return value.as_strided(value.shape, (high * wide, 1, wide, 1))
    return value


@dataclass(frozen=True)
class Slot:
    """A reference to a slot inside the structure of arguments or of the output."""

    number: int


def referring(structure: Any, slot: Callable[[fx.Node], int]) -> Any:
    """Put slots in the place of the nodes of a graph."""
    return fx.node.map_arg(structure, lambda node: Slot(slot(node)))  # type: ignore[arg-type,return-value] # a Slot is none of fx's


def filled(structure: Any, environment: Environment) -> Any:
    """Put values in the place of slots."""
    if isinstance(structure, Slot):
        return environment[structure.number]
    if isinstance(structure, tuple | list):
        return type(structure)(filled(part, environment) for part in structure)
    if isinstance(structure, dict):
        return {key: filled(part, environment) for key, part in structure.items()}
    if isinstance(structure, slice):
        parts = (structure.start, structure.stop, structure.step)
        return slice(*(filled(part, environment) for part in parts))
    return structure
