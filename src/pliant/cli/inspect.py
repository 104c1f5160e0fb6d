"""`pliant inspect`: show which filters of a network can be dropped, and what that saves."""

import sys
from inspect import signature
from pathlib import Path
from shutil import get_terminal_size
from textwrap import TextWrapper
from typing import TYPE_CHECKING, Annotated, Any

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
    tokens: bool = False,
    json: bool = False,
) -> None:
    """Show a network's sites, its MACs at three rates, and which layers stay full or dense.

    Example: pliant inspect resnet20

    Example: pliant inspect mynet.py:build --shape 3,64,64

    Example: pliant inspect lenet --cuts

    Example: pliant inspect mytext.py:build --shape 64 --tokens

    Args:
        model: A bundled network, or `file.py:function` or `module:function` that returns your own.
        shape: Shape of one input without the batch, like 3,32,32 (an image), 3,128 (a signal) or 64
            (tokens); bundled networks have a default.
        apart: Make layers whose outputs are added separate sites instead of one.
        hidden: Also make hidden linear layers sites.
        cuts: Show where the network can be split between device and server, and what is sent.
        tokens: The inputs are integers, for your own network of token sequences.
        json: Print one JSON object instead of a table.
    """
    import torch

    from pliant.cli import NetworkRefused
    from pliant.cli.progress import print_json, print_line
    from pliant.nn.compiler.refusals import NotTraceable
    from pliant.nn.elastic import elastic
    from pliant.nn.models import TOKEN_MODELS

    net, default_shape = load_network(model)
    sizes = parse_shape(shape) if shape else default_shape
    if sizes is None:
        raise ValueError(f"Expected --shape for {model}, like --shape 3,32,32")
    is_text = tokens or model in TOKEN_MODELS
    example = torch.zeros(1, *sizes, dtype=torch.long if is_text else torch.float32)
    _check_shape(net, example, model)
    if cuts:
        _show_cut_points(net, example, is_json=json)
        return
    try:
        elastic_net = elastic(net, example, coupled=not apart, hidden=hidden)
    except NotTraceable as error:
        raise NetworkRefused(str(error)) from error
    if json:
        print_json(_describe_sites(elastic_net))
    else:
        print_line(_wrap_lines(elastic_net.summary()))


def _wrap_lines(table: str) -> str:
    """Break long lines of a table at spaces and below its last column, on a terminal only."""
    if not sys.stdout.isatty():
        return table
    lines = table.splitlines()
    indent = " " * lines[0].index("layers")
    wrap = TextWrapper(
        get_terminal_size().columns, subsequent_indent=indent, break_on_hyphens=False
    ).wrap
    return "\n".join(part for line in lines for part in wrap(line))


def _check_shape(net: "nn.Module", example: "Tensor", model: str) -> None:
    """Raise if the network cannot process inputs of this shape."""
    import torch

    is_training = net.training
    try:
        with torch.no_grad():
            net.eval()(example)
    except (RuntimeError, ValueError, IndexError, TypeError) as error:
        shape, problem = ",".join(map(str, example.shape[1:])), " ".join(str(error).split())
        raise ValueError(
            f"{model}: expected a shape that the network can process, got {shape} ({problem})"
        ) from error
    finally:
        net.train(is_training)


def _show_cut_points(net: "nn.Module", example: "Tensor", *, is_json: bool) -> None:
    from dataclasses import asdict

    from pliant.cli.progress import print_json, print_line
    from pliant.nn.cut import find_cut_points

    points = find_cut_points(net, example)
    if is_json:
        print_json([asdict(point) for point in points])
        return
    width = max([len(point.after) for point in points] + [len("cut after")])
    print_line(
        f"{'cut after':{width}}  {'device MACs':>13}  {'server MACs':>13}  {'bytes':>9}  crosses"
    )
    for point in points:
        shapes = " + ".join("x".join(map(str, shape)) for shape in point.shapes)
        print_line(
            f"{point.after:{width}}  {point.device_macs:>13,}  {point.server_macs:>13,}  "
            f"{point.bytes:>9,}  {shapes}"
        )


def load_network(model: str) -> "tuple[nn.Module, tuple[int, ...] | None]":
    """Return a bundled network and its input shape, or a network from a user's function."""
    from torch import nn

    from pliant.experiment.user_code import is_user_function, load_function, make_absolute
    from pliant.nn.models import INPUT_SHAPES, MODELS, SEQUENCE_MODELS, SEQUENCE_SHAPES
    from pliant.suggestions import did_you_mean

    bundled = {**MODELS, **SEQUENCE_MODELS}
    if model in bundled:
        return bundled[model](), {**INPUT_SHAPES, **SEQUENCE_SHAPES}[model]
    if not is_user_function(model):
        raise ValueError(
            f"unknown network {model!r}, and not file.py:function{did_you_mean(model, bundled)}"
        )
    make = load_function(make_absolute(model, Path()))
    try:
        signature(make).bind()
    except TypeError as error:
        raise ValueError(f"{model}: expected a function without arguments, {error}") from None
    net = make()
    if not isinstance(net, nn.Module):
        raise ValueError(f"{model}: expected an nn.Module, got {type(net).__name__}")
    return net, None


def parse_shape(shape: str) -> tuple[int, ...]:
    try:
        sizes = tuple(int(part) for part in shape.replace("x", ",").split(","))
    except ValueError:
        sizes = ()
    if not sizes or any(size < 1 for size in sizes):
        raise ValueError(f"Expected a shape like 3,32,32, got {shape!r}")
    return sizes


def _describe_sites(net: "Elastic") -> dict[str, Any]:
    keys = ("layers", "filters", "macs", "feeds")
    rows = [{key: getattr(site, key) for key in keys} for site in net.sites]
    dense = [{"value": d.value, "reader": d.reader, "why": d.reason} for d in net.dense_fallbacks]
    macs = {str(rate): net.macs(rate) for rate in (0.0, 0.25, 0.5)}
    full = [{"layer": layer, "why": why} for layer, why in net.full_layers.items()]
    return {"sites": rows, "macs": macs, "full": full, "dense": dense}
