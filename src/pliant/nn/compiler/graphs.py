"""Compare two traces of a network, and find the module of a node."""

from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from pliant.nn.compiler.refusals import NotTraceable


def check_same_graph(net: nn.Module, graph: fx.Graph, again: fx.Graph) -> None:
    """Raise if two traces differ, naming the first module that does."""
    for node, other in zip_longest(graph.nodes, again.nodes):
        if node is None or other is None or not _is_same_node(node, other):
            path = find_module(node or other) or type(net).__name__
            raise NotTraceable(
                f"{path} computes something else in its second pass: a trace would freeze what "
                "changes between passes, like a counter. Compute it from tensors or buffers"
            )


def _is_same_node(node: fx.Node, other: fx.Node) -> bool:
    if (node.op, node.name) != (other.op, other.name) or node.target != other.target:
        return False
    if "constant" in node.meta and "constant" in other.meta:
        ours, theirs = node.meta["constant"], other.meta["constant"]
        return not isinstance(ours, Tensor) or torch.equal(ours, theirs)
    structures = [pytree.tree_flatten((n.args, n.kwargs)) for n in (node, other)]
    (ours, _), (theirs, _) = structures
    return structures[0][1] == structures[1][1] and all(map(_is_same_argument, ours, theirs))


def _is_same_argument(ours: Any, theirs: Any) -> bool:
    if isinstance(ours, fx.Node):
        return isinstance(theirs, fx.Node) and ours.name == theirs.name
    if isinstance(ours, int | float | str | None | torch.dtype):
        return bool(ours == theirs) or ours != ours  # NaN
    return type(ours) is type(theirs)


def find_module(node: fx.Node) -> str:
    """Return the path of the module that a node belongs to; empty for the network itself."""
    if node.op == "call_module":
        return str(node.target)
    paths = [path for path, _ in node.meta.get("nn_module_stack", {}).values()]
    return str(paths[-1]) if paths else ""


def find_module_ends(graph: fx.Graph) -> list[tuple[str, fx.Node]]:
    """Return every module with its last operation, in forward order."""
    ends: dict[str, tuple[int, fx.Node]] = {}
    for position, node in enumerate(graph.nodes):
        paths = [path for path, _ in node.meta.get("nn_module_stack", {}).values()]
        if node.op == "call_module":
            paths.append(str(node.target))
        for path in filter(None, paths):
            ends[path] = position, node
    return [(path, node) for path, (_, node) in sorted(ends.items(), key=lambda item: item[1][0])]


def name_layer(weight: str) -> str:
    """Return the path of the layer that a weight, or what it is computed from, belongs to."""
    suffixes = (".parametrizations.weight.original1", ".parametrizations.weight.original")
    for suffix in (*suffixes, ".weight_v", ".weight_orig", ".weight"):
        if weight.endswith(suffix):
            return weight.removesuffix(suffix)
    return weight


def find_canonical_names(net: nn.Module) -> dict[str, str]:
    """Map each name of a parameter or buffer to its first one (tied tensors have several)."""
    first_names, names = dict[int, str](), dict[str, str]()
    for iterate in (net.named_parameters, net.named_buffers):
        for name, tensor in iterate(remove_duplicate=False):
            names[name] = first_names.setdefault(id(tensor), name)
    return names
