"""The compact pass as a program: fixed instructions, and the queries that depend on the subnet.

A `CompactProgram` is built once per network. Binding it to a subnet computes which entries of each
parameter are kept, and the indices and factors that instructions need.
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

from pliant.nn.compiler import channels
from pliant.nn.compiler.channels import ChannelSpans
from pliant.nn.compiler.layer_weights import PreparedWeight, WeightRead, prepare_weights
from pliant.nn.subnet import Subnet

Shape = tuple[int, ...]
ParamSlicing = tuple[ChannelSpans | None, ...]  # per dimension of a parameter; None: not sliced
SubnetQuery = Callable[["ChannelIndex"], Any]  # computed per subnet for an instruction
Env = list[Any]  # values by slot


@dataclass
class Instruction:
    """One operation: reads slots, writes one, then frees those that are not read again."""

    run: Callable[[Env, "BoundProgram"], Any]
    slot: int
    name: str
    freed_slots: tuple[int, ...] = ()


@dataclass(frozen=True)
class LayerCost:
    """Multiply-adds of one layer per sample: `unit_macs` × kept outputs × kept inputs."""

    layer: str
    unit_macs: int
    outputs: ChannelSpans
    inputs: ChannelSpans | None  # None: depthwise
    passes: int = 1  # forward, plus one each for the gradients of weights and inputs


@dataclass(frozen=True)
class ActivationCost:
    """A tensor that the forward pass writes: `unit_size` entries per sample and kept channel."""

    unit_size: int
    spans: ChannelSpans


@dataclass(frozen=True)
class DenseFallback:
    """A value whose absent channels are filled with zeros, and why."""

    value: str
    reader: str
    reason: str


@dataclass
class CompactProgram:
    """The parts of a compact pass that are the same for all subnets."""

    input_slots: list[int] = field(default_factory=list)
    input_shapes: list[Shape] = field(default_factory=list)  # without the batch
    instructions: list[Instruction] = field(default_factory=list)
    num_slots: int = 0
    output: Any = None
    output_rows: list[float] = field(default_factory=list)  # of each output tensor, per sample
    slicings: dict[str, ParamSlicing] = field(default_factory=dict)
    param_shapes: dict[str, Shape] = field(default_factory=dict)
    slicing_groups: dict[tuple[Shape, ParamSlicing], list[str]] = field(default_factory=dict)
    queries: list[SubnetQuery] = field(default_factory=list)
    weight_reads: list[WeightRead] = field(default_factory=list)
    layer_costs: list[LayerCost] = field(default_factory=list)
    activations: list[ActivationCost] = field(default_factory=list)
    dense_fallbacks: list[DenseFallback] = field(default_factory=list)
    # may lose all channels even though every site keeps a filter
    fragile_spans: list[ChannelSpans] = field(default_factory=list)

    @cached_property
    def min_channels_last_batch(self) -> float:
        """Return the batch size from which images are stored channels last.

        This is faster for images, but every step converts all kernels. Measured on VGG-11, it is
        worth it from as many activations as weights.
        """
        weights = sum(prod(shape) for shape in self.param_shapes.values() if len(shape) == 4)
        written = sum(part.unit_size * channels.width(part.spans) for part in self.activations)
        return weights / written if written else 0.0


class ChannelIndex:
    """Channel positions of one subnet, computed on demand and cached."""

    def __init__(self, subnet: Subnet, device: torch.device, dtype: torch.dtype) -> None:
        self.masks, self._scales = subnet.masks, subnet.scales
        self.device, self.dtype = device, dtype
        self._positions: dict[int, NDArray[np.int64]] = {}

    def positions(self, spans: ChannelSpans) -> NDArray[np.int64]:
        # keyed by identity: programs reuse span objects, and hashing them costs more than this
        positions = self._positions.get(id(spans))
        if positions is None:
            positions = self._positions[id(spans)] = channels.find_positions(spans, self.masks)
        return positions

    def count(self, spans: ChannelSpans) -> int:
        return len(self.positions(spans))

    def find(self, spans: ChannelSpans, present: ChannelSpans) -> NDArray[np.int64]:
        """Return where these channels are in a value that has others present (none: all)."""
        positions = self.positions(spans)
        return np.searchsorted(self.positions(present), positions) if present else positions

    def compute_factors(self, spans: ChannelSpans) -> NDArray[np.float64] | float:
        return channels.compute_factors(spans, self.masks, self._scales)

    def to_index_tensor(self, positions: NDArray[np.int64]) -> Tensor:
        """Convert positions to a tensor on the device of the pass."""
        tensor = torch.from_numpy(positions)
        return tensor if self.device.type == "cpu" else tensor.to(self.device, non_blocking=True)

    def to_float_tensor(self, values: NDArray[np.float64], shape: Shape) -> Tensor:
        tensor = torch.from_numpy(values).to(self.device, self.dtype, non_blocking=True)
        return tensor.view(shape)


@dataclass(frozen=True)
class Slice:
    """The kept rows of a parameter viewed as (rows, block); None keeps all."""

    rows: Tensor | None
    block: int
    shape: Shape


class BoundProgram:
    """A program bound to one subnet: query results, and parameter slices on demand."""

    def __init__(self, program: CompactProgram, channel_index: ChannelIndex) -> None:
        self.program = program
        self.channel_index = channel_index
        self.results = [query(channel_index) for query in program.queries]
        self.params: Mapping[str, Tensor] = {}
        self.weights: list[PreparedWeight] = []

    def param(self, name: str | None) -> Tensor | None:
        """Return a parameter of the current run; None if the layer has none."""
        return None if name is None else self.params[name]

    def scale(self, x: Tensor, factors: int | None) -> Tensor:
        """Multiply a value by the result of a query for factors, if there is one."""
        factor = None if factors is None else self.results[factors]
        return x if factor is None else x * factor

    @cached_property
    def slices(self) -> dict[str, Slice]:
        slices: dict[str, Slice] = {}
        for (shape, slicing), names in self.program.slicing_groups.items():
            slices.update(dict.fromkeys(names, self._compute_slice(shape, slicing)))
        return slices

    def _compute_slice(self, shape: Shape, slicing: ParamSlicing) -> Slice:
        last, block = find_sliced_dim(shape, slicing)
        subnet_shape, rows = list(shape), np.zeros(1, np.int64)
        for dim in range(last + 1):
            spans, size = slicing[dim], shape[dim]
            positions = np.arange(size) if spans is None else self.channel_index.positions(spans)
            subnet_shape[dim] = len(positions)
            if dim == last and (repeat := find_common_repeat(spans)) > 1:
                positions, size = positions[::repeat] // repeat, size // repeat
            rows = (rows[:, None] * size + positions).ravel()
        if tuple(subnet_shape) == shape:
            return Slice(None, 0, shape)
        return Slice(self.channel_index.to_index_tensor(rows), block, tuple(subnet_shape))


def find_sliced_dim(shape: Shape, slicing: ParamSlicing) -> tuple[int, int]:
    """Return the last sliced dimension (-1: none), and the length of contiguous runs.

    A run includes the repeats (e.g. flattened pixels) of a channel.
    """
    last = max((dim for dim, spans in enumerate(slicing) if spans is not None), default=-1)
    if last < 0:
        return last, 1
    return last, prod(shape[last + 1 :]) * find_common_repeat(slicing[last])


def find_common_repeat(spans: ChannelSpans | None) -> int:
    """Return the repeat of all spans, or 1 if they differ."""
    repeats = {span.repeat for span in spans or ()}
    return repeats.pop() if len(repeats) == 1 else 1


def execute(bound: BoundProgram, params: Mapping[str, Tensor], inputs: Sequence[Any]) -> Any:
    """Run the compact pass on compact parameters."""
    program = bound.program
    if len(inputs) != len(program.input_slots):
        raise ValueError(f"Expected {len(program.input_slots)} inputs, got {len(inputs)}")
    env: Env = [None] * program.num_slots
    is_channels_last = False
    for slot, shape, value in zip(program.input_slots, program.input_shapes, inputs, strict=True):
        if value.shape[1:] != shape:
            raise _make_shape_error(shape, tuple(value.shape[1:]))
        env[slot] = value
        if _is_image(value) and len(value) >= program.min_channels_last_batch:
            env[slot], is_channels_last = _to_channels_last(value), True
    bound = copy.copy(bound)  # query results are shared, parameters belong to this run
    bound.params = params
    bound.weights = prepare_weights(
        program.weight_reads, params, bound.results, len(inputs[0]), is_channels_last
    )
    for instruction in program.instructions:
        env[instruction.slot] = instruction.run(env, bound)
        for slot in instruction.freed_slots:
            env[slot] = None
    return resolve_slots(program.output, env)


def _make_shape_error(expected: Shape, actual: Shape) -> ValueError:
    """Make an error for an input of a shape that the program was not compiled for."""
    advice = "pass an example of that shape to pliant.elastic"
    if len(actual) == len(expected) > 1 and actual[0] == expected[0]:
        advice = f"use net.at({', '.join(map(str, actual[1:]))}) instead of net"
    return ValueError(
        f"Expected inputs of {format_shape(expected)}, as in the example given to pliant.elastic, "
        f"got {format_shape(actual)}: {advice}"
    )


def format_shape(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape)) or "no size"


def _is_image(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() == 4 and value.device.type == "cpu"


def _to_channels_last(value: Tensor) -> Tensor:
    """Convert images to the memory format that is fastest for convolutions on a CPU."""
    value = value.contiguous(memory_format=torch.channels_last)
    if value.shape[1] == 1:  # contiguous in both formats: set strides explicitly
        height, width = value.shape[2:]
        return value.as_strided(value.shape, (height * width, 1, width, 1))
    return value


@dataclass(frozen=True)
class Slot:
    """A reference to a slot, within arguments or the output."""

    number: int


def replace_nodes(structure: Any, slot_of: Callable[[fx.Node], int]) -> Any:
    return fx.node.map_arg(structure, lambda node: Slot(slot_of(node)))  # type: ignore[arg-type,return-value] # fx does not know Slot


def resolve_slots(structure: Any, env: Env) -> Any:
    return map_slots(structure, lambda slot: env[slot.number])


def map_slots(structure: Any, function: Callable[[Slot], Any]) -> Any:
    """Replace every slot in nested arguments."""
    if isinstance(structure, Slot):
        return function(structure)
    if isinstance(structure, tuple | list):
        return type(structure)(map_slots(part, function) for part in structure)
    if isinstance(structure, dict):
        return {key: map_slots(part, function) for key, part in structure.items()}
    if isinstance(structure, slice):
        parts = (structure.start, structure.stop, structure.step)
        return slice(*(map_slots(part, function) for part in parts))
    return structure


def collect_slots(structure: Any) -> list[int]:
    """Return the numbers of all slots in nested arguments."""
    slots: list[int] = []

    def collect(slot: Slot) -> None:
        slots.append(slot.number)

    map_slots(structure, collect)
    return slots


def scatter_channels(x: Tensor, axis: int, size: int, positions: Tensor) -> Tensor:
    """Scatter channels into `size` zeros."""
    shape = list(x.shape)
    shape[axis] = size
    return x.new_zeros(shape).index_copy(axis, positions, x)


def broadcast_shape(axis: int, dims: int) -> Shape:
    """Return the shape that broadcasts a vector along one axis."""
    return tuple(-1 if dim == axis else 1 for dim in range(dims))
