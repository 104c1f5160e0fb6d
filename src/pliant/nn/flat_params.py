"""Parameters in a few flat buffers, so that a subnet is extracted in a few copies.

Tensors whose kept entries come in runs of the same length (a 3x3 kernel, the pixels of a flattened
channel, single numbers) share one flat tensor. Changing the subnet then takes one gather and one
scatter per run length, instead of two per parameter. Kept rows are found for all buffers at once;
the resulting shapes are cached, since consecutive subnets often share them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pliant.nn.compiler.channels import ChannelSpan, ChannelSpans, SiteFilter, compute_mask, width
from pliant.nn.compiler.program import (
    ChannelIndex,
    CompactProgram,
    ParamSlicing,
    find_common_repeat,
    find_sliced_dim,
)
from pliant.params import Params

LARGE_TENSOR = 1 << 14  # entries; larger tensors get their own buffer, as packing them costs more
MAX_CACHED_SHAPES = 64  # subnets; rounded sampling produces fewer different shapes
Shapes = tuple[tuple[int, ...], ...]
CopyPair = tuple[Tensor, Tensor, int]  # rows of a full buffer, the subnet's rows, buffer index


@dataclass(frozen=True)
class BufferSlice:
    """The rows of a flat buffer that a subnet keeps (None: all), and its tensor shapes."""

    rows: Tensor | None
    shapes: Shapes
    block: int  # entries per row


class KeepBits:
    """A bit vector per subnet, over the filters of all sites and expressions of them.

    Two of these bits, at fixed positions, decide whether a parameter entry is kept.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self._site_starts = np.cumsum([0, *sizes])
        self._always_kept_bit = int(self._site_starts[-1])
        self._derived_starts: dict[ChannelSpan, int] = {}
        self._num_bits = self._always_kept_bit + 1

    def assign_bits(self, spans: ChannelSpans | None, size: int) -> NDArray[np.int64]:
        """Return the bit that decides each entry along one dimension, once per common repeat."""
        if spans is None:
            return np.full(size, self._always_kept_bit)
        common = find_common_repeat(spans)
        bits = [np.repeat(self._assign_span_bits(span), span.repeat // common) for span in spans]
        return np.concatenate(bits)

    def _assign_span_bits(self, span: ChannelSpan) -> NDArray[np.int64]:
        expression = span.expression
        if expression is None:
            return np.full(span.size, self._always_kept_bit)
        if isinstance(expression, SiteFilter):
            return int(self._site_starts[expression.site]) + expression.start + np.arange(span.size)
        if span not in self._derived_starts:
            self._derived_starts[span] = self._num_bits
            self._num_bits += span.size
        return self._derived_starts[span] + np.arange(span.size)

    def compute_bits(self, channel_index: ChannelIndex) -> NDArray[np.bool_]:
        derived = [compute_mask(span, channel_index.masks) for span in self._derived_starts]
        return np.concatenate([*channel_index.masks, np.ones(1, np.bool_), *derived])


@dataclass(frozen=True)
class SlicedShape:
    """The shape of a tensor that is sliced along one or two dimensions."""

    shape: tuple[int, ...]
    first_dim: int
    last_dim: int
    unsliced_size: int  # product of the other dimensions
    output_index: int  # of the channels along the first of two dimensions; -1: of none

    def compute_shape(self, numel: int, output_counts: list[int]) -> tuple[int, ...]:
        """Return the shape of a tensor with this many entries and outputs."""
        if len(self.shape) == 1:
            return (numel,)
        shape, num_outputs = list(self.shape), output_counts[self.output_index]
        shape[self.first_dim] = num_outputs
        shape[self.last_dim] = numel // (self.unsliced_size * num_outputs)
        return tuple(shape)


@dataclass(frozen=True)
class FlatBuffer:
    """Tensors stored end to end, viewed as rows of `block` entries."""

    names: tuple[str, ...]
    block: int
    shapes: Shapes
    slicings: tuple[ParamSlicing, ...]
    is_sliced: bool  # otherwise always kept in full


class SubnetIndexer:
    """Find the rows that each subnet keeps of flat buffers."""

    def __init__(self, flat_buffers: Sequence[FlatBuffer], sizes: Sequence[int]) -> None:
        self.flat_buffers = flat_buffers
        self._keep_bits = KeepBits(sizes)
        self._output_index: dict[ChannelSpans, int] = {}
        self._sliced_shapes: list[list[SlicedShape]] = []
        pairs = []
        for buffer in flat_buffers:
            tensors = zip(buffer.shapes, buffer.slicings, strict=True) if buffer.is_sliced else ()
            self._sliced_shapes.append([])
            for shape, slicing in tensors:
                self._sliced_shapes[-1].append(self._make_sliced_shape(shape, slicing))
                pairs.append(_find_row_bits(self._keep_bits, shape, slicing))
        for spans in self._output_index:  # outputs are counted like the rows of a tensor
            bits = self._keep_bits.assign_bits(spans, width(spans))
            pairs.append((bits, bits))
        empty = np.zeros(0, np.int64)
        self._first_bits = np.concatenate([empty, *(first for first, _ in pairs)])
        self._second_bits = np.concatenate([empty, *(second for _, second in pairs)])
        self._row_bounds = np.cumsum([0, *(len(first) for first, _ in pairs)])
        self._shape_cache: dict[bytes, tuple[Shapes, ...]] = {}

    def index_subnet(self, channel_index: ChannelIndex) -> list[BufferSlice]:
        """Return the slices of a subnet; equal shapes are usually one object, but not always."""
        bits = self._keep_bits.compute_bits(channel_index)
        kept_rows = np.flatnonzero(bits.take(self._first_bits) & bits.take(self._second_bits))
        bounds = np.searchsorted(kept_rows, self._row_bounds)
        key = bounds.tobytes()
        if key not in self._shape_cache:
            if len(self._shape_cache) == MAX_CACHED_SHAPES:
                self._shape_cache.clear()
            self._shape_cache[key] = self._compute_shapes(np.diff(bounds).tolist())
        slices, stop = [], 0
        for buffer, subnet_shapes in zip(self.flat_buffers, self._shape_cache[key], strict=True):
            rows = None
            if buffer.is_sliced:
                start, stop = stop, stop + len(subnet_shapes)
                if subnet_shapes != buffer.shapes:
                    own_rows = kept_rows[bounds[start] : bounds[stop]] - self._row_bounds[start]
                    rows = channel_index.to_index_tensor(own_rows)
            slices.append(BufferSlice(rows, subnet_shapes, buffer.block))
        return slices

    def _compute_shapes(self, row_counts: list[int]) -> tuple[Shapes, ...]:
        counts = row_counts[len(row_counts) - len(self._output_index) :]
        outputs = [
            count * find_common_repeat(spans)
            for spans, count in zip(self._output_index, counts, strict=True)
        ]
        outputs.append(1)  # at index -1: no sliced outputs
        rows = iter(row_counts)
        return tuple(
            tuple(sliced.compute_shape(next(rows) * buffer.block, outputs) for sliced in shapes)
            if buffer.is_sliced
            else buffer.shapes
            for buffer, shapes in zip(self.flat_buffers, self._sliced_shapes, strict=True)
        )

    def _make_sliced_shape(self, shape: tuple[int, ...], slicing: ParamSlicing) -> SlicedShape:
        first, *others = [dim for dim, spans in enumerate(slicing) if spans is not None]
        assert len(others) <= 1, "no parameter is sliced in three dimensions"
        unsliced_size = prod(s for dim, s in enumerate(shape) if dim not in (first, *others))
        if not others or (outputs := slicing[first]) is None:
            return SlicedShape(shape, first, first, unsliced_size, -1)
        output_index = self._output_index.setdefault(outputs, len(self._output_index))
        return SlicedShape(shape, first, others[0], unsliced_size, output_index)


class FlatLayout:
    """The assignment of tensors to flat buffers."""

    def __init__(self, program: CompactProgram, params: Mapping[str, Tensor]) -> None:
        groups: dict[tuple[bool, int, str, torch.dtype], list[str]] = {}
        for name, tensor in params.items():
            sliced_dim, block = find_sliced_dim(program.param_shapes[name], program.slicings[name])
            own_buffer = name if prod(program.param_shapes[name]) > LARGE_TENSOR else ""
            groups.setdefault((sliced_dim >= 0, block, own_buffer, tensor.dtype), []).append(name)
        self.flat_buffers = [
            FlatBuffer(
                tuple(names),
                block,
                tuple(program.param_shapes[name] for name in names),
                tuple(program.slicings[name] for name in names),
                is_sliced,
            )
            for (is_sliced, block, _, _), names in groups.items()
        ]
        self.names = tuple(name for buffer in self.flat_buffers for name in buffer.names)

    def pack(self, params: Mapping[str, Tensor]) -> list[Tensor]:
        return [
            torch.cat([params[name].detach().reshape(-1) for name in buffer.names])
            for buffer in self.flat_buffers
        ]

    def unpack(self, flats: list[Tensor]) -> Params:
        """Return the tensors in full-size flat buffers, as views."""
        params: Params = {}
        for buffer, flat in zip(self.flat_buffers, flats, strict=True):
            params.update(zip(buffer.names, split_flat(flat, buffer.shapes), strict=True))
        return params


def _find_row_bits(
    keep_bits: KeepBits, shape: tuple[int, ...], slicing: ParamSlicing
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the two bits that decide each row of a tensor (usually of its output and input)."""
    last, _ = find_sliced_dim(shape, slicing)
    sliced_dims = [dim for dim in range(last + 1) if slicing[dim] is not None]
    bits = [keep_bits.assign_bits(slicing[dim], size) for dim, size in enumerate(shape[: last + 1])]
    for dim in range(last):  # only repeats along the last dimension are within a row
        bits[dim] = np.repeat(bits[dim], find_common_repeat(slicing[dim]))
    grid = np.meshgrid(*bits, indexing="ij")
    return grid[sliced_dims[0]].ravel(), grid[sliced_dims[-1]].ravel()


def gather_rows(flats: Sequence[Tensor], slices: Sequence[BufferSlice]) -> list[Tensor]:
    """Copy the kept rows of each flat buffer, or return it unchanged if all are kept."""
    return [
        flat if part.rows is None else flat.view(-1, part.block).index_select(0, part.rows).view(-1)
        for flat, part in zip(flats, slices, strict=True)
    ]


def make_copy_pairs(
    flats: Sequence[Tensor],
    subnet_flats: Sequence[Tensor],
    slices: Sequence[BufferSlice],
    first_index: int = 0,
) -> list[CopyPair]:
    """Pair full-size buffers with the copies of their kept rows."""
    parts = zip(flats, subnet_flats, slices, strict=True)
    return [
        (flat.view(-1, part.block), subnet_flat.view(-1, part.block), index)
        for index, (flat, subnet_flat, part) in enumerate(parts, first_index)
        if subnet_flat is not flat
    ]


def split_flat(flat: Tensor, shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
    if len(shapes) == 1:
        return [flat.view(shapes[0])]
    parts = torch.split(flat, [prod(shape) for shape in shapes])
    # most tensors are vectors, which parts are already
    return [
        part if len(shape) == 1 else part.view(shape)
        for part, shape in zip(parts, shapes, strict=True)
    ]
