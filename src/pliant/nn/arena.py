"""Many tensors in few: parameters lie end to end, so that a subnet is taken out in a few copies.

Tensors whose kept entries come in runs of the same length (a 3x3 kernel, the pixels of a flattened
channel, single numbers) share one flat tensor. Changing the subnet is then one gather and one
scatter for each length instead of two for each parameter. What is kept is found for all shelves
at once, and the shapes that follow are remembered: they often are those of the last subnet.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pliant.nn.channels import Drawn, Piece, Pieces, mask, width
from pliant.nn.plan import Claim, Frame, Plan, form, repeat
from pliant.params import Params

LARGE = 1 << 14  # numbers; a larger tensor has a shelf to itself, since copying it costs more
REMEMBERED = 64  # subnets' shapes that a knife keeps: more than differ when sizes are rounded
Shapes = tuple[tuple[int, ...], ...]
Lane = tuple[Tensor, Tensor, int]  # rows of a full shelf, a subnet's rows of it, its number


@dataclass(frozen=True)
class Cut:
    """What a subnet takes from a shelf: rows (None: all), and the shapes of its parts."""

    rows: Tensor | None
    shapes: Shapes


class Switches:
    """One vector of bits for a subnet: all filters of all sites, and what follows from them.

    Every entry of every parameter is kept or not by two of these bits, whose places never change.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self._begins = np.cumsum([0, *sizes])
        self._always = int(self._begins[-1])
        self._extra: dict[Piece, int] = {}
        self._end = self._always + 1

    def places(self, pieces: Pieces | None, size: int) -> NDArray[np.int64]:
        """Return the bit that decides each entry along one dimension, a run of repeats once."""
        if pieces is None:
            return np.full(size, self._always)
        together = {piece.repeat for piece in pieces}
        repeats = [piece.repeat if len(together) > 1 else 1 for piece in pieces]
        return np.concatenate(
            [
                np.repeat(self._piece(piece), many)
                for piece, many in zip(pieces, repeats, strict=True)
            ]
        )

    def _piece(self, piece: Piece) -> NDArray[np.int64]:
        drawn = piece.expression
        if drawn is None:
            return np.full(piece.size, self._always)
        if isinstance(drawn, Drawn):
            return int(self._begins[drawn.site]) + drawn.start + np.arange(piece.size)
        if piece not in self._extra:
            self._extra[piece] = self._end
            self._end += piece.size
        return self._extra[piece] + np.arange(piece.size)

    def bits(self, frame: Frame) -> NDArray[np.bool_]:
        """Return the vector for one subnet."""
        extra = [mask(piece, frame.masks) for piece in self._extra]
        return np.concatenate([*frame.masks, np.ones(1, np.bool_), *extra])


@dataclass(frozen=True)
class Form:
    """How a tensor's shape follows from how many of its rows are kept."""

    shape: tuple[int, ...]
    outputs: Pieces | None  # along an earlier dimension that is cut too
    earlier: int
    last: int
    rest: int  # numbers in all dimensions that are never cut

    def small(self, numbers: int, outputs: int) -> tuple[int, ...]:
        """Return the shape that so many numbers make, of so many outputs."""
        head, tail = self.shape[: self.last], self.shape[self.last + 1 :]
        if self.outputs is None:
            return (*head, numbers // self.rest, *tail)
        head = (*head[: self.earlier], outputs, *head[self.earlier + 1 :])
        return (*head, numbers // (self.rest * outputs), *tail)


@dataclass(frozen=True)
class Shelf:
    """Tensors that lie end to end, seen as rows of `block` numbers."""

    names: tuple[str, ...]
    block: int
    shapes: Shapes
    claims: tuple[Claim, ...]
    is_cut: bool  # otherwise always whole


class Knife:
    """What each subnet takes from some shelves."""

    def __init__(self, shelves: Sequence[Shelf], sizes: Sequence[int]) -> None:
        self.shelves = shelves
        self._switches = Switches(sizes)
        forms = [
            [_form(*pair) for pair in zip(shelf.shapes, shelf.claims, strict=True)]
            if shelf.is_cut
            else []
            for shelf in shelves
        ]
        outputs = [made.outputs for row in forms for made in row if made.outputs]
        self._outputs = list(dict.fromkeys(outputs))
        number = {pieces: place for place, pieces in enumerate(self._outputs)}
        self._forms = [
            [(made, number[made.outputs] if made.outputs else -1) for made in row] for row in forms
        ]
        pairs = [
            _decided(self._switches, shape, claim)
            for shelf in shelves
            if shelf.is_cut
            for shape, claim in zip(shelf.shapes, shelf.claims, strict=True)
        ]
        # how many outputs there are is counted with the rows, as if they were tensors
        places = [self._switches.places(pieces, width(pieces)) for pieces in self._outputs]
        pairs += [(place, place) for place in places]
        empty = np.zeros(0, np.int64)
        self._left = np.concatenate([empty, *(left for left, _ in pairs)])
        self._right = np.concatenate([empty, *(right for _, right in pairs)])
        self._bounds = np.cumsum([0, *(len(left) for left, _ in pairs)])
        self._known: dict[bytes, tuple[Shapes, ...]] = {}

    def cut(self, frame: Frame) -> list[Cut]:
        """Work out what a subnet takes; shapes are one object while they stay the same."""
        bits = self._switches.bits(frame)
        kept = np.flatnonzero(bits.take(self._left) & bits.take(self._right))
        ends = np.searchsorted(kept, self._bounds)
        key = ends.tobytes()
        shapes = self._known.get(key)
        if shapes is None:
            if len(self._known) == REMEMBERED:
                self._known.clear()
            shapes = self._known[key] = self._shapes(np.diff(ends).tolist())
        found, tensor = [], 0
        for shelf, small in zip(self.shelves, shapes, strict=True):
            rows = None
            if shelf.is_cut:
                start, tensor = tensor, tensor + len(small)
                if small != shelf.shapes:
                    rows = frame.index(kept[ends[start] : ends[tensor]] - self._bounds[start])
            found.append(Cut(rows, small))
        return found

    def _shapes(self, numbers: list[int]) -> tuple[Shapes, ...]:
        counts = numbers[len(numbers) - len(self._outputs) :]
        outputs = [
            count * repeat(pieces) for pieces, count in zip(self._outputs, counts, strict=True)
        ]
        outputs.append(1)  # number -1: no outputs to know of
        rows = iter(numbers)
        return tuple(
            tuple(made.small(next(rows) * shelf.block, outputs[place]) for made, place in forms)
            if shelf.is_cut
            else shelf.shapes
            for shelf, forms in zip(self.shelves, self._forms, strict=True)
        )


def same_shapes(one: Cut, other: Cut) -> bool:
    """Tell whether two cuts by one knife make the same shapes, at no cost; may miss some."""
    return one.shapes is other.shapes


def _form(shape: tuple[int, ...], claim: Claim) -> Form:
    cut = [dim for dim, pieces in enumerate(claim) if pieces is not None]
    assert len(cut) <= 2, "no layer's parameter follows channels in three dimensions"
    rest = prod(size for dim, size in enumerate(shape) if dim not in cut)
    outputs = claim[cut[0]] if len(cut) == 2 else None
    return Form(shape, outputs, cut[0], cut[-1], rest)


class Arena:
    """The layout of some of a network's tensors on shelves."""

    def __init__(self, plan: Plan, params: Mapping[str, Tensor]) -> None:
        groups: dict[tuple[bool, int, str, torch.dtype], list[str]] = {}
        for name, tensor in params.items():
            last, block = form(plan.shapes[name], plan.claims[name])
            alone = name if prod(plan.shapes[name]) > LARGE else ""
            groups.setdefault((last >= 0, block, alone, tensor.dtype), []).append(name)
        self.shelves = [
            Shelf(
                tuple(names),
                block,
                tuple(plan.shapes[name] for name in names),
                tuple(plan.claims[name] for name in names),
                is_cut,
            )
            for (is_cut, block, _, _), names in groups.items()
        ]
        self.names = tuple(name for shelf in self.shelves for name in shelf.names)

    def packed(self, params: Mapping[str, Tensor]) -> list[Tensor]:
        """Copy tensors onto shelves."""
        return [
            torch.cat([params[name].detach().reshape(-1) for name in shelf.names])
            for shelf in self.shelves
        ]

    def unpacked(self, flats: list[Tensor]) -> Params:
        """Return the tensors on full shelves, as views."""
        found: Params = {}
        for shelf, flat in zip(self.shelves, flats, strict=True):
            found.update(zip(shelf.names, parts(flat, shelf.shapes), strict=True))
        return found


def _decided(
    switches: Switches, shape: tuple[int, ...], claim: Claim
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the two bits that keep each row of a tensor (most follow outputs and inputs)."""
    last, _ = form(shape, claim)
    cut = [dim for dim in range(last + 1) if claim[dim] is not None]
    sides = [switches.places(claim[dim], size) for dim, size in enumerate(shape[: last + 1])]
    grid = np.meshgrid(*sides, indexing="ij")
    flat = [grid[dim].ravel() for dim in (cut[0], cut[-1])]
    return flat[0], flat[1]


def taken(flats: Sequence[Tensor], shelves: Sequence[Shelf], cuts: Sequence[Cut]) -> list[Tensor]:
    """Return a subnet's part of each shelf: a copy, or the shelf itself where all is kept."""
    return [
        flat if cut.rows is None else flat.view(-1, shelf.block).index_select(0, cut.rows).view(-1)
        for flat, shelf, cut in zip(flats, shelves, cuts, strict=True)
    ]


def lanes(
    flats: Sequence[Tensor], smalls: Sequence[Tensor], shelves: Sequence[Shelf], first: int
) -> list[Lane]:
    """Pair full shelves, from number `first` on, with what a subnet has taken from them."""
    return [
        (flat.view(-1, shelf.block), small.view(-1, shelf.block), number)
        for number, (flat, small) in enumerate(zip(flats, smalls, strict=True), first)
        if small is not flat and (shelf := shelves[number])
    ]


def put_back(
    flats: Sequence[Tensor],
    smalls: Sequence[Tensor],
    shelves: Sequence[Shelf],
    cuts: Sequence[Cut],
) -> None:
    """Write a subnet's part of each shelf to its places, in place."""
    for flat, small, shelf, cut in zip(flats, smalls, shelves, cuts, strict=True):
        if cut.rows is not None:
            flat.view(-1, shelf.block).index_copy_(0, cut.rows, small.view(-1, shelf.block))


def parts(flat: Tensor, shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
    """Return the tensors that lie end to end in a flat one, as views."""
    if len(shapes) == 1:
        return [flat.view(shapes[0])]
    pieces = torch.split(flat, [prod(shape) for shape in shapes])
    return [piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True)]
