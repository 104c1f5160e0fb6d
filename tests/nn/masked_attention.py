"""Rules of the masked oracle for attention, whose heads are whole filters, and for its parts."""

from collections.abc import Sequence
from typing import Any

import torch
from tests.nn.masked_rules import (
    Channel,
    Operation,
    Result,
    Value,
    bind_args,
    elementwise,
    intersect,
    mask_channels,
    to_dense,
)

_NAMES = """query key value embed_dim_to_check num_heads in_proj_weight in_proj_bias bias_k bias_v
    add_zero_attn dropout_p out_proj_weight"""


def softmax(func: Operation, args: Sequence[Any], kwargs: dict[str, Any]) -> Result:
    """Normalise along an axis other than the channels."""
    value, dim = args[0], bind_args("input dim", args, kwargs).get("dim")
    if dim is None or dim % value.data.ndim == value.axis:
        return None
    return elementwise(func, args, kwargs)


def product(func: Operation, args: Sequence[Any], kwargs: dict[str, Any]) -> Result:
    """Multiply matrices of each head, or matrices one of which has channels as rows or columns."""
    if not all(isinstance(side, Value) for side in args):
        return None
    left, right = args
    data = func(left.data, right.data)
    ends = [side.axis - side.data.ndim for side in args if side.axis is not None]
    if left.axis is not None and right.axis is not None:
        if ends[0] != ends[1] or ends[0] >= -2:
            return None
        pairs = zip(left.channels, right.channels, strict=True)
        return mask_channels(data, ends[0] + data.ndim, [intersect(*pair) for pair in pairs])
    side, contracted = (left, -1) if left.axis is not None else (right, -2)
    if ends[0] == contracted or data.shape[ends[0]] != len(side.channels):
        return None
    if ends[0] < -2:  # the other matrices must not depend on the head
        other = right if side is left else left
        if other.data.ndim + ends[0] >= 0 and other.data.shape[ends[0]] != 1:
            return None
    return mask_channels(data, ends[0] + data.ndim, side.channels)


def attention(func: Operation, args: Sequence[Any], kwargs: dict[str, Any]) -> Result:
    """Attend within each head; any other axis of channels runs dense."""
    sides = [args[0], args[1], args[2]]
    if any(not isinstance(side, Value) or side.axis is None for side in sides):
        return None
    if len({side.axis for side in sides}) != 1 or sides[0].axis >= sides[0].data.ndim - 2:
        return None
    rest = [item.data if isinstance(item, Value) else item for item in args[3:]]
    options = {k: v.data if isinstance(v, Value) else v for k, v in kwargs.items()}
    data = func(*(side.data for side in sides), *rest, **options)
    joined: list[Channel] = list(sides[0].channels)
    for side in sides[1:]:
        joined = [intersect(a, b) for a, b in zip(joined, side.channels, strict=True)]
    return mask_channels(data, sides[0].axis, joined)


def multi_head_attention(
    func: Operation, args: Sequence[Any], kwargs: dict[str, Any], sites: Any
) -> Any:
    """Leave heads out by zeros in the output projection, and rescale the others there."""
    arguments = {**bind_args(_NAMES, args, kwargs), **kwargs}
    layer = sites.get(id(arguments["in_proj_weight"]))
    weight = arguments["out_proj_weight"]
    scaled = weight
    if layer is not None:
        mask, scale = layer[1], layer[2]
        columns = mask.repeat_interleave(weight.shape[1] // len(mask)).to(weight.dtype)
        scaled = weight * columns * scale
    position = _NAMES.split().index("out_proj_weight")
    values = [to_dense(item) if isinstance(item, Value) else item for item in args]
    options = {k: to_dense(v) if isinstance(v, Value) else v for k, v in kwargs.items()}
    if len(values) > position:
        values[position] = scaled
    else:
        options["out_proj_weight"] = scaled
    data, weights = func(*values, **options)
    result = Value(data)
    if (own := sites.get(id(weight))) is not None:
        result = mask_outputs(data, data.ndim - 1, own)
    return result, None if weights is None else Value(weights)


def mask_outputs(data: torch.Tensor, axis: int, layer: Any) -> Value:
    """Mask the outputs of a layer of a site; a filter may be several adjacent outputs."""
    site, mask, scale, *rest = layer
    block, pending = rest[0] if rest else 1, frozenset({(site, float(scale))})
    filters = [output // block % len(mask) for output in range(data.shape[axis])]
    presence = mask.tolist()
    channels = [Channel(presence[f], ("site", site, f), pending) for f in filters]
    return mask_channels(data, axis, channels)
