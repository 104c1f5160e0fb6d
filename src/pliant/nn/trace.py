"""Trace a network with torch.fx, specialised to the shapes of an example input.

Every traced value carries a tensor on the meta device, so `x.size(1)` and `x.shape[2]` are plain
numbers while the network is traced and only the batch size stays open. It is recognised by its
number: the example is given a batch of `BATCH`, a prime that no other dimension is a multiple of.
"""

import copy
import inspect
import linecache
import operator
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator
from math import prod
from pathlib import Path
from types import CodeType
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils import _pytree as pytree

from pliant.nn.shadow import Shadow

BATCH = 7919
_TORCH = str(Path(torch.__file__).parent)
_HERE = __file__
# torch takes no traced batch size for these unless they are wrapped
_FACTORIES = (
    torch.zeros, torch.ones, torch.full, torch.empty, torch.rand, torch.randn, torch.arange,
)  # fmt: skip


# fx changes torch.nn.Module itself while it traces: for all threads
_ONE_AT_A_TIME = threading.RLock()


class NotTraceable(ValueError):
    """A forward pass cannot be written down as a fixed list of operations."""


class Shape(tuple[Any, ...]):
    """A torch.Size that may hold a traced batch size."""

    def __getitem__(self, place: Any) -> Any:
        found = super().__getitem__(place)
        return Shape(found) if isinstance(place, slice) else found

    def numel(self) -> Any:
        return prod(self)


class ShapedProxy(fx.Proxy):
    """A traced value whose shape is known, apart from the batch size."""

    @property
    def shape(self) -> tuple[Any, ...]:
        return Shape(self.size(dim) for dim in range(self.value.dim()))

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
        return prod(self.shape)

    def __len__(self) -> int:
        value = self.value
        return len(value) if isinstance(value, tuple | list) else int(self._refuse("len()"))

    def __iter__(self) -> Iterator[Any]:
        return (operator.getitem(self, place) for place in range(len(self)))

    def __index__(self) -> int:
        return int(self._refuse("a batch size, or a value, as a number"))

    __int__ = __index__

    def item(self) -> Any:
        return self._refuse("a value as a number")

    tolist = item

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
        super().__init__(autowrap_functions=_FACTORIES)
        self._autowrap_search.append(torch)
        self.home = inputs[0].device
        self._inputs = inputs
        self._shadow = copy.deepcopy(net).to("meta")
        for module in self._shadow.modules():
            if isinstance(module, _BatchNorm) and module.momentum is None:
                module.momentum = 0.1  # a plain average counts batches, which meta tensors cannot
        self._path: list[str] = []
        self.failed = ""  # the innermost module that raised
        self._is_on_meta = False
        self._thread = threading.get_ident()

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return ShapedProxy(node, self)

    def create_proxy(  # type: ignore[no-untyped-def] # fx's own signature is wide
        self, kind, target, args, kwargs, name=None, type_expr=None, proxy_factory_fn=None
    ):
        made = super().create_proxy(kind, target, args, kwargs, name, type_expr, proxy_factory_fn)
        made.node.meta["is_cut_off"] = not torch.is_grad_enabled()
        self.value_of(made.node)  # at once, so that a wrong shape is found where it arises
        return made

    def create_args_for_root(
        self, root_fn: Callable[..., Any], is_module: bool, concrete_args: Any = None
    ) -> tuple[Callable[..., Any], list[Any]]:
        # only what the example has: other parameters of `forward` keep their defaults
        made: list[Any] = [self.root]
        for number in range(len(self._inputs)):
            made.append(self.create_proxy("placeholder", f"input_{number}", (), {}))  # type: ignore[no-untyped-call] # as above
        return root_fn, made

    def call_module(
        self,
        m: nn.Module,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        if self._is_on_meta or threading.get_ident() != self._thread:
            return forward(*args, **kwargs)
        self._path.append(self.path_of_module(m))
        try:
            return super().call_module(m, forward, args, kwargs)
        except Exception:
            self.failed = self.failed or self._path[-1]
            raise
        finally:
            self._path.pop()

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        if threading.get_ident() != self._thread:  # a network at work beside us
            return attr_val
        return super().getattr(attr, attr_val, parameter_proxy_cache)

    def value_of(self, node: fx.Node) -> Any:
        """Return what the node gives on the meta device."""
        if "value" not in node.meta:
            node.meta["value"] = self._run(node)
        return node.meta["value"]

    def _run(self, node: fx.Node) -> Any:
        if node.op == "placeholder":
            tensor = self._inputs[int(str(node.target).removeprefix("input_"))]
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
        with torch.no_grad(), Shadow():
            if node.op == "call_module":
                self._is_on_meta = True
                try:
                    return self._shadow.get_submodule(str(node.target))(*args, **kwargs)
                finally:
                    self._is_on_meta = False
            if node.op == "call_method":
                return getattr(args[0], str(node.target))(*args[1:], **kwargs)
            assert callable(node.target)
            if node.target in _FACTORIES or "device" in kwargs:
                kwargs = {**kwargs, "device": "meta"}
            return node.target(*args, **kwargs)

    def to_bool(self, obj: fx.Proxy) -> bool:
        if obj.node.target in {operator.eq, operator.ne}:
            sides = [self.value_of(side) for side in obj.node.all_input_nodes]
            if len(sides) == 2 and all(isinstance(s, int) and s % BATCH == 0 for s in sides):
                return bool(self.value_of(obj.node))  # two batch sizes: so for any batch
        return bool(self.refuse("a decision by the value of a tensor"))

    def refuse(self, what: str) -> Any:
        """Raise with the module and the line that cannot be traced."""
        stack = traceback.walk_stack(sys._getframe(1))
        advice = "Write it without asking for values (torch.where, or a choice made in __init__)"
        raise self.refusal(what, advice, [(frame.f_code, line) for frame, line in stack])

    def refusal(
        self, what: str, advice: str, calls: Iterable[tuple[CodeType, int]]
    ) -> NotTraceable:
        """Return the error for a stack of calls, innermost first: the user's own line is named."""
        path = self.failed or (self._path[-1] if self._path else type(self.root).__name__)
        for code, line in calls:
            file = code.co_filename
            if not file.startswith(_TORCH) and file != _HERE:
                what += f" at {file}:{line}: `{linecache.getline(file, line).strip()}`"
                break
        return NotTraceable(
            f"{path} cannot be traced: {what}. {advice}, or keep that part out of the network "
            "given to pliant.elastic"
        )


def trace(net: nn.Module, example: Tensor | tuple[Tensor, ...]) -> fx.Graph:
    """Return the graph of a network in training mode; each node's meta["value"] has its shape."""
    inputs = example if isinstance(example, tuple) else (example,)
    if not inputs or any(tensor.dim() < 2 for tensor in inputs):
        raise ValueError(
            "Expected an example input with a batch dimension, like torch.zeros(1, 3, 32, 32)"
        )
    try:
        inspect.signature(net.forward).bind(*inputs)
    except TypeError as error:
        raise ValueError(
            f"Expected one example for each input of {type(net).__name__}, "
            f"got {len(inputs)}: {error}"
        ) from None
    was = {module: module.training for module in net.modules()}
    net.train()
    tracer = ShapedTracer(net, inputs)
    try:
        with torch.enable_grad(), _ONE_AT_A_TIME:
            graph = tracer.trace(net)
    except NotTraceable:
        raise
    except Exception as error:
        stack = traceback.walk_tb(error.__traceback__)
        calls = [(frame.f_code, line) for frame, line in stack]
        what = str(error).partition("\n")[0].replace(str(BATCH), "batch").removesuffix(".")
        advice = "Check that the example has the shape that the network takes"
        raise tracer.refusal(what, advice, reversed(calls)) from error
    finally:
        for part, training in was.items():
            part.training = training
    return functional(graph, dict(net.named_modules()))


# a view would fail where a value lies in another memory format than in the network itself
VIEWS = {"view": "reshape", "view_as": "reshape_as"}
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


def is_view(node: fx.Node) -> bool:
    """Tell whether a node's value lies in the memory of one that it reads."""
    values = [each.meta.get("value") for each in (node, *node.all_input_nodes)]
    if not isinstance(values[0], Tensor):
        return False
    homes = [v.untyped_storage()._cdata for v in values if isinstance(v, Tensor)]
    return homes[0] in homes[1:]


def functional(graph: fx.Graph, modules: dict[str, nn.Module]) -> fx.Graph:
    """Let what reads an overwritten value read the result, and let views copy where they must."""
    order = {node: place for place, node in enumerate(graph.nodes)}
    for node in graph.nodes:
        if node.op == "call_method" and not any(isinstance(arg, torch.dtype) for arg in node.args):
            node.target = VIEWS.get(node.target, node.target)
        if node.all_input_nodes and is_in_place(node, modules):
            written = node.args[0]
            for user in list(written.users):
                if order[user] > order[node]:
                    user.replace_input_with(written, node)
    return graph
