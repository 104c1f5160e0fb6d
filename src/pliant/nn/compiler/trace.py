"""Trace a network with torch.fx, specialised to the shapes of an example input.

Every traced value carries a meta tensor, so `x.size(1)` and `x.shape[2]` are plain numbers during
tracing; only the batch size stays symbolic. It is recognised by its value: the example gets a batch
of `BATCH`, a prime that divides no other dimension.
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

from pliant.nn.compiler.fast_meta import FastMetaMode

BATCH = 7919
_TORCH_FOLDER = str(Path(torch.__file__).parent)
_COMPILER_FOLDER = str(Path(__file__).parent)
# wrapped, because torch rejects a traced batch size as their argument
_FACTORIES = (
    torch.zeros, torch.ones, torch.full, torch.empty, torch.rand, torch.randn, torch.arange,
)  # fmt: skip
# fx patches torch.nn.Module while it traces, which affects all threads
_TRACE_LOCK = threading.RLock()


class NotTraceable(ValueError):
    """A forward pass is not a fixed sequence of operations."""

    path = ""  # of the module
    problem = ""


class TracedShape(tuple[Any, ...]):
    """A torch.Size that may contain a traced batch size."""

    def __getitem__(self, index: Any) -> Any:
        item = super().__getitem__(index)
        return TracedShape(item) if isinstance(index, slice) else item

    def numel(self) -> Any:
        return prod(self)


class ShapedProxy(fx.Proxy):
    """A traced value with a known shape, except for the batch size."""

    @property
    def shape(self) -> tuple[Any, ...]:
        return TracedShape(map(self.size, range(self.ndim)))

    @property
    def ndim(self) -> int:
        return int(self.value.dim())

    @property
    def dtype(self) -> torch.dtype:
        return self.value.dtype  # type: ignore[no-any-return] # the meta value is Any

    @property
    def device(self) -> torch.device:
        return self.tracer.input_device  # type: ignore[attr-defined,no-any-return] # always a ShapedTracer

    @property
    def is_cuda(self) -> bool:
        return self.device.type == "cuda"

    @property
    def value(self) -> Any:
        return self.tracer.compute_value(self.node)  # type: ignore[attr-defined] # a ShapedTracer

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
        return (operator.getitem(self, index) for index in range(len(self)))

    def __index__(self) -> int:
        return int(self._refuse("a batch size or a value used as a number"))

    __int__ = __index__

    def item(self) -> Any:
        return self._refuse("a value used as a number")

    tolist = item

    def __float__(self) -> float:
        return float(self._refuse("a value used as a number"))

    def _refuse(self, problem: str) -> Any:
        return self.tracer.refuse(problem)  # type: ignore[attr-defined] # always a ShapedTracer


def _make_in_place_method(name: str) -> Callable[[Any, Any], Any]:
    target = getattr(operator, name)

    def method(self: ShapedProxy, other: Any) -> Any:
        return self.tracer.create_proxy("call_function", target, (self, other), {})

    return method


for _name in ("iadd", "isub", "imul", "itruediv"):
    setattr(ShapedProxy, f"__{_name}__", _make_in_place_method(_name))


class ShapedTracer(fx.Tracer):
    """An fx tracer that also runs the network on meta tensors."""

    proxy_buffer_attributes = True

    def __init__(self, net: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        super().__init__(autowrap_functions=_FACTORIES)
        self._autowrap_search.append(torch)
        self.input_device = inputs[0].device
        self._inputs = inputs
        self._meta_net = copy.deepcopy(net).to("meta")
        for module in self._meta_net.modules():
            # a cumulative average reads the batch count, which meta tensors lack
            if isinstance(module, _BatchNorm) and module.momentum is None:
                module.momentum = 0.1
        self._module_paths: list[str] = []
        self.failed_path = ""  # the innermost module that raised
        self._is_on_meta = False
        self._thread_id = threading.get_ident()

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return ShapedProxy(node, self)

    def create_proxy(  # type: ignore[no-untyped-def] # fx's own signature is wide
        self, kind, target, args, kwargs, name=None, type_expr=None, proxy_factory_fn=None
    ):
        proxy = super().create_proxy(kind, target, args, kwargs, name, type_expr, proxy_factory_fn)
        proxy.node.meta["is_no_grad"] = not torch.is_grad_enabled()
        self.compute_value(proxy.node)  # eagerly, so that a shape error is raised at its source
        return proxy

    def create_args_for_root(
        self, root_fn: Callable[..., Any], is_module: bool, concrete_args: Any = None
    ) -> tuple[Callable[..., Any], list[Any]]:
        # other parameters of `forward` keep their defaults
        args: list[Any] = [self.root]
        for index in range(len(self._inputs)):
            args.append(self.create_proxy("placeholder", f"input_{index}", (), {}))  # type: ignore[no-untyped-call] # as above
        return root_fn, args

    def call_module(
        self, m: nn.Module, forward: Callable[..., Any], args: Any, kwargs: dict[str, Any]
    ) -> Any:
        if self._is_on_meta or threading.get_ident() != self._thread_id:
            return forward(*args, **kwargs)
        self._module_paths.append(self.path_of_module(m))
        try:
            return super().call_module(m, forward, args, kwargs)
        except Exception:
            self.failed_path = self.failed_path or self._module_paths[-1]
            raise
        finally:
            self._module_paths.pop()

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        # the meta copy's own tensors are not searched for in the network, which takes long; nor
        # are those of a network that another thread runs
        if self._is_on_meta or threading.get_ident() != self._thread_id:
            return attr_val
        return super().getattr(attr, attr_val, parameter_proxy_cache)

    def compute_value(self, node: fx.Node) -> Any:
        """Return the node's value on the meta device."""
        if "value" not in node.meta:
            node.meta["value"] = self._run_on_meta(node)
        return node.meta["value"]

    def _run_on_meta(self, node: fx.Node) -> Any:
        if node.op == "placeholder":
            tensor = self._inputs[int(str(node.target).removeprefix("input_"))]
            return torch.empty((BATCH, *tensor.shape[1:]), dtype=tensor.dtype, device="meta")
        if node.op == "get_attr":
            # from the meta copy: reading a parameter of the network itself would be traced
            path, _, leaf = str(node.target).rpartition(".")
            owner = self._meta_net.get_submodule(path)
            value = getattr(owner, leaf) if hasattr(owner, leaf) else self.root.__dict__[leaf]
            return value.detach().to("meta") if isinstance(value, Tensor) else value
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), self.compute_value)
        args, kwargs = pytree.tree_map_only(Tensor, lambda x: x.to("meta"), (args, kwargs))
        with torch.no_grad(), FastMetaMode():
            call = find_callable(node, self._meta_net.get_submodule)
            if node.target in _FACTORIES or (node.op == "call_function" and "device" in kwargs):
                kwargs = {**kwargs, "device": "meta"}
            self._is_on_meta = node.op == "call_module"
            try:
                return call(*args, **kwargs)
            finally:
                self._is_on_meta = False

    def to_bool(self, obj: fx.Proxy) -> bool:
        if obj.node.target in {operator.eq, operator.ne}:
            sides = [self.compute_value(side) for side in obj.node.all_input_nodes]
            if len(sides) == 2 and all(isinstance(s, int) and s % BATCH == 0 for s in sides):
                return bool(self.compute_value(obj.node))  # two batch sizes: the same for any batch
        return bool(self.refuse("a branch on the value of a tensor"))

    def refuse(self, problem: str) -> Any:
        """Raise an error that names the module and line."""
        stack = traceback.walk_stack(sys._getframe(1))
        advice = "Avoid reading values (use torch.where, or decide in __init__)"
        raise self.make_error(problem, advice, [(frame.f_code, line) for frame, line in stack])

    def make_error(
        self, problem: str, advice: str, calls: Iterable[tuple[CodeType, int]]
    ) -> NotTraceable:
        """Make an error that names the innermost line of user code in a call stack."""
        path = self.failed_path or (
            self._module_paths[-1] if self._module_paths else type(self.root).__name__
        )
        for code, line in calls:
            file = code.co_filename
            if not file.startswith((_TORCH_FOLDER, _COMPILER_FOLDER)):
                problem += f" at {file}:{line}: `{linecache.getline(file, line).strip()}`"
                break
        error = NotTraceable(
            f"{path} cannot be traced: {problem}. {advice}, or keep that part out of the network "
            "passed to pliant.elastic"
        )
        error.path, error.problem = path, problem
        return error


def trace(net: nn.Module, example: Tensor | tuple[Tensor, ...]) -> fx.Graph:
    """Return the graph of a network in training mode, with meta tensors in meta["value"]."""
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
    modes = {module: module.training for module in net.modules()}
    net.train()
    tracer = ShapedTracer(net, inputs)
    try:
        with torch.enable_grad(), _TRACE_LOCK:
            graph = tracer.trace(net)
    except NotTraceable:
        raise
    except Exception as error:
        stack = traceback.walk_tb(error.__traceback__)
        calls = [(frame.f_code, line) for frame, line in stack]
        problem = str(error).partition("\n")[0].replace(str(BATCH), "batch").removesuffix(".")
        advice = "Check that the example has the shape that the network expects"
        raise tracer.make_error(problem, advice, reversed(calls)) from error
    finally:
        for module, training in modes.items():
            module.training = training
    return functionalize(graph, dict(net.named_modules()))


# views fail if a value has another memory format than in the original network
VIEW_REPLACEMENTS = {"view": "reshape", "view_as": "reshape_as"}
IN_PLACE_FUNCTIONS = {operator.iadd, operator.isub, operator.imul, operator.itruediv}


def find_callable(node: fx.Node, get_module: Callable[[str], nn.Module]) -> Callable[..., Any]:
    """Return what a node calls: a module, a method of its first argument, or a function."""
    if node.op == "call_module":
        return get_module(str(node.target))
    if node.op == "call_method":
        name = str(node.target)
        return lambda first, *rest, **options: getattr(first, name)(*rest, **options)
    assert callable(node.target)
    return node.target


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
    for node in graph.nodes:
        if node.op == "call_method" and not any(isinstance(arg, torch.dtype) for arg in node.args):
            node.target = VIEW_REPLACEMENTS.get(node.target, node.target)
        if node.all_input_nodes and is_in_place(node, modules):
            target = node.args[0]
            for user in list(target.users):
                if positions[user] > positions[node]:
                    user.replace_input_with(target, node)
    return graph
