"""Which channels of a value are there: an algebra of draws, exact for each subnet and in mean.

A value's channels are a row of *pieces*. A piece is a run of channels whose presence follows one
expression over the draws of sites: always there, kept by a site, kept by any of several, by all.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import prod

import numpy as np
from numpy.typing import NDArray

Mask = NDArray[np.bool_]
Index = NDArray[np.int64]
Chance = Callable[[int, int, int], float]  # that a site keeps these many filters, drops those many


@dataclass(frozen=True)
class Drawn:
    """Channel j is there when the site keeps its filter start + j."""

    site: int
    start: int = 0


@dataclass(frozen=True)
class AnyOf:
    """Union of presences."""

    parts: "frozenset[Drawn | AnyOf | AllOf]"


@dataclass(frozen=True)
class AllOf:
    """Intersection of presences."""

    parts: "frozenset[Drawn | AnyOf | AllOf]"


Expression = Drawn | AnyOf | AllOf | None  # None: always there


@dataclass(frozen=True)
class Piece:
    """A run of `size` channels, each standing for `repeat` neighbours (after flattening, say).

    `pending` names the sites whose factor 1/q is still to be applied.
    """

    size: int
    expression: Expression = None
    repeat: int = 1
    pending: frozenset[int] = frozenset()


Pieces = tuple[Piece, ...]


@dataclass(frozen=True)
class Layout:
    """The pieces along the channel axis of a value."""

    axis: int
    pieces: Pieces


def width(pieces: Iterable[Piece]) -> int:
    """Return how many channels there are in the full network."""
    return sum(piece.size * piece.repeat for piece in pieces)


def is_dense(pieces: Pieces) -> bool:
    """Tell whether every channel is always there with nothing pending."""
    return all(piece.expression is None and not piece.pending for piece in pieces)


def filters_of(expression: Expression) -> frozenset[Drawn]:
    """Return the filters that an expression asks about its first channel."""
    if expression is None:
        return frozenset()
    if isinstance(expression, Drawn):
        return frozenset({expression})
    return frozenset[Drawn]().union(*map(filters_of, expression.parts))


def sites_of(expression: Expression) -> frozenset[int]:
    """Return the sites that an expression asks."""
    return frozenset(drawn.site for drawn in filters_of(expression))


def shifted(expression: Expression, by: int) -> Expression:
    """Return the expression for channels that begin `by` later."""
    if expression is None or by == 0:
        return expression
    if isinstance(expression, Drawn):
        return Drawn(expression.site, expression.start + by)
    moved = (shifted(part, by) for part in expression.parts)
    return type(expression)(frozenset(part for part in moved if part is not None))


def either(left: Expression, right: Expression) -> Expression:
    """Return the union of two presences."""
    if left is None or right is None:
        return None
    parts = _flat(AnyOf, left) | _flat(AnyOf, right)
    return AnyOf(parts) if len(parts) > 1 else left


def both(left: Expression, right: Expression) -> Expression:
    """Return the intersection of two presences."""
    if left is None or right is None:
        return right if left is None else left
    parts = _flat(AllOf, left) | _flat(AllOf, right)
    return AllOf(parts) if len(parts) > 1 else left


def _flat(
    kind: type[AnyOf | AllOf], part: Drawn | AnyOf | AllOf
) -> frozenset[Drawn | AnyOf | AllOf]:
    return part.parts if type(part) is kind else frozenset({part})


def is_safe(piece: Piece, sizes: Sequence[int]) -> bool:
    """Tell whether some channel is there in every draw in which each site keeps a filter."""
    expression = piece.expression
    parts = expression.parts if isinstance(expression, AnyOf) else (expression,)
    return any(
        part is None
        or (isinstance(part, Drawn) and part.start == 0 and piece.size == sizes[part.site])
        for part in parts
    )


def mend(pieces: Pieces, masks: Sequence[Mask]) -> None:
    """Keep the first channel of a value that a draw has emptied, by keeping its filters."""
    if count(pieces, masks) == 0:
        waiting: list[Expression] = [pieces[0].expression]
        while waiting:
            part = waiting.pop()
            if isinstance(part, Drawn):
                masks[part.site][part.start] = True
            elif part is not None:
                waiting.extend(part.parts)


def part_of(pieces: Pieces, start: int, stop: int) -> Pieces | None:
    """Return the pieces of channels start to stop; None where that would cut a repeated channel."""
    found, offset = [], 0
    for piece in pieces:
        low = max(start - offset, 0)
        high = min(stop - offset, piece.size * piece.repeat)
        offset += piece.size * piece.repeat
        if low >= high:
            continue
        if low % piece.repeat or high % piece.repeat:
            return None
        low, high = low // piece.repeat, high // piece.repeat
        expression = shifted(piece.expression, low)
        found.append(replace(piece, size=high - low, expression=expression))
    return tuple(found)


def aligned(left: Pieces, right: Pieces) -> list[tuple[Piece, Piece]] | None:
    """Pair the channels of two values of equal width, cutting pieces where the other ends."""
    if width(left) != width(right):
        return None
    ends = {0}
    for pieces in (left, right):
        offset = 0
        for piece in pieces:
            offset += piece.size * piece.repeat
            ends.add(offset)
    bounds = sorted(ends)
    pairs = []
    for start, stop in pairwise(bounds):
        a, b = part_of(left, start, stop), part_of(right, start, stop)
        if a is None or b is None:
            return None
        if a[0].repeat != b[0].repeat:
            if a[0].expression is None and not a[0].pending:
                a = (Piece(b[0].size, None, b[0].repeat),)
            elif b[0].expression is None and not b[0].pending:
                b = (Piece(a[0].size, None, a[0].repeat),)
            else:
                return None
        pairs.append((a[0], b[0]))
    return pairs


def mask(piece: Piece, masks: Sequence[Mask]) -> Mask:
    """Return which of a piece's channels are there, before repeating."""
    return _mask(piece.expression, piece.size, masks)


def _mask(expression: Expression, size: int, masks: Sequence[Mask]) -> Mask:
    if expression is None:
        return np.ones(size, np.bool_)
    if isinstance(expression, Drawn):
        return masks[expression.site][expression.start : expression.start + size]
    parts = [_mask(part, size, masks) for part in expression.parts]
    joined = np.logical_or if isinstance(expression, AnyOf) else np.logical_and
    return np.asarray(joined.reduce(parts), np.bool_)


def kept(pieces: Pieces, masks: Sequence[Mask]) -> Index:
    """Return the positions, in the full network, of the channels that are there."""
    parts = [mask(piece, masks) for piece in pieces]
    repeats = [piece.repeat for piece in pieces]
    if all(repeat == 1 for repeat in repeats):
        return np.flatnonzero(parts[0] if len(parts) == 1 else np.concatenate(parts))
    spread = [np.repeat(part, repeat) for part, repeat in zip(parts, repeats, strict=True)]
    return np.flatnonzero(np.concatenate(spread))


def count(pieces: Pieces, masks: Sequence[Mask]) -> int:
    """Return how many channels are there."""
    return sum(int(mask(piece, masks).sum()) * piece.repeat for piece in pieces)


def factors(
    pieces: Pieces, masks: Sequence[Mask], scales: Sequence[float]
) -> NDArray[np.float64] | float:
    """Return the pending factor of each channel that is there, one number where all are equal."""
    values = [prod(scales[site] for site in sorted(piece.pending)) for piece in pieces]
    if len(set(values)) == 1:
        return float(values[0])
    counts = [int(mask(piece, masks).sum()) * piece.repeat for piece in pieces]
    return np.repeat(np.asarray(values, np.float64), counts)


def probability(expression: Expression, chance: Chance, given: Mapping[Drawn, bool]) -> float:
    """Return the chance that a channel is there when it is known of some filters if they are."""
    if expression is None:
        return 1.0
    if isinstance(expression, Drawn):
        return _chance(expression, chance, given)
    is_any = isinstance(expression, AnyOf)
    known = [given[part] for part in expression.parts if isinstance(part, Drawn) and part in given]
    if is_any in known:  # one that is there will do; one that is not spoils it
        return float(is_any)
    parts = [part for part in expression.parts if part not in given]
    asked = [{filter.site for filter in filters_of(part) - given.keys()} for part in parts]
    shared = set[int]().union(*asked)
    if sum(map(len, asked)) == len(shared):  # independent of one another
        chances = [probability(part, chance, given) for part in parts]
        return 1 - prod(1 - each for each in chances) if is_any else prod(chances)
    site = max(shared, key=lambda site: (sum(site in part for part in asked), site))
    open_filters = filters_of(expression) - given.keys()
    split = min((f for f in open_filters if f.site == site), key=lambda f: f.start)
    yes, total = _chance(split, chance, given), 0.0
    for weight, is_there in ((yes, True), (1 - yes, False)):
        if weight > 0:
            total += weight * probability(expression, chance, {**given, split: is_there})
    return total


def _chance(drawn: Drawn, chance: Chance, given: Mapping[Drawn, bool]) -> float:
    if drawn in given:
        return float(given[drawn])
    same = [is_there for other, is_there in given.items() if other.site == drawn.site]
    kept, dropped = same.count(True), same.count(False)
    all_known = chance(drawn.site, kept, dropped)
    return min(1.0, chance(drawn.site, kept + 1, dropped) / all_known) if all_known > 0 else 0.0
