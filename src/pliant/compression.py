"""Compressed updates: 16-bit floats, 8-bit integers or the largest entries, with error feedback.

The error of one update is added to the next, so that nothing is lost (Seide et al., 1-bit SGD,
Interspeech 2014; Stich et al., Sparsified SGD with memory, NeurIPS 2018).
"""

from typing import Annotated

import torch
from msgspec import Meta
from torch import Tensor

from pliant.params import Params
from pliant.value import Value


class Uncompressed(Value, frozen=True, tag="plain"):
    """Send tensors as they are.

    >>> import pliant as pl
    >>> pl.RunSettings().compression == pl.Uncompressed()
    True
    """


class Float16(Value, frozen=True, tag="fp16"):
    """Send 16-bit floats.

    >>> import pliant as pl
    >>> pl.RunSettings(compression=pl.Float16()).compression
    Float16()
    """


class Int8(Value, frozen=True, tag="int8"):
    """Send 8-bit integers and one scale per tensor.

    >>> import pliant as pl
    >>> pl.RunSettings(compression=pl.Int8()).compression
    Int8()
    """


class TopK(Value, frozen=True, tag="topk"):
    """Send the entries of largest magnitude and their indices.

    >>> import pliant as pl
    >>> pl.RunSettings(compression=pl.TopK(share=0.05)).compression.share
    0.05
    """

    share: Annotated[float, Meta(gt=0.0, le=1.0)] = 0.1


AnyCompression = Uncompressed | Float16 | Int8 | TopK

# A tensor "weight" is sent as "weight" (uncompressed, fp16), as "weight:int8" and "weight:scale",
# or as "weight:index" and "weight:value". Integer and empty tensors are always sent as they are.
_SUFFIXES = {Float16: ("",), Int8: (":int8", ":scale"), TopK: (":index", ":value")}


def count_encoded_bytes(numel: int, dtype: torch.dtype, compression: AnyCompression) -> int:
    """Return the bytes of an encoded tensor, which depend on its size and type alone.

    >>> import torch
    >>> [count_encoded_bytes(20, torch.float32, c) for c in (Float16(), Int8(), TopK(0.1))]
    [40, 24, 16]
    """
    if not dtype.is_floating_point or not numel:
        return numel * dtype.itemsize
    match compression:
        case Float16():
            return 2 * numel
        case Int8():
            return numel + 4
        case TopK(share):
            return _count_largest(numel, share) * (4 + dtype.itemsize)
        case Uncompressed():
            return numel * dtype.itemsize


def _count_largest(numel: int, share: float) -> int:
    return max(1, round(share * numel))


def compress(delta: Params, compression: AnyCompression, residual: Params) -> tuple[Params, Params]:
    """Encode a delta plus the residual of the last one; return it and the new residual."""
    if isinstance(compression, Uncompressed):
        return delta, {}
    encoded: Params = {}
    errors: Params = {}
    for name, tensor in delta.items():
        if not tensor.is_floating_point() or not tensor.numel():
            encoded[name] = tensor
            continue
        error = residual.get(name)
        target = tensor + error if error is not None and error.shape == tensor.shape else tensor
        parts = _encode_tensor(name, target, compression)
        encoded |= parts
        errors[name] = target - _decode_tensor(name, parts, tensor.shape, tensor.dtype)
    return encoded, errors


def decompress(
    encoded: Params, compression: AnyCompression, specs: dict[str, tuple[torch.Size, torch.dtype]]
) -> Params:
    """Decode a delta; raise `ValueError` or `LookupError` if it is malformed.

    `specs` has the expected shape and type of each tensor. Other tensors are passed through, for
    validation to report.
    """
    if isinstance(compression, Uncompressed):
        return encoded
    decoded: Params = {}
    used: set[str] = set()
    for name, (shape, dtype) in specs.items():
        if not dtype.is_floating_point or not shape.numel():
            continue
        names = [name + suffix for suffix in _SUFFIXES[type(compression)]]
        parts = {part: encoded[part] for part in names if part in encoded}
        if not parts:
            continue  # validation reports what is missing
        decoded[name] = _decode_tensor(name, parts, shape, dtype)
        used.update(parts)
    return decoded | {name: tensor for name, tensor in encoded.items() if name not in used}


def _encode_tensor(name: str, tensor: Tensor, compression: AnyCompression) -> Params:
    match compression:
        case Float16():
            limit = torch.finfo(torch.float16).max
            bounded = torch.where(tensor.isinf(), tensor, tensor.clamp(-limit, limit))
            return {name: bounded.to(torch.float16)}  # infinities stay, for validation to reject
        case Int8():
            scale = (tensor.abs().max() / 127).to(torch.float32).reshape(1)
            steps = tensor / scale if float(scale) > 0 else torch.zeros_like(tensor)
            return {f"{name}:int8": steps.round().to(torch.int8), f"{name}:scale": scale}
        case TopK(share):
            count = _count_largest(tensor.numel(), share)
            index = tensor.abs().flatten().topk(count).indices.sort().values
            value = tensor.flatten()[index]
            return {f"{name}:index": index.to(torch.int32), f"{name}:value": value}
        case Uncompressed():
            return {name: tensor}


def _decode_tensor(name: str, parts: Params, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    if name in parts:
        _check_tensor(name, parts[name], torch.float16, shape)
        return parts[name].to(dtype)
    if f"{name}:int8" in parts:
        steps, scale = parts[f"{name}:int8"], parts[f"{name}:scale"]
        _check_tensor(name, steps, torch.int8, shape)
        _check_tensor(name, scale, torch.float32, (1,))
        return steps.to(dtype) * scale.to(dtype)
    index, value = parts[f"{name}:index"].to(torch.int64), parts[f"{name}:value"]
    _check_tensor(name, value, dtype, index.shape)
    if index.ndim != 1 or len(set(index.tolist())) != len(index):
        raise ValueError(f"{name!r} with each index once, got duplicates")
    if len(index) and not (int(index.min()) >= 0 and int(index.max()) < shape.numel()):
        raise ValueError(f"{name!r} with indices from 0 to {shape.numel() - 1}, got others")
    flat = torch.zeros(shape.numel(), dtype=dtype)
    flat[index] = value
    return flat.reshape(shape)


def _check_tensor(name: str, tensor: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    if tensor.dtype != dtype or tuple(tensor.shape) != tuple(shape):
        raise ValueError(
            f"{name!r} as {dtype} of shape {tuple(shape)}, "
            f"got {tensor.dtype} of {tuple(tensor.shape)}"
        )
