"""Cut a network after any of its layers into a device's part and a server's part."""

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from operator import mul
from typing import Any

import torch
from torch import Tensor, fx, nn

from pliant.nn.compiler.fast_meta import FastMetaMode, MacCounter
from pliant.nn.compiler.preserve import preserve
from pliant.nn.compiler.refusals import copy_to_meta
from pliant.nn.compiler.trace import BATCH, trace


@dataclass(frozen=True)
class CutPoint:
    """A layer after which a network can be cut, with the cost of each side.

    >>> import torch
    >>> import pliant as pl
    >>> net = torch.nn.Sequential(
    ...     torch.nn.Conv2d(1, 4, 3), torch.nn.Flatten(), torch.nn.Linear(144, 2)
    ... )
    >>> cut_points = pl.find_cut_points(net, torch.zeros(1, 1, 8, 8))
    >>> [(cut_point.after, cut_point.device_macs, cut_point.bytes) for cut_point in cut_points]
    [('0', 1296, 576), ('1', 1296, 576)]
    """

    after: str  # layer name
    device_macs: int  # per sample, forward
    server_macs: int
    shapes: tuple[tuple[int, ...], ...]  # of the tensors that cross the cut, per sample
    bytes: int  # of these tensors, per sample


@dataclass(frozen=True, eq=False)
class SplitNetwork:
    """Both parts of a cut network; parameters keep their names."""

    cut_point: CutPoint
    device: fx.GraphModule  # returns the tensor that crosses, or a tuple of them
    server: fx.GraphModule  # takes the tensors that cross


def find_cut_points(net: nn.Module, example: Tensor | tuple[Tensor, ...]) -> list[CutPoint]:
    """Return every layer after which the network can be cut, in forward order.

    >>> import torch
    >>> import pliant as pl
    >>> cut_points = pl.find_cut_points(pl.models.lenet_small(), torch.zeros(1, 3, 32, 32))
    >>> "stage1" in [cut_point.after for cut_point in cut_points]
    True
    """
    return [point for _, point in _iter_cut_points(net, trace(net, example))]


def split_network(net: nn.Module, example: Tensor | tuple[Tensor, ...], after: str) -> SplitNetwork:
    """Cut a network after the layer of this name in `net.named_modules()`.

    >>> import torch
    >>> import pliant as pl
    >>> net = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.ReLU(), torch.nn.Linear(3, 2))
    >>> parts = pl.split_network(net, torch.zeros(1, 4), after="1")
    >>> parts.server(parts.device(torch.zeros(5, 4))).shape
    torch.Size([5, 2])
    """
    graph = trace(net, example)
    cuts = {cut[1].after: cut for cut in _iter_cut_points(net, graph, all_names=True)}
    if after not in cuts:
        names = ", ".join(point.after for _, point in _iter_cut_points(net, graph))
        raise ValueError(f"Expected to cut after one of {names}, got {after!r}")
    position, cut_point = cuts[after]
    nodes = list(graph.nodes)
    crossing, sizes = _find_crossing(nodes, position)
    device = _make_module(net, _build_device_graph(nodes, position, crossing))
    server = _make_module(net, _build_server_graph(nodes, position, crossing, sizes))
    shared = dict(device.named_parameters()).keys() & dict(server.named_parameters())
    if shared:
        raise ValueError(
            "Expected parameters on one side of the cut only, "
            f"got {', '.join(sorted(shared))} on both sides of {after!r}"
        )
    return SplitNetwork(cut_point, device, server)


def _iter_cut_points(
    net: nn.Module, graph: fx.Graph, *, all_names: bool = False
) -> Iterator[tuple[int, CutPoint]]:
    """Yield graph positions and cut points; of several names, only the shortest by default."""
    nodes = list(graph.nodes)
    macs = _accumulate_macs(net, graph)
    names: dict[int, list[str]] = {}
    for name, position in _find_module_ends(nodes).items():
        names.setdefault(position, []).append(name)
    for position in sorted(names):
        crossing, sizes = _find_crossing(nodes, position)
        values = [node.meta["value"] for node in crossing]
        is_last = all(node.op == "output" for node in nodes[position + 1 :])
        is_sendable = all(value.dim() and value.shape[0] == BATCH for value in values)
        is_size = all(isinstance(node.meta["value"], int) for node in sizes)
        if is_last or not values or not is_sendable or not is_size:
            continue
        shapes = tuple(tuple(value.shape[1:]) for value in values)
        num_bytes = sum(prod(value.shape[1:]) * value.element_size() for value in values)
        aliases = sorted(names[position], key=lambda name: (name.count("."), name))
        for name in aliases if all_names else aliases[:1]:
            server_macs = macs[-1] - macs[position]
            yield position, CutPoint(name, macs[position], server_macs, shapes, num_bytes)


def _find_module_ends(nodes: list[fx.Node]) -> dict[str, int]:
    """Map every module to the position of its last operation."""
    ends: dict[str, int] = {}
    for position, node in enumerate(nodes):
        paths = [path for path, _ in node.meta.get("nn_module_stack", {}).values()]
        if node.op == "call_module":
            paths.append(str(node.target))
        for path in paths:
            parts = path.split(".")
            for length in range(1, len(parts) + 1):
                ends[".".join(parts[:length])] = position
    ends.pop("", None)
    return ends


def _find_crossing(nodes: list[fx.Node], position: int) -> tuple[list[fx.Node], list[fx.Node]]:
    """Return the values computed up to a position and read after it: tensors, then others."""
    before = set(nodes[: position + 1])
    crossing = [
        node
        for node in nodes[: position + 1]
        if node.op != "get_attr" and any(user not in before for user in node.users)
    ]
    tensors = [node for node in crossing if isinstance(node.meta["value"], Tensor)]
    return tensors, [node for node in crossing if not isinstance(node.meta["value"], Tensor)]


def _build_device_graph(nodes: list[fx.Node], position: int, crossing: list[fx.Node]) -> fx.Graph:
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in nodes[: position + 1]:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    outputs = tuple(copies[node] for node in crossing)
    graph.output(outputs[0] if len(outputs) == 1 else outputs)
    return _remove_unused_attributes(graph)


def _build_server_graph(
    nodes: list[fx.Node], position: int, crossing: list[fx.Node], sizes: list[fx.Node]
) -> fx.Graph:
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    for number, node in enumerate(crossing):
        copies[node] = graph.placeholder(f"input_{number}")
    for node in sizes:  # multiples of the batch size, which the server reads from its input
        size = graph.call_method("size", (copies[crossing[0]], 0))
        multiple = int(node.meta["value"]) // BATCH
        copies[node] = size if multiple == 1 else graph.call_function(mul, (size, multiple))
    for index, node in enumerate(nodes):
        if index > position or node.op == "get_attr":
            copies[node] = graph.node_copy(node, copies.__getitem__)
    return _remove_unused_attributes(graph)


def _make_module(net: nn.Module, graph: fx.Graph) -> fx.GraphModule:
    """Make the module of a graph, including constants that the network does not keep."""
    with preserve(net):
        for node in graph.find_nodes(op="get_attr"):
            if "." not in str(node.target) and "constant" in node.meta:
                setattr(net, str(node.target), node.meta["constant"])
        return fx.GraphModule(net, graph)


def _remove_unused_attributes(graph: fx.Graph) -> fx.Graph:
    for node in reversed(graph.nodes):
        if node.op == "get_attr" and not node.users:
            graph.erase_node(node)
    return graph


def _accumulate_macs(net: nn.Module, graph: fx.Graph) -> list[int]:
    """Return the MACs per sample done after each node."""
    meta_net = copy_to_meta(net).eval()
    macs: list[int] = []
    inputs = [node.meta["value"] for node in graph.nodes if node.op == "placeholder"]
    samples = [value.new_empty((1, *value.shape[1:])) for value in inputs]
    with torch.no_grad(), FastMetaMode(), MacCounter() as counter:

        class CountingInterpreter(fx.Interpreter):
            def run_node(self, n: fx.Node) -> Any:
                result = super().run_node(n)
                macs.append(counter.macs)
                return result

        CountingInterpreter(_make_module(meta_net, copy.deepcopy(graph))).run(*samples)
    return macs
