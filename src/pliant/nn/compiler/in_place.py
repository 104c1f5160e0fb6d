"""Find operations that may work in place, and replace those that a compact pass cannot run."""

import operator
import sys
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from pliant.nn.compiler.graphs import find_module
from pliant.nn.compiler.refusals import NotTraceable

# views fail if a value has another memory format than in the original network
VIEW_REPLACEMENTS = {"view": "reshape", "view_as": "reshape_as"}
RELUS: set[Any] = {torch.relu, F.relu, "relu"}
SUMS: set[Any] = {operator.add, torch.add}
IN_PLACE_FUNCTIONS = {operator.iadd, operator.isub, operator.imul, operator.itruediv}


def is_in_place(node: fx.Node, modules: dict[str, nn.Module]) -> bool:
    """Return whether a node overwrites its first argument."""
    if node.op == "call_module":
        return bool(getattr(modules[str(node.target)], "inplace", False))
    if node.op == "call_function" and (
        node.target in IN_PLACE_FUNCTIONS or node.kwargs.get("inplace")
    ):
        return True
    name = str(getattr(node.target, "__name__", node.target))
    return node.op.startswith("call") and name.endswith("_") and not name.endswith("__")


def find_overwritten_input(node: fx.Node, modules: dict[str, nn.Module]) -> fx.Node | None:
    """Return the input that a ReLU or a sum may overwrite, as nothing else needs it; None if none.

    Only inputs with memory of their own count, and those that no gradient needs.
    """
    module = modules[str(node.target)] if node.op == "call_module" else None
    is_relu = node.target in RELUS or type(module) is nn.ReLU
    is_sum = node.target in SUMS and len(node.all_input_nodes) == 2 and not node.kwargs
    if is_relu or is_sum:
        for source in node.all_input_nodes:
            if len(source.users) == 1 and _is_overwritable(source, modules):
                before, after = source.meta["value"], node.meta["value"]
                if (before.shape, before.dtype) == (after.shape, after.dtype):
                    return source
    return None


def _is_overwritable(source: fx.Node, modules: dict[str, nn.Module]) -> bool:
    """Return whether a value is the result of a batch norm, a sum or a convolution.

    Those of 1x1 are not included, as they may run as matrix products.
    """
    if source.op != "call_module":
        return source.target in SUMS or source.target is F.batch_norm
    producer = modules[str(source.target)]
    if isinstance(producer, nn.Conv1d | nn.Conv2d | nn.Conv3d):
        return max(producer.kernel_size) > 1
    return isinstance(producer, nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d)


def is_delayed_relu(node: fx.Node, modules: dict[str, nn.Module]) -> bool:
    """Return whether a node is a ReLU that only a max pooling reads.

    It is applied after the pooling: the same numbers and gradients, from fewer activations.
    """
    if len(node.users) != 1 or _find_kind(node, modules) not in (nn.ReLU, torch.relu, F.relu):
        return False
    reader = next(iter(node.users))
    return (
        _find_kind(reader, modules) in (nn.MaxPool2d, F.max_pool2d)
        and isinstance(reader.meta["value"], Tensor)  # not with its indices too
        and node.meta.get("is_no_grad") == reader.meta.get("is_no_grad")
    )


def _find_kind(node: fx.Node, modules: dict[str, nn.Module]) -> Any:
    """Return the class of the module, or the function, that a node calls."""
    return type(modules[str(node.target)]) if node.op == "call_module" else node.target


def is_view(node: fx.Node) -> bool:
    """Return whether a node's value shares memory with one of its inputs."""
    values = [n.meta.get("value") for n in (node, *node.all_input_nodes)]
    if not isinstance(values[0], Tensor):
        return False
    storages = [v.untyped_storage()._cdata for v in values if isinstance(v, Tensor)]
    return storages[0] in storages[1:]


def functionalize(graph: fx.Graph, modules: dict[str, nn.Module]) -> fx.Graph:
    """Redirect later readers of overwritten values to the result, and turn views into reshapes."""
    positions = {node: position for position, node in enumerate(graph.nodes)}
    aliases: dict[int, list[fx.Node]] = {}
    for node in graph.nodes:
        if isinstance(value := node.meta.get("value"), Tensor):
            aliases.setdefault(value.untyped_storage()._cdata, []).append(node)
    for node in graph.nodes:
        if node.op == "call_method" and not any(isinstance(arg, torch.dtype) for arg in node.args):
            node.target = VIEW_REPLACEMENTS.get(node.target, node.target)
        if node.all_input_nodes and is_in_place(node, modules):
            target = node.args[0]
            storage = target.meta["value"].untyped_storage()._cdata
            for alias in aliases[storage]:
                later = [user for user in alias.users if positions[user] > positions[node]]
                if later and positions[alias] < positions[node]:
                    _redirect(alias, target, node, later)
    return graph


def _redirect(alias: fx.Node, target: fx.Node, node: fx.Node, readers: list[fx.Node]) -> None:
    """Let later readers of an overwritten value, or of its equal, read the result."""
    ours, theirs = target.meta["value"], alias.meta["value"]
    if alias is target or _find_geometry(ours) == _find_geometry(theirs):
        for reader in readers:
            reader.replace_input_with(alias, node)
    elif not (_are_apart(ours, theirs) or _are_apart(theirs, ours)):
        raise NotTraceable(
            f"{find_module(node) or 'the network'} writes in place ({node.name}) to a value that "
            f"shares memory with another one ({alias.name}), which is read later: use the "
            "operation that is not in place"
        )


def _find_geometry(value: Tensor) -> tuple[Any, ...]:
    return value.shape, value.stride(), value.storage_offset()


def _are_apart(first: Tensor, second: Tensor) -> bool:
    """Return whether two parts of one tensor are apart along some axis, the first one in front."""
    distance = second.storage_offset() - first.storage_offset()
    if first.dim() != second.dim() or first.stride() != second.stride() or distance <= 0:
        return False
    limits = (sys.maxsize, *first.stride())
    return any(
        stride > 0
        and distance % stride == 0
        and distance // stride >= first.shape[dim]
        and distance + second.shape[dim] * stride <= limits[dim]
        for dim, stride in enumerate(first.stride())
    )
