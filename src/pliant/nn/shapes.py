"""Rules for operations without parameters that move, join, cut or meet channels."""

import operator
from collections.abc import Callable
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx

from pliant.nn import channels
from pliant.nn.channels import Drawn, Layout, Piece
from pliant.nn.lower import Builder, along
from pliant.nn.plan import Bound, Environment, Frame
from pliant.nn.trace import BATCH

Pair = tuple[fx.Node, fx.Node]


def keep(b: Builder, node: fx.Node, source: fx.Node, axis: int | None = None) -> bool:
    """Replay an operation that works on each channel by itself."""
    layout = b.layout(source)
    if layout is not None and isinstance(node.meta["value"], tuple | list):
        return False  # several results, of which each would need a layout
    if not _is_tensor(node):
        layout = None
    if layout is not None and axis is not None:
        layout = Layout(axis, layout.pieces)
    slots = {read: b.slot(read) for read in node.all_input_nodes}
    b.learn(node)
    b.replay(node, layout, slots)
    return True


def concatenate(b: Builder, node: fx.Node, parts: list[fx.Node], dim: int) -> bool:
    """Join channels, or join equal layouts along another axis."""
    dims = node.meta["value"].dim()
    dim %= dims
    found = [b.layout(part) for part in parts]
    if all(layout is None for layout in found):
        return keep(b, node, parts[0])
    if all(layout == found[0] for layout in found) and found[0] and found[0].axis != dim:
        return keep(b, node, parts[0])
    if any(layout is not None and layout.axis != dim for layout in found):
        return False
    pieces = tuple(
        piece
        for part, layout in zip(parts, found, strict=True)
        for piece in (layout.pieces if layout else (Piece(part.meta["value"].shape[dim]),))
    )
    b.learn(node)
    b.replay(node, Layout(dim, pieces), {part: b.slot(part) for part in parts})
    return True


def reshape(b: Builder, node: fx.Node, source: fx.Node) -> bool:
    """Keep the channel axis, or flatten what follows it into it."""
    layout = b.layout(source)
    if layout is None:
        return keep(b, node, source)
    before, after = source.meta["value"].shape, node.meta["value"].shape
    axis, pieces = layout.axis, layout.pieces
    if len(after) <= axis or before[:axis] != after[:axis]:
        return False
    tail = tuple(-1 if size % BATCH == 0 else size for size in after[axis + 1 :])
    if after[axis] == prod(before[axis:]) and after[axis] != before[axis]:
        many = prod(before[axis + 1 :])
        pieces = tuple(Piece(p.size, p.expression, p.repeat * many, p.pending) for p in pieces)
    elif after[axis] != before[axis]:
        return False
    slot, result = b.slot(source), Layout(axis, pieces)
    count = b.ask(lambda frame: frame.count(pieces))
    b.learn(node)

    def run(environment: Environment, bound: Bound) -> Tensor:
        x: Tensor = environment[slot]
        return x.reshape(*x.shape[:axis], bound.answers[count], *tail)

    b.emit(node, run, [slot], result)
    return True


def expand(b: Builder, node: fx.Node, source: fx.Node) -> bool:
    """Repeat a value along axes other than the channels'."""
    layout, shape = b.layout(source), node.meta["value"].shape
    if layout is None:
        plain = all(b.layout(read) is None for read in node.all_input_nodes)
        return plain and keep(b, node, source)
    axis = layout.axis + len(shape) - source.meta["value"].dim()
    if shape[axis] != channels.width(layout.pieces) or axis != layout.axis:
        return False
    slot = b.slot(source)
    sizes = [-1 if dim == axis or size % BATCH == 0 else size for dim, size in enumerate(shape)]
    b.learn(node)
    b.emit(node, lambda environment, _: environment[slot].expand(sizes), [slot], layout)
    return True


def permute(b: Builder, node: fx.Node, source: fx.Node, order: list[int]) -> bool:
    """Move axes about; the batch stays in front."""
    layout = b.layout(source)
    order = [dim % len(order) for dim in order]
    return keep(b, node, source, order.index(layout.axis) if layout else None)


def reduce(b: Builder, node: fx.Node, source: fx.Node, dims: Any, keepdim: bool) -> bool:
    """Reduce axes other than the channels'."""
    layout = b.layout(source)
    if layout is None:
        return keep(b, node, source)
    if dims is None or dims in ((), []):  # of all axes
        return False
    gone = {dim % source.meta["value"].dim() for dim in ([dims] if isinstance(dims, int) else dims)}
    if layout.axis in gone or 0 in gone:
        return False
    return keep(
        b, node, source, layout.axis - (0 if keepdim else sum(d < layout.axis for d in gone))
    )


def cut(
    b: Builder, node: fx.Node, source: fx.Node, dim: int, bounds: list[tuple[int, int]]
) -> bool:
    """Cut a value along its channels into several parts (one, where `bounds` has one pair)."""
    layout = b.layout(source)
    if layout is None or dim % source.meta["value"].dim() != layout.axis:
        return _cut_elsewhere(b, node, source)
    axis = layout.axis
    parts = [channels.part_of(layout.pieces, start, stop) for start, stop in bounds]
    slot = b.slot(source)
    whole = layout.pieces

    def places(frame: Frame) -> list[tuple[int, int]]:
        kept = frame.kept(whole)
        ends = [
            (np.searchsorted(kept, start), np.searchsorted(kept, stop)) for start, stop in bounds
        ]
        return [(int(start), int(stop - start)) for start, stop in ends]

    if any(part is None for part in parts):
        return False
    asked = b.ask(places)
    found = [Layout(axis, part) for part in parts if part is not None]
    b.learn(node)
    single = isinstance(node.meta["value"], Tensor)

    def run(environment: Environment, bound: Bound) -> Any:
        x: Tensor = environment[slot]
        made = tuple(x.narrow(axis, start, length) for start, length in bound.answers[asked])
        return made[0] if single else made

    b.emit(node, run, [slot], found[0] if single else None)
    if not single:
        b.alias(node, found)
    return True


def _cut_elsewhere(b: Builder, node: fx.Node, source: fx.Node) -> bool:
    layout, value = b.layout(source), node.meta["value"]
    if layout is None or isinstance(value, Tensor):
        return keep(b, node, source)
    b.learn(node)
    b.replay(node, None, {source: b.slot(source)})
    b.alias(node, [layout] * len(value))
    return True


def item(b: Builder, node: fx.Node, source: fx.Node, index: Any) -> bool:
    """Take one part of a tuple, or a slice of a tensor."""
    parts = b.layouts(source)
    if parts is not None:
        b.learn(node)
        chosen = parts[index]  # a part, or several of them
        b.replay(node, None if isinstance(chosen, list) else chosen, {source: b.slot(source)})
        b.alias(node, chosen)
        return True
    value, layout = source.meta["value"], b.layout(source)
    if layout is None or not isinstance(value, Tensor):
        return keep(b, node, source)
    steps = index if isinstance(index, tuple) else (index,)
    if Ellipsis in steps:
        at = steps.index(Ellipsis)
        steps = (*steps[:at], *[slice(None)] * (value.dim() - len(steps) + 1), *steps[at + 1 :])
    if not all(isinstance(step, slice) for step in steps):
        return False
    steps = (*steps, *[slice(None)] * (value.dim() - len(steps)))
    chosen = steps[layout.axis]
    others = [step == slice(None) for place, step in enumerate(steps) if place != layout.axis]
    if chosen == slice(None):
        return keep(b, node, source)
    start, stop, step = chosen.indices(value.shape[layout.axis])
    if step != 1 or not all(others):
        return False
    return cut(b, node, source, layout.axis, [(start, stop)])


def meet(b: Builder, node: fx.Node, left: Any, right: Any, kind: str) -> bool:
    """Add, subtract, multiply or divide two values, scalars or parameters."""
    nodes = [side for side in (left, right) if isinstance(side, fx.Node) and _is_tensor(side)]
    varying = [side for side in nodes if not b.is_constant(side)]
    if len(varying) == 1:
        others = [side for side in nodes if side is not varying[0]]
        layout = b.layout(varying[0])
        if not others or layout is None:
            return keep(b, node, varying[0])
        if kind == "div" and left is not varying[0]:
            return False
        return _with_parameter(b, node, varying[0], others[0])
    if len(varying) != 2:
        return keep(b, node, nodes[0]) if nodes else False
    first, second = b.layout(left), b.layout(right)
    if first is None and second is None:
        return keep(b, node, left)
    if first is None or second is None:
        return kind == "mul" and _gate(b, node, left, right)
    dims = [side.meta["value"].dim() for side in (left, right)]
    if dims[0] - first.axis != dims[1] - second.axis:
        return False
    if first == second:
        return keep(b, node, left if dims[0] >= dims[1] else right)
    pairs = channels.aligned(first.pieces, second.pieces)
    if pairs is None or kind == "div":
        return False
    axis = max(dims) - (dims[0] - first.axis)
    if b.decisions.coupled and _couple(b, pairs):
        return keep(b, node, left)  # laid out again with these layers drawn together
    b.learn(node)
    join = _unite if kind in {"add", "sub"} else _intersect
    join(b, node, (left, right), pairs, axis)
    return True


def _is_tensor(node: fx.Node) -> bool:
    return isinstance(node.meta.get("value"), Tensor)


def _couple(b: Builder, pairs: list[tuple[Piece, Piece]]) -> bool:
    """Draw whole sites that meet channel for channel together; False where some cannot be."""
    wanted = []
    for one, other in pairs:
        if one.expression == other.expression:
            continue
        for piece in (one, other):
            drawn = piece.expression
            if (
                not isinstance(drawn, Drawn)
                or drawn.start
                or piece.size != b.groups[drawn.site].filters
            ):
                return False
        wanted.append((one.expression, other.expression))
    for left, right in wanted:
        assert isinstance(left, Drawn)
        assert isinstance(right, Drawn)
        b.couple(left.site, right.site)
    return bool(wanted)


def _with_parameter(b: Builder, node: fx.Node, value: fx.Node, other: fx.Node) -> bool:
    """Meet a parameter: it follows the channels, like a norm layer's scale and bias."""
    layout, shape = b.layout(value), other.meta["value"].shape
    assert layout is not None
    dims = value.meta["value"].dim()
    place = layout.axis - (dims - len(shape))
    if len(shape) > dims:
        return False
    if place < 0 or shape[place] == 1:
        return keep(b, node, value)
    pieces, name = layout.pieces, b.parameter(other)
    slots = {value: b.slot(value)}
    b.learn(node, name)
    if name is not None and not b.is_rigid(name):
        b.claim(name, *[None] * place, pieces)
        slots[other] = b.load(name)
    else:
        slot = b.slot(other)
        asked = b.ask(lambda frame: frame.index(frame.kept(pieces)))
        slots[other] = b.add(
            f"{other.name}_kept",
            lambda environment, bound: environment[slot].index_select(place, bound.answers[asked]),
            (slot,),
        )
    b.replay(node, layout, slots)
    return True


def _gate(b: Builder, node: fx.Node, left: fx.Node, right: fx.Node) -> bool:
    """Multiply by a value whose channels are all there: only those that meet one are needed."""
    compact, full = (left, right) if b.layout(left) is not None else (right, left)
    layout, shape = b.layout(compact), full.meta["value"].shape
    assert layout is not None
    place = layout.axis - (compact.meta["value"].dim() - len(shape))
    if place > layout.axis:
        return False
    slots = {compact: b.slot(compact), full: b.slot(full)}
    b.learn(node)
    if place >= 0 and shape[place] != 1:
        slot, pieces = slots[full], layout.pieces
        asked = b.ask(lambda frame: frame.index(frame.kept(pieces)))
        slots[full] = b.add(
            f"{full.name}_kept",
            lambda environment, bound: environment[slot].index_select(place, bound.answers[asked]),
            (slot,),
        )
    b.replay(node, layout, slots)
    return True


def _unite(
    b: Builder, node: fx.Node, sides: Pair, pairs: list[tuple[Piece, Piece]], axis: int
) -> None:
    """Add values with different draws: each is rescaled, what either has is there."""
    made = tuple(
        Piece(one.size, channels.either(one.expression, other.expression), one.repeat)
        for one, other in pairs
    )
    total = b.ask(lambda frame: frame.count(made))
    slots = {}
    for number, side in enumerate(sides):
        pieces = tuple(pair[number] for pair in pairs)
        slots[side] = b.add(
            f"{side.name}_spread", _spreader(b, side, pieces, made, total), (b.slot(side),)
        )
    b.replay(node, Layout(axis, made), slots)


def _spreader(
    b: Builder, side: fx.Node, pieces: channels.Pieces, made: channels.Pieces, total: int
) -> Callable[[Environment, Bound], Tensor]:
    slot, layout = b.slot(side), b.layout(side)
    assert layout is not None
    axis = layout.axis
    factors = b.ask_factors(pieces, along(axis, side.meta["value"].dim()))
    asked = b.ask(lambda frame: frame.index(np.searchsorted(frame.kept(made), frame.kept(pieces))))

    def run(environment: Environment, bound: Bound) -> Tensor:
        x: Tensor = environment[slot]
        if factors is not None and (factor := bound.answers[factors]) is not None:
            x = x * factor
        if x.shape[axis] == bound.answers[total]:
            return x
        shape = list(x.shape)
        shape[axis] = bound.answers[total]
        return x.new_zeros(shape).index_copy(axis, bound.answers[asked], x)

    return run


def _intersect(
    b: Builder, node: fx.Node, sides: Pair, pairs: list[tuple[Piece, Piece]], axis: int
) -> None:
    """Multiply values with different draws: what both have is there, factors multiply."""
    made = tuple(
        Piece(
            one.size,
            channels.both(one.expression, other.expression),
            one.repeat,
            one.pending | other.pending,
        )
        for one, other in pairs
    )
    slots = {}
    for number, side in enumerate(sides):
        pieces = tuple(pair[number] for pair in pairs)
        layout, slot = b.layout(side), b.slot(side)
        assert layout is not None
        asked = b.ask(
            lambda frame, pieces=pieces: frame.index(  # type: ignore[misc] # bound early on purpose
                np.searchsorted(frame.kept(pieces), frame.kept(made))
            )
        )
        slots[side] = b.add(f"{side.name}_kept", _chooser(slot, layout.axis, asked), (slot,))
    b.replay(node, Layout(axis, made), slots)


def _chooser(slot: int, axis: int, asked: int) -> Callable[[Environment, Bound], Tensor]:
    def run(environment: Environment, bound: Bound) -> Tensor:
        x: Tensor = environment[slot]
        return x.index_select(axis, bound.answers[asked])

    return run


_KINDS = {
    "add": (operator.add, operator.iadd, torch.add),
    "sub": (operator.sub, operator.isub, torch.sub),
    "mul": (operator.mul, operator.imul, torch.mul),
    "div": (operator.truediv, operator.itruediv, torch.div),
}
MEETINGS: dict[Any, str] = {
    target: kind for kind, functions in _KINDS.items() for target in (*functions, kind, f"{kind}_")
}
