"""`pliant inspect`: which filters of a network can be dropped, and what that saves."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

if TYPE_CHECKING:
    from torch import Tensor, nn

    from pliant.nn.elastic import Elastic


def inspect(
    model: str,
    *,
    shape: Annotated[str, Parameter(negative="")] = "",
    apart: bool = False,
    hidden: bool = False,
    cuts: bool = False,
    json: bool = False,
) -> None:
    """Show a network's sites, its MACs at three rates, and where all channels were needed.

    Example: pliant inspect resnet20

    Example: pliant inspect mynet.py:build --shape 3,64,64

    Example: pliant inspect lenet --cuts

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
    cuts
        Show where the network can be cut between a device and a server, and what crosses.
    json
        One JSON object instead of a table.
    """
    import torch

    from pliant.nn.elastic import elastic

    net, usual = build(model)
    sizes = parse(shape) if shape else usual
    if sizes is None:
        raise ValueError(f"Expected --shape for {model}, like --shape 3,32,32")
    if cuts:
        sys.stdout.write(_cuts(net, torch.zeros(1, *sizes), is_json=json))
        return
    found = elastic(net, torch.zeros(1, *sizes), coupled=not apart, hidden=hidden)
    sys.stdout.write((_as_json(found) if json else found.explain()) + "\n")


def _cuts(net: "nn.Module", example: "Tensor", *, is_json: bool) -> str:
    from dataclasses import asdict

    import msgspec

    from pliant.nn.cut import cuts

    places = cuts(net, example)
    if is_json:
        return msgspec.json.encode([asdict(place) for place in places]).decode() + "\n"
    width = max([len(place.after) for place in places] + [len("cut after")])
    lines = [
        f"{'cut after':{width}}  {'device MACs':>13}  {'server MACs':>13}  {'bytes':>9}  crosses"
    ]
    for place in places:
        shapes = " + ".join("x".join(map(str, shape)) for shape in place.shapes)
        lines.append(
            f"{place.after:{width}}  {place.device_macs:>13,}  {place.server_macs:>13,}  "
            f"{place.bytes:>9,}  {shapes}"
        )
    return "\n".join(lines) + "\n"


def build(model: str) -> "tuple[nn.Module, tuple[int, ...] | None]":
    """Return a bundled network, or one that a user's own function makes."""
    from torch import nn

    from pliant.hints import nearest
    from pliant.nn.models import INPUT_SHAPES, MODELS
    from pliant.own import anchored, is_own, own_function

    if model in MODELS:
        return MODELS[model](), INPUT_SHAPES[model]
    if not is_own(model):
        raise ValueError(
            f"unknown network {model!r}, and no file.py:function{nearest(model, MODELS)}"
        )
    net = own_function(anchored(model, Path()))()
    if not isinstance(net, nn.Module):
        raise ValueError(f"{model}: expected an nn.Module, got {type(net).__name__}")
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
