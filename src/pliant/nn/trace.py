"""Trace a network with torch.fx, specialised to the shapes of an example input.

Every traced value carries a tensor on the meta device, so `x.size(1)` and `x.shape[2]` are plain
numbers while the network is traced and only the batch size stays open. It is recognised by its
number: the example is given a batch of `BATCH`, a prime that no other dimension is a multiple of.
"""

import copy
import linecache
import operator
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

BATCH = 7919
_TORCH = str(Path(torch.__file__).parent)
_HERE = __file__


class NotTraceable(ValueError):
    """A forward pass cannot be written down as a fixed list of operations."""


class ShapedProxy(fx.Proxy):
    """A traced value whose shape is known, apart from the batch size."""

    @property
    def shape(self) -> tuple[Any, ...]:
        return tuple(self.size(dim) for dim in range(self.value.dim()))

    @property
    def ndim(self) -> int:
        return int(self.value.dim())

    @property
    def dtype(self) -> torch.dtype:
        return self.value.dtype  # type: ignore[no-any-return] # the meta value is Any

    @property
    def device(self) -> torch.device:
        return self.tracer.home  # type: ignore[attr-defined,no-any-return] # always a ShapedTracer

    @property
    def is_cuda(self) -> bool:
        return self.device.type == "cuda"

    @property
    def value(self) -> Any:
        return self.tracer.value_of(self.node)  # type: ignore[attr-defined] # a ShapedTracer

    def dim(self) -> int:
        return self.ndim

    def size(self, dim: int | None = None) -> Any:
        if dim is None:
            return self.shape
        size = self.value.size(dim)
        if size and size % BATCH == 0:
            return self.tracer.create_proxy("call_method", "size", (self, dim), {})
        return size

    def numel(self) -> Any:
        total: Any = 1
        for size in self.shape:
            total = total * size
        return total

    def __len__(self) -> int:
        value = self.value
        return len(value) if isinstance(value, tuple | list) else int(self._refuse("len()"))

    def __iter__(self) -> Iterator[Any]:
        return (operator.getitem(self, place) for place in range(len(self)))

    def __index__(self) -> int:
        return int(self._refuse("a batch size, or a value, as a number"))

    __int__ = __index__

    def __float__(self) -> float:
        return float(self._refuse("a value as a number"))

    def _refuse(self, what: str) -> Any:
        return self.tracer.refuse(what)  # type: ignore[attr-defined] # always a ShapedTracer


def _in_place(name: str) -> Callable[[Any, Any], Any]:
    target = getattr(operator, name)

    def method(self: ShapedProxy, other: Any) -> Any:
        return self.tracer.create_proxy("call_function", target, (self, other), {})

    return method


for _name in ("iadd", "isub", "imul", "itruediv"):
    setattr(ShapedProxy, f"__{_name}__", _in_place(_name))


class ShapedTracer(fx.Tracer):
    """An fx tracer that runs the network on meta tensors along the way."""

    proxy_buffer_attributes = True

    def __init__(self, net: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        super().__init__(autowrap_functions=())
        self.home = inputs[0].device
        self._inputs = iter(inputs)
        self._shadow = copy.deepcopy(net).to("meta")
        self._path: list[str] = []
        self._is_on_meta = False

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return ShapedProxy(node, self)

    def create_proxy(  # type: ignore[no-untyped-def] # fx's own signature is wide
        self, kind, target, args, kwargs, name=None, type_expr=None, proxy_factory_fn=None
    ):
        made = super().create_proxy(kind, target, args, kwargs, name, type_expr, proxy_factory_fn)
        self.value_of(made.node)  # at once, so that a wrong shape is found where it arises
        return made

    def call_module(
        self,
        m: nn.Module,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        if self._is_on_meta:
            return forward(*args, **kwargs)
        self._path.append(self.path_of_module(m))
        try:
            return super().call_module(m, forward, args, kwargs)
        finally:
            self._path.pop()

    def value_of(self, node: fx.Node) -> Any:
        """Return what the node gives on the meta device."""
        if "value" not in node.meta:
            node.meta["value"] = self._run(node)
        return node.meta["value"]

    def _run(self, node: fx.Node) -> Any:
        if node.op == "placeholder":
            tensor = next(self._inputs, None)
            if tensor is None:
                return node.args[0] if node.args else None
            return torch.empty((BATCH, *tensor.shape[1:]), dtype=tensor.dtype, device="meta")
        if node.op == "get_attr":
            # from the shadow: reading a parameter of the network itself would be traced again
            home, _, leaf = str(node.target).rpartition(".")
            owner = self._shadow.get_submodule(home)
            found = getattr(owner, leaf) if hasattr(owner, leaf) else self.root.__dict__[leaf]
            return found.detach().to("meta") if isinstance(found, Tensor) else found
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), self.value_of)
        args, kwargs = pytree.tree_map_only(
            Tensor, lambda tensor: tensor.to("meta"), (args, kwargs)
        )
        with torch.no_grad():
            if node.op == "call_module":
                self._is_on_meta = True
                try:
                    return self._shadow.get_submodule(str(node.target))(*args, **kwargs)
                finally:
                    self._is_on_meta = False
            if node.op == "call_method":
                return getattr(args[0], str(node.target))(*args[1:], **kwargs)
            assert callable(node.target)
            return node.target(*args, **kwargs)

    def to_bool(self, obj: fx.Proxy) -> bool:
        return bool(self.refuse("a decision by the value of a tensor"))

    def refuse(self, what: str) -> Any:
        """Raise with the module and the line that cannot be traced."""
        frame = sys._getframe(1)
        while frame.f_back and (
            frame.f_code.co_filename.startswith(_TORCH) or frame.f_code.co_filename == _HERE
        ):
            frame = frame.f_back
        file, line = frame.f_code.co_filename, frame.f_lineno
        module = self._path[-1] if self._path else "the network itself"
        code = linecache.getline(file, line).strip()
        raise NotTraceable(
            f"{module} cannot be traced: {what} at {file}:{line}: `{code}`. Write it without "
            "asking for values (torch.where, or a choice made in __init__), or keep that part out "
            "of the network given to pliant.elastic"
        )


def trace(net: nn.Module, example: Tensor | tuple[Tensor, ...]) -> fx.Graph:
    """Return the graph of a network in training mode; each node's meta["value"] has its shape."""
    inputs = example if isinstance(example, tuple) else (example,)
    if not inputs or any(tensor.dim() < 2 for tensor in inputs):
        raise ValueError(
            "Expected an example input with a batch dimension, like torch.zeros(1, 3, 32, 32)"
        )
    was = {module: module.training for module in net.modules()}
    net.train()
    tracer = ShapedTracer(net, inputs)
    try:
        graph = tracer.trace(net)
    except NotTraceable:
        raise
    except Exception as error:
        module = tracer._path[-1] if tracer._path else type(net).__name__
        raise NotTraceable(f"{module} cannot be traced: {error}") from error
    finally:
        for part, training in was.items():
            part.training = training
    return functional(graph, dict(net.named_modules()))


IN_PLACE = {operator.iadd, operator.isub, operator.imul, operator.itruediv}


def is_in_place(node: fx.Node, modules: dict[str, nn.Module]) -> bool:
    """Tell whether a node overwrites its first argument."""
    if node.op == "call_module":
        return bool(getattr(modules[str(node.target)], "inplace", False))
    if node.op == "call_method":
        name = str(node.target)
        return name.endswith("_") and not name.endswith("__")
    if node.op == "call_function":
        name = getattr(node.target, "__name__", "")
        written = name.endswith("_") and not name.endswith("__")
        return node.target in IN_PLACE or bool(node.kwargs.get("inplace")) or written
    return False


def functional(graph: fx.Graph, modules: dict[str, nn.Module]) -> fx.Graph:
    """Let what reads a value after it was overwritten read the result of the overwriting."""
    order = {node: place for place, node in enumerate(graph.nodes)}
    for node in graph.nodes:
        if node.all_input_nodes and is_in_place(node, modules):
            written = node.args[0]
            for user in list(written.users):
                if order[user] > order[node]:
                    user.replace_input_with(written, node)
    return graph
