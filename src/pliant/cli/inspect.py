"""`pliant inspect`: which filters of a network can be dropped, and what that saves."""

import sys
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

if TYPE_CHECKING:
    from torch import nn

    from pliant.nn.elastic import Elastic


def inspect(
    model: str,
    *,
    shape: Annotated[str, Parameter(negative="")] = "",
    apart: bool = False,
    hidden: bool = False,
    json: bool = False,
) -> None:
    """Show a network's sites, its MACs at three rates, and where all channels were needed.

    Example: pliant inspect resnet20

    Example: pliant inspect mynet.py:build --shape 3,64,64

    Parameters
    ----------
    model
        A bundled network, or `file.py:function` (or `module:function`) that returns your own.
    shape
        Shape of one input without the batch, like 3,32,32; bundled networks know theirs.
    apart
        Draw layers whose outputs are added apart instead of together.
    hidden
        Make sites of hidden linear layers too.
    json
        One JSON object instead of a table.
    """
    import torch

    from pliant.nn.elastic import elastic

    net, usual = build(model)
    sizes = parse(shape) if shape else usual
    if sizes is None:
        raise ValueError(f"Expected --shape for {model}, like --shape 3,32,32")
    found = elastic(net, torch.zeros(1, *sizes), coupled=not apart, hidden=hidden)
    sys.stdout.write((_as_json(found) if json else found.explain()) + "\n")


def build(model: str) -> "tuple[nn.Module, tuple[int, ...] | None]":
    """Return a bundled network, or one that a user's own function makes."""
    from torch import nn

    from pliant.nn.models import INPUT_SHAPES, MODELS

    if model in MODELS:
        return MODELS[model](), INPUT_SHAPES[model]
    place, colon, name = model.rpartition(":")
    if not colon:
        raise ValueError(
            f"Expected one of {', '.join(sorted(MODELS))}, or file.py:function, got {model!r}"
        )
    if place.endswith(".py"):
        path = Path(place).resolve()
        if not path.is_file():
            raise FileNotFoundError(f"{place}: no such file")
        sys.path.insert(0, str(path.parent))
        place = path.stem
    try:
        module = import_module(place)
    except ModuleNotFoundError as error:
        raise ValueError(
            f"Expected a module or a file ending in .py, got {place!r} ({error})"
        ) from error
    make = getattr(module, name, None)
    if not callable(make):
        raise ValueError(f"Expected a function {name!r} in {place}, found none")
    net = make()
    if not isinstance(net, nn.Module):
        raise ValueError(f"Expected {model} to return a torch.nn.Module, got {type(net).__name__}")
    return net, None


def parse(shape: str) -> tuple[int, ...]:
    """Read a shape like 3,32,32."""
    try:
        sizes = tuple(int(part) for part in shape.replace("x", ",").split(","))
    except ValueError:
        sizes = ()
    if not sizes or any(size < 1 for size in sizes):
        raise ValueError(f"Expected a shape like 3,32,32, got {shape!r}")
    return sizes


def _as_json(found: "Elastic") -> str:
    import msgspec

    rows = [
        {"layers": s.layers, "filters": s.filters, "macs": s.macs, "feeds": s.feeds}
        for s in found.sites
    ]
    dense = [{"value": d.value, "reader": d.reader, "why": d.why} for d in found.densities]
    macs = {str(rate): found.macs(rate) for rate in (0.0, 0.25, 0.5)}
    return msgspec.json.encode({"sites": rows, "macs": macs, "dense": dense}).decode()
