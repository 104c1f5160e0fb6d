"""Select the rule that lowers each operation; without one, an operation runs on all channels."""

import inspect
import operator
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.func import functional_call
from torch.utils.flop_counter import FlopCounterMode

from pliant.nn.compiler import rules_arithmetic as arithmetic
from pliant.nn.compiler import rules_attention as attention
from pliant.nn.compiler import rules_layers as layers
from pliant.nn.compiler import rules_shapes as shapes
from pliant.nn.compiler.builder import Builder
from pliant.nn.compiler.channels import ChannelSpan
from pliant.nn.compiler.computed_weights import find_root, slice_parts
from pliant.nn.compiler.coupling import Candidate
from pliant.nn.compiler.idioms import (
    PERMUTATIONS,
    find_permutation,
    shuffle_channels,
    standardise,
)
from pliant.nn.compiler.program import BoundProgram, Env, LayerCost, replace_nodes, resolve_slots
from pliant.nn.compiler.refusals import copy_module, copy_to_meta, has_hooks
from pliant.nn.compiler.rules_attention import Embedding
from pliant.nn.compiler.rules_layers import CONVOLUTIONS, TRANSPOSED, Layer
from pliant.nn.compiler.rules_norms import NORM_RULES, Norm
from pliant.nn.compiler.rules_recurrent import RECURRENT, lower_recurrent
from pliant.nn.compiler.shared_masks import PRODUCTS
from pliant.nn.compiler.trace import BATCH, find_callable
from pliant.nn.compiler.written_out import add_bias

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
LAYER_FUNCTIONS: dict[Any, Any] = {  # by module or function
    nn.Linear: F.linear, F.linear: F.linear, **CONVOLUTIONS, **TRANSPOSED,
    **{function: function for function in (*CONVOLUTIONS.values(), *TRANSPOSED.values())},
}  # fmt: skip
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
FACTORIES = {"new_empty", "new_zeros", "new_ones", "new_full"}  # read a type and a device only
REDUCTIONS = {"mean", "sum", "amax", "amin", "var", "std"}


def lower_node(builder: Builder, node: fx.Node) -> None:
    """Add a node's instructions and record its layout."""
    if node.op == "placeholder":
        builder.add_input(node)
    elif node.op == "get_attr" or builder.param_view(node) is not None:
        return  # loaded on first use
    elif not (
        _lower_module(builder, node) if node.op == "call_module" else _lower_call(builder, node)
    ):
        lower_dense(builder, node)


def match_layer(builder: Builder, node: fx.Node) -> Layer | None:
    """Describe a convolution or linear layer, whether module or function; None for others."""
    module = builder.modules[str(node.target)] if node.op == "call_module" else None
    function = LAYER_FUNCTIONS.get(type(module) if module else node.target)
    if module is not None and has_hooks(module):
        return None
    if function is None:
        return None
    is_transposed = function in TRANSPOSED.values()
    names = "input weight bias stride padding dilation groups"
    if is_transposed:
        names = "input weight bias stride padding output_padding groups dilation"
    computed = find_root(_bind(node, names).get("weight")) if node.op == "call_function" else None
    arguments, params = _read_arguments(builder, node, names, computed)
    if params is None or (weight := params["weight"]) is None:
        return None
    source, own = arguments["input"], arguments["weight"] if computed is not None else None
    if is_transposed and (node.op == "call_module" and len(node.args) + len(node.kwargs) != 1):
        return None  # with the size of the result
    if function is F.linear:
        return Layer(source, F.linear, weight, params["bias"], computed=own)
    arguments = {"stride": 1, "padding": 0, "dilation": 1, "groups": 1, **arguments}
    options = (arguments["stride"], arguments["padding"], arguments["dilation"])
    padding = None
    if is_transposed:
        extra = arguments.get("output_padding", 0)
        groups = arguments["groups"]
        return Layer(source, function, weight, params["bias"], options, groups, None, extra, own)
    if arguments.get("padding_mode", "zeros") != "zeros":
        padding = (arguments["padding_mode"], arguments["_reversed_padding_repeated_twice"])
        options = (arguments["stride"], 0, arguments["dilation"])
    groups = arguments["groups"]
    return Layer(source, function, weight, params["bias"], options, groups, padding, computed=own)


def find_candidates(builder: Builder, graph: fx.Graph) -> dict[str, Candidate]:
    """Return the layers whose filters may be dropped, by their weights."""
    candidates: dict[str, Candidate] = {}
    excluded = set()  # used in two ways
    for node in graph.nodes:
        if (table := match_embedding(builder, node)) is not None:
            weight, dim, is_flat, groups = table.weight, 1, False, 1
        elif (layer := match_layer(builder, node)) is not None and layers.may_drop(builder, layer):
            is_flat = layer.function is F.linear and node.meta["value"].dim() == 2
            weight, dim, groups = layer.weight, layer.output_dim, layer.groups
        else:
            continue
        previous = candidates.get(weight)
        is_flat = is_flat and (previous is None or previous.is_flat)
        if previous is not None and previous.dim != dim:
            excluded.add(weight)
        candidates[weight] = Candidate(builder.shape(weight)[dim] // groups, dim, is_flat)
    return {
        weight: candidate
        for weight, candidate in candidates.items()
        if candidate.outputs > 1 and weight not in excluded
    }


def slice_computed_weights(builder: Builder, graph: fx.Graph) -> None:
    """Slice what weights are computed from, before it is lowered."""
    for node in graph.nodes:
        if node.op == "call_function" and node.target in LAYER_FUNCTIONS:
            layer = match_layer(builder, node)
            if layer is not None and layer.computed is not None:
                slice_parts(builder, layer)


def match_embedding(builder: Builder, node: fx.Node) -> Embedding | None:
    """Describe a table of vectors, whether module or function; None for others."""
    module = builder.modules[str(node.target)] if node.op == "call_module" else None
    if (type(module) if module else node.target) not in (nn.Embedding, F.embedding):
        return None
    if module is not None and has_hooks(module):
        return None
    names = "input weight padding_idx max_norm norm_type scale_grad_by_freq sparse"
    arguments, params = _read_arguments(builder, node, names)
    changes = [arguments.get(name) for name in ("max_norm", "scale_grad_by_freq", "sparse")]
    if params is None or params["weight"] is None or any(changes):
        return None
    source = arguments["input"]
    is_traced = isinstance(source, fx.Node)
    padding = arguments.get("padding_idx")
    return Embedding(source, params["weight"], padding) if is_traced else None


def _bind(node: fx.Node, names: str) -> dict[str, Any]:
    """Return a call's arguments by name, given the names of the positional ones."""
    return {**dict(zip(names.split(), node.args, strict=False)), **node.kwargs}


def _read_arguments(
    builder: Builder, node: fx.Node, names: str, root: fx.Node | None = None
) -> tuple[dict[str, Any], dict[str, str | None] | None]:
    """Return a layer's arguments and the names of its parameters; None if one is computed.

    The attributes of a module have the names of the arguments of its function. A weight that is
    computed from `root` has its name.
    """
    keys = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
    if node.op == "call_module":
        path = str(node.target)
        arguments = {**vars(builder.modules[path]), **_bind(node, "input")}
        return arguments, {key: builder.tensor_name(path, key) for key in keys}
    arguments = _bind(node, names)
    params = {key: builder.param_name(arguments.get(key)) for key in keys}
    if root is not None:
        params["weight"] = builder.param_name(root)
    is_computed = [arguments.get(key) is not None and params[key] is None for key in keys]
    return arguments, None if any(is_computed) else params


def _lower_module(builder: Builder, node: fx.Node) -> bool:
    module, source = builder.modules[str(node.target)], node.args[0] if node.args else None
    if not isinstance(source, fx.Node) or len(node.all_input_nodes) != 1 or has_hooks(module):
        return False
    layer = match_layer(builder, node)
    if layer is not None and layers.lower_layer(builder, node, layer):
        return True
    if (table := match_embedding(builder, node)) is not None:
        return attention.lower_embedding(builder, node, table)
    if isinstance(module, CHANNELWISE_MODULES):
        return shapes.lower_channelwise(builder, node, source)
    if isinstance(module, nn.Flatten | nn.Unflatten):
        return shapes.lower_reshape(builder, node, source)
    if isinstance(module, RECURRENT) and builder.layout(source) is not None:
        return lower_recurrent(builder, node, source, module, _measure_macs(builder, node))
    if isinstance(module, nn.ChannelShuffle):
        return shapes.lower_shuffle(builder, node, source, 1, module.groups)
    return type(module) in NORM_RULES and _lower_norm(builder, node, source, type(module))


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
    if (table := match_embedding(builder, node)) is not None:
        return attention.lower_embedding(builder, node, table)
    if not args or not isinstance(args[0], fx.Node):
        return False
    if target in PRODUCTS and all(isinstance(side, fx.Node) for side in args[:2]):
        return attention.lower_matrix_product(builder, node, args[0], args[1])
    if target is F.scaled_dot_product_attention:
        names = "query key value attn_mask dropout_p is_causal"
        return attention.lower_attention(builder, node, _bind(node, names))
    is_tensor = isinstance(args[0].meta["value"], Tensor)
    return is_tensor and _lower_unary(builder, node, args[0], str(name))


def _lower_unary(builder: Builder, node: fx.Node, source: fx.Node, name: str) -> bool:
    """Lower a function or method of one tensor."""
    if name in FACTORIES:
        slots = {other: builder.slot(other) for other in node.all_input_nodes}
        return builder.replay(node, None, slots)
    if name == "size" or _is_channelwise(builder, node, source, name):
        return shapes.lower_channelwise(builder, node, source)
    if name in RESHAPES:
        return shapes.lower_reshape(builder, node, source)
    if name in {"expand", "expand_as"}:
        return shapes.lower_expand(builder, node, source)
    if name in PERMUTATIONS:
        layout, order = builder.layout(source), find_permutation(node, source)
        axis = None if layout is None else order.index(layout.axis)
        return shapes.lower_channelwise(builder, node, source, axis)
    if name in REDUCTIONS:
        dims = _bind(node, "input dim").get("dim")
        # by its shape, as the position of `keepdim` differs
        keepdim = node.meta["value"].dim() == source.meta["value"].dim()
        if name in {"var", "std"} and not isinstance(dims, int | tuple | list):
            return False
        return shapes.lower_reduce(builder, node, source, dims, keepdim)
    if name == "unbind":
        return shapes.lower_unbind(builder, node, source, _bind(node, "input dim").get("dim", 0))
    if node.target is torch._weight_norm:
        return arithmetic.lower_weight_norm(builder, node, **_bind(node, "weight size dim"))
    if node.target is shuffle_channels:
        options = _bind(node, "input axis groups")
        return shapes.lower_shuffle(builder, node, source, options["axis"], options["groups"])
    if name in {"channel_shuffle", "native_channel_shuffle"}:
        groups = _bind(node, "input groups")["groups"]
        return shapes.lower_shuffle(builder, node, source, 1, groups)
    if name in {"chunk", "split", "narrow"}:
        return shapes.lower_split(builder, node, source, *_find_bounds(node, source, name))
    return node.target in NORM_RULES and _lower_norm(builder, node, source, node.target)


def _is_channelwise(builder: Builder, node: fx.Node, source: fx.Node, name: str) -> bool:
    layout, dims = builder.layout(source), source.meta["value"].dim()
    if node.target is standardise or name == "stochastic_depth":
        return True
    if name in {"softmax", "log_softmax"}:
        dim = _bind(node, "input dim").get("dim")
        return layout is not None and isinstance(dim, int) and dim % dims != layout.axis
    if name == "masked_fill" or node.target is add_bias:
        mask = _bind(node, "input mask value")["mask"].meta["value"]
        axis = layout.axis - (dims - mask.dim()) if layout is not None else -1
        return axis < 0 or mask.shape[axis] == 1
    if name == "pad":
        padding = _bind(node, "input pad")["pad"]
        return layout is not None and len(padding) <= 2 * (dims - 1 - layout.axis)
    is_method = node.op == "call_method"
    is_listed = name in CHANNELWISE_METHODS if is_method else node.target in CHANNELWISE_FUNCTIONS
    others = [other.meta["value"] for other in node.all_input_nodes if other is not source]
    return is_listed and not any(isinstance(value, Tensor) for value in others)


def _lower_norm(builder: Builder, node: fx.Node, source: fx.Node, target: Any) -> bool:
    """Lower a norm layer or PReLU."""
    names, defaults = "input weight", {}  # of PReLU, which has no signature
    if node.op == "call_function" and target is not F.prelu:
        signature = inspect.signature(getattr(F, target.__name__)).parameters
        names, defaults = " ".join(signature), {key: p.default for key, p in signature.items()}
    arguments, params = _read_arguments(builder, node, names)
    if params is None:
        return False
    return NORM_RULES[target](builder, node, Norm(source, params, {**defaults, **arguments}))


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
            spans = (span for layout in parts if layout for span in layout.spans)
            builder.fix(spans, f"{kind} reads several results at once")
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
    replica = copy_module(module)

    def run(env: Env, bound: BoundProgram) -> Any:
        params = {name: bound.params[full_name] for name, full_name in names.items()}
        return functional_call(
            replica, params, resolve_slots(args, env), resolve_slots(kwargs, env)
        )

    builder.emit(node, run, slots.values(), None, *names.values())


def _measure_macs(builder: Builder, node: fx.Node) -> int:
    """Return the MACs per sample that torch counts for one operation."""
    from torch.nn.attention import SDPBackend, sdpa_kernel  # slow to import, and rarely needed

    if not any(isinstance(source.meta["value"], Tensor) for source in node.all_input_nodes):
        return 0  # a tensor factory
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda source: source.meta["value"])
    call = find_callable(node, lambda path: copy_to_meta(builder.modules[path]))
    # torch does not count its fused attention on CPUs
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter, torch.no_grad():
        call(*args, **kwargs)
    return int(counter.get_total_flops()) // 2 // BATCH
