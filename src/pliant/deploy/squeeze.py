"""Smaller updates: 16-bit floats, 8-bit integers, or the largest entries, with error feedback.

What was left out of one update is added to the next one (Seide et al., 1-bit SGD, Interspeech 2014;
Stich et al., Sparsified SGD with memory, NeurIPS 2018), so that nothing is lost for good.
"""

from typing import Annotated

import torch
from msgspec import Meta
from torch import Tensor

from pliant.params import Params
from pliant.value import Value


class Plain(Value, frozen=True, tag="plain"):
    """Send every number as it is."""


class Half(Value, frozen=True, tag="fp16"):
    """Send 16-bit floats."""


class Bytes(Value, frozen=True, tag="int8"):
    """Send 8-bit integers and one factor a tensor."""


class Largest(Value, frozen=True, tag="topk"):
    """Send the largest entries and where they are."""

    share: Annotated[float, Meta(gt=0.0, le=1.0)] = 0.1


AnySqueeze = Plain | Half | Bytes | Largest

# A tensor "weight" travels under itself (Plain, fp16), or as "weight:int8" and "weight:scale", or
# as "weight:index" and "weight:value". Integers and empty tensors always travel as they are.


def squeezed(change: Params, how: AnySqueeze, residual: Params) -> tuple[Params, Params]:
    """Return what is sent and what it leaves out, to be added to the next change."""
    if isinstance(how, Plain):
        return change, {}
    sent: Params = {}
    left: Params = {}
    for name, tensor in change.items():
        if not tensor.is_floating_point() or not tensor.numel():
            sent[name] = tensor
            continue
        before = residual.get(name)
        whole = tensor + before if before is not None and before.shape == tensor.shape else tensor
        parts = _parts(name, whole, how)
        sent |= parts
        left[name] = whole - _whole(name, parts, tensor.shape, tensor.dtype)
    return sent, left


def restored(
    sent: Params, how: AnySqueeze, like: dict[str, tuple[torch.Size, torch.dtype]]
) -> Params:
    """Return the change that was sent; raise `ValueError` or `LookupError` where it is malformed.

    `like` says what each tensor should be; whatever is not in it is passed on for the guard to see.
    """
    if isinstance(how, Plain):
        return sent
    found: Params = {}
    used: set[str] = set()
    for name, (shape, dtype) in like.items():
        if not dtype.is_floating_point or not shape.numel():
            continue
        names = [part for part in _names(name, how) if part in sent]
        if not names:
            continue  # the guard says what is missing
        found[name] = _whole(name, {part: sent[part] for part in names}, shape, dtype)
        used.update(names)
    return found | {name: tensor for name, tensor in sent.items() if name not in used}


def _names(name: str, how: AnySqueeze) -> tuple[str, ...]:
    match how:
        case Bytes():
            return f"{name}:int8", f"{name}:scale"
        case Largest():
            return f"{name}:index", f"{name}:value"
        case _:
            return (name,)


def _parts(name: str, whole: Tensor, how: AnySqueeze) -> Params:
    match how:
        case Half():
            most = torch.finfo(torch.float16).max
            return {name: whole.clamp(-most, most).to(torch.float16)}
        case Bytes():
            scale = (whole.abs().max() / 127).to(torch.float32).reshape(1)
            steps = whole / scale if float(scale) > 0 else torch.zeros_like(whole)
            return {f"{name}:int8": steps.round().to(torch.int8), f"{name}:scale": scale}
        case Largest(share):
            count = max(1, round(share * whole.numel()))
            index = whole.abs().flatten().topk(count).indices.sort().values
            value = whole.flatten()[index]
            return {f"{name}:index": index.to(torch.int32), f"{name}:value": value}
        case Plain():
            return {name: whole}


def _whole(name: str, parts: Params, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    if name in parts:
        _need(name, parts[name], torch.float16, shape)
        return parts[name].to(dtype)
    if f"{name}:int8" in parts:
        steps, scale = parts[f"{name}:int8"], parts[f"{name}:scale"]
        _need(name, steps, torch.int8, shape)
        _need(name, scale, torch.float32, (1,))
        return steps.to(dtype) * scale.to(dtype)
    index, value = parts[f"{name}:index"].to(torch.int64), parts[f"{name}:value"]
    _need(name, value, dtype, index.shape)
    if index.ndim != 1 or len(set(index.tolist())) != len(index):
        raise ValueError(f"{name!r} with each place once, got some twice")
    if len(index) and not (int(index.min()) >= 0 and int(index.max()) < shape.numel()):
        raise ValueError(f"{name!r} with places up to {shape.numel() - 1}, got others")
    flat = torch.zeros(shape.numel(), dtype=dtype)
    flat[index] = value
    return flat.reshape(shape)


def _need(name: str, tensor: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    if tensor.dtype != dtype or tuple(tensor.shape) != tuple(shape):
        raise ValueError(
            f"{name!r} as {dtype} of shape {tuple(shape)}, "
            f"got {tensor.dtype} of {tuple(tensor.shape)}"
        )
