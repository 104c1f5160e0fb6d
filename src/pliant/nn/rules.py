"""Which rule lays out which operation; what no rule knows gets all channels and stays correct."""

import copy
import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.func import functional_call
from torch.utils.flop_counter import FlopCounterMode

from pliant.nn import layers, shapes
from pliant.nn.channels import Piece
from pliant.nn.layers import BATCH_NORMS, CONVOLUTIONS, INSTANCE_NORMS, Convolution, Norm
from pliant.nn.lower import Builder
from pliant.nn.plan import Bound, Environment, filled, referring
from pliant.nn.trace import BATCH

ACTIVATIONS = (
    "relu relu6 leaky_relu elu selu celu gelu silu mish hardswish hardsigmoid hardtanh softplus "
    "softsign sigmoid tanh logsigmoid tanhshrink softshrink hardshrink threshold rrelu dropout "
    "alpha_dropout feature_alpha_dropout dropout1d dropout2d dropout3d"
)
POOLINGS = (
    "max_pool1d max_pool2d max_pool3d avg_pool1d avg_pool2d avg_pool3d lp_pool1d lp_pool2d "
    "adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d adaptive_max_pool1d "
    "adaptive_max_pool2d adaptive_max_pool3d interpolate"
)
ELEMENTWISE = (
    "abs exp log log1p sqrt rsqrt square neg sin cos erf clamp clip pow float double half to type "
    "contiguous clone detach relu_ sigmoid_ tanh_ clamp_ neg_ abs_ exp_ sqrt_"
)
METHODS = frozenset(f"{ACTIVATIONS} {ELEMENTWISE}".split())
FUNCTIONS: frozenset[Any] = frozenset(
    found
    for name in f"{ACTIVATIONS} {POOLINGS} {ELEMENTWISE}".split()
    for home in (F, torch, operator)
    if (found := getattr(home, name, None)) is not None
)
MODULES = (
    nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.SELU, nn.CELU, nn.GELU, nn.SiLU, nn.Mish,
    nn.Hardswish, nn.Hardsigmoid, nn.Hardtanh, nn.Softplus, nn.Softsign, nn.Sigmoid, nn.Tanh,
    nn.LogSigmoid, nn.Tanhshrink, nn.Softshrink, nn.Hardshrink, nn.Threshold, nn.RReLU,
    nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout,
    nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d,
    nn.LPPool1d, nn.LPPool2d, nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d,
    nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d, nn.AdaptiveMaxPool3d, nn.Identity,
    nn.Upsample, nn.ZeroPad1d, nn.ZeroPad2d, nn.ZeroPad3d, nn.ReflectionPad1d, nn.ReflectionPad2d,
    nn.ReplicationPad1d, nn.ReplicationPad2d, nn.ConstantPad1d, nn.ConstantPad2d,
)  # fmt: skip
RESHAPES = {"view", "reshape", "flatten", "squeeze", "unsqueeze", "unflatten"}
REDUCTIONS = {"mean", "sum", "amax", "amin", "var", "std"}


def lay_out(b: Builder, node: fx.Node) -> None:
    """Give a node its instruction and its layout."""
    if node.op == "placeholder":
        b.place(node)
    elif node.op == "get_attr":
        return  # read when somebody asks for it
    elif not (_module(b, node) if node.op == "call_module" else _call(b, node)):
        opaque(b, node)


def layer_of(b: Builder, node: fx.Node) -> Convolution | tuple[fx.Node, str, str | None] | None:
    """Return what a convolution or linear node computes, in either form; None for others."""
    if node.op == "call_module":
        module, path = b.modules[str(node.target)], str(node.target)
        weight, bias = b.name(path, "weight"), b.name(path, "bias")
        source: Any = node.args[0] if node.args else node.kwargs["input"]
        if type(module) in CONVOLUTIONS and weight:
            around = None
            options = (module.stride, module.padding, module.dilation)
            if module.padding_mode != "zeros":
                around = (str(module.padding_mode), module._reversed_padding_repeated_twice)
                options = (module.stride, 0, module.dilation)
            function = CONVOLUTIONS[type(module)]
            groups = int(str(module.groups))
            return Convolution(source, function, weight, bias, options, groups, around)
        if type(module) is nn.Linear and weight:
            return source, weight, bias
    elif node.op == "call_function" and node.target in {*CONVOLUTIONS.values(), F.linear}:
        given = _bound(node, ["input", "weight", "bias", "stride", "padding", "dilation", "groups"])
        weight, bias = b.parameter(given["weight"]), b.parameter(given.get("bias"))
        if weight is None or (given.get("bias") is not None and bias is None):
            return None
        if node.target is F.linear:
            return given["input"], weight, bias
        options = (given.get("stride", 1), given.get("padding", 0), given.get("dilation", 1))
        groups = given.get("groups", 1)
        return Convolution(given["input"], node.target, weight, bias, options, groups)
    return None


def candidates(b: Builder, graph: fx.Graph) -> dict[str, int]:
    """Return the layers whose filters could be drawn, with their number of filters."""
    found: dict[str, int] = {}
    for node in graph.nodes:
        layer = layer_of(b, node)
        if isinstance(layer, Convolution):
            if layer.groups == 1 and b.shape(layer.weight)[0] > 1:
                found[layer.weight] = b.shape(layer.weight)[0]
        elif layer is not None and b.shape(layer[1])[0] > 1:
            found[layer[1]] = b.shape(layer[1])[0]
    return found


def _bound(node: fx.Node, names: list[str]) -> dict[str, Any]:
    return {**dict(zip(names, node.args, strict=False)), **node.kwargs}


def _layer(b: Builder, node: fx.Node) -> bool:
    layer = layer_of(b, node)
    if isinstance(layer, Convolution):
        return layers.convolution(b, node, layer)
    return layer is not None and layers.linear(b, node, *layer)


def _module(b: Builder, node: fx.Node) -> bool:
    module, path = b.modules[str(node.target)], str(node.target)
    source = node.args[0] if node.args else None
    if len(node.all_input_nodes) != 1 or not isinstance(source, fx.Node):
        return False
    if _layer(b, node):
        return True
    if isinstance(module, MODULES):
        return shapes.keep(b, node, source)
    if isinstance(module, nn.Flatten | nn.Unflatten):
        return shapes.reshape(b, node, source)
    norm = Norm(source, b.name(path, "weight"), b.name(path, "bias"), getattr(module, "eps", 0.0))
    if isinstance(module, BATCH_NORMS):
        names = ("running_mean", "running_var", "num_batches_tracked")
        mean, variance, batches = (b.name(path, name) for name in names)
        return layers.batch_norm(b, node, norm, (mean, variance, batches), module.momentum)
    if isinstance(module, nn.GroupNorm):
        return layers.group_norm(b, node, norm, module.num_groups)
    if isinstance(module, INSTANCE_NORMS) and not module.track_running_stats:
        return layers.instance_norm(b, node, norm)
    if isinstance(module, nn.LayerNorm):
        return layers.layer_norm(b, node, norm, module.normalized_shape)
    if isinstance(module, nn.LocalResponseNorm):
        options = (module.alpha, module.beta, module.k)
        return layers.local_response_norm(b, node, source, module.size, options)
    if isinstance(module, nn.PReLU) and norm.weight is not None:
        return layers.prelu(b, node, source, norm.weight)
    return False


def _call(b: Builder, node: fx.Node) -> bool:
    target, args = node.target, node.args
    if target in {operator.getitem, getattr} and isinstance(args[0], fx.Node):
        return target is operator.getitem and shapes.item(b, node, args[0], args[1])
    if target in shapes.MEETINGS and len(args) == 2 and not node.kwargs:
        return shapes.meet(b, node, args[0], args[1], shapes.MEETINGS[target])
    name = target if isinstance(target, str) else getattr(target, "__name__", "")
    if name in {"cat", "concat", "concatenate"}:
        given = _bound(node, ["tensors", "dim"])
        parts = given["tensors"]
        if isinstance(parts, fx.Node):  # what a split has made, all at once
            return False
        return shapes.concatenate(b, node, list(parts), given.get("dim", 0))
    if _layer(b, node):
        return True
    if (
        not args
        or not isinstance(args[0], fx.Node)
        or not isinstance(args[0].meta["value"], Tensor)
    ):
        return False
    return _one(b, node, args[0], str(name))


def _one(b: Builder, node: fx.Node, source: fx.Node, name: str) -> bool:
    """Lay out a function or method of one tensor."""
    layout, dims = b.layout(source), source.meta["value"].dim()
    known = name in METHODS if node.op == "call_method" else node.target in FUNCTIONS
    if known and _others_are_plain(node, source):
        return shapes.keep(b, node, source)
    if name == "size":
        return shapes.keep(b, node, source)
    if name in RESHAPES:
        return shapes.reshape(b, node, source)
    if name in {"expand", "expand_as"}:
        return shapes.expand(b, node, source)
    if name in {"permute", "transpose", "swapaxes"}:
        return shapes.permute(b, node, source, _order(node, source, name))
    if name in REDUCTIONS:
        given = _bound(node, ["input", "dim", "keepdim"])
        if name in {"var", "std"} and not isinstance(given.get("dim"), int | tuple | list):
            return False
        return shapes.reduce(b, node, source, given.get("dim"), bool(given.get("keepdim", False)))
    if name in {"chunk", "split", "narrow"}:
        dim, bounds = _bounds(node, source, name)
        return shapes.cut(b, node, source, dim, bounds)
    if name in {"softmax", "log_softmax"}:
        over = _bound(node, ["input", "dim"]).get("dim")
        if layout is None or not isinstance(over, int) or over % dims == layout.axis:
            return False
        return shapes.keep(b, node, source)
    if name == "pad":
        widths = _bound(node, ["input", "pad"])["pad"]
        if layout is None or len(widths) > 2 * (dims - 1 - layout.axis):
            return False
        return shapes.keep(b, node, source)
    return _functional_norm(b, node, source, name)


def _functional_norm(b: Builder, node: fx.Node, source: fx.Node, name: str) -> bool:
    if name == "batch_norm":
        order = ["input", "mean", "variance", "weight", "bias", "training", "momentum", "eps"]
        given = _bound(node, order)
        given["mean"] = given.get("mean", given.get("running_mean"))
        given["variance"] = given.get("variance", given.get("running_var"))
        names = {key: b.parameter(given.get(key)) for key in ("mean", "variance", "weight", "bias")}
        if any(given.get(key) is not None and names[key] is None for key in names):
            return False
        if not given.get("training", False):
            return False
        norm = Norm(source, names["weight"], names["bias"], given.get("eps", 1e-5))
        statistics = (names["mean"], names["variance"], None)
        return layers.batch_norm(b, node, norm, statistics, given.get("momentum", 0.1))
    if name in {"group_norm", "layer_norm"}:
        given = _bound(node, ["input", "extent", "weight", "bias", "eps"])
        extent = given.get("extent", given.get("num_groups", given.get("normalized_shape")))
        weight, bias = b.parameter(given.get("weight")), b.parameter(given.get("bias"))
        if (given.get("weight") is None) != (weight is None):
            return False
        if (given.get("bias") is None) != (bias is None):
            return False
        norm = Norm(source, weight, bias, given.get("eps", 1e-5))
        rule: Callable[..., bool] = layers.group_norm if name == "group_norm" else layers.layer_norm
        return rule(b, node, norm, extent)
    if name == "local_response_norm":
        given = _bound(node, ["input", "size", "alpha", "beta", "k"])
        options = (given.get("alpha", 1e-4), given.get("beta", 0.75), given.get("k", 1.0))
        return layers.local_response_norm(b, node, source, given["size"], options)
    if name == "prelu":
        weight = b.parameter(_bound(node, ["input", "weight"])["weight"])
        return weight is not None and layers.prelu(b, node, source, weight)
    return False


def _others_are_plain(node: fx.Node, source: fx.Node) -> bool:
    return all(
        read is source or not isinstance(read.meta["value"], Tensor)
        for read in node.all_input_nodes
    )


def _order(node: fx.Node, source: fx.Node, name: str) -> list[int]:
    dims = source.meta["value"].dim()
    if name == "permute":
        given: Any = node.kwargs.get("dims") or node.args[1:]
        return list(given[0]) if isinstance(given[0], tuple | list) else list(given)
    pair: Any = node.args[1:3] or [node.kwargs["dim0"], node.kwargs["dim1"]]
    first, second = (dim % dims for dim in pair)
    order = list(range(dims))
    order[first], order[second] = order[second], order[first]
    return order


def _bounds(node: fx.Node, source: fx.Node, name: str) -> tuple[int, list[tuple[int, int]]]:
    if name == "narrow":
        given = _bound(node, ["input", "dim", "start", "length"])
        dim, value = given["dim"], node.meta["value"]
        start = given["start"]
        if isinstance(start, int):  # else a matter of the batch
            start %= source.meta["value"].shape[dim]
            return dim, [(start, start + value.shape[dim])]
        return dim, [(0, value.shape[dim])]
    dim = _bound(node, ["input", "sizes", "dim"]).get("dim", 0)
    ends, start = [], 0
    for part in node.meta["value"]:
        ends.append((start, start + part.shape[dim]))
        start = ends[-1][1]
    return dim, ends


def opaque(b: Builder, node: fx.Node) -> None:
    """Run an operation that no rule knows on all channels."""
    module = b.modules[str(node.target)] if node.op == "call_module" else None
    kind = type(module).__name__ if module else getattr(node.target, "__name__", node.target)
    slots = {
        read: b.dense(read, node.name, f"{kind} mixes channels in a way no rule covers")
        if b.layouts(read) is None
        else _gathered(b, read, node)
        for read in node.all_input_nodes
    }
    inside = {}
    if module is not None:
        for name in module.state_dict():
            full = b.name(str(node.target), name)
            if full is not None:
                b.claim(full)
                inside[name] = full
    b.learn(node, *inside.values())
    macs = _measured(b, node)
    if macs:
        b.work(node, str(node.target) if module else node.name, (Piece(1),), None, macs)
    if module is None or not inside:
        b.replay(node, None, slots)
        return
    args, kwargs = referring((node.args, node.kwargs), slots.__getitem__)
    home = b.own(module)

    def run(environment: Environment, bound: Bound) -> Any:
        params = {name: bound.params[full] for name, full in inside.items()}
        return functional_call(home, params, filled(args, environment), filled(kwargs, environment))

    b.emit(node, run, slots.values(), None)


def _gathered(b: Builder, read: fx.Node, node: fx.Node) -> int:
    """Return a tuple of parts with all channels each."""
    b.fix(piece for layout in b.layouts(read) or [] if layout for piece in layout.pieces)
    return b.slot(read)


def _measured(b: Builder, node: fx.Node) -> int:
    """Return the multiply-adds per sample that torch counts for one operation."""
    if not any(isinstance(read.meta["value"], Tensor) for read in node.all_input_nodes):
        return 0  # it makes a tensor out of a size
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda read: read.meta["value"])
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        if node.op == "call_module":
            module = copy.deepcopy(b.modules[str(node.target)]).to("meta").train()
            module(*args, **kwargs)
        elif node.op == "call_method":
            getattr(args[0], str(node.target))(*args[1:], **kwargs)
        else:
            assert callable(node.target)
            node.target(*args, **kwargs)
    return int(counter.get_total_flops()) // 2 // BATCH
