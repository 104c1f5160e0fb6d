"""Trace a network with torch.fx, specialised to the shapes of an example input.

Every traced value carries a meta tensor, so `x.size(1)` and `x.shape[2]` are plain numbers during
tracing; only the batch size stays symbolic. It is recognised by its value: the example gets a batch
of `BATCH`, a prime that divides no other dimension.
"""

import inspect
import linecache
import operator
import sys
import threading
import traceback
from collections.abc import Callable, Iterable
from functools import partial
from operator import attrgetter
from pathlib import Path
from types import CodeType
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils import _pytree as pytree

from pliant.nn.compiler import refusals
from pliant.nn.compiler.fast_meta import FastMetaMode
from pliant.nn.compiler.graphs import check_same_graph
from pliant.nn.compiler.idioms import merge_idioms
from pliant.nn.compiler.in_place import functionalize
from pliant.nn.compiler.interception import InterceptRandomness, intercept_functions
from pliant.nn.compiler.preserve import (
    get_random_states,
    list_drawn_generators,
    preserve,
    seed_generators,
    switch_to_training,
)
from pliant.nn.compiler.proxies import ShapedProxy
from pliant.nn.compiler.refusals import NotTraceable
from pliant.nn.compiler.weight_hooks import is_traced_into
from pliant.nn.compiler.written_out import can_write_out, remove_unread, write_out_attention

BATCH = 7919
_TORCH_FOLDER = str(Path(torch.__file__).parent)
_COMPILER_FOLDER = str(Path(__file__).parent)
# wrapped, because torch rejects a traced batch size as their argument
_FACTORIES = (
    torch.zeros, torch.ones, torch.full, torch.empty, torch.rand, torch.randn, torch.arange,
)  # fmt: skip
# fx patches torch.nn.Module while it traces, which affects all threads
TRACE_LOCK = threading.RLock()


class ShapedTracer(fx.Tracer):
    """An fx tracer that also runs the network on meta tensors."""

    proxy_buffer_attributes = True

    def __init__(self, net: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        super().__init__(autowrap_functions=_FACTORIES)
        self._autowrap_search.append(torch)
        self.input_device = inputs[0].device
        self._inputs = inputs
        self._meta_net = refusals.copy_to_meta(net)
        for module in self._meta_net.modules():
            # a cumulative average reads the batch count, which meta tensors lack
            if isinstance(module, _BatchNorm) and module.momentum is None:
                module.momentum = 0.1
        self._trainable = {
            name: tensor.requires_grad
            for name, tensor in net.named_parameters(remove_duplicate=False)
        }
        self._autocast = _list_autocast()
        self._module_paths: list[str] = []
        self.watches_generators = False
        self.drawing = ""  # the innermost module that used a generator, and which
        self.failed_path = ""  # the innermost module that raised
        self._is_on_meta = False
        self._open_module: nn.Module | None = None  # one of torch's that is traced into
        self._thread_id = threading.get_ident()

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return ShapedProxy(node, self)

    def create_proxy(  # type: ignore[no-untyped-def] # fx's own signature is wide
        self, kind, target, args, kwargs, name=None, type_expr=None, proxy_factory_fn=None
    ):
        if _list_autocast() != self._autocast:
            self.refuse("torch.autocast inside forward", "Put it around the training step")
        proxy = super().create_proxy(kind, target, args, kwargs, name, type_expr, proxy_factory_fn)
        self.compute_value(proxy.node)  # eagerly, so that a shape error is raised at its source
        return proxy

    def create_node(  # type: ignore[no-untyped-def] # as above
        self, kind, target, args, kwargs, name=None, type_expr=None
    ):
        node = super().create_node(kind, target, args, kwargs, name, type_expr)
        node.meta["is_no_grad"] = not torch.is_grad_enabled()
        if isinstance(target, type):  # makes a dataclass or a named tuple of the output
            node.meta["value"] = None
        if kind == "get_attr":
            node.meta["requires_grad"] = self._trainable.get(str(target), False)
        else:
            own = self._meta_net.get_submodule(target).parameters() if kind == "call_module" else ()
            is_tracked = any(source.meta["requires_grad"] for source in node.all_input_nodes)
            is_tracked = is_tracked or any(parameter.requires_grad for parameter in own)
            is_cut = not torch.is_grad_enabled() or target in {torch.detach, "detach"}
            node.meta["requires_grad"] = is_tracked and not is_cut
        return node

    def create_call(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Create the node of a function; on tensors of the meta device, call it."""
        if self._is_on_meta or threading.get_ident() != self._thread_id:
            return function(*args, **kwargs)
        return self.create_proxy("call_function", function, args, kwargs)  # type: ignore[no-untyped-call] # as above

    def create_args_for_root(
        self, root_fn: Callable[..., Any], is_module: bool, concrete_args: Any = None
    ) -> tuple[Callable[..., Any], list[Any]]:
        # other parameters of `forward` keep their defaults
        args: list[Any] = [self.root]
        for index in range(len(self._inputs)):
            args.append(self.create_proxy("placeholder", f"input_{index}", (), {}))  # type: ignore[no-untyped-call] # as above
        return self._call_root, args

    def _call_root(self, root: nn.Module, *inputs: Any) -> Any:
        # with its hooks, which `forward` does not run
        output = root._call_impl(*inputs)  # type: ignore[no-untyped-call] # torch does not annotate it
        for path, module in root.named_modules():
            for name, value in module._buffers.items():
                if isinstance(value, ShapedProxy):  # assigned: write it into the buffer instead
                    full_name = f"{path}.{name}" if path else name
                    buffer: Any = self.create_proxy("get_attr", full_name, (), {})  # type: ignore[no-untyped-call] # as above
                    with torch.no_grad():
                        buffer.copy_(value.detach())
        return output

    def call_module(
        self, m: nn.Module, forward: Callable[..., Any], args: Any, kwargs: dict[str, Any]
    ) -> Any:
        if self._is_on_meta or threading.get_ident() != self._thread_id:
            return forward(*args, **kwargs)
        self._module_paths.append(self.path_of_module(m))
        states = get_random_states() if self.watches_generators else None
        self._open_module, outer = None, self._open_module
        if can_write_out(m, args, kwargs, fx.Proxy):
            self._open_module = m
            if isinstance(m, nn.MultiheadAttention):
                forward = partial(write_out_attention, m)
        try:
            result = super().call_module(m, forward, args, kwargs)
        except Exception:
            self._explain_failure(m, args)
            raise
        finally:
            self._open_module = outer
            path = self._module_paths.pop()
        if states and not self.drawing and (names := list_drawn_generators(states)):
            self.drawing = f"{path} draws from {names[0]}"
        return result

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        if m is self._open_module or is_traced_into(m):
            return False
        return super().is_leaf_module(m, module_qualified_name)

    def _explain_failure(self, module: nn.Module, args: Any) -> None:
        if self.failed_path:
            return
        self.failed_path = self._module_paths[-1]
        value = args[0].value if args and isinstance(args[0], ShapedProxy) else None
        shape = tuple(value.shape) if isinstance(value, Tensor) else ()
        problem = refusals.explain_wrong_shape(self.failed_path, module, shape, BATCH)
        if problem:
            raise NotTraceable(problem)

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        # the meta copy's own tensors are not searched for in the network, which takes long; nor
        # are those of a network that another thread runs
        if self._is_on_meta or threading.get_ident() != self._thread_id:
            return attr_val
        return super().getattr(attr, attr_val, parameter_proxy_cache)

    def is_batch(self, size: int) -> bool:
        """Return whether a size is a multiple of the batch size."""
        return size > 0 and size % BATCH == 0

    def compute_value(self, node: fx.Node) -> Any:
        """Return the node's value on the meta device."""
        if "value" not in node.meta:
            was_on_meta, self._is_on_meta = self._is_on_meta, True
            try:
                node.meta["value"] = self._run_on_meta(node)
            finally:
                self._is_on_meta = was_on_meta
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
            return call(*args, **kwargs)

    def to_bool(self, obj: fx.Proxy) -> bool:
        if obj.node.target in {operator.eq, operator.ne}:
            sides = [self.compute_value(side) for side in obj.node.all_input_nodes]
            if len(sides) == 2 and all(isinstance(s, int) and s % BATCH == 0 for s in sides):
                return bool(self.compute_value(obj.node))  # two batch sizes: the same for any batch
        return bool(self.refuse("a branch on the value of a tensor"))

    def refuse(
        self,
        problem: str,
        advice: str = "Avoid reading values (use torch.where, or decide in __init__)",
    ) -> Any:
        """Raise an error that names the module and line."""
        stack = traceback.walk_stack(sys._getframe(1))
        raise self.make_error(problem, advice, [(frame.f_code, line) for frame, line in stack])

    def refuse_assignment(self) -> Any:
        return self.refuse("an assignment to a part of a tensor", "Use torch.cat or torch.where")

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


def _list_autocast() -> list[bool]:
    return [torch.is_autocast_enabled(device) for device in ("cpu", "cuda")]


def trace(net: nn.Module, example: Tensor | tuple[Tensor, ...], *, twice: bool = False) -> fx.Graph:
    """Return the graph of a network in training mode, with meta tensors in meta["value"].

    A network in training mode may have modules in evaluation mode, which they keep. Tracing
    `twice`, with other random seeds, finds a forward pass that depends on earlier ones.
    """
    inputs = refusals.check_example(example)
    refusals.check_modules(net)
    try:
        inspect.signature(net.forward).bind(*inputs)
    except TypeError as error:
        raise ValueError(
            f"Expected one example for each input of {type(net).__name__}, "
            f"got {len(inputs)}: {error}"
        ) from None
    with TRACE_LOCK, preserve(net) as snapshot, torch.enable_grad():
        switch_to_training(net)
        graph = _trace_once(net, inputs)
        if twice:
            snapshot.restore(only_tensors=True)
            seed_generators(1)
            check_same_graph(net, graph, _trace_once(net, inputs))
    remove_unread(graph)
    functionalize(graph, dict(net.named_modules()))
    merge_idioms(graph)
    return graph


def _trace_once(
    net: nn.Module, inputs: tuple[Tensor, ...], *, watches_generators: bool = False
) -> fx.Graph:
    tracer, states = ShapedTracer(net, inputs), get_random_states()
    tracer.watches_generators = watches_generators
    intercept = InterceptRandomness(tracer.create_call, tracer.refuse_assignment, fx.Proxy)
    try:
        with intercept_functions(tracer.create_call, fx.Proxy), intercept:
            graph = tracer.trace(net)
    except NotTraceable:
        raise
    except Exception as error:
        stack = traceback.walk_tb(error.__traceback__)
        calls = [(frame.f_code, line) for frame, line in stack]
        problem = str(error).partition("\n")[0].replace(str(BATCH), "batch").removesuffix(".")
        advice = "Check that the example has the shape that the network expects"
        if ShapedProxy.__name__ in problem:
            problem = "a function that takes real tensors only"
            advice = "Use torch's own operations, or mark the function with torch.fx.wrap"
        raise tracer.make_error(problem, advice, reversed(calls)) from error
    if names := list_drawn_generators(states):
        if not watches_generators:  # trace again, to find where
            return _trace_once(net, inputs, watches_generators=True)
        raise NotTraceable(
            f"{tracer.drawing or f'{type(net).__name__} draws from {names[0]}'} in forward, and a "
            "trace would repeat the same numbers in every pass. Use a function like torch.rand "
            "on the shape of a value, with torch.where instead of a branch"
        )
    saved = {*dict(net.named_parameters()), *dict(net.named_buffers())}
    for node in graph.find_nodes(op="get_attr"):
        if node.target not in saved:  # the network does not keep it
            node.meta["constant"] = attrgetter(str(node.target))(net)
    return graph


def find_callable(node: fx.Node, get_module: Callable[[str], nn.Module]) -> Callable[..., Any]:
    """Return what a node calls: a module, a method of its first argument, or a function."""
    if node.op == "call_module":
        return get_module(str(node.target))
    if node.op == "call_method":
        name = str(node.target)
        return lambda first, *rest, **options: getattr(first, name)(*rest, **options)
    assert callable(node.target)
    return node.target
