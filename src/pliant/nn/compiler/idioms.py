"""Operations that networks write out of several others, made one operation each in a trace.

A channel shuffle is a reshape, a transposition and a reshape back; its parts would mix the channels
of several layers. A layer norm over the channels is means, differences and a root; its means would
count absent channels as zeros.
"""

import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, fx

PERMUTATIONS = {"permute", "transpose", "swapaxes"}
_COPIES = {"contiguous", "clone"}
_DIFFERENCES: set[Any] = {operator.sub, torch.sub, "sub"}
_SUMS: set[Any] = {operator.add, torch.add, "add"}
_PRODUCTS: set[Any] = {operator.mul, torch.mul, "mul"}
_QUOTIENTS: set[Any] = {operator.truediv, torch.div, "div"}
_POWERS: set[Any] = {operator.pow, torch.pow, "pow"}
_SQUARES: set[Any] = {torch.square, "square"}
_ROOTS: set[Any] = {torch.sqrt, "sqrt"}
_INVERSE_ROOTS: set[Any] = {torch.rsqrt, "rsqrt"}


def shuffle_channels(x: Tensor, axis: int, groups: int) -> Tensor:
    """Interleave equal groups of channels: the first of each, the second of each, and so on."""
    shape = (*x.shape[:axis], groups, -1, *x.shape[axis + 1 :])
    return x.reshape(shape).transpose(axis, axis + 1).flatten(axis, axis + 1)


def standardise(x: Tensor, axis: int, eps: float) -> Tensor:
    """Subtract the mean along an axis, and divide by the standard deviation."""
    last = x.movedim(axis, -1)
    return F.layer_norm(last, last.shape[-1:], None, None, eps).movedim(-1, axis)


def merge_idioms(graph: fx.Graph) -> None:
    """Replace every channel shuffle and written-out layer norm by one operation."""
    for node in list(graph.nodes):
        for match in (_match_shuffle, _match_standardisation):
            idiom = match(node)
            if idiom is not None:
                _replace(graph, node, idiom)
                break


class _Idiom(NamedTuple):
    function: Callable[..., Tensor]
    args: tuple[Any, ...]


def _replace(graph: fx.Graph, node: fx.Node, idiom: _Idiom) -> None:
    with graph.inserting_before(node):
        merged = graph.call_function(idiom.function, idiom.args)
    merged.meta = dict(node.meta)
    node.replace_all_uses_with(merged)
    unread = [node]
    while unread:
        part = unread.pop()
        if not part.users and part.op.startswith("call"):
            sources = part.all_input_nodes
            graph.erase_node(part)
            unread += sources


def _get_name(node: fx.Node) -> str:
    is_call = node.op in {"call_function", "call_method"}
    return str(getattr(node.target, "__name__", node.target)) if is_call else ""


def _match_shuffle(node: fx.Node) -> _Idiom | None:
    if _get_name(node) not in {"reshape", "flatten"}:
        return None
    moved = _skip_copies(node.args[0])
    if _get_name(moved) not in PERMUTATIONS:
        return None
    split = _skip_copies(moved.args[0])
    if _get_name(split) not in {"reshape", "unflatten"} or not isinstance(split.args[0], fx.Node):
        return None
    source = split.args[0]
    before, after = source.meta["value"].shape, split.meta["value"].shape
    order = find_permutation(moved, split)
    axis = next((dim for dim, source_dim in enumerate(order) if dim != source_dim), 0)
    swapped = list(range(len(order)))
    swapped[axis : axis + 2] = swapped[axis : axis + 2][::-1]
    if axis == 0 or order != swapped or node.meta["value"].shape != before:
        return None
    if (*after[:axis], after[axis] * after[axis + 1], *after[axis + 2 :]) != tuple(before):
        return None
    return _Idiom(shuffle_channels, (source, axis, after[axis]))


def _skip_copies(node: Any) -> Any:
    while _get_name(node) in _COPIES:
        node = node.args[0]
    return node


def find_permutation(node: fx.Node, source: fx.Node) -> list[int]:
    """Return, for each axis of a permuted value, the axis of its source."""
    dims = source.meta["value"].dim()
    if _get_name(node) == "permute":
        axes: Any = node.kwargs.get("dims") or node.args[1:]
        axes = axes[0] if isinstance(axes[0], tuple | list) else axes
        return [axis % dims for axis in axes]
    pair: Any = node.args[1:3] or [node.kwargs["dim0"], node.kwargs["dim1"]]
    first, second = (dim % dims for dim in pair)
    order = list(range(dims))
    order[first], order[second] = order[second], order[first]
    return order


def _match_standardisation(node: fx.Node) -> _Idiom | None:
    """Match `(x - mean) / sqrt(variance + eps)`, or the same as a product."""
    if len(node.args) != 2:
        return None
    sides = [node.args, node.args[::-1]] if node.target in _PRODUCTS else [node.args]
    roots = {True: _INVERSE_ROOTS, False: _ROOTS}
    if node.target not in _PRODUCTS | _QUOTIENTS:
        return None
    for centred, root in sides:
        found = _match_centred(centred)
        variance = _match_root(root, roots[node.target in _PRODUCTS])
        if found is not None and variance is not None:
            x, axis = found
            if _is_variance(variance[0], x, axis):
                return _Idiom(standardise, (x, axis, variance[1]))
    return None


def _match_root(node: Any, roots: set[Any]) -> tuple[Any, float] | None:
    """Return the variance and the small number under a root."""
    if not isinstance(node, fx.Node):
        return None
    is_power = node.target in _POWERS and node.args[1] == (0.5 if roots is _ROOTS else -0.5)
    if node.target not in roots and not is_power:
        return None
    total = node.args[0]
    if not isinstance(total, fx.Node) or total.target not in _SUMS or len(total.args) != 2:
        return None
    left, right = total.args
    variance, eps = (right, left) if isinstance(left, float) else (left, right)
    return (variance, eps) if isinstance(eps, float) else None


def _match_centred(node: Any) -> tuple[fx.Node, int] | None:
    """Return the value and the axis of `x - x.mean(axis, keepdim=True)`."""
    if not isinstance(node, fx.Node) or node.target not in _DIFFERENCES or len(node.args) != 2:
        return None
    x, mean = node.args
    reduced = _match_reduction(mean, "mean")
    return reduced if reduced is not None and reduced[0] is x else None


def _match_reduction(node: Any, name: str) -> tuple[Any, int] | None:
    """Return the source of a reduction of one axis that is kept, and this axis."""
    if not isinstance(node, fx.Node) or _get_name(node) != name or not node.args:
        return None
    source: Any = node.args[0]
    dim: Any = node.kwargs.get("dim", node.args[1] if len(node.args) > 1 else None)
    dims = dim if isinstance(dim, tuple | list) else [dim]
    value = source.meta["value"]
    is_kept = node.meta["value"].dim() == value.dim()
    if len(dims) != 1 or not isinstance(dims[0], int) or not is_kept:
        return None
    return source, dims[0] % value.dim()


def _is_variance(node: Any, x: fx.Node, axis: int) -> bool:
    """Return whether a value is the variance of x along an axis, divided by its size."""
    reduced = _match_reduction(node, "var")
    if reduced is not None:
        unbiased = node.kwargs.get("unbiased", node.args[2] if len(node.args) > 2 else None)
        is_divided = unbiased is False or node.kwargs.get("correction") == 0
        return reduced == (x, axis) and is_divided
    reduced = _match_reduction(node, "mean")
    if reduced is None or reduced[1] != axis or not isinstance(reduced[0], fx.Node):
        return False
    square = reduced[0]
    is_square = square.target in _SQUARES or (
        (square.target in _POWERS and square.args[1] == 2)
        or (square.target in _PRODUCTS and square.args[0] is square.args[1])
    )
    return is_square and _match_centred(square.args[0]) == (x, axis)
