"""Weights that a network computes from its parameters: normed, standardised or scaled ones.

A layer with such a weight is named by the parameter that has the weight's shape. What the weight is
computed from is sliced along the layer's outputs if every operation treats each output alone, as
weight norm does. Otherwise, as in spectral norm, it is computed in full. Inputs are selected after
that, so that absent ones count in norms as they do in the full network.
"""

from dataclasses import replace
from typing import Any

from torch import Tensor, fx

from pliant.nn.compiler.builder import Builder
from pliant.nn.compiler.channels import ChannelLayout
from pliant.nn.compiler.rules_layers import Layer


def find_root(weight: Any) -> fx.Node | None:
    """Return the parameter that a weight is computed from; None if it is not, or from several."""
    parts = collect_parts(weight) if isinstance(weight, fx.Node) else None
    if parts is None or weight.op == "get_attr":
        return None
    shape = weight.meta["value"].shape
    roots = [
        part
        for part in parts
        if part.op == "get_attr" and "constant" not in part.meta and _get_shape(part) == shape
    ]
    trainable = [part for part in roots if part.meta["requires_grad"]]
    roots = trainable or roots
    return roots[0] if len(roots) == 1 else None


def collect_parts(weight: fx.Node) -> list[fx.Node] | None:
    """Return all nodes that a weight is computed by; None if it depends on the input."""
    parts, waiting = dict[fx.Node, None](), [weight]
    while waiting:
        part = waiting.pop()
        if part.op in {"placeholder", "call_module"}:
            return None
        if part not in parts:
            parts[part] = None
            waiting += part.all_input_nodes
    return list(parts)


def _get_shape(node: fx.Node) -> Any:
    value = node.meta["value"]
    return value.shape if isinstance(value, Tensor) else None


def slice_parts(builder: Builder, layer: Layer) -> None:
    """Slice what a layer's weight is computed from along its outputs, if it is a site."""
    weight, dim = layer.computed, layer.output_dim
    parts = collect_parts(weight) if weight is not None else None
    shape = builder.shape(layer.weight)
    spans = builder.find_output_spans(layer.weight, shape[dim])
    if parts is None or spans is None or builder.is_unsliced(layer.weight):
        return
    rows = tuple(replace(span, pending_sites=frozenset()) for span in spans)
    for part in parts:
        builder.weight_parts[part] = layer.weight
        own_shape = _get_shape(part) if part.op == "get_attr" else ()
        name = builder.param_name(part)
        if name is not None and len(own_shape) > dim and own_shape[dim] == shape[dim]:
            builder.load_rows(part, name, ChannelLayout(dim, rows))
