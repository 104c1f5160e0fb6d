"""Cut a network after any of its layers into a device's part and a server's part."""

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils.flop_counter import FlopCounterMode

from pliant.nn.trace import BATCH, trace


@dataclass(frozen=True)
class Place:
    """Where a network can be cut, and what each side then has to do.

    >>> import torch
    >>> from pliant.nn.cut import cuts
    >>> net = torch.nn.Sequential(
    ...     torch.nn.Conv2d(1, 4, 3), torch.nn.Flatten(), torch.nn.Linear(144, 2)
    ... )
    >>> found = cuts(net, torch.zeros(1, 1, 8, 8))
    >>> [(place.after, place.device_macs, place.bytes) for place in found]
    [('0', 1296, 576), ('1', 1296, 576)]
    """

    after: str  # the layer
    device_macs: int  # per sample, forward
    server_macs: int
    shapes: tuple[tuple[int, ...], ...]  # of the values that cross, per sample
    bytes: int  # that cross, per sample


@dataclass(frozen=True, eq=False)
class Cut:
    """Both parts of a network; parameters keep the names that they have in it."""

    place: Place
    device: fx.GraphModule  # gives the value that crosses, or a tuple of them
    server: fx.GraphModule  # takes the values that cross


def cuts(net: nn.Module, example: Tensor | tuple[Tensor, ...]) -> list[Place]:
    """Return every layer after which the network can be cut, in the order of the pass.

    >>> import torch
    >>> import pliant as pl
    >>> places = pl.cuts(pl.models.lenet_small(), torch.zeros(1, 3, 32, 32))
    >>> "stage1" in [place.after for place in places]
    True
    """
    graph = trace(net, example)
    return [place for _, place in _places(net, graph)]


def cut(net: nn.Module, example: Tensor | tuple[Tensor, ...], after: str) -> Cut:
    """Cut a network after a layer, named as in `net.named_modules()`.

    >>> import torch
    >>> import pliant as pl
    >>> net = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.ReLU(), torch.nn.Linear(3, 2))
    >>> parts = pl.cut(net, torch.zeros(1, 4), after="1")
    >>> parts.server(parts.device(torch.zeros(5, 4))).shape
    torch.Size([5, 2])
    """
    graph = trace(net, example)
    found = {place.after: (position, place) for position, place in _places(net, graph, every=True)}
    if after not in found:
        able = ", ".join(place.after for _, place in _places(net, graph))
        raise ValueError(f"Expected to cut after one of {able}, got {after!r}")
    position, place = found[after]
    nodes = list(graph.nodes)
    crossing, sizes = _crossing(nodes, position)
    device = fx.GraphModule(net, _device(nodes, position, crossing))
    server = fx.GraphModule(net, _server(nodes, position, crossing, sizes))
    shared = {name for name, _ in device.named_parameters()} & {
        name for name, _ in server.named_parameters()
    }
    if shared:
        raise ValueError(
            f"Expected parameters on one side of the cut only, got {', '.join(sorted(shared))} "
            f"on both sides of {after!r}"
        )
    return Cut(place, device, server)


def _places(net: nn.Module, graph: fx.Graph, *, every: bool = False) -> Iterator[tuple[int, Place]]:
    """Yield positions in the graph with their places; of several names the shortest."""
    nodes = list(graph.nodes)
    macs = _macs(net, graph)
    names: dict[int, list[str]] = {}
    for name, position in _ends(nodes).items():
        names.setdefault(position, []).append(name)
    total = macs[-1]
    for position in sorted(names):
        crossing, sizes = _crossing(nodes, position)
        is_last = all(node.op == "output" for node in nodes[position + 1 :])
        if is_last or not crossing or not all(_is_sendable(node) for node in crossing):
            continue
        if not all(isinstance(node.meta["value"], int) for node in sizes):
            continue
        shapes = tuple(_shape(node) for node in crossing)
        width = sum(
            prod(shape) * node.meta["value"].element_size()
            for shape, node in zip(shapes, crossing, strict=True)
        )
        done = macs[position]
        called = sorted(names[position], key=lambda name: (name.count("."), name))
        for name in called if every else called[:1]:
            yield position, Place(name, done, total - done, shapes, width)


def _ends(nodes: list[fx.Node]) -> dict[str, int]:
    """Return for every module the position of the last operation in it."""
    found: dict[str, int] = {}
    for position, node in enumerate(nodes):
        paths = [path for path, _ in node.meta.get("nn_module_stack", {}).values()]
        if node.op == "call_module":
            paths.append(str(node.target))
        for path in paths:
            parts = path.split(".")
            for length in range(1, len(parts) + 1):
                found[".".join(parts[:length])] = position
    found.pop("", None)
    return found


def _crossing(nodes: list[fx.Node], position: int) -> tuple[list[fx.Node], list[fx.Node]]:
    """Return the values that are made up to a position and read behind it: tensors, and others."""
    before = set(nodes[: position + 1])
    read = [
        node
        for node in nodes[: position + 1]
        if node.op != "get_attr" and any(user not in before for user in node.users)
    ]
    tensors = [node for node in read if isinstance(node.meta["value"], Tensor)]
    return tensors, [node for node in read if not isinstance(node.meta["value"], Tensor)]


def _is_sendable(node: fx.Node) -> bool:
    value = node.meta["value"]
    return bool(value.dim() and value.shape[0] == BATCH)


def _shape(node: fx.Node) -> tuple[int, ...]:
    return tuple(node.meta["value"].shape[1:])


def _device(nodes: list[fx.Node], position: int, crossing: list[fx.Node]) -> fx.Graph:
    graph, made = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in nodes[: position + 1]:
        made[node] = graph.node_copy(node, made.__getitem__)
    out = tuple(made[node] for node in crossing)
    graph.output(out[0] if len(out) == 1 else out)
    return _tidied(graph)


def _server(
    nodes: list[fx.Node], position: int, crossing: list[fx.Node], sizes: list[fx.Node]
) -> fx.Graph:
    graph, made = fx.Graph(), dict[fx.Node, fx.Node]()
    for number, node in enumerate(crossing):
        made[node] = graph.placeholder(f"input_{number}")
    for node in sizes:  # a multiple of the batch size, which the server sees for itself
        size = graph.call_method("size", (made[crossing[0]], 0))
        times = int(node.meta["value"]) // BATCH
        made[node] = size if times == 1 else graph.call_function(_times, (size, times))
    for place, node in enumerate(nodes):
        if place > position or node.op == "get_attr":
            made[node] = graph.node_copy(node, made.__getitem__)
    return _tidied(graph)


def _tidied(graph: fx.Graph) -> fx.Graph:
    for node in reversed(graph.nodes):
        if node.op == "get_attr" and not node.users:
            graph.erase_node(node)
    return graph


def _times(size: int, factor: int) -> int:
    return size * factor


def _macs(net: nn.Module, graph: fx.Graph) -> list[int]:
    """Return how many MACs per sample are done when each node is through."""
    shadow = copy.deepcopy(net).to("meta").eval()
    done: list[int] = []
    with FlopCounterMode(display=False) as counter, torch.no_grad():

        class Counting(fx.Interpreter):
            def run_node(self, n: fx.Node) -> Any:
                found = super().run_node(n)
                done.append(counter.get_total_flops() // 2)
                return found

        inputs = [node.meta["value"] for node in graph.nodes if node.op == "placeholder"]
        few = [
            torch.empty((1, *value.shape[1:]), dtype=value.dtype, device="meta") for value in inputs
        ]
        Counting(fx.GraphModule(shadow, copy.deepcopy(graph))).run(*few)
    return done
