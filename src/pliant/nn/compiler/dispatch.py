"""Select the rule that lowers each operation; without one, an operation runs on all channels."""

import copy
import operator
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.func import functional_call
from torch.utils.flop_counter import FlopCounterMode

from pliant.nn.compiler import rules_arithmetic as arithmetic
from pliant.nn.compiler import rules_layers as layers
from pliant.nn.compiler import rules_shapes as shapes
from pliant.nn.compiler.builder import Builder
from pliant.nn.compiler.channels import ChannelSpan
from pliant.nn.compiler.program import BoundProgram, Env, LayerCost, replace_nodes, resolve_slots
from pliant.nn.compiler.rules_layers import CONVOLUTIONS, Layer, Norm
from pliant.nn.compiler.trace import BATCH, find_callable

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


def lower_node(builder: Builder, node: fx.Node) -> None:
    """Add a node's instructions and record its layout."""
    if node.op == "placeholder":
        builder.add_input(node)
    elif node.op == "get_attr":
        return  # loaded on first use
    elif not (
        _lower_module(builder, node) if node.op == "call_module" else _lower_call(builder, node)
    ):
        lower_dense(builder, node)


def match_layer(builder: Builder, node: fx.Node) -> Layer | None:
    """Describe a convolution or linear layer, whether module or function; None for others."""
    if node.op == "call_module":
        module, path = builder.modules[str(node.target)], str(node.target)
        weight, bias = builder.tensor_name(path, "weight"), builder.tensor_name(path, "bias")
        source: Any = node.args[0] if node.args else node.kwargs["input"]
        if type(module) is nn.Linear and weight:
            return Layer(source, F.linear, weight, bias)
        if type(module) not in CONVOLUTIONS or not weight:
            return None
        padding, options = None, (module.stride, module.padding, module.dilation)
        if module.padding_mode != "zeros":
            padding = (str(module.padding_mode), module._reversed_padding_repeated_twice)
            options = (module.stride, 0, module.dilation)
        function, groups = CONVOLUTIONS[type(module)], int(str(module.groups))
        return Layer(source, function, weight, bias, options, groups, padding)
    if node.op == "call_function" and node.target in {*CONVOLUTIONS.values(), F.linear}:
        kwargs = _bind(node, "input weight bias stride padding dilation groups")
        names = _find_params(builder, kwargs, "weight", "bias")
        if names is None or names[0] is None:
            return None
        if node.target is F.linear:
            return Layer(kwargs["input"], F.linear, names[0], names[1])
        options = (kwargs.get("stride", 1), kwargs.get("padding", 0), kwargs.get("dilation", 1))
        groups = kwargs.get("groups", 1)
        return Layer(kwargs["input"], node.target, names[0], names[1], options, groups)
    return None


def find_candidates(builder: Builder, graph: fx.Graph) -> dict[str, int]:
    """Return the layers whose filters may be dropped, with their number of filters."""
    matches = (match_layer(builder, node) for node in graph.nodes)
    weights = [layer.weight for layer in matches if layer is not None and layer.groups == 1]
    filters = {weight: builder.shape(weight)[0] for weight in weights}
    return {weight: count for weight, count in filters.items() if count > 1}


def _bind(node: fx.Node, names: str) -> dict[str, Any]:
    """Return a call's arguments by name, given the names of the positional ones."""
    return {**dict(zip(names.split(), node.args, strict=False)), **node.kwargs}


def _find_params(builder: Builder, kwargs: dict[str, Any], *keys: str) -> list[str | None] | None:
    """Return the parameters passed under these keys; None if one of them is another value."""
    names = [builder.param_name(kwargs.get(key)) for key in keys]
    is_other = [
        kwargs.get(key) is not None and name is None for key, name in zip(keys, names, strict=True)
    ]
    return None if any(is_other) else names


def _lower_module(builder: Builder, node: fx.Node) -> bool:
    module, path = builder.modules[str(node.target)], str(node.target)
    source = node.args[0] if node.args else None
    if len(node.all_input_nodes) != 1 or not isinstance(source, fx.Node):
        return False
    layer = match_layer(builder, node)
    if layer is not None and layers.lower_layer(builder, node, layer):
        return True
    if isinstance(module, CHANNELWISE_MODULES):
        return shapes.lower_channelwise(builder, node, source)
    if isinstance(module, nn.Flatten | nn.Unflatten):
        return shapes.lower_reshape(builder, node, source)
    names = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
    weight, bias, *statistics = (builder.tensor_name(path, name) for name in names)
    norm = Norm(source, weight, bias, getattr(module, "eps", 0.0))
    if isinstance(module, layers.BATCH_NORMS):
        return layers.lower_batch_norm(builder, node, norm, statistics, module.momentum)
    if isinstance(module, nn.GroupNorm):
        return layers.lower_group_norm(builder, node, norm, module.num_groups)
    if isinstance(module, layers.INSTANCE_NORMS) and not module.track_running_stats:
        return layers.lower_instance_norm(builder, node, norm)
    if isinstance(module, nn.LayerNorm):
        return layers.lower_layer_norm(builder, node, norm, module.normalized_shape)
    if isinstance(module, nn.LocalResponseNorm):
        options = (module.alpha, module.beta, module.k)
        return layers.lower_local_response_norm(builder, node, source, module.size, options)
    if isinstance(module, nn.PReLU) and weight is not None:
        return layers.lower_prelu(builder, node, source, weight)
    return False


def _lower_call(builder: Builder, node: fx.Node) -> bool:
    target, args = node.target, node.args
    if target in {operator.getitem, getattr} and isinstance(args[0], fx.Node):
        is_getitem = target is operator.getitem
        return is_getitem and shapes.lower_getitem(builder, node, args[0], args[1])
    kind = arithmetic.BINARY_OPERATIONS.get(target)
    if kind is not None and len(args) == 2 and not node.kwargs:
        return arithmetic.lower_binary(builder, node, args[0], args[1], kind)
    name = target if isinstance(target, str) else getattr(target, "__name__", "")
    if name in {"cat", "concat", "concatenate"}:
        kwargs = _bind(node, "tensors dim")
        parts = kwargs["tensors"]
        if isinstance(parts, fx.Node):  # the whole result of a split
            return False
        return shapes.lower_concatenate(builder, node, list(parts), kwargs.get("dim", 0))
    layer = match_layer(builder, node)
    if layer is not None and layers.lower_layer(builder, node, layer):
        return True
    if not args or not isinstance(args[0], fx.Node):
        return False
    is_tensor = isinstance(args[0].meta["value"], Tensor)
    return is_tensor and _lower_unary(builder, node, args[0], str(name))


def _lower_unary(builder: Builder, node: fx.Node, source: fx.Node, name: str) -> bool:
    """Lower a function or method of one tensor."""
    if name == "size" or _is_channelwise(builder, node, source, name):
        return shapes.lower_channelwise(builder, node, source)
    if name in RESHAPES:
        return shapes.lower_reshape(builder, node, source)
    if name in {"expand", "expand_as"}:
        return shapes.lower_expand(builder, node, source)
    if name in {"permute", "transpose", "swapaxes"}:
        order = _find_permutation(node, source, name)
        return shapes.lower_permute(builder, node, source, order)
    if name in REDUCTIONS:
        kwargs = _bind(node, "input dim keepdim")
        dims, keepdim = kwargs.get("dim"), bool(kwargs.get("keepdim", False))
        if name in {"var", "std"} and not isinstance(dims, int | tuple | list):
            return False
        return shapes.lower_reduce(builder, node, source, dims, keepdim)
    if name in {"chunk", "split", "narrow"}:
        return shapes.lower_split(builder, node, source, *_find_bounds(node, source, name))
    return _lower_functional_norm(builder, node, source, name)


def _is_channelwise(builder: Builder, node: fx.Node, source: fx.Node, name: str) -> bool:
    layout, dims = builder.layout(source), source.meta["value"].dim()
    if name in {"softmax", "log_softmax"}:
        dim = _bind(node, "input dim").get("dim")
        return layout is not None and isinstance(dim, int) and dim % dims != layout.axis
    if name == "pad":
        padding = _bind(node, "input pad")["pad"]
        return layout is not None and len(padding) <= 2 * (dims - 1 - layout.axis)
    is_method = node.op == "call_method"
    is_listed = name in CHANNELWISE_METHODS if is_method else node.target in CHANNELWISE_FUNCTIONS
    others = [other.meta["value"] for other in node.all_input_nodes if other is not source]
    return is_listed and not any(isinstance(value, Tensor) for value in others)


def _lower_functional_norm(builder: Builder, node: fx.Node, source: fx.Node, name: str) -> bool:
    if name == "batch_norm":
        kwargs = _bind(node, "input running_mean running_var weight bias training momentum eps")
        names = _find_params(builder, kwargs, "weight", "bias", "running_mean", "running_var")
        if names is None or not kwargs.get("training", False):
            return False
        norm = Norm(source, names[0], names[1], kwargs.get("eps", 1e-5))
        statistics = (names[2], names[3], None)
        return layers.lower_batch_norm(builder, node, norm, statistics, kwargs.get("momentum", 0.1))
    if name in {"group_norm", "layer_norm"}:
        is_group = name == "group_norm"
        extent = "num_groups" if is_group else "normalized_shape"
        kwargs = _bind(node, f"input {extent} weight bias eps")
        names = _find_params(builder, kwargs, "weight", "bias")
        if names is None:
            return False
        norm = Norm(source, names[0], names[1], kwargs.get("eps", 1e-5))
        rule: Any = layers.lower_group_norm if is_group else layers.lower_layer_norm
        return bool(rule(builder, node, norm, kwargs[extent]))
    if name == "local_response_norm":
        kwargs = _bind(node, "input size alpha beta k")
        options = (kwargs.get("alpha", 1e-4), kwargs.get("beta", 0.75), kwargs.get("k", 1.0))
        return layers.lower_local_response_norm(builder, node, source, kwargs["size"], options)
    if name == "prelu":
        weight = builder.param_name(_bind(node, "input weight")["weight"])
        return weight is not None and layers.lower_prelu(builder, node, source, weight)
    return False


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
    value = node.meta["value"]
    if name == "narrow":
        kwargs = _bind(node, "input dim start length")
        dim, start = kwargs["dim"], kwargs["start"]
        # along the batch, the start may be a traced number
        start = start % source.meta["value"].shape[dim] if isinstance(start, int) else 0
        return dim, [(start, start + value.shape[dim])]
    dim = _bind(node, "input sizes dim").get("dim", 0)
    return dim, list(pairwise([0, *accumulate(part.shape[dim] for part in value)]))


def lower_dense(builder: Builder, node: fx.Node) -> None:
    """Lower an operation without a rule, on all channels."""
    module = builder.modules[str(node.target)] if node.op == "call_module" else None
    kind = type(module).__name__ if module else getattr(node.target, "__name__", node.target)
    slots = {}
    for source in node.all_input_nodes:
        parts = builder.layouts(source)
        if parts is None:
            reason = f"{kind} mixes channels in a way no rule covers"
            slots[source] = builder.densify(source, node.name, reason)
        else:  # a tuple, whose parts must keep all channels
            builder.fix(span for layout in parts if layout for span in layout.spans)
            slots[source] = builder.slot(source)
    names = {}
    for name in module.state_dict() if module else ():
        full_name = builder.tensor_name(str(node.target), name)
        if full_name is not None:
            builder.record_slicing(full_name)
            names[name] = full_name
    macs = _measure_macs(builder, node)
    if macs:
        layer = str(node.target) if module else node.name
        builder.record_cost(node, LayerCost(layer, macs, (ChannelSpan(1),), None))
    if module is None or not names:
        builder.replay(node, None, slots)
        return
    args, kwargs = replace_nodes((node.args, node.kwargs), slots.__getitem__)
    replica = copy.deepcopy(module).train()

    def run(env: Env, bound: BoundProgram) -> Any:
        params = {name: bound.params[full_name] for name, full_name in names.items()}
        return functional_call(
            replica, params, resolve_slots(args, env), resolve_slots(kwargs, env)
        )

    builder.emit(node, run, slots.values(), None, *names.values())


def _measure_macs(builder: Builder, node: fx.Node) -> int:
    """Return the MACs per sample that torch counts for one operation."""
    if not any(isinstance(source.meta["value"], Tensor) for source in node.all_input_nodes):
        return 0  # a tensor factory
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda source: source.meta["value"])
    call = find_callable(node, lambda path: copy.deepcopy(builder.modules[path]).to("meta").train())
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        call(*args, **kwargs)
    return int(counter.get_total_flops()) // 2 // BATCH
