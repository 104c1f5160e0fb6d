"""Select the rule that lowers each operation; without one, an operation runs on all channels."""

import copy
import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.func import functional_call
from torch.utils.flop_counter import FlopCounterMode

from pliant.nn.compiler import rules_arithmetic, rules_layers, rules_shapes
from pliant.nn.compiler.builder import ProgramBuilder
from pliant.nn.compiler.channels import ChannelSpan
from pliant.nn.compiler.program import BoundProgram, Environment, replace_nodes, resolve_slots
from pliant.nn.compiler.rules_layers import (
    BATCH_NORMS,
    CONVOLUTIONS,
    INSTANCE_NORMS,
    Convolution,
    Norm,
)
from pliant.nn.compiler.trace import BATCH

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
CHANNELWISE_METHODS = frozenset(f"{ACTIVATIONS} {ELEMENTWISE}".split())
CHANNELWISE_FUNCTIONS: frozenset[Any] = frozenset(
    function
    for name in f"{ACTIVATIONS} {POOLINGS} {ELEMENTWISE}".split()
    for module in (F, torch, operator)
    if (function := getattr(module, name, None)) is not None
)
CHANNELWISE_MODULES = (
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


def lower_node(builder: ProgramBuilder, node: fx.Node) -> None:
    """Add a node's instructions and record its layout."""
    if node.op == "placeholder":
        builder.add_input(node)
    elif node.op == "get_attr":
        return  # loaded on first use
    elif not (
        _lower_module(builder, node) if node.op == "call_module" else _lower_call(builder, node)
    ):
        lower_dense(builder, node)


def match_layer(
    builder: ProgramBuilder, node: fx.Node
) -> Convolution | tuple[fx.Node, str, str | None] | None:
    """Describe a convolution or linear layer, whether module or function; None for others."""
    if node.op == "call_module":
        module, path = builder.modules[str(node.target)], str(node.target)
        weight, bias = builder.tensor_name(path, "weight"), builder.tensor_name(path, "bias")
        source: Any = node.args[0] if node.args else node.kwargs["input"]
        if type(module) in CONVOLUTIONS and weight:
            padding = None
            options = (module.stride, module.padding, module.dilation)
            if module.padding_mode != "zeros":
                padding = (str(module.padding_mode), module._reversed_padding_repeated_twice)
                options = (module.stride, 0, module.dilation)
            function = CONVOLUTIONS[type(module)]
            groups = int(str(module.groups))
            return Convolution(source, function, weight, bias, options, groups, padding)
        if type(module) is nn.Linear and weight:
            return source, weight, bias
    elif node.op == "call_function" and node.target in {*CONVOLUTIONS.values(), F.linear}:
        kwargs = _bind_arguments(
            node, ["input", "weight", "bias", "stride", "padding", "dilation", "groups"]
        )
        weight, bias = (
            builder.param_name(kwargs["weight"]),
            builder.param_name(kwargs.get("bias")),
        )
        if weight is None or (kwargs.get("bias") is not None and bias is None):
            return None
        if node.target is F.linear:
            return kwargs["input"], weight, bias
        options = (kwargs.get("stride", 1), kwargs.get("padding", 0), kwargs.get("dilation", 1))
        groups = kwargs.get("groups", 1)
        return Convolution(kwargs["input"], node.target, weight, bias, options, groups)
    return None


def find_candidates(builder: ProgramBuilder, graph: fx.Graph) -> dict[str, int]:
    """Return the layers whose filters may be dropped, with their number of filters."""
    candidates: dict[str, int] = {}
    for node in graph.nodes:
        layer = match_layer(builder, node)
        if isinstance(layer, Convolution):
            if layer.groups == 1 and builder.shape(layer.weight)[0] > 1:
                candidates[layer.weight] = builder.shape(layer.weight)[0]
        elif layer is not None and builder.shape(layer[1])[0] > 1:
            candidates[layer[1]] = builder.shape(layer[1])[0]
    return candidates


def _bind_arguments(node: fx.Node, names: list[str]) -> dict[str, Any]:
    return {**dict(zip(names, node.args, strict=False)), **node.kwargs}


def _lower_layer(builder: ProgramBuilder, node: fx.Node) -> bool:
    layer = match_layer(builder, node)
    if isinstance(layer, Convolution):
        return rules_layers.lower_convolution(builder, node, layer)
    return layer is not None and rules_layers.lower_linear(builder, node, *layer)


def _lower_module(builder: ProgramBuilder, node: fx.Node) -> bool:
    module, path = builder.modules[str(node.target)], str(node.target)
    source = node.args[0] if node.args else None
    if len(node.all_input_nodes) != 1 or not isinstance(source, fx.Node):
        return False
    if _lower_layer(builder, node):
        return True
    if isinstance(module, CHANNELWISE_MODULES):
        return rules_shapes.lower_channelwise(builder, node, source)
    if isinstance(module, nn.Flatten | nn.Unflatten):
        return rules_shapes.lower_reshape(builder, node, source)
    norm = Norm(
        source,
        builder.tensor_name(path, "weight"),
        builder.tensor_name(path, "bias"),
        getattr(module, "eps", 0.0),
    )
    if isinstance(module, BATCH_NORMS):
        names = ("running_mean", "running_var", "num_batches_tracked")
        mean, variance, batches = (builder.tensor_name(path, name) for name in names)
        return rules_layers.lower_batch_norm(
            builder, node, norm, (mean, variance, batches), module.momentum
        )
    if isinstance(module, nn.GroupNorm):
        return rules_layers.lower_group_norm(builder, node, norm, module.num_groups)
    if isinstance(module, INSTANCE_NORMS) and not module.track_running_stats:
        return rules_layers.lower_instance_norm(builder, node, norm)
    if isinstance(module, nn.LayerNorm):
        return rules_layers.lower_layer_norm(builder, node, norm, module.normalized_shape)
    if isinstance(module, nn.LocalResponseNorm):
        options = (module.alpha, module.beta, module.k)
        return rules_layers.lower_local_response_norm(builder, node, source, module.size, options)
    if isinstance(module, nn.PReLU) and norm.weight is not None:
        return rules_layers.lower_prelu(builder, node, source, norm.weight)
    return False


def _lower_call(builder: ProgramBuilder, node: fx.Node) -> bool:
    target, args = node.target, node.args
    if target in {operator.getitem, getattr} and isinstance(args[0], fx.Node):
        return target is operator.getitem and rules_shapes.lower_getitem(
            builder, node, args[0], args[1]
        )
    kind = rules_arithmetic.BINARY_OPERATIONS.get(target)
    if kind is not None and len(args) == 2 and not node.kwargs:
        return rules_arithmetic.lower_binary(builder, node, args[0], args[1], kind)
    name = target if isinstance(target, str) else getattr(target, "__name__", "")
    if name in {"cat", "concat", "concatenate"}:
        kwargs = _bind_arguments(node, ["tensors", "dim"])
        parts = kwargs["tensors"]
        if isinstance(parts, fx.Node):  # the whole result of a split
            return False
        return rules_shapes.lower_concatenate(builder, node, list(parts), kwargs.get("dim", 0))
    if _lower_layer(builder, node):
        return True
    if (
        not args
        or not isinstance(args[0], fx.Node)
        or not isinstance(args[0].meta["value"], Tensor)
    ):
        return False
    return _lower_unary(builder, node, args[0], str(name))


def _lower_unary(builder: ProgramBuilder, node: fx.Node, source: fx.Node, name: str) -> bool:
    """Lower a function or method of one tensor."""
    layout, dims = builder.layout(source), source.meta["value"].dim()
    is_channelwise = (
        name in CHANNELWISE_METHODS
        if node.op == "call_method"
        else node.target in CHANNELWISE_FUNCTIONS
    )
    if is_channelwise and _has_no_other_tensor(node, source):
        return rules_shapes.lower_channelwise(builder, node, source)
    if name == "size":
        return rules_shapes.lower_channelwise(builder, node, source)
    if name in RESHAPES:
        return rules_shapes.lower_reshape(builder, node, source)
    if name in {"expand", "expand_as"}:
        return rules_shapes.lower_expand(builder, node, source)
    if name in {"permute", "transpose", "swapaxes"}:
        return rules_shapes.lower_permute(
            builder, node, source, _find_permutation(node, source, name)
        )
    if name in REDUCTIONS:
        kwargs = _bind_arguments(node, ["input", "dim", "keepdim"])
        if name in {"var", "std"} and not isinstance(kwargs.get("dim"), int | tuple | list):
            return False
        return rules_shapes.lower_reduce(
            builder, node, source, kwargs.get("dim"), bool(kwargs.get("keepdim", False))
        )
    if name in {"chunk", "split", "narrow"}:
        dim, bounds = _find_bounds(node, source, name)
        return rules_shapes.lower_split(builder, node, source, dim, bounds)
    if name in {"softmax", "log_softmax"}:
        over = _bind_arguments(node, ["input", "dim"]).get("dim")
        if layout is None or not isinstance(over, int) or over % dims == layout.axis:
            return False
        return rules_shapes.lower_channelwise(builder, node, source)
    if name == "pad":
        padding = _bind_arguments(node, ["input", "pad"])["pad"]
        if layout is None or len(padding) > 2 * (dims - 1 - layout.axis):
            return False
        return rules_shapes.lower_channelwise(builder, node, source)
    return _lower_functional_norm(builder, node, source, name)


def _lower_functional_norm(
    builder: ProgramBuilder, node: fx.Node, source: fx.Node, name: str
) -> bool:
    if name == "batch_norm":
        parameters = ["input", "mean", "variance", "weight", "bias", "training", "momentum", "eps"]
        kwargs = _bind_arguments(node, parameters)
        kwargs["mean"] = kwargs.get("mean", kwargs.get("running_mean"))
        kwargs["variance"] = kwargs.get("variance", kwargs.get("running_var"))
        names = {
            key: builder.param_name(kwargs.get(key))
            for key in ("mean", "variance", "weight", "bias")
        }
        if any(kwargs.get(key) is not None and names[key] is None for key in names):
            return False
        if not kwargs.get("training", False):
            return False
        norm = Norm(source, names["weight"], names["bias"], kwargs.get("eps", 1e-5))
        statistics = (names["mean"], names["variance"], None)
        return rules_layers.lower_batch_norm(
            builder, node, norm, statistics, kwargs.get("momentum", 0.1)
        )
    if name in {"group_norm", "layer_norm"}:
        kwargs = _bind_arguments(node, ["input", "extent", "weight", "bias", "eps"])
        extent = kwargs.get("extent", kwargs.get("num_groups", kwargs.get("normalized_shape")))
        weight, bias = (
            builder.param_name(kwargs.get("weight")),
            builder.param_name(kwargs.get("bias")),
        )
        if (kwargs.get("weight") is None) != (weight is None):
            return False
        if (kwargs.get("bias") is None) != (bias is None):
            return False
        norm = Norm(source, weight, bias, kwargs.get("eps", 1e-5))
        rule: Callable[..., bool] = (
            rules_layers.lower_group_norm if name == "group_norm" else rules_layers.lower_layer_norm
        )
        return rule(builder, node, norm, extent)
    if name == "local_response_norm":
        kwargs = _bind_arguments(node, ["input", "size", "alpha", "beta", "k"])
        options = (kwargs.get("alpha", 1e-4), kwargs.get("beta", 0.75), kwargs.get("k", 1.0))
        return rules_layers.lower_local_response_norm(
            builder, node, source, kwargs["size"], options
        )
    if name == "prelu":
        weight = builder.param_name(_bind_arguments(node, ["input", "weight"])["weight"])
        return weight is not None and rules_layers.lower_prelu(builder, node, source, weight)
    return False


def _has_no_other_tensor(node: fx.Node, source: fx.Node) -> bool:
    return all(
        other is source or not isinstance(other.meta["value"], Tensor)
        for other in node.all_input_nodes
    )


def _find_permutation(node: fx.Node, source: fx.Node, name: str) -> list[int]:
    dims = source.meta["value"].dim()
    if name == "permute":
        axes: Any = node.kwargs.get("dims") or node.args[1:]
        return list(axes[0] if isinstance(axes[0], tuple | list) else axes)
    pair: Any = node.args[1:3] or [node.kwargs["dim0"], node.kwargs["dim1"]]
    first, second = (dim % dims for dim in pair)
    order = list(range(dims))
    order[first], order[second] = order[second], order[first]
    return order


def _find_bounds(node: fx.Node, source: fx.Node, name: str) -> tuple[int, list[tuple[int, int]]]:
    if name == "narrow":
        kwargs = _bind_arguments(node, ["input", "dim", "start", "length"])
        dim, value = kwargs["dim"], node.meta["value"]
        start = kwargs["start"]
        if isinstance(start, int):  # else along the batch
            start %= source.meta["value"].shape[dim]
            return dim, [(start, start + value.shape[dim])]
        return dim, [(0, value.shape[dim])]
    dim = _bind_arguments(node, ["input", "sizes", "dim"]).get("dim", 0)
    bounds, start = [], 0
    for part in node.meta["value"]:
        bounds.append((start, start + part.shape[dim]))
        start = bounds[-1][1]
    return dim, bounds


def lower_dense(builder: ProgramBuilder, node: fx.Node) -> None:
    """Lower an operation without a rule, on all channels."""
    module = builder.modules[str(node.target)] if node.op == "call_module" else None
    kind = type(module).__name__ if module else getattr(node.target, "__name__", node.target)
    slots = {
        source: builder.densify(source, node.name, f"{kind} mixes channels in a way no rule covers")
        if builder.layouts(source) is None
        else _fix_parts(builder, source, node)
        for source in node.all_input_nodes
    }
    param_names = {}
    if module is not None:
        for name in module.state_dict():
            full_name = builder.tensor_name(str(node.target), name)
            if full_name is not None:
                builder.record_slicing(full_name)
                param_names[name] = full_name
    builder.track_gradient(node, *param_names.values())
    macs = _measure_macs(builder, node)
    if macs:
        builder.record_cost(
            node, str(node.target) if module else node.name, (ChannelSpan(1),), None, macs
        )
    if module is None or not param_names:
        builder.replay(node, None, slots)
        return
    args, kwargs = replace_nodes((node.args, node.kwargs), slots.__getitem__)
    module_copy = builder.copy_module(module)

    def run(environment: Environment, bound: BoundProgram) -> Any:
        params = {name: bound.params[full_name] for name, full_name in param_names.items()}
        return functional_call(
            module_copy,
            params,
            resolve_slots(args, environment),
            resolve_slots(kwargs, environment),
        )

    builder.emit(node, run, slots.values(), None)


def _fix_parts(builder: ProgramBuilder, source: fx.Node, node: fx.Node) -> int:
    """Return the slot of a tuple whose parts keep all channels."""
    builder.fix(span for layout in builder.layouts(source) or [] if layout for span in layout.spans)
    return builder.slot(source)


def _measure_macs(builder: ProgramBuilder, node: fx.Node) -> int:
    """Return the MACs per sample that torch counts for one operation."""
    if not any(isinstance(source.meta["value"], Tensor) for source in node.all_input_nodes):
        return 0  # a tensor factory
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda source: source.meta["value"])
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        if node.op == "call_module":
            module = copy.deepcopy(builder.modules[str(node.target)]).to("meta").train()
            module(*args, **kwargs)
        elif node.op == "call_method":
            getattr(args[0], str(node.target))(*args[1:], **kwargs)
        else:
            assert callable(node.target)
            node.target(*args, **kwargs)
    return int(counter.get_total_flops()) // 2 // BATCH
