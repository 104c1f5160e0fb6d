"""Run a traced network at full size with masks: the reference for its compact pass.

Nothing is sliced. Every value has all channels, and a mask says which entries are present. Absent
entries hold what the full network computes there and become zeros only where channels are mixed.
The mask of a result is found by running the operation on NaN. Norms over several channels use the
present ones. Only the trace, the sites and the list of dense fallbacks come from the compiler.
"""

import inspect
import operator
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from operator import attrgetter
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.func import functional_call
from torch.nn.modules.batchnorm import _NormBase
from torch.utils import _pytree as pytree

from pliant.nn.compiler.computed_weights import find_root
from pliant.nn.compiler.idioms import standardise
from pliant.nn.compiler.refusals import has_hooks
from pliant.nn.compiler.trace import find_callable
from pliant.params import Params

_TRANSPOSED = {F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d}
_LAYERS = (
    nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Linear, nn.Embedding,
    nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d,
)  # fmt: skip
_RECURRENT = (nn.LSTM, nn.GRU, nn.RNN)
_LAYER_FUNCTIONS = {F.conv1d, F.conv2d, F.conv3d, F.linear, F.embedding, *_TRANSPOSED}
_JOINS = {torch.cat, torch.concat, torch.concatenate}
_FACTORIES: set[Any] = {"new_empty", "new_zeros", "new_ones", "new_full"}
_CHANNEL_NORMS = {F.batch_norm, F.instance_norm}
_SUMS: set[Any] = {
    operator.add, operator.iadd, torch.add, "add", "add_",
    operator.sub, operator.isub, torch.sub, "sub", "sub_",
}  # fmt: skip


class MaskedRun:
    """One pass over a graph; `values` and `masks` hold the results by node.

    `site_masks` are by the id of the layer's weight, `dense_reads` are pairs of a value and the
    operation that reads all its channels. A mask of None means that everything is present.
    """

    def __init__(
        self,
        net: nn.Module,
        params: Params,
        site_masks: Mapping[int, Tensor],
        dense_reads: set[tuple[str, str]],
    ) -> None:
        self.values: dict[fx.Node, Any] = {}
        self.masks: dict[fx.Node, Any] = {}
        self._varying: set[fx.Node] = set()  # depend on the input
        self._net, self._params = net, params
        self._site_masks, self._dense_reads = site_masks, dense_reads
        named = (*net.named_parameters(), *net.named_buffers())
        self._names = {id(tensor): name for name, tensor in named if name in params}

    def run(self, graph: fx.Graph, *inputs: Tensor) -> Any:
        """Return the output, with absent channels as zeros."""
        waiting = iter(inputs)
        for node in graph.nodes:
            if node.op == "placeholder":
                self.values[node] = next(waiting)
                self._varying.add(node)
            elif node.op == "get_attr":
                self.values[node] = self._load(node)
            elif node.op == "output":
                return fx.node.map_arg(node.args[0], self._zero_absent)
            else:
                with torch.no_grad() if node.meta["is_no_grad"] else nullcontext():
                    self.values[node], self.masks[node] = self._run_node(node)
                is_tensor = not isinstance(self.values[node], int)
                if is_tensor and not self._varying.isdisjoint(node.all_input_nodes):
                    self._varying.add(node)
        raise AssertionError("a graph ends with its output")

    def _run_node(self, node: fx.Node) -> tuple[Any, Any]:
        module = self._net.get_submodule(node.target) if node.op == "call_module" else None  # type: ignore[arg-type] # a path
        call = self._bind_module(module) if module is not None else find_callable(node, _fail)
        sparse = [source for source in node.all_input_nodes if self.masks.get(source) is not None]
        is_layer, weight = self._find_layer(node, module)
        is_dense = any((source.name, node.name) in self._dense_reads for source in sparse)
        if is_layer or is_dense or not sparse:
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), self._zero_absent)
            result = call(*args, **kwargs)
            return result, self._find_site_mask(result, weight) if is_layer else None
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), self.values.__getitem__)
        mask, kind = self.masks[sparse[0]], type(module) if module is not None else node.target
        if kind in _FACTORIES:
            return call(*args, **kwargs), None
        if kind is operator.getitem and isinstance(args[0], tuple | list):
            return call(*args), mask[args[1]]
        if isinstance(module, _NormBase) or kind in _CHANNEL_NORMS:
            return call(*args, **kwargs), mask
        if kind in _NORMS:
            function, normalise = _NORMS[kind]
            options = self._read_options(module) if module is not None else kwargs
            names = [*inspect.signature(function).parameters]
            options = {**options, **dict(zip(names, args, strict=False))}
            return normalise(options, mask), mask
        if len(sparse) == 2 and kind in _SUMS:
            other = self.masks[sparse[1]]
            args = fx.node.map_arg(node.args, self._zero_absent)
            return call(*args, **kwargs), mask | other
        fill: Callable[[fx.Node], Any] = self._poison
        if kind in _JOINS:
            dim: Any = kwargs.get("dim", args[1] if len(args) > 1 else 0)
            fill = self._poison_joined(mask, dim)
        probes = fx.node.map_arg((node.args, node.kwargs), fill)
        with torch.no_grad():
            probe = call(*probes[0], **probes[1])
        return call(*args, **kwargs), pytree.tree_map(_find_present, probe)

    def _bind_module(self, module: nn.Module) -> Callable[..., Any]:
        named = (*module.named_parameters(), *module.named_buffers())
        params = {
            name: self._params[self._names[id(tensor)]]
            for name, tensor in named
            if id(tensor) in self._names
        }
        return lambda *args, **kwargs: functional_call(module, params, args, kwargs)

    def _read_options(self, module: nn.Module) -> dict[str, Any]:
        tensors = {
            name: self._params[self._names[id(tensor)]]
            for name, tensor in module.named_parameters()
        }
        return {"weight": None, "bias": None, **vars(module), **tensors}

    def _load(self, node: fx.Node) -> Any:
        if "constant" in node.meta:
            return node.meta["constant"]
        tensor = attrgetter(str(node.target))(self._net)
        name = self._names.get(id(tensor))
        return self._params[name] if name is not None else tensor.clone()

    def _find_layer(self, node: fx.Node, module: nn.Module | None) -> tuple[bool, Any]:
        """Return whether a node is a layer that mixes all its inputs, and its weight."""
        if module is not None:
            is_layer = type(module) in (*_LAYERS, *_RECURRENT) and not has_hooks(module)
            groups, weight = getattr(module, "groups", 1), getattr(module, "weight", None)
            return is_layer and self._mixes_all(groups, weight), weight
        if node.target not in _LAYER_FUNCTIONS:
            return False, None
        names = ["input", "weight", "bias", "stride", "padding", "dilation", "groups"]
        arguments = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
        weight = arguments["weight"]
        weight = find_root(weight) or weight
        if not isinstance(weight, fx.Node) or weight.op != "get_attr":
            return False, None
        parameter = attrgetter(str(weight.target))(self._net)
        return self._mixes_all(arguments.get("groups", 1), parameter), parameter

    def _mixes_all(self, groups: Any, weight: Any) -> bool:
        """Return whether absent inputs are zeros to a layer; a depthwise one follows its input."""
        return bool(groups == 1 or weight.shape[1] > 1)

    def _find_site_mask(self, result: Any, weight: Any) -> Tensor | None:
        mask = self._site_masks.get(id(weight))
        if mask is None:
            return None
        axis, shape = -1 if weight.dim() == 2 else 1, [1] * result.dim()
        shape[axis] = result.shape[axis]
        mask = mask.repeat(result.shape[axis] // len(mask))  # one mask may serve several parts
        return mask.view(shape).expand(result.shape)

    def _zero_absent(self, node: fx.Node) -> Any:
        return self._fill_absent(node, 0.0)

    def _poison(self, node: fx.Node) -> Any:
        return self._fill_absent(node, torch.nan)

    def _poison_joined(self, mask: Tensor, dim: int) -> Callable[[fx.Node], Any]:
        """Poison parameters too, such as class tokens: they have the channels that they join."""
        first = mask.narrow(dim, 0, 1)
        if bool((mask != first).any()):  # channels are joined to others
            return self._poison

        def poison(node: fx.Node) -> Any:
            value = self.values[node]
            is_constant = isinstance(value, Tensor) and node not in self._varying
            return torch.where(first, value, torch.nan) if is_constant else self._poison(node)

        return poison

    def _fill_absent(self, node: fx.Node, filler: float) -> Any:
        mask, value = self.masks.get(node), self.values[node]
        if isinstance(mask, Tensor):
            return torch.where(mask, value, filler)
        if isinstance(mask, tuple | list):
            pairs = zip(mask, value, strict=True)
            return [v if m is None else torch.where(m, v, filler) for m, v in pairs]
        return value


def _fail(path: str) -> nn.Module:
    raise AssertionError(path)


def _find_present(probe: Any) -> Tensor | None:
    is_known = isinstance(probe, Tensor) and probe.is_floating_point()
    return ~probe.isnan() if is_known else None  # a size or an index is never absent


def _normalise_groups(options: Mapping[str, Any], mask: Tensor) -> Tensor:
    x, groups = options["input"], options["num_groups"]
    shape = (x.shape[0], groups, -1)
    flat = _standardise(x.reshape(shape), mask.reshape(shape), (2,), options.get("eps", 1e-5))
    affine = [1, -1, *[1] * (x.dim() - 2)]
    return _scale(flat.view(x.shape), options, affine)


def _normalise_layer(options: Mapping[str, Any], mask: Tensor) -> Tensor:
    x, shape = options["input"], tuple(options["normalized_shape"])
    dims = tuple(range(x.dim() - len(shape), x.dim()))
    return _scale(_standardise(x, mask, dims, options.get("eps", 1e-5)), options, shape)


def _normalise_axis(options: Mapping[str, Any], mask: Tensor) -> Tensor:
    return _standardise(options["x"], mask, (options["axis"],), options["eps"])


def _standardise(x: Tensor, mask: Tensor, dims: tuple[int, ...], eps: float) -> Tensor:
    present = mask.to(x.dtype)
    count = present.sum(dims, keepdim=True).clamp(min=1)
    mean = (x * present).sum(dims, keepdim=True) / count
    variance = ((x - mean).square() * present).sum(dims, keepdim=True) / count
    return (x - mean) * (variance + eps).rsqrt()


def _scale(x: Tensor, options: Mapping[str, Any], shape: Any) -> Tensor:
    weight, bias = options.get("weight"), options.get("bias")
    x = x if weight is None else x * weight.view(shape)
    return x if bias is None else x + bias.view(shape)


def _normalise_neighbours(options: Mapping[str, Any], mask: Tensor) -> Tensor:
    names = ("size", "alpha", "beta", "k")
    known = {name: options[name] for name in names if name in options}
    return F.local_response_norm(torch.where(mask, options["input"], 0.0), **known)


# by module or function: one with the names of its arguments, and how to compute it
_NORMS: dict[Any, tuple[Callable[..., Any], Callable[[Mapping[str, Any], Tensor], Tensor]]] = {
    **dict.fromkeys(
        (nn.GroupNorm, F.group_norm, torch.group_norm), (F.group_norm, _normalise_groups)
    ),
    **dict.fromkeys(
        (nn.LayerNorm, F.layer_norm, torch.layer_norm), (F.layer_norm, _normalise_layer)
    ),
    standardise: (standardise, _normalise_axis),
    **dict.fromkeys(
        (nn.LocalResponseNorm, F.local_response_norm),
        (F.local_response_norm, _normalise_neighbours),
    ),
}
